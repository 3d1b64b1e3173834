"""RIPT's stream: iterations of attempts in groups, the batches that follow from how they differ, and what came of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import jax
import numpy as np

from pirl.agents.common import Agent, Metrics
from pirl.agents.config import RIPTConfig
from pirl.agents.ript import RolloutBatch
from pirl.data import ReplayBuffer
from pirl.envs.base import Start
from pirl.envs.groups import Curriculum, Group, GroupedRollouts, roll_out_groups
from pirl.envs.pool import EnvPool
from pirl.envs.rollout import Rollout, collect
from pirl.errors import TrainingError
from pirl.training.acting import StoppablePolicy, rollout_policy
from pirl.training.display import table_header, table_row
from pirl.training.distributed import main_process_first
from pirl.training.health import Interrupted, RolloutMonitor, UpdateGuard
from pirl.training.logging import RunLog
from pirl.training.metrics import Number
from pirl.training.rollout_batches import BatchTable, Rows, arrange_batches, group_advantages, make_batch
from pirl.training.rollout_records import DriftProbe, Films, RolloutDataset
from pirl.training.run import RunDirectory
from pirl.training.setup import Setup
from pirl.training.streams import Batch, CollectResult, Stream, TrainState, on_main_process

# Rows of the table after which its header is repeated.
_ROWS_PER_HEADER = 20
# After a rollback other initial states are drawn: iterations then count from another multiple of this.
_BRANCH_OFFSET = 1_000_000


@dataclass
class _Attempts:
    """What an iteration learns from: the advantage of every attempt in the replay buffer, and where they began."""

    advantages: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    contexts: list[tuple[str, int]] = field(default_factory=list)
    metrics: dict[str, Number] = field(default_factory=dict)


class RolloutStream(Stream):
    """RIPT's batches. The replay buffer holds what an iteration learns from until the next one begins."""

    def __init__(
        self,
        setup: Setup,
        run: RunDirectory,
        log: RunLog,
        guard: UpdateGuard,
        monitor: RolloutMonitor,
        pool: EnvPool | None,
        replay: ReplayBuffer,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Only the main process has environments."""
        assert isinstance(setup.config.agent, RIPTConfig)
        self._setup, self._agent_config, self._config = setup, setup.config.agent, setup.config.rollout
        self._run, self._log, self._guard, self._monitor = run, log, guard, monitor
        self._replay, self._is_stopped = replay, is_stopped
        self._demonstrations = setup.source(setup.config.seed) if self._agent_config.bc_loss_weight > 0 else None
        self._pool: Any = pool
        self._curriculum: Any = None
        self._dataset = self._films = None
        if pool is not None:
            self._curriculum = Curriculum(self._config.curriculum, pool.description, self._config.seed)
            self._dataset = RolloutDataset(run.rollouts, pool.description) if self._config.save_dataset else None
            self._films = Films(run.videos, pool.description) if self._config.videos_every else None
        self._probe = DriftProbe(run.drift_probe, setup.here)
        self._counts = {"rounds": 0, "barren": 0, "env_steps": 0, "episodes": 0, "lost": 0, "updates": 0, "made": 0}
        self._attempts = _Attempts()
        self._table: BatchTable | None = None
        # Only for the table; a resumed run shows it without.
        self._timing: dict[str, float] = {}
        self._losses: list[jax.Array] = []
        self._rows_shown = 0

    # --- what the loop asks ---------------------------------------------------------------------------------------

    @property
    def is_within_iteration(self) -> bool:
        return self._counts["made"] < (0 if self._table is None else len(self._table))

    @property
    def done(self) -> bool:
        """Whether all iterations have ended, or too many in a row had nothing to learn from."""
        is_barren = self._counts["barren"] >= self._config.max_barren
        return is_barren or self._counts["rounds"] >= self._config.iterations

    @property
    def progress(self) -> int:
        """Iterations that have ended."""
        return self._counts["rounds"]

    def next(self, state: TrainState) -> Batch | None:
        """The next batch, after rollouts if the last iteration has ended."""
        if not self.is_within_iteration:
            with self._log.activity("rollout", "collecting", compiles="acting"):
                result = on_main_process(self, state.agent, self.collect)
            self._losses = []
            self._log.record(state.step, self.progress, result)
            success, speed = result.metrics.get("rollout/success"), result.timing.get("env_steps_per_second")
            self._monitor.after_rollouts(state.step, success, speed)
            if not self.is_within_iteration:
                return None
        with self._log.activity("data"):
            return Batch(self._setup.place([self.draw()]))

    def draw(self) -> RolloutBatch:
        """This process's share of the next batch."""
        self._counts["made"] += 1
        self._counts["updates"] += 1
        return self._batch(self._counts["made"] - 1, self._counts["updates"] - 1, self._setup.share)

    def after_update(self, state: TrainState, info: Metrics) -> None:
        """When an iteration ends: how far the policy has moved, and how it does now where it has learned."""
        self._losses.append(info["loss"])
        if self.is_within_iteration:
            return
        with self._log.activity("update"):
            self._guard.finish()  # so that no update of this iteration comes to light in the next one
        with self._log.activity("rollout", "re-evaluating"):
            loss = float(np.mean(jax.device_get(self._losses)))
            result = on_main_process(self, state.agent, lambda agent: self._conclude(agent, loss))
        self._log.record(state.step, self.progress, result)
        self._monitor.after_updates(result.metrics.get("rollout/drift"))

    def collect(self, agent: Agent) -> CollectResult:
        """Try initial states until there are enough groups of mixed outcomes, or the budget is spent."""
        config, number = self._config, self._counts["rounds"] + 1
        recorded = None if self._dataset is None else self._dataset.episodes
        films = self._films if self._films is not None and number % config.videos_every == 0 else None
        policy = rollout_policy(agent, self._setup.policy_io, self._pool)

        def take(rollout: Rollout) -> None:
            if self._dataset is not None:
                self._dataset.add(rollout)
            if films is not None:
                films.add(rollout)

        try:
            found = roll_out_groups(
                self._pool,
                StoppablePolicy(policy, self._is_stopped),
                self._curriculum.contexts(number + self._branch * _BRANCH_OFFSET),
                attempts=config.attempts,
                groups=config.groups,
                budget=config.budget,
                execute_steps=self._setup.config.evaluation.execute_steps,
                on_rollout=take,
            )
        except Interrupted:
            if self._dataset is not None:
                self._dataset.go_on_after(recorded)  # those that were finished are there already when they come again
            raise
        if films is not None:
            films.write(f"iteration-{number:04d}")
        lines = [*self._hold(found), *_lost_attempts(found)]
        self._counts["barren"] = 0 if self._attempts.sizes else self._counts["barren"] + 1
        lines += self._explain_barren(found)
        self._timing = {
            "env_steps_per_second": found.env_steps / max(found.seconds, 1e-9),
            "policy_ms": 1000 * found.policy_seconds / max(found.inferences, 1),
        }
        if not self._attempts.sizes:
            self._counts["rounds"] += 1
        else:
            self._probe.take(agent, self._first_batch())
        return CollectResult(self._attempts.metrics, self._timing, lines)

    def _conclude(self, agent: Agent, loss: float) -> CollectResult:
        self._counts["rounds"] += 1
        metrics: dict[str, Number] = {"rollout/drift": self._probe.measure(agent, self._first_batch())}
        if self._config.recheck:
            metrics["rollout/success_after"] = self._recheck(agent)
            metrics |= {f"rollout/{name}": self._counts[name] for name in ("env_steps", "lost")}
        lines = [table_row(self._counts["rounds"], {**self._attempts.metrics, **metrics, **self._timing}, loss)]
        if self._rows_shown % _ROWS_PER_HEADER == 0:
            lines.insert(0, table_header())
        self._rows_shown += 1
        self._clear()
        return CollectResult(metrics, lines=lines)

    def close(self) -> None:
        """Complete the dataset of rollouts."""
        if self._dataset is not None:
            self._dataset.close()

    def state(self) -> dict[str, Any]:
        """The counts, the attempts, and which episodes the replay buffer holds."""
        return self._state(self._replay.state())

    def shared_state(self) -> dict[str, Any]:
        """The same for the other processes, which is not kept for later."""
        return self._state(self._replay.held())

    def _state(self, replay: dict[str, int]) -> dict[str, Any]:
        return {
            "counts": dict(self._counts),
            "replay": replay,
            "curriculum": None if self._curriculum is None else self._curriculum.state(),
            "branch": self._branch,
            "dataset": None if self._dataset is None else self._dataset.episodes,
            "attempts": dict(vars(self._attempts)),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        main_process_first(lambda: self.take_over(state))

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, in this process alone."""
        self._counts = {name: int(value) for name, value in state["counts"].items()}
        self._replay.restore(state["replay"])
        if self._curriculum is not None:
            self._curriculum.restore(state["curriculum"])
        if self._dataset is not None:
            # After a rollback, or where none was written so far, other attempts follow.
            is_repeated = state["branch"] == self._branch
            self._dataset.go_on_after(state["dataset"] if is_repeated else None)
        attempts = state["attempts"]
        self._attempts = _Attempts(**{**attempts, "contexts": [tuple(each) for each in attempts["contexts"]]})
        self._table = self._arrange()

    @property
    def _branch(self) -> int:
        """How often the run has gone back: each time it goes on with other rollouts."""
        return len(self._run.rollbacks)

    # --- batches --------------------------------------------------------------------------------------------------

    def _hold(self, found: GroupedRollouts) -> list[str]:
        """Keep what there is to learn from; returns lines for the display."""
        config, lines = self._config, []
        for group in (*found.kept, *found.dropped):
            if group.success_rate is not None:
                self._curriculum.record(group.context, group.success_rate)
        kept = _fitting(found.kept, config.capacity)
        if len(kept) < len(found.kept):
            lines.append(
                f"{len(found.kept) - len(kept)} of {len(found.kept)} groups are left out: their frames exceed "
                f"rollout.capacity = {config.capacity}."
            )
        if found.is_short:
            lines.append(
                f"{found.tried} initial states were tried and {len(found.kept)} of {config.groups} groups found whose "
                "attempts differ: the budget is spent, and the iteration continues with these (rollout.budget)."
            )
        self._clear()
        robot = self._setup.policy_io.robot
        for group in kept:
            for rollout in group.attempts:
                self._replay.add(rollout.episode(robot))
        rewards = [[_reward(rollout, config.discount) for rollout in group.attempts] for group in kept]
        advantages = group_advantages(self._agent_config, rewards) if kept else np.empty(0, np.float32)
        self._counts["env_steps"] += found.env_steps
        self._counts["episodes"] += found.attempts
        self._counts["lost"] += len(found.lost)
        self._counts["made"] = 0
        metrics: dict[str, Number] = {
            f"rollout/{name}": self._counts[name] for name in ("env_steps", "episodes", "lost")
        }
        metrics |= {"rollout/contexts": found.tried, "rollout/groups": len(kept)}
        metrics |= {f"curriculum/{name}": value for name, value in self._curriculum.summary().items()}
        if found.attempts:
            metrics["rollout/success"] = found.successes / found.attempts
        if kept:
            metrics["rollout/success_kept"] = fmean(rollout.success for group in kept for rollout in group.attempts)
            metrics["rollout/advantage_spread"] = float(np.std(advantages))
        self._attempts = _Attempts(
            advantages=[float(value) for value in advantages],
            sizes=[len(group.attempts) for group in kept],
            contexts=[(group.context.task, group.context.seed) for group in kept],
            metrics=metrics,
        )
        self._table = self._arrange()
        return lines

    def _clear(self) -> None:
        """A checkpoint between iterations needs nothing of what was learned from."""
        self._replay.clear()
        self._attempts, self._table = _Attempts(), None

    def _explain_barren(self, found: GroupedRollouts) -> list[str]:
        """Why the run ends, if there was nothing to learn from for too long; an error if there never was."""
        if self._counts["barren"] < self._config.max_barren:
            return []
        rate = found.successes / max(1, found.attempts)
        reason = (
            f"for {self._counts['barren']} iterations there was nothing to learn from: all attempts at each initial "
            f"state ended alike (success {100 * rate:.1f} % of the last {found.attempts})."
        )
        if rate > 0.5:
            return [f"{reason} These initial states have nothing more to teach."]
        advice = "Begin with a policy that succeeds now and then, or give it easier tasks or more attempts."
        if not self._counts["updates"]:
            raise TrainingError(f"{reason} {advice}")
        return [f"{reason} {advice}"]

    def _arrange(self) -> BatchTable | None:
        if not self._attempts.sizes:
            return None
        data = self._replay.trajectories
        seed = (self._setup.config.seed, self._counts["rounds"], self._branch)
        return arrange_batches(
            self._agent_config,
            data.ends - data.starts,
            self._advantages(),
            self._attempts.sizes,
            batch_size=self._setup.config.batch_size,
            attempts=self._config.attempts,
            execute_steps=self._setup.config.evaluation.execute_steps,
            seed=seed,
        )

    def _advantages(self) -> np.ndarray:
        return np.array(self._attempts.advantages, np.float32)

    def _first_batch(self) -> RolloutBatch:
        """The whole first batch: what is measured on it, one process measures."""
        return self._batch(0, 0, slice(0, self._setup.config.batch_size))

    def _batch(self, number: int, position: int, share: slice) -> RolloutBatch:
        """These rows of a batch."""
        assert self._table is not None
        setup, demonstrations = self._setup, None
        if self._demonstrations is not None:
            first = position * setup.config.batch_size + share.start
            chosen = self._demonstrations.indices.take(first, share.stop - share.start)
            demonstrations = Rows(self._demonstrations.trajectories, chosen)
        return make_batch(
            self._agent_config,
            Rows(self._replay.trajectories, self._table.rows[number, share]),
            self._advantages(),
            self._table.included[number, share],
            setup.shape,
            setup.policy_io,
            demonstrations,
        )

    def _recheck(self, agent: Agent) -> float:
        """The success of one more attempt at each of the states that were learned from."""
        # Beyond the attempts that were made, for other noise.
        starts = [Start(task, seed, attempt=self._config.attempts) for task, seed in self._attempts.contexts]
        policy = rollout_policy(agent, self._setup.policy_io, self._pool)
        steps = self._setup.config.evaluation.execute_steps
        # However many are lost, nothing depends on them.
        rollouts = collect(self._pool, policy, starts, execute_steps=steps, keep_images=False, patience=len(starts) + 1)
        finished = [rollout for rollout in rollouts if rollout.lost is None]
        self._counts["env_steps"] += sum(map(len, rollouts))
        self._counts["lost"] += len(rollouts) - len(finished)
        return fmean([rollout.success for rollout in finished] or [float("nan")])


def _reward(rollout: Rollout, discount: float) -> float:
    # However late a success came, it is none that float32 cannot tell from a failure.
    return max(discount ** len(rollout), 1e-30) if rollout.success else 0.0


def _fitting(groups: tuple[Group, ...], capacity: int) -> list[Group]:
    """As many of the groups, from the first on, as there is room for."""
    frames = np.cumsum([sum(map(len, group.attempts)) for group in groups])
    return list(groups[: int(np.searchsorted(frames, capacity, side="right"))])


def _lost_attempts(found: GroupedRollouts) -> list[str]:
    if not found.lost:
        return []
    return [f"{len(found.lost)} attempts were lost and left out; the last: {found.lost[-1]}"]
