"""What a run directory tells: every metric as a curve over the steps."""

import itertools
import json
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from pirl.errors import DataError
from pirl.run_files import RunFiles

# A metric has its own rhythm (an evaluation comes rarely): it is missing where it pauses for longer than this many
# times the distance of its neighbours on either side.
_PAUSE = 2.5
# Lines that are parsed together.
_LINES = 4096
_TORN = object()
# Under which names runs count their steps in the environment: RIPT, and who learns online.
_ENV_STEPS = ("rollout/env_steps", "online/env_steps")


@dataclass(frozen=True)
class Curve:
    """A metric over the steps, in order; NaN where it is missing."""

    steps: Float[np.ndarray, " n"]
    values: Float[np.ndarray, " n"]


@dataclass(frozen=True)
class Event:
    """Something that happened to a run at a step, and why."""

    step: float
    kind: Literal["rollback", "skipped"]
    text: str


@dataclass(frozen=True)
class Run:
    """The curves of a run by the name of their metric, and what happened on the way."""

    name: str
    curves: Mapping[str, Curve]
    events: tuple[Event, ...] = ()


@dataclass(frozen=True)
class Log:
    """A file of records by step; `is_torn` if its last line ends in the middle, which is left out.

    `kept` are the records that were asked for, in their order.
    """

    curves: Mapping[str, Curve]
    is_torn: bool = False
    kept: Sequence[tuple[float, Mapping[str, Any]]] = ()


def read_run(path: Path, name: str | None = None) -> Run:
    """Read a run directory; its name is the directory's unless another is given.

    A last line that ends in the middle is left out: the run may be at work, or was killed.
    """
    file = RunFiles(path).metrics_file
    if not file.is_file():
        raise DataError(
            f"{path} has no metrics.jsonl: it is not a run, or one that has not logged anything yet. "
            "Name a directory that `pirl train` made."
        )
    return Run(name or path.resolve().name, read_log(file).curves)


def read_log(file: Path, keep: tuple[str, ...] = ()) -> Log:
    """Read a file of JSON lines, each of which has a step; records with a metric that begins with `keep` are kept."""
    points: dict[str, tuple[array[float], array[float]]] = {}
    kept: list[tuple[float, Mapping[str, Any]]] = []
    wanted = [f'"{prefix}'.encode() for prefix in keep]
    is_torn, count = False, 0
    with file.open("rb") as lines:
        while some := list(itertools.islice(lines, _LINES)):
            records = _parse(file, some, first=count + 1)
            is_torn |= len(records) < len(some)
            count += len(some)
            for line, record in zip(some, records, strict=False):
                if record is None:
                    continue
                step = float(record.pop("step"))
                if any(prefix in line for prefix in wanted):
                    kept.append((step, record))
                for metric, value in record.items():
                    if type(value) is float or type(value) is int or value is None:
                        steps, values = points.get(metric) or points.setdefault(metric, (array("d"), array("d")))
                        steps.append(step)
                        # An integer may be too large to be made a float.
                        values.append(value if value is not None and abs(value) <= sys.float_info.max else math.nan)
    # One after the other, so that a long log is not held twice.
    return Log({metric: _curve(*points.pop(metric)) for metric in list(points)}, is_torn, kept)


def env_steps_metric(curves: Mapping[str, Curve]) -> str | None:
    """Under which name a run counts its steps in the environment, if it takes any."""
    return next((name for name in _ENV_STEPS if name in curves and np.isfinite(curves[name].values).any()), None)


def count_env_steps(curves: Mapping[str, Curve]) -> int | None:
    """The steps in the environment that a run has counted so far."""
    name = env_steps_metric(curves)
    return None if name is None else int(np.nanmax(curves[name].values))


def seen_against(run: Run, metric: str) -> Run:
    """The curves over what a run has learned from so far, which it counts under the name of a metric.

    What is counted at a step is learned from after it: whatever is measured at that step knows of earlier counts only.
    """
    counted = run.curves.get(metric)
    if counted is None:
        return Run(run.name, {})
    known = np.isfinite(counted.values)
    steps, counts = counted.steps[known], np.concatenate([[0.0], counted.values[known]])

    def place(at: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        return counts[np.searchsorted(steps, at, side="left")]

    return Run(
        run.name,
        {name: Curve(place(curve.steps), curve.values) for name, curve in run.curves.items()},
        tuple(Event(float(place(np.array([event.step]))[0]), event.kind, event.text) for event in run.events),
    )


def _parse(file: Path, lines: Sequence[bytes], first: int) -> list[dict[str, Any] | None]:
    """The record of each line, None of one that is blank; of a line that ends in the middle, nothing."""
    try:
        # All at once, because the parser takes longer to be called than to parse a line.
        records = json.loads(b"[%s]" % b",".join(lines))
    except (ValueError, RecursionError):
        records = []
    if len(records) != len(lines):
        records = [_parse_line(line, f"{file}, line {number}") for number, line in enumerate(lines, start=first)]
        if records[-1] is _TORN:
            records.pop()
    for number, record in enumerate(records, start=first):
        step: Any = record.get("step") if isinstance(record, dict) else None
        if record is not None and (type(step) not in (int, float) or not abs(step) <= sys.float_info.max):
            raise DataError(
                f'{file}, line {number} is no record of a step: it should look like {{"step": 100, "loss": 0.5}}.'
            )
    return records


def _parse_line(line: bytes, where: str) -> Any:
    if not line.strip():
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        if not line.endswith(b"\n"):
            return _TORN
        raise DataError(
            f"{where} is not JSON ({error}): the file is damaged. Remove that line, or restore the file."
        ) from error


def _curve(logged_at: "array[float]", logged: "array[float]") -> Curve:
    steps, values = np.array(logged_at, np.float64), np.array(logged, np.float64)
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    # What is said twice of a step was said again after a resume.
    is_last = np.append(steps[1:] != steps[:-1], True)
    steps, values = steps[is_last], values[is_last]
    distances = np.diff(steps)
    if len(distances) < 2:
        return Curve(steps, values)
    before = np.concatenate([distances[1:2], distances[:-1]])
    after = np.concatenate([distances[1:], distances[-2:-1]])
    pauses = np.flatnonzero(distances > _PAUSE * np.maximum(before, after))
    middles = steps[pauses] + distances[pauses] / 2
    return Curve(np.insert(steps, pauses + 1, middles), np.insert(values, pauses + 1, np.nan))
