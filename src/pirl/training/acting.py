"""Learners in environments: how they act, and whose success is measured."""

from functools import partial

import jax
from jaxtyping import Float, Key

from pirl.agents.base import Agent
from pirl.config import EvaluationConfig
from pirl.data import PolicyIO
from pirl.envs.planner import ChunkPlanner, PolicyPlanner
from pirl.envs.pools import EnvPool
from pirl.models import Observation
from pirl.models.types import Array


def agent_planner(agent: Agent, policy_io: PolicyIO, pool: EnvPool) -> ChunkPlanner:
    """The learner as it acts: for ACRLPD, its critics choose among samples of the policy."""
    return ChunkPlanner(partial(_act, agent), policy_io, batch_size=_batch_size(pool))


def evaluated_planner(agent: Agent, policy_io: PolicyIO, pool: EnvPool, config: EvaluationConfig) -> ChunkPlanner:
    """Whose success is measured: the learner's, or that of the policy it exports."""
    if config.best_of_n:
        return agent_planner(agent, policy_io, pool)
    return PolicyPlanner(agent.policy(), policy_io, batch_size=_batch_size(pool))


def _batch_size(pool: EnvPool) -> int:
    """As many as are planned for at a time."""
    return -(-pool.size // pool.groups)


@jax.jit
def _act(agent: Agent, observation: Observation, keys: Key[Array, " b"]) -> Float[Array, "b horizon action_dim"]:
    return agent.act(observation, keys)
