"""The two-expert Gemma transformer of π₀: shared attention, separate weights, a cache of the prefix's keys and values.

Prefix tokens (images, text) run through expert 0 and see each other; suffix tokens (state, actions) run through expert 1
and see the prefix and themselves. Because the prefix never looks at the suffix, the joint pass splits exactly into two:
the prefix once, and then any number of suffixes against its cached keys and values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn import initializers
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool, Float, Int, Shaped

from pirl.models.config import ExpertConfig, Remat
from pirl.models.lora import Einsum, FeedForward
from pirl.models.types import Array

# A masked logit: finite, so that a row without any valid key becomes uniform instead of NaN.
_MASKED = -2.3819763e38
# Axes of the device mesh; a batch is sharded over both.
BATCH_AXES = ("data", "fsdp")
# What each layer of a scan keeps for its backward pass; the rest is computed again.
_REMAT_POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "weight_dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys (after rotary embedding) and values of the prefix, one entry per layer."""

    keys: Float[Array, "layers b s kv_heads head_dim"]
    values: Float[Array, "layers b s kv_heads head_dim"]


def attention_mask(valid: Bool[Array, "b t"], block_start: Bool[Array, "*#b t"]) -> Bool[Array, "b t t"]:
    """Who may see whom: query i sees key j if j's block does not come after i's and both tokens are valid.

    `block_start` marks the tokens that open a new block; tokens of a block see each other and all earlier blocks.
    """
    block = jnp.cumsum(jnp.broadcast_to(block_start, valid.shape), axis=1)
    not_later = block[:, None, :] <= block[:, :, None]
    return not_later & valid[:, None, :] & valid[:, :, None]


def rotary_embedding(x: Float[Array, "b t heads dim"], positions: Int[Array, "b t"]) -> Float[Array, "b t heads dim"]:
    """Rotate the two halves of each head by the position, with wavelengths up to 10 000."""
    half = x.shape[-1] // 2
    # Rounded from float64: float32 powers differ between compilers by enough to be seen a thousand tokens on.
    wavelength = (10_000.0 ** ((2.0 / x.shape[-1]) * np.arange(half))).astype(np.float32)
    radians = positions[..., None, None].astype(jnp.float32) / wavelength
    sin, cos = jnp.sin(radians), jnp.cos(radians)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def attend(
    q: Float[Array, "b t heads dim"],
    k: Float[Array, "b t kv_heads dim"],
    v: Float[Array, "b t kv_heads dim"],
    mask: Bool[Array, "b l l"],
    cached: tuple[Float[Array, "b s kv_heads dim"], Float[Array, "b s kv_heads dim"]] | None = None,
    cached_mask: Bool[Array, "b s"] | None = None,
) -> Float[Array, "b t heads dim"]:
    """Grouped-query attention of `t = n · l` tokens over a shared cache and over their own group of `l`.

    The n groups are alternative continuations of one prefix: they share the cached keys, which are never copied, and do
    not see each other.
    """
    batch, tokens, heads, dim = q.shape
    kv_heads, length = k.shape[2], mask.shape[-1]
    if tokens == 0:  # the prefix of a policy without cameras and prompt
        return q
    groups = tokens // length
    q = q.reshape(batch, groups, length, kv_heads, heads // kv_heads, dim)
    k, v = (x.reshape(batch, groups, length, kv_heads, dim) for x in (k, v))

    # The order of axes in which the products leave a matrix multiplication: no transposed copies of the logits.
    logits = jnp.einsum("bnlkgh,bnmkh->bknlgm", q, k, preferred_element_type=jnp.float32)
    logits = jnp.where(mask[:, None, None, :, None], logits, _MASKED)
    if cached is None or cached_mask is None:
        weights = jax.nn.softmax(logits, axis=-1).astype(q.dtype)
        out = jnp.einsum("bknlgm,bnmkh->bnlkgh", weights, v)
        return out.reshape(batch, tokens, heads, dim)

    # One softmax over cached and own keys, without putting them into one array.
    cached_keys, cached_values = cached
    cached_logits = jnp.einsum("bnlkgh,bskh->bknlgs", q, cached_keys, preferred_element_type=jnp.float32)
    cached_logits = jnp.where(cached_mask[:, None, None, None, None], cached_logits, _MASKED)
    highest = jnp.maximum(
        jnp.max(logits, axis=-1, keepdims=True),
        jnp.max(cached_logits, axis=-1, keepdims=True, initial=_MASKED),
    )
    own, shared = (jnp.exp(x - jax.lax.stop_gradient(highest)) for x in (logits, cached_logits))
    total = jnp.sum(own, axis=-1, keepdims=True) + jnp.sum(shared, axis=-1, keepdims=True)
    own, shared = ((x / total).astype(q.dtype) for x in (own, shared))
    # Both products are summed in float32 and rounded once, as one product over all keys would be.
    out = jnp.einsum("bknlgm,bnmkh->bnlkgh", own, v, preferred_element_type=jnp.float32)
    out += jnp.einsum("bknlgs,bskh->bnlkgh", shared, cached_values, preferred_element_type=jnp.float32)
    return out.astype(q.dtype).reshape(batch, tokens, heads, dim)


def shard_batch(x: Shaped[Array, "b ..."]) -> Shaped[Array, "b ..."]:
    """Constrain activations to be sharded along the batch, if there is a mesh that divides it.

    Otherwise the compiler may carry the sharding of a weight over to what it is multiplied with, so that every device
    holds some columns of all samples.
    """
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty or set(mesh.axis_names) != set(BATCH_AXES) or mesh.size == 1 or x.shape[0] % mesh.size:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))


