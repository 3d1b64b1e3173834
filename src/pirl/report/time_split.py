"""Where the time of a run went: bars of its activities, and how fast it was."""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from pirl.report.curves import Panel, arrange_panels, draw_panels
from pirl.report.page import Column, Section, figure, legend, table
from pirl.report.runs import Curve, Run
from pirl.report.svg import COLOURS
from pirl.words import duration

_ACTIVITIES = ("data", "update", "rollout", "evaluation", "checkpoint")
REST = "the rest"
_PANELS = (
    Panel(
        "Updates per second",
        "steps_per_second",
        "Updates per second of total time, whatever it was spent on.",
        noisy=True,
    ),
    Panel(
        "Environment steps per second",
        "env_steps_per_second",
        "During rollouts, over all environments together.",
        noisy=True,
    ),
    Panel("Time to plan", "policy_ms", "Milliseconds of one batched inference of the policy.", noisy=True),
)


def split_time(timing: Mapping[str, Curve]) -> dict[str, float]:
    """Seconds by activity, and those that belong to none; nothing if none were measured."""
    if "seconds" not in timing:
        return {}
    spent = {
        name.removeprefix("seconds/"): _sum(curve) for name, curve in timing.items() if name.startswith("seconds/")
    }
    return {**spent, REST: max(0.0, _sum(timing["seconds"]) - sum(spent.values()))}


def time_section(timings: Mapping[str, Mapping[str, Curve]], colours: Mapping[str, int]) -> Section:
    """The time of runs by their names, side by side."""
    splits = {name: split for name, timing in timings.items() if (split := split_time(timing))}
    found = {activity for split in splits.values() for activity in split} - {REST}
    activities = [name for name in _ACTIVITIES if name in found] + sorted(found - set(_ACTIVITIES))
    body = ""
    if splits:
        shades = {activity: f"c{index % COLOURS}" for index, activity in enumerate(activities)} | {REST: "rest"}
        rows = "".join(_row(name, split, shades) for name, split in splits.items())
        names = legend(
            [(activity, index % COLOURS) for index, activity in enumerate(activities)], signs=[("rest", REST)]
        )
        caption = (
            "Time of the host since the first update was compiled. The device works on while the host does other "
            "things; the time in which the host waits for it is that of the updates."
        )
        body = names + figure(f'<div class="bars">{rows}</div>{_table(splits, activities)}', caption)
    runs = [Run(name, timing) for name, timing in timings.items()]
    if charts := draw_panels(runs, _PANELS, colours):
        body += arrange_panels(charts, runs, colours=colours)
    return Section("Time", body, "" if body else "No timings were logged.")


def _row(name: str, split: Mapping[str, float], shades: Mapping[str, str]) -> str:
    total, parts, at = sum(split.values()), [], 0.0
    for activity, seconds in ((activity, split[activity]) for activity in shades if activity in split):
        share = 100 * seconds / max(total, 1e-9)
        title = f"<title>{escape(activity)}: {duration(seconds)}, {share:.1f} %</title>"
        parts.append(
            f'<rect class="{shades[activity]}" x="{at:.2f}%" y="25%" height="50%" width="{share:.2f}%">{title}</rect>'
        )
        at += share
    label = ", ".join(f"{activity} {duration(seconds)}" for activity, seconds in split.items())
    return (
        f'<div class="bar-row"><div class="bar-label">{escape(name)}</div>'
        f'<svg class="bar" width="100%" height="40" role="img" aria-label="{escape(f"{name}: {label}")}">'
        f'{"".join(parts)}</svg><div class="bar-value">{duration(total)}</div></div>'
    )


def _table(splits: Mapping[str, Mapping[str, float]], activities: Sequence[str]) -> str:
    columns = [Column("Run"), *(Column(name.capitalize(), numeric=True) for name in (*activities, REST, "total"))]
    rows = []
    for name, split in splits.items():
        total = sum(split.values())
        cells = [
            f"{duration(split[activity])} ({100 * split[activity] / max(total, 1e-9):.0f} %)"
            if activity in split
            else ""
            for activity in (*activities, REST)
        ]
        rows.append((name, *cells, duration(total)))
    return table(columns, rows)


def _sum(curve: Curve) -> float:
    return float(np.nansum(curve.values))
