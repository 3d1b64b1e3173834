"""Charts of metrics, and strips of images. template.html has the markup; everything here is a function of its data."""

import base64
import io
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jaxtyping import Float, Int, Real, UInt8
from PIL import Image

from pirl.errors import DataError
from pirl.report.runs import Event, Run, by_step
from pirl.text import format_duration

COLORS = 6
POINTS = 300  # drawn of one series: a small chart has no more pixels
_ALL_POINTS, _FEWEST_POINTS = 8 * POINTS, 40  # of one chart: bounds the size of a page of many runs
_WITH_DOTS = 24  # a series of so few points is drawn with dots
_LONG = 80  # a noisy series of more points is drawn faintly under its moving average
_NARROWEST = 5e-7  # a range that is a smaller share of its values is rounding noise, and drawn as a constant
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SIGNS = {"rollback": "rolled back to here", "skipped": "update skipped"}
_STRIP_IMAGES, _STRIP_WIDTH = 12, 160

Values = Float[np.ndarray, " n"]


def color_class(color: int) -> str:
    """The CSS class of a color by its number; after the last, they start again with dashes."""
    return f"c{color % COLORS}{' dashed' * (color // COLORS % 2)}"


_environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
_environment.filters |= {
    "color_class": color_class,
    "duration": format_duration,
    "percent": lambda share: f"{share:.2%}",
}
_template: Any = _environment.from_string(Path(__file__).with_name("template.html").read_text(encoding="utf-8")).module
texts: Mapping[str, str] = _template.texts


def markup(macro: str, *arguments: Any) -> str:
    """The HTML that a macro of template.html makes of its arguments; it escapes text."""
    return str(getattr(_template, macro)(*arguments))


figure, plot, legend, code_block = (partial(markup, macro) for macro in ("figure", "plot", "legend", "code_block"))


