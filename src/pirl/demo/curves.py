"""The curves of a demo's runs, over updates or over what else they are to be seen against."""

from collections.abc import Mapping
from dataclasses import replace

from pirl.demo.plan import Curves, DemoConfig
from pirl.report import Section, curves_section, read_run, seen_against


def draw_curves(config: DemoConfig, curves: Curves, colours: Mapping[str, int]) -> Section:
    """One section of curves; colours by name of the policy that a run ends with."""
    runs = [read_run(config.run(run), config.plan.names[run]) for run in curves.runs or config.plan.runs]
    if curves.against is not None:
        runs = [seen_against(run, curves.against) for run in runs]
    section = curves_section(runs, panels=curves.panels, colours=colours, title=curves.title, unit=curves.unit)
    return section if curves.introduction is None else replace(section, introduction=curves.introduction)
