"""RIPT learns: a contextual bandit whose policy and optimum are known in closed form, guidance, and bounded repulsion."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from learners import KEY, MODEL, REAL, linear_policies, linear_policy, make_batch, steady

from pirl.agents import common
from pirl.agents.ript import RIPTAgent, RIPTConfig, RolloutBatch, has_signal, leave_one_out, scale_advantages
from pirl.data.chunks import ChunkBatch
from pirl.errors import ConfigError
from pirl.models import GuidedObservation, Observation, Pi0
from pirl.models.gemma import KVCache
from pirl.models.pi0 import Prefix

# --- a policy that is a Gaussian ---------------------------------------------------------------------------------------

PLAIN, POSITIVE, NEGATIVE = 0, 1, 2
GAUSSIAN = dataclasses.replace(MODEL, action_dim=1, action_horizon=1, max_token_len=1)


class GaussianPolicy(Pi0):
    """Acts by N(slope · state + mean, deviation²), each of them one number per prompt; its flow is the exact one."""

    def __init__(self, slope: Any, mean: Any, log_deviation: Any):
        self.config = GAUSSIAN
        self.slope, self.mean, self.log_deviation = nnx.Param(slope), nnx.Param(mean), nnx.Param(log_deviation)

    def encode(self, observation: Observation, rng: Any = None) -> Prefix:
        token = observation.tokenized_prompt[:, 0]
        nothing = jnp.zeros((1, len(token), 0, 1, 1))
        slope, mean, log_deviation = (x.get_value()[token, None] for x in (self.slope, self.mean, self.log_deviation))
        center = slope * observation.state + mean
        return Prefix(
            cache=KVCache(nothing, nothing),
            mask=jnp.zeros((len(token), 0), bool),
            features=jnp.concatenate([center, log_deviation], axis=1),
            state=observation.state,
        )

    def velocity(self, prefix: Prefix, x_t: Any, time: Any) -> Any:
        """E[noise − action | x_t], of jointly normal variables."""
        center, log_deviation = (prefix.features[:, i, None, None, None] for i in (0, 1))
        t, variance = time[:, None, None, None], jnp.exp(2 * log_deviation)
        gain = (t - (1 - t) * variance) / (t**2 + (1 - t) ** 2 * variance)
        return gain * (x_t - (1 - t) * center) - center


def gaussian_policy(mean: tuple[float, float, float] = (0, 0, 0), deviation: float = 0.5) -> GaussianPolicy:
    return GaussianPolicy(jnp.zeros(3), jnp.array(mean, jnp.float32), jnp.full(3, np.log(deviation), jnp.float32))


@pytest.fixture
def gaussian():
    shapes = nnx.eval_shape(gaussian_policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "_abstract_policy", lambda config: shapes)
        patch.setattr(common, "sample_time", lambda rng, batch: jax.random.uniform(rng, (batch,), minval=0.01))
        yield


def learner(policy: Pi0 | None = None, **changes: Any) -> RIPTAgent:
    config = RIPTConfig(**({"optimizer": steady(1e-2), "ema_decay": None} | changes))
    return RIPTAgent.create(config, policy or gaussian_policy())


def observe(state: np.ndarray, prompt: int = PLAIN) -> Observation:
    tokens = np.full((len(state), 1), prompt, np.int32)
    return Observation({}, {}, state[:, None].astype(np.float32), tokens, np.ones_like(tokens, bool))


def chunks_of(observations: Observation, actions: Any) -> ChunkBatch:
    size = len(actions)
    yes, no = np.ones((size, 1), bool), np.zeros((size, 1), bool)
    return ChunkBatch(
        observations,
        actions,
        yes,
        np.zeros((size, 1), np.float32),
        no,
        yes,
        observations,
        no[:, 0],
        yes[:, 0],
        yes[:, 0],
    )


def prompts_of(tokens: np.ndarray) -> Any:
    return tokens.astype(np.int32)[:, None], np.ones((len(tokens), 1), bool)


# --- the bandit --------------------------------------------------------------------------------------------------------

GROUPS, ATTEMPTS = 16, 8


@jax.jit
def act(agent: RIPTAgent, observation: Any, rng: Any) -> Any:
    return agent.act(observation, rng)


@jax.jit
def act_in_rollout(agent: RIPTAgent, observation: Any, rng: Any) -> Any:
    return agent.act_in_rollout(observation, rng)


@jax.jit
def learn(agent: RIPTAgent, batch: RolloutBatch, rng: Any) -> RIPTAgent:
    """All passes over an iteration's chunks."""

    def step(agent: RIPTAgent, key: Any) -> Any:
        return agent.update(batch, key)

    return jax.lax.scan(step, agent, jax.random.split(rng, 8))[0]


