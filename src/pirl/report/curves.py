"""How training went: the curves of one or several runs over each other, one small chart for each question."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from pirl.report.page import Section, figure, legend, plot
from pirl.report.runs import Curve, Run
from pirl.report.svg import COLOURS, Series, line_chart

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


PANELS = (
    Panel(
        "Success during training",
        "eval/success",
        "Share of evaluation episodes that succeed; the band is the 95 % interval.",
        low="eval/success_low",
        high="eval/success_high",
        share=True,
    ),
    Panel(
        "Success while collecting",
        "online/success",
        "Share of the episodes collected online that succeed.",
        noisy=True,
        share=True,
    ),
    Panel("Loss", "loss", "The sum that is minimised; lower is better within one algorithm.", log=True, noisy=True),
    Panel(
        "Imitation loss",
        "bc/loss",
        "Flow-matching error on the actions of the data; lower is closer to the demonstrations.",
        log=True,
        noisy=True,
    ),
    Panel("Actor loss", "actor/loss", "The actor's loss, weighted by advantage.", noisy=True),
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
        "Spread of the ensemble on the same action; it falls as the critics learn the same thing.",
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
        "How much of a batch the actor learns from: near the bottom, a few samples decide everything.",
        noisy=True,
    ),
    Panel(
        "Gradient norm of the policy",
        "grad_norm/policy",
        "Before clipping; spikes are batches that would have moved the policy far.",
        log=True,
        noisy=True,
    ),
)


def curves_section(
    runs: Sequence[Run],
    *,
    panels: Sequence[Panel] = PANELS,
    colours: Mapping[str, int] | None = None,
    title: str = "Training",
) -> Section:
    """The panels for which any run has data, under one legend; colours by name of the run, else in order."""
    coloured = [(run, (colours or {}).get(run.name, index) % COLOURS) for index, run in enumerate(runs)]
    end = max((curve.steps[-1] for run in runs for curve in run.curves.values()), default=1.0)
    charts = [chart for panel in panels if (chart := _panel(panel, coloured, end))]
    if not charts:
        return Section(title, "", "Nothing was logged.")
    held_out = any(f"val/{panel.metric}" in run.curves for panel in panels for run in runs)
    names = legend([(run.name, colour) for run, colour in coloured], "dotted: held-out episodes" if held_out else "")
    introduction = (
        "A run is in a chart if it logs that metric. Where a curve is noisy, the faint line is what was logged and the "
        "strong one its moving average."
    )
    return Section(title, f'{names}<div class="panels">{"".join(charts)}</div>', introduction)


def _panel(panel: Panel, runs: Sequence[tuple[Run, int]], end: float) -> str:
    series = [one for run, colour in runs for one in _series(panel, run, colour)]
    if not series:
        return ""
    chart = line_chart(
        series,
        label=panel.title,
        log_y=panel.log,
        percent=panel.share,
        x_range=(0.0, max(1.0, float(end))),
        y_range=(0.0, 1.0) if panel.share else None,
    )
    return figure(plot(chart), panel.caption, panel.title + (" (log scale)" if panel.log else ""))


def _series(panel: Panel, run: Run, colour: int) -> list[Series]:
    found = []
    if curve := run.curves.get(panel.metric):
        if panel.noisy and len(curve.values) > _SMOOTHED:
            found.append(Series(run.name, curve.steps, curve.values, colour=colour, faint=True))
            found.append(Series(run.name, curve.steps, smooth(curve.values, panel.log), colour=colour))
        else:
            low, high = (_aligned(run.curves.get(edge or ""), curve.steps) for edge in (panel.low, panel.high))
            found.append(Series(run.name, curve.steps, curve.values, low, high, colour))
    if curve := run.curves.get(f"val/{panel.metric}"):
        found.append(Series(f"{run.name}, held out", curve.steps, curve.values, colour=colour, dotted=True))
    return found


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
    if curve is None:
        return None
    known = dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))
    return np.array([known.get(step, np.nan) for step in steps.tolist()], np.float64)
