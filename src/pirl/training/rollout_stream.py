"""RIPT's stream: iterations of rollouts in groups, the batches that follow from how they differ, and what is kept."""

from collections.abc import Mapping, Sequence
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
from pirl.envs.groups import Curriculum, GroupedRollouts, roll_out_groups
from pirl.envs.pool import EnvPool
from pirl.envs.rollout import Rollout, collect
from pirl.envs.video import Video, write_videos
from pirl.errors import ConfigError, TrainingError
from pirl.training.display import Number, table_header, table_row
from pirl.training.evaluation import StoppablePolicy, rollout_policy
from pirl.training.health import Interrupted, RolloutMonitor, StopSignal, UpdateGuard
from pirl.training.logging import RunLog
from pirl.training.rollout_data import (
    BatchTable,
    DriftProbe,
    RolloutDataset,
    Rows,
    arrange_batches,
    group_advantages,
    make_batch,
)
from pirl.training.run import RunDirectory
from pirl.training.setup import Setup
from pirl.training.streams import Batch, CollectingStream, CollectResult, TrainState

_ROWS_PER_HEADER = 20
# After a rollback other initial states are drawn: iterations then count from another multiple of this.
_BRANCH_OFFSET = 1_000_000
_VIDEOS = 4  # of each outcome in an iteration


@dataclass
class _Attempts:
    """What an iteration learns from: the advantage of every attempt in the replay buffer, and where they began."""

    advantages: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    contexts: list[Sequence[Any]] = field(default_factory=list)  # task and seed
    metrics: dict[str, Number] = field(default_factory=dict)


