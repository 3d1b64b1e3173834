"""Arrays as Orbax stores them: the `params/` of an OpenPI checkpoint, or the full state of a run."""

import contextlib
import json
import logging
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore

from pirl.errors import CheckpointError, in_one_line
from pirl.interop.stores import Style


@dataclass(frozen=True)
class OrbaxStore:
    """Where the arrays of a checkpoint lie, what they are called there, and how they are stored."""

    directory: Path
    leaves: dict[str, jax.ShapeDtypeStruct]
    names: dict[str, str]
    zarr3: bool
    # Older writers leave out chunks that are all zero; newer ones write every chunk, so an absent one is damage.
    zeros_are_stored: bool

    def read(self, path: str, leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
        """Read with TensorStore itself: Orbax, on a damaged file, fails in the background and without the leaf's name."""
        with _named_damage(self.directory, path):
            spec = {
                "driver": "zarr3" if self.zarr3 else "zarr",
                "kvstore": _store_spec(self.directory, self.names[path]),
                "fill_missing_data_reads": not self.zeros_are_stored,
            }
            # Devices that want parts of the same chunk share one decoding of it.
            cache = leaf.size * self.leaves[path].dtype.itemsize if len(sharding.device_set) > 1 else 0
            context = tensorstore.Context({"cache_pool": {"total_bytes_limit": cache}})
            store = tensorstore.open(spec, open=True, read=True, context=context).result()
            store = tensorstore.cast(store, leaf.dtype)
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: store[index].read().result())


def make_orbax_store(
    directory: Path, leaves: dict[str, jax.ShapeDtypeStruct], names: dict[str, str], options: dict[str, Any]
) -> OrbaxStore:
    """The store in a directory, given what its `_METADATA` says."""
    return OrbaxStore(
        directory=directory,
        leaves=leaves,
        names=names,
        zarr3=bool(options.get("use_zarr3")),
        zeros_are_stored=bool(options.get("store_array_data_equal_to_fill_value")),
    )


def open_params(directory: Path) -> tuple[OrbaxStore, Style]:
    """The `params/` of a checkpoint, and how it names its leaves."""
    _check_store(directory)
    with _named_damage(directory, "its metadata"), quiet_orbax(), ocp.PyTreeCheckpointer() as checkpointer:
        options = json.loads((directory / "_METADATA").read_text())
        _check_names(options)
        tree = checkpointer.metadata(directory).item_metadata.tree
    leaves = jax.tree_util.tree_leaves_with_path(tree.get("params"))
    if not_arrays := [jax.tree_util.keystr(path) for path, leaf in leaves if not hasattr(leaf, "shape")]:
        raise CheckpointError(f"{directory} is damaged: {not_arrays[0]} is no array. Copy the checkpoint again.")
    if set(tree) != {"params"} or not leaves:
        raise CheckpointError(
            f"{directory} holds {', '.join(map(str, tree)) or 'nothing'}, not the parameters of a policy alone: "
            "name the checkpoint directory that has params/ in it."
        )
    style: Style = "trained" if all(_key(path[-1]) == "value" for path, _ in leaves) else "released"
    named = {"/".join(map(_key, path[:-1] if style == "trained" else path)): leaf for path, leaf in leaves}
    shapes = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in named.items()}
    return make_orbax_store(directory, shapes, {path: leaf.name for path, leaf in named.items()}, options), style


def _key(entry: Any) -> str:
    return str(getattr(entry, "key", entry))


def _is_ocdbt(directory: Path) -> bool:
    """Whether all arrays share one database; older checkpoints have a directory for each."""
    return (directory / "manifest.ocdbt").exists()


def _store_spec(directory: Path, name: str | None = None) -> dict[str, Any]:
    """Where TensorStore finds the database, or one array in it."""
    path = "" if name is None else f"{name}/"
    if _is_ocdbt(directory):
        return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{directory}/"}, "path": path}
    return {"driver": "file", "path": f"{directory}/{path}"}


def _check_store(directory: Path) -> None:
    """Go through the store's index once, so that damage shows here and not in many array reads at a time."""
    with _named_damage(directory, "its index"):
        if not (directory / "_METADATA").is_file():
            raise FileNotFoundError("_METADATA is missing")
        # Opening a pipe would wait for ever.
        for path in directory.rglob("*"):
            if not path.is_file() and not path.is_dir():
                raise FileNotFoundError(f"{path.relative_to(directory)} is not a regular file")
        if (directory / "manifest.ocdbt").is_dir():
            raise FileNotFoundError("manifest.ocdbt is a directory")
        if _is_ocdbt(directory):
            tensorstore.KvStore.open(_store_spec(directory)).result().list().result()
        elif not any(directory.glob("*/.zarray")):
            raise FileNotFoundError("manifest.ocdbt is missing")


def _check_names(store: dict[str, Any]) -> None:
    """Refuse names of arrays that would lead out of the store."""
    for entry in store["tree_metadata"].values():
        for key in entry["key_metadata"]:
            if re.search(r"/|\\|\.\.|\0", str(key["key"])):
                raise ValueError(f"no array can be called {key['key']!r:.60}")


@contextlib.contextmanager
def _named_damage(directory: Path, what: str) -> Iterator[None]:
    """Turn whatever Orbax and TensorStore raise about broken files into one sentence about the checkpoint."""
    try:
        yield
    except (CheckpointError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # TensorStore's arrive as bare Exceptions
        raise CheckpointError(
            f"{directory} is damaged or incomplete: reading {what} failed ({in_one_line(error)}). Copy the checkpoint "
            "again."
        ) from error


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Hold back Orbax's log: about metadata that OpenPI's checkpoints never had, and before errors we name ourselves."""

    def is_not_orbax(record: logging.LogRecord) -> bool:  # one for each use: threads may overlap here
        return "orbax" not in Path(record.pathname).parts and "/orbax/" not in record.getMessage()

    # asyncio tells, one by one, of the writes that failed after the first one, which is raised; some only when they are
    # collected, after everything. What is its own is told as ever.
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
