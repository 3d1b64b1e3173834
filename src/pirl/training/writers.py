"""Where metrics are written: JSON lines that can be cut back and continued, TensorBoard, W&B, Trackio."""

import contextlib
import importlib
import io
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from pirl.config.schema import LoggingConfig
from pirl.errors import ConfigError
from pirl.files import write_file, writing
from pirl.imports import is_installed
from pirl.run_files import RunFiles

logger = logging.getLogger(__name__)

Number = float | int
# No line is longer than this, so that the end of the last whole one is found without reading the whole file.
_LONGEST_LINE = 1 << 20
_ADVICE = "See to the cause (a full disk, missing rights), then continue with --resume."


class JsonLines:
    """A file of JSON objects, one per line, each on the disk as soon as it is written.

    `keep` is how many bytes of an earlier run remain; of a line that was cut there, nothing does.
    """

    def __init__(self, path: Path, keep: int = 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, path.open("a+b")
        kept = _whole_lines(self._file, keep)
        if kept < keep:
            logger.warning(
                "%s held %d bytes when the state was saved, and holds %d in whole lines now: the rest stays lost.",
                path,
                keep,
                kept,
            )
        self._file.truncate(kept)

    @property
    def size(self) -> int:
        """Bytes so far, all of them safe on the disk."""
        with writing(self._path.name, self._path.parent, _ADVICE):
            os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def last(self) -> dict[str, Any] | None:
        """The last object."""
        end = _tail(self._file, os.fstat(self._file.fileno()).st_size).rstrip(b"\n")
        return json.loads(end[end.rfind(b"\n") + 1 :]) if end else None

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        """One line: the step, then the values by name."""
        line = json.dumps({"step": step, **dict(sorted(values.items()))}, ensure_ascii=False, allow_nan=False)
        with writing(f"the line of step {step} in {self._path.name}", self._path.parent, _ADVICE):
            self._file.write(line.encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Nothing more will be written."""
        with contextlib.suppress(OSError):  # of a line that could not be written, as was said when it was tried
            self._file.close()


def _tail(file: Any, end: int) -> bytes:
    file.seek(max(end - _LONGEST_LINE, 0))
    return file.read(min(end, _LONGEST_LINE))


def _whole_lines(file: Any, keep: int) -> int:
    """Bytes up to the end of the last whole line among the first `keep` bytes."""
    end = min(keep, os.fstat(file.fileno()).st_size)
    tail = _tail(file, end)
    return end - len(tail) + tail.rfind(b"\n") + 1


class Tracker(Protocol):
    """A place besides the run directory's files where curves can be looked at. `hint` says how."""

    hint: str

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        """Take the values of a step."""
        ...

    def close(self) -> None:
        """Nothing more will be written."""
        ...


def open_trackers(
    run: Path, config: LoggingConfig, next_step: int, hyperparameters: Mapping[str, Any]
) -> Iterator[Tracker]:
    """The trackers that are asked for; what they hold from `next_step` on is of a run that was cut off, and outdated."""
    if config.tensorboard and is_installed("tensorboard"):
        yield TensorBoard(RunFiles(run).tensorboard, next_step)
    if config.wandb != "off":
        yield WeightsAndBiases(run, config, hyperparameters)
    if config.trackio:
        yield Trackio(run.name, config.project, hyperparameters, resume=next_step > 0)


class TensorBoard:
    """Event files, written by the `tensorboard` package alone."""

    def __init__(self, directory: Path, next_step: int):
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(str(directory))
        self.hint = f"tensorboard --logdir {directory}"
        # The beginning of a session makes TensorBoard forget what it read of this step and later ones.
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._add(step=next_step, session_log=start)

    def _add(self, **content: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), **content))
        self._writer.flush()

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        """Take the values of a step."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step=step, summary=self._summary(value=scalars))

    def close(self) -> None:
        """Nothing more will be written."""
        self._writer.close()


class WeightsAndBiases:
    """A W&B run whose id is kept in the run directory, so that a resumed run goes on in the same curves."""

    def __init__(self, run: Path, config: LoggingConfig, hyperparameters: Mapping[str, Any]):
        wandb = importlib.import_module("wandb")
        (run / "wandb").mkdir(parents=True, exist_ok=True)  # or W&B would write elsewhere
        try:
            self._run = wandb.init(
                project=config.project,
                name=run.name,
                id=_lasting_id(run / "wandb" / "run_id"),
                # Offline there is nobody to ask: the same id joins the parts when they are uploaded.
                resume="allow" if config.wandb == "online" else None,
                mode=config.wandb,
                dir=str(run),
                config=dict(hyperparameters),
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"W&B cannot begin a run ({error}). Run `wandb login`, or keep the run on this machine until you upload "
                "it: --logging.wandb offline."
            ) from error
        # A run that was resumed, or went back, comes to steps again, and of its own steps W&B takes none that is behind:
        # the step of the curves is a value like others.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        offline = f"wandb sync {run / 'wandb'}/offline-run-*-{self._run.id}"
        self.hint = offline if config.wandb == "offline" else str(self._run.url)

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        """Take the values of a step."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Nothing more will be written."""
        self._run.finish()


def _lasting_id(path: Path) -> str:
    """The id in this file, made up the first time."""
    if not path.exists():
        write_file(path, secrets.token_hex(6))
    return path.read_text().strip()


class Trackio:
    """A run in Trackio's database on this machine."""

    def __init__(self, name: str, project: str, hyperparameters: Mapping[str, Any], resume: bool):
        self._trackio = importlib.import_module("trackio")
        with contextlib.redirect_stdout(io.StringIO()):  # it greets, at length
            self._run = self._trackio.init(
                project=project,
                name=name,
                config=dict(hyperparameters),
                resume="allow" if resume else "never",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        self.hint = f"trackio show --project {project}"

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        """Take the values of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Nothing more will be written."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()
