"""What a run directory tells: every metric as a curve over the steps."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from pirl.errors import DataError

# A metric has its own rhythm (an evaluation comes rarely): it is missing where it pauses for longer than this many
# times the distance of its neighbours on either side.
_PAUSE = 2.5


@dataclass(frozen=True)
class Curve:
    """A metric over the steps, in order; NaN where it is missing."""

    steps: Float[np.ndarray, " n"]
    values: Float[np.ndarray, " n"]


@dataclass(frozen=True)
class Run:
    """The curves of a run by the name of their metric."""

    name: str
    curves: Mapping[str, Curve]


def read_run(path: Path, name: str | None = None) -> Run:
    """Read a run directory; its name is the directory's unless another is given.

    A last line that ends in the middle is left out: the run may be at work, or was killed.
    """
    file = path / "metrics.jsonl"
    if not file.is_file():
        raise DataError(
            f"{path} has no metrics.jsonl: it is not a run, or one that has not logged anything yet. "
            "Name a directory that `pirl train` made."
        )
    points: dict[str, dict[float, float]] = {}
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _parse(line, f"{file}, line {number}", torn=number == len(lines))
        if record is None:
            continue
        step = float(record.pop("step"))
        for metric, value in record.items():
            if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
                # What is said twice of a step was said again after a resume.
                points.setdefault(metric, {})[step] = math.nan if value is None else float(value)
    return Run(name or path.resolve().name, {metric: _curve(values) for metric, values in points.items()})


def _parse(line: bytes, where: str, torn: bool) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError as error:
        if torn:
            return None
        raise DataError(
            f"{where} is not JSON ({error}): the file is damaged. Remove that line, or restore the file."
        ) from error
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int | float) or isinstance(step, bool) or not math.isfinite(step):
        raise DataError(f'{where} is no record of a step: it should look like {{"step": 100, "loss": 0.5}}.')
    return record


def _curve(points: Mapping[float, float]) -> Curve:
    steps = np.array(sorted(points), np.float64)
    values = np.array([points[step] for step in steps.tolist()], np.float64)
    distances = np.diff(steps)
    if len(distances) < 2:
        return Curve(steps, values)
    before = np.concatenate([distances[1:2], distances[:-1]])
    after = np.concatenate([distances[1:], distances[-2:-1]])
    pauses = np.flatnonzero(distances > _PAUSE * np.maximum(before, after))
    middles = steps[pauses] + distances[pauses] / 2
    return Curve(np.insert(steps, pauses + 1, middles), np.insert(values, pauses + 1, np.nan))
