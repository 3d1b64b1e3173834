"""Read OpenPI checkpoints, key by key, onto one device or a mesh.

A checkpoint is a directory with `params/` (Orbax) or `model.safetensors` (PyTorch), and
`assets/<asset id>/norm_stats.json`. Released ones name their leaves plainly, trained ones end every path in `value`,
PyTorch has a layout of its own; all are read. Where pirl wrote it there is also `pirl.json`, which describes the model,
so that nothing but the directory is needed to load it again.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pirl.errors import CheckpointError, ConfigError
from pirl.interop.agreement import check_agreement
from pirl.interop.norm_stats import FILE_NAME, NormStats, read_norm_stats
from pirl.interop.orbax_store import open_params
from pirl.interop.pytorch import FILE_NAME as PYTORCH_FILE
from pirl.interop.pytorch import open_pytorch
from pirl.interop.stores import Store, Style
from pirl.models.config import Pi0Config, get_model_config, list_model_configs
from pirl.models.lora import init_lora
from pirl.models.parameters import expected_parameters, set_parameters
from pirl.models.pi0 import Pi0, abstract_model
from pirl.run_files import saved_steps

DESCRIPTION_FILE = "pirl.json"
# How one leaf, known by its path and shape, is laid out over devices.
LeafSharding = Callable[[str, jax.ShapeDtypeStruct], jax.sharding.Sharding]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its keys, shapes and dtypes are known, none of its arrays has been read."""

    directory: Path
    style: Style
    store: Store
    # From pirl.json, where there is one.
    description: dict[str, Any]

    @property
    def leaves(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """The shape and dtype of every parameter."""
        return self.store.leaves

    @property
    def config(self) -> Pi0Config | None:
        """The model the checkpoint says it is of."""
        return _described_config(self.directory, self.description)

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
            arrays[path] = self.store.read(path, leaf, device if sharding is None else sharding(path, leaf))
        return arrays


def find_params(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """A checkpoint directory, and the `params` or `model.safetensors` in it, whichever is named; nothing is read."""
    if remote := re.match(r"(\w{2,}):/+(.+?)(/params)?/*$", str(path)):  # a Path has lost one of the slashes
        scheme, place = remote[1], f"{remote[1]}://{remote[2]}"
        how = f"gsutil -m cp -r {place} checkpoints/" if scheme == "gs" else "with its assets/"
        raise CheckpointError(f"{place} is not on this machine: copy it first ({how}), then name the copy.")
    directory = Path(os.path.expanduser(path)).absolute()
    if directory.name == PYTORCH_FILE and directory.is_file():
        directory = directory.parent
    if not directory.is_dir():
        what = "it is a file" if directory.exists() else "the directory does not exist"
        raise CheckpointError(f"no checkpoint at {directory}: {what}.")
    params_directory = directory / "params"
    if not params_directory.is_dir() and (directory / "_METADATA").is_file():
        directory, params_directory = directory.parent, directory
    elif (directory / PYTORCH_FILE).exists():  # where there are both, this is what OpenPI loads, too
        return directory, directory / PYTORCH_FILE
    if not params_directory.is_dir():
        raise CheckpointError(
            f"{directory} is not an OpenPI checkpoint: it has neither params/ nor {PYTORCH_FILE}.{_hint(directory)}"
        )
    return directory, params_directory


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint directory, or the `params` directory or `model.safetensors` inside one."""
    directory, parameters = find_params(path)
    description = _read_description(directory)
    if parameters.name == PYTORCH_FILE:
        return Checkpoint(
            directory, "pytorch", open_pytorch(parameters, _described_config(directory, description)), description
        )
    store, style = open_params(parameters)
    return Checkpoint(directory, style, store, description)


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
    drawn = check_match(checkpoint, config, fresh_lora=fresh_lora is not None, to_learn=to_learn)
    dtypes = {} if param_dtype is None else dict.fromkeys([*checkpoint.leaves, *drawn], jnp.dtype(param_dtype))
    arrays = checkpoint.read(dtypes=dtypes, sharding=sharding)
    for index, (name, leaf) in enumerate(sorted(drawn.items())):
        assert fresh_lora is not None
        key = jax.random.fold_in(fresh_lora, index)
        value = init_lora(key, leaf.shape, dtypes.get(name, leaf.dtype))
        place = None if sharding is None else sharding(name, jax.ShapeDtypeStruct(value.shape, value.dtype))
        arrays[name] = jax.device_put(value, place)
    return set_parameters(abstract_model(config), arrays)


def check_match(
    checkpoint: Checkpoint, config: Pi0Config, *, fresh_lora: bool = False, to_learn: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Raise unless a checkpoint can be loaded into a model; returns the LoRA weights that are to be drawn, if allowed."""
    expected = expected_parameters(config)
    absent = {name: leaf for name, leaf in expected.items() if "lora" in name and name not in checkpoint.leaves}
    drawn = absent if fresh_lora else {}
    check_fit(checkpoint, {name: leaf for name, leaf in expected.items() if name not in drawn})
    check_agreement(checkpoint.directory, checkpoint.config, config, to_learn=to_learn)
    return drawn


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


def _hint(directory: Path) -> str:
    if steps := saved_steps(directory):
        newest = directory / str(steps[-1])
        return f" It holds the checkpoints of steps {', '.join(map(str, steps))}: name one, e.g. {newest}."
    return ""


def _described_config(directory: Path, description: Mapping[str, Any]) -> Pi0Config | None:
    model = description.get("model")
    try:
        return None if model is None else Pi0Config.from_dict(model)
    except ConfigError as error:
        raise CheckpointError(f"{directory / DESCRIPTION_FILE}: {error}") from error


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
