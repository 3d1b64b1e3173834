"""A critic ensemble on its way: what learns, what gives it targets, what chooses when acting."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, Int

from pirl.agents.base import Metrics
from pirl.agents.learning import move_average
from pirl.agents.optimisers import OptimiserConfig
from pirl.models.critic import CriticParameters
from pirl.models.types import Array

Aggregate = Literal["min", "mean", "subset_min", "lower_bound"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LearnedCritics:
    """The critics, their slow copy for targets, their running average for acting, and the optimiser."""

    latest: CriticParameters
    target: CriticParameters
    average: CriticParameters
    moments: Any
    optimiser: OptimiserConfig = field(metadata={"static": True})
    target_update_rate: float = field(metadata={"static": True})
    ema_decay: float = field(metadata={"static": True})

    @classmethod
    def create(
        cls, critics: CriticParameters, optimiser: OptimiserConfig, target_update_rate: float, ema_decay: float
    ) -> "LearnedCritics":
        """Begin with fresh critics; the three sets share no buffers, since they are donated."""
        return cls(
            latest=critics,
            target=jax.tree.map(jnp.copy, critics),
            average=jax.tree.map(jnp.copy, critics),
            moments=optimiser.make().init(critics),
            optimiser=optimiser,
            target_update_rate=target_update_rate,
            ema_decay=ema_decay,
        )

    def apply(self, gradients: CriticParameters) -> tuple["LearnedCritics", Metrics]:
        """One step of the optimiser, of the slow copy and of the average."""
        latest, moments, rate = self.optimiser.step(gradients, self.moments, self.latest)
        metrics = {
            "grad_norm/critic": optax.tree.norm(gradients),
            "param_norm/critic": optax.tree.norm(latest),
            "lr/critic": rate,
        }
        moved = replace(
            self,
            latest=latest,
            target=move_average(self.target, latest, 1 - self.target_update_rate),
            average=move_average(self.average, latest, self.ema_decay),
            moments=moments,
        )
        return moved, metrics


def aggregate_values(
    values: Float[Array, "critics *b"], how: Aggregate, pair: Int[Array, " 2"] | None, pessimism: float
) -> Float[Array, "*b"]:
    """One value from the ensemble. Without a pair, subset_min is the mean over all."""
    if how == "min":
        return jnp.min(values, axis=0)
    if how == "lower_bound":
        return jnp.mean(values, axis=0) - pessimism * jnp.std(values, axis=0)
    if how == "mean" or pair is None:
        return jnp.mean(values, axis=0)
    return jnp.min(values[pair], axis=0)
