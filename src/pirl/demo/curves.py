"""The curves of a demo's runs, over updates or over what else they are to be seen against."""

from collections.abc import Mapping
from dataclasses import replace

from pirl.demo.plan import Curves, DemoConfig
from pirl.report.runs import over_metric, read_run
from pirl.report.sections import Section, curves_section


def draw_curves(config: DemoConfig, curves: Curves, colours: Mapping[str, int]) -> Section:
    """One section of curves; colours by name of the policy that a run ends with."""
    runs = [read_run(config.run(run), config.plan.names[run]) for run in curves.runs or config.plan.runs]
    if curves.against is not None:
        runs = [over_metric(run, curves.against) for run in runs]
    section = curves_section(runs, panels=curves.panels, colors=colours, title=curves.title, unit=curves.unit)
    return section if curves.introduction is None else replace(section, introduction=curves.introduction)
