"""What a run directory says: metrics as curves, events, evaluations, RIPT's iterations, and whether the run is active."""

import io
import json
import math
import os
import re
import socket
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from pirl.errors import DataError
from pirl.processes import is_alive, last_lines
from pirl.run_files import RunFiles, runs_in

ENV_STEPS = ("rollout/env_steps", "online/env_steps")  # where RIPT and online learners count environment steps
_GAP = 2.5  # a curve has a gap where a distance is so many times that of the neighbors on both sides
_RECENT = 600.0  # seconds; a run of another machine whose files are newer counts as active
_LOCKS = Path("/proc/locks")
# The last of these says how a run ended: not a warning, nor where the policy is.
_ENTRY = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|ERROR) (?!policy: )(.*)")


@dataclass(frozen=True)
class Curve:
    """A metric over the steps, in order; NaN where it is missing."""

    steps: Float[np.ndarray, " n"]
    values: Float[np.ndarray, " n"]


class Event(NamedTuple):
    """A "rollback" or "skipped" update of a run, or the "good" or "bad" end of an episode."""

    step: float
    kind: str
    text: str
    color: int | None = None


@dataclass(frozen=True)
class PolicyResult:
    """A success rate with its 95 % interval; `paired` compares it with the baseline, as `Comparison.to_json` says."""

    name: str
    success: float
    low: float
    high: float
    episodes: int
    description: str = ""
    updates: int | None = None
    minutes: float | None = None
    paired: Mapping[str, Any] | None = None
    color: int = 0

    @property
    def rate(self) -> str:
        return f"{100 * self.success:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True)
class Run:
    """The curves of a run by metric, and what else was read; `state` is done, stopped, failed, under way or ended."""

    name: str
    curves: Mapping[str, Curve]
    iterations: Sequence[tuple[float, dict[str, float]]] = ()  # of RIPT: the updates before it, and its metrics
    is_torn: bool = False  # whether the last line of the metrics is incomplete, and left out
    events: Sequence[Event] = ()
    evaluations: Sequence[PolicyResult] = ()
    color: int = 0
    path: Path = Path()
    timing: Mapping[str, Curve] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    state: str = ""
    state_text: str = ""

    @property
    def learner(self) -> str:
        return str(self.metadata["config"]["agent"]["learner"])

    @property
    def progress(self) -> str:
        config = self.metadata["config"]
        made = int(max((curve.steps[-1] for curve in self.curves.values()), default=0))
        updates = f"{made:,} update{'s' * (made != 1)}"
        if self.learner == "ript":
            return f"{len(self.iterations):,} of {config['rollout']['iterations']:,} iterations, {updates}"
        if wanted := config["online"]["env_steps"]:
            return f"{updates}, {count_env_steps(self) or 0:,} of {wanted:,} environment steps"
        return f"{made:,} of {config['steps']:,} updates"


def read_run(path: Path, name: str | None = None) -> Run:
    """The metrics of a run, called as its directory unless another name is given."""
    file = RunFiles(path).metrics_file
    if not file.is_file():
        raise DataError(
            f"{path} has no metrics.jsonl: name a run that `pirl train` made and that has logged something."
        )
    return read_log(file, name or path.resolve().name)


def read_log(file: Path, name: str = "") -> Run:
    """Read JSON lines of metrics with a step each; there may be no such file yet."""
    points: dict[str, tuple[array[float], array[float]]] = {}
    iterations: list[tuple[float, dict[str, float]]] = []
    is_torn = False
    with file.open("rb") if file.is_file() else io.BytesIO() as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                if is_torn := not line.endswith(b"\n"):
                    break
                raise DataError(
                    f"{file}, line {number} is not JSON ({error}): remove it, or restore the file."
                ) from error
            step: Any = record.pop("step", None) if isinstance(record, dict) else None
            if type(step) not in (int, float) or not abs(step) <= sys.float_info.max:
                raise DataError(
                    f'{file}, line {number} is not a record of a step, such as {{"step": 100, "loss": 0.5}}.'
                )
            # An iteration has a record after its rollouts, and one after its updates if it made any.
            if "rollout/contexts" in record:
                iterations.append((float(step), {}))
            for metric, value in record.items():
                if type(value) in (int, float) or value is None:
                    steps, values = points.get(metric) or points.setdefault(metric, (array("d"), array("d")))
                    is_finite = value is not None and abs(value) <= sys.float_info.max
                    steps.append(step)
                    values.append(value if is_finite else math.nan)
                    if is_finite and iterations and metric.startswith(("rollout/", "curriculum/")):
                        iterations[-1][1][metric] = float(value)
    # One after the other, so that a long log is not in memory twice.
    return Run(name, {metric: _curve(*points.pop(metric)) for metric in list(points)}, iterations, is_torn)


