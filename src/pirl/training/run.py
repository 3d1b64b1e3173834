"""The run directory: everything one training run leaves behind, used by one process (or one group of hosts) at a time."""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from pirl.envs.evaluation import versions
from pirl.errors import ConfigError, UserError
from pirl.files import write_file, writing
from pirl.run_files import RunFiles, saved_steps
from pirl.training.distributed import FILE_SYSTEM_PATIENCE, all_gather, broadcast, is_main_process

# Marks a directory whose content is being deleted, so that a deletion that was killed is recognized.
OVERWRITING_FILE = "overwriting"
_TOKEN_FILE = ".hosts"
# Dotted names, with all that is below them, that may be another when a run is resumed: none of them changes what a sound
# update computes. (What the data are is checked by their content: `refuse_other_data`.)
FREE_ON_RESUME = (
    *("name", "runs_dir", "checkpoint", "from_scratch", "data.repo_id"),
    *("steps", "online.env_steps", "rollout.iterations", "rollout.max_barren"),
    *("rollout.backend", "rollout.ray_address", "rollout.save_dataset", "rollout.videos_every"),
    *("fsdp_devices", "hosts", "model.remat", "data.prefetch"),
    *("evaluation.videos", "evaluation.timeout", "checkpoints", "logging", "stopping", "health"),
)
_SHOWN_DIFFERENCES = 20
_ADVICE = "See to the cause (a full disk, missing rights), or choose another place (--runs-dir)."
_logger = logging.getLogger(__name__)


class RunDirectory(RunFiles):
    """An open run. Others are kept out until it is closed, or until the process ends in whatever way."""

    def __init__(self, path: Path, lock: int | None, metadata: dict[str, Any], config_text: str | None = None) -> None:
        """Use `open`, which makes or finds the directory and takes its lock. `config_text`: what is yet to be written."""
        super().__init__(path)
        self._lock = lock
        self._config_text = config_text
        self.metadata = metadata

    @classmethod
    def open(
        cls, directory: Path, config: Mapping[str, Any], *, resume: bool, overwrite: bool, config_text: str
    ) -> "RunDirectory":
        """Begin a run, or open one again to go on with it. `config` as plain data; `config_text` becomes config.yaml.

        A run that is there, to be gone on with or to be overwritten, stays as it is until `begin`.
        """
        if resume and overwrite:
            raise ConfigError("--resume continues a run and --overwrite deletes it: give only one of them.")
        path = Path(os.path.expanduser(directory)).resolve()
        files = RunFiles(path)
        _refuse_foreign(files)
        # A process that died just after it took the lock has begun a run, though it had not come to write anything.
        if resume and not files.lock_file.exists() and not files.is_run:
            raise ConfigError(f"{path} holds no run, so there is nothing to resume: leave --resume out to begin one.")
        plain = json.loads(json.dumps(config, default=str))
        with writing("the run", path, _ADVICE):
            path.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(files)
        try:
            with writing("the run", path, _ADVICE):
                run = cls(path, lock, _prepare(files, plain, resume, overwrite), config_text)
                if not _holds_run(files):
                    run.begin()
                return run
        except BaseException:
            os.close(lock)
            raise

    def begin(self) -> None:
        """Replace the run that is there, or record the resume, now that everything else was checked."""
        if self._config_text is None:
            return
        with writing("the run", self.path, _ADVICE):
            if not self.is_resumed:
                _clear(self)
            write_file(self.config_file, self._config_text)
            _write_metadata(self, self.metadata)  # last: it is what makes the directory a run
        self._config_text = None

    @property
    def is_resumed(self) -> bool:
        """Whether it goes on with a run that was begun before."""
        return bool(self.metadata["resumed"])

    @property
    def rollbacks(self) -> list[dict[str, Any]]:
        """How often the run went back to an earlier checkpoint: from and to which step, and why."""
        return list(self.metadata.get("rollbacks", []))

    def note(self, **facts: Any) -> None:
        """Add facts to metadata.json, or correct them."""
        with writing("the run's metadata", self.path, _ADVICE):
            _write_metadata(self, self.metadata | facts)
        self.metadata |= facts

    def abandon(self) -> None:
        """Delete a run that this process has begun, if nothing has come of it, so that its name can be used again."""
        if self._config_text is not None:
            return  # what is there is the run whose place it would have taken
        kept = [self.checkpoints, self.bad_batches, self.replay]
        has_metrics = self.metrics_file.exists() and self.metrics_file.stat().st_size > 0
        if not self.is_resumed and not has_metrics and not any(place.exists() for place in kept):
            with contextlib.suppress(OSError):
                _clear(self)  # with its mark, should this be killed on the way
            shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Let others use the run."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _holds_run(run: RunFiles) -> bool:
    """Whether there is a run that is not being deleted."""
    return run.is_run and not (run.path / OVERWRITING_FILE).exists()


def _prepare(run: RunFiles, config: dict[str, Any], resume: bool, overwrite: bool) -> dict[str, Any]:
    """With the lock held: check the request, and return the metadata of the run."""
    _refuse_foreign(run)  # again: it may have become a run since
    exists = _holds_run(run)
    reached = max(saved_steps(run.checkpoints, resumable=True), default=0)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    if exists and resume:
        metadata = _read_metadata(run)
        _refuse_other_config(run, metadata["config"], config)
        entry = {"time": now, "step": reached, "command": command, "versions": versions()}
        return metadata | {"resumed": [*metadata["resumed"], entry], "config": config, "stopped": False}
    if exists and not overwrite:
        raise ConfigError(
            f"{run.path} already holds a run, with checkpoints up to step {reached}: --resume continues it, "
            "--overwrite deletes it and starts over; or choose another --exp-name."
        )
    return {"begun": now, "command": command, "versions": versions(), "resumed": [], "config": config}


