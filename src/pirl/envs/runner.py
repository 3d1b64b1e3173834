"""Runs episodes of one environment, request by request: in a worker process, a Ray actor, or right here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float32

from pirl.envs.base import EnvObservation, Expert, RobotEnv, Start
from pirl.envs.experts import ExpertConfig
from pirl.errors import EnvError

# Which observations of a chunk have images: all, or only the one after the last action, for the policy.
Images = Literal["all", "last"]
# Actions to take, or a number of steps of the expert.
Chunk = Float32[np.ndarray, "k action_dim"] | int


@dataclass(frozen=True)
class ResetResult:
    """The beginning of an episode."""

    observation: EnvObservation
    prompt: str
    task: str


@dataclass(frozen=True)
class ChunkResult:
    """The result of executing actions, fewer if the episode ends. The observations are those AFTER each action.

    With `images="last"` each camera has one image, or is missing if the episode ended before.
    """

    observations: EnvObservation
    actions: Float32[np.ndarray, "k action_dim"]
    rewards: Float32[np.ndarray, " k"]
    terminated: bool
    truncated: bool
    success: bool


@dataclass(frozen=True)
class EpisodeFailed:
    """An episode that cannot go on, after a crash, a hang, an exception or NaN; the slot can be started again."""

    reason: str


Result = ResetResult | ChunkResult | EpisodeFailed


def stack_observations(observations: Sequence[EnvObservation]) -> EnvObservation:
    """Stack each entry of the last observation over all observations that have it."""
    return {name: np.stack([one[name] for one in observations if name in one]) for name in observations[-1]}


class EnvRunner:
    """Runs episodes of one environment, request by request; invalid observations and rewards are an `EnvError`."""

    def __init__(self, env: RobotEnv) -> None:
        self.env = env
        self.description = env.describe()
        self._expert: Expert | None = None
        self._is_running = False

    def start(self, start: Start, expert: ExpertConfig | None = None) -> ResetResult:
        """Begin an episode; the seed of the start is also the expert's."""
        self.env.cameras_on = True
        observation, info = self.env.reset(seed=start.seed, options={"task": start.task})
        observation = self._checked(observation)
        self._expert = None if expert is None else self.env.make_expert(expert, start.seed)
        self._is_running = True
        return ResetResult(observation, str(info["prompt"]), str(info["task"]))

    def execute(self, actions: Chunk, images: Images = "all") -> ChunkResult:
        """Take these actions, or so many steps of the expert, until the episode ends."""
        if not self._is_running:
            raise ValueError("the episode has ended, or has not begun: start one first.")
        count = actions if isinstance(actions, int) else len(actions)
        taken, observations, rewards = [], [], []
        terminated = truncated = success = False
        for index in range(count):
            action = self._ask_expert() if isinstance(actions, int) else actions[index]
            self.env.cameras_on = images == "all" or index == count - 1
            observation, reward, terminated, truncated, info = self.env.step(action)
            taken.append(action)
            observations.append(self._checked(observation))
            rewards.append(float(reward))
            if not np.isfinite(rewards[-1]):
                raise EnvError(f"the reward is {rewards[-1]}.")
            success = bool(info["success"])
            if terminated or truncated:
                self._is_running = False
                break
        return ChunkResult(
            observations=stack_observations(observations),
            actions=np.stack(taken).astype(np.float32),
            rewards=np.array(rewards, np.float32),
            terminated=bool(terminated),
            truncated=bool(truncated),
            success=success,
        )

    def _ask_expert(self) -> Float32[np.ndarray, " action_dim"]:
        if self._expert is None:
            raise ValueError("the episode was started without an expert.")
        return np.asarray(self._expert(), np.float32)

    def _checked(self, observation: EnvObservation) -> EnvObservation:
        columns, shapes = self.description.robot.state, self.description.shapes
        wanted = {name: shape for name, shape in shapes.items() if self.env.cameras_on or name in columns}
        if not wanted.keys() <= observation.keys() <= shapes.keys():
            raise EnvError(f"an observation has {sorted(observation)} instead of {sorted(wanted)}.")
        checked = {}
        for name, shape in wanted.items():
            # A copy, because simulators like to write the next observation over the last.
            values = np.array(observation[name], np.float32 if name in columns else None)
            if name not in columns and values.dtype != np.uint8:
                raise EnvError(f"{name!r} has the dtype {values.dtype} instead of uint8.")
            if values.shape != shape:
                raise EnvError(f"{name!r} has the shape {values.shape} instead of {shape}.")
            if name in columns and not np.all(np.isfinite(values)):
                raise EnvError(f"{name!r} holds {values[~np.isfinite(values)][0]}.")
            checked[name] = values
        return checked
