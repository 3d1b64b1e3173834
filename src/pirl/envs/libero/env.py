"""LIBERO as a Gymnasium environment, with the names and numbers of OpenPI's LIBERO policies."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args

import numpy as np
from jaxtyping import Float, Float64, UInt8

from pirl.data.robots import get_robot
from pirl.envs.base import EnvObservation, RobotEnv, robot_spaces
from pirl.envs.libero.package import (
    LiberoPackage,
    Suite,
    find_assets,
    how_to_get_assets,
    read_init_states,
    task_prompt,
)
from pirl.envs.mujoco import MAX_SIZE, CameraRenderer, Quality, import_simulator
from pirl.errors import ConfigError

T = TypeVar("T")
ROBOT = get_robot("libero")
# Camera of the robot's dataset -> camera of the simulator, whose observations call it `<name>_image`.
CAMERAS = {"image": "agentview", "wrist_image": "robot0_eye_in_hand"}
STATE_DIM = 8
# Moves nothing and opens the gripper, as OpenPI does while objects come to rest.
REST = np.array([0.0] * 6 + [-1.0])
# Placing objects by chance fails now and then.
PLACEMENT_ATTEMPTS = 100
FINGERS = 2
# Geometry for collisions only, and a group that MuJoCo does not draw unless asked to.
COLLISION_GROUP, HIDDEN_GROUP = 0, 3
# OpenPI's limits; each leaves some room above the longest demonstration of the suite.
MAX_STEPS: dict[Suite, int] = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}


class LiberoEnv(RobotEnv):
    """A Panda arm at a table, told in words what to do: LIBERO as OpenPI evaluates policies in it.

    An action is 7 numbers in [-1, 1] at 20 Hz: a motion of the gripper (5 cm per unit), a rotation (0.5 rad per unit),
    and whether the gripper closes (1) or opens (-1). OpenPI's converted dataset says 10 frames per second; the actions in
    it were recorded at 20. The reward is 1 when the task is done, which ends the episode, and else 0.

    Every task comes with 50 initial states; an episode begins in number `seed % 50`, so that seeds 0 to 49 are the
    episodes of LIBERO's benchmark, and OpenPI's.

    Options:
        suite: Which tasks: libero_spatial, libero_object, libero_goal or libero_10 with 10 each, or libero_90.
        resolution: Height and width of the two cameras' images; 256 in OpenPI's data.
        assets: Folder of LIBERO's meshes and textures. Without it: PIRL_LIBERO_ASSETS, the package's own folder,
            ~/.cache/libero/assets.
        max_steps: Steps until an episode is truncated. Without it, OpenPI's: 220, 280, 300, 520 in the order above;
            400 for libero_90.
        settle_steps: Steps without motion before an episode, in which objects come to rest. They do not count.
        quality: "stock" renders what policies for LIBERO were trained on; "fast" leaves out shadows, reflections and
            multisampling, and takes half the time on a CPU.
        render_mode: For Gymnasium; there is only rgb_array.
    """

    name: ClassVar[str] = "pirl/Libero-v0"
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 20}  # type: ignore[misc]
    robot = ROBOT
    fps = 20

    def __init__(
        self,
        *,
        suite: Suite = "libero_goal",
        resolution: int = 256,
        assets: str | None = None,
        max_steps: int | None = None,
        settle_steps: int = 10,
        quality: Quality = "stock",
        render_mode: Literal["rgb_array"] = "rgb_array",
    ) -> None:
        for name, text, known in (("suite", suite, get_args(Suite)), ("quality", quality, get_args(Quality))):
            if text not in known:
                raise ConfigError(f"{name} = {text!r} is none of {', '.join(known)}.")
        self.render_mode = render_mode
        self.max_steps = MAX_STEPS[suite] if max_steps is None else max_steps
        for name, value, low in (("max_steps", self.max_steps, 1), ("settle_steps", settle_steps, 0)):
            if value < low:
                raise ConfigError(f"{name} = {value} should be at least {low}.")
        if not 1 <= resolution <= MAX_SIZE:
            raise ConfigError(f"resolution = {resolution} should be between 1 and {MAX_SIZE}.")
        self._package = LiberoPackage()
        self._assets = find_assets(assets, self._package.root)
        self._suite, self._resolution, self._settle_steps, self._quality = suite, resolution, settle_steps, quality
        self.tasks = self._package.tasks(suite)
        size = (resolution, resolution)
        self.observation_space, self.action_space = robot_spaces(
            self.robot, {name: size for name in CAMERAS}, STATE_DIM, -1.0, 1.0
        )
        # Only of the last task: each takes seconds to load, and hundreds of megabytes.
        self._simulation: Simulation | None = None
        self._task: str | None = None
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[EnvObservation, dict[str, Any]]:
        super().reset(seed=seed)
        task = self.choose_task(options)
        number = int(self.np_random.integers(2**31)) if seed is None else seed
        init_states = read_init_states(self._package.init_states_file(self._suite, task))
        self._load(task).reset(number, init_states[number % len(init_states)], self._settle_steps)
        self._steps = 0
        return self._observe(), {"prompt": task_prompt(task), "task": task, "success": False}

    def step(self, action: np.ndarray) -> tuple[EnvObservation, float, bool, bool, dict[str, Any]]:
        success = self.simulation.step(self.check_action(action).astype(np.float64))
        self._steps += 1
        truncated = not success and self._steps >= self.max_steps
        return self._observe(), float(success), success, truncated, {"success": success}

    def render(self) -> np.ndarray:
        """The table as the main camera sees it, left and right as they are."""
        return self.simulation.render(CAMERAS["image"])

    def close(self) -> None:
        if self._simulation is not None:
            self._simulation.close()
        self._simulation = self._task = None

    @property
    def simulation(self) -> "Simulation":
        assert self._simulation is not None, "reset() comes first"
        return self._simulation

    def _load(self, task: str) -> "Simulation":
        if self._simulation is None or task != self._task:
            self.close()
            description = self._package.description_file(self._suite, task)
            self._simulation = Simulation(self._package, self._assets, description, self._resolution, self._quality)
            self._task = task
        return self._simulation

    def _observe(self) -> EnvObservation:
        return robot_observation(self.simulation.observe(cameras_on=self.cameras_on))


class Simulation:
    """One task in robosuite, with two cameras of its own.

    The observation is of the present physics. robosuite's own lags behind by one of the 25 physics steps of an action.
    """

    def __init__(
        self, package: LiberoPackage, assets: Path, description: Path, resolution: int, quality: Quality
    ) -> None:
        self._mujoco: Any = import_simulator("mujoco", "libero")
        package.use_assets(assets)
        with _explained(assets), _seeded(0):
            env = _placed(
                lambda: package.wrapper.ControlEnv(
                    str(description),
                    use_camera_obs=False,
                    has_offscreen_renderer=False,
                    # We count steps ourselves; and to load the scene anew for every episode takes seconds.
                    ignore_done=True,
                    hard_reset=False,
                )
            )
        self._wrapper, self._env = env, env.env
        sim = self._env.sim
        self.model, self.data = sim.model._model, sim.data._data
        groups = self.model.geom_group
        groups[groups == COLLISION_GROUP] = HIDDEN_GROUP
        self._renderer = CameraRenderer(self.model, resolution, resolution, quality, extra="libero")

    def reset(self, seed: int, init_state: Float64[np.ndarray, " values"], settle_steps: int) -> None:
        """Begin in an initial state. The seed places what is not in it, the furniture, within about 2 cm."""
        expected = 1 + self.model.nq + self.model.nv
        if init_state.shape != (expected,):
            raise ConfigError(f"an initial state has {init_state.shape} numbers, but the scene needs {expected}.")
        with _seeded(seed):
            _placed(self._env.reset)
        # Loading the scene anew would have made a new gripper.
        self._env.robots[0].gripper.current_action = np.zeros(FINGERS)
        self._wrapper.set_init_state(init_state)
        for _ in range(settle_steps):
            self.step(REST)

    def step(self, action: Float64[np.ndarray, " 7"]) -> bool:
        _, _, success, _ = self._env.step(action)
        return bool(success)

    def observe(self, *, cameras_on: bool = True) -> dict[str, np.ndarray]:
        """What robosuite would observe, with images or without: see `robot_observation`."""
        # After a step MuJoCo has where bodies were before it. A full forward pass would disturb the solver's warm start.
        for refresh in (self._mujoco.mj_kinematics, self._mujoco.mj_comPos, self._mujoco.mj_camlight):
            refresh(self.model, self.data)
        raw: Mapping[str, Any] = self._env._get_observations(force_update=True)
        cameras = CAMERAS.values() if cameras_on else ()
        images = {f"{camera}_image": self.render(camera)[::-1] for camera in cameras}
        return {**raw, **images}

    def render(self, camera: str) -> UInt8[np.ndarray, "height width 3"]:
        return self._renderer.render(self.data, camera)

    def close(self) -> None:
        self._renderer.close()
        self._env.close()


def _placed(act: Callable[[], T]) -> T:
    errors: Any = import_simulator("robosuite.utils.errors", "libero")
    for _ in range(PLACEMENT_ATTEMPTS - 1):
        try:
            return act()
        except errors.RandomizationError:
            continue
    return act()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Robosuite draws from numpy's global generator: seed it, and leave it as it was."""
    before = np.random.get_state()
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(before)


