"""The compiled programs of a run: one update, several in one, a validation."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pirl.agents.common import Agent, Metrics
from pirl.data import ChunkBatch
from pirl.training.health import guarded
from pirl.training.setup import Setup, agent_sharding


def compile_updates(setup: Setup) -> tuple[Any, Any, Any]:
    """One update; a scan of several; and a validation. Updates take over the learner's memory."""

    def update(agent: Agent, batch: Any, rng: jax.Array) -> tuple[Agent, Metrics]:
        return agent.update(batch, rng)

    careful = guarded(update, setup.config.health.loss_limit)

    def updates(agent: Agent, batches: Any, rngs: jax.Array) -> tuple[Agent, Metrics]:
        return jax.lax.scan(lambda agent, each: careful(agent, *each), agent, (batches, rngs))

    def validate(agent: Agent, batch: ChunkBatch, rng: jax.Array) -> Metrics:
        return agent.validate(batch, rng)

    # The learner stays where it lies: laid out otherwise, the next update would have to be compiled again.
    # What is measured is everywhere, so that every host sees it.
    places: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    if setup.mesh.size > 1:
        everywhere = NamedSharding(setup.mesh, PartitionSpec())
        places, measured = {"out_shardings": (agent_sharding(setup), everywhere)}, {"out_shardings": everywhere}
    return (
        jax.jit(careful, donate_argnums=0, **places),
        jax.jit(updates, donate_argnums=0, **places),
        jax.jit(validate, **measured),
    )


def update_keys(seed: int, rollbacks: int, step: int, count: int) -> jax.Array:
    """The randomness of an update follows from the seed and its number; of several, one key each."""
    key = jax.random.key(seed)
    if rollbacks:
        key = jax.random.fold_in(key, rollbacks)
    if count == 1:
        return jax.random.fold_in(key, step)
    return jax.vmap(lambda step: jax.random.fold_in(key, step))(np.arange(step, step + count))
