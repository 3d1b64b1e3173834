"""What the trainer knows of a learner."""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Float, Key, PRNGKeyArray

from pirl.data.chunks import ChunkBatch
from pirl.models.pi0 import Pi0
from pirl.models.types import Array

# Scalars; NaN where a step did not compute one.
Metrics = dict[str, Any]


@runtime_checkable
class Agent(Protocol):
    """A learner: a pytree whose arrays are its state, and pure functions of it."""

    @property
    def config(self) -> Any:
        """Its hyper-parameters."""
        ...

    @property
    def step(self) -> Any:
        """How many updates it has made."""
        ...

    def update(self, batch: Any, rng: PRNGKeyArray) -> tuple[Any, Metrics]:
        """The learner after one update on a batch: of chunks, or of what else it learns from."""
        ...

    def validate(self, batch: ChunkBatch, rng: PRNGKeyArray) -> Metrics:
        """The losses on a batch from which nothing is learned."""
        ...

    def act(self, observation: Any, rng: Key[Array, "*b"]) -> Float[Array, "b horizon action_dim"]:
        """A chunk for every observation, in the model's units; with one key per observation, each its own noise.

        A learner that is guided by its prompt takes guided observations too.
        """
        ...

    def policy(self) -> Pi0:
        """The policy to deploy."""
        ...

    def parameter_counts(self) -> dict[str, int]:
        """How many parameters each part has."""
        ...


def draw_noise(rng: Key[Array, "*b"], batch: int, shape: tuple[int, ...]) -> Float[Array, "b *shape"]:
    """Normal noise for every sample, each from its own key, given one key or one per sample."""
    keys = rng if rng.ndim else jax.random.split(rng, batch)
    return jax.vmap(lambda key: jax.random.normal(key, shape))(keys)


def unless_empty(count: Float[Array, ""], value: Float[Array, ""]) -> Float[Array, ""]:
    """A metric of a batch; of one without anything to measure, NaN, which enters no mean."""
    return jnp.where(count > 0, value, jnp.nan)
