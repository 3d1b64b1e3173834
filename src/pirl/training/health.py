"""When an update is skipped, a run goes back or ends early: bad updates, collapsing policies, early stopping, signals."""

import functools
import io
import itertools
import json
import logging
import math
import signal
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from types import FrameType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from pirl.config.schema import HealthConfig, StoppingConfig
from pirl.errors import TrainingError
from pirl.files import write_file
from pirl.processes import handle_stops
from pirl.run_files import RunFiles, saved_steps
from pirl.training.distributed import all_gather
from pirl.training.sharding import named_leaves

MAX_RECORDED = 10  # bad batches that are kept: the first ones, nearest to the cause
_PATIENCE = 50  # updates in a row with a mean of Q beyond the returns in the data
_SLOW_ITERATIONS = 3  # in a row that have to be slow, and that come before any is judged
_WARM_UP = 2  # iterations after which the best success is compared with
_STEPS_PER_POLL = 4  # of several hosts, for a stop that another one was asked for
logger = logging.getLogger(__name__)

AgentT = TypeVar("AgentT")
BatchT = TypeVar("BatchT")
Update = Callable[[AgentT, BatchT, jax.Array], tuple[AgentT, dict[str, Any]]]


class Interrupted(Exception):  # noqa: N818
    """A stop was requested during rollouts: they count for nothing, and are made again after --resume."""


class Diverged(TrainingError):  # noqa: N818
    """A run should go back to an earlier checkpoint, or end where it cannot. `explanation`: what to say then."""

    def __init__(self, reason: str, explanation: str | None = None) -> None:
        super().__init__(explanation or reason)
        self.reason, self.explanation = reason, explanation


# --- updates ----------------------------------------------------------------------------------------------------------


def guarded(update: Update[AgentT, BatchT], loss_limit: float = math.inf) -> Update[AgentT, BatchT]:
    """An update that leaves the learner exactly as it was where the loss or a gradient is not finite, or too large.

    The metrics stay those of the attempt, and `skipped` (1 or 0) joins them. It is pure: compile it, or scan over it.
    """

    @functools.wraps(update)
    def attempt(agent: AgentT, batch: BatchT, rng: jax.Array) -> tuple[AgentT, dict[str, Any]]:
        updated, metrics = update(agent, batch, rng)
        fine = jnp.abs(metrics["loss"]) <= loss_limit
        for is_finite in _finite(metrics).values():
            fine &= is_finite
        kept = jax.tree.map(lambda new, old: jnp.where(fine, new, old), updated, agent)
        return kept, {**metrics, "skipped": jnp.where(fine, 0.0, 1.0)}

    return attempt


