"""Which curves of a run belong together: every metric that was logged has its chart, under the question it answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pirl.report.curves import PANELS, ROLLOUTS, Panel
from pirl.report.knowledge import KNOWLEDGE, judge_critics
from pirl.report.runs import Run

SUCCESS = PANELS[0]
# Counts that only grow, the edges of bands, and what is told elsewhere.
_UNSEEN = frozenset(
    {
        *("skipped", "eval/episodes", "eval/success_low", "eval/success_high", "rollout/env_steps"),
        *("rollout/episodes", "online/env_steps", "online/episodes"),
    }
)
_TITLES = {
    "eval/length": "Length of evaluation episodes",
    "eval/return": "Return of evaluation episodes",
    "eval/lost": "Evaluation episodes lost",
    "online/length": "Length of collected episodes",
    "online/lost": "Episodes lost",
    "rollout/lost": "Attempts lost",
    "rollout/success_kept": "Success before the updates",
    "rollout/advantage_spread": "Spread of the advantages",
    "curriculum/tried": "Curriculum: states tried",
    "curriculum/solved": "Curriculum: states solved",
    "curriculum/hopeless": "Curriculum: hopeless states",
    "curriculum/success_rate": "Curriculum: mean success",
}
_SHARES = frozenset({"rollout/success_kept", "actor/clip_fraction", "actor/limited", "data/valid_chunks"})
_KNOWN = {panel.metric: panel for panel in (*PANELS, *ROLLOUTS, *KNOWLEDGE)}
_EDGES = {edge: panel.metric for panel in _KNOWN.values() for edge in (panel.low, panel.high) if edge}
_EDGES |= {panel.beside[0]: panel.metric for panel in _KNOWN.values() if panel.beside}


@dataclass(frozen=True)
class Group:
    """Curves that answer one question, and what the axis below them counts."""

    title: str
    introduction: str
    holds: Callable[[str], bool]
    axis: Literal["updates", "environment steps", "iterations"] = "updates"
    judge: Callable[[Run], str] | None = None
    """What there is to say of each run, in a sentence."""


def _begins(*prefixes: str) -> Callable[[str], bool]:
    return lambda metric: metric.startswith(prefixes)


# In this order, each metric in the first that holds it.
GROUPS = (
    Group("Evaluations", "Other measurements of the evaluation episodes.", _begins("eval/")),
    Group(
        "Practice",
        "Episodes collected online, over the environment steps trained on so far.",
        _begins("online/"),
        "environment steps",
    ),
    Group(
        "Rollouts",
        "What each iteration tried, what it trained on, and the result.",
        _begins("rollout/", "curriculum/"),
        "iterations",
    ),
    Group(
        "Losses",
        "What is minimised. Where a curve is noisy, the faint line is what was logged and the strong one its moving "
        "average.",
        lambda metric: metric.rsplit("/", 1)[-1].endswith("loss"),
    ),
    Group(
        "What the critics know",
        "Whether the critics tell good chunks from others, on held-out episodes.",
        _begins(*(panel.metric for panel in KNOWLEDGE)),
        judge=judge_critics,
    ),
    Group("Values", "Value estimates of the critics.", _begins("critic/")),
    Group(
        "Advantages and the actor", "Which actions the policy is trained towards, and how strongly.", _begins("actor/")
    ),
    Group(
        "Norms and learning rates",
        "Norms of gradients and parameters, and the learning rates.",
        _begins("grad_norm/", "param_norm/", "update_norm/", "lr/"),
    ),
    Group("Memory", "In GiB, of the host and of the devices.", _begins("memory/")),
    Group("Other metrics", "All other logged metrics.", lambda metric: True),
)


def panels_of(runs: Sequence[Run], group: Group) -> list[Panel]:
    """The panels of a group for which any run has data: those that are known first, as they are known."""
    logged = {metric.removeprefix("val/") for run in runs for metric in run.curves} - _UNSEEN
    logged = {_EDGES.get(metric, metric) for metric in logged}
    mine = {metric for metric in logged if next(one for one in GROUPS if one.holds(metric)) is group}
    known = [panel for metric, panel in _KNOWN.items() if metric in mine and panel is not SUCCESS]
    others = sorted(metric for metric in mine - _KNOWN.keys() if _is_worth_a_chart(runs, metric))
    return known + [_plain_panel(metric) for metric in others]


def _plain_panel(metric: str) -> Panel:
    title, share = _TITLES.get(metric, metric), metric.startswith("curriculum/") or metric in _SHARES
    # Gradients and learning rates are compared by their ratio.
    log = metric.startswith(("grad_norm/", "lr/"))
    return Panel(title, metric, "", log=log, noisy=not metric.startswith("lr/"), share=share)


def _is_worth_a_chart(runs: Sequence[Run], metric: str) -> bool:
    """Whether it was ever anything but 0."""
    curves = [run.curves[name] for run in runs for name in (metric, f"val/{metric}") if name in run.curves]
    return any(np.nan_to_num(curve.values).any() for curve in curves)
