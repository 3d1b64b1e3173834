"""ACRLPD's losses and choices against the formulas of its definition, computed in numpy from what the agent sampled."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learners import (
    CRITIC,
    KEY,
    REAL,
    STEPS,
    WIDTH,
    H,
    acrlpd,
    linear_policies,
    linear_policy,
    make_batch,
)

from critic_reference import q_logits, v_logits
from pirl.agents.acrlpd import ACRLPDAgent
from pirl.agents.common import draw_noise
from pirl.agents.config import ACRLPDConfig, TemperatureConfig
from pirl.agents.diagnostics import effective_sample_size
from pirl.data.chunks import ChunkBatch
from pirl.errors import ConfigError
from pirl.models import create_model
from pirl.models.config import CriticConfig, get_model_config
from pirl.models.critic import critic_values


@pytest.fixture(autouse=True, scope="module")
def _linear():
    with linear_policies():
        yield


class Revealed:
    """What an agent drew and saw in a batch, and what its critics think of it, in numpy."""

    def __init__(self, agent: ACRLPDAgent, batch: ChunkBatch, rng: Any = KEY):
        self.agent, self.batch, encoded = agent, batch, agent.encode(batch, rng)
        self.encoded, self.prefix, self.next_prefix = encoded, encoded.prefix, encoded.next_prefix
        self.critic_prefix = encoded.critic_prefix
        self.chunks = self.sample(self.prefix, encoded.inputs.noise)
        self.next_chunks = self.sample(self.next_prefix, encoded.inputs.next_noise)

    def sample(self, prefix, noise, params=None):
        params = self.agent.actor.params if params is None else params
        eye_plan = np.asarray(prefix.features, np.float64) @ np.asarray(params["plan"])
        x, mix = np.asarray(noise, np.float64), np.asarray(params["mix"], np.float64)
        for time in (1.0, 0.5):
            x = x - 0.5 * (x @ mix + eye_plan.reshape(-1, 1, STEPS, WIDTH) * (1 + time))
        return x

    def values(self, critic, prefix, chunks):
        """[critics, b, n]"""
        config = self.agent.config.critic
        return np.asarray(critic_values(config, q_logits(critic, config, prefix, chunks[:, :, :H, :REAL])), np.float64)

    def aggregate(self, values):
        if self.agent.config.aggregate == "lower_bound":
            return values.mean(axis=0) - self.agent.config.pessimism * values.std(axis=0)
        if self.agent.config.aggregate == "subset_min":
            values = values[np.asarray(self.encoded.pair)]
        return values.mean(axis=0) if self.agent.config.aggregate == "mean" else values.min(axis=0)

    def target(self, chooser, judge):
        config, rows = self.agent.config, np.arange(len(self.chunks))
        best = self.aggregate(self.values(chooser, self.next_prefix, self.next_chunks)).argmax(axis=1)
        later = self.aggregate(self.values(judge, self.next_prefix, self.next_chunks))[rows, best]
        rewards = sum(config.discount**k * self.batch.rewards[:, k] for k in range(H))
        return rewards + config.discount**H * (1 - self.batch.next_terminal) * later

    def errors(self, actions):
        """Squared errors of the flow over real dimensions [b, steps], and what they are made of."""
        flow, learned = self.encoded.inputs.flow, self.agent.actor.params
        noise, t = np.asarray(flow.noise, np.float64), np.asarray(flow.time, np.float64)[:, None, None]
        seen = np.asarray(self.prefix.features @ learned["plan"], np.float64).reshape(noise.shape)
        x_t = t * noise + (1 - t) * actions
        residual = (x_t @ np.asarray(learned["mix"], np.float64) + seen * (1 + t)) - (noise - actions)
        residual[..., REAL:] = 0
        return np.square(residual).sum(axis=-1) / REAL, residual, x_t, t

    def advantages(self):
        critic, config = self.agent.critic.params, self.agent.config
        if config.target == "expectile":
            baseline = self.aggregate(
                np.asarray(critic_values(config.critic, v_logits(critic, config.critic, self.critic_prefix)))
            )
        else:
            baseline = self.aggregate(self.values(critic, self.critic_prefix, self.chunks)).mean(axis=1)
        return self.aggregate(self.values(critic, self.critic_prefix, self.batch.actions[:, None]))[:, 0] - baseline

    def weights(self):
        settings = self.agent.config.temperature
        return np.minimum(np.exp(self.advantages() / settings.beta), settings.max_weight)


def close(actual, expected, rtol=2e-4, atol=1e-5):
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


# --- the critic ----------------------------------------------------------------------------------------------------


def test_with_one_sample_the_target_is_the_ordinary_chunked_backup():
    seen = Revealed(acrlpd(num_action_samples=1, actor_mode="bc"), make_batch())
    values = seen.values(seen.agent.critic.target_params, seen.next_prefix, seen.next_chunks)[..., 0].mean(axis=0)
    rewards = seen.batch.rewards[:, 0] + 0.9 * seen.batch.rewards[:, 1]
    expected = rewards + np.where(seen.batch.next_terminal, 0, 0.81 * values)
    close(seen.agent.target(seen.agent.encode(seen.batch, KEY)), expected)


def test_the_target_is_at_least_the_return_where_that_is_known():
    returns = np.array([5, -np.inf, -np.inf, -5, 0, 0.1, 1, -1], np.float32)
    batch = make_batch(returns=returns)
    agents = (acrlpd(), acrlpd(mc_lower_bound=True))
    plain, bounded = (np.asarray(agent.target(agent.encode(batch, KEY))) for agent in agents)
    assert 0 < np.mean(plain < returns) < 1
    np.testing.assert_array_equal(bounded, np.maximum(plain, returns))


@pytest.mark.parametrize("aggregate", ["min", "subset_min", "lower_bound"])
def test_the_online_critics_choose_and_the_target_critics_value(aggregate):
    seen = Revealed(acrlpd(aggregate=aggregate), make_batch())
    online, slow = seen.agent.critic.params, seen.agent.critic.target_params
    expected = seen.target(online, slow)
    # They disagree, so that each of the other ways would show.
    for chooser, judge in ((slow, slow), (online, online), (slow, online)):
        assert np.abs(seen.target(chooser, judge) - expected).max() > 0.05
    close(seen.agent.target(seen.agent.encode(seen.batch, KEY)), expected)


def test_subset_min_draws_another_pair_in_another_update():
    agent, batch = acrlpd(aggregate="subset_min"), make_batch()
    pairs = {tuple(sorted(agent.encode(batch, jax.random.key(seed)).pair.tolist())) for seed in range(8)}
    assert all(a != b for a, b in pairs)
    assert pairs == {(0, 1), (0, 2), (1, 2)}


def test_the_critic_loss_is_huber_on_usable_chunks_summed_over_critics():
    seen = Revealed(acrlpd(critic=dataclasses.replace(CRITIC, huber_delta=0.5)), make_batch())
    usable = seen.batch.sequence_mask
    assert 0 < usable.sum() < len(usable)
    values = seen.values(seen.agent.critic.params, seen.prefix, seen.batch.actions[:, None])[..., 0]
    errors = np.abs(values - seen.target(seen.agent.critic.params, seen.agent.critic.target_params))
    assert (errors < 0.5).any()
    assert (errors > 0.5).any()
    huber = np.where(errors <= 0.5, errors**2 / 2, 0.5 * (errors - 0.25))
    loss, metrics = seen.agent.compute_critic_loss(seen.batch, KEY)
    close(loss, huber[:, usable].mean(axis=1).sum())
    close(metrics["critic/loss"], loss)
    close(metrics["critic/q_mean"], values[:, usable].mean())
    close(metrics["critic/q_spread"], values[:, usable].std(axis=0).mean())
    close(metrics["critic/q_min"], values.min())
    close(metrics["critic/q_max"], values.max())
    close(metrics["critic/td_error"], errors[:, usable].mean())
    close(
        metrics["critic/target"], seen.target(seen.agent.critic.params, seen.agent.critic.target_params)[usable].mean()
    )
    close(metrics["data/valid_chunks"], usable.mean())


def test_the_expectile_target_asks_the_target_critics_about_the_next_observation_alone():
    seen = Revealed(acrlpd(target="expectile", aggregate="lower_bound"), make_batch())
    config, batch = seen.agent.config, seen.batch
    values = np.asarray(
        critic_values(config.critic, v_logits(seen.agent.critic.target_params, config.critic, seen.next_prefix))
    )
    rewards = batch.rewards[:, 0] + 0.9 * batch.rewards[:, 1]
    expected = rewards + np.where(batch.next_terminal, 0, 0.81 * (values.mean(axis=0) - 0.5 * values.std(axis=0)))
    close(seen.agent.target(seen.agent.encode(batch, KEY)), expected)
    assert seen.encoded.inputs.next_noise.shape[1] == 0  # nothing is sampled for it


def test_values_are_pulled_more_by_better_chunks_than_by_worse_ones():
    """The loss of V: that of Q's kind, weighted by the expectile where the chunk in the data is better than V."""
    critic = dataclasses.replace(CRITIC, huber_delta=10.0)
    seen = Revealed(acrlpd(target="expectile", expectile=0.9, critic=critic), make_batch())
    usable, critics = seen.batch.sequence_mask, seen.agent.critic
    q = seen.aggregate(seen.values(critics.target_params, seen.prefix, seen.batch.actions[:, None]))[:, 0]
    v = v_logits(critics.params, critic, seen.prefix)[..., 0]
    weights = np.where(q > v, 0.9, 0.1)
    assert 0 < np.mean(q > v) < 1
    expected = (weights * np.square(q - v) / 2)[:, usable].mean(axis=1).sum()
    with_v = seen.agent.compute_critic_loss(seen.batch, KEY)[0]
    errors = seen.values(critics.params, seen.prefix, seen.batch.actions[:, None])[..., 0]
    errors = errors - np.asarray(seen.agent.target(seen.agent.encode(seen.batch, KEY)), np.float64)
    close(with_v, expected + (np.square(errors) / 2)[:, usable].mean(axis=1).sum())


