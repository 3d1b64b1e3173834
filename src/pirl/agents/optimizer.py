"""AdamW with a learning-rate schedule, as in OpenPI; optionally with moments in bfloat16."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import BFloat16, Float32, PRNGKeyArray

from pirl.agents.config import OptimizerConfig
from pirl.models.types import Array


def learning_rate(config: OptimizerConfig) -> Callable[[Any], Any]:
    """The learning rate as a function of the number of updates made."""
    first = config.peak_lr / (config.warmup_steps + 1)
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            first, config.peak_lr, config.warmup_steps, config.decay_steps, config.end_lr
        )

    def after_warmup(step: Any) -> Any:
        if config.schedule == "constant":
            return config.peak_lr
        return config.peak_lr / jnp.sqrt((config.timescale + step) / config.timescale)

    warmup = optax.linear_schedule(first, config.peak_lr, config.warmup_steps)
    return optax.join_schedules([warmup, after_warmup], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm."""
    adamw = optax.adamw(
        learning_rate(config), b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay
    )
    if config.moments_dtype == "bfloat16":
        adamw = _with_bfloat16_moments(adamw)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def optimizer_step(
    config: OptimizerConfig, grads: Any, opt_state: Any, params: Any
) -> tuple[Any, Any, Float32[Array, ""]]:
    """Parameters and optimizer state after one update, and the learning rate it used."""
    count = optax.tree_utils.tree_get_all_with_path(opt_state, "count")[0][1]  # several parts count alike
    updates, opt_state = make_optimizer(config).update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, jnp.asarray(learning_rate(config)(count), jnp.float32)


def _with_bfloat16_moments(adamw: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer with moments stored in bfloat16.

    bfloat16 has 8 significant bits, so rounding to nearest loses changes below 1/512. The first moment moves by a tenth
    (b1 = 0.9) of its distance to the gradient per update and stays accurate to some per cent. The second moves by 1/20
    (b2 = 0.95) or 1/1000 (b2 = 0.999) and would never fall again, so it is rounded stochastically.
    """

    def cast(adam: Any, dtype: Any) -> Any:
        mu, nu = jax.tree.map(lambda leaf: leaf.astype(dtype), (adam.mu, adam.nu))
        return adam._replace(mu=mu, nu=nu)

    def init(params: Any) -> Any:
        adam, *others = adamw.init(params)
        return (cast(adam, jnp.bfloat16), *others)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        adam, *others = state
        updates, (adam, *others) = adamw.update(grads, (cast(adam, jnp.float32), *others), params)
        leaves, structure = jax.tree.flatten(adam.nu)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), adam.count), len(leaves))
        nu = [round_stochastically(leaf, key) for leaf, key in zip(leaves, keys, strict=True)]
        small = cast(adam, jnp.bfloat16)._replace(nu=jax.tree.unflatten(structure, nu))
        return updates, (small, *others)

    return optax.GradientTransformation(init, update)


def round_stochastically(x: Float32[Array, "*shape"], rng: PRNGKeyArray) -> BFloat16[Array, "*shape"]:
    """Round finite numbers to one of the two nearest bfloat16 numbers so that the mean is `x`, on any sharding alike."""
    # bfloat16 is the upper half of a float32: random lower bits carry into it in proportion to the remainder.
    low = jax.random.bits(rng, x.shape, jnp.uint16).astype(jnp.uint32)
    carried = jax.lax.bitcast_convert_type(x, jnp.uint32) + low
    return jax.lax.bitcast_convert_type((carried >> 16).astype(jnp.uint16), jnp.bfloat16)
