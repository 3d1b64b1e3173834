"""RIPT's update: advantages and losses by hand, behavior cloning as its special case, and what must change nothing."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learners import (
    KEY,
    REAL,
    SPEECHLESS,
    cloner,
    flow_errors,
    jitter,
    linear_policies,
    linear_policy,
    make_batch,
    steady,
    update,
)

from pirl.agents.ript import RIPTAgent, RIPTConfig, RolloutBatch, has_signal, leave_one_out, scale_advantages
from pirl.errors import ConfigError

ADVANTAGES = np.array([1.5, -0.5, 0.25, -3.0, 0.0, -1.0, 2.0, -0.1], np.float32)


@pytest.fixture(autouse=True)
def _linear():
    with linear_policies():
        yield


def ript(seed: int = 0, **changes: Any) -> RIPTAgent:
    config = RIPTConfig(**({"optimizer": steady(1e-2), "denoising_steps": 2} | changes))
    return RIPTAgent.create(config, linear_policy(seed), real_action_dim=REAL)


def rollouts(advantages: Any = ADVANTAGES, included: Any = None, **changes: Any) -> RolloutBatch:
    size = len(advantages)
    return RolloutBatch(
        chunks=make_batch(size),
        advantages=np.asarray(advantages, np.float32),
        included=np.ones(size, bool) if included is None else np.asarray(included),
        **changes,
    )


@jax.jit
def loss_and_gradient(agent: RIPTAgent, batch: RolloutBatch) -> Any:
    """Loss, metrics, and the largest element of the gradient."""

    def loss(parameters: Any) -> Any:
        return agent.compute_loss(batch, KEY, parameters)

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(agent.actor.params)
    return value, metrics, jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in gradient.values()]))


@jax.jit
def loss_alone(agent: RIPTAgent, batch: RolloutBatch) -> Any:
    return agent.compute_loss(batch, KEY)


# --- advantages --------------------------------------------------------------------------------------------------------

rewards = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20).map(np.array)


def test_an_advantage_is_the_distance_from_the_mean_of_the_others():
    for some, expected in (
        ([1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ([0, 2, 4, 10], [-16 / 3, -8 / 3, 0, 8]),
        ([1, 1, 1], [0, 0, 0]),
        ([1], [0]),
        ([], []),
    ):
        np.testing.assert_allclose(leave_one_out(np.array(some, np.float64)), expected, atol=1e-12)


@given(rewards)
def test_the_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards(some):
    advantages, scale = leave_one_out(some), np.abs(some).max() + 1
    assert abs(advantages.sum()) <= 1e-9 * scale
    others = [np.delete(some, index).mean() for index in range(len(some))]
    np.testing.assert_allclose(advantages, some - others, atol=1e-9 * scale)


@given(st.floats(-1e300, 1e300), st.integers(1, 50))
def test_a_group_of_equals_has_no_advantages_at_all(reward, count):
    assert not leave_one_out(np.full(count, reward)).any()


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20).map(lambda x: np.array(x, np.float64)))
def test_scaled_advantages_are_finite_and_of_deviation_one(some):
    scaled = scale_advantages(RIPTConfig(), some)
    assert np.isfinite(scaled).all()
    assert scale_advantages(RIPTConfig(normalize_advantages=False), some) is some
    if some.any():
        np.testing.assert_allclose(np.sqrt(np.mean(np.square(scaled))), 1.0, rtol=1e-9)
        # One factor for all of them: order and signs stay.
        top = np.abs(some).argmax()
        np.testing.assert_allclose(scaled, some / some[top] * scaled[top], rtol=1e-9, atol=1e-300)
        assert np.sign(scaled[top]) == np.sign(some[top])
    else:
        assert not scaled.any()


def test_only_with_positive_weights_are_there_episodes_without_a_signal():
    some = np.array([1.0, 0.0, -0.5])
    assert has_signal(RIPTConfig(weighting="positive"), some).tolist() == [True, False, False]
    for weighting in ("signed", "exp", "guidance"):
        assert has_signal(RIPTConfig(weighting=weighting), some).all()


# --- behavior cloning as a special case -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{}, {"loss_over": "real", "accumulation_steps": 2, "freeze": ("eye",), "ema_decay": None}]
)
def test_with_all_advantages_one_the_update_is_that_of_cloning_bit_for_bit(fields):
    """Six chunks: no count is a power of two, by which any division would be exact."""
    batch = rollouts(np.ones(6))
    clone, learner = cloner(**fields), ript(**fields)
    for number in range(2):
        key = jax.random.fold_in(KEY, number)
        (clone, theirs), (learner, ours) = update(clone, batch.chunks, key), update(learner, batch, key)
        ours_too = set(theirs) - {"bc/loss"}
        assert {name: float(ours[name]) for name in ours_too} == {name: float(theirs[name]) for name in ours_too}
        assert float(ours["actor/flow_loss"]) == float(theirs["loss"])
    assert learner.step == 2
    expected, found = jax.tree.leaves_with_path(clone.actor), jax.tree.leaves(learner.actor)
    for (path, theirs), mine in zip(expected, found, strict=True):
        np.testing.assert_array_equal(mine, theirs, err_msg=jax.tree_util.keystr(path))
    assert learner.parameter_counts() == clone.parameter_counts()


# --- the weighted losses by hand ---------------------------------------------------------------------------------------


def weights_by_hand(config: RIPTConfig, advantages: np.ndarray) -> list[float]:
    weights = []
    for advantage in advantages.tolist():
        if config.weighting == "exp":
            weights.append(min(math.exp(advantage / config.beta), config.max_weight))
        elif config.weighting == "positive":
            weights.append(advantage if advantage > 0 else 0.0)
        elif advantage >= 0:
            weights.append(advantage)
        else:
            weights.append(-config.negative_weight * min(-advantage, config.negative_clip))
    return weights


SOME = np.array([True, True, False, True, True, True, False, True])


@pytest.mark.parametrize("over", ["all", "real"])
@pytest.mark.parametrize(
    "fields",
    [
        {"weighting": "positive"},
        {"weighting": "exp", "beta": 0.5, "max_weight": 9.0},
        {"weighting": "signed", "negative_weight": 0.3, "negative_clip": 0.8, "negative_loss_limit": 1.7},
    ],
    ids=lambda fields: fields["weighting"],
)
def test_the_loss_is_that_of_its_formula_over_the_steps_that_are_included(fields, over):
    agent, batch = ript(loss_over=over, **fields), rollouts(included=SOME)
    config = agent.config
    counted = batch.chunks.valid if over == "real" else np.ones_like(batch.chunks.valid)
    errors = flow_errors(agent, batch.chunks, KEY, REAL if over == "real" else 3)
    total = plain = 0.0
    limited = 0
    for row in np.flatnonzero(SOME):
        weight = weights_by_hand(config, ADVANTAGES)[row]
        chunk = errors[row][counted[row]]
        plain += chunk.sum()
        if config.weighting == "signed" and weight < 0 and chunk.mean() > config.negative_loss_limit:
            chunk = np.full(len(chunk), config.negative_loss_limit)
            limited += 1
        total += weight * chunk.sum()
    steps = counted[SOME].sum()
    loss, metrics = loss_alone(agent, batch)
    np.testing.assert_allclose(loss, total / steps, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(metrics["actor/flow_loss"], plain / steps, rtol=1e-5)
    assert metrics["actor/limited"] == limited / 8
    assert metrics["data/valid_chunks"] == 6 / 8
    if config.weighting == "signed":
        assert 0 < limited < 4, "some repelled chunks on either side of the limit"


def test_what_is_not_included_changes_nothing_not_even_as_nan():
    agent = ript(weighting="signed")
    batch = rollouts(included=SOME)

    def fill(x: Any) -> Any:
        bad = np.nan if x.dtype == np.float32 else np.zeros((), x.dtype)
        return np.where(SOME.reshape(-1, *(1,) * (x.ndim - 1)), x, bad).astype(x.dtype)

    chunks = batch.chunks
    seen = dataclasses.replace(chunks.observations, state=fill(chunks.observations.state))
    damaged = dataclasses.replace(
        batch,
        chunks=dataclasses.replace(chunks, observations=seen, actions=fill(chunks.actions)),
        advantages=fill(batch.advantages),
    )
    assert np.isnan(damaged.chunks.actions).any()
    clean, poisoned = update(agent, batch, KEY), update(agent, damaged, KEY)
    for ours, theirs in zip(jax.tree.leaves(poisoned), jax.tree.leaves(clean), strict=True):
        assert np.isfinite(theirs).all()
        np.testing.assert_array_equal(ours, theirs)


def test_a_batch_in_which_nothing_is_included_teaches_nothing():
    loss, metrics, gradient = loss_and_gradient(ript(), rollouts(included=np.zeros(8, bool)))
    assert (loss, gradient, metrics["data/valid_chunks"]) == (0, 0, 0)


def test_positive_weights_learn_nothing_from_failures_and_limits_stop_repulsion():
    failures = rollouts(-np.linspace(0.1, 3.0, 8))
    loss, _, gradient = loss_and_gradient(ript(weighting="positive"), failures)
    assert (loss, gradient) == (0, 0)
    limit = {"weighting": "signed", "negative_weight": 0.5, "negative_clip": 2.0}
    # Every chunk is beyond a tiny limit: no gradient, and the loss at its bound but for advantages that are not clipped.
    loss, metrics, gradient = loss_and_gradient(ript(**limit, negative_loss_limit=1e-3), failures)
    assert (metrics["actor/limited"], gradient) == (1, 0)
    np.testing.assert_allclose(loss, -0.5 * 1e-3 * np.minimum(np.linspace(0.1, 3.0, 8), 2.0).mean(), rtol=1e-5)
    loss, metrics, gradient = loss_and_gradient(ript(**limit, negative_loss_limit=1e3), failures)
    assert metrics["actor/limited"] == 0
    assert gradient > 0


def test_demonstrations_add_the_loss_of_cloning():
    agent, batch = ript(bc_loss_weight=0.5, loss_over="real"), rollouts(demonstrations=make_batch(512, seed=3))
    loss, metrics = loss_alone(agent, batch)
    np.testing.assert_allclose(loss, metrics["actor/loss"] + 0.5 * metrics["bc/loss"], rtol=1e-6)
    expected = flow_errors(agent, batch.demonstrations, KEY, REAL)[batch.demonstrations.valid].mean()
    by_itself, _ = jax.jit(RIPTAgent.compute_bc_loss)(agent, batch.demonstrations, KEY)
    np.testing.assert_allclose(by_itself, expected, rtol=1e-5)
    # Beside the others they have noise of their own.
    np.testing.assert_allclose(metrics["bc/loss"], expected, rtol=0.15)
    assert metrics["bc/loss"] != by_itself
    with pytest.raises(ConfigError, match="needs demonstrations"):
        jax.eval_shape(agent.compute_loss, rollouts(), KEY)


def test_the_whole_batch_in_parts_gives_the_same_update():
    batch = rollouts(included=SOME, demonstrations=make_batch(4, seed=3))
    fields = {"weighting": "signed", "loss_over": "real", "bc_loss_weight": 0.5}
    whole, metrics = update(ript(**fields), batch, KEY)
    cut, cut_metrics = update(ript(**fields, accumulation_steps=4), batch, KEY)
    for name, metric in metrics.items():
        np.testing.assert_allclose(cut_metrics[name], metric, rtol=1e-5, err_msg=name)
    for ours, theirs in zip(jax.tree.leaves(cut.actor), jax.tree.leaves(whole.actor), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


# --- rollouts ----------------------------------------------------------------------------------------------------------


def test_rollouts_integrate_the_flow_by_midpoints():
    """Two steps, each of which looks at the flow in its middle, as written down for the linear policy."""
    agent, batch, keys = ript(rollout_solver="midpoint", denoising_steps=4), make_batch(), jax.random.split(KEY, 8)
    eye, plan, mix = (np.asarray(agent.actor.params[name], np.float64) for name in ("eye", "plan", "mix"))
    seen = (batch.observations.state @ eye @ plan).reshape(batch.actions.shape)

    def flow(x: np.ndarray, time: float) -> np.ndarray:
        return x @ mix + seen * (1 + time)

    x = np.stack([np.asarray(jax.random.normal(key, batch.actions.shape[1:]), np.float64) for key in keys])
    for time in (1.0, 0.5):
        x = x - 0.5 * flow(x - 0.25 * flow(x, time), time - 0.25)
    np.testing.assert_allclose(
        jax.jit(RIPTAgent.act_in_rollout)(agent, batch.observations, keys), x, rtol=1e-4, atol=1e-5
    )


# --- drift, validation -------------------------------------------------------------------------------------------------


velocities = jax.jit(RIPTAgent.velocities)
drift = jax.jit(RIPTAgent.drift)


def test_drift_is_zero_against_oneself_and_grows_with_updates():
    agent, batch = ript(ema_decay=None), rollouts()
    chunks, learner, drifts = batch.chunks, agent, []
    before = velocities(agent, chunks, KEY)
    assert drift(agent, before, chunks, KEY) < 1e-12
    for number in range(3):
        learner, _ = update(learner, batch, jax.random.fold_in(KEY, number))
        drifts.append(float(drift(learner, before, chunks, KEY)))
    assert 1e-5 < drifts[0] < drifts[1] < drifts[2]
    apart = np.square(np.asarray(velocities(learner, chunks, KEY), np.float64) - before)[..., :REAL]
    np.testing.assert_allclose(drifts[-1], apart.mean(axis=-1)[chunks.valid].mean(), rtol=1e-4)
    # The flow at the draws of the loss: its distance from noise − actions is the loss itself.
    noise = jax.random.normal(jax.random.split(KEY, 3)[1], chunks.actions.shape)
    errors = np.square(np.asarray(before - (noise - chunks.actions), np.float64)).mean(axis=-1)
    np.testing.assert_allclose(errors, flow_errors(agent, chunks, KEY, 3), rtol=1e-4, atol=1e-6)


def test_the_average_drifts_acts_and_is_validated_as_in_cloning():
    @jax.jit
    def look(agent: Any, chunks: Any) -> Any:
        return agent.validate(chunks, KEY), agent.act(chunks.observations, KEY)

    chunks, agents = make_batch(), (cloner(loss_over="real"), ript(loss_over="real"))
    clone, learner = (
        dataclasses.replace(agent, actor=dataclasses.replace(agent.actor, ema_params=jitter(agent.actor.ema_params, 4)))
        for agent in agents
    )
    expected, found = look(clone, chunks), look(learner, chunks)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert np.abs(look(agents[1], chunks)[1] - found[1]).max() > 1e-2
    assert drift(learner, velocities(agents[1], chunks, KEY), chunks, KEY) > 1e-2


@pytest.mark.usefixtures("unchecked_signatures")
def test_numbers_that_cannot_be_are_refused():
    for wrong in ({"weighting": "negative"}, {"beta": 0.0}, {"max_weight": math.nan}, {"cond_dropout": 1.5}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            RIPTConfig(**wrong)


def test_guidance_needs_a_model_with_a_prompt():
    policy = linear_policy()
    policy.config = SPEECHLESS
    with pytest.raises(ConfigError, match="max_token_len = 0"):
        RIPTAgent.create(RIPTConfig(weighting="guidance"), policy)