# --- the actor -----------------------------------------------------------------------------------------------------

SHARP = TemperatureConfig(beta=0.3, max_weight=1.2)


@pytest.mark.parametrize(("target", "aggregate"), [("best_of_n", "min"), ("expectile", "mean")])
def test_awr_weighs_chunks_by_clipped_exponential_advantages(target, aggregate):
    """Over samples of the policy, or over V where there is one."""
    seen = Revealed(acrlpd(target=target, aggregate=aggregate, temperature=SHARP), make_batch())
    weights, advantages, valid = seen.weights(), seen.advantages(), seen.batch.valid
    assert 0 < np.mean(weights == 1.2) < 1
    loss, metrics = seen.agent.compute_actor_loss(seen.batch, KEY)
    close(loss, (weights[:, None] * seen.errors(seen.batch.actions)[0])[valid].sum() / valid.sum())
    close(metrics["actor/loss"], loss)
    unclipped = np.exp(advantages / 0.3)
    close(metrics["actor/ess"], unclipped.sum() ** 2 / (unclipped**2).sum() / len(weights))
    close(metrics["actor/clip_fraction"], np.mean(weights == 1.2))
    close(metrics["actor/temperature"], 0.3)
    for percent in (10, 50, 90):
        close(metrics[f"actor/advantage_p{percent}"], np.percentile(advantages, percent))