@dataclass(frozen=True)
class Axis:
    """A range of values; with `log`, equal ratios are equally far apart and only positive values are drawn."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def fit(cls, arrays: Iterable[Real[np.ndarray, "..."]], log: bool = False, margin: float = 0.0) -> "Axis":
        """The axis of all values that can be drawn, with a margin on both ends as a share of its length."""
        values = _scale(np.concatenate([np.empty(0), *map(np.ravel, arrays)]), log)
        values = values[np.isfinite(values)] if np.isfinite(values).any() else np.array([-1.0 if log else 0.0, 1.0])
        low, high = float(values.min()), float(values.max())
        size = 1.0 if log else max(abs(low), abs(high))
        if size < 1e-280:
            low, high = -1.0, 1.0
        elif high - low > _NARROWEST * size:
            low, high = low - margin * (high - low), high + margin * (high - low)
        else:
            low, high = low - size / 2, high + size / 2
        limit = 300.0 if log else 1e300
        low, high = max(low, -limit), min(high, limit)
        return cls(10**low, 10**high, log) if log else cls(low, high)

    def fraction(self, values: Any) -> Any:
        """Positions of values: 0 at the low end, 1 at the high end, NaN for what cannot be drawn."""
        low, high = _scale([self.low, self.high], self.log)
        return (_scale(values, self.log) - low) / (high - low)

    def ticks(self, about: int = 5) -> list[tuple[float, str]]:
        """Round values inside the range, with their labels."""
        low, high, values, digits = self.low, self.high, list[float](), 4
        if self.log:
            powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
            values = [10.0**power for power in powers[:: math.ceil(len(powers) / (about + 1)) or 1]]
            if len(powers) == 2:
                values = [factor * 10.0**power for power in (powers[0] - 1, *powers) for factor in (1, 2, 5)]
                values = [value for value in values if low <= value <= high]
        if len(values) < 2:
            rough = (high - low) / (about - self.log)
            power = 10.0 ** math.floor(math.log10(rough))
            step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough)))
            values = [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
            # As many digits as it takes to tell neighbors apart.
            digits = max(4, math.ceil(math.log10(max(abs(low), abs(high)) / step)) + 2)
        return [(value, number(value, digits)) for value in values]


@dataclass(frozen=True)
class Categories(Axis):
    """An axis of columns with names, at 0, 1, …"""

    names: tuple[str, ...] = ()

    def ticks(self, about: int = 5) -> list[tuple[float, str]]:
        return [(float(index), name) for index, name in enumerate(self.names)]


def _scale(values: Any, log: bool) -> Any:
    values = np.asarray(values, np.float64)
    # Beyond these, differences and logarithms leave what a double can hold.
    values = np.where((np.abs(values) <= 1e300) & ((values >= 1e-300) | (not log)), values, np.nan)
    return np.log10(values) if log else values


def number(value: float, digits: int = 4) -> str:
    """A number with so many digits, at least 4, as people write it: 0.05, 2,000, 20k, 1.5M, 3·10⁻⁵."""
    size, sign = abs(value), "−" if value < 0 else ""
    if size and not 1e-4 <= size < 1e9:
        mantissa, power = f"{size:.{digits - 1}e}".split("e")
        return sign + f"{float(mantissa):.{digits}g}·10{str(int(power)).translate(_SUPERSCRIPT)}".removeprefix("1·")
    scale, suffix = (1.0, "") if size < 9999.5 else (1e3, "k") if size < 1e6 else (1e6, "M")
    return f"{sign}{size / scale:,.{digits}g}{suffix}"


@dataclass(frozen=True)
class Series:
    """A line, with a gap where it is NaN, and optionally a band around it."""

    name: str
    x: Real[np.ndarray, " n"]
    y: Values
    low: Values | None = None
    high: Values | None = None
    color: int = 0
    dotted: bool = False
    faint: bool = False


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    log_y: bool = False,
    percent: bool = False,
    x_axis: Axis | None = None,
    y_range: tuple[float, float] | None = None,
    marks: Sequence[Event] = (),
    height: int = 200,
    unit: str = "step",
    points: int = POINTS,
) -> str:
    """Lines over what `unit` says, with at most so many points each; the ranges are those of the data unless given."""
    edges = [edge for one in series for edge in (one.y, one.low, one.high) if edge is not None]
    x = x_axis or Axis.fit([one.x for one in series])
    y = Axis(*y_range, log=log_y) if y_range else Axis.fit(edges, log_y, margin=0.05)
    shapes = [shape for one in series for shape in _band(one, x, y, points)]
    shapes += [shape for one in sorted(series, key=lambda one: not one.faint) for shape in _line(one, x, y, points)]
    return markup("chart", label, height, x, y, unit, percent, shapes, marks)


def _band(series: Series, x: Axis, y: Axis, limit: int) -> Iterator[dict[str, str]]:
    if series.low is not None and series.high is not None:
        for low, high in _stretches(x.fraction(series.x), y.fraction(series.low), y.fraction(series.high), limit):
            style = f"{'band' if len(low) > 1 else 'whisker'} c{series.color % COLORS}"
            yield {"tag": "polygon", "style": style, "points": " ".join(low + high[::-1])}


def _line(series: Series, x: Axis, y: Axis, limit: int) -> Iterator[dict[str, str]]:
    places = y.fraction(series.y)
    lines = [line for line, _ in _stretches(x.fraction(series.x), places, places, limit)]
    style = f"{color_class(series.color)}{' dotted' * series.dotted}{' faint' * series.faint}"
    for line in lines:
        if len(line) > 1:
            yield {"tag": "polyline", "style": f"line {style}", "name": series.name, "points": " ".join(line)}
    with_dots = sum(map(len, lines)) <= _WITH_DOTS
    dots = "".join(f"M{point}h0" for line in lines for point in line if with_dots or len(line) == 1)
    if dots and not series.faint:
        yield {"tag": "path", "style": f"dots {style}", "name": series.name, "points": dots}


def _stretches(x: Values, low: Values, high: Values, limit: int) -> Iterator[tuple[list[str], list[str]]]:
    """The points to draw along both edges of a band, in parts without gaps."""
    kept = thin(low, high, limit)
    x, low, high = x[kept], low[kept], high[kept]
    present = np.isfinite(x + low + high)
    for part in np.split(np.arange(len(x)), np.flatnonzero(np.diff(present)) + 1):
        if present[part].any():
            below, above = (np.round(1000 * np.stack([x, 1 - y])[:, part], 1).T.tolist() for y in (low, high))
            yield [f"{a},{b}" for a, b in below], [f"{a},{b}" for a, b in above]


def thin(low: Values, high: Values, limit: int) -> Int[np.ndarray, " m"]:
    """Which points to keep of a long series: its two ends, and of every stretch the lowest and the highest.

    At most `limit` and the ends; no peak is lost. A gap shorter than a stretch is.
    """
    if len(low) <= limit:
        return np.arange(len(low))
    keep = {0, len(low) - 1}
    for stretch in np.array_split(np.arange(len(low)), max(1, limit // 2)):
        finite = stretch[np.isfinite(low[stretch] + high[stretch])]
        extremes = finite[[low[finite].argmin(), high[finite].argmax()]] if finite.size else stretch[:1]
        keep.update(extremes.tolist())
    return np.array(sorted(keep))


def smooth(values: Values, log: bool = False) -> Values:
    """The centered moving average over a fortieth of the points, geometric with `log`; what is missing stays missing."""
    if log:
        return np.exp(smooth(np.log(np.where(values > 0, values, np.nan))))
    present, half = np.isfinite(values), max(1, round(len(values) / 80))
    here = np.arange(len(values))
    first, last = np.maximum(here - half, 0), np.minimum(here + half + 1, len(values))
    sums, counts = (np.append(0.0, np.cumsum(some)) for some in (np.where(present, values, 0.0), present))
    return np.where(present, (sums[last] - sums[first]) / np.maximum(counts[last] - counts[first], 1), np.nan)


@dataclass(frozen=True)
class Panel:
    """A chart of one metric, with a band between two others if they are named."""

    title: str
    metric: str
    caption: str = ""
    low: str | None = None
    high: str | None = None
    log: bool = False
    noisy: bool = False
    share: bool = False  # of 1, drawn as a percentage
    beside: tuple[str, str] | None = None  # another metric of held-out episodes, drawn solid, and what it is called

    def is_logged(self, run: Run) -> bool:
        """Whether a run has anything to show."""
        return self.metric in run.curves or f"val/{self.metric}" in run.curves


PANELS, ROLLOUTS, _CRITICS, SPEED = (tuple(Panel(**each) for each in panels) for panels in _template.panels.values())
GROUPS: Sequence[tuple[str, str, str, str]] = _template.groups
HIDDEN: frozenset[str] = frozenset(_template.hidden)


def find_panels(metrics: Collection[str], runs: Sequence[Run]) -> list[Panel]:
    """The panels of metrics: known ones first, and others if they were ever anything but 0."""
    panels = [panel for panel in (*PANELS, *ROLLOUTS, *_CRITICS) if panel.metric in metrics]
    for metric in sorted(set(metrics).difference(panel.metric for panel in panels)):
        if any(any(by_step(run.curves, name).values()) for run in runs for name in (metric, f"val/{metric}")):
            is_rate, is_share = metric.startswith("lr/"), metric.startswith("curriculum/") or metric in _template.shares
            is_log, title = is_rate or metric.startswith("grad_norm/"), _template.titles.get(metric, metric)
            panels.append(Panel(title, metric, log=is_log, noisy=not is_rate, share=is_share))
    return panels


def draw_panels(runs: Sequence[Run], panels: Sequence[Panel], unit: str = "updates") -> list[str]:
    """A chart for each panel for which any run has data, all over the same axis."""
    end = max([1.0, *(float(curve.steps[-1]) for run in runs for curve in run.curves.values())])
    charts = []
    for panel in panels:
        series = [one for run in runs for one in _series(panel, run)]
        if not series:
            continue
        # One mark of each kind where the eye could not tell them apart.
        marks = {
            (run.name, event.kind, round(POINTS * event.step / end)): Event(
                min(event.step, end), event.kind, f"{run.name}: {event.text}", run.color
            )
            for run in runs
            for event in run.events
            if panel.is_logged(run)
        }
        y = np.concatenate([one.y for one in series])
        chart = line_chart(
            series,
            label=panel.title,
            log_y=panel.log,
            percent=panel.share,
            x_axis=Axis(0.0, end),
            y_range=(0.0, 1.0) if panel.share and not ((y < 0) | (y > 1)).any() else None,
            marks=list(marks.values()),
            unit=unit,
            points=min(POINTS, max(_FEWEST_POINTS, _ALL_POINTS // len(runs))),
        )
        charts.append(figure(plot(chart), panel.caption, panel.title + " (log scale)" * panel.log))
    return charts


def _series(panel: Panel, run: Run) -> Iterator[Series]:
    if curve := run.curves.get(panel.metric):
        if panel.noisy and len(curve.values) > _LONG:
            yield Series(run.name, curve.steps, curve.values, color=run.color, faint=True)
            yield Series(run.name, curve.steps, smooth(curve.values, panel.log), color=run.color)
        else:
            low = high = None
            if panel.low in run.curves and panel.high in run.curves:
                edges = (by_step(run.curves, edge) for edge in (panel.low, panel.high))
                low, high = (np.array([edge.get(step, np.nan) for step in curve.steps.tolist()]) for edge in edges)
            yield Series(run.name, curve.steps, curve.values, low, high, run.color)
    other, name = panel.beside or ("", "")
    for metric, words, dotted in ((panel.metric, "held out", True), (other, name, False)):
        if curve := run.curves.get(f"val/{metric}"):
            yield Series(f"{run.name}, {words}", curve.steps, curve.values, color=run.color, dotted=dotted)


def panel_grid(charts: Sequence[str], runs: Sequence[Run], panels: Sequence[Panel] = ()) -> str:
    """Charts side by side under the legend of their runs."""
    held_out = any(f"val/{panel.metric}" in run.curves for panel in panels for run in runs)
    kinds = {event.kind for run in runs for event in run.events}
    signs = [(kind, meaning) for kind, meaning in _SIGNS.items() if kind in kinds]
    names = legend([(run.name, run.color) for run in runs], "dotted: held-out episodes" * held_out, signs)
    return names + markup("grid", charts)


def image_strip(frames: UInt8[np.ndarray, "t h w 3"]) -> str:
    """Images side by side that divide the time evenly; each is the middle of its share."""
    return markup("strip", [(step, encode_png(frames[step])) for step in _strip_steps(len(frames))])


def video_strip(video: Path) -> str:
    """The same of a video file; a DataError if it has no images that can be read."""
    import av

    try:
        with av.open(str(video)) as container:
            steps = _strip_steps(container.streams.video[0].frames)
            frames = enumerate(container.decode(video=0))
            images = [(step, encode_png(frame.to_ndarray(format="rgb24"))) for step, frame in frames if step in steps]
    except (OSError, IndexError, av.FFmpegError) as error:
        raise DataError(f"{video} is not a video that can be read: {error}.") from error
    if not images:
        raise DataError(f"{video} has no images.")
    return markup("strip", images)


def _strip_steps(length: int) -> list[int]:
    # A narrow screen shows only the middle one of every three images.
    count = min(_STRIP_IMAGES, length)
    count -= count % 3 if count > 3 else 0
    return [int((index + 0.5) * length / count) for index in range(count)]


def encode_png(frame: UInt8[np.ndarray, "h w 3"]) -> str:
    """An image as a `data:` address, no wider than a strip shows it."""
    image, file = Image.fromarray(frame), io.BytesIO()
    image.thumbnail((_STRIP_WIDTH, 10 * _STRIP_WIDTH), Image.Resampling.LANCZOS)
    image.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
