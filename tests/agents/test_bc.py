"""Behavior cloning: OpenPI's own training steps, and the same on a policy whose losses can be written down."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learners import KEY, REAL, cloner, flow_errors, linear_policies, make_batch, update

from golden import arrays, content, model, needs_golden, observation
from pirl.agents.bc import BCAgent
from pirl.agents.config import BCConfig, OptimizerConfig
from pirl.data.chunks import ChunkBatch
from pirl.errors import ConfigError


@pytest.fixture
def linear():
    with linear_policies():
        yield


@needs_golden
@pytest.mark.parametrize(
    "name", ["pi0_tiny_lora", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pi0_tiny", "pi05_tiny"))]
)
def test_three_updates_equal_openpi(name):
    """Augmentation, loss, LoRA's freezing, AdamW and the norms that are reported, step after step."""
    policy, (obs, inputs) = model(name), observation(name)
    recorded, described = arrays("models", name, "train_steps.npz"), content("models", name, "train_steps.json")
    train = described["train_config"]
    schedule, adam = train["lr_schedule"], train["optimizer"]
    config = BCConfig(
        ema_decay=train["ema_decay"],
        optimizer=OptimizerConfig(
            peak_lr=schedule["peak_lr"],
            warmup_steps=schedule["warmup_steps"],
            decay_steps=schedule["decay_steps"],
            end_lr=schedule["decay_lr"],
            clip_norm=adam["clip_gradient_norm"],
            **{key: adam[key] for key in ("b1", "b2", "eps", "weight_decay")},
        ),
    )
    b, steps, _ = inputs["actions"].shape
    batch = ChunkBatch(
        observations=obs,
        actions=inputs["actions"],
        valid=np.ones((b, steps), bool),
        rewards=np.zeros((b, 1), np.float32),
        terminals=np.zeros((b, 1), bool),
        masks=np.ones((b, 1), bool),
        next_observations=obs,
        next_terminal=np.zeros(b, bool),
        sequence_mask=np.ones(b, bool),
        success=np.ones(b, bool),
    )
    agent = BCAgent.create(config, policy)
    begun = agent.actor
    train_key = jax.random.split(jax.random.key(train["seed"]))[0]
    for index, info in enumerate(described["infos"]):
        agent, metrics = update(agent, batch, jax.random.fold_in(train_key, index))
        np.testing.assert_allclose(metrics["loss"], info["loss"], rtol=1e-4)
        np.testing.assert_allclose(metrics["lr/policy"], info["lr_used"], rtol=1e-6)
        np.testing.assert_allclose(metrics["param_norm/policy"], info["param_norm"], rtol=1e-4)
        # After an update, elements whose gradient is rounding noise stand elsewhere (FACTS.md §10).
        np.testing.assert_allclose(metrics["grad_norm/policy"], info["grad_norm"], rtol=1e-3 if index else 1e-4)
    assert sorted(agent.actor.params) == sorted(content("models", name, "trainable.json")["trainable"])
    rounded = {key.removeprefix("step2/params/") for key in described["bf16_leaves"] if key.startswith("step2/")}
    assert set(agent.actor.frozen_params) == rounded
    for path, leaf in agent.actor.frozen_params.items():
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_array_equal(leaf, begun.frozen_params[path])
        np.testing.assert_array_equal(leaf.astype(np.float32), recorded[f"step2/params/{path}"])
    recorded_of = {path: recorded.get(f"step2/params/{path}") for path in agent.actor.params}
    for path, expected in ((path, leaf) for path, leaf in recorded_of.items() if leaf is not None):
        leaf = agent.actor.params[path]
        close = np.isclose(leaf, expected, rtol=1e-4, atol=1e-4)
        assert np.sum(~close) <= max(2, leaf.size // 200) or path.endswith("key/bias"), path


@pytest.mark.usefixtures("linear")
def test_the_loss_averages_everything_or_only_what_is_real():
    batch = make_batch()
    everything, real = cloner(), cloner(loss_over="real")
    loss, metrics = everything.compute_loss(batch, KEY)
    np.testing.assert_allclose(loss, flow_errors(everything, batch, KEY, 3).mean(), rtol=1e-5)
    assert metrics == {"loss": loss, "bc/loss": loss}
    expected = flow_errors(real, batch, KEY, REAL)[batch.valid].mean()
    np.testing.assert_allclose(real.compute_loss(batch, KEY)[0], expected, rtol=1e-5)


@pytest.mark.usefixtures("linear")
@pytest.mark.parametrize("with_what", [7.0, np.nan])
def test_padding_and_steps_past_the_end_change_nothing_in_a_loss_over_real_ones(with_what):
    """NaN only past the end: padding dimensions of real steps enter the flow, whose other outputs they reach."""
    batch, agent = make_batch(), cloner(loss_over="real")
    actions = np.where(batch.valid[..., None], batch.actions, np.float32(with_what))
    beyond = dataclasses.replace(batch, actions=actions)
    assert agent.compute_loss(beyond, KEY)[0] == agent.compute_loss(batch, KEY)[0]
    if with_what == 7.0:
        assert cloner().compute_loss(beyond, KEY)[0] != cloner().compute_loss(batch, KEY)[0]


@pytest.mark.usefixtures("linear")
def test_an_update_moves_parameters_and_average_and_leaves_the_frozen():
    batch, agent = make_batch(), cloner(freeze=("eye",), ema_decay=0.75, loss_over="real")
    new, metrics = update(agent, batch, KEY)
    assert new.step == 1
    np.testing.assert_array_equal(new.actor.frozen_params["eye"], agent.actor.frozen_params["eye"])
    for name in ("plan", "mix"):
        old, latest = agent.actor.params[name], new.actor.params[name]
        # Adam's first step is the learning rate, whatever the gradient; padding dimensions have none.
        real = np.arange(old.shape[1]) % 3 < REAL
        np.testing.assert_allclose(np.abs(latest - old), np.where(real, 1e-2, 0)[None].repeat(len(old), 0), rtol=1e-2)
        np.testing.assert_allclose(new.actor.ema_params[name], 0.75 * old + 0.25 * latest, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(
            dict(plan=new.policy().plan, mix=new.policy().mix)[name].get_value(), new.actor.ema_params[name]
        )
    leaves = (*new.actor.params.values(), *new.actor.frozen_params.values())
    norm = np.sqrt(sum(np.square(np.asarray(leaf, np.float64)).sum() for leaf in leaves))
    np.testing.assert_allclose(metrics["param_norm/policy"], norm, rtol=1e-3)
    assert set(metrics) == {"loss", "bc/loss", "grad_norm/policy", "param_norm/policy", "lr/policy"}
    assert new.parameter_counts() == {"policy": 48 + 192 + 9, "policy_trainable": 192 + 9}


@pytest.mark.usefixtures("linear")
def test_acting_integrates_the_averaged_flow_from_each_row_s_own_noise():
    agent = cloner()
    agent = dataclasses.replace(agent, actor=dataclasses.replace(agent.actor, ema_params=averaged(agent)))
    batch, keys = make_batch(), jax.random.split(KEY, 8)
    chunks = np.asarray(agent.act(batch.observations, keys))
    eye, plan, mix = (np.asarray(agent.actor.ema_params[name], np.float64) for name in ("eye", "plan", "mix"))
    seen = (batch.observations.state @ eye @ plan).reshape(chunks.shape)
    x = np.stack([np.asarray(jax.random.normal(key, (1, *chunks.shape[1:])), np.float64)[0] for key in keys])
    for time in (1.0, 0.5):
        x = x - 0.5 * (x @ mix + seen * (1 + time))
    np.testing.assert_allclose(chunks, x, rtol=1e-4, atol=1e-5)
    order = np.array([3, 1, 0, 2, 7, 5, 6, 4])
    shuffled = jax.tree.map(lambda x: x[order], batch.observations)
    np.testing.assert_array_equal(agent.act(shuffled, keys[order]), chunks[order])


def averaged(agent: BCAgent) -> dict[str, jax.Array]:
    return {name: 0.5 * leaf for name, leaf in agent.actor.params.items()}


@pytest.mark.usefixtures("linear")
def test_validation_is_of_the_averaged_policy_and_does_not_augment():
    batch, agent = make_batch(), cloner(loss_over="real")
    other = dataclasses.replace(agent, actor=dataclasses.replace(agent.actor, ema_params=averaged(agent)))
    there = dataclasses.replace(agent, actor=dataclasses.replace(agent.actor, params=averaged(agent)))
    metrics = other.validate(batch, KEY)
    np.testing.assert_allclose(metrics["loss"], flow_errors(there, batch, KEY, REAL)[batch.valid].mean(), rtol=1e-5)
    errors = np.square(np.asarray(other.act(batch.observations, KEY)) - batch.actions)[..., :REAL].mean(axis=-1)
    np.testing.assert_allclose(metrics["actor/action_mse"], errors[batch.valid].mean(), rtol=1e-4)


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="ema_decay"):
        BCConfig(ema_decay=1.0)