def scan_layers(
    layer: Callable[[Array, Any], tuple[Array, Any]], x: Float[Array, "b t w"], layers: Any, remat: Remat
) -> tuple[Float[Array, "b t w"], Any]:
    """Apply stacked layers one after the other; also returns what each layer returns beside its output."""

    def step(x: Array, layers: Any) -> tuple[Array, Any]:
        x, extra = layer(x, layers)
        return shard_batch(x), extra

    if remat != "none":
        step = jax.checkpoint(step, prevent_cse=False, policy=_REMAT_POLICIES[remat])
    return jax.lax.scan(step, shard_batch(x), layers)


class RMSNorm(nnx.Module):
    """Root-mean-square norm; with conditioning (adaRMS) its scale, shift and residual gate come from a vector.

    The options are those of Flax's layers: rngs, dtype and param_dtype.
    """

    def __init__(self, width: int, *, conditioned: bool, **options: Any):
        if conditioned:
            # Zero: a fresh adaRMS block has a closed gate, so it starts as the identity.
            self.Dense_0 = nnx.Linear(width, 3 * width, kernel_init=initializers.zeros, **options)
        else:
            self.scale = nnx.Param(jnp.zeros((width,), options["param_dtype"]))

    def __call__(
        self, x: Float[Array, "b t w"], condition: Float[Array, "b w"] | None
    ) -> tuple[Float[Array, "b t w"], Float[Array, "b 1 w"] | None]:
        """The normed tokens and, where conditioned, the gate of the residual branch they open."""
        variance = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
        normed = x * jax.lax.reciprocal(jnp.sqrt(variance + 1e-6))
        if hasattr(self, "scale"):
            return (normed * (1 + self.scale[...])).astype(x.dtype), None
        assert condition is not None
        modulation = self.Dense_0(condition.astype(x.dtype))
        scale, shift, gate = jnp.split(modulation[:, None, :], 3, axis=-1)
        return (normed * (1 + scale) + shift).astype(x.dtype), gate


def _named(name: str, expert: int) -> str:
    """OpenPI's names: those of expert 1 end in `_1`."""
    return name if expert == 0 else f"{name}_{expert}"


class Attention(nnx.Module):
    """The projections of both experts."""

    def __init__(self, experts: tuple[ExpertConfig, ...], *, rngs: nnx.Rngs, param_dtype: jnp.dtype):
        for index, expert in enumerate(experts):
            heads, kv_heads, dim, width = expert.num_heads, expert.num_kv_heads, expert.head_dim, expert.width
            options: dict[str, Any] = {"lora": expert.attention_lora, "rngs": rngs, "param_dtype": param_dtype}

            def lecun(*batch_axis: int) -> initializers.Initializer:
                return initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=batch_axis)

            if kv_heads == heads:
                qkv = Einsum((3, heads, width, dim), "BSD,3KDH->3BSKH", init=lecun(0, 1), **options)
                setattr(self, _named("qkv_einsum", index), qkv)
            else:
                query = Einsum((heads, width, dim), "BTD,NDH->BTNH", init=lecun(0), **options)
                key_value = Einsum((2, kv_heads, width, dim), "BSD,2KDH->2BSKH", init=lecun(0, 1), **options)
                setattr(self, _named("q_einsum", index), query)
                setattr(self, _named("kv_einsum", index), key_value)
            output_init = initializers.lecun_normal(in_axis=(-3, -2), out_axis=-1)
            output = Einsum((heads, dim, width), "BTNH,NHD->BTD", init=output_init, **options)
            setattr(self, _named("attn_vec_einsum", index), output)

    def project(self, expert: int, x: Float[Array, "b t w"]) -> tuple[Array, Array, Array]:
        """Queries, keys and values of one expert's tokens."""
        if hasattr(self, name := _named("qkv_einsum", expert)):
            q, k, v = getattr(self, name)(x)
            return q, k, v
        k, v = getattr(self, _named("kv_einsum", expert))(x)
        return getattr(self, _named("q_einsum", expert))(x), k, v


