"""Write checkpoints that OpenPI and the robot load unchanged, and that appear whole or not at all."""

import contextlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from importlib import metadata as package_metadata
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

import pirl
from pirl.errors import CheckpointError
from pirl.files import expand_home, is_elsewhere, put_back, put_in_place, remove_directory
from pirl.interop.norm_stats import FILE_NAME, NormStats, write_norm_stats
from pirl.interop.orbax_store import quiet_orbax
from pirl.interop.pytorch import FILE_NAME as PYTORCH_FILE
from pirl.interop.pytorch import check_writable, write_pytorch
from pirl.interop.reading import DESCRIPTION_FILE
from pirl.interop.stores import Style
from pirl.models.config import Pi0Config
from pirl.models.parameters import get_parameters, nest
from pirl.models.pi0 import Pi0

# What pirl.json says about every checkpoint; the rest of it is the caller's metadata.
OWN_KEYS = frozenset({"pirl", "model", "parameters", "versions"})
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
    """Write parameters, statistics (by asset id) and a description. The directory appears complete or not at all.

    Where there are several processes all of them have to call it, each for its part, on a file system they share. In
    style `pytorch` the parameters are one file, which a single process writes.
    """
    directory = resolve_target(path)
    if style == "pytorch":
        check_writable(params)
        if jax.process_count() > 1:
            raise CheckpointError("several processes cannot write one PyTorch file: use `pirl convert` afterwards.")
    if jax.process_index() == 0:
        check_target(directory, overwrite)
    writer = CheckpointWriter(params, config, norm_stats=norm_stats, metadata=metadata, style=style)
    with _appears_whole(directory) as partial:
        if style == "pytorch":
            write_pytorch(partial, params)
        else:
            with quiet_orbax(), ocp.PyTreeCheckpointer() as checkpointer:
                writer.save_arrays(partial, checkpointer)
        if jax.process_index() == 0:
            writer.complete(partial)
    return directory


class CheckpointWriter:
    """What a checkpoint consists of, checked before anything is written, so that little can fail afterwards."""

    def __init__(
        self,
        params: Mapping[str, jax.Array],
        config: Pi0Config | None,
        *,
        norm_stats: Mapping[str, Mapping[str, NormStats]] | None = None,
        metadata: Mapping[str, Any] | None = None,
        style: Style = "released",
    ) -> None:
        for asset_id in norm_stats or {}:
            if not asset_id or Path(asset_id).is_absolute() or ".." in Path(asset_id).parts:
                raise CheckpointError(f"{asset_id!r} is no asset id: it has to name a directory inside assets/.")
        self._started = time.time_ns()
        self._description = _describe(params, config, metadata or {})
        self._norm_stats, self._style = norm_stats or {}, style
        suffix = "/value" if style == "trained" else ""
        self._tree: Any = {"params": nest({name + suffix: value for name, value in params.items()})}

    def save_arrays(self, partial: Path, checkpointer: Any) -> None:
        """Write the parameters into a directory that is there, by all processes; or begin to, as the checkpointer does.

        What they are is forgotten then: they may be donated.
        """
        tree, self._tree = self._tree, None
        checkpointer.save(partial / "params", args=ocp.args.PyTreeSave(tree))

    def complete(self, partial: Path) -> None:
        """Write what else there is, by one process, when the parameters are there."""
        for asset_id, stats in self._norm_stats.items():
            write_norm_stats(partial / "assets" / asset_id / FILE_NAME, stats)
        (partial / DESCRIPTION_FILE).write_text(self._description)
        if self._style != "pytorch":
            about = _step_metadata(self._started, bool(self._norm_stats))
            (partial / "_CHECKPOINT_METADATA").write_text(json.dumps(about))


def resolve_target(path: str | os.PathLike[str]) -> Path:
    """Where a checkpoint is to be written, links followed."""
    if is_elsewhere(path):
        raise CheckpointError(f"{path} is not on this machine: write the checkpoint to a directory, then copy that.")
    return expand_home(path).resolve()


def check_target(directory: Path, overwrite: bool) -> None:
    """Raise if a checkpoint cannot or must not be written there."""
    if set("[]*?") & set(str(directory)):
        raise CheckpointError(
            f"Orbax cannot write below {directory}: choose a place without [, ], * and ? in its name."
        )
    _clear_remains(directory)
    if not directory.exists():
        return
    if not overwrite:
        raise CheckpointError(f"{directory} exists already: choose another place, or overwrite it (--overwrite).")
    if not any((directory / file).is_file() for file in ("params/_METADATA", PYTORCH_FILE)):
        raise CheckpointError(f"{directory} is not a checkpoint, so it is not overwritten: choose another place.")


def _describe(params: Mapping[str, jax.Array], config: Pi0Config | None, metadata: Mapping[str, Any]) -> str:
    """The text of pirl.json, made before anything is written so that it cannot fail afterwards."""
    description = {
        "pirl": pirl.__version__,
        "model": None if config is None else config.to_dict(),
        "parameters": sum(value.size for value in params.values()),
        "versions": {name: package_metadata.version(name) for name in ("jax", "flax", "orbax-checkpoint")},
    }
    assert set(description) == OWN_KEYS
    if taken := sorted(OWN_KEYS & set(metadata)):
        raise CheckpointError(f"the metadata keys {taken} are pirl's own: choose other names.")
    try:
        return json.dumps({**description, **metadata}, indent=2)
    except TypeError as error:
        raise CheckpointError(f"the metadata cannot be written as JSON: {error}.") from error


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

    A process that dies on the way leaves only hidden directories behind (with what was there before, should it die
    between taking that away and putting the new one in place); the next save to the same place sees to them.
    """
    if jax.process_count() > 1:
        with _appears_to_all(directory) as partial:
            yield partial
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    partial = directory.parent / f".{directory.name}.partial-{owner}"
    try:
        partial.mkdir()  # inside the try: an interrupt may come between any two lines
        yield partial
        put_in_place(partial, directory)
    finally:
        remove_directory(partial)


@contextlib.contextmanager
def _appears_to_all(directory: Path) -> Iterator[Path]:
    """The same where several processes write into it: the first makes it and puts it in place, the others wait."""
    partial = directory.parent / f".{directory.name}.partial-shared"
    is_first = jax.process_index() == 0
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    multihost_utils.sync_global_devices(f"{partial} is there")
    yield partial
    multihost_utils.sync_global_devices(f"{partial} is complete")
    if is_first:
        put_in_place(partial, directory)
    multihost_utils.sync_global_devices(f"{directory} is there")


def _clear_remains(directory: Path) -> None:
    """What a killed save to this place left behind: put the old checkpoint back, remove what never got complete."""
    put_back(directory)
    marker = f".{directory.name}.partial-{socket.gethostname()}-"
    for leftover in directory.parent.glob(f"{marker}*"):
        pid = leftover.name.removeprefix(marker).split("-")[0]
        # A container restarts with the same process number, so our own says nothing.
        if pid == str(os.getpid()) or not _is_running(pid):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True
