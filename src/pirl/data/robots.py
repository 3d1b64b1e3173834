"""How a robot's dataset and a policy fit together: which columns and cameras go where, and what its numbers mean."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pirl.data.transforms import ALOHA_DIM, AlohaJoints, DeltaActions, Pipeline, make_mask
from pirl.errors import ConfigError, did_you_mean
from pirl.imports import load_named
from pirl.text import read_dataclass

Adapt = Literal["none", "aloha"]
_MAX_DIMENSIONS = 10_000


@dataclass(frozen=True)
class Robot:
    """A robot as its dataset describes it and a policy sees it."""

    name: str
    # Camera slot of the model -> dataset feature. A slot that is not here is black, with its mask False.
    cameras: Mapping[str, str]
    # Dataset columns, concatenated in this order.
    state: tuple[str, ...]
    actions: tuple[str, ...]
    # Which actions become relative to the state, as for `make_mask`; empty: none.
    delta: tuple[int, ...] = ()
    # "aloha": joints and grippers are brought into the space π₀ was trained in.
    adapt: Adapt = "none"
    # For data that names no task.
    default_prompt: str | None = None
    # None: whatever the data has.
    state_dim: int | None = None
    action_dim: int | None = None

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ConfigError(f"robot {self.name!r}: {problem}")

    def _problems(self) -> Iterator[str]:
        for name in ("state", "actions"):
            if not getattr(self, name):
                yield f"{name} names no dataset column; it needs at least one."
        covered = sum(map(abs, self.delta))
        if covered > _MAX_DIMENSIONS:
            yield f"delta = {self.delta!r:.60} covers more than {_MAX_DIMENSIONS} dimensions."
        relative = max((dim + 1 for dim, is_relative in enumerate(make_mask(*self.delta)) if is_relative), default=0)
        for name, dim, needed in (("state_dim", self.state_dim, relative), ("action_dim", self.action_dim, covered)):
            if dim is None:
                continue
            if dim < 1:
                yield f"{name} = {dim} must be positive."
            if dim < needed:
                yield f"delta = {self.delta} needs {needed} dimensions, but {name} = {dim}."
            if self.adapt == "aloha" and dim != ALOHA_DIM:
                yield f"adapt = 'aloha' is for {ALOHA_DIM} dimensions, but {name} = {dim}."

    def transforms(self) -> Pipeline:
        """What its states and actions go through before they are normalized."""
        mask = make_mask(*self.delta)
        joints = self.joint_transforms()
        return Pipeline((*joints.transforms, DeltaActions(mask))) if any(mask) else joints

    def joint_transforms(self) -> Pipeline:
        """The part of it that sees each state and action by itself."""
        return Pipeline((AlohaJoints(),) if self.adapt == "aloha" else ())

    def to_dict(self) -> dict[str, Any]:
        described = dataclasses.asdict(self) | {"cameras": dict(self.cameras)}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in described.items()}

    @classmethod
    def from_dict(cls, data: Any) -> "Robot":
        """Read a robot from a configuration file; what is unknown, missing or of the wrong type is named."""
        is_named = isinstance(data, Mapping) and "name" in data
        robot: Robot = read_dataclass(cls, data, f"robot {data['name']!r}" if is_named else "a robot")
        return robot


# --- presets -----------------------------------------------------------------------------------------------------

_ALOHA = Robot(
    name="aloha",
    cameras={
        "base_0_rgb": "observation.images.cam_high",
        "left_wrist_0_rgb": "observation.images.cam_left_wrist",
        "right_wrist_0_rgb": "observation.images.cam_right_wrist",
    },
    state=("observation.state",),
    actions=("action",),
    delta=(6, -1, 6, -1),
    adapt="aloha",
    state_dim=ALOHA_DIM,
    action_dim=ALOHA_DIM,
)
_LIBERO = Robot(
    name="libero",
    cameras={"base_0_rgb": "image", "left_wrist_0_rgb": "wrist_image"},
    state=("state",),
    actions=("actions",),
    state_dim=8,
    action_dim=7,
)
_DROID = Robot(
    name="droid",
    cameras={"base_0_rgb": "exterior_image_1_left", "left_wrist_0_rgb": "wrist_image_left"},
    state=("joint_position", "gripper_position"),
    actions=("actions",),
    state_dim=8,
    action_dim=8,
)

_PRESETS: dict[str, Robot] = {
    robot.name: robot
    for robot in (
        # The bimanual ALOHA with its three cameras, as in OpenPI's pi0_aloha_pen_uncap and its real-robot policies.
        _ALOHA,
        # gym-aloha and the LeRobot datasets made in it: one camera, absolute actions, as in OpenPI's pi0_aloha_sim.
        dataclasses.replace(
            _ALOHA,
            name="aloha_sim",
            cameras={"base_0_rgb": "observation.images.top"},
            delta=(),
            default_prompt="Transfer cube",
        ),
        # LIBERO as converted by OpenPI, for pi05_libero: its actions are taken as they are.
        _LIBERO,
        # The same data for pi0_libero, whose released weights expect the state subtracted once more.
        dataclasses.replace(_LIBERO, name="libero_delta", delta=(6, -1)),
        # DROID in LeRobot form with joint velocities, for pi0_droid, pi05_droid and fine-tunes of them.
        _DROID,
        # DROID with joint positions as actions, as in OpenPI's training on the full dataset.
        dataclasses.replace(_DROID, name="droid_joint_position", delta=(7, -1)),
        # The embedded tabletop, through its two cameras, and by the true positions of objects.
        Robot(
            name="tabletop",
            cameras={"base_0_rgb": "observation.images.overhead", "left_wrist_0_rgb": "observation.images.wrist"},
            state=("observation.state",),
            actions=("action",),
            state_dim=3,
            action_dim=3,
        ),
        Robot(
            name="tabletop_state",
            cameras={},
            state=("observation.state",),
            actions=("action",),
            state_dim=8,
            action_dim=3,
        ),
        # Meta-World: the state of its hand, and two cameras to see the objects with.
        Robot(
            name="metaworld",
            cameras={"base_0_rgb": "observation.images.corner", "left_wrist_0_rgb": "observation.images.gripper"},
            state=("observation.state",),
            actions=("action",),
            state_dim=4,
            action_dim=4,
        ),
    )
}


def list_robots() -> list[str]:
    return list(_PRESETS)


def get_robot(name: str) -> Robot:
    if name in _PRESETS:
        return _PRESETS[name]
    raise ConfigError(
        f"no robot preset is named {name!r}. {did_you_mean(name, _PRESETS)}Known: {', '.join(_PRESETS)}. "
        "Another robot is described by its cameras, state and actions."
    )


def load_robot(name: str) -> Robot:
    """A preset, a robot described in a JSON file, or that of an environment's adapter (`file.py:Class`)."""
    if name.endswith(".json"):
        try:
            file = Path(os.path.expanduser(name))
            if file.exists() and not file.is_file():
                raise ValueError("it is not a regular file")
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{name} cannot be read as a robot's description: {error}.") from error
        return Robot.from_dict(content)
    if ":" not in name:
        return get_robot(name)
    robot = getattr(load_named(name, "robot"), "robot", None)
    if not isinstance(robot, Robot):
        raise ConfigError(f"{name} has no class attribute robot, a pirl.data.Robot; it has {robot!r:.60}.")
    return robot
