"""Where the arrays of a checkpoint lie: what its reader knows of Orbax's directories and of PyTorch's files."""

from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

import jax

# How a checkpoint names its arrays: as OpenPI releases them, as its training writes them, as its PyTorch models do.
Style = Literal["released", "trained", "pytorch"]


@runtime_checkable
class Store(Protocol):
    """Arrays that can be read one by one."""

    @property
    def leaves(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """The shape and dtype of each, by the path of the parameter it is."""
        ...

    def read(self, path: str, leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
        """One of them onto its devices, in the dtype of `leaf`."""
        ...
