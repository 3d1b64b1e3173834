"""The physics of one gym-aloha task: the package's models, control, reward and starting poses, without its pictures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Float64

from pirl.envs.mujoco_rendering import import_simulator

# The joints of both arms come first, then those of the objects.
ARM_JOINTS = 16


@dataclass(frozen=True)
class _Package:
    """What a task is in gym-aloha."""

    model: str
    task: str
    # From its module of samplers and a seed.
    sample_pose: Callable[[Any, int], Float64[np.ndarray, " pose"]]


_PACKAGE = {
    "transfer_cube": _Package(
        model="bimanual_viperx_transfer_cube.xml",
        task="TransferCubeTask",
        sample_pose=lambda utils, seed: utils.sample_box_pose(seed),
    ),
    "insertion": _Package(
        model="bimanual_viperx_insertion.xml",
        task="InsertionTask",
        sample_pose=lambda utils, seed: np.concatenate(utils.sample_insertion_pose(seed)),
    ),
}


class Simulation:
    """One task of gym-aloha. Nothing in it is random but the poses that a seed decides."""

    def __init__(self, task: str) -> None:
        package = _PACKAGE[task]
        self._constants = import_simulator("gym_aloha.constants", "aloha")
        self._utils = import_simulator("gym_aloha.utils", "aloha")
        engine = import_simulator("dm_control.mujoco", "aloha")
        self._sample_pose = package.sample_pose
        self._physics = engine.Physics.from_xml_path(str(self._constants.ASSETS_DIR / package.model))
        self._task = getattr(import_simulator("gym_aloha.tasks.sim", "aloha"), package.task)()
        self._substeps = round(self._constants.DT / self._physics.timestep())

    @property
    def model(self) -> Any:
        """MuJoCo's MjModel."""
        return self._physics.model.ptr

    @property
    def data(self) -> Any:
        """MuJoCo's MjData."""
        return self._physics.data.ptr

    def reset(self, seed: int) -> None:
        """Arms in their starting position, objects where the seed says: for every seed the same as in gym-aloha."""
        # The package hands these poses over in a global variable, which environments in one process would share.
        with self._physics.reset_context():
            self.data.qpos[:ARM_JOINTS] = self._constants.START_ARM_POSE
            self.data.qpos[ARM_JOINTS:] = self._sample_pose(self._utils, seed % 2**32)
            self.data.ctrl[:] = self._constants.START_ARM_POSE

    def step(self, action: Float[np.ndarray, "14"]) -> int:
        """Pursue joint targets for one step of control; returns the reward, 0 to 4."""
        self._task.before_step(action, self._physics)
        self._physics.step(self._substeps)
        return int(self._task.get_reward(self._physics))

    def joints(self) -> Float32[np.ndarray, "14"]:
        """The joint positions as the robot reports them."""
        return np.asarray(self._task.get_qpos(self._physics), np.float32)

    def get_state(self) -> Float64[np.ndarray, " size"]:
        """All that decides how the physics goes on."""
        import mujoco

        state = np.empty(mujoco.mj_stateSize(self.model, mujoco.mjtState.mjSTATE_INTEGRATION))
        mujoco.mj_getState(self.model, self.data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
        return state

    def set_state(self, state: Float64[np.ndarray, "..."]) -> None:
        """Continue from a state that `get_state` gave."""
        import mujoco

        size = mujoco.mj_stateSize(self.model, mujoco.mjtState.mjSTATE_INTEGRATION)
        if state.shape != (size,):
            raise ValueError(f"the physics should be {size} numbers, not {state.shape}.")
        mujoco.mj_resetData(self.model, self.data)
        mujoco.mj_setState(self.model, self.data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
        # dm_control leaves its data with the first half of the next step done; more than that would change the state.
        mujoco.mj_step1(self.model, self.data)
