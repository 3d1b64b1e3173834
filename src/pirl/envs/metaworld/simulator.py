"""The physics of one Meta-World task: starts decided by a seed, and states that can be returned to exactly."""

from typing import Any

import numpy as np
from jaxtyping import Float32, Float64

from pirl.envs.base import EnvState
from pirl.envs.mujoco_rendering import import_simulator

# What the package changes in its MuJoCo model when it places the objects of an episode.
MODEL_ARRAYS = ("body_pos", "site_pos")


class Simulator:
    """One task of the package, brought to start where a seed says and to continue where a state says."""

    def __init__(self, task: str) -> None:
        registered = import_simulator("metaworld.env_dict", "metaworld").ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
        self.task = task
        # It is reset when it is made, so that every attribute of an episode is there.
        self._env: Any = registered[f"{task}-goal-observable"](seed=0)
        # Without these two it starts every episode at the same place, or where numpy's global generator says.
        self._env._freeze_rand_vec = False
        self._env.seeded_rand_vec = True
        self.model: Any = self._env.model
        self.data: Any = self._env.data
        # Every episode begins from this, because a reset of the package depends a little on what went before.
        self._pristine = self.get_state()

    @property
    def steps(self) -> int:
        """Steps taken in this episode."""
        return int(self._env.curr_path_length)

    def reset(self, seed: int) -> None:
        """Place everything as the seed says."""
        self.set_state(self._pristine)
        self._env.seed(seed)
        self._env.reset()
        # The package moves the goal after it has computed positions: without this the first picture has the old one.
        self._forward()

    def step(self, action: Float32[np.ndarray, "4"]) -> tuple[float, bool]:
        """Move, and return the dense reward of the package and whether the task is done."""
        _, reward, _, _, info = self._env.step(action)
        return float(reward), bool(info["success"])

    def proprioception(self) -> Float32[np.ndarray, "4"]:
        """Position of the hand, and how far the gripper is open (0 to 1)."""
        return self.full_observation()[:4].astype(np.float32)

    def full_observation(self) -> Float64[np.ndarray, "39"]:
        """What the package's own policies see: hand, gripper, objects; the same once more; the goal."""
        now = self._env._get_curr_obs_combined_no_goal()
        space = self._env.sawyer_observation_space
        return np.clip(np.concatenate([now, now, self._env._get_pos_goal()]), space.low, space.high)

    def get_state(self) -> EnvState:
        """The simulation, the places of fixed things, and all the numbers the package remembers of an episode."""
        import mujoco

        everything = mujoco.mjtState.mjSTATE_INTEGRATION
        simulation = np.empty(mujoco.mj_stateSize(self.model, everything))
        mujoco.mj_getState(self.model, self.data, simulation, everything)
        state = {"task": np.array(self.task), "simulation": simulation}
        state |= {name: getattr(self.model, name).copy() for name in MODEL_ARRAYS}
        for name, value in self._remembered().items():
            if value is not None:
                state[f"remembered.{name}"] = np.array(value)
        return state

    def set_state(self, state: EnvState) -> None:
        """Return to a state of this task, from whichever process it comes."""
        import mujoco

        for name in MODEL_ARRAYS:
            getattr(self.model, name)[:] = state[name]
        for name in self._remembered():
            value = state.get(f"remembered.{name}")
            # Scalars become Python's again, and what the state does not have was None.
            setattr(self._env, name, None if value is None else value.item() if value.ndim == 0 else value.copy())
        everything = mujoco.mjtState.mjSTATE_INTEGRATION
        mujoco.mj_setState(self.model, self.data, state["simulation"], everything)
        self._forward()
        # Once more: computing positions from the state also moves where the constraint solver starts the next time.
        mujoco.mj_setState(self.model, self.data, state["simulation"], everything)

    def _remembered(self) -> dict[str, Any]:
        """The numbers among the attributes of the package's environment, and those that may become numbers."""
        return {
            name: value
            for name, value in vars(self._env).items()
            if value is None or isinstance(value, int | float | np.generic) or _is_own_array(value)
        }

    def _forward(self) -> None:
        import mujoco

        mujoco.mj_forward(self.model, self.data)


def _is_own_array(value: Any) -> bool:
    """Whether it is an array that is not a window into MuJoCo's memory, which changes with the simulation."""
    while isinstance(value, np.ndarray):
        if value.base is None:
            return True
        value = value.base
    return False
