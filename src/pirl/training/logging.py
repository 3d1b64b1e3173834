"""What a run reports: metrics and timing to files and trackers, progress to the display."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import jax

from pirl.config import RLTrainConfig, to_plain
from pirl.processes import read_host
from pirl.training.display import Display
from pirl.training.distributed import is_main_process
from pirl.training.health import EarlyStopping
from pirl.training.metrics import MetricsLog, Number
from pirl.training.run import RunDirectory

if TYPE_CHECKING:
    from pirl.training.streams import CollectResult, TrainState

Activity = Literal["data", "update", "rollout", "evaluation", "checkpoint"]
_GIB = 2.0**30
# Below this share of its memory the host is nearly full; the kernel may end the process at any time.
_NEARLY_FULL = 0.05
_logger = logging.getLogger(__name__)


class RunLog:
    """What the loop, its stream and its hooks report. All processes measure the same; the main one writes it."""

    def __init__(self, config: RLTrainConfig, run: RunDirectory, display: Display, early_stopping: EarlyStopping):
        """Nothing is opened before `load_state`: until then a run that is resumed stays as it is."""
        self._config, self._run, self._display, self._early_stopping = config, run, display, early_stopping
        self._metrics: MetricsLog | None = None
        self._stopwatch, self._memory = Stopwatch(), MemoryMonitor()
        self._memory_values: dict[str, float] = {}
        self._compiled: set[str] = set()
        self._has_updates = False
        self._updates_timed = 0
        self.measured: dict[str, Number] = {}
        """What was measured since the last checkpoint."""

    @property
    def hints(self) -> list[str]:
        """How to look at the curves in each tracker."""
        return [] if self._metrics is None else self._metrics.hints

    def say(self, text: str) -> None:
        """A line for the display and the log."""
        self._display.say(text)

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
        self._write_timing(state.step, {**timing, **self._memory_values})
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
        if result.timing:
            self._write_timing(step, result.timing)
        if result.metrics:
            self.measure(step, progress, result.metrics)

    def _write_timing(self, step: int, values: Mapping[str, Number]) -> None:
        if self._metrics is not None:
            self._metrics.write_timing(step, values)

    def state(self) -> dict[str, Any]:
        """Where the files stand, and what was measured since the last checkpoint."""
        position = None if self._metrics is None else self._metrics.position()
        return {"metrics": position, "measured": {name: float(value) for name, value in self.measured.items()}}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Begin (None), or go on from a saved state: what was written after it is cut off."""
        self.measured, self._updates_timed = dict(state["measured"]) if state else {}, 0
        position = state["metrics"] if state else None
        if self._metrics is not None:
            self._metrics.rewind(position)
        elif is_main_process():
            self._metrics = MetricsLog(self._run.path, self._config.logging, position, to_plain(self._config))

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._metrics is not None:
            self._metrics.close()


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
        """Metrics in GiB: `memory/<point>/host`, `host_peak`, `host_available`, `device`, `device_peak`.

        `device` is the fullest of this process's devices; where there are several, `device_0`, … follow. Peaks are of the
        whole run so far. A device without statistics (the CPU) counts the live arrays, not what a program holds while it
        runs.
        """
        host, devices = read_host(), jax.local_devices()
        if host.available is not None and host.total and host.available < _NEARLY_FULL * host.total:
            self._warn(point, host.available, host.total)
        stats = {device.id: device.memory_stats() for device in devices}
        live = live_bytes() if None in stats.values() else {}
        used = {
            number: live.get(number, 0) if known is None else int(known["bytes_in_use"])
            for number, known in stats.items()
        }
        for number, known in stats.items():
            reported = 0 if known is None else int(known.get("peak_bytes_in_use", 0))
            self._peaks[number] = max(self._peaks.get(number, 0), used[number], reported)
        values = {
            "host": host.used,
            "host_peak": host.peak,
            "host_available": host.available,
            "device": max(used.values()),
            "device_peak": max(self._peaks[number] for number in used),
        }
        if len(devices) > 1:
            values |= {f"device_{index}": count for index, count in enumerate(used.values())}
        return {f"memory/{point}/{name}": value / _GIB for name, value in values.items() if value is not None}

    def _warn(self, point: str, available: int, total: int) -> None:
        if not self._warned:
            _logger.warning(
                "the host's memory is nearly full (%s): %.2f of %.1f GiB are left. Fewer --evaluation.envs, a smaller "
                "--data.prefetch or --online.capacity need less.",
                *(point, available / _GIB, total / _GIB),
            )
        self._warned = True


def live_bytes() -> dict[int, int]:
    """Bytes of the live arrays, by the number of the device."""
    found: dict[int, int] = {}
    for array in jax.live_arrays():
        size = array.dtype.itemsize * math.prod(array.sharding.shard_shape(array.shape))
        for device in array.sharding.addressable_devices:
            found[device.id] = found.get(device.id, 0) + size
    return found
