"""Everything that a run directory tells, whatever has become of the run. It is only read, never locked."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pirl.errors import DataError
from pirl.report.iterations import PREFIXES, Iteration, find_iterations
from pirl.report.runs import Curve, Event, Log, Run, count_env_steps, env_steps_metric, read_log
from pirl.report.state import State, find_state
from pirl.run_files import RunFiles, runs_in


@dataclass(frozen=True)
class Measurement:
    """One evaluation of a run: the share of episodes that succeeded, with its 95 % interval (Wilson)."""

    step: float
    success: float
    low: float
    high: float
    episodes: int
    lost: int
    length: float
    episode_return: float


@dataclass(frozen=True)
class RunFacts:
    """A run as it is on the disk."""

    path: Path
    run: Run
    timing: Mapping[str, Curve]
    config: Mapping[str, Any]
    metadata: Mapping[str, Any]
    state: State
    is_torn: bool
    iterations: tuple[Iteration, ...] = ()

    @property
    def name(self) -> str:
        """What it is called on the page."""
        return self.run.name

    @property
    def learner(self) -> str:
        """Which algorithm."""
        return str(_inside(self.config, "agent", "learner") or "")

    @property
    def is_best_of_n(self) -> bool:
        """Whether what was evaluated is the learner with its critics, and not the policy that it exports."""
        return self.learner == "acrlpd" and bool(_inside(self.config, "evaluation", "best_of_n"))

    @cached_property
    def updates(self) -> int:
        """How far the log goes."""
        return int(max((curve.steps[-1] for curve in self.run.curves.values()), default=0))

    @property
    def env_steps_metric(self) -> str | None:
        """Under which name the run counts its steps in the environment, if it takes any."""
        return env_steps_metric(self.run.curves)

    @property
    def env_steps(self) -> int | None:
        """Steps in the environment so far."""
        return count_env_steps(self.run.curves)

    @property
    def progress(self) -> str:
        """How far it has come, of how much."""
        updates = f"{self.updates:,} {'update' if self.updates == 1 else 'updates'}"
        if self.learner == "ript":
            return f"{len(self.iterations):,} of {_whole(self.config, 'rollout', 'iterations')} iterations, {updates}"
        if not _inside(self.config, "online", "env_steps"):
            return f"{self.updates:,} of {_whole(self.config, 'steps')} updates"
        return f"{updates}, {self.env_steps or 0:,} of {_whole(self.config, 'online', 'env_steps')} environment steps"

    @cached_property
    def measurements(self) -> tuple[Measurement, ...]:
        """Its evaluations, in order."""
        from pirl.envs.intervals import wilson

        success = self.run.curves.get("eval/success")
        if success is None:
            return ()
        names = ("success_low", "success_high", "episodes", "lost", "length", "return")
        other = {name: _by_step(self.run.curves.get(f"eval/{name}")) for name in names}
        found = []
        for step, rate in zip(success.steps.tolist(), success.values.tolist(), strict=True):
            if not 0 <= rate <= 1:  # nor if it is not a number
                continue
            low, high, episodes, lost, length, returned = (other[name].get(step, math.nan) for name in names)
            count = max(0, int(episodes)) if math.isfinite(episodes) else 0
            if not (math.isfinite(low) and math.isfinite(high)):
                low, high = wilson(round(rate * count), count)
            losses = int(lost) if math.isfinite(lost) else 0
            found.append(Measurement(step, rate, low, high, count, losses, length, returned))
        return tuple(found)

    @property
    def with_intervals(self) -> Run:
        """The run with the intervals of its evaluations as curves, whether or not it has written them itself."""
        steps = np.array([one.step for one in self.measurements])
        low, high = (np.array([getattr(one, end) for one in self.measurements]) for end in ("low", "high"))
        intervals = {"eval/success_low": Curve(steps, low), "eval/success_high": Curve(steps, high)}
        return replace(self.run, curves={**self.run.curves, **intervals})


def read_facts(path: Path, name: str | None = None) -> RunFacts:
    """Read a run directory; raises if it is none, or if its files are damaged."""
    files = RunFiles(path)
    _refuse_other(files)
    # First: all that is read after it is at least as new, so that a run said to be done is there to its end.
    state = find_state(path)
    try:
        config = yaml.safe_load(files.config_file.read_text(encoding="utf-8"))
        metadata = json.loads(files.metadata_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"the config.yaml or the metadata.json of {path} cannot be read: {reason:.200}.") from error
    for file, content in ((files.config_file, config), (files.metadata_file, metadata)):
        if not isinstance(content, Mapping):
            raise DataError(f"{file} should hold names and their values: it is damaged, or of something else.")
    log = read_log(files.metrics_file, keep=PREFIXES) if files.metrics_file.is_file() else Log({})
    clock = read_log(files.timing_file) if files.timing_file.is_file() else Log({})
    events = (*_rollbacks(path, metadata), *_skipped(path, log.curves.get("skipped")))
    return RunFacts(
        path=path,
        run=Run(name or path.resolve().name, log.curves, events),
        timing=clock.curves,
        config=config,
        metadata=metadata,
        state=state,
        is_torn=log.is_torn,
        iterations=find_iterations(log.kept),
    )


def name_runs(paths: Sequence[Path]) -> list[str]:
    """What runs are called: the names of their directories, with those above as far as it takes to tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise DataError("the same run is named twice.")


