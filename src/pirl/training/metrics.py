"""What a run measures: means over updates, in JSON lines that a resumed run continues byte for byte."""

import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from pirl.config.schema import LoggingConfig
from pirl.models.types import Array
from pirl.run_files import RunFiles
from pirl.training.writers import JsonLines, Number, open_trackers

# Summed over the run so far; everything else is averaged over the updates since it was last written.
COUNTERS = frozenset({"skipped"})
# Updates whose metrics may wait on the device.
_MAX_WAITING = 1024


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
