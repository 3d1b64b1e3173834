"""AdamW under a schedule of the learning rate, as OpenPI trains; its defaults are the defaults here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import optax

from pirl.errors import ConfigError


@dataclass(frozen=True)
class OptimiserConfig:
    """AdamW with clipped gradients, and how its learning rate rises and falls."""

    peak_lr: float = 2.5e-5
    """Learning rate at the end of the warm-up."""
    schedule: Literal["cosine", "rsqrt", "constant"] = "cosine"
    """What follows the warm-up: half a cosine down to end_lr, one over the square root of time, or no change."""
    warmup_steps: int = 1_000
    """Updates in which the learning rate rises linearly."""
    decay_steps: int = 30_000
    """Updates, the warm-up included, until the cosine has come down."""
    end_lr: float = 2.5e-6
    """Learning rate after the cosine."""
    timescale: float = 10_000.0
    """Updates after which rsqrt has fallen to 1/√2."""
    b1: float = 0.9
    """Decay of the mean of gradients."""
    b2: float = 0.95
    """Decay of the mean of squared gradients."""
    eps: float = 1e-8
    """Added to the root of the latter."""
    weight_decay: float = 1e-10
    """Decoupled weight decay."""
    clip_norm: float = 1.0
    """Gradients with a larger global norm are scaled down to it."""

    def __post_init__(self) -> None:
        if self.schedule not in ("cosine", "rsqrt", "constant"):
            raise ConfigError(f"schedule should be cosine, rsqrt or constant; it is {self.schedule!r}.")
        if self.peak_lr <= 0 or self.clip_norm <= 0 or self.timescale <= 0 or self.eps <= 0:
            raise ConfigError(f"peak_lr, clip_norm, timescale and eps should be positive: {self}.")
        if self.warmup_steps < 0 or self.weight_decay < 0 or self.end_lr < 0:
            raise ConfigError(f"warmup_steps, weight_decay and end_lr should not be negative: {self}.")
        if not (0 <= self.b1 < 1 and 0 <= self.b2 < 1):
            raise ConfigError(f"b1 = {self.b1} and b2 = {self.b2} should be in [0, 1).")
        if self.schedule == "cosine" and self.decay_steps <= self.warmup_steps:
            raise ConfigError(
                f"decay_steps = {self.decay_steps} should exceed warmup_steps = {self.warmup_steps}, which it includes."
            )

    def learning_rate(self) -> Callable[[Any], Any]:
        """The learning rate of update number 0, 1, …"""
        first = self.peak_lr / (self.warmup_steps + 1)
        if self.schedule == "cosine":
            return optax.warmup_cosine_decay_schedule(
                first, self.peak_lr, self.warmup_steps, self.decay_steps, self.end_lr
            )
        return optax.join_schedules(
            [optax.linear_schedule(first, self.peak_lr, self.warmup_steps), self._after_warmup], [self.warmup_steps]
        )

    def _after_warmup(self, step: Any) -> Any:
        if self.schedule == "constant":
            return self.peak_lr
        return self.peak_lr / jnp.sqrt((self.timescale + step) / self.timescale)

    def make(self) -> optax.GradientTransformation:
        """The optimiser itself."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.adamw(self.learning_rate(), b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=self.weight_decay),
        )
