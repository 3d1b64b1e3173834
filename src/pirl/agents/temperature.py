"""How sharply advantages weight chunks, with a fixed or adaptive temperature."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float

from pirl.agents.base import Metrics
from pirl.errors import ConfigError
from pirl.models.types import Array


@dataclass(frozen=True)
class TemperatureConfig:
    """How sharply advantages weight chunks: exp(advantage / β)."""

    beta: float = 0.1
    """The temperature β; its initial value if adaptive."""
    adaptive: bool = False
    """Adjust β so that the effective sample size of the weights stays at target_ess."""
    target_ess: float = 0.5
    """Target effective sample size, as a fraction of the batch."""
    learning_rate: float = 0.01
    """Learning rate of log β."""
    max_weight: float = 100.0
    """Largest weight; larger ones are clipped."""

    def __post_init__(self) -> None:
        if min(self.beta, self.max_weight, self.learning_rate) <= 0:
            raise ConfigError(f"beta, max_weight and learning_rate of the temperature should be positive: {self}.")
        if not 0 < self.target_ess < 1:
            raise ConfigError(f"temperature.target_ess should be between 0 and 1; it is {self.target_ess}.")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Temperature:
    """β, as its logarithm, and the optimiser that moves it."""

    log_beta: Any
    moments: Any
    config: TemperatureConfig = field(metadata={"static": True})

    @classmethod
    def create(cls, config: TemperatureConfig) -> "Temperature":
        """Begin where the configuration says."""
        log_beta = jnp.log(jnp.float32(config.beta))
        return cls(log_beta=log_beta, moments=optax.adam(config.learning_rate).init(log_beta), config=config)

    def weigh(self, advantages: Float[Array, " b"]) -> Float[Array, " b"]:
        """min(exp(advantage / β), max_weight)."""
        # Clipped before the exponential: its overflow would turn 0 · ∞ into NaN.
        return jnp.exp(jnp.minimum(advantages / jnp.exp(self.log_beta), jnp.log(self.config.max_weight)))

    def describe(self, advantages: Float[Array, " b"]) -> Metrics:
        """How even the weights of a batch are, and how many are clipped."""
        beta = jnp.exp(self.log_beta)
        return {
            # Before clipping: only so it rises with β, and an adaptive β finds its way from either side.
            "actor/ess": effective_sample_size(jnp.exp((advantages - jnp.max(advantages)) / beta)),
            "actor/clip_fraction": jnp.mean(advantages / beta >= jnp.log(self.config.max_weight)),
            "actor/temperature": beta,
        }

    def move(self, ess: Float[Array, ""]) -> "Temperature":
        """Towards more even weights if too few samples count, towards sharper ones if too many do."""
        changes, moments = optax.adam(self.config.learning_rate).update(ess - self.config.target_ess, self.moments)
        return replace(self, log_beta=jnp.clip(self.log_beta + changes, -10.0, 10.0), moments=moments)


def effective_sample_size(weights: Float[Array, " b"]) -> Float[Array, ""]:
    """The share of samples that would say as much if they counted alike: (Σ w)² / (b · Σ w²)."""
    return jnp.square(jnp.sum(weights)) / jnp.maximum(weights.shape[0] * jnp.sum(jnp.square(weights)), 1e-12)
