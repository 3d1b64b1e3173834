"""How training went: the curves of one or several runs over each other, one small chart for each question."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from pirl.report.page import Section, figure, legend, plot
from pirl.report.runs import Curve, Run
from pirl.report.svg import POINTS, Mark, Series, line_chart

# Points of one chart, over all of its runs: this bounds the size of a page of many.
_ALL_POINTS = 8 * POINTS
_FEWEST_POINTS = 40
# A curve of more points than this is averaged in so many stretches before it is smoothed: nobody can see the difference.
_LONG, _STRETCHES = 20_000, 4_000
# A noisy curve of more points than this is drawn faintly, under its moving average over this share of its points.
_SMOOTHED, _WINDOW = 80, 1 / 40


@dataclass(frozen=True)
class Panel:
    """A chart of one metric, with a band between two others if they are named; `caption` says how to read it."""

    title: str
    metric: str
    caption: str
    low: str | None = None
    high: str | None = None
    log: bool = False
    noisy: bool = False
    share: bool = False
    """Whether the values are shares of 1, drawn as percentages between 0 and 100."""
    beside: tuple[str, str] | None = None
    """Another metric of held-out episodes, drawn as a solid line, and what it is called."""


PANELS = (
    Panel(
        "Success during training",
        "eval/success",
        "Fraction of evaluation episodes that succeed; the band is the 95 % interval.",
        low="eval/success_low",
        high="eval/success_high",
        share=True,
    ),
    Panel(
        "Success while collecting",
        "online/success",
        "Fraction of the episodes collected online that succeed.",
        noisy=True,
        share=True,
    ),
    Panel("Loss", "loss", "The total loss; lower is better within one algorithm.", log=True, noisy=True),
    Panel(
        "Imitation loss",
        "bc/loss",
        "Flow-matching loss on the actions in the data; lower is closer to the demonstrations.",
        log=True,
        noisy=True,
    ),
    Panel(
        "Gap: imitation loss",
        "gap/bc/loss",
        "Training minus held-out episodes; well below 0, the policy fits the training episodes much better.",
    ),
    Panel("Actor loss", "actor/loss", "The actor loss, weighted by advantage.", noisy=True),
    Panel("Critic loss", "critic/loss", "Error of the critics against their targets.", log=True, noisy=True),
    Panel(
        "Q-values",
        "critic/q_mean",
        "Mean over the batch; the band reaches from the smallest to the largest. Values that outgrow the return "
        "that is possible are overestimated.",
        low="critic/q_min",
        high="critic/q_max",
    ),
    Panel(
        "Disagreement of the critics",
        "critic/q_spread",
        "Spread of the ensemble on the same action; it falls as the critics come to agree.",
        noisy=True,
    ),
    Panel(
        "Advantage",
        "actor/advantage_p50",
        "Median over the batch; the band reaches from the 10th to the 90th percentile. A wider band tells good "
        "actions from bad ones more clearly.",
        low="actor/advantage_p10",
        high="actor/advantage_p90",
    ),
    Panel(
        "Effective sample size",
        "actor/ess",
        "The fraction of a batch that the actor effectively learns from; near the bottom, a few samples dominate.",
        noisy=True,
    ),
    Panel(
        "Gradient norm of the policy",
        "grad_norm/policy",
        "Before clipping; spikes are batches that would have changed the policy a lot.",
        log=True,
        noisy=True,
    ),
)


ROLLOUTS = (
    Panel(
        "Success of rollouts",
        "rollout/success",
        "Fraction of all rollouts of an iteration that succeed, from initial states chosen by the curriculum.",
        share=True,
    ),
    Panel(
        "Groups with mixed outcomes",
        "rollout/groups",
        "Initial states from which some rollouts succeeded and others failed: only these are trained on.",
    ),
    Panel(
        "Initial states tried",
        "rollout/contexts",
        "How many it took to find these groups; the more states are solved or hopeless, the more it takes.",
    ),
    Panel(
        "Success after the updates",
        "rollout/success_after",
        "One more rollout from each state that was trained on, after the updates.",
        share=True,
    ),
    Panel(
        "Drift from the start policy",
        "rollout/drift",
        "Mean squared difference of the two flows on the same chunks: how far RIPT has changed the policy.",
    ),
)
_EVENTS = {"rollback": "rolled back to here", "skipped": "update skipped"}


def curves_section(
    runs: Sequence[Run],
    *,
    panels: Sequence[Panel] = PANELS,
    colours: Mapping[str, int] | None = None,
    title: str = "Training",
    unit: str = "updates",
) -> Section:
    """The panels for which any run has data, under one legend; colours by name of the run, else in order.

    `unit` is what the steps of these curves count.
    """
    charts = draw_panels(runs, panels, colours, unit)
    if not charts:
        return Section(title, "", "Nothing was logged.")
    introduction = (
        "A run is in a chart if it logs that metric. Where a curve is noisy, the faint line is what was logged and the "
        "strong one its moving average."
    )
    return Section(title, arrange_panels(charts, runs, panels, colours), introduction)


def draw_panels(
    runs: Sequence[Run], panels: Sequence[Panel], colours: Mapping[str, int] | None = None, unit: str = "updates"
) -> list[str]:
    """A chart for each panel for which any run has data, all with the same axis below."""
    end = max((curve.steps[-1] for run in runs for curve in run.curves.values()), default=1.0)
    coloured = _coloured(runs, colours)
    return [chart for panel in panels if (chart := _panel(panel, coloured, float(end), unit))]


def arrange_panels(
    charts: Sequence[str],
    runs: Sequence[Run],
    panels: Sequence[Panel] = (),
    colours: Mapping[str, int] | None = None,
) -> str:
    """Charts side by side under the legend of their runs."""
    held_out = any(f"val/{panel.metric}" in run.curves for panel in panels for run in runs)
    kinds = {event.kind for run in runs for event in run.events}
    names = legend(
        [(run.name, colour) for run, colour in _coloured(runs, colours)],
        "dotted: held-out episodes" if held_out else "",
        [(kind, word) for kind, word in _EVENTS.items() if kind in kinds],
    )
    return f'{names}<div class="panels">{"".join(charts)}</div>'


def logs(run: Run, panel: Panel) -> bool:
    """Whether a run has anything to show in a panel."""
    return panel.metric in run.curves or f"val/{panel.metric}" in run.curves


def _coloured(runs: Sequence[Run], colours: Mapping[str, int] | None) -> list[tuple[Run, int]]:
    return [(run, (colours or {}).get(run.name, index)) for index, run in enumerate(runs)]


def _panel(panel: Panel, runs: Sequence[tuple[Run, int]], end: float, unit: str) -> str:
    series = [one for run, colour in runs for one in _series(panel, run, colour)]
    if not series:
        return ""
    shown = {one.name for one in series}
    chart = line_chart(
        series,
        label=panel.title,
        log_y=panel.log,
        percent=panel.share,
        x_range=(0.0, max(1.0, end)),
        y_range=(0.0, 1.0) if panel.share and all(map(_is_share, series)) else None,
        marks=[mark for run, colour in runs if run.name in shown for mark in _marks(run, colour, end)],
        unit=unit,
        points=min(POINTS, max(_FEWEST_POINTS, _ALL_POINTS // len(runs))),
    )
    return figure(plot(chart), panel.caption, panel.title + (" (log scale)" if panel.log else ""))


def _series(panel: Panel, run: Run, colour: int) -> list[Series]:
    found = []
    if curve := run.curves.get(panel.metric):
        if panel.noisy and len(curve.values) > _SMOOTHED:
            found.append(Series(run.name, curve.steps, curve.values, colour=colour, faint=True))
            averaged = average_stretches(curve, panel.log)
            found.append(Series(run.name, averaged.steps, smooth(averaged.values, panel.log), colour=colour))
        else:
            low, high = (_aligned(run.curves.get(edge or ""), curve.steps) for edge in (panel.low, panel.high))
            found.append(Series(run.name, curve.steps, curve.values, low, high, colour))
    if curve := run.curves.get(f"val/{panel.metric}"):
        found.append(Series(f"{run.name}, held out", curve.steps, curve.values, colour=colour, dotted=True))
    metric, name = panel.beside or ("", "")
    if curve := run.curves.get(f"val/{metric}"):
        found.append(Series(f"{run.name}, {name}", curve.steps, curve.values, colour=colour))
    return found


def _is_share(series: Series) -> bool:
    return bool(((series.y >= 0) & (series.y <= 1) | np.isnan(series.y)).all())


def _marks(run: Run, colour: int, end: float) -> list[Mark]:
    """What happened, each kind at most once where the eye could not tell them apart."""
    found = {(event.kind, round(POINTS * event.step / max(1.0, end))): event for event in run.events}
    return [Mark(min(event.step, end), f"{run.name}: {event.text}", event.kind, colour) for event in found.values()]


def average_stretches(curve: Curve, log: bool = False) -> Curve:
    """A very long curve as the averages of its stretches, with `log` the geometric ones; any other as it is."""
    if len(curve.values) <= _LONG:
        return curve
    values = np.log(np.where(curve.values > 0, curve.values, np.nan)) if log else curve.values
    here = np.isfinite(values)
    begins = np.linspace(0, len(values), _STRETCHES, endpoint=False).astype(int)
    lengths = np.diff(np.append(begins, len(values)))
    total, count = (np.add.reduceat(array, begins) for array in (np.where(here, values, 0.0), here.astype(float)))
    means = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return Curve(np.add.reduceat(curve.steps, begins) / lengths, np.exp(means) if log else means)


def smooth(values: Float[np.ndarray, " n"], log: bool = False) -> Float[np.ndarray, " n"]:
    """The centred moving average, over fewer points at the ends; what is missing stays missing.

    With `log` the geometric one, which is what the eye takes for the middle on a log scale.
    """
    if log:
        return np.exp(smooth(np.log(np.where(values > 0, values, np.nan))))
    half = max(1, round(len(values) * _WINDOW / 2))
    here = np.isfinite(values)
    window = np.ones(2 * half + 1)
    # The whole convolution, cut to the middle: numpy's own cut is as long as the window if that is the longer one.
    total, count = (
        np.convolve(array, window)[half : half + len(values)] for array in (np.where(here, values, 0.0), here)
    )
    return np.where(here, total / np.maximum(count, 1), np.nan)


def _aligned(curve: Curve | None, steps: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"] | None:
    """The values of one metric at the steps of another, NaN where it has none."""
    if curve is None or np.array_equal(curve.steps, steps):
        return None if curve is None else curve.values
    known = dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))
    return np.array([known.get(step, np.nan) for step in steps.tolist()], np.float64)