def _curve(logged_at: Sequence[float], logged: Sequence[float]) -> Curve:
    steps, values = np.array(logged_at, np.float64), np.array(logged, np.float64)
    order = np.argsort(steps, kind="stable")
    # A step that was logged again after a resume counts once.
    last = order[np.append(np.diff(steps[order]) != 0, True)]
    steps, values = steps[last], values[last]
    distances = np.diff(steps)
    if len(distances) < 2:
        return Curve(steps, values)
    neighbors = np.maximum(np.append(distances[1], distances[:-1]), np.append(distances[1:], distances[-2]))
    gaps = np.flatnonzero(distances > _GAP * neighbors)
    return Curve(np.insert(steps, gaps + 1, steps[gaps] + distances[gaps] / 2), np.insert(values, gaps + 1, np.nan))


def by_step(curves: Mapping[str, Curve], metric: str | None) -> dict[float, float]:
    """The finite values of a metric, by step."""
    curve = curves.get(metric or "")
    pairs = zip(curve.steps.tolist(), curve.values.tolist(), strict=True) if curve else ()
    return {step: value for step, value in pairs if math.isfinite(value)}


def count_env_steps(run: Run) -> int | None:
    """The environment steps that a run has counted so far, if it takes any."""
    return max((int(count) for metric in ENV_STEPS for count in by_step(run.curves, metric).values()), default=None)


def over_metric(run: Run, *metrics: str) -> Run:
    """The curves over the first of these metrics that a run has: a count of what was learned from.

    The count at a step is learned from after it, so what is measured at that step is drawn at the count before.
    """
    counted = next(filter(None, (by_step(run.curves, metric) for metric in metrics)), {})
    steps, counts = list(counted), np.array([0.0, *counted.values()])

    def count(step: Any) -> Any:
        return counts[np.searchsorted(steps, step, side="left")]

    curves = {name: Curve(count(curve.steps), curve.values) for name, curve in run.curves.items()}
    events = [event._replace(step=float(count(event.step))) for event in run.events]
    return replace(run, curves=curves if counted else {}, events=events if counted else [])


def over_iterations(run: Run) -> Run:
    """The metrics of RIPT's iterations as curves over the number of the iteration."""
    begun, values = [step for step, _ in run.iterations], [values for _, values in run.iterations]
    numbers = np.arange(1.0, len(values) + 1)
    names = dict.fromkeys(name for one in values for name in one)
    curves = {name: Curve(numbers, np.array([one.get(name, math.nan) for one in values])) for name in names}
    # A rollback leads to the state before the first iteration that begins there.
    after = [np.searchsorted(begun, one.step, "left" if one.kind == "rollback" else "right") for one in run.events]
    events = [event._replace(step=float(at)) for event, at in zip(run.events, after, strict=True)]
    return replace(run, curves=curves, events=events)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """All that run directories say; they are not locked or changed. Each run has a color and a name of its own."""
    parts = [path.resolve().parts for path in paths]
    for index, path in enumerate(paths):
        if parts[index] in parts[:index]:
            raise DataError(f"{path} is named twice: name each run once.")
    depth = 1  # of the directories above, as many as it takes to tell them apart
    while len({part[-depth:] for part in parts}) < len(parts):
        depth += 1
    return [_read(path, "/".join(parts[color][-depth:]), color) for color, path in enumerate(paths)]