def _refuse_other(run: RunFiles) -> None:
    path = run.path
    if not path.exists():
        raise DataError(f"there is no run {path}. Name a directory that `pirl train` made.")
    if run.is_run:
        return
    hint = "Name a directory that `pirl train` made."
    if inside := runs_in(path):
        hint = f"There are runs in it: {', '.join(map(str, inside[:3]))}{', …' * (len(inside) > 3)}."
    raise DataError(f"{path} is not a run: it has no config.yaml and metadata.json. {hint}")


def _rollbacks(path: Path, metadata: Mapping[str, Any]) -> list[Event]:
    try:
        entries = [(int(entry["from"]), int(entry["to"]), entry["reason"]) for entry in metadata.get("rollbacks", [])]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the rollbacks in {RunFiles(path).metadata_file} cannot be read: {error!r}.") from error
    return [
        Event(float(to), "rollback", f"rolled back from {begin:,} to {to:,}: {reason}") for begin, to, reason in entries
    ]


def _skipped(path: Path, counted: Curve | None) -> list[Event]:
    """Updates that were skipped: to the update where their batch was kept, and else to the next that was logged."""
    kept: dict[float, str] = {}
    for file in sorted(RunFiles(path).bad_batches.glob("*.json")):
        try:
            about = json.loads(file.read_text(encoding="utf-8"))
            # Their names count from 0.
            kept[float(about["step"]) + 1] = str(about["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half written, or deleted meanwhile
    events = [Event(step, "skipped", f"update {step:,.0f} skipped: {reason}") for step, reason in kept.items()]
    if counted is None:
        return events
    known = np.isfinite(counted.values)
    steps, counts = counted.steps[known], counted.values[known]
    more = np.diff(counts, prepend=0.0)
    for index in np.flatnonzero(more > 0).tolist():
        begin, end = (float(steps[index - 1]) if index else 0.0), float(steps[index])
        missing = int(more[index]) - sum(begin < step <= end for step in kept)
        if missing > 0:
            events.append(Event(end, "skipped", f"{missing:,} skipped between {begin:,.0f} and {end:,.0f}"))
    return events


def _by_step(curve: Curve | None) -> dict[float, float]:
    return {} if curve is None else dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))


def _inside(values: Any, *names: str) -> Any:
    for name in names:
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _whole(config: Mapping[str, Any], *names: str) -> str:
    value = _inside(config, *names)
    is_finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return f"{int(value):,}" if is_finite else "?"
