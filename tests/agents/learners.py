"""A policy so small that its learners compile in a moment, and batches for it.

The policy is a π₀ in everything but its networks: noise, Euler steps and losses are the real ones, while `encode` is one
matrix, the flow is linear and flow times are uniform. XLA takes ten times as long for the smallest transformer.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from builders import MICRO
from pirl.agents import common
from pirl.agents.acrlpd import ACRLPDAgent
from pirl.agents.bc import BCAgent
from pirl.agents.config import ACRLPDConfig, BCConfig, OptimizerConfig
from pirl.data.chunks import ChunkBatch
from pirl.models import Observation, Pi0
from pirl.models.config import CriticConfig
from pirl.models.gemma import KVCache
from pirl.models.pi0 import Prefix

# Chunks of 4 steps and 3 dimensions, of which critics see 2 steps and 2 dimensions.
STEPS, WIDTH, REAL, H = 4, 3, 2, 2
MODEL = dataclasses.replace(MICRO, action_dim=WIDTH, action_horizon=STEPS, cameras=(), max_token_len=2)
SPEECHLESS = dataclasses.replace(MODEL, max_token_len=0)
FEATURES = MODEL.language.width
CRITIC = CriticConfig(num_critics=3, hidden_dims=(8, 8), num_queries=2, query_width=4, num_heads=2)
KEY = jax.random.key(5)


class LinearPolicy(Pi0):
    """Its flow is linear in the noisy chunk and in what it sees."""

    encoded = 0  # how often, counted while tracing

    def __init__(self, eye: Any, plan: Any, mix: Any):
        self.config = MODEL
        self.eye, self.plan, self.mix = nnx.Param(eye), nnx.Param(plan), nnx.Param(mix)

    def encode(self, observation: Observation, rng: Any = None) -> Prefix:
        LinearPolicy.encoded += 1
        features = observation.state @ self.eye.get_value()
        batch = len(features)
        # Two tokens, for critics to choose from.
        tokens = jnp.stack([jnp.tile(features, (1, 3)), jnp.tile(jnp.sin(features), (1, 3))], axis=1)
        language = MODEL.language
        cached = tokens.reshape(batch, 2, 2, language.depth, language.num_kv_heads, language.head_dim)
        keys, values = jnp.moveaxis(cached, (2, 3), (0, 1))
        return Prefix(
            cache=KVCache(keys, values), mask=jnp.ones((batch, 2), bool), features=features, state=observation.state
        )

    def velocity(self, prefix: Prefix, x_t: Any, time: Any) -> Any:
        seen = (prefix.features @ self.plan.get_value()).reshape(-1, 1, STEPS, WIDTH)
        return x_t @ self.mix.get_value() + seen * (1 + time[:, None, None, None])


def linear_policy(seed: int = 0, kind: type[LinearPolicy] = LinearPolicy) -> LinearPolicy:
    random = np.random.default_rng(seed)
    shapes = ((WIDTH, FEATURES), (FEATURES, STEPS * WIDTH), (WIDTH, WIDTH))
    return kind(*(jnp.asarray(random.normal(size=shape) / 2, jnp.float32) for shape in shapes))


@contextmanager
def linear_policies(kind: type[LinearPolicy] = LinearPolicy) -> Iterator[None]:
    """Learners rebuild their policy from its configuration; here they get the linear one."""
    shapes = nnx.eval_shape(lambda: linear_policy(kind=kind))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "_abstract_policy", lambda config: shapes)
        patch.setattr(common, "sample_time", lambda rng, batch: jax.random.uniform(rng, (batch,)))
        yield


def steady(peak_lr: float, **changes: Any) -> OptimizerConfig:
    return OptimizerConfig(peak_lr=peak_lr, schedule="constant", warmup_steps=0, weight_decay=0.0, **changes)


def acrlpd(seed: int = 0, policy: type[LinearPolicy] = LinearPolicy, **changes: Any) -> ACRLPDAgent:
    """An agent whose three sets of critics, and two sets of policy parameters, all differ."""
    fields: dict[str, Any] = dict(
        horizon_length=H,
        discount=0.9,
        num_action_samples=3,
        denoising_steps=2,
        critic=CRITIC,
        policy_optimizer=steady(1e-2),
        critic_optimizer=steady(1e-2),
    )
    config = ACRLPDConfig(**(fields | changes))
    agent = ACRLPDAgent.create(config, linear_policy(seed, policy), jax.random.key(seed), real_action_dim=REAL)
    return dataclasses.replace(
        agent,
        critic=dataclasses.replace(
            agent.critic,
            params=jitter(agent.critic.params, 1),
            target_params=jitter(agent.critic.params, 2),
            ema_params=jitter(agent.critic.params, 3),
        ),
        start_params=agent.start_params and jitter(agent.start_params, 5),
        actor=dataclasses.replace(
            agent.actor, ema_params=None if agent.actor.ema_params is None else jitter(agent.actor.ema_params, 4)
        ),
    )


def cloner(seed: int = 0, **changes: Any) -> BCAgent:
    config = BCConfig(**({"optimizer": steady(1e-2), "denoising_steps": 2} | changes))
    return BCAgent.create(config, linear_policy(seed), real_action_dim=REAL)


def jitter(tree: Any, seed: int) -> Any:
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + jnp.asarray(0.3 * random.normal(size=x.shape), jnp.float32), tree)


def make_batch(size: int = 8, seed: int = 0, **changes: Any) -> ChunkBatch:
    """Of everything something: ends and time-outs inside chunks, successes and failures."""
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    lengths = np.resize([4, 1, 2, 4, 1, 4, 3, 4], size)  # steps until the episode ends
    terminal = np.resize([0, 1, 1, 0, 0, 0, 0, 0], size).astype(bool)
    terminals = terminal[:, None] & (np.arange(H) == lengths[:, None] - 1)
    valid = np.arange(STEPS) < lengths[:, None]
    fields: dict[str, Any] = dict(
        observations=Observation({}, {}, normal(size, WIDTH)),
        actions=normal(size, STEPS, WIDTH),
        valid=valid,
        rewards=np.where(valid[:, :H], normal(size, H), 0).astype(np.float32),
        terminals=terminals,
        masks=~np.logical_or.accumulate(terminals, axis=1),
        next_observations=Observation({}, {}, normal(size, WIDTH)),
        next_terminal=terminals.any(axis=1),
        sequence_mask=terminals.any(axis=1) | (lengths > H),
        success=np.resize([True, True, False, False], size),
    )
    return ChunkBatch(**(fields | changes))


@jax.jit
def update(agent: Any, batch: ChunkBatch, rng: Any) -> Any:
    return agent.update(batch, rng)


def flow_errors(agent: Any, batch: ChunkBatch, rng: jax.Array, dimensions: int) -> np.ndarray:
    """The linear policy's squared errors [b, steps], with noise and times from OpenPI's three keys."""
    _, noise_key, time_key = jax.random.split(rng, 3)
    noise = np.asarray(jax.random.normal(noise_key, batch.actions.shape), np.float64)
    t = np.asarray(jax.random.uniform(time_key, (len(noise),)), np.float64)[:, None, None]
    eye, plan, mix = (np.asarray(agent.actor.params[name], np.float64) for name in ("eye", "plan", "mix"))
    x_t = t * noise + (1 - t) * batch.actions
    seen = (batch.observations.state @ eye @ plan).reshape(noise.shape)
    return np.square(x_t @ mix + seen * (1 + t) - (noise - batch.actions))[..., :dimensions].mean(axis=-1)
