"""ALOHA in simulation as a Gymnasium environment, with the names and numbers of OpenPI's `pi0_aloha_sim`."""

from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
from jaxtyping import Float, Float32, UInt8

from pirl.data.robots import get_robot
from pirl.envs.base import EnvObservation, Expert, RobotEnv, robot_spaces
from pirl.envs.experts import ExpertConfig
from pirl.envs.mujoco import CameraRenderer, Quality, import_simulator
from pirl.errors import ConfigError

# The prompts. OpenPI trained `pi0_aloha_sim` with the first.
PROMPTS = {"transfer_cube": "Transfer cube", "insertion": "Insert the peg into the socket"}
SUCCESS_REWARD = 4
# The joints of both arms come first in MuJoCo's positions, then those of the objects.
ARM_JOINTS = 16
# The limits of one arm: waist, shoulder, elbow, forearm roll, wrist angle, wrist rotation in radians; the gripper.
ARM_LOW = (-3.14158, -1.85005, -1.76278, -3.14158, -1.8675, -3.14158, 0.0)
ARM_HIGH = (3.14158, 1.25664, 1.6057, 3.14158, 2.23402, 3.14158, 1.0)
# The camera of the observations, and the one that is for people: from the front, at the size that gym-aloha has.
OBSERVED_CAMERA, RENDER_CAMERA, RENDER_SIZE = "top", "angle", (480, 640)


class AlohaEnv(RobotEnv):
    """Two ViperX arms that hand over a cube (`transfer_cube`) or plug a peg into a socket (`insertion`).

    An action is 14 absolute joint targets at 50 Hz: for the left, then the right arm, six angles and the gripper
    (0 closed, 1 open). The reward says how far it is, 0 to 4; 4 is success and ends the episode. The same seed begins
    as in gym-aloha.

    Options:
        height: pixels of the camera's image, from top to bottom
        width: pixels of the camera's image, from left to right
        max_steps: steps until the episode times out (300 in gym-aloha, and so in OpenPI's evaluation)
        quality: "fast" renders without shadows and multisampling; "stock" as gym-aloha, 8.5 times slower
        render_mode: what render() returns; there is only "rgb_array"
    """

    name: ClassVar[str] = "pirl/Aloha-v0"
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 50}  # type: ignore[misc]
    robot = get_robot("aloha_sim")
    tasks = tuple(PROMPTS)
    fps = 50

    def __init__(
        self,
        *,
        height: int = 480,
        width: int = 640,
        max_steps: int = 300,
        quality: Quality = "fast",
        render_mode: Literal["rgb_array"] = "rgb_array",
    ) -> None:
        if max_steps < 1:
            raise ConfigError(f"max_steps = {max_steps} should be at least 1.")
        self.max_steps, self.render_mode = max_steps, render_mode
        self._size, self._quality = (height, width), quality
        (self._camera,) = self.robot.cameras.values()
        (self._state,) = self.robot.state
        self.observation_space, _ = robot_spaces(self.robot, {self._camera: self._size}, len(ARM_LOW) * 2, 0.0, 1.0)
        self.action_space = gymnasium.spaces.Box(
            np.array(ARM_LOW * 2, np.float32), np.array(ARM_HIGH * 2, np.float32), dtype=np.float32
        )
        # Both tasks are kept once they were needed: loading one takes longer than many resets.
        self._simulations: dict[str, Simulation] = {}
        self._renderers: dict[tuple[str, tuple[int, int]], CameraRenderer] = {}
        self._task = self.tasks[0]
        self._steps = 0
        # What is missing should come to light here rather than in the first episode.
        self._renderer(self._size)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[EnvObservation, dict[str, Any]]:
        super().reset(seed=seed)
        self._task, self._steps = self.choose_task(options), 0
        self.simulation.reset(int(self.np_random.integers(2**32)) if seed is None else seed)
        return self._observe(), {"prompt": PROMPTS[self._task], "task": self._task, "success": False}

    def step(self, action: np.ndarray) -> tuple[EnvObservation, float, bool, bool, dict[str, Any]]:
        reward = self.simulation.step(self.check_action(action).astype(np.float64))
        self._steps += 1
        success = reward == SUCCESS_REWARD
        truncated = not success and self._steps >= self.max_steps
        return self._observe(), float(reward), success, truncated, {"success": success}

    def make_expert(self, config: ExpertConfig, seed: int) -> Expert:
        from pirl.envs.aloha.expert import make_expert

        return make_expert(self.simulation, self._task, config, seed)

    def render(self) -> UInt8[np.ndarray, "480 640 3"]:
        return self._renderer(RENDER_SIZE).render(self.simulation.data, RENDER_CAMERA)

    def close(self) -> None:
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()

    @property
    def simulation(self) -> "Simulation":
        """The physics of the task."""
        if self._task not in self._simulations:
            self._simulations[self._task] = Simulation(self._task)
        return self._simulations[self._task]

    def _renderer(self, size: tuple[int, int]) -> CameraRenderer:
        key = self._task, size
        if key not in self._renderers:
            self._renderers[key] = CameraRenderer(self.simulation.model, *size, self._quality, extra="aloha")
        return self._renderers[key]

    def _observe(self) -> EnvObservation:
        observation: EnvObservation = {self._state: self.simulation.joints()}
        if self.cameras_on:
            renderer = self._renderer(self._size)
            observation[self._camera] = renderer.render(self.simulation.data, OBSERVED_CAMERA)
        return observation


class Simulation:
    """The physics of one gym-aloha task: the package's model, control and reward, without its images."""

    def __init__(self, task: str) -> None:
        constants = import_simulator("gym_aloha.constants", "aloha")
        self._utils = import_simulator("gym_aloha.utils", "aloha")
        engine = import_simulator("dm_control.mujoco", "aloha")
        tasks = import_simulator("gym_aloha.tasks.sim", "aloha")
        self._is_insertion = task == "insertion"
        self._task = tasks.InsertionTask() if self._is_insertion else tasks.TransferCubeTask()
        self._physics = engine.Physics.from_xml_path(str(constants.ASSETS_DIR / f"bimanual_viperx_{task}.xml"))
        self._start_pose = constants.START_ARM_POSE
        self._substeps = round(constants.DT / self._physics.timestep())

    @property
    def model(self) -> Any:
        return self._physics.model.ptr

    @property
    def data(self) -> Any:
        return self._physics.data.ptr

    def reset(self, seed: int) -> None:
        """Arms in their starting position, objects where the seed says: for every seed the same as in gym-aloha."""
        seed %= 2**32
        if self._is_insertion:
            objects = np.concatenate(self._utils.sample_insertion_pose(seed))
        else:
            objects = self._utils.sample_box_pose(seed)
        # The package hands these poses over in a global variable, which environments in one process would share.
        with self._physics.reset_context():
            self.data.qpos[:ARM_JOINTS] = self._start_pose
            self.data.qpos[ARM_JOINTS:] = objects
            self.data.ctrl[:] = self._start_pose

    def step(self, action: Float[np.ndarray, "14"]) -> int:
        self._task.before_step(action, self._physics)
        self._physics.step(self._substeps)
        return int(self._task.get_reward(self._physics))

    def joints(self) -> Float32[np.ndarray, "14"]:
        return np.asarray(self._task.get_qpos(self._physics), np.float32)
