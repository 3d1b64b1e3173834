"""Layout over devices: one mesh with the axes `data` and `fsdp`, and OpenPI's rule for where each array lies."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import PyTree

from pirl.errors import ConfigError

# Smaller arrays are replicated: gathering them costs more than they take.
MIN_SHARD_BYTES = 4 << 20
# The part of a learner that is small beside its policy, and used by every device in every update.
CRITICS = "critic"


def make_mesh(fsdp_devices: int = 1) -> Mesh:
    """All devices, in groups of `fsdp_devices` that share the parameters between them."""
    count = jax.device_count()
    if fsdp_devices < 1 or count % fsdp_devices:
        raise ConfigError(f"fsdp_devices = {fsdp_devices} does not divide the {count} devices there are.")
    axes = (AxisType.Auto, AxisType.Auto)  # the compiler, not the types, decides how intermediates are laid out
    return jax.make_mesh((count // fsdp_devices, fsdp_devices), ("data", "fsdp"), axis_types=axes)


def make_host_mesh() -> Mesh:
    """The devices of this process alone, which share the parameters between them."""
    return Mesh(np.array([_devices_of(jax.process_index())]), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def copy_to_hosts(tree: PyTree) -> PyTree:
    """A copy of all arrays on every host, laid out over its own devices: for what one host computes by itself.

    All processes have to call it, since those that hold a part of an array send it to the others.
    """
    here = make_host_mesh()
    devices = np.array([_devices_of(index) for index in range(jax.process_count())])
    everywhere = Mesh(devices, ("hosts", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    leaves, structure = jax.tree.flatten(tree)
    specs = [parameter_spec(leaf.shape, leaf.dtype, here.size) for leaf in leaves]
    places = [NamedSharding(everywhere, spec) for spec in specs]
    spread = jax.jit(_unchanged, out_shardings=places)(leaves)
    copies = [
        jax.make_array_from_single_device_arrays(
            leaf.shape, NamedSharding(here, spec), [shard.data for shard in leaf.addressable_shards]
        )
        for leaf, spec in zip(spread, specs, strict=True)
    ]
    return jax.tree.unflatten(structure, copies)


def _devices_of(process: int) -> list[jax.Device]:
    devices = (device for device in jax.devices() if device.process_index == process)
    return sorted(devices, key=lambda device: device.id)


def _unchanged(leaves: list[jax.Array]) -> list[jax.Array]:
    return leaves


class OwnRows:
    """An array that is spread over all devices, of which its first index shows what is on those of this process."""

    def __init__(self, array: jax.Array):
        self._array = array

    def __getitem__(self, index: tuple[int, ...]) -> np.ndarray:
        shards = sorted(self._array.addressable_shards, key=lambda shard: [part.start or 0 for part in shard.index])
        whole = (slice(None), slice(0, None))
        axis = next((axis for axis, part in enumerate(shards[0].index) if part not in whole), 0)
        return np.concatenate([np.asarray(shard.data) for shard in shards], axis)[index]


def own_rows(batch: PyTree) -> PyTree:
    """What this process can look at of a batch: all of it, where there is no other."""
    return batch if jax.process_count() == 1 else jax.tree.map(OwnRows, batch)


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves by the path that leads to them, in their order: actor/params/…."""
    entries = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in entries}
    assert len(named) == len(entries), "two leaves have the same path"
    return named


def parameter_spec(shape: tuple[int, ...], dtype: DTypeLike, fsdp_devices: int) -> PartitionSpec:
    """Split the largest axis that divides evenly (the later one of equals); replicate small arrays and vectors."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if fsdp_devices == 1 or len(shape) < 2 or size < MIN_SHARD_BYTES:
        return PartitionSpec()
    for axis in sorted(range(len(shape)), key=lambda axis: (shape[axis], axis), reverse=True):
        if shape[axis] % fsdp_devices == 0:
            return PartitionSpec(*(["fsdp" if i == axis else None for i in range(len(shape))]))
    return PartitionSpec()


def state_spec(path: str, shape: tuple[int, ...], dtype: DTypeLike, fsdp_devices: int) -> PartitionSpec:
    """The rule for an array of a learner, by its path: critics are whole on every device, everything else is split."""
    return PartitionSpec() if path.split("/")[0] == CRITICS else parameter_spec(shape, dtype, fsdp_devices)


class ParameterSharding:
    """The rule on a mesh, in the form that checkpoint loading takes: a parameter's path and shape to its place."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh

    def __call__(self, path: str, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        """Where this leaf lies."""
        return NamedSharding(self._mesh, state_spec(path, leaf.shape, leaf.dtype, self._mesh.shape["fsdp"]))
