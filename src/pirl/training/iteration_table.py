"""The table that a RIPT run prints: one row for every iteration."""

import math
from collections.abc import Callable, Mapping

from pirl.training.writers import Number


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


# Heading, width, the metric it shows, and how.
_COLUMNS: tuple[tuple[str, int, str, Callable[[float], str]], ...] = (
    ("iteration", 9, "iteration", lambda value: f"{value:.0f}"),
    ("tried", 5, "rollout/contexts", lambda value: f"{value:.0f}"),
    ("kept", 4, "rollout/groups", lambda value: f"{value:.0f}"),
    ("success", 7, "rollout/success", _share),
    ("before", 6, "rollout/success_kept", _share),
    ("after", 6, "rollout/success_after", _share),
    ("spread", 6, "rollout/advantage_spread", lambda value: f"{value:.2f}"),
    ("loss", 8, "loss", lambda value: f"{value:.4f}"),
    ("drift", 8, "rollout/drift", lambda value: f"{value:.2g}"),
    ("env steps", 9, "rollout/env_steps", lambda value: f"{value:,.0f}"),
    ("steps/s", 7, "env_steps_per_second", lambda value: f"{value:,.0f}"),
    ("policy", 8, "policy_ms", lambda value: f"{value:.1f} ms"),
)


def header() -> str:
    """The headings. `before` and `after` are the success at the states that were learned from."""
    return "  ".join(f"{heading:>{width}}" for heading, width, _, _ in _COLUMNS)


def row(iteration: int, values: Mapping[str, Number], loss: float | None) -> str:
    """One iteration; what was not measured is a dash."""
    known = {**values, "iteration": iteration, **({} if loss is None else {"loss": loss})}

    def cell(name: str, show: Callable[[float], str]) -> str:
        value = float(known.get(name, math.nan))
        return show(value) if math.isfinite(value) else "–"

    return "  ".join(f"{cell(name, show):>{width}}" for _, width, name, show in _COLUMNS)
