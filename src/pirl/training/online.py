"""Online practice: rounds of episodes that the learner acts by itself, and the updates that are owed for them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pirl.agents.common import Agent
from pirl.config import OnlineConfig
from pirl.data import ChunkBatch, ChunkSampler, PolicyIO, ReplayBuffer
from pirl.data.outcomes import OutcomeConfig, shaped_rewards
from pirl.data.replay import Episode
from pirl.data.robots import Robot
from pirl.envs.pools import EnvPool
from pirl.envs.rollouts import Rollout, make_starts, roll_out
from pirl.errors import EnvError
from pirl.training.acting import StoppablePlanner, practice_planner
from pirl.training.practice import Told
from pirl.training.writers import Number

# So many rounds may be lost as a whole.
_PATIENCE = 3


class OnlinePractice:
    """Collects rounds of whole episodes into a replay buffer. Between rounds nothing is under way, so it can be saved.

    Every environment step brings `utd_ratio` updates that are owed, made `updates_per_scan` at a time on batches of
    which the prior data has its part.
    """

    def __init__(
        self,
        config: OnlineConfig,
        outcomes: OutcomeConfig,
        pool: EnvPool | None,
        replay: ReplayBuffer,
        sampler: ChunkSampler,
        *,
        policy_io: PolicyIO,
        execute_steps: int,
    ):
        """`sampler` mixes prior data with what is in `replay`. Without environments another host has to collect."""
        self._config, self._outcomes, self._policy_io = config, outcomes, policy_io
        self._pool, self._replay, self._sampler, self._execute_steps = pool, replay, sampler, execute_steps
        self._counts = {"rounds": 0, "barren": 0, "env_steps": 0, "episodes": 0, "lost": 0, "updates": 0}

    @property
    def owes_updates(self) -> bool:
        """Whether there are enough environment steps for the next updates."""
        owed = self._counts["env_steps"] * self._config.utd_ratio - self._counts["updates"]
        return self._replay.num_episodes > 0 and owed >= self._config.updates_per_scan

    @property
    def is_over(self) -> bool:
        """Whether all steps are taken and all updates made."""
        return self._counts["env_steps"] >= self._config.env_steps and not self.owes_updates

    @property
    def updates(self) -> int:
        """Updates made so far, or at least given their batches."""
        return self._counts["updates"]

    @property
    def rounds(self) -> int:
        """Rounds so far."""
        return self._counts["rounds"]

    def batches(self) -> list[ChunkBatch]:
        """The batches of the next updates."""
        first, count = self._counts["updates"], self._config.updates_per_scan
        self._counts["updates"] += count
        return [self._sampler.batch(step) for step in range(first, first + count)]

    def collect(self, agent: Agent, is_stopped: Callable[[], bool] = lambda: False) -> Told:
        """One round of episodes."""
        assert self._pool is not None
        planner = StoppablePlanner(practice_planner(agent, self._policy_io, self._pool), is_stopped)
        count, first = self._config.episodes_per_round, self._counts["rounds"] * self._config.episodes_per_round
        starts = make_starts(self._pool.description, first + count, self._config.seed)[first:]
        rollouts = list(roll_out(self._pool, planner, starts, execute_steps=self._execute_steps, keep_images=True))
        rollouts.sort(key=lambda rollout: rollout.index)
        finished = [rollout for rollout in rollouts if rollout.lost is None and len(rollout)]
        for rollout in finished:
            self._replay.add(shaped_episode(rollout, self._policy_io.robot, self._outcomes))
        self._counts["rounds"] += 1
        self._counts["barren"] = 0 if finished else self._counts["barren"] + 1
        if self._counts["barren"] >= _PATIENCE:
            raise EnvError(
                f"all episodes of {_PATIENCE} rounds of practice were lost, so nothing more is learned. The last one: "
                f"{rollouts[-1].lost}"
            )
        self._counts["env_steps"] += sum(map(len, finished))
        self._counts["episodes"] += len(finished)
        self._counts["lost"] += len(rollouts) - len(finished)
        told: dict[str, Number] = {f"online/{name}": self._counts[name] for name in ("env_steps", "episodes", "lost")}
        if finished:
            told["online/success"] = float(np.mean([rollout.success for rollout in finished]))
            told["online/length"] = float(np.mean([len(rollout) for rollout in finished]))
        return Told(told)

    def conclude(self, agent: Agent, loss: float | None) -> Told:
        """Nothing is looked at between rounds."""
        return Told()

    def close(self) -> None:
        """Everything is written as it comes."""

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"counts": dict(self._counts), "replay": self._replay.state()}

    def shown(self) -> dict[str, Any]:
        """For other hosts."""
        return {"counts": dict(self._counts), "replay": self._replay.held()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: episodes that came later are forgotten."""
        self._counts = {name: int(value) for name, value in state["counts"].items()}
        self._replay.restore(state["replay"])


def shaped_episode(rollout: Rollout, robot: Robot, outcomes: OutcomeConfig) -> Episode:
    """An episode with the rewards that the dataset's have."""
    episode = rollout.episode(robot)
    if outcomes.reward == "raw":
        return episode
    return dataclasses.replace(episode, rewards=shaped_rewards(outcomes, rollout.success, len(rollout)))