def _refuse_foreign(run: RunFiles) -> None:
    """Raise if the directory holds anything but a run."""
    path, lock = run.path, run.lock_file.name
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file: choose another --exp-name or --runs-dir.")
    if not path.is_dir() or run.is_run:
        return
    entries = {entry.name for entry in path.iterdir()}
    # Our lock without metadata: a run that died as it began, with no more than its config; or as it was overwritten.
    begun = lock in entries and all(name in (lock, run.config_file.name) or ".partial-" in name for name in entries)
    if entries and not begun and not {lock, OVERWRITING_FILE} <= entries:
        raise ConfigError(
            f"{path} is not empty and is not a run of pirl (it has no config.yaml and metadata.json), so nothing in it "
            "is touched: choose another --exp-name or --runs-dir."
        )


def _clear(run: RunFiles) -> None:
    """Delete everything but the lock. If this is killed, the next process finishes it."""
    mark = run.path / OVERWRITING_FILE
    others = [entry for entry in run.path.iterdir() if entry not in (run.lock_file, mark)]
    if others:
        write_file(mark, "")
    for entry in others:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    mark.unlink(missing_ok=True)


def _take_lock(run: RunFiles) -> int:
    """A file descriptor that holds the lock; the kernel gives it back when the process ends."""
    lock = os.open(run.lock_file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(lock)
        raise ConfigError(
            f"{run.path} is in use by {holder}: wait until it has ended, stop it, or choose another --exp-name."
        ) from None
    except OSError as error:  # some network file systems know no locks
        unsure = "%s cannot be locked (%s): make sure that nothing else uses this run."
        _logger.warning(unsure, run.path, error.strerror)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return lock


def _read_metadata(run: RunFiles) -> dict[str, Any]:
    reason = "its config or resumed is not what it should be"
    try:
        metadata = dict(json.loads(run.metadata_file.read_text()))
        if isinstance(metadata.get("config"), dict) and isinstance(metadata.get("resumed"), list):
            return metadata
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = str(error)
    raise ConfigError(
        f"{run.metadata_file} cannot be read ({reason}), so it is not known what the run was: put the file back, or "
        "begin again (--overwrite)."
    )


def _write_metadata(run: RunFiles, metadata: Mapping[str, Any]) -> None:
    # Synced to disk, as states are, which are useless without it.
    write_file(run.metadata_file, json.dumps(metadata, indent=2, default=str) + "\n", fsync=True)


def _refuse_other_config(run: RunFiles, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise with every field that differs and would make this another run."""
    before, after = dict(_fields(old)), dict(_fields(new))
    differences = [
        f"\n  {name}: {before.get(name, 'absent')} in the run, {after.get(name, 'absent')} now"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
        and not f"{name}.".startswith(tuple(f"{free}." for free in FREE_ON_RESUME))
    ]
    if not differences:
        return
    if (more := len(differences) - _SHOWN_DIFFERENCES) > 0:
        differences[_SHOWN_DIFFERENCES:] = [f"\n  and {more} more"]
    raise ConfigError(
        f"{run.path} was begun with another configuration, so it cannot be resumed with this one:{''.join(differences)}"
        f"\nGive the run's own values (they are in {run.config_file}), or begin another run (--exp-name)."
    )


def _fields(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every field by its dotted name, as JSON: text compares NaN with NaN as one would."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value)


# --- several hosts ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_shared_run(open_run: Callable[[], RunDirectory]) -> Iterator[RunDirectory]:
    """The run directory: the main process opens it, the others find it on the file system that they share.

    A run of which nothing has come is deleted after an error of the user.
    """
    with open_run() if is_main_process() else contextlib.nullcontext() as own:
        run = own or FollowerRun(Path(), None, {})
        try:
            if jax.process_count() > 1:
                run = _meet(own)
            yield run
        except UserError:
            run.abandon()
            raise


def _meet(own: RunDirectory | None) -> RunDirectory:
    """Raise on all hosts if one of them cannot see what the main process wrote."""

    def announce() -> dict[str, Any]:
        assert own is not None
        token = secrets.token_hex(8)
        write_file(own.path / _TOKEN_FILE, token)
        return {"token": token, "path": str(own.path), "metadata": own.metadata}

    announced = broadcast(announce)
    path = Path(announced["path"])
    visible = all_gather(_appears(path / _TOKEN_FILE, announced["token"]))
    if own is not None:
        (path / _TOKEN_FILE).unlink()
    if blind := [f"host {index}" for index, is_visible in enumerate(visible) if not is_visible]:
        raise ConfigError(
            f"{path}, where this run is written, is not on a file system that all hosts share: {', '.join(blind)} "
            "cannot see what host 0 wrote there. Choose a directory that all of them see (--runs-dir)."
        )
    return own or FollowerRun(path, None, announced["metadata"])


def _appears(file: Path, content: str) -> bool:
    give_up = time.monotonic() + FILE_SYSTEM_PATIENCE
    while time.monotonic() < give_up:
        with contextlib.suppress(OSError):
            if file.read_text() == content:
                return True
        time.sleep(0.1)
    return False


class FollowerRun(RunDirectory):
    """A run that the main process has open; this one writes only its own log and bad batches."""

    @property
    def log_file(self) -> Path:
        """Warnings and errors of this process."""
        return self.path / f"log-host-{jax.process_index()}.txt"

    @property
    def bad_batches(self) -> Path:
        """This process's rows of batches whose update was skipped."""
        return self.path / "bad_batches" / f"host-{jax.process_index()}"

    def note(self, **facts: Any) -> None:
        """Remember facts; the main process writes them."""
        self.metadata |= facts

    def abandon(self) -> None:
        """Left to the main process."""
