"""AdamW with a learning-rate schedule, with OpenPI's defaults."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import BFloat16, Float32, PRNGKeyArray

from pirl.errors import ConfigError
from pirl.models.types import Array


@dataclass(frozen=True)
class OptimiserConfig:
    """AdamW with gradient clipping and a learning-rate schedule."""

    peak_lr: float = 2.5e-5
    """Learning rate at the end of the warm-up."""
    schedule: Literal["cosine", "rsqrt", "constant"] = "cosine"
    """Schedule after the warm-up: cosine decay to end_lr, inverse square root, or constant."""
    warmup_steps: int = 1_000
    """Updates of linear warm-up."""
    decay_steps: int = 30_000
    """Updates, including the warm-up, until the cosine reaches end_lr."""
    end_lr: float = 2.5e-6
    """Learning rate at the end of the cosine decay."""
    timescale: float = 10_000.0
    """rsqrt: updates after which the learning rate has fallen to 1/√2 of its peak."""
    b1: float = 0.9
    """Adam's β₁: decay of the first moment."""
    b2: float = 0.95
    """Adam's β₂: decay of the second moment."""
    eps: float = 1e-8
    """Adam's ε, added to the root of the second moment."""
    weight_decay: float = 1e-10
    """Decoupled weight decay."""
    clip_norm: float = 1.0
    """Global gradient norm above which gradients are clipped."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage dtype of both moments; bfloat16 halves their memory. They are computed in float32."""

    def __post_init__(self) -> None:
        for name in ("peak_lr", "end_lr", "timescale", "b1", "b2", "eps", "weight_decay", "clip_norm"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} = {getattr(self, name)} should be a finite number.")
        if self.schedule not in ("cosine", "rsqrt", "constant"):
            raise ConfigError(f"schedule should be cosine, rsqrt or constant; it is {self.schedule!r}.")
        if self.moments_dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"moments_dtype should be float32 or bfloat16; it is {self.moments_dtype!r}.")
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
        adamw = optax.adamw(self.learning_rate(), b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=self.weight_decay)
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm), adamw if self.moments_dtype == "float32" else _kept_small(adamw)
        )

    def step(self, gradients: Any, moments: Any, parameters: Any) -> tuple[Any, Any, Float32[Array, ""]]:
        """Parameters and moments after one update, and the learning rate that it had."""
        made = optax.tree_utils.tree_get_all_with_path(moments, "count")[0][1]  # several parts count the updates
        changes, moments = self.make().update(gradients, moments, parameters)
        return optax.apply_updates(parameters, changes), moments, jnp.asarray(self.learning_rate()(made), jnp.float32)


def _kept_small(adamw: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimiser with its moments kept in bfloat16 between updates.

    bfloat16 has 8 significant bits, so rounding to the nearest swallows changes below 1/512. In a step the mean of
    gradients moves by a tenth (b1 = 0.9) of its distance from the gradient, and is at most some per cent off. The mean of
    squares moves by a twentieth (b2 = 0.95), or by a thousandth (b2 = 0.999), which would never be enough to let it fall
    again. It is therefore rounded by chance, up or down so that it is right on average.
    """

    def keep(state: Any) -> Any:
        adam, *others = state
        leaves, structure = jax.tree.flatten(adam.nu)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), adam.count), len(leaves))
        nu = [round_by_chance(leaf, key) for leaf, key in zip(leaves, keys, strict=True)]
        return (_with_moments(adam, _cast(adam.mu, jnp.bfloat16), jax.tree.unflatten(structure, nu)), *others)

    def initialise(parameters: Any) -> Any:
        adam, *others = adamw.init(parameters)
        return (_with_moments(adam, _cast(adam.mu, jnp.bfloat16), _cast(adam.nu, jnp.bfloat16)), *others)

    def update(gradients: Any, state: Any, parameters: Any = None) -> tuple[Any, Any]:
        adam, *others = state
        wide = _with_moments(adam, _cast(adam.mu, jnp.float32), _cast(adam.nu, jnp.float32))
        changes, state = adamw.update(gradients, (wide, *others), parameters)
        return changes, keep(state)

    return optax.GradientTransformation(initialise, update)


def _with_moments(adam: Any, mu: Any, nu: Any) -> Any:
    return adam._replace(mu=mu, nu=nu)


def _cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def round_by_chance(x: Float32[Array, "*shape"], rng: PRNGKeyArray) -> BFloat16[Array, "*shape"]:
    """To one of the two nearest bfloat16 numbers, to the nearer one more often, so that the mean is `x`.

    For finite numbers. The bits are the same however the array is laid out over devices.
    """
    # bfloat16 is the upper half of a float32: what is cut off carries into it as often as it is large.
    chance = jax.random.bits(rng, x.shape, jnp.uint16).astype(jnp.uint32)
    carried = jax.lax.bitcast_convert_type(x, jnp.uint32) + chance
    return jax.lax.bitcast_convert_type((carried >> 16).astype(jnp.uint16), jnp.bfloat16)
