"""Weights with an optional low-rank update, and the merge that folds such updates into the weights.

OpenPI's parametrization has two quirks that checkpoints depend on: the output projection sums its second factor over the
heads, and the feed-forward update is not scaled by alpha / rank.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jax.typing import DTypeLike
from jaxtyping import Float

from pirl.errors import CheckpointError
from pirl.models.config import ExpertConfig, LoraConfig, Pi0Config
from pirl.models.types import Array

# Both factors start random, so a fresh LoRA is not exactly the identity; OpenPI does the same.
init_lora = initializers.normal(stddev=0.01)


def _low_rank_equations(equation: str) -> tuple[str, str]:
    """Split `x,w->y` at the last axis of w, through a rank axis "R": x·A -> (R), (R)·B -> y."""
    inputs, output = equation.split("->")
    x, w = inputs.split(",")
    through = output.replace(w[-1], "R")
    return f"{x},{w[:-1]}R->{through}", f"{through},{w[:-2]}R{w[-1]}->{output}"


class Einsum(nnx.Module):
    """One weight `w` applied by an einsum equation, with the update (x·A·B) · scale where LoRA is on."""

    def __init__(
        self,
        shape: Sequence[int],
        equation: str,
        *,
        init: jax.nn.initializers.Initializer,
        lora: LoraConfig | None,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
    ):
        self.equation = equation
        self.scale = None if lora is None else lora.scale
        self.w = nnx.Param(init(rngs.params(), shape, param_dtype))
        if lora is not None:
            self.lora_a = nnx.Param(init_lora(rngs.params(), (*shape[:-1], lora.rank), param_dtype))
            self.lora_b = nnx.Param(init_lora(rngs.params(), (*shape[:-2], lora.rank, shape[-1]), param_dtype))

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Apply in the dtype of `x`."""
        y = jnp.einsum(self.equation, x, self.w[...].astype(x.dtype))
        if self.scale is None:
            return y
        first, second = _low_rank_equations(self.equation)
        update = jnp.einsum(first, x, self.lora_a[...].astype(x.dtype))
        return y + jnp.einsum(second, update, self.lora_b[...].astype(x.dtype)) * self.scale


class FeedForward(nnx.Module):
    """Gated GELU feed-forward block of Gemma."""

    def __init__(self, expert: ExpertConfig, *, rngs: nnx.Rngs, param_dtype: jnp.dtype):
        width, hidden, lora = expert.width, expert.mlp_dim, expert.mlp_lora
        gating_init = initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))
        self.gating_einsum = nnx.Param(gating_init(rngs.params(), (2, width, hidden), param_dtype))
        self.linear = nnx.Param(initializers.lecun_normal()(rngs.params(), (hidden, width), param_dtype))
        self.has_lora = lora is not None
        if lora is not None:

            def factor(*shape: int) -> nnx.Param:
                return nnx.Param(init_lora(rngs.params(), shape, param_dtype))

            self.gating_einsum_lora_a = factor(2, width, lora.rank)
            self.gating_einsum_lora_b = factor(2, lora.rank, hidden)
            self.linear_lora_a = factor(hidden, lora.rank)
            self.linear_lora_b = factor(lora.rank, width)

    def __call__(self, x: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
        """Apply in the dtype of `x`."""

        def dot(x: Array, w: Array, factors: tuple[Array, Array] | None) -> Array:
            y = jnp.dot(x, w.astype(x.dtype))
            if factors is None:
                return y
            a, b = factors
            return y + jnp.dot(jnp.dot(x, a.astype(x.dtype)), b.astype(x.dtype))

        gating = [
            (self.gating_einsum_lora_a[i], self.gating_einsum_lora_b[i]) if self.has_lora else None for i in (0, 1)
        ]
        down = (self.linear_lora_a[...], self.linear_lora_b[...]) if self.has_lora else None
        hidden = jax.nn.gelu(dot(x, self.gating_einsum[0], gating[0])) * dot(x, self.gating_einsum[1], gating[1])
        return dot(hidden, self.linear[...], down)


def merge_lora(params: Mapping[str, Array], config: Pi0Config, dtype: DTypeLike | None = None) -> dict[str, Array]:
    """Fold every low-rank update of a flat '/'-keyed parameter dict into its weight; the result has no LoRA keys.

    The sums are taken in float32 and rounded once: to `dtype`, or to that of the weight. An update can be smaller than
    what bfloat16 resolves, so bfloat16 weights are best merged into float32.
    """
    merged = {path: value for path, value in params.items() if "lora" not in path}
    factors = {path: value for path, value in params.items() if "lora" in path}
    del params  # the caller may have let go of it too: then each weight is freed as its merged one is made
    for path in sorted(merged):
        # Attention weights are called `w` beside `lora_a`; feed-forward weights carry the suffix on their own name.
        is_attention = path.endswith("/w")
        stem = path.removesuffix("/w") + "/lora" if is_attention else path + "_lora"
        target = merged[path].dtype if dtype is None else jnp.dtype(dtype)
        if f"{stem}_a" not in factors or f"{stem}_b" not in factors:
            merged[path] = merged[path].astype(target)
            continue
        expert = config.action_expert if "_1/" in path else config.language
        scale = 1.0
        if is_attention:
            if expert.attention_lora is None:
                raise CheckpointError(f"{stem}_a is a LoRA weight, but the given model has no attention LoRA there.")
            scale = expert.attention_lora.scale
        a, b = factors.pop(f"{stem}_a"), factors.pop(f"{stem}_b")
        shared_heads = "/attn_vec_einsum" in path
        merged[path] = _merge_layers(merged[path], a, b, scale, target, shared_heads)
    if factors:
        raise CheckpointError(f"these LoRA weights have no weight to be merged into: {', '.join(sorted(factors))}.")
    return merged


@partial(jax.jit, static_argnames=("dtype", "shared_heads"))
def _merge_layers(
    weight: Array, a: Array, b: Array, scale: float | Array, dtype: jnp.dtype, shared_heads: bool
) -> Array:
    """One weight of all layers, layer by layer: the float32 intermediates of a full-size model are large."""

    def merge(layer: tuple[Array, Array, Array]) -> Array:
        weight, a, b = (x.astype(jnp.float32) for x in layer)
        if shared_heads:  # [head, rank, width]: the output projection's heads share the sum of their second factors
            b = b.sum(axis=0, keepdims=True)
        return (weight + scale * (a @ b)).astype(dtype)

    return jax.lax.map(merge, (weight, a, b))
