"""Learners as policies in environments: in rollouts, and where success is measured."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Float32, Key

from pirl.agents.common import Agent
from pirl.agents.ript import RIPTAgent
from pirl.config import RLTrainConfig
from pirl.data import PolicyIO
from pirl.envs.base import EnvObservation, Policy
from pirl.envs.policy import ChunkPolicy, Pi0Policy, SampleActions
from pirl.envs.pool import EnvPool
from pirl.models import GuidedObservation, Observation
from pirl.models.types import Array
from pirl.training.health import Interrupted
from pirl.training.sharding import copy_to_hosts


def agent_policy(agent: Agent, policy_io: PolicyIO, pool: EnvPool) -> ChunkPolicy:
    """The learner as it acts: ACRLPD's critics choose among samples; RIPT under guidance steers by the prompt."""
    return ChunkPolicy(partial(_act, agent), policy_io, batch_size=_batch_size(pool), guided=_is_guided(agent))


def rollout_policy(agent: Agent, policy_io: PolicyIO, pool: EnvPool) -> ChunkPolicy:
    """The learner as it acts in the rollouts that it learns from."""
    act: SampleActions = partial(_act_in_rollout, agent) if isinstance(agent, RIPTAgent) else partial(_act, agent)
    # Before the first update the indicator means nothing to the policy.
    weight = agent.config.rollout_guidance if isinstance(agent, RIPTAgent) else 1.0
    guided = _is_guided(agent) and weight > 0 and int(agent.step) > 0
    return ChunkPolicy(act, policy_io, batch_size=_batch_size(pool), guided=guided)


def evaluated_policy(agent: Agent, policy_io: PolicyIO, pool: EnvPool, config: RLTrainConfig) -> ChunkPolicy:
    """The policy whose success is measured: the learner, or the policy that it exports."""
    if config.evaluation.best_of_n:
        return agent_policy(agent, policy_io, pool)
    # With the settings of its checkpoint, as it will act elsewhere.
    return Pi0Policy(
        agent.policy(),
        policy_io,
        batch_size=_batch_size(pool),
        num_steps=config.agent.denoising_steps,
        guidance=agent.config.acting_guidance,
    )


class StoppablePolicy:
    """A policy that raises `Interrupted` once a stop is requested."""

    def __init__(self, policy: Policy, is_stopped: Callable[[], bool]) -> None:
        self.horizon = policy.horizon
        self._policy, self._is_stopped = policy, is_stopped

    def infer(
        self, observations: EnvObservation, prompts: Sequence[str], seeds: Sequence[int], steps: Sequence[int]
    ) -> Float32[np.ndarray, "n horizon action_dim"]:
        """As the policy does."""
        if self._is_stopped():
            raise Interrupted
        return self._policy.infer(observations, prompts, seeds, steps)


def acting_copy(agent: Agent) -> Agent:
    """The learner on the devices of each host alone, without optimizer states, so that one of them can act by itself.

    All processes have to call it.
    """
    if jax.process_count() == 1:
        return agent
    acting: Agent = copy_to_hosts(
        jax.tree_util.tree_map_with_path(lambda path, leaf: None if _is_opt_state(path) else leaf, agent)
    )
    return acting


def _is_opt_state(path: tuple[Any, ...]) -> bool:
    return any(getattr(key, "name", "") == "opt_state" for key in path)


def _is_guided(agent: Agent) -> bool:
    return agent.config.acting_guidance > 0


def _batch_size(pool: EnvPool) -> int:
    """As many environments as need actions at a time."""
    return -(-pool.size // pool.groups)


@jax.jit
def _act(
    agent: Agent, observation: Observation | GuidedObservation, keys: Key[Array, " b"]
) -> Float[Array, "b horizon action_dim"]:
    return agent.act(observation, keys)


@jax.jit
def _act_in_rollout(
    agent: RIPTAgent, observation: Observation | GuidedObservation, keys: Key[Array, " b"]
) -> Float[Array, "b horizon action_dim"]:
    return agent.act_in_rollout(observation, keys)
