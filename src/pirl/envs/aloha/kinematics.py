"""Where the joints of an ALOHA arm must be for its gripper to be somewhere: inverse kinematics in MuJoCo's model."""

from typing import Any, Literal

import numpy as np
from jaxtyping import Float

Side = Literal["left", "right"]
SIDES: tuple[Side, Side] = ("left", "right")
# The point between the fingers that grasps, in the frame of the gripper: its x axis points along the fingers.
GRASP_POINT = np.array([0.14, 0.0, 0.0])
# Damped least squares, until a hundredth of a millimetre is left.
DAMPING, TOLERANCE, MAX_ITERATIONS = 0.02, 1e-5, 100
# No iteration turns a joint further, so that a far goal is approached without flipping the arm over.
MAX_TURN = 0.2


class Kinematics:
    """Forward and inverse kinematics of both arms, in a copy of the data of a simulation's model."""

    def __init__(self, model: Any) -> None:
        import mujoco

        self._mujoco, self._model, self._data = mujoco, model, mujoco.MjData(model)
        self._bodies = {side: model.body(f"vx300s_{side}/gripper_link").id for side in SIDES}
        # The first six of the eight joints of an arm; every one of them is a hinge, so positions and velocities agree.
        self._joints = {side: np.arange(6) + 8 * index for index, side in enumerate(SIDES)}

    def pose(
        self, side: Side, joints: Float[np.ndarray, "6"]
    ) -> tuple[Float[np.ndarray, "3"], Float[np.ndarray, "3 3"]]:
        """Where the grasp point is, and how the gripper is turned."""
        self._data.qpos[self._joints[side]] = joints
        self._mujoco.mj_kinematics(self._model, self._data)
        rotation = self._data.xmat[self._bodies[side]].reshape(3, 3).copy()
        return self._data.xpos[self._bodies[side]] + rotation @ GRASP_POINT, rotation

    def solve(
        self,
        side: Side,
        position: Float[np.ndarray, "3"],
        rotation: Float[np.ndarray, "3 3"],
        start: Float[np.ndarray, "6"],
    ) -> Float[np.ndarray, "6"]:
        """Joints, near `start`, that bring the grasp point and the gripper there, or as near as the arm can."""
        columns = self._joints[side]
        low, high = self._model.jnt_range[columns].T
        linear, angular = np.empty((3, self._model.nv)), np.empty((3, self._model.nv))
        joints = np.array(start, np.float64)
        for _ in range(MAX_ITERATIONS):
            here, facing = self.pose(side, joints)
            error = np.concatenate([position - here, _rotation_vector(rotation @ facing.T)])
            if np.abs(error).max() < TOLERANCE:
                break
            self._mujoco.mj_comPos(self._model, self._data)
            self._mujoco.mj_jac(self._model, self._data, linear, angular, here, self._bodies[side])
            jacobian = np.concatenate([linear[:, columns], angular[:, columns]])
            step = jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + DAMPING**2 * np.eye(6), error)
            step *= min(1.0, MAX_TURN / max(np.abs(step).max(), 1e-12))
            joints = np.clip(joints + step, low, high)
        return joints


def turn(axis: Literal["x", "y", "z"], degrees: float) -> Float[np.ndarray, "3 3"]:
    """The rotation about an axis of the world."""
    cosine, sine = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    index = "xyz".index(axis)
    first, second = (index + 1) % 3, (index + 2) % 3
    rotation = np.eye(3)
    rotation[first, first] = rotation[second, second] = cosine
    rotation[second, first], rotation[first, second] = sine, -sine
    return rotation


def _rotation_vector(rotation: Float[np.ndarray, "3 3"]) -> Float[np.ndarray, "3"]:
    # Half turns, where the axis is lost, do not occur between the poses of an episode.
    twice_sine = np.array(
        [rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]]
    )
    sine, cosine = float(np.linalg.norm(twice_sine)) / 2, (float(np.trace(rotation)) - 1) / 2
    return twice_sine / 2 if sine < 1e-9 else twice_sine / (2 * sine) * np.arctan2(sine, cosine)
