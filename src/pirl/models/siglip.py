"""The SigLIP vision tower: patches of an image become tokens of the language model's width."""

from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax.nn import initializers
from jaxtyping import Float

from pirl.models.config import Remat, VisionConfig
from pirl.models.gemma import scan_layers
from pirl.models.types import Array

# The keyword arguments of layers: rngs, dtype (in which they compute) and param_dtype.
Options = dict[str, Any]


class SelfAttention(nnx.Module):
    """Multi-head attention of every token over every token, softmax included in the dtype of the layer."""

    def __init__(self, config: VisionConfig, options: Options):
        heads = (config.num_heads, config.width // config.num_heads)
        options = options | {"kernel_init": initializers.xavier_uniform()}
        self.query, self.key, self.value = (nnx.LinearGeneral(config.width, heads, **options) for _ in range(3))
        self.out = nnx.LinearGeneral(heads, config.width, axis=(-2, -1), **options)

    def __call__(self, x: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
        q, k, v = self.query(x), self.key(x), self.value(x)
        q = q / jnp.sqrt(q.shape[-1]).astype(x.dtype)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)).astype(x.dtype)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v))


class Mlp(nnx.Module):
    """Two dense layers with a GELU between them."""

    def __init__(self, config: VisionConfig, options: Options):
        inits: Options = {"kernel_init": initializers.xavier_uniform(), "bias_init": initializers.normal(stddev=1e-6)}
        self.Dense_0 = nnx.Linear(config.width, config.mlp_dim, **inits, **options)
        self.Dense_1 = nnx.Linear(config.mlp_dim, config.width, **inits, **options)

    def __call__(self, x: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
        return self.Dense_1(jax.nn.gelu(self.Dense_0(x)))


class LayerNorm(nnx.Module):
    """Layer norm with float32 statistics, whatever the dtype of its input."""

    def __init__(self, width: int, *, param_dtype: jnp.dtype):
        self.scale = nnx.Param(jnp.ones((width,), param_dtype))
        self.bias = nnx.Param(jnp.zeros((width,), param_dtype))

    def __call__(self, x: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(x32, axis=-1, keepdims=True)
        # The one-pass form of the variance, which SigLIP was trained with.
        variance = jnp.maximum(0.0, jnp.mean(jnp.square(x32), axis=-1, keepdims=True) - jnp.square(mean))
        scale = jax.lax.rsqrt(variance + 1e-6) * self.scale[...]
        return ((x32 - mean) * scale + self.bias[...]).astype(x.dtype)


class EncoderBlock(nnx.Module):
    """One pre-norm layer. The attribute names are those of the released checkpoints."""

    def __init__(self, config: VisionConfig, options: Options):
        self.LayerNorm_0 = LayerNorm(config.width, param_dtype=options["param_dtype"])
        self.MultiHeadDotProductAttention_0 = SelfAttention(config, options)
        self.LayerNorm_1 = LayerNorm(config.width, param_dtype=options["param_dtype"])
        self.MlpBlock_0 = Mlp(config, options)

    def __call__(self, x: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
        x = x + self.MultiHeadDotProductAttention_0(self.LayerNorm_0(x))
        return x + self.MlpBlock_0(self.LayerNorm_1(x))


class Encoder(nnx.Module):
    """The layers, stacked along a leading axis and scanned, and the final norm."""

    def __init__(self, config: VisionConfig, remat: Remat, options: Options):
        def make_block(key: Array) -> EncoderBlock:
            return EncoderBlock(config, options | {"rngs": nnx.Rngs(key)})

        self.remat = remat
        self.encoderblock = jax.lax.map(make_block, jax.random.split(options["rngs"].params(), config.depth))
        self.encoder_norm = LayerNorm(config.width, param_dtype=options["param_dtype"])

    def __call__(self, x: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
        x, _ = scan_layers(lambda x, block: (block(x), None), x, self.encoderblock, self.remat)
        return self.encoder_norm(x)


class PatchEmbedding(nnx.Module):
    """Non-overlapping patches, each mapped linearly: a convolution with stride equal to its size."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs, param_dtype: jnp.dtype):
        shape = (*config.patch_size, 3, config.width)
        self.kernel = nnx.Param(initializers.lecun_normal()(rngs.params(), shape, param_dtype))
        self.bias = nnx.Param(jnp.zeros((config.width,), param_dtype))

    def __call__(self, images: Float[Array, "b h w 3"]) -> Float[Array, "b t width"]:
        """Patches in row-major order, in float32."""
        p, q, _, width = self.kernel.shape
        rows, columns = images.shape[1] // p, images.shape[2] // q
        # As a matrix product, since XLA's CPU convolutions (their gradients above all) are many times slower.
        patches = images[:, : rows * p, : columns * q]
        patches = rearrange(patches, "b (h p) (w q) c -> b (h w) (p q c)", p=p, q=q).astype(jnp.float32)
        kernel = self.kernel[...].astype(jnp.float32).reshape(-1, width)
        return jnp.dot(patches, kernel) + self.bias[...].astype(jnp.float32)


class VisionTower(nnx.Module):
    """Images to tokens."""

    def __init__(
        self,
        config: VisionConfig,
        *,
        tokens: int,
        out_width: int,
        dtype: jnp.dtype,
        param_dtype: jnp.dtype,
        remat: Remat,
        rngs: nnx.Rngs,
    ):
        self.dtype = dtype
        options: Options = {"rngs": rngs, "dtype": dtype, "param_dtype": param_dtype}
        self.embedding = PatchEmbedding(config, rngs=rngs, param_dtype=param_dtype)
        position_init = initializers.normal(stddev=config.width**-0.5)
        self.pos_embedding = nnx.Param(position_init(rngs.params(), (1, tokens, config.width), param_dtype))
        self.Transformer = Encoder(config, remat, options)
        # Zero: a fresh tower contributes nothing until it is trained.
        self.head = nnx.Linear(config.width, out_width, kernel_init=initializers.zeros, **options)

    def __call__(self, images: Float[Array, "b h w 3"]) -> Float[Array, "b t width"]:
        """Tokens of each image; the patch and position embeddings stay in float32, the layers run in `dtype`."""
        x = self.embedding(images) + self.pos_embedding[...]
        return self.head(self.Transformer(x.astype(self.dtype)))