class Block(nnx.Module):
    """One layer: attention and feed-forward, each behind a norm, for both experts."""

    def __init__(self, experts: tuple[ExpertConfig, ...], *, adarms: bool, **options: Any):
        rngs, param_dtype = options["rngs"], options["param_dtype"]
        self.attn = Attention(experts, rngs=rngs, param_dtype=param_dtype)
        for index, expert in enumerate(experts):
            for name in ("pre_attention_norm", "pre_ffw_norm"):
                norm = RMSNorm(expert.width, conditioned=adarms and index == 1, **options)
                setattr(self, _named(name, index), norm)
            setattr(self, _named("mlp", index), FeedForward(expert, rngs=rngs, param_dtype=param_dtype))

    def __call__(
        self,
        expert: int,
        x: Float[Array, "b t w"],
        positions: Int[Array, "b t"],
        mask: Bool[Array, "b l l"],
        condition: Float[Array, "b w"] | None,
        cached: tuple[Array, Array] | None,
        cached_mask: Bool[Array, "b s"] | None,
    ) -> tuple[Float[Array, "b t w"], tuple[Array, Array]]:
        """Run one expert's tokens through the layer; also returns their keys and values."""

        def residual(x: Array, y: Array, gate: Array | None) -> Array:
            return x + y if gate is None else x + y * gate

        normed, gate = getattr(self, _named("pre_attention_norm", expert))(x, condition)
        q, k, v = self.attn.project(expert, normed)
        q, k = rotary_embedding(q, positions), rotary_embedding(k, positions)
        q = q * q.shape[-1] ** -0.5
        attended = attend(q, k, v, mask, cached, cached_mask)
        x = residual(x, getattr(self.attn, _named("attn_vec_einsum", expert))(attended), gate)
        normed, gate = getattr(self, _named("pre_ffw_norm", expert))(x, condition)
        return residual(x, getattr(self, _named("mlp", expert))(normed), gate), (k, v)


class Embedder(nnx.Module):
    """The text embedding table of expert 0."""

    def __init__(self, vocab_size: int, width: int, *, rngs: nnx.Rngs, param_dtype: jnp.dtype):
        init = initializers.normal(stddev=0.01)
        self.input_embedding = nnx.Param(init(rngs.params(), (vocab_size, width), param_dtype))


class Transformer(nnx.Module):
    """Both experts' layers, stacked along a leading axis and scanned."""

    def __init__(
        self,
        experts: tuple[ExpertConfig, ExpertConfig],
        vocab_size: int,
        *,
        adarms: bool,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        remat: Remat,
        rngs: nnx.Rngs,
    ):
        self.dtype = dtype
        self.remat = remat
        self.embedder = Embedder(vocab_size, experts[0].width, rngs=rngs, param_dtype=param_dtype)

        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}

        def make_block(key: Array) -> Block:
            return Block(experts, adarms=adarms, rngs=nnx.Rngs(key), **options)

        # A loop rather than vmap: creating a full-size model needs the scratch memory of one layer, not of all.
        self.layers = jax.lax.map(make_block, jax.random.split(rngs.params(), experts[0].depth))
        for index, expert in enumerate(experts):
            norm = RMSNorm(expert.width, conditioned=adarms and index == 1, rngs=rngs, **options)
            setattr(self, _named("final_norm", index), norm)

    def embed(self, tokens: Int[Array, "b l"]) -> Float[Array, "b l w"]:
        """Rows of the embedding table, scaled by the square root of the width."""
        rows = self.embedder.input_embedding[...][tokens]
        return (rows * jnp.sqrt(rows.shape[-1]).astype(rows.dtype)).astype(self.dtype)

    def __call__(
        self,
        expert: int,
        tokens: Float[Array, "b t w"],
        positions: Int[Array, "b t"],
        mask: Bool[Array, "b l l"],
        *,
        condition: Float[Array, "b w"] | None = None,
        cache: KVCache | None = None,
        cache_mask: Bool[Array, "b s"] | None = None,
    ) -> tuple[Float[Array, "b t w"], KVCache]:
        """Run tokens through one expert's layers and final norm, optionally after a cached prefix.

        Returns the outputs and the keys and values of these tokens.
        """

        def layer(x: Array, layer: tuple[Block, tuple[Array, Array] | None]) -> tuple[Array, tuple[Array, Array]]:
            block, cached = layer
            return block(expert, x, positions, mask, condition, cached, cache_mask)

        layers = (self.layers, None if cache is None else (cache.keys, cache.values))
        x, (keys, values) = scan_layers(layer, tokens.astype(self.dtype), layers, self.remat)
        out, _ = getattr(self, _named("final_norm", expert))(x, condition)
        return out, KVCache(keys, values)
