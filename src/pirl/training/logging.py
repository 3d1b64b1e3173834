"""What a run reports: metrics and timing to files and trackers, memory, and progress to the display."""

import contextlib
import importlib
import io
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from pirl.config import RLTrainConfig, to_plain
from pirl.config.schema import LoggingConfig
from pirl.errors import ConfigError
from pirl.files import write_file, writing
from pirl.imports import is_installed
from pirl.models.types import Array
from pirl.processes import read_host
from pirl.run_files import RunFiles
from pirl.training.display import Display, Number
from pirl.training.distributed import is_main_process
from pirl.training.health import EarlyStopping

if TYPE_CHECKING:
    from pirl.training.streams import CollectResult, TrainState

Activity = Literal["data", "update", "rollout", "evaluation", "checkpoint"]
# Summed over the run so far; everything else is averaged over the updates since it was last written.
COUNTERS = frozenset({"skipped"})
_MAX_WAITING = 1024  # updates whose metrics may wait on the device
_LONGEST_LINE = 1 << 20  # bytes; so that the last whole line is found without reading the whole file
_NEARLY_FULL = 0.05  # share of the host's memory that is left
_ADVICE = "See to the cause (a full disk, missing rights), then continue with --resume."
_logger = logging.getLogger(__name__)


class RunLog:
    """What the loop, its stream and its hooks report. All processes measure the same; the main one writes it."""

    def __init__(self, config: RLTrainConfig, run: RunFiles, display: Display, early_stopping: EarlyStopping):
        """Nothing is opened before `load_state`: until then a run that is resumed stays as it is."""
        self._config, self._run, self._display, self._early_stopping = config, run, display, early_stopping
        self._metrics: MetricsLog | None = None
        self._stopwatch, self._memory = Stopwatch(), MemoryMonitor()
        self._memory_values: dict[str, float] = {}
        self._compiled: set[str] = set()
        self._has_updates = False
        self._updates_timed = 0
        self.say = display.say
        self.measured: dict[str, Number] = {}
        """What was measured since the last checkpoint."""

    @property
    def hints(self) -> list[str]:
        """How to look at the curves in each tracker."""
        return [] if self._metrics is None else [tracker.hint for tracker in self._metrics.trackers]

    @contextlib.contextmanager
    def activity(self, kind: Activity, phase: str | None = None, compiles: str | None = None) -> Iterator[None]:
        """Time what is done within, and show it; `compiles` is said when it comes for the first time."""
        is_compiling = compiles is not None and compiles not in self._compiled
        with contextlib.ExitStack() as stack:
            if phase is not None:
                stack.enter_context(self._display.phase(phase))
            if is_compiling:
                stack.enter_context(self._display.phase(f"compiling {compiles}"))
                self.say(f"compiling {compiles} …")
            stack.enter_context(self._stopwatch(kind))
            yield
        if is_compiling:
            self._compiled.add(str(compiles))
            if not self._has_updates:
                self._stopwatch = Stopwatch()  # how fast updates are is measured from when the first is compiled

    def take_memory(self, point: str) -> None:
        """Measure memory now, for the next line of timing."""
        self._memory_values |= self._memory.take(point)

    def add(self, info: Mapping[str, Any], num_updates: int) -> None:
        """Take the metrics of an update, or of several that were compiled into one, as they are on the device."""
        self._has_updates = True
        self._updates_timed += num_updates
        if self._metrics is not None:
            self._metrics.add(info)

    def flush(self, state: "TrainState") -> None:
        """Write the means over the updates since the last flush, and timing."""
        values = {} if self._metrics is None else self._metrics.flush(state.step)
        timing = self._stopwatch.lap(self._updates_timed)
        self.take_memory("update")
        if self._metrics is not None:
            self._metrics.write_timing(state.step, {**timing, **self._memory_values})
        self._updates_timed, self._memory_values = 0, {}
        self._display.update(state.progress, {**values, **self.measured}, timing)

    def measure(self, step: int, progress: int, values: Mapping[str, Number]) -> None:
        """Write values that stand for themselves, such as those of an evaluation; early stopping sees them too."""
        self.measured |= dict(values) if self._metrics is None else self._metrics.write(step, values)
        self._display.update(progress, self.measured)
        self._early_stopping.update(values)

    def record(self, step: int, progress: int, result: "CollectResult") -> None:
        """Say and write what rollouts came to."""
        for line in result.lines:
            self.say(line)
        if result.timing and self._metrics is not None:
            self._metrics.write_timing(step, result.timing)
        if result.metrics:
            self.measure(step, progress, result.metrics)

    def state(self) -> dict[str, Any]:
        position = None if self._metrics is None else self._metrics.position()
        return {"metrics": position, "measured": {name: float(value) for name, value in self.measured.items()}}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Begin (None), or go on from a saved state: what was written after it is cut off."""
        self.measured, self._updates_timed = dict(state["measured"]) if state else {}, 0
        self.close()
        if is_main_process():
            position = state["metrics"] if state else None
            self._metrics = MetricsLog(self._run.path, self._config.logging, position, to_plain(self._config))

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()


# --- metrics ----------------------------------------------------------------------------------------------------------


class MetricsLog:
    """Collects metrics of updates without waiting for the device, and writes them to the run directory and to trackers.

    metrics.jsonl holds one object per written step and nothing that depends on time; timing.jsonl holds what does. A mean
    is of the updates that computed the value (NaN: it was not) and were not skipped, written with as many digits as
    float32 takes. `skipped` counts from the beginning of the run. What is not finite is left out.
    """

    def __init__(
        self,
        run: Path,
        config: LoggingConfig,
        resume_at: Mapping[str, Any] | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ):
        """Begin, or go on from a `position()`: what was written after it is cut off."""
        position = resume_at or {"step": -1, "metrics": 0, "timing": 0, "sums": {}, "counters": {}}
        self._step = position["step"]
        self._metrics = JsonLines(RunFiles(run).metrics_file, position["metrics"])
        self._timing = JsonLines(RunFiles(run).timing_file, position["timing"])
        self._sums: dict[str, list[float]] = {name: list(sums) for name, sums in position["sums"].items()}
        self._counters: dict[str, int] = dict(position["counters"])
        self._waiting: list[tuple[tuple[str, ...], Array]] = []
        self.trackers = open_trackers(run, config, self._step + 1, hyperparameters or {})

    def add(self, metrics: Mapping[str, Float[Array, "*updates"]]) -> None:
        """Take the metrics of an update, or of several that were compiled into one, as they are on the device."""
        names = tuple(sorted(metrics))
        self._waiting.append((names, _stack([metrics[name] for name in names])))
        if len(self._waiting) >= _MAX_WAITING:
            self._fetch()

    def flush(self, step: int) -> dict[str, Number]:
        """Write the means since the last flush, and the counts; return them all."""
        self._fetch()
        # The float64 with the fewest digits that float32 does not tell from the mean.
        means = {name: float(str(np.float32(total / count))) for name, (total, count) in self._sums.items()}
        self._sums = {}
        return self.write(step, {**means, **self._counters})

    def write(self, step: int, values: Mapping[str, Number]) -> dict[str, Number]:
        """Write values that stand for themselves, such as those of an evaluation; return what was written."""
        self._step, written = step, _finite(values)
        self._metrics.write(step, written)
        for tracker in self.trackers:
            tracker.write(step, written)
        return written

    def write_timing(self, step: int, values: Mapping[str, Number]) -> None:
        """Write what differs from one run to the next."""
        written = _finite(values)
        self._timing.write(step, written)
        for tracker in self.trackers:
            tracker.write(step, {f"time/{name}": value for name, value in written.items()})

    def position(self) -> dict[str, Any]:
        """Where the log stands, for a checkpoint: bytes on the disk, and sums not yet written."""
        self._fetch()
        sums = {name: list(sums) for name, sums in self._sums.items()}
        sizes = {"metrics": self._metrics.size, "timing": self._timing.size}
        return {"step": self._step, **sizes, "sums": sums, "counters": dict(self._counters)}

    def close(self) -> None:
        for each in (self._metrics, self._timing, *self.trackers):
            each.close()

    def _fetch(self) -> None:
        """Add what waits on the device to the sums."""
        waiting, self._waiting = self._waiting, []
        for (names, _), table in zip(waiting, jax.device_get([table for _, table in waiting]), strict=True):
            rows = dict(zip(names, table.reshape(len(names), -1).tolist(), strict=True))
            skipped = rows.get("skipped", [0.0] * table[0].size)
            for name, values in rows.items():
                if name in COUNTERS:
                    self._counters[name] = self._counters.get(name, 0) + int(sum(values))
                    continue
                # One by one and in order, so that a sum that was interrupted comes out the same.
                for value, was_skipped in zip(values, skipped, strict=True):
                    if not was_skipped and math.isfinite(value):
                        total, count = self._sums.get(name, (0.0, 0))
                        self._sums[name] = [total + value, count + 1]


@jax.jit
def _stack(values: list[Float[Array, "*updates"]]) -> Float[Array, "names *updates"]:
    """One array of many: bringing each to the host by itself would take longer than a small update."""
    return jnp.stack([value.astype(jnp.float32) for value in values])


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
        end = min(keep, os.fstat(self._file.fileno()).st_size)
        self._file.seek(max(end - _LONGEST_LINE, 0))
        tail = self._file.read(min(end, _LONGEST_LINE))
        kept = end - len(tail) + tail.rfind(b"\n") + 1
        if kept < keep:
            _logger.warning("%s held %d bytes when the state was saved, and holds %d whole ones now.", path, keep, kept)
        self._file.truncate(kept)

    @property
    def size(self) -> int:
        """Bytes so far, all of them safe on the disk."""
        with writing(self._path.name, self._path.parent, _ADVICE):
            os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        """One line: the step, then the values by name."""
        line = json.dumps({"step": step, **dict(sorted(values.items()))}, ensure_ascii=False, allow_nan=False)
        with writing(f"the line of step {step} in {self._path.name}", self._path.parent, _ADVICE):
            self._file.write(line.encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a line that could not be written, as was said when it was tried
            self._file.close()


# --- trackers ---------------------------------------------------------------------------------------------------------


def open_trackers(
    run: Path, config: LoggingConfig, next_step: int, hyperparameters: Mapping[str, Any]
) -> "list[TensorBoard | WeightsAndBiases | Trackio]":
    """The trackers that are asked for; what they hold from `next_step` on is of a run that was cut off, and outdated."""
    trackers: list[TensorBoard | WeightsAndBiases | Trackio] = []
    if config.tensorboard and is_installed("tensorboard"):
        trackers.append(TensorBoard(RunFiles(run).tensorboard, next_step))
    if config.wandb != "off":
        trackers.append(WeightsAndBiases(run, config, hyperparameters))
    if config.trackio:
        trackers.append(Trackio(run.name, config.project, hyperparameters, resume=next_step > 0))
    return trackers


class TensorBoard:
    """Event files, written by the `tensorboard` package alone."""

    def __init__(self, directory: Path, next_step: int):
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(str(directory))
        self.hint = f"tensorboard --logdir {directory}"
        # The beginning of a session makes TensorBoard forget what it read of this step and later ones.
        self._add(step=next_step, session_log=self._event.SessionLog(status=self._event.SessionLog.START))

    def _add(self, **content: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), **content))
        self._writer.flush()

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step=step, summary=self._summary(value=scalars))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run whose id is kept in the run directory, so that a resumed run goes on in the same curves."""

    def __init__(self, run: Path, config: LoggingConfig, hyperparameters: Mapping[str, Any]):
        wandb = importlib.import_module("wandb")
        (run / "wandb").mkdir(parents=True, exist_ok=True)  # or W&B would write elsewhere
        id_file = run / "wandb" / "run_id"
        if not id_file.exists():
            write_file(id_file, secrets.token_hex(6))
        try:
            self._run = wandb.init(
                project=config.project,
                name=run.name,
                id=id_file.read_text().strip(),
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
        # W&B takes no step of its own that is behind, and a run that was resumed or went back comes to steps again: the
        # step of the curves is a value like others.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        offline = f"wandb sync {run / 'wandb'}/offline-run-*-{self._run.id}"
        self.hint = offline if config.wandb == "offline" else str(self._run.url)

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run in Trackio's database on this machine."""

    def __init__(self, name: str, project: str, hyperparameters: Mapping[str, Any], resume: bool):
        self._trackio = importlib.import_module("trackio")
        options: dict[str, Any] = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        options |= {"config": dict(hyperparameters), "resume": "allow" if resume else "never"}
        with contextlib.redirect_stdout(io.StringIO()):  # it greets, at length
            self._run = self._trackio.init(project=project, name=name, **options)
        self.hint = f"trackio show --project {project}"

    def write(self, step: int, values: Mapping[str, Number]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()


# --- time and memory --------------------------------------------------------------------------------------------------


class Stopwatch:
    """Seconds by activity. What the device does counts where the host waits for it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._began = clock()
        self._spent: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, activity: Activity) -> Iterator[None]:
        """Time what is done within."""
        began = self._clock()
        try:
            yield
        finally:
            self._spent[activity] = self._spent.get(activity, 0.0) + self._clock() - began

    def lap(self, steps: int) -> dict[str, float]:
        """Seconds by activity and in all since the last lap, and the speed of the steps made in it."""
        now = self._clock()
        seconds = now - self._began
        spent = {f"seconds/{activity}": round(value, 6) for activity, value in sorted(self._spent.items())}
        self._began, self._spent = now, {}
        return {"steps_per_second": round(steps / seconds, 6), "seconds": round(seconds, 6), **spent}


@dataclass
class MemoryMonitor:
    """Measures memory at named points without waiting for the device; warns once when the host is nearly full."""

    _peaks: dict[int, int] = field(default_factory=dict)
    _warned: bool = False

    def take(self, point: str) -> dict[str, float]:
        """In GiB `memory/<point>/host`, `host_peak`, `host_available`, `device`, `device_peak` (of the fullest device of
        this process) and, where there are several, `device_0`, …. Peaks are of the whole run so far.
        """
        gib, host, devices = 2.0**30, read_host(), jax.local_devices()
        if (
            not self._warned
            and host.available is not None
            and host.total
            and host.available < _NEARLY_FULL * host.total
        ):
            self._warned = True
            _logger.warning(
                "the host's memory is nearly full (%s): %.2f of %.1f GiB are left. Fewer --evaluation.envs, a smaller "
                "--data.prefetch or --online.capacity need less.",
                *(point, host.available / gib, host.total / gib),
            )
        stats = {device.id: device.memory_stats() for device in devices}
        # The CPU has no statistics: live arrays, not what a program holds while it runs.
        live = live_bytes() if None in stats.values() else {}
        used = {
            number: live.get(number, 0) if known is None else known["bytes_in_use"] for number, known in stats.items()
        }
        for number, known in stats.items():
            reported = (known or {}).get("peak_bytes_in_use", 0)
            self._peaks[number] = max(self._peaks.get(number, 0), used[number], reported)
        values = {"host": host.used, "host_peak": host.peak, "host_available": host.available}
        values |= {"device": max(used.values()), "device_peak": max(self._peaks[number] for number in used)}
        if len(devices) > 1:
            values |= {f"device_{index}": count for index, count in enumerate(used.values())}
        return {f"memory/{point}/{name}": value / gib for name, value in values.items() if value is not None}


def live_bytes() -> dict[int, int]:
    """Bytes of the live arrays, by the number of the device."""
    found: dict[int, int] = {}
    for array in jax.live_arrays():
        size = array.dtype.itemsize * math.prod(array.sharding.shard_shape(array.shape))
        for device in array.sharding.addressable_devices:
            found[device.id] = found.get(device.id, 0) + size
    return found
