"""The charts of a sweep: the metric of the trials over their steps, and against each knob."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from pirl.report.plots import COLORS, Axis, Series, line_chart
from pirl.report.runs import Run
from pirl.sweep.knobs import Knob, Range, as_number
from pirl.sweep.trials import Trial, is_share

_HEIGHT = 220
# Letters of all labels under an axis together.
_LETTERS = 48
# Room beside the outermost dots, as a share of the axis.
_MARGIN = 0.06
# Between dots of one column, at most.
_STEP = 0.03


def curves_chart(trials: Sequence[Trial], runs: Sequence[Run], rungs: Sequence[int], metric: str) -> str:
    """A line for each trial, in the colour of the highest rung it came to."""
    series = [
        Series(trial.name, curve.steps, curve.values, color=colour_of(trial.rung, rungs))
        for trial, run in zip(trials, runs, strict=True)
        if (curve := run.curves.get(metric)) is not None
    ]
    share = is_share(metric)
    end = max((float(one.x[-1]) for one in series), default=1.0)
    return line_chart(
        series,
        label=f"{metric} of the trials",
        percent=share,
        x_range=(0.0, max(1.0, end)),
        y_range=(0.0, 1.0) if share else None,
        height=300,
        unit="updates",
    )


def knob_chart(knob: Knob, trials: Sequence[Trial], rungs: Sequence[int], metric: str) -> str:
    """A dot for each trial on each rung, in the colour of the rung, with its interval."""
    share = is_share(metric)
    dots = [_Dot(trial, rung) for trial in trials for rung in trial.measured]
    edges = np.array([edge for dot in dots for edge in dot.edges])
    y_axis = Axis(0.0, 1.0) if share else Axis.fit([edges], margin=0.08)
    places, ticks = _places(knob, trials)
    drawn = "".join(
        _draw(dot, places[dot.trial.number], y_axis, rungs, share) for dot in sorted(dots, key=lambda dot: dot.rung)
    )
    empty = "" if dots else '<text class="empty" x="50%" y="50%">no data</text>'
    return (
        f'<svg width="100%" height="{_HEIGHT}" role="img" aria-label="{escape(f"{metric} against {knob.flag}")}">'
        f"{_grid(y_axis, ticks, share)}"
        '<svg class="lines" viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%">'
        f"{drawn}</svg>{empty}</svg>"
    )


def colour_of(rung: int | None, rungs: Sequence[int]) -> int:
    """The colour that stands for a rung."""
    return (0 if rung is None else list(rungs).index(rung)) % COLORS


@dataclass(frozen=True)
class _Dot:
    """What was measured of a trial on a rung."""

    trial: Trial
    rung: int

    @property
    def edges(self) -> tuple[float, ...]:
        one = self.trial.measured[self.rung]
        return tuple(edge for edge in (one.value, one.low, one.high) if edge is not None)


def _places(knob: Knob, trials: Sequence[Trial]) -> tuple[dict[int, float], list[tuple[float, str]]]:
    """Where trials lie by the value of a knob, from 0 to 1, and the labels: of a range to scale, of a list in columns."""
    texts = {trial.number: trial.setting[knob.name] for trial in trials}
    if isinstance(knob.values, Range):
        axis = Axis(knob.values.low, knob.values.high, knob.values.log)

        def place(value: float) -> float:
            return _MARGIN + (1 - 2 * _MARGIN) * float(axis.fraction(np.array([value]))[0])

        ticks = [(place(value), label) for value, label in axis.ticks(4)]
        return {number: place(float(text)) for number, text in texts.items()}, ticks
    numbers = {text: as_number(text) for text in knob.values}
    known = {text: number for text, number in numbers.items() if number is not None}
    columns = sorted(known, key=lambda text: known[text]) if len(known) == len(numbers) else list(numbers)
    width, places = 1 / len(columns), {}
    for index, column in enumerate(columns):
        # Side by side, in the order in which they were tried, so that none hides another.
        inside = sorted(number for number, text in texts.items() if text == column)
        step = min(_STEP, width / 2 / max(1, len(inside)))
        for rank, number in enumerate(inside):
            places[number] = (index + 0.5) * width + step * (rank - (len(inside) - 1) / 2)
    ticks = [((index + 0.5) * width, _short(text, _LETTERS // len(columns))) for index, text in enumerate(columns)]
    return places, ticks


def _draw(dot: _Dot, x: float, y_axis: Axis, rungs: Sequence[int], share: bool) -> str:
    heights = (1000 * (1 - y_axis.fraction(np.array(dot.edges)))).tolist()
    style, at = f"c{colour_of(dot.rung, rungs)}", f"{1000 * x:.1f}"
    whisker = (
        f'<polygon class="whisker {style}" points="{at},{heights[1]:.1f} {at},{heights[2]:.1f}"/>'
        if len(heights) == 3
        else ""
    )
    words = escape(f"{dot.trial.name} after {dot.rung:,}: {dot.trial.measured[dot.rung].words(share)}")
    # A line of no length with round ends is a dot that stays round when the picture is stretched.
    return f'{whisker}<path class="dots {style}" d="M{at},{heights[0]:.1f}h0"><title>{words}</title></path>'


def _grid(y_axis: Axis, ticks: Sequence[tuple[float, str]], share: bool) -> str:
    parts = []
    for value, text in y_axis.ticks():
        at = f"{100 * (1 - float(y_axis.fraction(np.array([value]))[0])):.2f}%"
        text = f"{100 * value:.4g} %" if share else text
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="y" x="-8" y="{at}" dy="0.35em">{text}</text>')
    for place, text in ticks:
        parts.append(f'<text class="x" x="{100 * place:.2f}%" y="100%" dy="18">{escape(text)}</text>')
    parts.append('<line class="axis" x1="0" x2="100%" y1="100%" y2="100%"/>')
    return "".join(parts)


def _short(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[: max(1, letters - 1)]}…"
