"""The array type of the models' signatures: JAX's, with NumPy arrays welcome wherever they are given from outside."""

from typing import TYPE_CHECKING

import jax
import numpy as np

if TYPE_CHECKING:
    Array = jax.Array
else:
    Array = jax.Array | np.ndarray