def assert_gradient(seen, actions, share):
    """That of the actor's loss, worked out by hand for chunks and for the share that each step has in the loss."""
    agent, batch = seen.agent, seen.batch
    _, residual, x_t, t = seen.errors(actions)
    slope = 2 / REAL * share * residual
    upstream = (slope * (1 + t)).reshape(len(t), -1)
    plan = np.asarray(agent.actor.params["plan"], np.float64)
    expected = {
        "mix": np.einsum("bhi,bhj->ij", x_t, slope),
        "plan": np.asarray(seen.prefix.features, np.float64).T @ upstream,
        "eye": batch.observations.state.T @ (upstream @ plan.T),
    }
    ours = jax.grad(lambda parameters: agent.compute_actor_loss(batch, KEY, parameters)[0])(agent.actor.params)
    for name, gradient in expected.items():
        close(ours[name], gradient, rtol=1e-3, atol=1e-4)


def test_the_gradient_of_awr_takes_the_weights_as_given():
    """For the flow and for the encoder, which both losses look through."""
    seen = Revealed(acrlpd(temperature=SHARP), make_batch())
    valid = seen.batch.valid
    assert_gradient(seen, seen.batch.actions, seen.weights()[:, None, None] * valid[..., None] / valid.sum())


@pytest.fixture
def encoder_trains(monkeypatch):
    """As that of a real policy does unless vision and language are frozen."""
    monkeypatch.setattr("pirl.agents.common.encoder_trains", lambda trainable: "eye" in trainable)


