"""Read OpenPI checkpoints, key by key, onto one device or a mesh.

A checkpoint is a directory with `params/` (Orbax) and `assets/<asset id>/norm_stats.json`. Released ones name their
leaves plainly, trained ones end every path in `value`; both are read. Where pirl wrote it there is also `pirl.json`,
which describes the model, so that nothing but the directory is needed to load it again.
"""

import contextlib
import json
import logging
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import tensorstore

from pirl.errors import CheckpointError, ConfigError, in_one_line
from pirl.interop.agreement import check_agreement
from pirl.interop.norm_stats import FILE_NAME, NormStats, read_norm_stats
from pirl.models.config import Pi0Config, get_model_config, list_model_configs
from pirl.models.lora import init_lora
from pirl.models.parameters import expected_parameters, set_parameters
from pirl.models.pi0 import Pi0, abstract_model
from pirl.run_files import saved_steps

DESCRIPTION_FILE = "pirl.json"
Style = Literal["released", "trained"]
# How one leaf, known by its path and shape, is laid out over devices.
LeafSharding = Callable[[str, jax.ShapeDtypeStruct], jax.sharding.Sharding]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its keys, shapes and dtypes are known, none of its arrays has been read."""

    directory: Path
    params_directory: Path
    style: Style
    leaves: dict[str, jax.ShapeDtypeStruct]
    # From pirl.json, where there is one.
    description: dict[str, Any]
    # What the arrays are called in the store, and its format.
    names: dict[str, str]
    zarr3: bool
    # Older writers leave out chunks that are all zero; newer ones write every chunk, so an absent one is damage.
    zeros_are_stored: bool

    @property
    def config(self) -> Pi0Config | None:
        """The model the checkpoint says it is of."""
        model = self.description.get("model")
        try:
            return None if model is None else Pi0Config.from_dict(model)
        except ConfigError as error:
            raise CheckpointError(f"{self.directory / DESCRIPTION_FILE}: {error}") from error

    def fitting_presets(self) -> list[str]:
        """The presets whose parameters have exactly these keys and shapes."""
        shapes = {path: leaf.shape for path, leaf in self.leaves.items()}

        def fits(name: str) -> bool:
            expected = expected_parameters(get_model_config(name))
            return shapes == {path: leaf.shape for path, leaf in expected.items()}

        return [name for name in list_model_configs() if fits(name)]

    def norm_stats(self) -> dict[str, dict[str, NormStats]]:
        """Statistics by asset id."""
        assets = self.directory / "assets"
        files = sorted(assets.rglob(FILE_NAME)) if assets.is_dir() else []
        return {file.parent.relative_to(assets).as_posix(): read_norm_stats(file) for file in files}

    def read(
        self,
        paths: Iterable[str] | None = None,
        *,
        dtypes: Mapping[str, Any] | None = None,
        sharding: LeafSharding | None = None,
    ) -> dict[str, jax.Array]:
        """Read leaves straight onto their devices, cast on the way where `dtypes` says so."""
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        # One at a time, so that the host never holds a second copy of the whole; the largest first, because what a leaf
        # takes in passing is then added to the little that is loaded already.
        ordered = sorted(self.leaves if paths is None else paths, key=lambda path: -self.leaves[path].size)
        arrays = {}
        for path in ordered:
            dtype = jnp.dtype((dtypes or {}).get(path, self.leaves[path].dtype))
            leaf = jax.ShapeDtypeStruct(self.leaves[path].shape, dtype)
            arrays[path] = self._read_leaf(path, leaf, device if sharding is None else sharding(path, leaf))
        return arrays

    def _read_leaf(self, path: str, leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.Array:
        """Read with TensorStore itself: Orbax, on a damaged file, fails in the background and without the leaf's name."""
        with _named_damage(self.params_directory, path):
            spec = {
                "driver": "zarr3" if self.zarr3 else "zarr",
                "kvstore": _store_spec(self.params_directory, self.names[path]),
                "fill_missing_data_reads": not self.zeros_are_stored,
            }
            # Devices that want parts of the same chunk share one decoding of it.
            cache = leaf.size * self.leaves[path].dtype.itemsize if len(sharding.device_set) > 1 else 0
            context = tensorstore.Context({"cache_pool": {"total_bytes_limit": cache}})
            store = tensorstore.open(spec, open=True, read=True, context=context).result()
            store = tensorstore.cast(store, leaf.dtype)
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: store[index].read().result())