def attempt(agent: RIPTAgent, states: np.ndarray, rng: Any) -> tuple[np.ndarray, np.ndarray]:
    """Actions, and whether they are right: a quarter to one and a half, to the side that the state says."""
    guided = agent.config.weighting == "guidance"
    seen = GuidedObservation(observe(states), observe(states, POSITIVE)) if guided else observe(states)
    actions = np.asarray(act(agent, seen, rng))
    side = states * actions[:, 0, 0]
    return actions, ((side > 0.25) & (side < 1.5)).astype(np.float64)


@pytest.mark.usefixtures("gaussian")
@pytest.mark.parametrize("weighting", ["signed", "positive", "exp", "guidance"])
def test_every_weighting_finds_what_is_rewarded(weighting):
    """Half of the contexts want actions to the left, half to the right; no policy blind to them exceeds 50 %."""
    agent, random = learner(weighting=weighting, beta=0.5), np.random.default_rng(0)
    sides = np.repeat([-1.0, 1.0], GROUPS * ATTEMPTS // 2)
    before = np.mean([attempt(agent, sides, jax.random.key(100 + number))[1].mean() for number in range(8)])
    # 1 − Φ(½) for the nearer edge, less what lies beyond the farther one.
    assert abs(before - 0.307) < 0.04
    for iteration in range(30):
        states = np.repeat(random.choice([-1.0, 1.0], GROUPS), ATTEMPTS)
        actions, rewards = attempt(agent, states, jax.random.key(iteration))
        advantages = np.concatenate([leave_one_out(group) for group in rewards.reshape(GROUPS, ATTEMPTS)])
        included = (advantages != 0) & has_signal(agent.config, advantages)
        batch = RolloutBatch(
            chunks_of(observe(states), actions),
            scale_advantages(agent.config, advantages).astype(np.float32),
            included,
            prompts_of(np.where(advantages > 0, POSITIVE, NEGATIVE)) if weighting == "guidance" else None,
        )
        agent = learn(agent, batch, jax.random.key(1000 + iteration))
    after = [attempt(agent, sides, jax.random.key(100 + number))[1].mean() for number in range(8)]
    assert np.mean(after) > 0.9, after


# --- guidance ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("gaussian")
def test_the_indicator_is_left_out_as_often_as_is_asked():
    """The loss lies between that under indicated and that under plain prompts, as far as prompts are plain."""
    states, size = np.ones(4096), 4096
    batch = RolloutBatch(
        chunks_of(observe(states), np.ones((size, 1, 1), np.float32)),
        np.ones(size, np.float32),
        np.ones(size, bool),
        prompts_of(np.full(size, POSITIVE)),
    )

    @jax.jit
    def loss(agent: RIPTAgent, batch: RolloutBatch) -> Any:
        return agent.compute_loss(batch, KEY)[0]

    policy = gaussian_policy(mean=(-2.0, 1.0, 5.0))
    indicated, some, plain = (
        float(loss(learner(policy, weighting="guidance", cond_dropout=often), batch)) for often in (0.0, 0.3, 1.0)
    )
    assert plain > 2 * indicated
    assert abs((some - indicated) / (plain - indicated) - 0.3) < 0.04
    # Nor does it matter by how much an advantage is positive: it is the loss of cloning under these prompts.
    asked = chunks_of(observe(states, POSITIVE), batch.chunks.actions)
    np.testing.assert_allclose(indicated, jax.jit(RIPTAgent.compute_bc_loss)(learner(policy), asked, KEY)[0], rtol=1e-6)
    # Of a failure it is a share.
    failed = dataclasses.replace(batch, advantages=-3 * batch.advantages)
    agent = learner(policy, weighting="guidance", cond_dropout=0.0, negative_weight=0.25)
    np.testing.assert_allclose(loss(agent, failed), 0.25 * indicated, rtol=1e-6)


@pytest.mark.usefixtures("gaussian")
@pytest.mark.parametrize(("dropout", "taught"), [(0.0, POSITIVE), (1.0, PLAIN)])
def test_demonstrations_are_shown_as_good(dropout, taught):
    agent = learner(weighting="guidance", cond_dropout=dropout, bc_loss_weight=1.0)
    chunks = chunks_of(observe(np.ones(8)), np.ones((8, 1, 1), np.float32))
    bad, good = (prompts_of(np.full(8, prompt)) for prompt in (NEGATIVE, POSITIVE))
    # Nothing but demonstrations is included, so that all that is learned is theirs.
    batch = RolloutBatch(chunks, -np.ones(8, np.float32), np.zeros(8, bool), bad, chunks, good)
    gradient = jax.jit(jax.grad(lambda parameters: agent.compute_loss(batch, KEY, parameters)[0]))
    moved = np.asarray(gradient(agent.actor.params)["mean"]) != 0
    assert moved.tolist() == [prompt == taught for prompt in (PLAIN, POSITIVE, NEGATIVE)]
    with pytest.raises(ConfigError, match="needs prompts"):
        jax.eval_shape(agent.compute_loss, dataclasses.replace(batch, demonstration_prompts=None), KEY)


@pytest.mark.usefixtures("gaussian")
def test_acting_is_guided_from_the_plain_prompt_to_the_indicated_one_and_beyond():
    """Deviations are equal, so that the flow is linear in the means, and so is what it ends in."""
    states = np.ones(64)
    both, policy = GuidedObservation(observe(states), observe(states, POSITIVE)), gaussian_policy(mean=(-1.0, 0.5, 9.0))
    plain = act(learner(policy), observe(states), KEY)
    indicated = act(learner(policy), observe(states, POSITIVE), KEY)
    assert np.abs(indicated - plain).min() > 1
    for weight in (0.0, 1.0, 2.5):
        chunks = act(learner(policy, guidance_weight=weight), both, KEY)
        in_rollout = act_in_rollout(learner(policy, rollout_guidance=weight, rollout_solver="euler"), both, KEY)
        np.testing.assert_array_equal(in_rollout, chunks)
        if weight in (0, 1):
            np.testing.assert_array_equal(chunks, indicated if weight else plain)
        np.testing.assert_allclose(chunks, plain + weight * (indicated - plain), rtol=1e-4, atol=1e-5)


# --- bounded repulsion -------------------------------------------------------------------------------------------------


def test_a_thousand_updates_on_the_same_failures_stay_bounded():
    """Half of the chunks repel, again and again; the loss keeps its bound, and without the limit it would not."""
    advantages = np.array([1, -1, 2, -2, 0.5, -0.5, 1, -1], np.float32)
    batch = RolloutBatch(make_batch(), advantages, np.ones(8, bool))
    fields = {"weighting": "signed", "negative_weight": 1.0, "negative_clip": 1.5, "optimizer": steady(1e-2)}

    @jax.jit
    def run(agent: RIPTAgent) -> Any:
        def step(agent: RIPTAgent, key: Any) -> Any:
            new, metrics = agent.update(batch, key)
            return new, metrics["loss"]

        agent, losses = jax.lax.scan(step, agent, jax.random.split(KEY, 1000))
        return agent, losses, agent.act(batch.chunks.observations, KEY)

    with linear_policies():
        limited, losses, actions = run(
            RIPTAgent.create(RIPTConfig(**fields, negative_loss_limit=2.0), linear_policy(), real_action_dim=REAL)
        )
        assert losses.shape == (1000,)
        assert losses.min() >= -1.0 * 1.5 * 2.0
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(limited))
        largest = max(np.abs(leaf).max() for leaf in limited.actor.params.values())
        assert np.isfinite(actions).all()
        free, losses, _ = run(
            RIPTAgent.create(RIPTConfig(**fields, negative_loss_limit=1e9), linear_policy(), real_action_dim=REAL)
        )
        assert losses.min() < -3.0
        assert largest < 0.5 * max(np.abs(leaf).max() for leaf in free.actor.params.values())
