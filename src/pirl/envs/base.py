"""The interface of an environment: a Gymnasium environment with the names and units of one robot's datasets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import gymnasium
import numpy as np
from jaxtyping import Float32

from pirl.data.robots import Robot
from pirl.envs.experts import ExpertConfig
from pirl.errors import ConfigError, ObservationError

# An observation has the names of the robot's dataset: every camera (uint8, h × w × 3) and the state (float32).
EnvObservation = dict[str, np.ndarray]
# Returns the next action of an episode. It reads the simulator of the environment that made it.
Expert = Callable[[], Float32[np.ndarray, " action_dim"]]

# The seeds of evaluations, or of curricula, are SEEDS_APART apart, and within one those of tasks TASKS_APART: each task
# counts from a round number, because some environments choose one of their initial states by the seed.
SEEDS_APART, TASKS_APART = 1_000_000, 10_000
# RIPT starts its rollouts from these seeds, which all fit into 31 bits; evaluations stay below them.
FIRST_SEED, SEEDS = 1_000_000_000, 1_000_000_000
MAX_EVALUATION_SEED = FIRST_SEED // SEEDS_APART


@dataclass(frozen=True)
class Start:
    """The task of an episode and its seed. Attempts at the same start differ only in the noise of the policy."""

    task: str
    seed: int
    attempt: int = 0


@dataclass(frozen=True)
class EnvDescription:
    """What can be known of an environment without having it in this process."""

    name: str
    robot: Robot
    tasks: tuple[str, ...]
    fps: int
    max_steps: int
    # Shape of every camera (height, width, 3) and of the state, by its name in observations.
    shapes: Mapping[str, tuple[int, ...]]
    has_expert: bool


class RobotEnv(gymnasium.Env[EnvObservation, np.ndarray]):
    """A Gymnasium environment of one robot, with named tasks and (mostly) a scripted expert.

    - `reset(seed=, options={"task": …})`: the seed decides all that is random; the task is one of `tasks`, and chosen by
      the seed if not given.
    - `info["prompt"]` is the instruction and `info["task"]` the name of the task, after a reset; `info["success"]` says
      after every step whether the task is done.
    - `terminated` means that the task truly ended; after `max_steps` the environment itself says `truncated`.
    - While `cameras_on` is False, observations may come without images, and nothing else is different: rendering mostly
      costs more than all the rest. Only pirl's own runners turn cameras off.
    """

    name: ClassVar[str]
    robot: Robot
    tasks: tuple[str, ...]
    fps: int
    max_steps: int
    cameras_on: bool = True

    def make_expert(self, config: ExpertConfig, seed: int) -> Expert:
        """A scripted expert for the episode that has just begun; the seed decides its errors."""
        raise ConfigError(f"{self.name} has no scripted expert.")

    def describe(self) -> EnvDescription:
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

    def check_action(self, action: np.ndarray) -> np.ndarray:
        """The action as an array, if it has the shape of the action space and is finite."""
        action = np.asarray(action)
        if action.shape != self.action_space.shape or not np.isfinite(action).all():
            raise ObservationError(f"an action of {self.name} is {self.robot.action_dim} finite numbers, not {action}.")
        return action

    def choose_task(self, options: Mapping[str, Any] | None) -> str:
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


@runtime_checkable
class Policy(Protocol):
    """Infers chunks of actions. A row of the result depends on the same row of the arguments alone."""

    horizon: int

    def infer(
        self, observations: EnvObservation, prompts: Sequence[str], seeds: Sequence[int], steps: Sequence[int]
    ) -> Float32[np.ndarray, "n horizon action_dim"]:
        """The next actions of n environments, given their observations [n, …], prompts, seeds and steps so far."""
        ...
