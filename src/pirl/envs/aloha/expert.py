"""Scripted experts for ALOHA: moves of the two grippers, from where the objects are, by inverse kinematics."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Float32

from pirl.envs.aloha.env import Simulation
from pirl.envs.base import Expert
from pirl.envs.experts import ExpertConfig, Flaws, with_flaws

Side = Literal["left", "right"]
SIDES: tuple[Side, Side] = ("left", "right")
# The point between the fingers that grasps, in the frame of the gripper: its x axis points along the fingers.
GRASP_POINT = np.array([0.14, 0.0, 0.0])
# Damped least squares, until a hundredth of a millimetre is left.
DAMPING, TOLERANCE, MAX_ITERATIONS = 0.02, 1e-5, 100
# No iteration turns a joint further, so that a far goal is approached without flipping the arm over.
MAX_TURN = 0.2


def turn(axis: Literal["x", "y", "z"], degrees: float) -> Float[np.ndarray, "3 3"]:
    cosine, sine = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    index = "xyz".index(axis)
    first, second = (index + 1) % 3, (index + 2) % 3
    rotation = np.eye(3)
    rotation[first, first] = rotation[second, second] = cosine
    rotation[second, first], rotation[first, second] = sine, -sine
    return rotation


OPEN, CLOSED = 1.0, 0.0
# An episode of either task takes about so long.
EPISODE_STEPS = 200
# The largest motion of one step: 0.04 radians of a joint, a tenth of the opening of a gripper.
MOTION = np.array([*[0.04] * 6, 0.1] * 2)
# How the right gripper picks and gives, how the left one takes: pointing at each other, steeply down, rolled.
RIGHT_DOWN = turn("z", 180.0) @ turn("y", 60.0)
LEFT_DOWN = turn("y", 60.0)
LEFT_ROLLED = turn("x", 90.0)
MEETING_POINT = np.array([0.0, 0.5, 0.25])
# How high above the table to grasp; with the finger tips on the table, friction would keep the gripper from closing.
CUBE_GRASP, PEG_GRASP, SOCKET_GRASP = 0.02, 0.018, 0.022
# What is further than this from where a hand should have it is no longer in it, and the expert stops.
DROPPED = 0.1


@dataclass(frozen=True)
class Reach:
    """Where a gripper is to be, how turned (if it is to move), and how far open; what is not given stays as it is."""

    position: Float[np.ndarray, "3"] | None = None
    rotation: Float[np.ndarray, "3 3"] | None = None
    gripper: float | None = None


@dataclass(frozen=True)
class Move:
    steps: int
    left: Reach = Reach()
    right: Reach = Reach()


def shift(position: Float[np.ndarray, "3"], *, x: float = 0.0, z: float = 0.0) -> Float[np.ndarray, "3"]:
    return position + np.array([x, 0.0, z])


def position_of(simulation: Simulation, body: str, *, z: float | None = None) -> Float[np.ndarray, "3"]:
    """Where an object is; at another height `z`, where it will be once it has fallen."""
    position = np.array(simulation.data.body(body).xpos)
    return position if z is None else np.array([*position[:2], z])


def transfer_cube(simulation: Simulation, aim: Float[np.ndarray, "3"]) -> Iterator[Move]:
    """The right arm picks the cube and holds it out; the left arm comes from the other side and takes it."""
    cube = position_of(simulation, "box", z=CUBE_GRASP) + aim
    yield Move(45, right=Reach(shift(cube, z=0.1), RIGHT_DOWN, OPEN))
    yield Move(25, right=Reach(cube))
    yield Move(5)
    yield Move(20, right=Reach(gripper=CLOSED))
    yield Move(50, Reach(shift(MEETING_POINT, x=-0.12), LEFT_ROLLED, OPEN), Reach(MEETING_POINT))
    yield Move(5)
    cube = position_of(simulation, "box")
    if np.linalg.norm(cube - MEETING_POINT) > DROPPED:
        return
    yield Move(25, left=Reach(cube))
    yield Move(20, left=Reach(gripper=CLOSED))
    yield Move(20, right=Reach(gripper=OPEN))


def insertion(simulation: Simulation, aim: Float[np.ndarray, "3"]) -> Iterator[Move]:
    """Each arm picks one part; in the air the right one pushes the peg into the socket."""
    socket = position_of(simulation, "socket", z=SOCKET_GRASP) + aim
    peg = position_of(simulation, "peg", z=PEG_GRASP) + aim
    yield Move(45, Reach(shift(socket, z=0.1), LEFT_DOWN, OPEN), Reach(shift(peg, z=0.1), RIGHT_DOWN, OPEN))
    yield Move(25, Reach(socket), Reach(peg))
    yield Move(5)
    yield Move(20, Reach(gripper=CLOSED), Reach(gripper=CLOSED))
    hand = shift(MEETING_POINT, x=0.1)
    yield Move(50, Reach(shift(MEETING_POINT, x=-0.1)), Reach(hand))
    # The peg slips a little in the hand, so the hand is led by where the peg is, not by where it should be.
    for distance in np.linspace(0.17, 0.09, 12):
        error = shift(position_of(simulation, "socket"), x=distance) - position_of(simulation, "peg")
        if np.linalg.norm(error) > DROPPED:
            return
        hand = hand + error
        yield Move(8, right=Reach(hand))


def make_expert(simulation: Simulation, task: str, config: ExpertConfig, seed: int) -> Expert:
    rng = np.random.default_rng(seed)
    flaws = Flaws.draw(config, rng, EPISODE_STEPS)
    script = transfer_cube if task == "transfer_cube" else insertion
    commands = follow(script(simulation, flaws.aim), simulation)
    last = simulation.joints()

    def act() -> Float32[np.ndarray, "14"]:
        nonlocal last
        last = next(commands, last)
        return last

    return with_flaws(act, lambda: last, flaws, rng, MOTION)


def follow(moves: Iterator[Move], simulation: Simulation) -> Iterator[Float32[np.ndarray, "14"]]:
    """The joint targets of every step of some moves; each move is asked for when the one before it is done."""
    kinematics = Kinematics(simulation.model)
    state = simulation.joints().astype(np.float64)
    arms = {side: Arm(kinematics, side, state[7 * i : 7 * i + 7]) for i, side in enumerate(SIDES)}
    for move in moves:
        for arm, reach in ((arms["left"], move.left), (arms["right"], move.right)):
            arm.begin(reach)
        for step in range(move.steps):
            share = (step + 1) / move.steps
            share = share * share * (3 - 2 * share)  # speeds up and slows down
            yield np.concatenate([arms[side].command(share) for side in SIDES]).astype(np.float32)


class Arm:
    def __init__(self, kinematics: "Kinematics", side: Side, state: Float[np.ndarray, "7"]) -> None:
        self._kinematics, self._side = kinematics, side
        _, self._rotation = kinematics.pose(side, state[:6])
        self._start = self._goal = state

    def begin(self, reach: Reach) -> None:
        self._start, self._goal = self._goal, self._goal.copy()
        if reach.gripper is not None:
            self._goal[6] = reach.gripper
        if reach.position is not None:
            self._rotation = self._rotation if reach.rotation is None else reach.rotation
            self._goal[:6] = self._kinematics.solve(self._side, reach.position, self._rotation, self._start[:6])

    def command(self, share: float) -> Float[np.ndarray, "7"]:
        """The joint targets a share of the way there. Joints, not the hand, move evenly: no pose on the way is hard."""
        return self._start + share * (self._goal - self._start)


# --- inverse kinematics in MuJoCo's model -----------------------------------------------------------------------------


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


def _rotation_vector(rotation: Float[np.ndarray, "3 3"]) -> Float[np.ndarray, "3"]:
    # Half turns, where the axis is lost, do not occur between the poses of an episode.
    twice_sine = np.array(
        [rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]]
    )
    sine, cosine = float(np.linalg.norm(twice_sine)) / 2, (float(np.trace(rotation)) - 1) / 2
    return twice_sine / 2 if sine < 1e-9 else twice_sine / (2 * sine) * np.arctan2(sine, cosine)
