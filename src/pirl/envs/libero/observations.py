"""What OpenPI's LIBERO policies see, made from an observation of the simulator."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from pirl.data.robots import get_robot
from pirl.envs.base import EnvObservation

ROBOT = get_robot("libero")
# Camera of the robot's dataset -> camera of the simulator, whose observations call it `<name>_image`.
CAMERAS = {"image": "agentview", "wrist_image": "robot0_eye_in_hand"}
STATE_DIM = 8


def robot_observation(raw: Mapping[str, Any]) -> EnvObservation:
    """An observation of the simulator, with or without pictures, in the names and numbers of OpenPI's converted dataset.

    The simulator's pictures start at the bottom row. The dataset has them turned by 180°: upright, but left and right
    exchanged. The state is the gripper's position, its orientation as an axis times an angle, and its two fingers.
    """
    state = (raw["robot0_eef_pos"], axis_angle(raw["robot0_eef_quat"]), raw["robot0_gripper_qpos"])
    raw_pictures = {name: raw[key] for name, camera in CAMERAS.items() if (key := f"{camera}_image") in raw}
    pictures = {name: np.ascontiguousarray(picture[::-1, ::-1]) for name, picture in raw_pictures.items()}
    return {**pictures, ROBOT.state[0]: np.concatenate(state).astype(np.float32)}


def axis_angle(quaternion: Float[np.ndarray, " 4"]) -> Float[np.ndarray, " 3"]:
    """The rotation of a quaternion (x, y, z, w) as its axis times its angle, which is between 0 and 2π."""
    w = min(1.0, max(-1.0, float(quaternion[3])))  # rounding can take a unit quaternion beyond 1
    length = math.sqrt(1.0 - w * w)
    # As OpenPI has it: an angle too small to have an axis is none.
    if math.isclose(length, 0.0):
        return np.zeros(3)
    return np.asarray(quaternion[:3] * (2.0 * math.acos(w) / length))
