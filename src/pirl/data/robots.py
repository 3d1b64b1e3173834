"""How a robot's dataset and a policy fit together: which columns and cameras go where, and what its numbers mean."""

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from pirl.data.transforms import ALOHA_DIM, AlohaJoints, DeltaActions, Pipeline, make_mask
from pirl.errors import ConfigError, did_you_mean
from pirl.imports import load_named

Adapt = Literal["none", "aloha"]
_MOST_DIMENSIONS = 10_000


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
        def refuse(problem: str) -> ConfigError:
            return ConfigError(f"robot {self.name!r}: {problem}")

        if self.adapt not in get_args(Adapt):
            raise refuse(f"adapt = {self.adapt!r} is none of {', '.join(get_args(Adapt))}.")
        for field in ("state", "actions"):
            if not getattr(self, field):
                raise refuse(f"{field} names no dataset column; it needs at least one.")
        covered = sum(map(abs, self.delta))
        mask = make_mask(*self.delta) if covered <= _MOST_DIMENSIONS else ()
        needed = {"state_dim": max((dim + 1 for dim, relative in enumerate(mask) if relative), default=0)}
        if covered > _MOST_DIMENSIONS:
            raise refuse(f"delta = {self.delta!r:.60} covers more than {_MOST_DIMENSIONS} dimensions.")
        for field in ("state_dim", "action_dim"):
            dim = getattr(self, field)
            if dim is None:
                continue
            if dim < 1:
                raise refuse(f"{field} = {dim} must be positive.")
            if dim < needed.get(field, covered):
                raise refuse(
                    f"delta = {self.delta} needs {needed.get(field, covered)} dimensions, but {field} = {dim}."
                )
            if self.adapt == "aloha" and dim != ALOHA_DIM:
                raise refuse(f"adapt = 'aloha' is for {ALOHA_DIM} dimensions, but {field} = {dim}.")

    def transforms(self) -> Pipeline:
        """What its states and actions go through before they are normalised."""
        mask = make_mask(*self.delta)
        joints = self.joint_transforms()
        return Pipeline((*joints.transforms, DeltaActions(mask))) if any(mask) else joints

    def joint_transforms(self) -> Pipeline:
        """The part of it that sees each state and action by itself."""
        return Pipeline((AlohaJoints(),) if self.adapt == "aloha" else ())

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description, the inverse of `from_dict`."""
        described = dataclasses.asdict(self) | {"cameras": dict(self.cameras)}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in described.items()}

    @classmethod
    def from_dict(cls, data: Any) -> "Robot":
        """Read a robot from a configuration file; what is unknown, missing or of the wrong kind is named."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"a robot is described by a mapping; got {data!r:.60}.")
        where = f"robot {data['name']!r}" if "name" in data else "a robot's description"
        for key in data:
            if key not in _KINDS:
                raise ConfigError(f"{where} has an unknown field {key!r}. {_nearest(str(key), _KINDS)}")
        required = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
        if missing := [name for name in required if name not in data]:
            raise ConfigError(f"{where} lacks {', '.join(missing)}.")
        fields: dict[str, Any] = {}
        for key, value in data.items():
            fits, wanted = _KINDS[key]
            if not fits(value):
                raise ConfigError(f"{where}: {key} should be {wanted}; it is {value!r:.60}.")
            fields[key] = tuple(value) if isinstance(value, list) else value
        return cls(**fields)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any, kind: type) -> bool:
    # By type, because True counts as an int.
    return isinstance(value, list | tuple) and all(type(entry) is kind for entry in value)


# What a configuration file may say in each field.
_COLUMNS: tuple[Callable[[Any], bool], str] = (lambda value: _is_list(value, str), "a list of dataset columns")
_DIM: tuple[Callable[[Any], bool], str] = (lambda value: value is None or _is_list([value], int), "a number, or null")
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_is_text, "text"),
    "cameras": (
        lambda value: isinstance(value, Mapping) and _is_list([*value, *value.values()], str),
        "a mapping from camera slots to dataset features",
    ),
    "state": _COLUMNS,
    "actions": _COLUMNS,
    "delta": (lambda value: _is_list(value, int), "a list of numbers such as [6, -1]"),
    "adapt": (_is_text, "text"),
    "default_prompt": (lambda value: value is None or _is_text(value), "text, or null"),
    "state_dim": _DIM,
    "action_dim": _DIM,
}


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
        # The embedded tabletop, through its two cameras, and by the true places of things.
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
        # Meta-World: what its hand feels and sees; where things are has to be seen.
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
    """The names of the presets."""
    return list(_PRESETS)


def get_robot(name: str) -> Robot:
    """The preset of that name; an unknown one is answered with the nearest."""
    if name in _PRESETS:
        return _PRESETS[name]
    raise ConfigError(
        f"no robot preset is named {name!r}. {_nearest(name, _PRESETS)} "
        "Another robot is described by its cameras, state and actions."
    )


def load_robot(name: str) -> Robot:
    """A preset, a robot described in a JSON file, or that of an environment's adapter (`file.py:Class`)."""
    if not name.endswith(".json"):
        return _robot_of_class(name) if ":" in name else get_robot(name)
    try:
        file = Path(os.path.expanduser(name))
        if file.exists() and not file.is_file():
            raise ValueError("it is not a regular file")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be read as a robot's description: {error}.") from error
    return Robot.from_dict(content)


def _robot_of_class(name: str) -> Robot:
    robot = getattr(load_named(name, "robot"), "robot", None)
    if not isinstance(robot, Robot):
        raise ConfigError(f"{name} has no class attribute robot, a pirl.data.Robot; it has {robot!r:.60}.")
    return robot


def _nearest(name: str, known: Collection[str]) -> str:
    return f"{did_you_mean(name, known)}Known: {', '.join(known)}."
