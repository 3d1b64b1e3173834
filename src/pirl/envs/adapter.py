"""Any Gymnasium environment as one of a robot, by a small class that its user writes."""

from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np

from pirl.data.images import to_uint8_hwc
from pirl.data.robots import Robot
from pirl.envs.base import EnvObservation, EnvState, RobotEnv
from pirl.errors import ConfigError, DataError, EnvError

_STEPS, _TASK = "adapter.steps", "adapter.task"


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
    columns; while `self.cameras_on` is False it may leave out the cameras. `action` may translate actions, `save_state`
    and `load_state` let episodes begin in the middle of another.
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
        """Take the environment and look at a first observation, from which the shapes are known."""
        self.env = env
        self.name = type(self).name or type(self).__name__  # type: ignore[misc]
        self.render_mode = env.render_mode
        self.metadata = {**env.metadata, "render_fps": self._check_class()}
        self._task, self._steps = self.tasks[0], 0
        self._is_proven = False
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

    # --- what the user writes ----------------------------------------------------------------------------------------

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

    def save_state(self) -> EnvState:
        """All that decides how the environment goes on, as named arrays."""
        raise ConfigError(
            f"{type(self).__name__} cannot return to a state: it needs the methods save_state() and load_state(state)."
        )

    def load_state(self, state: EnvState) -> Any:
        """Bring the environment into a state that `save_state` gave, and return the environment's observation there."""
        raise ConfigError(
            f"{type(self).__name__} cannot return to a state: it needs the methods save_state() and load_state(state)."
        )

    # --- what an environment of a robot does --------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[EnvObservation, dict[str, Any]]:
        """Begin an episode, of the task that the options name or from a state that they hold."""
        super().reset(seed=seed)
        state = (options or {}).get("state")
        if state is None:
            self._task, self._steps = self.choose_task(options), 0
        else:
            self._task, self._steps = self._progress(state)
        observation, info = self.env.reset(seed=seed, options=self.reset_options(self._task))
        if state is not None:
            observation = self.load_state({key: value for key, value in state.items() if key not in (_STEPS, _TASK)})
        return self._observe(observation, info), {**info, **self._told(), "success": False}

    def step(self, action: np.ndarray) -> tuple[EnvObservation, float, bool, bool, dict[str, Any]]:
        """Take an action; the episode is truncated where the environment says so, or after `max_steps`."""
        observation, reward, terminated, truncated, info = self.env.step(self.action(action))
        self._steps += 1
        success = self.success(float(reward), bool(terminated), info)
        if not isinstance(success, bool | np.bool_):
            raise self._complaint(f"success() should be true or false; it is {success!r:.60}")
        observed = self._observe(observation, info)
        self._is_proven = True
        assert self.max_steps is not None
        out_of_time = bool(truncated) or self._steps >= self.max_steps
        told = {**info, **self._told(), "success": bool(success)}
        return observed, float(reward), bool(terminated), out_of_time and not terminated, told

    def get_state(self) -> EnvState:
        """What `save_state` gives, and how far the episode is."""
        progress = {_STEPS: np.array(self._steps), _TASK: np.array(self.tasks.index(self._task))}
        return {**self.save_state(), **progress}

    def render(self) -> Any:
        """The environment's own picture."""
        return self.env.render()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def _progress(self, state: EnvState) -> tuple[str, int]:
        try:
            return self.tasks[int(state[_TASK])], int(state[_STEPS])
        except (KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"this is no state that {self.name}'s get_state() gave: {error!r}.") from error

    def _told(self) -> dict[str, str]:
        return {"task": self._task, "prompt": self.prompt or self._task}

    def _check_class(self) -> int:
        """Complete the class attributes, or say which one is missing; returns the frames per second."""
        if not isinstance(getattr(self, "robot", None), Robot):
            raise self._lacks("robot", "a pirl.data.Robot, which names cameras, state and actions")
        if not self.robot.action_dim:
            raise self._lacks("robot.action_dim", "the number of actions")
        fps = getattr(self, "fps", None)
        if not isinstance(fps, int) or fps < 1:
            raise self._lacks("fps", "how many steps there are in a second")
        if not self.tasks:
            if not self.prompt:
                raise self._lacks("prompt", "what is to be done, in words")
            self.tasks = (self.prompt,)
        if self.max_steps is None:
            self.max_steps = None if self.env.spec is None else self.env.spec.max_episode_steps
        if self.max_steps is None or self.max_steps < 1:
            raise self._lacks(
                "max_steps", "after how many steps an episode is over, as the environment does not say it"
            )
        return fps

    def _lacks(self, attribute: str, what: str) -> ConfigError:
        return ConfigError(f"the adapter {type(self).__name__} needs the class attribute {attribute}: {what}.")

    def _complaint(self, problem: str) -> ConfigError | EnvError:
        """Before the first step has gone well it is the adapter's fault; later, what the environment said."""
        return (EnvError if self._is_proven else ConfigError)(f"the adapter {type(self).__name__}: {problem}.")

    def _observe(self, observation: Any, info: Mapping[str, Any]) -> EnvObservation:
        """What the user's `observe` returns, checked and brought to the dtypes of datasets."""
        given = self.observe(observation, info)
        if not isinstance(given, Mapping):
            raise self._complaint(f"observe() should return cameras and state by name; it returned {given!r:.60}")
        cameras, columns = tuple(self.robot.cameras.values()) if self.cameras_on else (), self.robot.state
        if missing := [name for name in (*cameras, *columns) if name not in given]:
            raise self._complaint(
                f"observe() returned {sorted(map(str, given))}; {', '.join(missing)} of the robot is missing"
            )
        observed = {name: self._image(name, given[name]) for name in cameras}
        observed |= {name: self._column(name, given[name]) for name in columns}
        width = sum(len(observed[name]) for name in columns)
        if self.robot.state_dim not in (None, width):
            raise self._complaint(
                f"{' + '.join(columns)} has {width} numbers; the robot has state_dim = {self.robot.state_dim}"
            )
        return observed

    def _image(self, name: str, value: Any) -> np.ndarray:
        image = np.asarray(value)
        if image.ndim != 3:
            raise self._complaint(f"{name} has the shape {image.shape}; expected a picture (height, width, 3)")
        try:
            return np.ascontiguousarray(to_uint8_hwc(image))
        except DataError as error:
            raise self._complaint(f"{name}: {str(error).rstrip('.')}") from error

    def _column(self, name: str, value: Any) -> np.ndarray:
        column = np.asarray(value)
        if column.ndim != 1 or column.dtype.kind not in "fiu":
            raise self._complaint(
                f"{name} has the dtype {column.dtype} and the shape {column.shape}; expected a row of numbers"
            )
        return column.astype(np.float32)