def _finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the loss and the gradients are finite, by name. A policy that did not move has no gradient."""
    moves = jnp.asarray(metrics.get("actor/moves", 1.0)) > 0
    names = ("loss", *sorted(name for name in metrics if name.startswith("grad_norm/")))
    return {name: jnp.isfinite(metrics[name]) | ((name == "grad_norm/policy") & ~moves) for name in names}


class UpdateGuard:
    """Counts skipped updates, keeps their batches, and raises after `max_skipped` in a row.

    A skipped update changes nothing, so whatever was saved is good; but many in a row will not end by themselves.
    """

    def __init__(
        self,
        config: HealthConfig,
        run: RunFiles,
        wait_for_checkpoints: Callable[[], None] = lambda: None,
        returns: tuple[float, float] | None = None,
    ):
        """`returns` is the range of discounted returns in the data."""
        self._config, self._run, self._returns = config, run, returns
        self._wait_for_checkpoints = wait_for_checkpoints
        self._waiting: deque[tuple[int, Mapping[str, Any], Any]] = deque()
        self.skipped = self.in_a_row = self._beyond = 0

    def check(self, step: int, metrics: Mapping[str, Any], batch: Any) -> None:
        """Take the result of a guarded update and check the one before, so that the device always has work.

        Of several updates compiled into one, metrics and batch have them along their first axis, and `step` is the last.
        """
        self._waiting.append((step, metrics, batch))
        if len(self._waiting) > 1:
            self._check(*self._waiting.popleft())

    def finish(self) -> None:
        """Check the remaining updates."""
        while self._waiting:
            self._check(*self._waiting.popleft())

    def state(self) -> dict[str, int]:
        """The counts, after checking the remaining updates."""
        self.finish()
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "beyond": self._beyond}

    def load_state(self, state: Mapping[str, int]) -> None:
        self._waiting.clear()
        self.skipped, self.in_a_row, self._beyond = state["skipped"], state["in_a_row"], state["beyond"]

    def _check(self, step: int, metrics: Mapping[str, Any], batch: Any) -> None:
        self._check_values(step, metrics.get("critic/q_mean"))
        flags = np.asarray(metrics["skipped"])
        for index in np.ndindex(flags.shape):
            if not flags[index]:
                self.in_a_row = 0
                continue
            self.skipped += 1
            self.in_a_row += 1
            this = step - flags.size + 1 + sum(index)
            values = {name: float(np.asarray(value)[index]) for name, value in metrics.items()}
            reason = self._reason(values)
            self._record(this, reason, values, jax.tree.map(lambda leaf, at=index: leaf[at], batch))
            if self.in_a_row >= self._config.max_skipped:
                self._wait_for_checkpoints()
                saved = saved_steps(self._run.checkpoints, resumable=True)
                newest = f"The last good state is {self._run.checkpoints / str(saved[-1])}" if saved else ""
                good = newest or "No state was saved yet"
                raise Diverged(
                    f"{self.in_a_row} updates in a row were skipped",
                    f"training stopped at step {this}: {self.in_a_row} updates in a row were skipped (in the last, "
                    f"{reason}). {good}. The batches are in {self._run.bad_batches}, each with a JSON file that counts "
                    "its values that are not finite: if there are any, check the dataset (`pirl data check`). If not, "
                    "try a lower learning rate, a longer warm-up or a smaller clip_norm.",
                )

    def _check_values(self, step: int, q_mean: Any) -> None:
        """Stop where the mean of Q has been beyond all returns in the data for a while."""
        if q_mean is None or self._returns is None or not self._config.max_value_excess:
            return
        low, high = self._returns
        margin = self._config.max_value_excess * (high - low)
        for value in np.ravel(np.asarray(q_mean)):
            self._beyond = self._beyond + 1 if value < low - margin or value > high + margin else 0
            if self._beyond >= _PATIENCE and margin > 0:
                self._wait_for_checkpoints()
                raise TrainingError(
                    f"the mean of Q is {value:.4g} at step {step}, and returns in the data are {low:.4g} to "
                    f"{high:.4g}: the critics overestimate the returns. Use --agent.target expectile "
                    "or --agent.critic.loss bce, a lower --agent.critic-optimizer.peak-lr, or allow it with "
                    "--health.max-value-excess 0."
                )

    def _reason(self, metrics: Mapping[str, float]) -> str:
        odd = [f"{name} is {metrics[name]}" for name, is_finite in _finite(metrics).items() if not is_finite]
        limit = f"loss is {metrics['loss']:.4g}, beyond health.loss_limit = {self._config.loss_limit:g}"
        return ", ".join(odd) or limit

    def _record(self, step: int, reason: str, metrics: dict[str, float], batch: Any) -> None:
        """Write the batch and its statistics, unless there are enough already."""
        path = self._run.bad_batches / f"{step:08d}.npz"
        if not path.exists() and len(list(self._run.bad_batches.glob("*.npz"))) >= MAX_RECORDED:
            return
        leaves = {name: np.asarray(leaf) for name, leaf in named_leaves(batch).items()}
        # What numpy does not know by itself, such as bfloat16, cannot be read back from its files.
        leaves = {name: leaf if leaf.dtype.isbuiltin == 1 else leaf.astype(np.float32) for name, leaf in leaves.items()}
        arrays = io.BytesIO()
        np.savez_compressed(arrays, **leaves)  # type: ignore[arg-type]
        about = {
            "step": step,
            "reason": reason,
            "metrics": {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()},
            "leaves": {name: _describe(leaf) for name, leaf in leaves.items()},
        }
        try:
            write_file(path, arrays.getvalue())
            write_file(path.with_suffix(".json"), json.dumps(about, indent=1) + "\n")
        except OSError as error:
            logger.warning("update %d was skipped, and its batch cannot be written: %s", step, error)
        else:
            logger.warning("update %d was skipped: %s. Its batch is %s.", step, reason, path)


def _describe(array: np.ndarray) -> dict[str, Any]:
    finite = array[np.isfinite(array)]
    unbounded = int(np.sum(array == -np.inf))  # returns of episodes that did not end
    return {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "not_finite": int(array.size - finite.size) - unbounded,
        "range": [float(finite.min()), float(finite.max())] if finite.size else None,
    }


# --- iterations and measurements --------------------------------------------------------------------------------------


class RolloutMonitor:
    """Compares the success, drift and speed of RIPT's iterations with earlier ones of the same run."""

    def __init__(self, config: HealthConfig, say: Callable[[str], None] = lambda text: None) -> None:
        self._config, self._say = config, say
        self._best, self._seen = 0.0, 0
        # Measured by the clock, so not part of a checkpoint.
        self._speeds: list[float] = []
        self._slow = 0
        self.good_step = 0
        """The last step whose policy rolled out well."""

    def after_rollouts(self, step: int, success: float | None, speed: float | None) -> None:
        """Judge the policy by its rollouts, before it learns from them, and their speed."""
        slow = self._judge_speed(speed)
        if success is not None and math.isfinite(success):
            if self._seen >= _WARM_UP and success < self._config.min_success_ratio * self._best:
                self._respond(
                    f"success has collapsed: {100 * success:.1f} % of the attempts, after {100 * self._best:.1f} % in "
                    f"the best iteration (health.min_success_ratio = {self._config.min_success_ratio:g})"
                )
                return
            self._best, self._seen = max(self._best, success), self._seen + 1
        if slow is not None:
            self._respond(slow, can_go_back=False)
        if success is not None:
            self.good_step = step

    def after_updates(self, drift: float | None) -> None:
        """Judge how far the policy has moved."""
        limit = self._config.max_drift
        if drift is None or (math.isfinite(drift) and (limit is None or drift <= limit)):
            return
        beyond = "" if limit is None else f", beyond health.max_drift = {limit:g}"
        self._respond(f"the policy has drifted by {drift:.4g} from where it began{beyond}")

    def _respond(self, reason: str, *, can_go_back: bool = True) -> None:
        """Warn, or raise `Diverged`, as configured."""
        action = self._config.action
        if action == "warn" or (action == "rollback" and not can_go_back):
            self._say(f"warning: {reason}.")
        else:
            raise Diverged(reason)

    def _judge_speed(self, speed: float | None) -> str | None:
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
        return (
            f"rollouts have become slow: {speed:.0f} environment steps per second, where {median(self._speeds):.0f} are "
            f"usual (health.min_speed_ratio = {ratio:g})"
        )

    def state(self) -> dict[str, Any]:
        return {"best": self._best, "seen": self._seen, "good_step": self.good_step}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._best, self._seen, self.good_step = state["best"], state["seen"], state["good_step"]


