"""Whether a RIPT run goes well: its success, drift and speed, from iteration to iteration."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from pirl.config.parts import HealthConfig

# So many iterations in a row have to be slow: one may only have met a busy machine. As many come before any is judged.
_SLOW_ITERATIONS = 3
# A best success is believed when so many iterations have been seen.
_WARM_UP = 2


@dataclass(frozen=True)
class Problem:
    """What is wrong; going back to an earlier policy may help, or not."""

    reason: str
    can_go_back: bool = True


class IterationHealth:
    """Watches what iterations measure. What it compares with is the run itself."""

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self._best, self._seen = 0.0, 0
        # By the clock, so not for a checkpoint.
        self._speeds: list[float] = []
        self._slow = 0

    def after_rollouts(self, success: float | None, speed: float | None) -> Problem | None:
        """Judge the policy by its rollouts, before it learns from them; and how fast they were."""
        problem = self._judge_speed(speed)
        if success is None or not math.isfinite(success):
            return problem
        least = self._config.min_success_ratio * self._best
        if self._seen >= _WARM_UP and success < least:
            return Problem(
                f"success has collapsed: {100 * success:.1f} % of the attempts, after {100 * self._best:.1f} % in the "
                f"best iteration (health.min_success_ratio = {self._config.min_success_ratio:g})"
            )
        self._best, self._seen = max(self._best, success), self._seen + 1
        return problem

    def after_updates(self, drift: float | None) -> Problem | None:
        """Judge how far the policy has moved."""
        limit = self._config.max_drift
        if drift is None or (math.isfinite(drift) and (limit is None or drift <= limit)):
            return None
        of = "" if limit is None else f", beyond health.max_drift = {limit:g}"
        return Problem(f"the policy has drifted by {drift:.4g} from where it began{of}")

    def _judge_speed(self, speed: float | None) -> Problem | None:
        ratio = self._config.min_speed_ratio
        if speed is None or not ratio:
            return None
        is_slow = len(self._speeds) >= _SLOW_ITERATIONS and speed < ratio * median(self._speeds)
        self._slow = self._slow + 1 if is_slow else 0
        if not is_slow:
            self._speeds.append(speed)
        if self._slow < _SLOW_ITERATIONS:
            return None
        self._slow = 0
        return Problem(
            f"rollouts have become slow: {speed:.0f} environment steps per second, where {median(self._speeds):.0f} are "
            f"usual (health.min_speed_ratio = {ratio:g})",
            can_go_back=False,
        )

    def state(self) -> dict[str, Any]:
        """The best success, for a checkpoint."""
        return {"best": self._best, "seen": self._seen}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._best, self._seen = float(state["best"]), int(state["seen"])
