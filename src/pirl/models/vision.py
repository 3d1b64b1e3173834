"""The SigLIP vision tower: patches of an image become tokens of the language model's width."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jaxtyping import Float

from pirl.models.config import Remat, VisionConfig
from pirl.models.layers import Dense
from pirl.models.layout import rematerialised, spread
from pirl.models.types import Array


class LayerNorm(nnx.Module):
    """Layer norm with float32 statistics, whatever the dtype of its input."""

    def __init__(self, width: int, *, param_dtype: jnp.dtype):
        self.scale = nnx.Param(jnp.ones((width,), param_dtype))
        self.bias = nnx.Param(jnp.zeros((width,), param_dtype))

    def __call__(self, x: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
        """Normalise each token."""
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(x32, axis=-1, keepdims=True)
        # The one-pass form of the variance, which SigLIP was trained with.
        variance = jnp.maximum(0.0, jnp.mean(jnp.square(x32), axis=-1, keepdims=True) - jnp.square(mean))
        scale = jax.lax.rsqrt(variance + 1e-6) * self.scale[...]
        return ((x32 - mean) * scale + self.bias[...]).astype(x.dtype)


class SelfAttention(nnx.Module):
    """Multi-head attention of every token over every token."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs, param_dtype: jnp.dtype):
        width, heads = (config.width,), (config.num_heads, config.width // config.num_heads)
        self.query = Dense(width, heads, rngs=rngs, param_dtype=param_dtype)
        self.key = Dense(width, heads, rngs=rngs, param_dtype=param_dtype)
        self.value = Dense(width, heads, rngs=rngs, param_dtype=param_dtype)
        self.out = Dense(heads, width, rngs=rngs, param_dtype=param_dtype)

    def __call__(self, x: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
        """Attend in the dtype of `x`, softmax included."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        q = q / jnp.sqrt(q.shape[-1]).astype(x.dtype)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)).astype(x.dtype)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v))


class Mlp(nnx.Module):
    """Two dense layers with a GELU between them."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs, param_dtype: jnp.dtype):
        width, hidden = (config.width,), (config.mlp_dim,)
        bias_init = initializers.normal(stddev=1e-6)
        self.Dense_0 = Dense(width, hidden, rngs=rngs, param_dtype=param_dtype, bias_init=bias_init)
        self.Dense_1 = Dense(hidden, width, rngs=rngs, param_dtype=param_dtype, bias_init=bias_init)

    def __call__(self, x: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
        """Apply to each token."""
        return self.Dense_1(jax.nn.gelu(self.Dense_0(x)))


class EncoderBlock(nnx.Module):
    """One pre-norm layer. The attribute names are those of the released checkpoints."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs, param_dtype: jnp.dtype):
        self.LayerNorm_0 = LayerNorm(config.width, param_dtype=param_dtype)
        self.MultiHeadDotProductAttention_0 = SelfAttention(config, rngs=rngs, param_dtype=param_dtype)
        self.LayerNorm_1 = LayerNorm(config.width, param_dtype=param_dtype)
        self.MlpBlock_0 = Mlp(config, rngs=rngs, param_dtype=param_dtype)

    def __call__(self, x: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
        """Attention, then feed-forward, each added to its input."""
        x = x + self.MultiHeadDotProductAttention_0(self.LayerNorm_0(x))
        return x + self.MlpBlock_0(self.LayerNorm_1(x))


class Encoder(nnx.Module):
    """The stacked layers, scanned, and the final norm."""

    def __init__(self, config: VisionConfig, *, remat: Remat, rngs: nnx.Rngs, param_dtype: jnp.dtype):
        def make_block(key: Array) -> EncoderBlock:
            return EncoderBlock(config, rngs=nnx.Rngs(key), param_dtype=param_dtype)

        self.remat = remat
        self.encoderblock = jax.lax.map(make_block, jax.random.split(rngs.params(), config.depth))
        self.encoder_norm = LayerNorm(config.width, param_dtype=param_dtype)

    def __call__(self, x: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
        """Run all layers."""

        def step(x: Array, block: EncoderBlock) -> tuple[Array, None]:
            return spread(block(x)), None

        x, _ = jax.lax.scan(rematerialised(step, self.remat), spread(x), self.encoderblock)
        return self.encoder_norm(x)


class PatchEmbedding(nnx.Module):
    """Non-overlapping patches, each mapped linearly: a convolution with stride equal to its size."""

    def __init__(self, config: VisionConfig, *, rngs: nnx.Rngs, param_dtype: jnp.dtype):
        shape = (*config.patch_size, 3, config.width)
        self.kernel = nnx.Param(initializers.lecun_normal()(rngs.params(), shape, param_dtype))
        self.bias = nnx.Param(jnp.zeros((config.width,), param_dtype))

    def __call__(self, images: Float[Array, "b h w 3"]) -> Float[Array, "b t width"]:
        """Patches in row-major order, in float32."""
        patch_height, patch_width, channels, width = self.kernel.shape
        batch, height, image_width, _ = images.shape
        rows, columns = height // patch_height, image_width // patch_width
        # As a matrix product, since XLA's CPU convolutions (their gradients above all) are many times slower.
        patches = images[:, : rows * patch_height, : columns * patch_width]
        patches = patches.reshape(batch, rows, patch_height, columns, patch_width, channels)
        patches = patches.transpose(0, 1, 3, 2, 4, 5).reshape(batch, rows * columns, -1)
        kernel = self.kernel[...].astype(jnp.float32).reshape(-1, width)
        return jnp.dot(patches.astype(jnp.float32), kernel) + self.bias[...].astype(jnp.float32)


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
        self.embedding = PatchEmbedding(config, rngs=rngs, param_dtype=param_dtype)
        position_init = initializers.normal(stddev=config.width**-0.5)
        self.pos_embedding = nnx.Param(position_init(rngs.params(), (1, tokens, config.width), param_dtype))
        self.Transformer = Encoder(config, remat=remat, rngs=rngs, param_dtype=param_dtype)
        # Zero: a freshly made tower contributes nothing until it is trained.
        self.head = Dense(
            (config.width,), (out_width,), kernel_init=initializers.zeros, rngs=rngs, param_dtype=param_dtype
        )

    def __call__(self, images: Float[Array, "b h w 3"]) -> Float[Array, "b t width"]:
        """Tokens of each image; the patch and position embeddings stay in float32, the layers run in `dtype`."""
        x = self.embedding(images) + self.pos_embedding[...]
        return self.head(self.Transformer(x.astype(self.dtype)))
