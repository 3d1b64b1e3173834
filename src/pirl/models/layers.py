"""The linear layer that the vision tower and the transformer share."""

import math

import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jaxtyping import Float

from pirl.models.types import Array


class Dense(nnx.Module):
    """A linear map of the trailing axes with a bias, computed in the dtype of its input."""

    def __init__(
        self,
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        *,
        rngs: nnx.Rngs,
        param_dtype: jnp.dtype,
        kernel_init: initializers.Initializer | None = None,
        bias_init: initializers.Initializer = initializers.zeros,
    ):
        # Fan-in and fan-out are those of the flattened matrix, so the kernel is drawn flat and then shaped.
        init = kernel_init or initializers.xavier_uniform()
        flat = (math.prod(in_shape), math.prod(out_shape))
        self.num_in = len(in_shape)
        self.kernel = nnx.Param(init(rngs.params(), flat, param_dtype).reshape(*in_shape, *out_shape))
        self.bias = nnx.Param(bias_init(rngs.params(), out_shape, param_dtype))

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Contract the trailing axes of `x`."""
        y = jnp.tensordot(x, self.kernel[...].astype(x.dtype), axes=self.num_in)
        return y + self.bias[...].astype(x.dtype)
