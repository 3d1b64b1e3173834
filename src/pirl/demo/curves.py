"""The curves of a demo's runs, over updates or over what else they are to be seen against."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pirl.demo.plan import Curves, DemoConfig
from pirl.report import Curve, Run, Section, curves_section, read_run


def draw_curves(config: DemoConfig, curves: Curves, colours: Mapping[str, int]) -> Section:
    """One section of curves; colours by name of the policy that a run ends with."""
    runs = [read_run(config.run(run), config.plan.names[run]) for run in curves.runs or config.plan.runs]
    if curves.against is not None:
        runs = [seen_against(run, curves.against) for run in runs]
    section = curves_section(runs, panels=curves.panels, colours=colours, title=curves.title)
    return section if curves.introduction is None else replace(section, introduction=curves.introduction)


def seen_against(run: Run, metric: str) -> Run:
    """The curves over what a run has learned from so far, which it counts under the name of a metric.

    What is counted at a step is learned from after it: whatever is measured at that step knows of earlier counts only.
    """
    counted = run.curves.get(metric)
    if counted is None:
        return Run(run.name, {})
    known = np.isfinite(counted.values)
    steps, counts = counted.steps[known], np.concatenate([[0.0], counted.values[known]])
    return Run(
        run.name,
        {
            name: Curve(counts[np.searchsorted(steps, curve.steps, side="left")], curve.values)
            for name, curve in run.curves.items()
        },
    )
