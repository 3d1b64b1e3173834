"""What is known of the trials of a sweep, and which of them is the best."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pirl.errors import DataError
from pirl.report.runs import Run, read_run
from pirl.run_files import RunFiles
from pirl.sweep.halving import Mode

State = Literal["running", "pruned", "complete", "failed"]


@dataclass(frozen=True)
class Measurement:
    """The metric of a trial on a rung, and its 95 % interval if it has one."""

    value: float
    low: float | None = None
    high: float | None = None

    def words(self, percent: bool) -> str:
        """42.0 % [35.1, 49.2], or 0.1234."""
        if not percent:
            return f"{self.value:.4g}"
        interval = "" if self.low is None or self.high is None else f" [{100 * self.low:.1f}, {100 * self.high:.1f}]"
        return f"{100 * self.value:.1f} %{interval}"


@dataclass(frozen=True)
class Trial:
    """A setting of the knobs, and what came of it, by rung."""

    number: int
    setting: Mapping[str, str]
    measured: Mapping[int, Measurement] = field(default_factory=dict)
    state: State = "running"
    reason: str = ""
    """Why it failed."""

    @property
    def name(self) -> str:
        """Also of its directory in the sweep's."""
        return f"trial-{self.number:03d}"

    @property
    def rung(self) -> int | None:
        """The highest that it was measured on."""
        return max(self.measured, default=None)

    @property
    def last(self) -> Measurement | None:
        """What was measured there."""
        return None if self.rung is None else self.measured[self.rung]

    def to_json(self) -> dict[str, Any]:
        """What sweep.json says of it."""
        return {
            "name": self.name,
            "knobs": dict(self.setting),
            "state": self.state,
            "rungs": {
                str(rung): {"value": one.value, **({} if one.low is None else {"low": one.low, "high": one.high})}
                for rung, one in sorted(self.measured.items())
            },
            **({"reason": self.reason} if self.reason else {}),
        }


def order(trials: Iterable[Trial], mode: Mode) -> list[Trial]:
    """The best first: who came further, then who is better there, then who was earlier. Those that failed come last."""
    sign = -1 if mode == "max" else 1

    def place(trial: Trial) -> tuple[bool, int, float, int]:
        value = 0.0 if trial.last is None else sign * trial.last.value
        return trial.state == "failed", -(trial.rung or 0), value, trial.number

    return sorted(trials, key=place)


def find_best(trials: Sequence[Trial], mode: Mode) -> Trial | None:
    """The best of those that did not fail."""
    sound = [trial for trial in trials if trial.last is not None and trial.state != "failed"]
    return next(iter(order(sound, mode)), None)


def is_share(metric: str) -> bool:
    """Whether a metric is a part of 1, which people read as a percentage."""
    return "success" in metric


def measure(directory: Path, metric: str) -> Measurement:
    """The last value of a metric in a run directory; of one that was stopped on the way it would be of too early."""
    if RunFiles(directory).was_stopped:
        raise DataError(f"{directory} was stopped before it came to its end.")
    run = read_run(directory)
    found = _last(run, metric)
    if found is None:
        known = ", ".join(sorted(run.curves)) or "nothing"
        raise DataError(f"{directory} was trained, but logged no {metric}; it logged {known}.")
    step, value = found
    low, high = (_last(run, f"{metric}_{edge}") for edge in ("low", "high"))
    if low is None or high is None or not low[0] == high[0] == step:
        return Measurement(value)
    return Measurement(value, low[1], high[1])


def _last(run: Run, metric: str) -> tuple[float, float] | None:
    """The step and the value of the last measurement that is a number."""
    curve = run.curves.get(metric)
    if curve is None or not np.isfinite(curve.values).any():
        return None
    index = np.flatnonzero(np.isfinite(curve.values))[-1]
    return float(curve.steps[index]), float(curve.values[index])