def _read(path: Path, name: str, color: int) -> Run:
    files = RunFiles(path)
    if not path.exists():
        raise DataError(f"there is no run {path}. Name a directory that `pirl train` made.")
    if not files.is_run:
        inside = ", ".join(map(str, runs_in(path)[:3]))
        hint = f"There are runs in it: {inside}." if inside else "Name a directory that `pirl train` made."
        raise DataError(f"{path} is not a run: it has no config.yaml and metadata.json. {hint}")
    state, state_text = _find_state(files)  # first: the rest is newer, so a run that is done is read to its end
    log, timing = read_log(files.metrics_file, name), read_log(files.timing_file).curves
    lows, highs, counts = (by_step(log.curves, f"eval/{name}") for name in ("success_low", "success_high", "episodes"))
    evaluations = [
        PolicyResult(f"After {step:,.0f} updates", rate, lows[step], highs[step], int(counts[step]), updates=int(step))
        for step, rate in by_step(log.curves, "eval/success").items()
        if step in lows and step in highs and step in counts
    ]
    events = _skipped(files, log.curves)
    curves = {metric: curve for metric, curve in timing.items() if metric.startswith("memory/")} | dict(log.curves)
    try:
        metadata = json.loads(files.metadata_file.read_text(encoding="utf-8"))
        for one in metadata.get("rollbacks", []):
            text = f"rolled back from {one['from']:,} to {one['to']:,}: {one['reason']}"
            events.append(Event(float(one["to"]), "rollback", text))
        log = replace(log, curves=curves, path=path, timing=timing, metadata=metadata, color=color)
        _ = log.progress  # fails if the configuration is not whole
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{files.metadata_file} cannot be read ({error!r}): it is damaged.") from error
    return replace(log, events=sorted(events), evaluations=evaluations, state=state, state_text=state_text)


def _skipped(files: RunFiles, curves: Mapping[str, Curve]) -> list[Event]:
    """Skipped updates: at the update whose batch was kept, or else at the next step that was logged."""
    reasons: dict[float, str] = {}
    for file in sorted(files.bad_batches.glob("*.json")):
        try:
            about = json.loads(file.read_text(encoding="utf-8"))
            reasons[float(about["step"]) + 1] = str(about["reason"])  # the file counts from 0
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half written, or deleted meanwhile
    events = [Event(step, "skipped", f"update {step:,.0f} skipped: {reason}") for step, reason in reasons.items()]
    begin = before = 0.0
    for end, total in by_step(curves, "skipped").items():
        missing = int(total - before) - sum(begin < step <= end for step in reasons)
        if missing > 0:
            events.append(Event(end, "skipped", f"{missing:,} skipped between {begin:,.0f} and {end:,.0f}"))
        begin, before = end, total
    return events


def _find_state(files: RunFiles) -> tuple[str, str]:
    """The state of a run, and the same in words; the lock is only looked at."""
    owner = "".join(last_lines(files.lock_file))
    if holder := _lock_holder(files.lock_file, owner):
        return "under way", f"is under way ({holder})"
    entries = [entry for line in last_lines(files.log_file, 1000) if (entry := _ENTRY.match(line))]
    level, text = entries[-1].groups() if entries else ("", "")
    text = text.rstrip(".")
    if level == "ERROR":
        return "failed", f"failed: {text}"
    if re.match(r"done after|all \d+ updates are done", text):
        return "done", "is done"
    if text.startswith("stopped at step"):
        return "stopped", f"was {text}"
    changed = max(
        (file.stat().st_mtime for file in (files.log_file, files.metrics_file) if file.is_file()), default=0.0
    )
    age = max(0.0, time.time() - changed)
    if age < _RECENT and owner and not owner.endswith(f" on {socket.gethostname()}"):
        return "under way", f"seems to be running elsewhere: its files changed {age:.0f} s ago"
    return "ended", "ended without a message: it was killed, or the machine went down"


def _lock_holder(lock: Path, owner: str) -> str:
    """The process that holds the lock, as far as this machine knows; `owner` is what the file says."""
    process, _, host = owner.removeprefix("process ").partition(" on ")
    if not _LOCKS.is_file():
        return owner if host == socket.gethostname() and is_alive(int(process)) else ""
    for line in _LOCKS.read_text().splitlines() if lock.is_file() else ():
        words, about = line.split(), lock.stat()  # 1: FLOCK ADVISORY WRITE 4321 08:02:123456 0 EOF; "->" if it waits
        if "FLOCK" in words and "->" not in words:
            device, _, inode = words[5].rpartition(":")
            # Some file systems show another device number here: then the process has to match.
            is_same = device == f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}" or words[4] == process
            if inode == str(about.st_ino) and is_same:
                return owner or f"process {words[4]}"
    return ""
