"""Meta-World as a Gymnasium environment: cameras, proprioception, prompts, and the package's experts."""

import dataclasses
import warnings
from collections import OrderedDict
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float32, Float64, UInt8

from pirl.data.robots import get_robot
from pirl.envs.base import EnvObservation, Expert, RobotEnv, robot_spaces
from pirl.envs.experts import ExpertConfig, Flaws, with_flaws
from pirl.envs.metaworld.tasks import PROMPTS, choose_tasks
from pirl.envs.mujoco import CameraRenderer, Quality, import_simulator
from pirl.errors import ConfigError

ROBOT = get_robot("metaworld")
WRIST_CAMERA = "gripperPOV"
# The package mounts these cameras with their tops down.
UPSIDE_DOWN = ("corner", "corner2", "corner3", "corner4")
# The package refuses to go on after so many steps.
LONGEST_EPISODE = 500
# Simulators kept when the task changes: making one takes a second, having one about 90 MB.
KEPT_SIMULATORS = 10
# What the package changes in its MuJoCo model when it places the objects of an episode.
MODEL_ARRAYS = ("body_pos", "site_pos")
# The usual length of an expert's episode.
EPISODE_LENGTH = 80
# The largest motion of one step is an action of 1; noise leaves the gripper alone.
MOTION = np.array([1.0, 1.0, 1.0, 0.0])
# Where the package's policies find positions of objects and of the goal in their observation.
POSITIONS = (slice(4, 7), slice(11, 14), slice(36, 39))


