"""What every environment is: a Gymnasium environment that speaks the language of one robot's datasets."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np
from jaxtyping import Float32

from pirl.data.robots import Robot
from pirl.envs.experts import ExpertConfig
from pirl.errors import ConfigError

# An observation has the names of the robot's dataset: every camera (uint8, h × w × 3) and the state (float32).
EnvObservation = dict[str, np.ndarray]
# A simulator's state as named arrays, so that it can be sent to another process and kept in a file.
EnvState = Mapping[str, np.ndarray]
# The action to take now. An expert looks into the simulator of the environment that made it, for one episode.
Expert = Callable[[], Float32[np.ndarray, " action_dim"]]


@dataclass(frozen=True)
class Start:
    """How an episode begins: the task, and a seed for all that is random. A state, if given, is where it begins.

    Attempts of one start differ in what the policy draws, and in nothing that the environment does by itself.
    """

    task: str
    seed: int
    state: EnvState | None = None
    attempt: int = 0

    @property
    def acting_seed(self) -> int:
        """The seed of the policy's noise: another for every attempt, and the start's own for the first."""
        return self.seed + (self.attempt << 48)


@dataclass(frozen=True)
class EnvDescription:
    """What others need to know of an environment without having it at hand."""

    name: str
    robot: Robot
    tasks: tuple[str, ...]
    fps: int
    max_steps: int
    # Shape of every camera (height, width, 3) and of the state, by its name in observations.
    shapes: Mapping[str, tuple[int, ...]]
    has_expert: bool


class RobotEnv(gymnasium.Env[EnvObservation, np.ndarray]):
    """A Gymnasium environment of one robot, with named tasks, states to return to, and (mostly) a scripted expert.

    - `reset(seed=, options={"task": …, "state": …})`: the seed decides all that is random, the task (one of `tasks`;
      without it the seed chooses) what is to be done. With a state, which `get_state` gave, the episode continues from
      exactly there; with a seed besides, what is still to be random comes from the seed.
    - `info["prompt"]` says after a reset what to do, in words; `info["task"]` names the task; `info["success"]` says
      after every step whether the task is done.
    - `terminated` means that the task truly ended; after `max_steps` the environment itself says `truncated`.
    - While `cameras_on` is False nobody looks at pictures, which mostly cost more than all the rest: observations may
      come without them, and nothing else is different. Only who steps the environment for pirl turns cameras off.
    """

    name: ClassVar[str]
    robot: Robot
    tasks: tuple[str, ...]
    fps: int
    max_steps: int
    cameras_on: bool = True

    @abstractmethod
    def get_state(self) -> EnvState:
        """All that decides how the episode goes on."""

    def make_expert(self, config: ExpertConfig, seed: int) -> Expert:
        """A scripted expert for the episode that has just begun; the seed decides how and whether it errs."""
        raise ConfigError(f"{self.name} has no scripted expert.")

    def describe(self) -> EnvDescription:
        """What others need to know of it."""
        assert isinstance(self.observation_space, gymnasium.spaces.Dict)
        return EnvDescription(
            name=self.name,
            robot=self.robot,
            tasks=self.tasks,
            fps=self.fps,
            max_steps=self.max_steps,
            shapes={name: tuple(space.shape or ()) for name, space in self.observation_space.items()},
            has_expert=type(self).make_expert is not RobotEnv.make_expert,
        )

    def choose_task(self, options: Mapping[str, Any] | None) -> str:
        """The task that the options of a reset name, else one by chance."""
        task = (options or {}).get("task")
        if task is None:
            return self.tasks[int(self.np_random.integers(len(self.tasks)))]
        if task not in self.tasks:
            raise ConfigError(f"{self.name} has no task {task!r}; it has {', '.join(map(repr, self.tasks))}.")
        return str(task)


def robot_spaces(
    robot: Robot,
    cameras: Mapping[str, tuple[int, int]],
    state_dim: int,
    action_low: float | np.ndarray,
    action_high: float | np.ndarray,
) -> tuple[gymnasium.Space[EnvObservation], gymnasium.spaces.Box]:
    """The observation space of a robot with one state column, given (height, width) by camera, and its action space."""
    assert robot.action_dim is not None
    spaces: dict[str, gymnasium.Space[Any]] = {
        name: gymnasium.spaces.Box(0, 255, (height, width, 3), np.uint8) for name, (height, width) in cameras.items()
    }
    spaces[robot.state[0]] = gymnasium.spaces.Box(-np.inf, np.inf, (state_dim,), np.float32)
    low, high = (np.broadcast_to(np.float32(bound), (robot.action_dim,)) for bound in (action_low, action_high))
    observation: gymnasium.Space[Any] = gymnasium.spaces.Dict(spaces)
    return observation, gymnasium.spaces.Box(low, high, dtype=np.float32)
