"""The simulator of one LIBERO task: begin, act, observe, and return to a state bit by bit."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float64, UInt8

from pirl.envs.base import EnvState
from pirl.envs.libero.observations import CAMERAS
from pirl.envs.libero.package import LiberoPackage, how_to_get_assets
from pirl.envs.mujoco_rendering import CameraRenderer, Quality, import_simulator
from pirl.errors import ConfigError

T = TypeVar("T")
# Moves nothing and opens the gripper, as OpenPI does while objects come to rest.
REST = np.array([0.0] * 6 + [-1.0])
# Placing objects by chance fails now and then.
PLACEMENT_ATTEMPTS = 100
FINGERS = 2
# Geometry for collisions only, and a group that MuJoCo does not draw unless asked to.
COLLISION_GROUP, HIDDEN_GROUP = 0, 3


class Simulation:
    """One task in robosuite, with two cameras of its own.

    The observation is of the very state that `get_state` gives. robosuite's own lags behind by one of the 25 physics
    steps of an action (2 ms), which would make it a part of the state.
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
        self._fixtures = [sim.model.body_name2id(fixture.root_body) for fixture in self._env.fixtures_dict.values()]
        groups = self.model.geom_group
        groups[groups == COLLISION_GROUP] = HIDDEN_GROUP
        self._renderer = CameraRenderer(self.model, resolution, resolution, quality, extra="libero")

    def reset(self, seed: int, init_state: Float64[np.ndarray, " values"], settle_steps: int) -> None:
        """Begin in an initial state. The seed places what is not in it, the furniture, within about 2 cm."""
        expected = 1 + self.model.nq + self.model.nv
        if init_state.shape != (expected,):
            raise ConfigError(f"an initial state has {init_state.shape} numbers, but the scene needs {expected}.")
        self._begin(seed)
        self._wrapper.set_init_state(init_state)
        for _ in range(settle_steps):
            self.step(REST)

    def step(self, action: Float64[np.ndarray, " 7"]) -> bool:
        """Act for a twentieth of a second; is the task done?"""
        _, _, success, _ = self._env.step(action)
        return bool(success)

    def observe(self, *, cameras_on: bool = True) -> dict[str, np.ndarray]:
        """What robosuite would observe, with pictures or without: see `robot_observation`."""
        self._locate()
        raw: Mapping[str, Any] = self._env._get_observations(force_update=True)
        cameras = CAMERAS.values() if cameras_on else ()
        pictures = {f"{camera}_image": self.render(camera)[::-1] for camera in cameras}
        return {**raw, **pictures}

    def render(self, camera: str) -> UInt8[np.ndarray, "height width 3"]:
        """What a camera sees."""
        return self._renderer.render(self.data, camera)

    def get_state(self) -> dict[str, np.ndarray]:
        """All that decides how it goes on: besides the physics, where the furniture is, and what the robot remembers."""
        kind = self._mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty(self._mujoco.mj_stateSize(self.model, kind))
        self._mujoco.mj_getState(self.model, self.data, physics, kind)
        robot = self._env.robots[0]
        furniture = [self.model.body_pos[self._fixtures], self.model.body_quat[self._fixtures]]
        return {
            "physics": physics,
            "furniture": np.concatenate(furniture, axis=1),
            # The gripper closes over many steps, and an action without rotation keeps the orientation aimed at.
            "gripper": np.array(robot.gripper.current_action),
            "orientation": np.array(robot.controller.goal_ori),
            # Until its first action the controller believes that the arm is where a reset puts it.
            "controlled": np.array(robot.controller.new_update),
        }

    def set_state(self, state: EnvState) -> None:
        """Return to what `get_state` gave, in this or another simulation of the same task."""
        self._begin(0)
        for key, now in self.get_state().items():
            if key not in state or np.shape(state[key]) != now.shape:
                raise ConfigError(
                    f"this state is not one of this LIBERO task: {key} should be {now.shape} numbers. "
                    "Use what get_state() of the environment gave."
                )
        self._mujoco.mj_setState(self.model, self.data, state["physics"], self._mujoco.mjtState.mjSTATE_INTEGRATION)
        self.model.body_pos[self._fixtures] = state["furniture"][:, :3]
        self.model.body_quat[self._fixtures] = state["furniture"][:, 3:]
        robot = self._env.robots[0]
        robot.gripper.current_action = np.array(state["gripper"])
        robot.controller.goal_ori = np.array(state["orientation"])
        robot.controller.new_update = bool(state["controlled"])
        # Lights the burner of a stove that is on.
        self._env._post_process()

    def close(self) -> None:
        """Free the cameras and the scene."""
        self._renderer.close()
        self._env.close()

    def _begin(self, seed: int) -> None:
        with _seeded(seed):
            _placed(self._env.reset)
        # Loading the scene anew would have made a new gripper.
        self._env.robots[0].gripper.current_action = np.zeros(FINGERS)

    def _locate(self) -> None:
        # After a step MuJoCo has where bodies were before it. A full forward pass would disturb the solver's warm start.
        for refresh in (self._mujoco.mj_kinematics, self._mujoco.mj_comPos, self._mujoco.mj_camlight):
            refresh(self.model, self.data)


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
    """Name the asset that is missing or damaged."""
    try:
        yield
    except (OSError, ValueError) as error:
        if str(assets) not in str(error):
            raise
        reason = " ".join(str(error).split())
        raise ConfigError(f"LIBERO's assets in {assets} are incomplete: {reason}. {how_to_get_assets()}") from error