@pytest.mark.usefixtures("encoder_trains")
def test_distill_keeps_critics_on_the_start_policy_s_encoder_while_the_policy_s_trains():
    agent, batch = acrlpd(actor_mode="distill", target="expectile", num_action_samples=5), make_batch()
    state, start = batch.observations.state, agent.start_params["eye"]
    encoded = agent.encode(batch, KEY)
    close(encoded.prefix.features, state @ agent.actor.params["eye"])
    close(encoded.critic_prefix.features, state @ start)
    close(encoded.next_prefix.features, batch.next_observations.state @ start)
    # Acting, the EMA policy samples from its own encoder, and the critics choose by that of the start.
    seen, ema = Revealed(agent, batch), agent.actor.ema_params
    own = agent.policy().encode(batch.observations)
    close(own.features, state @ ema["eye"])
    chunks = seen.sample(own, draw_noise(KEY, len(state), (5, STEPS, WIDTH)), ema)
    best = {
        which: seen.aggregate(seen.values(agent.critic.ema_params, prefix, chunks)).argmax(axis=1)
        for which, prefix in (("own", own), ("start", seen.critic_prefix))
    }
    assert np.any(best["own"] != best["start"])
    close(agent.act(batch.observations, KEY), chunks[np.arange(len(state)), best["start"]])
    critics = agent.value(batch.observations, batch.actions)
    close(critics, seen.values(agent.critic.ema_params, seen.critic_prefix, batch.actions[:, None])[..., 0])


@pytest.mark.parametrize(("target", "trains"), [("best_of_n", False), ("expectile", True)])
def test_distill_learns_what_the_critics_prefer_of_the_data_and_the_start_policy_s_samples(target, trains, request):
    if trains:
        request.getfixturevalue("encoder_trains")
    seen = Revealed(acrlpd(actor_mode="distill", target=target, temperature=SHARP), make_batch(24))
    batch, rows, agent = seen.batch, np.arange(len(seen.chunks)), seen.agent
    proposals = seen.sample(seen.critic_prefix, seen.encoded.inputs.noise, agent.start_params)
    candidates = np.concatenate([batch.actions[:, None], proposals], axis=1)
    values = seen.aggregate(seen.values(agent.critic.params, seen.critic_prefix, candidates))
    whole = batch.valid.all(axis=1)
    best = np.where(whole[:, None] | (np.arange(4) > 0), values, -np.inf).argmax(axis=1)
    # Both are chosen, and a chunk that ends early would be if it could.
    assert set(best.tolist()) > {0}
    assert np.any((values.argmax(axis=1) == 0) & ~whole)
    baseline = seen.aggregate(seen.values(agent.critic.params, seen.critic_prefix, batch.actions[:, None]))[:, 0]
    baseline = baseline - seen.advantages()
    advantages = values[rows, best] - baseline
    weights = np.minimum(np.exp(advantages / 0.3), 1.2)
    assert 0 < np.mean(weights == 1.2) < 1
    loss, metrics = agent.compute_actor_loss(batch, KEY)
    close(loss, (weights[:, None] * seen.errors(candidates[rows, best])[0]).mean(), rtol=1e-3)
    close(metrics["actor/data_chosen"], np.mean(best == 0))
    close(metrics["actor/chosen_value"], values[rows, best].mean(), rtol=1e-3, atol=1e-4)
    close(metrics["actor/advantage_p50"], np.median(advantages), rtol=1e-3, atol=1e-4)
    close(metrics["actor/clip_fraction"], np.mean(weights == 1.2))
    close(metrics["critic/sample_spread"], values[:, 1:].std(axis=1).mean(), rtol=1e-3, atol=1e-4)
    close(metrics["critic/state_spread"], baseline.std(), rtol=1e-3, atol=1e-4)
    # The chunk and its weight are given: nothing is learned through how they were found.
    assert_gradient(seen, candidates[rows, best], weights[:, None, None] / (len(rows) * STEPS))


