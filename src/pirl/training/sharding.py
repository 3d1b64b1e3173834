"""Layout over devices: one mesh with the axes `data` and `fsdp`, and OpenPI's rule for where each array lies."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from pirl.errors import ConfigError

# Smaller arrays are replicated: gathering them costs more than they take.
MIN_SHARD_BYTES = 4 << 20


def make_mesh(fsdp_devices: int = 1) -> Mesh:
    """All devices, in groups of `fsdp_devices` that share the parameters between them."""
    count = jax.device_count()
    if fsdp_devices < 1 or count % fsdp_devices:
        raise ConfigError(f"fsdp_devices = {fsdp_devices} does not divide the {count} devices there are.")
    axes = (AxisType.Auto, AxisType.Auto)  # the compiler, not the types, decides how intermediates are laid out
    return jax.make_mesh((count // fsdp_devices, fsdp_devices), ("data", "fsdp"), axis_types=axes)


def parameter_spec(shape: tuple[int, ...], dtype: DTypeLike, fsdp_devices: int) -> PartitionSpec:
    """Split the largest axis that divides evenly (the later one of equals); replicate small arrays and vectors."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if fsdp_devices == 1 or len(shape) < 2 or size < MIN_SHARD_BYTES:
        return PartitionSpec()
    for axis in sorted(range(len(shape)), key=lambda axis: (shape[axis], axis), reverse=True):
        if shape[axis] % fsdp_devices == 0:
            return PartitionSpec(*(["fsdp" if i == axis else None for i in range(len(shape))]))
    return PartitionSpec()


class ParameterSharding:
    """The rule on a mesh, in the form that checkpoint loading takes: a parameter's path and shape to its place."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh

    def __call__(self, path: str, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        """Where this leaf lies."""
        return NamedSharding(self._mesh, parameter_spec(leaf.shape, leaf.dtype, self._mesh.shape["fsdp"]))