@contextmanager
def _explained(assets: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        if str(assets) not in str(error):
            raise
        reason = " ".join(str(error).split())
        raise ConfigError(f"LIBERO's assets in {assets} are incomplete: {reason}. {how_to_get_assets()}") from error


def robot_observation(raw: Mapping[str, Any]) -> EnvObservation:
    """An observation of the simulator, with or without images, in the names and numbers of OpenPI's converted dataset.

    The simulator's images start at the bottom row. The dataset has them turned by 180°: upright, but left and right
    exchanged. The state is the gripper's position, its orientation as an axis times an angle, and its two fingers.
    """
    state = (raw["robot0_eef_pos"], axis_angle(raw["robot0_eef_quat"]), raw["robot0_gripper_qpos"])
    raw_images = {name: raw[key] for name, camera in CAMERAS.items() if (key := f"{camera}_image") in raw}
    images = {name: np.ascontiguousarray(image[::-1, ::-1]) for name, image in raw_images.items()}
    return {**images, ROBOT.state[0]: np.concatenate(state).astype(np.float32)}


def axis_angle(quaternion: Float[np.ndarray, " 4"]) -> Float[np.ndarray, " 3"]:
    """The rotation of a quaternion (x, y, z, w) as its axis times its angle, which is between 0 and 2π."""
    w = min(1.0, max(-1.0, float(quaternion[3])))  # rounding can take a unit quaternion beyond 1
    length = math.sqrt(1.0 - w * w)
    # As OpenPI has it: an angle too small to have an axis is none.
    if math.isclose(length, 0.0):
        return np.zeros(3)
    return np.asarray(quaternion[:3] * (2.0 * math.acos(w) / length))