def test_bc_loss_clones_successes_and_corrections_or_all():
    batch = make_batch(human=np.arange(8) % 3 == 0)
    assert (batch.human & ~batch.success).any()
    for bc_on, chosen in (("successes", batch.success | batch.human), ("all", np.ones_like(batch.success))):
        seen = Revealed(acrlpd(bc_on=bc_on), batch)
        steps = batch.valid & chosen[:, None]
        close(seen.agent.compute_bc_loss(batch, KEY)[0], seen.errors(batch.actions)[0][steps].mean())
    everything = Revealed(acrlpd(actor_mode="bc"), batch)
    close(everything.agent.compute_actor_loss(batch, KEY)[0], everything.errors(batch.actions)[0][batch.valid].mean())


@pytest.mark.parametrize("mode", ["awr", "distill"])
def test_the_loss_is_the_weighted_sum_of_the_three(mode):
    agent = acrlpd(actor_mode=mode, critic_weight=0.5, actor_weight=2.0, bc_loss_weight=0.25)
    batch = make_batch()
    total, metrics = agent.compute_loss(batch, KEY)
    critic, actor, bc = (
        compute(batch, KEY)[0]
        for compute in (agent.compute_critic_loss, agent.compute_actor_loss, agent.compute_bc_loss)
    )
    close(total, 0.5 * critic + 2.0 * actor + 0.25 * bc, rtol=1e-6)
    close(metrics["loss"], total)


def test_the_critic_reaches_the_encoder_only_if_it_may():
    batch = make_batch()

    def gradients(**changes):
        agent = acrlpd(actor_weight=0.0, actor_mode="bc", **changes)
        return jax.grad(lambda parameters: agent.compute_loss(batch, KEY, parameters)[0])(agent.actor.params)

    assert all(np.all(leaf == 0) for leaf in gradients().values())
    let_through = gradients(critic_trains_encoder=True)
    assert np.abs(let_through["eye"]).max() > 1e-3
    assert np.all(let_through["plan"] == 0)
    assert np.all(let_through["mix"] == 0)


# --- temperature ---------------------------------------------------------------------------------------------------


def test_the_effective_sample_size_counts_what_counts():
    assert effective_sample_size(jnp.ones(8)) == 1
    assert effective_sample_size(jnp.asarray([1.0, 1.0, 0, 0])) == 0.5
    assert effective_sample_size(jnp.asarray([5.0, 0, 0, 0])) == 0.25
    assert effective_sample_size(jnp.zeros(4)) == 0


def test_an_adaptive_temperature_reaches_the_wanted_sample_size():
    """From either side, also from where all good chunks are clipped to the same weight."""
    settings = TemperatureConfig(adaptive=True, target_ess=0.4, learning_rate=0.1, max_weight=1.2)
    agent, batch = acrlpd(temperature=settings), make_batch()

    def move(agent, _):
        new, metrics = agent.update(batch, KEY)
        return dataclasses.replace(agent, log_beta=new.log_beta, beta_opt_state=new.beta_opt_state), metrics[
            "actor/ess"
        ]

    settle = jax.jit(lambda agent: jax.lax.scan(move, agent, length=200)[1])
    for beta in (0.01, 30.0):
        sizes = settle(dataclasses.replace(agent, log_beta=jnp.log(jnp.float32(beta))))
        assert abs(sizes[0] - 0.4) > 0.2
        assert abs(sizes[-1] - 0.4) < 0.02


# --- acting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", ["min", "subset_min"])
def test_acting_takes_the_chunk_that_the_averaged_critics_prefer_of_the_averaged_policy(aggregate):
    agent = acrlpd(aggregate=aggregate)
    observation, keys = make_batch().observations, jax.random.split(KEY, 8)
    averages = dataclasses.replace(agent, actor=dataclasses.replace(agent.actor, params=agent.actor.ema_params))
    seen = Revealed(averages, make_batch())
    noise = np.stack([jax.random.normal(key, (3, STEPS, WIDTH)) for key in keys])
    chunks = seen.sample(seen.prefix, noise)
    values = seen.values(agent.critic.ema_params, seen.prefix, chunks)
    best = (values.min(axis=0) if aggregate == "min" else values.mean(axis=0)).argmax(axis=1)
    assert len(set(best.tolist())) > 1
    close(agent.act(observation, keys), chunks[np.arange(8), best], atol=1e-4)
    close(agent.value(observation, chunks[:, 0].astype(np.float32)), values[:, :, 0], rtol=1e-3, atol=1e-4)


