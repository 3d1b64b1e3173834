"""Charts as SVG text: pure functions of their data.

Places along x are percentages and lines live in a picture of 1000 × 1000 that is stretched to fit, so that a chart
fills whatever width it is given while its text and strokes keep their size. Colours are classes of the page's style.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

import numpy as np
from jaxtyping import Float, Real

from pirl.report.axes import Axis, split_at_gaps, thin

COLOURS = 6
# Points that are drawn of one series: more than there are pixels in a small chart nobody can see.
POINTS = 300
# Up to so many points each is marked: it was measured there and only joined in between.
_MARKED = 24


@dataclass(frozen=True)
class Series:
    """A line, where it is NaN a gap, and optionally a band around it. Equal colours mean the same thing."""

    name: str
    x: Real[np.ndarray, " n"]
    y: Float[np.ndarray, " n"]
    low: Float[np.ndarray, " n"] | None = None
    high: Float[np.ndarray, " n"] | None = None
    colour: int = 0
    dotted: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Mark:
    """A moment worth a line, with a word about it: at the end of an episode, or under the pointer where a run was hit."""

    x: float
    text: str
    kind: Literal["good", "bad", "rollback", "skipped"]
    colour: int | None = None
    """Of the run that it is about, where there may be several."""


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    log_y: bool = False,
    percent: bool = False,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    marks: Sequence[Mark] = (),
    height: int = 200,
    unit: str = "step",
    points: int = POINTS,
) -> str:
    """Lines over the steps; the ranges are those of the data unless given. `percent` labels shares of 1 as such.

    `unit` is what the axis below counts, and `points` how many of each series are drawn at most.
    """
    edges = [edge for one in series for edge in (one.y, one.low, one.high) if edge is not None]
    x_axis = Axis(*x_range) if x_range else Axis.fit([one.x for one in series])
    y_axis = Axis(*y_range, log=log_y) if y_range else Axis.fit(edges, log_y, margin=0.05)
    drawn = [_band(one, x_axis, y_axis, points) for one in series]
    drawn += [_line(one, x_axis, y_axis, points) for one in sorted(series, key=lambda one: not one.faint)]
    empty = '<text class="empty" x="50%" y="50%">no data</text>'
    return (
        f'<svg class="chart" width="100%" height="{height}" role="img" aria-label="{escape(label)}" '
        f'data-x="{x_axis.low!r} {x_axis.high!r}" data-y="{y_axis.low!r} {y_axis.high!r}" data-log="{int(log_y)}" '
        f'data-unit="{escape(unit)}">{_grid(x_axis, y_axis, percent, unit)}'
        '<svg class="lines" viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%">'
        f"{''.join(drawn)}</svg>"
        f"{''.join(_mark(mark, x_axis) for mark in marks)}{'' if any(drawn) else empty}</svg>"
    )


def colour_class(colour: int) -> str:
    """The style of a colour by its number; when there are no more, they come again with dashes."""
    return f"c{colour % COLOURS}{' dashed' * (colour // COLOURS % 2)}"


def bar(value: float, low: float, high: float, *, colour: int, label: str) -> str:
    """One horizontal bar from 0 to a share of 1, its interval drawn over it."""
    ends = "".join(f'<line x1="{_percent(end)}" x2="{_percent(end)}" y1="30%" y2="70%"/>' for end in (low, high))
    grid = "".join(f'<line class="grid" x1="{at}%" x2="{at}%" y1="0" y2="100%"/>' for at in (0, 25, 50, 75, 100))
    return (
        f'<svg class="bar" width="100%" height="40" role="img" aria-label="{escape(label)}">{grid}'
        f'<rect class="c{colour % COLOURS}" x="0" y="25%" height="50%" width="{_percent(value)}" rx="2"/>'
        f'<g class="interval"><line x1="{_percent(low)}" x2="{_percent(high)}" y1="50%" y2="50%"/>{ends}</g></svg>'
    )


def bar_axis() -> str:
    """The scale under a column of bars."""
    anchors = {0: "start", 100: "end"}
    labels = "".join(
        f'<text x="{at}%" y="14" style="text-anchor:{anchors.get(at, "middle")}">{at} %</text>'
        for at in (0, 25, 50, 75, 100)
    )
    return f'<svg class="bar" width="100%" height="20" aria-hidden="true">{labels}</svg>'


def _percent(share: float) -> str:
    return f"{100 * min(max(share, 0.0), 1.0):.2f}%"


def _grid(x_axis: Axis, y_axis: Axis, percent: bool, unit: str) -> str:
    parts = []
    for value, text in y_axis.ticks():
        at = _percent(1 - float(y_axis.place(np.array([value]))[0]))
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{at}" y2="{at}"/>')
        text = f"{100 * value:.4g} %" if percent else text
        parts.append(f'<text class="y" x="-8" y="{at}" dy="0.35em">{text}</text>')
    for value, text in x_axis.ticks():
        at = _percent(float(x_axis.place(np.array([value]))[0]))
        parts.append(f'<text class="x" x="{at}" y="100%" dy="18">{text}</text>')
    parts.append('<line class="axis" x1="0" x2="100%" y1="100%" y2="100%"/>')
    parts.append(f'<text class="x label" x="100%" y="100%" dy="34">{escape(unit)}</text>')
    return "".join(parts)


def _points(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> list[str]:
    """Places (from 0 to 1) in the stretched picture, whose y grows downwards."""
    return [f"{1000 * a:.1f},{1000 * (1 - b):.1f}" for a, b in zip(x, y, strict=True)]


def _band(series: Series, x_axis: Axis, y_axis: Axis, points: int) -> str:
    if series.low is None or series.high is None:
        return ""
    x, low, high = x_axis.place(series.x), y_axis.place(series.low), y_axis.place(series.high)
    kept = thin(low, high, points)
    x, low, high = x[kept], low[kept], high[kept]
    areas = []
    for part in split_at_gaps(np.isfinite(x) & np.isfinite(low) & np.isfinite(high)):
        outline = _points(x[part], low[part]) + _points(x[part], high[part])[::-1]
        kind = "band" if len(outline) > 2 else "whisker"
        areas.append(f'<polygon class="{kind} c{series.colour % COLOURS}" points="{" ".join(outline)}"/>')
    return "".join(areas)


def _line(series: Series, x_axis: Axis, y_axis: Axis, limit: int) -> str:
    x, y = x_axis.place(series.x), y_axis.place(series.y)
    kept = thin(y, y, limit)
    x, y = x[kept], y[kept]
    here = np.isfinite(x) & np.isfinite(y)
    style = f"{colour_class(series.colour)}{' dotted' * series.dotted}{' faint' * series.faint}"
    lines, dots = [], []
    for part in split_at_gaps(here):
        points = _points(x[part], y[part])
        if len(points) > 1:
            lines.append(
                f'<polyline class="line {style}" data-name="{escape(series.name)}" points="{" ".join(points)}"/>'
            )
        if len(points) == 1 or here.sum() <= _MARKED:
            dots += points
    if dots and not series.faint:
        # A line of no length with round ends is a dot that stays round when the picture is stretched.
        strokes = "".join(f"M{point}h0" for point in dots)
        lines.append(f'<path class="dots {style}" data-name="{escape(series.name)}" d="{strokes}"/>')
    return "".join(lines)


def _mark(mark: Mark, x_axis: Axis) -> str:
    at = _percent(float(x_axis.place(np.array([mark.x]))[0]))
    if mark.colour is None:
        return (
            f'<g class="mark {mark.kind}"><line x1="{at}" x2="{at}" y1="0" y2="100%"/>'
            f'<text x="{at}" y="0" dx="2" dy="-7">{escape(mark.text)}</text></g>'
        )
    # A roll-back is a line through everything; a skipped update is one of many, and a tick on the axis.
    top = "0" if mark.kind == "rollback" else "93%"
    return (
        f'<g class="mark {mark.kind} c{mark.colour % COLOURS}"><title>{escape(mark.text)}</title>'
        f'<line x1="{at}" x2="{at}" y1="{top}" y2="100%"/></g>'
    )
