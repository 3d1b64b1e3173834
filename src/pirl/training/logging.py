"""What a run reports: metrics and timing to files and trackers, progress to the display."""

import contextlib
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pirl.config import RLTrainConfig, to_plain
from pirl.training.display import Activity, Display, Stopwatch
from pirl.training.distributed import is_main_process
from pirl.training.health import EarlyStopping
from pirl.training.memory import MemoryMonitor
from pirl.training.metrics import MetricsLog
from pirl.training.run import RunDirectory
from pirl.training.writers import Number

if TYPE_CHECKING:
    from pirl.training.streams import CollectResult, TrainState


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