def test_a_row_gets_the_same_chunk_whatever_else_is_in_the_batch():
    agent, keys = acrlpd(), jax.random.split(KEY, 8)
    ours, others = make_batch(seed=0).observations, make_batch(seed=9).observations
    mine = np.arange(8) % 2 == 0
    mixed = jax.tree.map(lambda a, b: np.where(mine[:, None], a, b), ours, others)
    mixed_keys = jnp.where(mine, keys, jax.random.split(jax.random.key(77), 8))
    alone, together = np.asarray(agent.act(ours, keys)), np.asarray(agent.act(mixed, mixed_keys))
    np.testing.assert_array_equal(alone[mine], together[mine])
    assert np.all(alone[~mine] != together[~mine])


def test_one_acting_sample_is_the_policy_alone():
    agent, observation = acrlpd(num_acting_samples=1), make_batch().observations
    keys = jax.random.split(KEY, 8)
    noise = np.stack([jax.random.normal(key, (1, STEPS, WIDTH)) for key in keys])
    policy = agent.policy()
    close(agent.act(observation, keys), policy.sample(policy.encode(observation), noise=noise, num_steps=2)[:, 0])


def test_units_are_dropped_in_training_only():
    batch = make_batch()
    plain, dropping = (acrlpd(critic=dataclasses.replace(CRITIC, dropout=rate)) for rate in (0.0, 0.5))
    assert plain.compute_critic_loss(batch, KEY)[0] != dropping.compute_critic_loss(batch, KEY)[0]
    close(plain.target(plain.encode(batch, KEY)), dropping.target(dropping.encode(batch, KEY)), rtol=0)
    close(plain.compute_actor_loss(batch, KEY)[0], dropping.compute_actor_loss(batch, KEY)[0], rtol=0, atol=0)
    np.testing.assert_array_equal(plain.act(batch.observations, KEY), dropping.act(batch.observations, KEY))
    metrics = dropping.validate(batch, KEY)
    for name, metric in plain.validate(batch, KEY).items():
        np.testing.assert_array_equal(metric, metrics[name], err_msg=name)


@pytest.mark.parametrize("actor_mode", ["awr", "distill"])
def test_validation_is_of_the_averaged_policy(actor_mode):
    agent, batch = acrlpd(actor_mode=actor_mode), make_batch()
    moved = dataclasses.replace(agent, actor=dataclasses.replace(agent.actor, params=agent.actor.ema_params))
    metrics, expected = agent.validate(batch, KEY), moved.compute_loss(batch, KEY)[1]
    for name, metric in expected.items():
        close(metrics[name], metric, rtol=1e-6)
    close(metrics["bc/loss"], moved.compute_bc_loss(batch, KEY)[0], rtol=1e-6)
    distance = np.square(Revealed(moved, batch).chunks[:, 0] - batch.actions)[..., :REAL].mean(axis=-1)
    close(metrics["actor/action_mse"], distance[batch.valid].mean())
    assert abs(metrics["loss"] - agent.compute_loss(batch, KEY)[0]) > 1e-3


# --- what cannot be ------------------------------------------------------------------------------------------------


def test_numbers_that_cannot_be_are_refused():
    for make in (
        lambda: ACRLPDConfig(horizon_length=0),
        lambda: ACRLPDConfig(aggregate="subset_min", critic=CriticConfig(num_critics=1)),
        lambda: ACRLPDConfig(expectile=1.0),
        lambda: TemperatureConfig(beta=0.0),
    ):
        with pytest.raises(ConfigError):
            make()


def test_a_critic_cannot_look_further_than_the_policy_plans():
    with pytest.raises(ConfigError, match="horizon_length = 5 exceeds"):
        ACRLPDAgent.create(ACRLPDConfig(horizon_length=5), linear_policy(), KEY)


def test_distill_cannot_bootstrap_from_samples_of_a_policy_whose_encoder_trains():
    config, model = ACRLPDConfig(horizon_length=2, actor_mode="distill"), get_model_config("tiny_state")

    def create(**changes):
        learner = dataclasses.replace(config, **changes)
        jax.eval_shape(lambda rng: ACRLPDAgent.create(learner, create_model(model, rng), rng), KEY)

    with pytest.raises(ConfigError, match="--agent.target expectile"):
        create()
    create(target="expectile")
    create(freeze=("vision", "language"))