class EarlyStopping:
    """Done when a metric has not improved by more than `min_delta` for `patience` measurements."""

    def __init__(self, config: StoppingConfig):
        self._config = config
        self._best: float | None = None
        self._waited = 0

    def update(self, metrics: Mapping[str, float | int]) -> None:
        """Take a measurement, if it is among the metrics. NaN is no improvement."""
        name = self._config.metric
        if name is None or name not in metrics:
            return
        value = float(metrics[name])
        sign = 1 if self._config.mode == "max" else -1
        gain = math.inf if self._best is None else sign * (value - self._best)
        if gain > self._config.min_delta and not math.isnan(value):
            self._best, self._waited = value, 0
        else:
            self._waited += 1

    @property
    def done(self) -> bool:
        return self._config.metric is not None and self._waited >= self._config.patience

    def state(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited, "metric": self._config.metric, "mode": self._config.mode}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, unless another metric was watched then."""
        if (state["metric"], state["mode"]) == (self._config.metric, self._config.mode):
            self._best, self._waited = state["best"], state["waited"]


# --- signals ----------------------------------------------------------------------------------------------------------


class StopSignal:
    """While it is open, SIGTERM, a hang-up and Ctrl-C ask the run to end after this step; Ctrl-C again ends it at once.

    A hang-up that is ignored (nohup) stays so. `notify` shows a note; it is called from within the signal handler.
    """

    def __init__(self, notify: Callable[[str], None] = lambda text: None):
        self._notify = notify
        self._polls = itertools.count()
        self._before: dict[int, Any] = {}
        self.received: int | None = None

    @property
    def requested(self) -> bool:
        """Whether this process was asked to save and end."""
        return self.received is not None

    @property
    def interrupts_rollouts(self) -> bool:
        """Whether rollouts are to be interrupted: where others wait for them, they come to their end."""
        return self.requested and jax.process_count() == 1

    def agreed(self) -> bool:
        """Whether to save and end now; the same in all processes, which call it at the same steps."""
        if jax.process_count() == 1:
            return self.requested
        if next(self._polls) % _STEPS_PER_POLL:
            return False
        received = [number for number in all_gather(self.received) if number is not None]
        self.received = received[0] if received else self.received
        return bool(received)

    @property
    def exit_code(self) -> int:
        """What the command should exit with: being ended by a scheduler is no failure."""
        return 130 if self.received == signal.SIGINT else 0

    def __enter__(self) -> "StopSignal":
        self._before = handle_stops(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or number
        self._notify("stopping after this step; Ctrl-C again ends at once")
