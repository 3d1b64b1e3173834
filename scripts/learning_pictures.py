"""Make docs/images/learning: healthy and sick runs over each other, from the runs that docs/guides/not_learning.md makes.

`python scripts/learning_pictures.py` in the directory where its commands were run, which is where `runs` is.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from pirl.files import write_file
from pirl.report.plots import Axis, Series, color_class, line_chart
from pirl.report.runs import Run, over_iterations, read_log, read_run

IMAGES = Path(__file__).parents[1] / "docs" / "images" / "learning"
WIDTH, MARGIN, LEFT, RIGHT, HEIGHT = 760, 14, 46, 12, 150
# What a line of 13 pixels takes for a character, on average, and a legend for its stroke and the room after a name.
CHARACTER, STROKE = 6.9, 46
# The report's colors on light ground, whatever is around the picture: a picture cannot know the page's scheme.
STYLE = """
svg{overflow:visible;--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#cc79a7}
text{font:12px Inter,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;fill:#63686f}
text.name{font-size:13px;fill:#1c1e21}text.title{font-size:13px;font-weight:600;fill:#1c1e21}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}
.paper{fill:#fdfdfc}.grid{stroke:#e4e4e0}.axis{stroke:#a4a8ac}.key{stroke:currentColor;stroke-width:4;stroke-linecap:round}
text.y{text-anchor:end}text.x{text-anchor:middle}text.label{text-anchor:end;font-style:italic}
text.empty{text-anchor:middle;font-style:italic}
.lines *{vector-effect:non-scaling-stroke;stroke-linejoin:round;stroke-linecap:round;fill:none}
.line{stroke:currentColor;stroke-width:1.8}.line.dotted{stroke-dasharray:1 5;stroke-width:2.6}
.dots{stroke:currentColor;stroke-width:5}.lines .band{fill:currentColor;opacity:.15}
"""


@dataclass(frozen=True)
class Chart:
    """One metric over the run, with a band between two others if they are named, and what was held out dotted."""

    title: str
    metric: str
    low: str | None = None
    high: str | None = None
    held_out: str | None = None
    log: bool = False
    percent: bool = False
    range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Picture:
    """Runs, by what they are called in the legend, in charts side by side."""

    runs: Mapping[str, str]
    charts: Sequence[Chart]
    unit: str = "updates"


_DEMO, _RIPT = {"healthy": "runs/healthy"}, {"healthy": "runs/demo_ript/ript"}
_TD_ERROR = Chart("critic/td_error (log scale)", "critic/td_error", log=True, range=(0.008, 0.5))
_SUCCESS = Chart("rollout/success", "rollout/success", percent=True, range=(0.0, 1.0))
PICTURES = {
    "bc": Picture(
        {
            "healthy: 450 episodes": "runs/bc_healthy",
            "10 episodes": "runs/bc_few",
            "learning rate 0.1": "runs/bc_lr",
        },
        (
            Chart("bc/loss; dotted: val/bc/loss", "bc/loss", held_out="val/bc/loss", range=(0.8, 2.2)),
            Chart("param_norm/policy (log scale)", "param_norm/policy", log=True),
        ),
    ),
    "critics": Picture(
        _DEMO | {"discount 1, aggregate mean": "runs/discount"},
        (
            Chart("critic/q_mean, between q_min and q_max", "critic/q_mean", low="critic/q_min", high="critic/q_max"),
            _TD_ERROR,
        ),
    ),
    "beta": Picture(
        {"healthy: β = 0.05": "runs/healthy", "β = 0.001": "runs/beta_small", "β = 5": "runs/beta_large"},
        (
            Chart("actor/ess", "actor/ess", range=(0.0, 1.0)),
            Chart("actor/clip_fraction", "actor/clip_fraction", range=(0.0, 1.0)),
        ),
    ),
    "labels": Picture(
        _DEMO | {"every episode a failure": "runs/all_failures", "failures for successes": "runs/wrong_column"},
        (
            Chart("critic/q_mean", "critic/q_mean", range=(-0.3, 1.0)),
            _TD_ERROR,
            Chart("actor/advantage_p90", "actor/advantage_p90", range=(0.0, 0.4)),
            Chart("actor/ess", "actor/ess", range=(0.0, 1.0)),
        ),
    ),
    "ript": Picture(
        _RIPT | {"weighting exp": "runs/ript_exp", "learning rate 0.01": "runs/ript_lr"},
        (_SUCCESS, Chart("rollout/drift", "rollout/drift")),
        unit="iterations",
    ),
    "ript_start": Picture(
        _RIPT | {"from a policy that hardly ever succeeds": "runs/ript_weak"},
        (Chart("rollout/groups", "rollout/groups", range=(0.0, 50.0)), _SUCCESS),
        unit="iterations",
    ),
}


def draw(picture: Picture, runs: Sequence[Run]) -> str:
    """The picture as a file of its own."""
    names, top = _legend([run.name for run in runs])
    column = (WIDTH - 2 * MARGIN) / 2
    row = HEIGHT + 84
    charts = ""
    for index, chart in enumerate(picture.charts):
        x, y = MARGIN + index % 2 * column, top + index // 2 * row
        charts += (
            f'<text class="title" x="{x + LEFT:g}" y="{y + 18:g}">{escape(chart.title)}</text>'
            f'<svg x="{x + LEFT:g}" y="{y + 32:g}" width="{column - LEFT - RIGHT:g}" height="{HEIGHT}">'
            f"{_draw_chart(chart, runs, picture.unit)}</svg>"
        )
    height = top + -(-len(picture.charts) // 2) * row
    label = escape(", ".join(chart.title for chart in picture.charts) + ": " + ", ".join(run.name for run in runs))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{label}">\n<title>{label}</title>\n<style>{STYLE}</style>\n'
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="8"/>\n{names}\n{charts}\n</svg>\n'
    )


def by_iteration(path: Path, name: str) -> Run:
    """The curves of rollouts over the iterations as they were made; those after a roll-back follow those before it."""
    return over_iterations(Run(name, {}, iterations=read_log(path / "metrics.jsonl").iterations))


def read(picture: Picture, here: Path) -> list[Run]:
    """The runs of a picture, over what its axis counts."""
    reader = by_iteration if picture.unit == "iterations" else read_run
    return [reader(here / path, name) for name, path in picture.runs.items()]


def _draw_chart(chart: Chart, runs: Sequence[Run], unit: str) -> str:
    series = []
    for color, run in enumerate(runs):
        if curve := run.curves.get(chart.metric):
            low, high = (run.curves[edge].values if edge else None for edge in (chart.low, chart.high))
            series.append(Series(run.name, curve.steps, curve.values, low, high, color))
        if chart.held_out and (curve := run.curves.get(chart.held_out)):
            series.append(Series(run.name, curve.steps, curve.values, color=color, dotted=True))
    end = max(float(one.x.max()) for one in series)
    return line_chart(
        series,
        label=chart.title,
        log_y=chart.log,
        percent=chart.percent,
        x_axis=Axis(0.0, end),
        y_range=chart.range,
        height=HEIGHT,
        unit=unit,
    )


def _legend(names: Sequence[str]) -> tuple[str, int]:
    """Which color is which run, in as many lines as it takes, and where they end."""
    x, y = float(MARGIN), MARGIN + 14
    parts: list[str] = []
    for color, name in enumerate(names):
        width = STROKE + CHARACTER * len(name)
        if parts and x + width > WIDTH - MARGIN:
            x, y = float(MARGIN), y + 22
        parts.append(
            f'<line class="key {color_class(color)}" x1="{x + 3:g}" x2="{x + 19:g}" y1="{y - 4}" y2="{y - 4}"/>'
            f'<text class="name" x="{x + 28:g}" y="{y}">{escape(name)}</text>'
        )
        x += width
    return "".join(parts), y + 14


def main() -> None:
    """Draw every picture whose runs are here; say which are not."""
    for name, picture in PICTURES.items():
        missing = [path for path in picture.runs.values() if not Path(path, "metrics.jsonl").is_file()]
        if missing:
            print(f"{name}: left as it is; there is no {', '.join(missing)}", file=sys.stderr)
            continue
        file = IMAGES / f"{name}.svg"
        write_file(file, draw(picture, read(picture, Path())))
        print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
