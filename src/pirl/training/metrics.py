"""Metrics of a run: means over updates, in JSON lines that a resumed run continues byte for byte, and in trackers."""

import contextlib
import importlib
import io
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from pirl.config.schema import LoggingConfig
from pirl.errors import ConfigError
from pirl.files import write_file, writing
from pirl.imports import is_installed
from pirl.models.types import Array
from pirl.run_files import RunFiles

Number = float | int
# Summed over the run so far; everything else is averaged over the updates since it was last written.
COUNTERS = frozenset({"skipped"})
# Updates whose metrics may wait on the device.
_MAX_WAITING = 1024
_logger = logging.getLogger(__name__)

# No line is longer than this, so that the end of the last whole one is found without reading the whole file.
_LONGEST_LINE = 1 << 20
_ADVICE = "See to the cause (a full disk, missing rights), then continue with --resume."


class MetricsLog:
    """Collects metrics of updates without waiting for the device, and writes them to the run directory and to trackers.

    metrics.jsonl holds one object per written step, {"step": 100, "loss": 0.25, …}, and nothing that depends on time;
    timing.jsonl holds what does. A mean is of the updates that computed the value (NaN: it was not) and were not
    skipped, has the precision of float32, and is written with as many digits as that takes. `skipped` counts from the
    beginning of the run. What is not finite is left out.
    """

    def __init__(
        self,
        run: Path,
        config: LoggingConfig,
        resume_at: Mapping[str, Any] | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ):
        """Begin, or go on from a `position()`: what was written after it is cut off."""
        self._run, self._config, self._hyperparameters = run, config, hyperparameters or {}
        self._open(resume_at)

    def rewind(self, position: Mapping[str, Any] | None) -> None:
        """Go back to a `position()`, as a run does that goes on from an earlier checkpoint."""
        self.close()
        self._open(position)

    def _open(self, position: Mapping[str, Any] | None) -> None:
        position = position or {"metrics": 0, "timing": 0, "sums": {}, "counters": {}}
        files = RunFiles(self._run)
        self._metrics = JsonLines(files.metrics_file, position["metrics"])
        self._timing = JsonLines(files.timing_file, position["timing"])
        self._sums = {name: (float(total), int(count)) for name, (total, count) in position["sums"].items()}
        self._counters = {name: int(count) for name, count in position["counters"].items()}
        self._waiting: list[tuple[tuple[str, ...], Array]] = []
        last = self._metrics.last()
        next_step = last["step"] + 1 if last else 0
        self._trackers = list(open_trackers(self._run, self._config, next_step, self._hyperparameters))

    @property
    def hints(self) -> list[str]:
        """How to look at the curves in each tracker."""
        return [tracker.hint for tracker in self._trackers]

    def add(self, metrics: Mapping[str, Float[Array, "*updates"]]) -> None:
        """Take the metrics of an update, or of several that were compiled into one, as they are on the device."""
        names = tuple(sorted(metrics))
        self._waiting.append((names, _stack([metrics[name] for name in names])))
        if len(self._waiting) >= _MAX_WAITING:
            self._fetch()

    def flush(self, step: int) -> dict[str, Number]:
        """Write the means since the last flush, and the counts; return them all."""
        self._fetch()
        means = {name: _to_float32(total / count) for name, (total, count) in self._sums.items()}
        self._sums = {}
        return self.write(step, {**means, **self._counters})

    def write(self, step: int, values: Mapping[str, Number]) -> dict[str, Number]:
        """Write values that stand for themselves, such as those of an evaluation; return what was written."""
        written = _finite(values)
        self._metrics.write(step, written)
        for tracker in self._trackers:
            tracker.write(step, written)
        return written

    def write_timing(self, step: int, values: Mapping[str, Number]) -> None:
        """Write what differs from one run to the next."""
        written = _finite(values)
        self._timing.write(step, written)
        for tracker in self._trackers:
            tracker.write(step, {f"time/{name}": value for name, value in written.items()})

    def position(self) -> dict[str, Any]:
        """Where the log stands, for a checkpoint, as JSON can hold it: bytes on the disk, and sums not yet written."""
        self._fetch()
        sums = {name: [total, count] for name, (total, count) in self._sums.items()}
        counters = dict(self._counters)
        return {"metrics": self._metrics.size, "timing": self._timing.size, "sums": sums, "counters": counters}

    def close(self) -> None:
        """End every file and tracker."""
        self._metrics.close()
        self._timing.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fetch(self) -> None:
        """Add what waits on the device to the sums."""
        waiting, self._waiting = self._waiting, []
        for (names, _), table in zip(waiting, jax.device_get([table for _, table in waiting]), strict=True):
            rows = dict(zip(names, table.reshape(len(names), -1).tolist(), strict=True))
            taken = [not skipped for skipped in rows.get("skipped", [0.0] * table[0].size)]
            for name, values in rows.items():
                if name in COUNTERS:
                    self._counters[name] = self._counters.get(name, 0) + int(sum(values))
                else:
                    self._add(name, [value for value, take in zip(values, taken, strict=True) if take])

    def _add(self, name: str, values: list[float]) -> None:
        """One by one and in order, so that a sum that was interrupted comes out the same."""
        total, count = self._sums.get(name, (0.0, 0))
        for value in filter(math.isfinite, values):
            total, count = total + value, count + 1
        if count:
            self._sums[name] = total, count


@jax.jit
def _stack(values: list[Float[Array, "*updates"]]) -> Float[Array, "names *updates"]:
    """One array of many: bringing each to the host by itself would take longer than a small update."""
    return jnp.stack([value.astype(jnp.float32) for value in values])


def _to_float32(value: float) -> float:
    """The float64 with the fewest digits that float32 does not tell from this value."""
    return float(str(np.float32(value)))


def _finite(values: Mapping[str, Number]) -> dict[str, Number]:
    plain = {name: value if isinstance(value, int) else float(value) for name, value in values.items()}
    return {name: value for name, value in sorted(plain.items()) if math.isfinite(value)}


class JsonLines:
    """A file of JSON objects, one per line, each on the disk as soon as it is written.

    `keep` is how many bytes of an earlier run remain; of a line that was cut there, nothing does.
    """

    def __init__(self, path: Path, keep: int = 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, path.open("a+b")
        kept = _whole_lines(self._file, keep)
        if kept < keep:
            _logger.warning(
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
        """End the file."""
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
    """A service or files that show curves; `hint` is how to open them."""

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
                # Offline, the same id joins the parts when they are uploaded.
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