def find_params(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """A checkpoint directory and the `params` in it, whichever of the two is named, as OpenPI does both; none is read."""
    if remote := re.match(r"(\w{2,}):/+(.+?)(/params)?/*$", str(path)):  # a Path has lost one of the slashes
        scheme, place = remote[1], f"{remote[1]}://{remote[2]}"
        how = f"gsutil -m cp -r {place} checkpoints/" if scheme == "gs" else "with its assets/"
        raise CheckpointError(f"{place} is not on this machine: copy it first ({how}), then name the copy.")
    directory = Path(os.path.expanduser(path)).absolute()
    if not directory.is_dir():
        what = "it is a file" if directory.exists() else "the directory does not exist"
        raise CheckpointError(f"no checkpoint at {directory}: {what}.")
    params_directory = directory / "params"
    if not params_directory.is_dir() and (directory / "_METADATA").is_file():
        directory, params_directory = directory.parent, directory
    if not params_directory.is_dir():
        raise CheckpointError(
            f"{directory} is not an OpenPI checkpoint: it has no params/ directory.{_hint(directory)}"
        )
    return directory, params_directory


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint directory, or the `params` directory inside one."""
    directory, params_directory = find_params(path)
    _check_store(params_directory)
    with _named_damage(params_directory, "its metadata"), quiet_orbax(), ocp.PyTreeCheckpointer() as checkpointer:
        store = json.loads((params_directory / "_METADATA").read_text())
        _check_names(store)
        tree = checkpointer.metadata(params_directory).item_metadata.tree
    leaves = jax.tree_util.tree_leaves_with_path(tree.get("params"))
    if not_arrays := [jax.tree_util.keystr(path) for path, leaf in leaves if not hasattr(leaf, "shape")]:
        raise CheckpointError(f"{params_directory} is damaged: {not_arrays[0]} is no array. Copy the checkpoint again.")
    if set(tree) != {"params"} or not leaves:
        raise CheckpointError(
            f"{params_directory} holds {', '.join(map(str, tree)) or 'nothing'}, not the parameters of a policy alone: "
            "name the checkpoint directory that has params/ in it."
        )
    style: Style = "trained" if all(_key(path[-1]) == "value" for path, _ in leaves) else "released"
    named = {"/".join(map(_key, path[:-1] if style == "trained" else path)): leaf for path, leaf in leaves}
    return Checkpoint(
        directory=directory,
        params_directory=params_directory,
        style=style,
        leaves={path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in named.items()},
        description=_read_description(directory),
        names={path: leaf.name for path, leaf in named.items()},
        zarr3=bool(store.get("use_zarr3")),
        zeros_are_stored=bool(store.get("store_array_data_equal_to_fill_value")),
    )


def load_policy(
    path: str | os.PathLike[str],
    config: Pi0Config | str | None = None,
    *,
    param_dtype: Any = None,
    sharding: LeafSharding | None = None,
    fresh_lora: jax.Array | None = None,
    to_learn: bool = False,
) -> Pi0:
    """Load a checkpoint into a policy. Every key must fit: what is missing, extra or of another shape is named.

    `config` (a configuration or the name of a preset) may be left out where the checkpoint describes itself. Parameters
    keep the dtype they were saved with unless `param_dtype` is given. `fresh_lora` is a random key that allows a
    checkpoint without LoRA to start a LoRA policy: its low-rank weights are drawn from it. A policy that is `to_learn`
    may have other prompts than the one that was saved; see `check_agreement`.
    """
    checkpoint = open_checkpoint(path)
    config = resolve_config(checkpoint, config)
    expected = expected_parameters(config)
    absent = {name: leaf for name, leaf in expected.items() if "lora" in name and name not in checkpoint.leaves}
    drawn = {} if fresh_lora is None else absent
    check_fit(checkpoint, {name: leaf for name, leaf in expected.items() if name not in drawn})
    check_agreement(checkpoint.directory, checkpoint.config, config, to_learn=to_learn)
    dtypes = {} if param_dtype is None else dict.fromkeys(expected, jnp.dtype(param_dtype))
    arrays = checkpoint.read(dtypes=dtypes, sharding=sharding)
    for index, (name, leaf) in enumerate(sorted(drawn.items())):
        assert fresh_lora is not None
        key = jax.random.fold_in(fresh_lora, index)
        value = init_lora(key, leaf.shape, dtypes.get(name, leaf.dtype))
        place = None if sharding is None else sharding(name, jax.ShapeDtypeStruct(value.shape, value.dtype))
        arrays[name] = jax.device_put(value, place)
    return set_parameters(abstract_model(config), arrays)


def resolve_config(checkpoint: Checkpoint, config: Pi0Config | str | None = None) -> Pi0Config:
    """The model a checkpoint is of: as told, or as it says itself."""
    config = get_model_config(config) if isinstance(config, str) else config or checkpoint.config
    if config is not None:
        return config
    presets = checkpoint.fitting_presets()
    found = f"The presets {', '.join(presets)} have the same parameters" if presets else "No preset has its parameters"
    raise ConfigError(
        f"{checkpoint.directory} does not say which model it is of, and parameters alone do not tell the action horizon "
        f"or the prompt format: name the model's configuration. {found}."
    )


def check_fit(checkpoint: Checkpoint, expected: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raise with every key that is missing, extra or of another shape."""
    saved = checkpoint.leaves
    missing = sorted(set(expected) - set(saved))
    extra = sorted(set(saved) - set(expected))
    other_shape = [
        f"{path}: {saved[path].shape} in the checkpoint, {leaf.shape} in the model"
        for path, leaf in sorted(expected.items())
        if path in saved and saved[path].shape != leaf.shape
    ]
    problems = {"missing from the checkpoint": missing, "not in the model": extra, "of another shape": other_shape}
    if not any(problems.values()):
        return
    listing = "".join(
        f"\n  {what} ({len(names)}):" + "".join(f"\n    {name}" for name in names)
        for what, names in problems.items()
        if names
    )
    raise CheckpointError(
        f"the checkpoint {checkpoint.directory} is not of this model.{listing}\n{_misfit_hint(missing, extra)}"
    )


def _misfit_hint(missing: list[str], extra: list[str]) -> str:
    if any(path.startswith("time_mlp") for path in extra):
        return "The checkpoint is a π₀.₅; the model is a π₀. Choose a pi05 configuration."
    if any(path.startswith("time_mlp") for path in missing):
        return "The checkpoint is a π₀; the model is a π₀.₅. Choose a pi0 configuration."
    if extra and all("lora" in path for path in extra):
        return (
            "The checkpoint has LoRA weights: choose a LoRA configuration, or merge them (pirl convert --merge-lora)."
        )
    if missing and all("lora" in path for path in missing):
        return "The checkpoint has no LoRA weights: choose a configuration without, or start them fresh (fresh_lora)."
    return "`pirl convert CHECKPOINT` prints what it holds and which presets it fits."


def _key(entry: Any) -> str:
    return str(getattr(entry, "key", entry))


def _hint(directory: Path) -> str:
    if steps := saved_steps(directory):
        newest = directory / str(steps[-1])
        return f" It holds the checkpoints of steps {', '.join(map(str, steps))}: name one, e.g. {newest}."
    if (directory / "model.safetensors").is_file():
        return (
            " It holds model.safetensors, the PyTorch format of OpenPI and LeRobot; pirl reads OpenPI's JAX one: name "
            "the checkpoint that it was converted from."
        )
    return ""


def _read_description(directory: Path) -> dict[str, Any]:
    file = directory / DESCRIPTION_FILE
    if not file.is_file():
        return {}
    try:
        description = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Copy the checkpoint again.") from error
    if not isinstance(description, dict):
        raise CheckpointError(f"{file} should hold an object. Copy the checkpoint again.")
    return description


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