class RolloutStream(CollectingStream):
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
        stop: StopSignal,
    ) -> None:
        """Only the main process has environments."""
        assert isinstance(setup.config.agent, RIPTConfig)
        self._setup, self._agent_config, self._config = setup, setup.config.agent, setup.config.rollout
        self._execute_steps = setup.config.evaluation.execute_steps
        self._run, self._log, self._guard, self._monitor = run, log, guard, monitor
        self._replay, self._stop = replay, stop
        self._demonstrations = setup.source(setup.config.seed) if self._agent_config.bc_loss_weight > 0 else None
        self._pool: Any = pool
        self._curriculum: Any = None
        self._dataset: RolloutDataset | None = None
        self._camera: str | None = None
        if pool is not None:
            self._curriculum = Curriculum(self._config.curriculum, pool.description, self._config.seed)
            if self._config.save_dataset:
                self._dataset = RolloutDataset(run.rollouts, pool.description)
            self._camera = next(iter(pool.description.robot.cameras.values()), None)
            if self._config.videos_every and self._camera is None:
                raise ConfigError(
                    f"rollout.videos_every asks for videos, and {pool.description.name} has no camera as it is "
                    "configured: --rollout.videos-every 0."
                )
        self._probe = DriftProbe(run.drift_probe, setup.here)
        self._counts = {"rounds": 0, "barren": 0, "env_steps": 0, "episodes": 0, "lost": 0, "updates": 0, "made": 0}
        self._attempts = _Attempts()
        self._table: BatchTable | None = None
        # Only for the table; a resumed run shows it without.
        self._timing: dict[str, float] = {}
        self._losses: list[jax.Array] = []
        self._rows_shown = 0

    @property
    def is_within_iteration(self) -> bool:  # type: ignore[override]
        return self._table is not None and self._counts["made"] < len(self._table.rows)

    @property
    def done(self) -> bool:
        """Whether all iterations have ended, or too many in a row had nothing to learn from."""
        is_barren = self._counts["barren"] >= self._config.max_barren
        return is_barren or self._counts["rounds"] >= self._config.iterations

    @property
    def progress(self) -> int:
        return self._counts["rounds"]

    @property
    def _branch(self) -> int:
        """How often the run has gone back: each time it goes on with other rollouts."""
        return len(self._run.rollbacks)

    def next(self, state: TrainState) -> Batch | None:
        if not self.is_within_iteration:
            with self._log.activity("rollout", "collecting", compiles="acting"):
                result = self.on_main_process(state.agent, self.collect)
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
            result = self.on_main_process(state.agent, lambda agent: self._conclude(agent, loss))
        self._log.record(state.step, self.progress, result)
        self._monitor.after_updates(result.metrics.get("rollout/drift"))

    def collect(self, agent: Agent) -> CollectResult:
        """Try initial states until there are enough groups of mixed outcomes, or the budget is spent."""
        config, number = self._config, self._counts["rounds"] + 1
        recorded = None if self._dataset is None else self._dataset.episodes
        takes_videos = config.videos_every > 0 and number % config.videos_every == 0
        videos: dict[bool, list[Video]] = {True: [], False: []}

        def take(rollout: Rollout) -> None:
            if self._dataset is not None:
                self._dataset.add(rollout)
            if takes_videos and len(videos[rollout.success]) < _VIDEOS:
                videos[rollout.success].append(Video(rollout.observations[str(self._camera)], rollout.success))

        try:
            found = roll_out_groups(
                self._pool,
                StoppablePolicy(rollout_policy(agent, self._setup.policy_io, self._pool), self._stop),
                self._curriculum.contexts(number + self._branch * _BRANCH_OFFSET),
                attempts=config.attempts,
                groups=config.groups,
                budget=config.budget,
                execute_steps=self._execute_steps,
                on_rollout=take,
            )
        except Interrupted:
            if self._dataset is not None:
                self._dataset.go_on_after(recorded)  # those that were finished are there already when they come again
            raise
        if filmed := [*videos[True], *videos[False]]:
            self._run.videos.mkdir(exist_ok=True)
            file = self._run.videos / f"iteration-{number:04d}.mp4"
            write_videos(file, filmed, self._pool.description.fps, columns=_VIDEOS)
        lines = self._hold(found)
        if self._attempts.sizes:
            self._counts["barren"] = 0
            self._probe.take(agent, self._first_batch())
        else:
            self._counts["barren"] += 1
            self._counts["rounds"] += 1
            if self._counts["barren"] >= config.max_barren:
                lines.append(self._explain_barren(found))
        self._timing = {
            "env_steps_per_second": found.env_steps / max(found.seconds, 1e-9),
            "policy_ms": 1000 * found.policy_seconds / max(found.inferences, 1),
        }
        return CollectResult(self._attempts.metrics, self._timing, lines)

    def _hold(self, found: GroupedRollouts) -> list[str]:
        """Keep what there is to learn from; returns lines for the display."""
        config, lines = self._config, []
        for group in (*found.kept, *found.dropped):
            if group.success_rate is not None:
                self._curriculum.record(group.context, group.success_rate)
        frames = np.cumsum([sum(map(len, group.attempts)) for group in found.kept])
        kept = found.kept[: int(np.searchsorted(frames, config.capacity, side="right"))]
        if len(kept) < len(found.kept):
            lines.append(
                f"{len(found.kept) - len(kept)} of {len(found.kept)} groups are left out: their frames exceed "
                f"rollout.capacity = {config.capacity}."
            )
        if len(found.kept) < config.groups:
            lines.append(
                f"{found.tried} initial states were tried and {len(found.kept)} of {config.groups} groups found whose "
                "attempts differ: the budget is spent, and the iteration continues with these (rollout.budget)."
            )
        if found.lost:
            lines.append(f"{len(found.lost)} attempts were lost and left out; the last: {found.lost[-1]}")
        self._clear()
        for group in kept:
            for rollout in group.attempts:
                self._replay.add(rollout.episode(self._setup.policy_io.robot))
        # However late a success came, it is none that float32 cannot tell from a failure.
        rewards = [
            [max(config.discount ** len(rollout), 1e-30) if rollout.success else 0.0 for rollout in group.attempts]
            for group in kept
        ]
        advantages = group_advantages(self._agent_config, rewards) if kept else np.empty(0, np.float32)
        counts = self._counts
        counts["env_steps"] += found.env_steps
        counts["episodes"] += found.attempts
        counts["lost"] += len(found.lost)
        counts["made"] = 0
        metrics: dict[str, Number] = {f"rollout/{name}": counts[name] for name in ("env_steps", "episodes", "lost")}
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

    def _explain_barren(self, found: GroupedRollouts) -> str:
        """Why the run ends, if there was nothing to learn from for too long; an error if there never was."""
        rate = found.successes / max(1, found.attempts)
        reason = (
            f"for {self._counts['barren']} iterations there was nothing to learn from: all attempts at each initial "
            f"state ended alike (success {100 * rate:.1f} % of the last {found.attempts})."
        )
        if rate > 0.5:
            return f"{reason} These initial states have nothing more to teach."
        reason += " Begin with a policy that succeeds now and then, or give it easier tasks or more attempts."
        if not self._counts["updates"]:
            raise TrainingError(reason)
        return reason

    def _conclude(self, agent: Agent, loss: float) -> CollectResult:
        """Measure the policy after an iteration, and end it."""
        self._counts["rounds"] += 1
        metrics: dict[str, Number] = {"rollout/drift": self._probe.measure(agent, self._first_batch())}
        if self._config.recheck:
            metrics["rollout/success_after"] = self._recheck(agent)
            metrics |= {f"rollout/{name}": self._counts[name] for name in ("env_steps", "lost")}
        shown = {**self._attempts.metrics, **metrics, **self._timing, "iteration": self._counts["rounds"], "loss": loss}
        header = [table_header()] if self._rows_shown % _ROWS_PER_HEADER == 0 else []
        self._rows_shown += 1
        self._clear()
        return CollectResult(metrics, lines=[*header, table_row(shown)])

    def _recheck(self, agent: Agent) -> float:
        """The success of one more attempt at each of the states that were learned from."""
        # Beyond the attempts that were made, for other noise.
        starts = [Start(task, seed, attempt=self._config.attempts) for task, seed in self._attempts.contexts]
        policy = rollout_policy(agent, self._setup.policy_io, self._pool)
        # However many are lost, nothing depends on them.
        options: dict[str, Any] = {"keep_images": False, "patience": len(starts) + 1}
        rollouts = collect(self._pool, policy, starts, execute_steps=self._execute_steps, **options)
        finished = [rollout for rollout in rollouts if rollout.lost is None]
        self._counts["env_steps"] += sum(map(len, rollouts))
        self._counts["lost"] += len(rollouts) - len(finished)
        return fmean([rollout.success for rollout in finished] or [float("nan")])

    def _clear(self) -> None:
        """A checkpoint between iterations needs nothing of what was learned from."""
        self._replay.clear()
        self._attempts, self._table = _Attempts(), None

    def _arrange(self) -> BatchTable | None:
        if not self._attempts.sizes:
            return None
        data = self._replay.trajectories
        return arrange_batches(
            self._agent_config,
            data.ends - data.starts,
            np.array(self._attempts.advantages, np.float32),
            self._attempts.sizes,
            batch_size=self._setup.config.batch_size,
            attempts=self._config.attempts,
            execute_steps=self._execute_steps,
            seed=(self._setup.config.seed, self._counts["rounds"], self._branch),
        )

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
            np.array(self._attempts.advantages, np.float32),
            self._table.included[number, share],
            setup.shape,
            setup.policy_io,
            demonstrations,
        )

    def shared_state(self) -> dict[str, Any]:
        return {
            "counts": dict(self._counts),
            "replay": self._replay.held(),
            "curriculum": None if self._curriculum is None else self._curriculum.state(),
            "branch": self._branch,
            "dataset": None if self._dataset is None else self._dataset.episodes,
            "attempts": dict(vars(self._attempts)),
        }

    def take_over(self, state: Mapping[str, Any]) -> None:
        self._counts = dict(state["counts"])
        self._replay.restore(state["replay"])
        if self._curriculum is not None:
            self._curriculum.restore(state["curriculum"])
        if self._dataset is not None:
            # After a rollback, or where none was written so far, other attempts follow.
            self._dataset.go_on_after(state["dataset"] if state["branch"] == self._branch else None)
        self._attempts = _Attempts(**state["attempts"])
        self._table = self._arrange()

    def close(self) -> None:
        """Complete the dataset of rollouts."""
        if self._dataset is not None:
            self._dataset.close()
