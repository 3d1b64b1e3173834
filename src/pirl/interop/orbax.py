"""Arrays as Orbax stores them: the `params/` of an OpenPI checkpoint, or the train state of a run."""

import contextlib
import json
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from pirl.errors import CheckpointError, in_one_line


@dataclass(frozen=True)
class StoredArray:
    """An array in a directory that Orbax wrote."""

    directory: Path
    name: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any  # as it was saved
    options: Mapping[str, Any]


@dataclass(frozen=True)
class OrbaxArrays:
    """Arrays of a checkpoint by path: they are known, none has been read."""

    stored: Mapping[str, StoredArray]

    @property
    def leaves(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shape and dtype of each array."""
        return {path: jax.ShapeDtypeStruct(array.shape, array.dtype) for path, array in self.stored.items()}

    def read(
        self, path: str, leaf: jax.ShapeDtypeStruct | jax.Array, sharding: jax.sharding.Sharding | None
    ) -> jax.Array:
        """One array, by TensorStore: Orbax raises in the background on a damaged file, without the name of the array."""
        stored = self.stored[path]
        with _damage_named(stored.directory, path):
            spec = {
                "driver": "zarr3" if stored.options.get("use_zarr3") else "zarr",
                "kvstore": _kvstore(stored.directory, f"{stored.name}/"),
                # Older writers leave out chunks that are all zero; of newer ones, an absent chunk is damage.
                "fill_missing_data_reads": not stored.options.get("store_array_data_equal_to_fill_value"),
            }
            # Devices that want parts of the same chunk share one decoding of it.
            cache = leaf.size * stored.dtype.itemsize if sharding and len(sharding.device_set) > 1 else 0
            context = tensorstore.Context({"cache_pool": {"total_bytes_limit": cache}})
            store = tensorstore.open(spec, open=True, read=True, context=context).result()
            store = tensorstore.cast(store, leaf.dtype)
            return place(leaf, sharding, lambda index: store[index].read().result())


def place(
    leaf: jax.ShapeDtypeStruct | jax.Array,
    sharding: jax.sharding.Sharding | None,
    part: Callable[[tuple[slice, ...]], np.ndarray],
) -> jax.Array:
    """An array from its parts; without a sharding committed to no device, as arrays are that are computed."""
    if sharding is None:
        return jax.device_put(part((slice(None),) * len(leaf.shape)))
    return jax.make_array_from_callback(leaf.shape, sharding, part)  # type: ignore[arg-type]


def open_arrays(directory: Path) -> dict[str, StoredArray]:
    """The arrays in a directory that Orbax wrote, by path; damage to its index or metadata is an error here."""
    with _damage_named(directory, "its metadata"):
        for path in directory.rglob("*"):
            if not path.is_file() and not path.is_dir():  # opening a pipe would block
                raise FileNotFoundError(f"{path.relative_to(directory)} is not a regular file")
        if not (directory / "_METADATA").is_file():
            raise FileNotFoundError("_METADATA is missing")
        options = json.loads((directory / "_METADATA").read_text())
        for entry in options["tree_metadata"].values():
            for key in entry["key_metadata"]:
                if any(part in str(key["key"]) for part in ("/", "\\", "..", "\0")):  # would lead out of the directory
                    raise ValueError(f"no array can be called {key['key']!r:.60}")
        if (directory / "manifest.ocdbt").is_file():
            tensorstore.KvStore.open(_kvstore(directory)).result().list().result()
        elif not any(directory.glob("*/.zarray")):
            raise FileNotFoundError("manifest.ocdbt is missing")
        with quiet_orbax(), ocp.PyTreeCheckpointer() as checkpointer:
            tree = checkpointer.metadata(directory).item_metadata.tree
        metadata = {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        if not_arrays := [path for path, leaf in metadata.items() if not hasattr(leaf, "shape")]:
            raise ValueError(f"{not_arrays[0]} is no array")
    return {
        path: StoredArray(directory, leaf.name, leaf.shape, leaf.dtype, leaf.sharding, options)
        for path, leaf in metadata.items()
    }


def open_params(directory: Path) -> tuple[dict[str, StoredArray], bool]:
    """The `params/` of a checkpoint, and whether every path in it ends in `value`, as OpenPI's training writes them."""
    arrays = open_arrays(directory)
    if not arrays or not all(path.startswith("params/") for path in arrays):
        held = dict.fromkeys(path.split("/")[0] for path in arrays)
        raise CheckpointError(
            f"{directory} holds {', '.join(held) or 'nothing'}, not the parameters of a policy alone: "
            "name the checkpoint directory that has params/ in it."
        )
    trained = all(path.endswith("/value") for path in arrays)
    suffix = "/value" if trained else ""
    return {path.removeprefix("params/").removesuffix(suffix): leaf for path, leaf in arrays.items()}, trained


def _kvstore(directory: Path, path: str = "") -> dict[str, Any]:
    """Where TensorStore finds the database, or one array in it; checkpoints without one have a directory per array."""
    if (directory / "manifest.ocdbt").is_file():
        return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{directory}/"}, "path": path}
    return {"driver": "file", "path": f"{directory}/{path}"}


@contextlib.contextmanager
def _damage_named(directory: Path, what: str) -> Iterator[None]:
    """Turn what Orbax and TensorStore raise about broken files into one sentence about the checkpoint."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # TensorStore raises bare Exceptions
        raise CheckpointError(
            f"{directory} is damaged or incomplete: reading {what} failed ({in_one_line(error)}). Copy the checkpoint "
            "again."
        ) from error


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Hold back Orbax's log: about metadata that OpenPI's checkpoints never had, and before errors we raise ourselves."""

    def is_not_orbax(record: logging.LogRecord) -> bool:  # one per use: uses in several threads may overlap
        return "orbax" not in Path(record.pathname).parts and "/orbax/" not in record.getMessage()

    # asyncio logs the failed writes after the first one, which is raised; some when they are collected, after everything.
    logging.getLogger("asyncio").addFilter(_is_not_of_orbax)
    logger = logging.getLogger("absl")
    logger.addFilter(is_not_orbax)
    try:
        yield
    finally:
        logger.removeFilter(is_not_orbax)


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    _, error, frames = record.exc_info or (None, None, None)
    files = [frame.filename for frame in traceback.extract_tb(frames)] if error is not None else []
    return not any("/orbax/" in text for text in (record.getMessage(), *files))
