"""Meta-World as a Gymnasium environment of pirl: cameras, proprioception, prompts, and the package's experts."""

import dataclasses
from collections import OrderedDict
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import UInt8

from pirl.data.robots import get_robot
from pirl.envs.base import EnvObservation, EnvState, Expert, RobotEnv, robot_spaces
from pirl.envs.experts import ExpertConfig
from pirl.envs.metaworld.expert import make_expert
from pirl.envs.metaworld.simulator import Simulator
from pirl.envs.metaworld.tasks import PROMPTS, choose_tasks
from pirl.envs.mujoco_rendering import CameraRenderer, Quality
from pirl.errors import ConfigError, ObservationError

ROBOT = get_robot("metaworld")
WRIST_CAMERA = "gripperPOV"
# The package mounts these cameras with their tops down.
UPSIDE_DOWN = ("corner", "corner2", "corner3", "corner4")
# The package refuses to go on after so many steps.
LONGEST_EPISODE = 500
# Simulators kept when the task changes: making one takes a second, having one about 90 MB.
KEPT_SIMULATORS = 10


class MetaWorldEnv(RobotEnv):
    """Meta-World's fifty tasks: a Sawyer arm moved by its hand, objects placed anew by every seed.

    The state is the position of the hand and the opening of the gripper; where objects and goals are, a policy has to
    see. The action is the motion of the hand (a centimetre along x, y and z at 1) and the gripper's effort (1 closes).
    The reward is the package's dense one, from 0 to 10; `info["success"]` is the sparse one.

    Options:
        tasks: which tasks, with commas between them (`pick-place-v3,drawer-close-v3`), or `mt10`, or `all`.
        image_size: height and width of the pictures.
        camera: where the scene is seen from; corner4 is close, corner2 shows the whole robot.
        wrist_camera: whether there is a second picture, of what the gripper sees; half the speed.
        max_steps: steps until an episode is cut off, 500 at most. The experts need 35 to 350.
        terminate_on_success: whether an episode ends with success, or goes on to its last step.
        quality: fast (no shadows, no smoothing), or stock, as the package renders, several times slower.
        render_mode: for Gymnasium; there is only rgb_array.
    """

    name: ClassVar[str] = "pirl/MetaWorld-v0"
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 80}  # type: ignore[misc]
    # Five steps of 2.5 ms for each action.
    fps = 80

    def __init__(
        self,
        *,
        tasks: str = "mt10",
        image_size: int = 224,
        camera: Literal["corner", "corner2", "corner3", "corner4", "topview"] = "corner4",
        wrist_camera: bool = True,
        max_steps: int = 400,
        terminate_on_success: bool = True,
        quality: Quality = "fast",
        render_mode: Literal["rgb_array"] = "rgb_array",
    ) -> None:
        if not 1 <= max_steps <= LONGEST_EPISODE:
            raise ConfigError(f"max_steps = {max_steps} should be between 1 and {LONGEST_EPISODE}.")
        self.tasks = choose_tasks(tasks)
        self.max_steps = max_steps
        self.terminate_on_success = terminate_on_success
        self.image_size = image_size
        self.quality = quality
        self.render_mode = render_mode
        views = {"base_0_rgb": camera, "left_wrist_0_rgb": WRIST_CAMERA}
        self.robot = ROBOT
        if not wrist_camera:
            self.robot = dataclasses.replace(ROBOT, cameras={"base_0_rgb": ROBOT.cameras["base_0_rgb"]})
        # Feature of the observation -> camera of the simulator.
        self._views: dict[str, str] = {feature: views[slot] for slot, feature in self.robot.cameras.items()}
        self.observation_space, self.action_space = robot_spaces(
            self.robot, dict.fromkeys(self._views, (image_size, image_size)), 4, -1.0, 1.0
        )
        self._simulators: OrderedDict[str, tuple[Simulator, CameraRenderer]] = OrderedDict()
        # Made now, so that a missing package or GL is found before the first episode.
        self._simulator, self._renderer = self._open(self.tasks[0])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[EnvObservation, dict[str, Any]]:
        """Begin an episode, or continue one from a state. Nothing is random after the start."""
        super().reset(seed=seed)
        state = (options or {}).get("state")
        task = self.choose_task(options if state is None else _with_task_of(state, options))
        self._simulator, self._renderer = self._open(task)
        if state is None:
            self._simulator.reset(int(self.np_random.integers(2**31)))
        else:
            self._simulator.set_state(state)
        return self._observe(), {"prompt": PROMPTS[task], "task": task, "success": False}

    def step(self, action: np.ndarray) -> tuple[EnvObservation, float, bool, bool, dict[str, Any]]:
        """Move the hand and the gripper."""
        action = np.asarray(action, np.float32)
        if action.shape != self.action_space.shape or not np.isfinite(action).all():
            raise ObservationError(f"an action of Meta-World is 4 finite numbers (x, y, z, gripper), not {action}.")
        reward, success = self._simulator.step(np.clip(action, -1.0, 1.0))
        terminated = success and self.terminate_on_success
        truncated = not terminated and self._simulator.steps >= self.max_steps
        return self._observe(), reward, terminated, truncated, {"success": success}

    def render(self) -> UInt8[np.ndarray, "height width 3"]:
        """The picture of the scene."""
        return self._picture(next(iter(self._views.values())))

    def get_state(self) -> EnvState:
        """All that decides how the episode goes on; it can be restored in another process."""
        return self._simulator.get_state()

    def make_expert(self, config: ExpertConfig, seed: int) -> Expert:
        """The package's policy for the task, with flaws."""
        return make_expert(self._simulator, config, seed)

    def close(self) -> None:
        """Free the GL contexts."""
        for _, renderer in self._simulators.values():
            renderer.close()
        self._simulators.clear()

    def _open(self, task: str) -> tuple[Simulator, CameraRenderer]:
        if task not in self._simulators:
            if len(self._simulators) == KEPT_SIMULATORS:
                self._simulators.popitem(last=False)[1][1].close()
            simulator = Simulator(task)
            renderer = CameraRenderer(
                simulator.model, self.image_size, self.image_size, self.quality, extra="metaworld"
            )
            self._simulators[task] = simulator, renderer
        self._simulators.move_to_end(task)
        return self._simulators[task]

    def _observe(self) -> EnvObservation:
        views = self._views if self.cameras_on else {}
        pictures = {feature: self._picture(camera) for feature, camera in views.items()}
        return pictures | {self.robot.state[0]: self._simulator.proprioception()}

    def _picture(self, camera: str) -> UInt8[np.ndarray, "height width 3"]:
        picture = self._renderer.render(self._simulator.data, camera)
        # Turned around, not mirrored: left stays left.
        return np.ascontiguousarray(picture[::-1, ::-1]) if camera in UPSIDE_DOWN else picture


def _with_task_of(state: EnvState, options: dict[str, Any] | None) -> dict[str, Any]:
    """The options of a reset with the task that the state belongs to."""
    if "task" not in state or str(state["task"]) not in PROMPTS:
        raise ConfigError("this is not a state of Meta-World; use one that get_state() of this environment gave.")
    task = str(state["task"])
    asked = (options or {}).get("task") or task
    if asked != task:
        raise ConfigError(f"the state belongs to the task {task!r}, but the episode is to be of {asked!r}.")
    return {"task": task}
