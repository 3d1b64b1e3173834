"""RIPT's iterations: attempts in groups, the updates that follow from how they differ, and what has come of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from pirl.agents.common import Agent
from pirl.agents.config import RIPTConfig
from pirl.agents.ript import RolloutBatch
from pirl.data import DatasetSource, ReplayBuffer
from pirl.envs.base import Start
from pirl.envs.curriculum import Curriculum
from pirl.envs.groups import Group, GroupedRollouts, roll_out_groups
from pirl.envs.pools import EnvPool
from pirl.envs.rollouts import Rollout, roll_out
from pirl.errors import TrainingError
from pirl.training.acting import StoppablePlanner, practice_planner
from pirl.training.drift import DriftProbe
from pirl.training.iteration_table import header, row
from pirl.training.practice import Interrupted, Told
from pirl.training.rollout_batches import BatchPlan, Rows, cut_batch, group_advantages, plan_batches
from pirl.training.rollout_records import Films, RolloutDataset
from pirl.training.run import RunDirectory
from pirl.training.setup import Setup
from pirl.training.writers import Number

# The header of the table comes again after so many rows.
_ROWS_PER_HEADER = 20
# After a roll-back everything is drawn anew: iterations then count from another multiple of this.
_BRANCHES_APART = 1_000_000


@dataclass
class _Attempts:
    """What an iteration learns from: the advantage of every attempt in the replay buffer, and where they began."""

    advantages: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    contexts: list[tuple[str, int]] = field(default_factory=list)
    told: dict[str, Number] = field(default_factory=dict)


class Iterations:
    """The practice of RIPT. What an iteration learns from is in the replay buffer until the next one begins."""

    def __init__(
        self,
        setup: Setup,
        pool: EnvPool | None,
        replay: ReplayBuffer,
        run: RunDirectory,
        demonstrations: DatasetSource | None = None,
        branch: Callable[[], int] = lambda: 0,
    ) -> None:
        """`branch` says how often the run has been rolled back: each time it goes on with other rollouts.

        Without environments it is another host that collects.
        """
        assert isinstance(setup.config.agent, RIPTConfig)
        self._setup, self._agent_config, self._config = setup, setup.config.agent, setup.config.rollout
        self._replay, self._demonstrations, self._branch = replay, demonstrations, branch
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
        self._plan: BatchPlan | None = None
        self._rows_shown = 0
        # Only what is shown of the round under way; a resumed run shows it without.
        self._timing: dict[str, float] = {}

    # --- what the trainer asks ------------------------------------------------------------------------------------

    @property
    def owes_updates(self) -> bool:
        """Whether this iteration has batches left."""
        return self._counts["made"] < (0 if self._plan is None else len(self._plan))

    @property
    def is_over(self) -> bool:
        """Whether all iterations have come to their end, or too many in a row had nothing to learn from."""
        is_barren = self._counts["barren"] >= self._config.max_barren
        return is_barren or self._counts["rounds"] >= self._config.iterations

    @property
    def updates(self) -> int:
        """Updates made so far, or at least given their batches."""
        return self._counts["updates"]

    @property
    def rounds(self) -> int:
        """Iterations that have come to their end."""
        return self._counts["rounds"]

    def collect(self, agent: Agent, is_stopped: Callable[[], bool] = lambda: False) -> Told:
        """Try initial states until there are enough groups of mixed outcomes, or the budget is spent."""
        config, number = self._config, self._counts["rounds"] + 1
        recorded = None if self._dataset is None else self._dataset.episodes
        films = self._films if self._films is not None and number % config.videos_every == 0 else None
        planner = practice_planner(agent, self._setup.policy_io, self._pool)

        def take(rollout: Rollout) -> None:
            if self._dataset is not None:
                self._dataset.add(rollout)
            if films is not None:
                films.add(rollout)

        try:
            found = roll_out_groups(
                self._pool,
                StoppablePlanner(planner, is_stopped),
                self._curriculum.contexts(number + self._branch() * _BRANCHES_APART),
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
        lines = [*self._hold(found), *_losses(found)]
        self._counts["barren"] = 0 if self._attempts.sizes else self._counts["barren"] + 1
        lines += self._end_of_barrenness(found)
        self._timing = {
            "env_steps_per_second": found.env_steps / max(found.seconds, 1e-9),
            "policy_ms": 1000 * found.policy_seconds / max(found.plans, 1),
        }
        if not self._attempts.sizes:
            self._counts["rounds"] += 1
        else:
            self._probe.take(agent, self._first_batch())
        return Told(self._attempts.told, self._timing, lines)

    def batches(self) -> list[RolloutBatch]:
        """The next batch."""
        self._counts["made"] += 1
        self._counts["updates"] += 1
        return [self._batch(self._counts["made"] - 1, self._counts["updates"] - 1, self._setup.share)]

    def conclude(self, agent: Agent, loss: float | None) -> Told:
        """How far the policy has moved from where it began, and how it does now where it has learned."""
        self._counts["rounds"] += 1
        told: dict[str, Number] = {"rollout/drift": self._probe.measure(agent, self._first_batch())}
        if self._config.recheck:
            told["rollout/success_after"] = self._recheck(agent)
            told |= {f"rollout/{name}": self._counts[name] for name in ("env_steps", "lost")}
        shown = {**self._attempts.told, **told, **self._timing}
        lines = [row(self._counts["rounds"], shown, loss)]
        if self._rows_shown % _ROWS_PER_HEADER == 0:
            lines.insert(0, header())
        self._rows_shown += 1
        self._let_go()
        return Told(told, lines=lines)

    def close(self) -> None:
        """Finish what was written."""
        if self._dataset is not None:
            self._dataset.close()

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self._described(self._replay.state())

    def shown(self) -> dict[str, Any]:
        """For other hosts."""
        return self._described(self._replay.held())

    def _described(self, replay: dict[str, int]) -> dict[str, Any]:
        attempts = self._attempts
        return {
            "counts": dict(self._counts),
            "replay": replay,
            "curriculum": None if self._curriculum is None else self._curriculum.state(),
            "branch": self._branch(),
            "dataset": None if self._dataset is None else self._dataset.episodes,
            "attempts": {
                "advantages": attempts.advantages,
                "sizes": attempts.sizes,
                "contexts": attempts.contexts,
                "told": attempts.told,
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, within an iteration too."""
        self._counts = {name: int(value) for name, value in state["counts"].items()}
        self._replay.restore(state["replay"])
        if self._curriculum is not None:
            self._curriculum.restore(state["curriculum"])
        if self._dataset is not None:
            # Other attempts follow where the run has gone back since, or has not written them so far.
            is_repeated = state["branch"] == self._branch()
            self._dataset.go_on_after(state["dataset"] if is_repeated else None)
        self._attempts = _Attempts(
            **{**state["attempts"], "contexts": [tuple(c) for c in state["attempts"]["contexts"]]}
        )
        self._plan = self._make_plan()

    # --- what is learned from -------------------------------------------------------------------------------------

    def _hold(self, found: GroupedRollouts) -> list[str]:
        """Keep what there is to learn from, and remember what there is to tell; says what a person should know."""
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
        self._let_go()
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
        told: dict[str, Number] = {f"rollout/{name}": self._counts[name] for name in ("env_steps", "episodes", "lost")}
        told |= {"rollout/contexts": found.tried, "rollout/groups": len(kept)}
        told |= {f"curriculum/{name}": value for name, value in self._curriculum.summary().items()}
        if found.attempts:
            told["rollout/success"] = found.successes / found.attempts
        if kept:
            told["rollout/success_kept"] = fmean(rollout.success for group in kept for rollout in group.attempts)
            told["rollout/advantage_spread"] = float(np.std(advantages))
        self._attempts = _Attempts(
            advantages=[float(value) for value in advantages],
            sizes=[len(group.attempts) for group in kept],
            contexts=[(group.context.task, group.context.seed) for group in kept],
            told=told,
        )
        self._plan = self._make_plan()
        return lines

    def _let_go(self) -> None:
        """Forget what was learned from: a checkpoint between iterations needs nothing of it."""
        self._replay.clear()
        self._attempts, self._plan = _Attempts(), None

    def _end_of_barrenness(self, found: GroupedRollouts) -> list[str]:
        """What to say when there was nothing to learn from for so long that the run ends; an error if there never was."""
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

    def _make_plan(self) -> BatchPlan | None:
        if not self._attempts.sizes:
            return None
        data = self._replay.trajectories
        seed = (self._setup.config.seed, self._counts["rounds"], self._branch())
        return plan_batches(
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
        """The whole of it: what is looked at there, one host looks at."""
        return self._batch(0, 0, slice(0, self._setup.config.batch_size))

    def _batch(self, number: int, position: int, share: slice) -> RolloutBatch:
        """The part of a batch that has these places in it."""
        assert self._plan is not None
        setup, demonstrations = self._setup, None
        if self._demonstrations is not None:
            first = position * setup.config.batch_size + share.start
            chosen = self._demonstrations.indices.take(first, share.stop - share.start)
            demonstrations = Rows(self._demonstrations.trajectories, chosen)
        return cut_batch(
            self._agent_config,
            Rows(self._replay.trajectories, self._plan.rows[number, share]),
            self._advantages(),
            self._plan.included[number, share],
            setup.shape,
            setup.policy_io,
            demonstrations,
        )

    def _recheck(self, agent: Agent) -> float:
        """The success of one more attempt at each of the states that were learned from."""
        # Beyond the attempts that were made, so that chance has another say.
        starts = [Start(task, seed, attempt=self._config.attempts) for task, seed in self._attempts.contexts]
        planner = practice_planner(agent, self._setup.policy_io, self._pool)
        steps = self._setup.config.evaluation.execute_steps
        # However many are lost, nothing depends on them.
        rollouts = list(roll_out(self._pool, planner, starts, execute_steps=steps, patience=len(starts) + 1))
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


def _losses(found: GroupedRollouts) -> list[str]:
    if not found.lost:
        return []
    return [f"{len(found.lost)} attempts were lost and left out; the last: {found.lost[-1]}"]
