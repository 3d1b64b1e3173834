"""OpenPI checkpoints: open, load into a policy, save, compare.

A checkpoint is a directory with `params/` (Orbax) or `model.safetensors` (PyTorch), and
`assets/<asset id>/norm_stats.json`. Released ones name their leaves plainly, those of OpenPI's training end every path in
`value`, PyTorch has a layout of its own; all are read. pirl adds `pirl.json`, which describes the model, so that the
directory alone suffices to load it again.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

import pirl
from pirl.errors import CheckpointError, ConfigError
from pirl.files import atomic_replace, expand_home, is_elsewhere, remove_directory, restore_replaced
from pirl.interop.norm_stats import FILE_NAME, NormStats, read_norm_stats, write_norm_stats
from pirl.interop.orbax import OrbaxArrays, open_params, quiet_orbax
from pirl.interop.pytorch import FILE_NAME as PYTORCH_FILE
from pirl.interop.pytorch import PyTorchArrays, check_writable, write_pytorch
from pirl.models.config import Pi0Config, get_model_config, list_model_configs
from pirl.models.lora import init_lora
from pirl.models.pi0 import Pi0, abstract_model, expected_parameters, get_parameters, nest, set_parameters
from pirl.run_files import saved_steps

DESCRIPTION_FILE = "pirl.json"
# What pirl.json always holds; the rest of it is the caller's metadata.
OWN_KEYS = frozenset({"pirl", "model", "parameters", "versions"})
# How a checkpoint names its arrays: as OpenPI releases them, as its training writes them, as its PyTorch models do.
Style = Literal["released", "trained", "pytorch"]
# How one leaf, known by its path and shape, is laid out over devices.
LeafSharding = Callable[[str, jax.ShapeDtypeStruct], jax.sharding.Sharding]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its keys, shapes and dtypes are known, none of its arrays has been read."""

    directory: Path
    style: Style
    arrays: OrbaxArrays | PyTorchArrays
    # The content of pirl.json, where there is one.
    description: Mapping[str, Any]

    @property
    def leaves(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """The shape and dtype of every parameter."""
        return self.arrays.leaves

    @property
    def config(self) -> Pi0Config | None:
        """The model that pirl.json describes."""
        return _described_config(self.directory, self.description)

    def fitting_presets(self) -> list[str]:
        """The presets whose parameters have exactly these keys and shapes."""
        shapes = {path: leaf.shape for path, leaf in self.leaves.items()}
        presets = {name: expected_parameters(get_model_config(name)) for name in list_model_configs()}
        return [name for name, known in presets.items() if {k: leaf.shape for k, leaf in known.items()} == shapes]

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
        leaves = self.leaves
        # One at a time, so that the host never holds a second copy of the whole; the largest while little is loaded.
        arrays = {}
        for path in sorted(leaves if paths is None else paths, key=lambda path: -leaves[path].size):
            leaf = jax.ShapeDtypeStruct(leaves[path].shape, jnp.dtype((dtypes or {}).get(path, leaves[path].dtype)))
            arrays[path] = self.arrays.read(path, leaf, None if sharding is None else sharding(path, leaf))
        return arrays


# --- opening ---------------------------------------------------------------------------------------------------------


def find_params(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """A checkpoint directory, and the `params` or `model.safetensors` in it, whichever is named; nothing is read."""
    if remote := re.match(r"(\w{2,}):/+(.+?)(/params)?/*$", str(path)):  # a Path has lost one of the slashes
        scheme, address = remote[1], f"{remote[1]}://{remote[2]}"
        how = f"gsutil -m cp -r {address} checkpoints/" if scheme == "gs" else "with its assets/"
        raise CheckpointError(f"{address} is not on this machine: copy it first ({how}), then name the copy.")
    directory = Path(os.path.expanduser(path)).absolute()
    if directory.name == PYTORCH_FILE and directory.is_file():
        directory = directory.parent
    if not directory.is_dir():
        what = "it is a file" if directory.exists() else "the directory does not exist"
        raise CheckpointError(f"no checkpoint at {directory}: {what}.")
    params = directory / "params"
    if not params.is_dir() and (directory / "_METADATA").is_file():
        return directory.parent, directory
    if (directory / PYTORCH_FILE).exists():  # where there are both, OpenPI loads this one, too
        return directory, directory / PYTORCH_FILE
    if not params.is_dir():
        steps = saved_steps(directory)
        newest = f" It holds the checkpoints of steps {', '.join(map(str, steps))}: name one, e.g. {directory}/{{}}."
        raise CheckpointError(
            f"{directory} is not an OpenPI checkpoint: it has neither params/ nor {PYTORCH_FILE}."
            + (newest.format(steps[-1]) if steps else "")
        )
    return directory, params


def open_checkpoint(path: str | os.PathLike[str], config: Pi0Config | None = None) -> Checkpoint:
    """Open a checkpoint directory, or the `params` directory or `model.safetensors` inside one.

    How the weights of a PyTorch file split into heads, it does not tell: by `config`, pirl.json or else OpenPI's models.
    """
    directory, parameters = find_params(path)
    description = _read_description(directory / DESCRIPTION_FILE)
    if parameters.name == PYTORCH_FILE:
        arrays = PyTorchArrays(parameters, config or _described_config(directory, description))
        return Checkpoint(directory, "pytorch", arrays, description)
    stored, trained = open_params(parameters)
    return Checkpoint(directory, "trained" if trained else "released", OrbaxArrays(stored), description)


def _read_description(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        if not isinstance(description := json.loads(file.read_text()), dict):
            raise ValueError("it holds no JSON object")
        return description
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Copy the checkpoint again.") from error


def _described_config(directory: Path, description: Mapping[str, Any]) -> Pi0Config | None:
    try:
        return Pi0Config.from_dict(description["model"]) if description.get("model") is not None else None
    except ConfigError as error:
        raise CheckpointError(f"{directory / DESCRIPTION_FILE}: {error}") from error


# --- loading ---------------------------------------------------------------------------------------------------------


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
    checkpoint without LoRA to start a LoRA policy: its low-rank weights are drawn from it. For `to_learn` see
    `check_match`.
    """
    config = get_model_config(config) if isinstance(config, str) else config
    checkpoint = open_checkpoint(path, config)
    config = resolve_config(checkpoint, config)
    drawn = check_match(checkpoint, config, fresh_lora=fresh_lora is not None, to_learn=to_learn)
    dtypes = {} if param_dtype is None else dict.fromkeys([*checkpoint.leaves, *drawn], jnp.dtype(param_dtype))
    arrays = checkpoint.read(dtypes=dtypes, sharding=sharding)
    for index, (name, leaf) in enumerate(sorted(drawn.items())):
        assert fresh_lora is not None
        value = init_lora(jax.random.fold_in(fresh_lora, index), leaf.shape, dtypes.get(name, leaf.dtype))
        leaf_sharding = None if sharding is None else sharding(name, jax.ShapeDtypeStruct(value.shape, value.dtype))
        arrays[name] = jax.device_put(value, leaf_sharding)
    return set_parameters(abstract_model(config), arrays)


def resolve_config(checkpoint: Checkpoint, config: Pi0Config | str | None = None) -> Pi0Config:
    """The model of a checkpoint: the given one, or the one it describes."""
    config = get_model_config(config) if isinstance(config, str) else config or checkpoint.config
    if config is not None:
        return config
    presets = checkpoint.fitting_presets()
    found = f"The presets {', '.join(presets)} have the same parameters" if presets else "No preset has its parameters"
    raise ConfigError(
        f"{checkpoint.directory} does not say which model it is of, and parameters alone do not tell the action horizon "
        f"or the prompt format: name the model's configuration. {found}."
    )


def check_match(
    checkpoint: Checkpoint, config: Pi0Config, *, fresh_lora: bool = False, to_learn: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Raise unless a checkpoint can be loaded into a model; returns the LoRA weights to draw, if that is allowed.

    A policy that goes on learning (`to_learn`) may get its state in another way, as OpenPI's π₀.₅ of LIBERO did.
    """
    expected = expected_parameters(config)
    absent = {name: leaf for name, leaf in expected.items() if "lora" in name and name not in checkpoint.leaves}
    drawn = absent if fresh_lora else {}
    _check_shapes(checkpoint, {name: leaf for name, leaf in expected.items() if name not in drawn})
    differences = [
        f"{name} is {theirs} there, and {ours} here"
        for name, theirs, ours in _other_computation(checkpoint.config or config, config)
        if not (to_learn and name == "discrete_state_input")
    ]
    if differences:
        raise CheckpointError(
            f"{checkpoint.directory} is of another model, by its {DESCRIPTION_FILE}, though the parameters fit: "
            f"{'; '.join(differences)}. They would compute something else: leave the model out, so that the checkpoint "
            "tells it, or set this as it is there."
        )
    return drawn


def _check_shapes(checkpoint: Checkpoint, expected: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raise with every key that is missing, extra or of another shape."""
    saved = checkpoint.leaves
    missing, extra = sorted(expected.keys() - saved.keys()), sorted(saved.keys() - expected.keys())
    other_shape = [
        f"{path}: {saved[path].shape} in the checkpoint, {leaf.shape} in the model"
        for path, leaf in sorted(expected.items())
        if path in saved and saved[path].shape != leaf.shape
    ]
    problems = {"missing from the checkpoint": missing, "not in the model": extra, "of another shape": other_shape}
    if not any(problems.values()):
        return
    if any(path.startswith("time_mlp") for path in extra):
        hint = "The checkpoint is a π₀.₅; the model is a π₀. Choose a pi05 configuration."
    elif any(path.startswith("time_mlp") for path in missing):
        hint = "The checkpoint is a π₀; the model is a π₀.₅. Choose a pi0 configuration."
    elif extra and all("lora" in path for path in extra):
        hint = (
            "The checkpoint has LoRA weights: choose a LoRA configuration, or merge them (pirl convert --merge-lora)."
        )
    elif missing and all("lora" in path for path in missing):
        hint = "The checkpoint has no LoRA weights: choose a configuration without, or start them fresh (fresh_lora)."
    else:
        hint = "`pirl convert CHECKPOINT` prints what it holds and which presets it fits."
    listing = "".join(
        f"\n  {what} ({len(names)}):" + "".join(f"\n    {name}" for name in names)
        for what, names in problems.items()
        if names
    )
    raise CheckpointError(f"the checkpoint {checkpoint.directory} is not of this model.{listing}\n{hint}")


def _other_computation(described: Pi0Config, config: Pi0Config) -> Iterator[tuple[str, Any, Any]]:
    """What differs between two models of equal shapes and changes the result. Horizon, dtype and prompt length may."""
    names = []
    if described.max_token_len and config.max_token_len:
        names += ["discrete_state_input", "tokenizer"]
    if described.cameras and config.cameras:
        names.append("image_resolution")
    for name in names:
        if getattr(described, name) != getattr(config, name):
            yield name, getattr(described, name), getattr(config, name)
    for expert in ("language", "action_expert"):
        theirs, ours = (getattr(model, expert).attention_lora for model in (described, config))
        # One without LoRA is merged, or begins to have it; the feed-forward LoRA is not scaled.
        if theirs is not None and ours is not None and theirs.scale != ours.scale:
            for name in ("alpha", "rank_stabilized"):
                if getattr(theirs, name) != getattr(ours, name):
                    yield f"{expert}.attention_lora.{name}", getattr(theirs, name), getattr(ours, name)


# --- saving ----------------------------------------------------------------------------------------------------------


def save_policy(path: str | os.PathLike[str], policy: Pi0, **options: Any) -> Path:
    """Write a policy as an OpenPI checkpoint; `options` as of `save_checkpoint`."""
    return save_checkpoint(path, get_parameters(policy), policy.config, **options)


def save_checkpoint(
    path: str | os.PathLike[str],
    params: Mapping[str, jax.Array],
    config: Pi0Config | None,
    *,
    norm_stats: Mapping[str, Mapping[str, NormStats]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    style: Style = "released",
    overwrite: bool = False,
) -> Path:
    """Write parameters, statistics (by asset id) and a description. The directory appears complete or not at all.

    Where there are several processes all of them have to call it, each for its part, on a file system they share. In
    style `pytorch` the parameters are one file, which a single process writes.
    """
    directory = resolve_target(path)
    is_main_process = jax.process_index() == 0
    if style == "pytorch":
        check_writable(params)
        if config is not None and not config.cameras:
            raise CheckpointError("OpenPI's PyTorch models have a vision tower, but this policy has no cameras.")
        if jax.process_count() > 1:
            raise CheckpointError("several processes cannot write one PyTorch file: use `pirl convert` afterwards.")
    if is_main_process:
        check_target(directory, overwrite)
    files = PolicyFiles(params, config, norm_stats or {}, metadata or {})
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        if is_main_process:
            partial.mkdir(parents=True)
        multihost_utils.sync_global_devices("the partial checkpoint exists")
        if style == "pytorch":
            write_pytorch(partial, params)
        else:
            with quiet_orbax(), ocp.PyTreeCheckpointer() as checkpointer:
                checkpointer.save(partial / "params", args=ocp.args.PyTreeSave(params_tree(params, style)))
        if is_main_process:
            files.write(partial)
        multihost_utils.sync_global_devices("the partial checkpoint is complete")
        if is_main_process:
            atomic_replace(partial, directory)
    finally:
        if jax.process_count() == 1:  # of several, others may still be writing; the next save removes it
            remove_directory(partial)
    multihost_utils.sync_global_devices("the checkpoint exists")
    return directory


def params_tree(params: Mapping[str, jax.Array], style: Style = "released") -> dict[str, Any]:
    """What `params/` holds, as OpenPI names it."""
    suffix = "/value" if style == "trained" else ""
    return {"params": nest({path + suffix: leaf for path, leaf in params.items()})}


class PolicyFiles:
    """The files beside `params/`, checked before anything is written, so that little can fail afterwards."""

    def __init__(
        self,
        params: Mapping[str, jax.Array],
        config: Pi0Config | None,
        norm_stats: Mapping[str, Mapping[str, NormStats]],
        metadata: Mapping[str, Any],
    ) -> None:
        for asset_id in norm_stats:
            if not asset_id or Path(asset_id).is_absolute() or ".." in Path(asset_id).parts:
                raise CheckpointError(f"{asset_id!r} is no asset id: it has to name a directory inside assets/.")
        self._norm_stats, self._description = norm_stats, _describe(params, config, metadata)

    def write(self, directory: Path) -> None:
        for asset_id, stats in self._norm_stats.items():
            write_norm_stats(directory / "assets" / asset_id / FILE_NAME, stats)
        (directory / DESCRIPTION_FILE).write_text(self._description)


def _describe(params: Mapping[str, jax.Array], config: Pi0Config | None, metadata: Mapping[str, Any]) -> str:
    """The text of pirl.json."""
    if taken := sorted(OWN_KEYS & set(metadata)):
        raise CheckpointError(f"the metadata keys {taken} are pirl's own: choose other names.")
    description = {
        "pirl": pirl.__version__,
        "model": None if config is None else config.to_dict(),
        "parameters": sum(value.size for value in params.values()),
        "versions": {name: version(name) for name in ("jax", "flax", "orbax-checkpoint")},
    }
    try:
        return json.dumps({**description, **metadata}, indent=2)
    except TypeError as error:
        raise CheckpointError(f"the metadata cannot be written as JSON: {error}.") from error


def resolve_target(path: str | os.PathLike[str]) -> Path:
    """Where a checkpoint is to be written, links followed."""
    if is_elsewhere(path):
        raise CheckpointError(f"{path} is not on this machine: write the checkpoint to a directory, then copy that.")
    return expand_home(path).resolve()


def check_path(directory: Path) -> None:
    """Raise if Orbax cannot write there: it would take the name for a pattern."""
    if set("[]*?") & set(str(directory)):
        raise CheckpointError(f"Orbax cannot write below {directory}: choose a path without [, ], * and ?.")


def check_target(directory: Path, overwrite: bool) -> None:
    """Raise if a checkpoint cannot or must not be written there; removes what a killed save left."""
    check_path(directory)
    restore_replaced(directory)
    remove_directory(directory.with_name(f".{directory.name}.partial"))
    if not directory.exists():
        return
    if not overwrite:
        raise CheckpointError(f"{directory} exists already: choose another path, or overwrite it (--overwrite).")
    if not any((directory / file).is_file() for file in ("params/_METADATA", PYTORCH_FILE)):
        raise CheckpointError(f"{directory} is not a checkpoint, so it is not overwritten: choose another path.")


# --- comparing -------------------------------------------------------------------------------------------------------


def compare(first: Checkpoint, second: Checkpoint, *, rtol: float = 0.0, atol: float = 0.0) -> list[str]:
    """Every difference in keys, shapes, dtypes, values and statistics; one leaf of each is in memory at a time."""
    differences = []
    for path in sorted({*first.leaves, *second.leaves}):
        if path not in second.leaves or path not in first.leaves:
            differences.append(f"{path}: only in the {'first' if path in first.leaves else 'second'}")
            continue
        a, b = first.leaves[path], second.leaves[path]
        if a.shape != b.shape:
            differences.append(f"{path}: shape {a.shape} and {b.shape}")
            continue
        if a.dtype != b.dtype and not (rtol or atol):
            differences.append(f"{path}: dtype {a.dtype} and {b.dtype}")
        x, y = (np.asarray(checkpoint.read([path])[path]) for checkpoint in (first, second))
        if rtol or atol:
            unequal = ~np.isclose(x.astype(np.float64), y.astype(np.float64), rtol=rtol, atol=atol, equal_nan=True)
        else:
            unequal = (x != y) & ~((x != x) & (y != y))  # NaN equals NaN here
        if unequal.any():
            largest = np.max(np.abs(np.where(unequal, x.astype(np.float64) - y, 0)))
            differences.append(f"{path}: {unequal.sum()} of {x.size} values, by up to {largest:.3g}")
    if first.config and second.config and first.config != second.config:
        fields = [key for key, value in first.config.to_dict().items() if value != second.config.to_dict()[key]]
        differences.append(f"{DESCRIPTION_FILE}: other model: {', '.join(fields)}")
    ours, theirs = first.norm_stats(), second.norm_stats()
    for asset_id in sorted({*ours, *theirs}):
        if ours.get(asset_id) != theirs.get(asset_id):
            differences.append(f"assets/{asset_id}/{FILE_NAME}: other statistics, or only in one")
    return differences


def check_values(checkpoint: Checkpoint) -> list[str]:
    """The leaves with values that are not finite; reads all, one at a time."""
    problems = []
    for path in checkpoint.leaves:
        array = np.asarray(checkpoint.read([path])[path]).astype(np.float32)
        if bad := int(np.sum(~np.isfinite(array))):
            problems.append(f"{path}: {bad} of {array.size} values are not finite")
    return problems
