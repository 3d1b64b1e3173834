"""Any Gymnasium environment as one of a robot, by a small class that its user writes."""

from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np

from pirl.data.robots import Robot
from pirl.data.transforms import to_uint8_hwc
from pirl.envs.base import EnvObservation, RobotEnv
from pirl.errors import ConfigError, DataError, EnvError


class EnvAdapter(RobotEnv):
    """Translates a Gymnasium environment. Subclass it, and say what it is and what its observations mean:

        class PushT(EnvAdapter):
            robot = Robot("pusht", cameras={"base_0_rgb": "image"}, state=("state",), actions=("action",),
                          state_dim=2, action_dim=2)
            fps = 10
            prompt = "push the T onto its mark"

            def observe(self, observation, info):
                return {"image": observation["pixels"], "state": observation["agent_pos"]}

            def success(self, reward, terminated, info):
                return info["is_success"]

    `observe` returns every camera of the robot (uint8 or floats in [0, 1], channels first or last) and its state
    columns; while `self.cameras_on` is False it may leave out the cameras. `action` may translate actions.
    """

    robot: Robot
    fps: int
    prompt: str | None = None
    # For an environment with several tasks: their texts, which are the prompts too, and `reset_options` to choose one.
    tasks: tuple[str, ...] = ()
    # None: what the environment is registered with.
    max_steps: int | None = None  # type: ignore[assignment]
    name: ClassVar[str] = ""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        """Reset the environment once: the first observation tells the shapes."""
        self.env = env
        self.name = type(self).name or type(self).__name__  # type: ignore[misc]
        self.render_mode = env.render_mode
        self._check_class()
        self.metadata = {**env.metadata, "render_fps": self.fps}
        self._task, self._steps = self.tasks[0], 0
        self._has_stepped = False
        observation, info = env.reset(seed=0, options=self.reset_options(self._task))
        first = self._observe(observation, info)
        spaces: dict[str, gymnasium.Space[Any]] = {
            name: gymnasium.spaces.Box(0, 255, values.shape, np.uint8)
            if values.dtype == np.uint8
            else gymnasium.spaces.Box(-np.inf, np.inf, values.shape, np.float32)
            for name, values in first.items()
        }
        assert self.robot.action_dim is not None
        self.observation_space = gymnasium.spaces.Dict(spaces)  # type: ignore[assignment]
        self.action_space = gymnasium.spaces.Box(-np.inf, np.inf, (self.robot.action_dim,), np.float32)

    def observe(self, observation: Any, info: Mapping[str, Any]) -> EnvObservation:
        """Cameras and state, by their names in the robot's dataset."""
        raise ConfigError(f"{type(self).__name__} needs a method observe(observation, info).")

    def success(self, reward: float, terminated: bool, info: Mapping[str, Any]) -> bool:
        """Whether the task is done after a step."""
        raise ConfigError(f"{type(self).__name__} needs a method success(reward, terminated, info).")

    def action(self, action: np.ndarray) -> Any:
        """The environment's action for one of the robot; the same, unless this is overridden."""
        return action

    def reset_options(self, task: str) -> dict[str, Any] | None:
        """The options of the environment's reset that choose a task."""
        return None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[EnvObservation, dict[str, Any]]:
        super().reset(seed=seed)
        self._task, self._steps = self.choose_task(options), 0
        observation, info = self.env.reset(seed=seed, options=self.reset_options(self._task))
        return self._observe(observation, info), self._info(info, success=False)

    def step(self, action: np.ndarray) -> tuple[EnvObservation, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(self.action(action))
        self._steps += 1
        success = self.success(float(reward), bool(terminated), info)
        if not isinstance(success, bool | np.bool_):
            raise self._problem(f"success() should be true or false; it is {success!r:.60}")
        observed = self._observe(observation, info)
        self._has_stepped = True
        assert self.max_steps is not None
        truncated = (bool(truncated) or self._steps >= self.max_steps) and not terminated
        return observed, float(reward), bool(terminated), truncated, self._info(info, success=bool(success))

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()

    def _info(self, info: Mapping[str, Any], success: bool) -> dict[str, Any]:
        return {**info, "task": self._task, "prompt": self.prompt or self._task, "success": success}

    def _check_class(self) -> None:
        if not self.tasks and self.prompt:
            self.tasks = (self.prompt,)
        if self.max_steps is None and self.env.spec is not None:
            self.max_steps = self.env.spec.max_episode_steps
        robot, fps = getattr(self, "robot", None), getattr(self, "fps", None)
        needed = {
            "robot, a pirl.data.Robot, which names cameras, state and actions": isinstance(robot, Robot),
            "robot.action_dim, the number of actions": getattr(robot, "action_dim", None),
            "fps, the number of steps in a second": isinstance(fps, int) and fps >= 1,
            "prompt, the instruction to the policy": self.tasks,
            "max_steps, the length of an episode, as the environment is registered without one": self.max_steps,
        }
        for what, is_there in needed.items():
            if not is_there:
                raise ConfigError(f"the adapter {type(self).__name__} needs the class attribute {what}.")

    def _problem(self, problem: str) -> ConfigError | EnvError:
        """The adapter's fault before the first good step; later, the environment's."""
        return (EnvError if self._has_stepped else ConfigError)(f"the adapter {type(self).__name__}: {problem}.")

    def _observe(self, observation: Any, info: Mapping[str, Any]) -> EnvObservation:
        given = self.observe(observation, info)
        if not isinstance(given, Mapping):
            raise self._problem(f"observe() should return cameras and state by name; it returned {given!r:.60}")
        cameras, columns = tuple(self.robot.cameras.values()) if self.cameras_on else (), self.robot.state
        if missing := [name for name in (*cameras, *columns) if name not in given]:
            raise self._problem(
                f"observe() returned {sorted(map(str, given))}; {', '.join(missing)} of the robot is missing"
            )
        observed = {name: self._image(name, given[name]) for name in cameras}
        observed |= {name: self._column(name, given[name]) for name in columns}
        width = sum(len(observed[name]) for name in columns)
        if self.robot.state_dim not in (None, width):
            raise self._problem(
                f"{' + '.join(columns)} has {width} numbers; the robot has state_dim = {self.robot.state_dim}"
            )
        return observed

    def _image(self, name: str, value: Any) -> np.ndarray:
        image = np.asarray(value)
        if image.ndim != 3:
            raise self._problem(f"{name} has the shape {image.shape}; expected an image (height, width, 3)")
        try:
            return np.ascontiguousarray(to_uint8_hwc(image))
        except DataError as error:
            raise self._problem(f"{name}: {str(error).rstrip('.')}") from error

    def _column(self, name: str, value: Any) -> np.ndarray:
        column = np.asarray(value)
        if column.ndim != 1 or column.dtype.kind not in "fiu":
            raise self._problem(
                f"{name} has the dtype {column.dtype} and the shape {column.shape}; expected a row of numbers"
            )
        return column.astype(np.float32)
