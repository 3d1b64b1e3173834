"""Write checkpoints that OpenPI and the robot load unchanged, and that appear whole or not at all."""

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from importlib import metadata as package_metadata
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

import pirl
from pirl.errors import CheckpointError
from pirl.interop.norm_stats import FILE_NAME, NormStats, write_norm_stats
from pirl.interop.reading import DESCRIPTION_FILE, Style, quiet_orbax
from pirl.models.config import Pi0Config
from pirl.models.parameters import get_parameters, nest
from pirl.models.pi0 import Pi0

_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


def save_policy(
    path: str | os.PathLike[str],
    policy: Pi0,
    *,
    norm_stats: Mapping[str, Mapping[str, NormStats]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    style: Style = "released",
    overwrite: bool = False,
) -> Path:
    """Write a policy as an OpenPI checkpoint."""
    return save_checkpoint(
        path,
        get_parameters(policy),
        policy.config,
        norm_stats=norm_stats,
        metadata=metadata,
        style=style,
        overwrite=overwrite,
    )


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
    """Write parameters, statistics (by asset id) and a description. The directory appears complete or not at all."""
    directory = Path(path).expanduser().absolute()
    if directory.exists() and not overwrite:
        raise CheckpointError(f"{directory} exists already: choose another place, or say overwrite.")
    for asset_id in norm_stats or {}:
        if not asset_id or Path(asset_id).is_absolute() or ".." in Path(asset_id).parts:
            raise CheckpointError(f"{asset_id!r} is no asset id: it has to name a directory inside assets/.")
    suffix = "/value" if style == "trained" else ""
    started = time.time_ns()
    with _appears_whole(directory) as partial:
        with quiet_orbax(), ocp.PyTreeCheckpointer() as checkpointer:
            tree = {"params": nest({name + suffix: value for name, value in params.items()})}
            checkpointer.save(partial / "params", args=ocp.args.PyTreeSave(tree))
        for asset_id, stats in (norm_stats or {}).items():
            write_norm_stats(partial / "assets" / asset_id / FILE_NAME, stats)
        description = {
            "pirl": pirl.__version__,
            **({} if config is None else {"model": config.to_dict()}),
            "parameters": sum(value.size for value in params.values()),
            "versions": {name: package_metadata.version(name) for name in ("jax", "flax", "orbax-checkpoint")},
            **(metadata or {}),
        }
        (partial / DESCRIPTION_FILE).write_text(json.dumps(description, indent=2))
        (partial / "_CHECKPOINT_METADATA").write_text(json.dumps(_step_metadata(started, bool(norm_stats))))
    return directory


def _step_metadata(started: int, has_assets: bool) -> dict[str, Any]:
    """What OpenPI's checkpoint manager leaves beside the items, so that tools which list checkpoints see one."""
    handlers = {"params": _HANDLER}
    if has_assets:
        handlers["assets"] = "openpi.training.checkpoints.CallbackHandler"
    return {
        "item_handlers": handlers,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": started,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": {},
    }


@contextlib.contextmanager
def _appears_whole(directory: Path) -> Iterator[Path]:
    """A hidden directory to write into, which takes the place of `directory` at the end, in one rename.

    A process that dies on the way leaves only the hidden one behind; the next save to the same place clears it away.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    marker = f".{directory.name}.partial-{socket.gethostname()}-"
    for leftover in directory.parent.glob(f"{marker}*"):
        if not _is_running(leftover.name.removeprefix(marker)):
            shutil.rmtree(leftover, ignore_errors=True)
    partial = directory.parent / f"{marker}{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
        if directory.exists():
            # A kill between the two renames leaves the old checkpoint, whole, under its other name.
            old = directory.parent / f".{directory.name}.replaced-{os.getpid()}"
            directory.rename(old)
            partial.rename(directory)
            shutil.rmtree(old)
        else:
            partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True