class MetaWorldEnv(RobotEnv):
    """Meta-World's fifty tasks: a Sawyer arm moved by its hand, objects placed anew by every seed.

    The state is the position of the hand and the opening of the gripper; where objects and goals are, a policy has to
    see. The action is the motion of the hand (a centimeter along x, y and z at 1) and the gripper's effort (1 closes).
    The reward is the package's dense one, from 0 to 10; `info["success"]` is the sparse one.

    Options:
        tasks: which tasks, with commas between them (`pick-place-v3,drawer-close-v3`), or `mt10`, or `all`.
        image_size: height and width of the images.
        camera: where the scene is seen from; corner4 is close, corner2 shows the whole robot.
        wrist_camera: whether there is a second image, of what the gripper sees; half the speed.
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
        super().reset(seed=seed)
        task = self.choose_task(options)
        self._simulator, self._renderer = self._open(task)
        self._simulator.reset(int(self.np_random.integers(2**31)))
        return self._observe(), {"prompt": PROMPTS[task], "task": task, "success": False}

    def step(self, action: np.ndarray) -> tuple[EnvObservation, float, bool, bool, dict[str, Any]]:
        action = np.clip(self.check_action(action).astype(np.float32), -1.0, 1.0)
        reward, success = self._simulator.step(action)
        terminated = success and self.terminate_on_success
        truncated = not terminated and self._simulator.steps >= self.max_steps
        return self._observe(), reward, terminated, truncated, {"success": success}

    def render(self) -> UInt8[np.ndarray, "height width 3"]:
        return self._image(next(iter(self._views.values())))

    def make_expert(self, config: ExpertConfig, seed: int) -> Expert:
        return make_expert(self._simulator, config, seed)

    def close(self) -> None:
        for _, renderer in self._simulators.values():
            renderer.close()
        self._simulators.clear()

    def _open(self, task: str) -> "tuple[Simulator, CameraRenderer]":
        if task not in self._simulators:
            if len(self._simulators) == KEPT_SIMULATORS:
                self._simulators.popitem(last=False)[1][1].close()
            simulator, size = Simulator(task), self.image_size
            renderer = CameraRenderer(simulator.model, size, size, self.quality, extra="metaworld")
            self._simulators[task] = simulator, renderer
        self._simulators.move_to_end(task)
        return self._simulators[task]

    def _observe(self) -> EnvObservation:
        views = self._views if self.cameras_on else {}
        images = {feature: self._image(camera) for feature, camera in views.items()}
        return images | {self.robot.state[0]: self._simulator.proprioception()}

    def _image(self, camera: str) -> UInt8[np.ndarray, "height width 3"]:
        image = self._renderer.render(self._simulator.data, camera)
        # Turned around, not mirrored: left stays left.
        return np.ascontiguousarray(image[::-1, ::-1]) if camera in UPSIDE_DOWN else image


class Simulator:
    """The physics of one task, with starts that depend on nothing but the seed."""

    def __init__(self, task: str) -> None:
        registered = import_simulator("metaworld.env_dict", "metaworld").ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
        self._mujoco: Any = import_simulator("mujoco", "metaworld")
        self.task = task
        # It is reset when it is made, so that every attribute of an episode is there.
        self._env: Any = registered[f"{task}-goal-observable"](seed=0)
        # Without these two it starts every episode at the same place, or where numpy's global generator says.
        self._env._freeze_rand_vec = False
        self._env.seeded_rand_vec = True
        self.model: Any = self._env.model
        self.data: Any = self._env.data
        # Every episode begins from here, because a reset of the package depends a little on what went before: the
        # simulation, the positions of fixed things, and the numbers that the package remembers of an episode.
        self._state = np.empty(self._mujoco.mj_stateSize(self.model, self._mujoco.mjtState.mjSTATE_INTEGRATION))
        self._mujoco.mj_getState(self.model, self.data, self._state, self._mujoco.mjtState.mjSTATE_INTEGRATION)
        self._positions = {name: getattr(self.model, name).copy() for name in MODEL_ARRAYS}
        self._numbers = self._own_numbers()

    @property
    def steps(self) -> int:
        return int(self._env.curr_path_length)

    def reset(self, seed: int) -> None:
        for name, values in self._positions.items():
            getattr(self.model, name)[:] = values
        for name in self._own_numbers():
            value = self._numbers.get(name)
            setattr(self._env, name, value.copy() if isinstance(value, np.ndarray) else value)
        self._set_state()
        self._mujoco.mj_forward(self.model, self.data)
        # Once more: computing positions from the state also moves where the constraint solver starts the next time.
        self._set_state()
        self._env.seed(seed)
        self._env.reset()
        # The package moves the goal after it has computed positions: without this the first image has the old one.
        self._mujoco.mj_forward(self.model, self.data)

    def step(self, action: Float32[np.ndarray, "4"]) -> tuple[float, bool]:
        _, reward, _, _, info = self._env.step(action)
        return float(reward), bool(info["success"])

    def proprioception(self) -> Float32[np.ndarray, "4"]:
        return self.full_observation()[:4].astype(np.float32)

    def full_observation(self) -> Float64[np.ndarray, "39"]:
        """The observation of the package's own policies: hand, gripper, objects; the same once more; the goal."""
        now = self._env._get_curr_obs_combined_no_goal()
        space = self._env.sawyer_observation_space
        return np.clip(np.concatenate([now, now, self._env._get_pos_goal()]), space.low, space.high)

    def _set_state(self) -> None:
        self._mujoco.mj_setState(self.model, self.data, self._state, self._mujoco.mjtState.mjSTATE_INTEGRATION)

    def _own_numbers(self) -> dict[str, Any]:
        """The attributes of the package's environment that are numbers, or may become numbers."""
        return {
            name: value.copy() if isinstance(value, np.ndarray) else value
            for name, value in vars(self._env).items()
            if value is None or isinstance(value, int | float | np.generic) or _is_own_array(value)
        }


def _is_own_array(value: Any) -> bool:
    """Whether it is an array that is not a view into MuJoCo's memory, which changes with the simulation."""
    while isinstance(value, np.ndarray):
        if value.base is None:
            return True
        value = value.base
    return False


def make_expert(simulator: Simulator, config: ExpertConfig, seed: int) -> Expert:
    """The package's own policy for the task. Its aim errs as with a badly calibrated camera: positions are displaced."""
    policy = import_simulator("metaworld.policies", "metaworld").ENV_POLICY_MAP[simulator.task]()
    rng = np.random.default_rng(seed)
    flaws = Flaws.draw(config, rng, EPISODE_LENGTH)
    gripper = -1.0

    def act() -> Float32[np.ndarray, "4"]:
        nonlocal gripper
        observation = simulator.full_observation()
        for position in POSITIONS:
            observation[position] += flaws.aim
        with warnings.catch_warnings():
            # It warns whenever it asks for more than the largest motion, which is most of the time.
            warnings.simplefilter("ignore")
            action = np.clip(policy.get_action(observation), -1.0, 1.0).astype(np.float32)
        gripper = float(action[3])
        return action

    flawed = with_flaws(act, lambda: np.array([0.0, 0.0, 0.0, gripper], np.float32), flaws, rng, MOTION)
    return lambda: np.clip(flawed(), -1.0, 1.0)
