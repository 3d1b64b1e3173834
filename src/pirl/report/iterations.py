"""The iterations of a RIPT run: what each has tried, learned from and reached, as a table and as curves over them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pirl.report.axes import number
from pirl.report.page import Column, Section, figure, table
from pirl.report.runs import Curve, Event, Run

PREFIXES = ("rollout/", "curriculum/")
# Rows that are shown: a page is no place for thousands.
_ROWS = 50


@dataclass(frozen=True)
class Iteration:
    """One iteration, from the update before its first, and what was measured of it."""

    number: int
    step: float
    values: Mapping[str, float]


def find_iterations(records: Sequence[tuple[float, Mapping[str, Any]]]) -> tuple[Iteration, ...]:
    """Put iterations together: each has a record after its attempts, and one after its updates if it made any."""
    found: list[Iteration] = []
    for step, record in records:
        values = {
            name: float(value)
            for name, value in record.items()
            if name.startswith(PREFIXES) and isinstance(value, int | float)
        }
        if "rollout/contexts" in values:
            found.append(Iteration(len(found) + 1, step, values))
        elif found:
            found[-1] = replace(found[-1], values={**found[-1].values, **values})
    return tuple(found)


def over_iterations(run: Run, iterations: Sequence[Iteration]) -> Run:
    """The curves of a run's practice over its iterations."""
    names = dict.fromkeys(name for iteration in iterations for name in iteration.values)
    numbers = np.array([iteration.number for iteration in iterations], np.float64)
    begun = np.array([iteration.step for iteration in iterations])
    curves = {
        name: Curve(numbers, np.array([iteration.values.get(name, math.nan) for iteration in iterations]))
        for name in names
    }
    # The state that a roll-back leads to is that between two iterations: before the first that begins there.
    events = tuple(
        Event(
            float(np.searchsorted(begun, event.step, side="left" if event.kind == "rollback" else "right")),
            event.kind,
            event.text,
        )
        for event in run.events
    )
    return Run(run.name, curves, events)


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _count(value: float) -> str:
    return f"{value:,.0f}"


_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("States tried", "rollout/contexts", _count),
    ("Groups kept", "rollout/groups", _count),
    ("Success", "rollout/success", _share),
    ("Before", "rollout/success_kept", _share),
    ("After", "rollout/success_after", _share),
    ("Spread", "rollout/advantage_spread", lambda value: f"{value:.2f}"),
    ("Drift", "rollout/drift", lambda value: number(value, 2)),
    ("Environment steps", "rollout/env_steps", _count),
    ("Steps/s", "env_steps_per_second", _count),
    ("Policy, ms", "policy_ms", lambda value: f"{value:.1f}"),
)


def iterations_section(name: str, iterations: Sequence[Iteration], timing: Mapping[str, Curve]) -> Section:
    """The table, with how fast the attempts were from the records of the clock."""
    speeds = {
        metric: dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True)) for metric, curve in timing.items()
    }
    rows = []
    for iteration in iterations[-_ROWS:]:
        timed = {metric: known[iteration.step] for metric, known in speeds.items() if iteration.step in known}
        values = {**timed, **iteration.values}
        cells = [
            show(values[metric]) if math.isfinite(values.get(metric, math.nan)) else "" for _, metric, show in _COLUMNS
        ]
        rows.append((str(iteration.number), f"{iteration.step:,.0f}", *cells))
    columns = [
        Column("Iteration"),
        Column("Updates before", numeric=True),
        *(Column(title, numeric=True) for title, _, _ in _COLUMNS),
    ]
    caption = (
        "Success is of all rollouts; before and after are the success at the states that were trained on, before the "
        "updates and once more after them. Spread is that of the advantages, drift the distance from the start policy, "
        "environment steps are counted from the beginning."
    )
    left_out = len(iterations) - len(rows)
    introduction = f"The last {_ROWS} of {len(iterations):,} iterations; metrics.jsonl has all." if left_out else ""
    return Section(f"Iterations of {name}", figure(table(columns, rows), caption), introduction)
