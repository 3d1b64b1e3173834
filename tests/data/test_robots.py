"""Robots are described once, by preset or by configuration, and a description that cannot work is refused."""

import json
import sys

import numpy as np
import pytest

from golden import arrays, needs_golden
from pirl.data.robots import Robot, get_robot, list_robots, load_robot
from pirl.errors import ConfigError
from pirl.models.config import OPENPI_CAMERAS

CUSTOM = {
    "name": "my_arm",
    "cameras": {"base_0_rgb": "observation.images.front"},
    "state": ["observation.joints", "observation.gripper"],
    "actions": ["action"],
    "delta": [6, -1],
    "default_prompt": "tidy up",
    "state_dim": 7,
}


def test_a_robot_survives_the_way_through_json():
    for name in list_robots():
        robot = get_robot(name)
        assert robot.name == name
        assert Robot.from_dict(json.loads(json.dumps(robot.to_dict()))) == robot


def test_a_robot_can_be_written_in_a_configuration_file():
    robot = Robot.from_dict(json.loads(json.dumps(CUSTOM)))
    assert robot == Robot(
        name="my_arm",
        cameras={"base_0_rgb": "observation.images.front"},
        state=("observation.joints", "observation.gripper"),
        actions=("action",),
        delta=(6, -1),
        default_prompt="tidy up",
        state_dim=7,
    )


@needs_golden
@pytest.mark.parametrize(("name", "recording"), [("aloha_sim", "pi0_aloha_sim"), ("libero", "pi05_libero")])
def test_presets_name_the_columns_of_openpi_datasets(name, recording):
    columns = {
        key.removeprefix("train_raw/") for key in arrays("e2e", f"{recording}.npz") if key.startswith("train_raw/")
    }
    robot = get_robot(name)
    assert {*robot.cameras.values(), *robot.state, *robot.actions} == columns


@needs_golden
def test_droid_presets_name_the_columns_of_openpi_datasets():
    given = "droid_pi0/in/"
    recorded = arrays("transforms", "libero_droid.npz")
    columns = {key.removeprefix(given).split("|")[-1] for key in recorded if key.startswith(given)}
    robot = get_robot("droid")
    assert {*robot.cameras.values(), *robot.state, *robot.actions} == columns
    state = np.concatenate([recorded[f"{given}observation|{column}"] for column in robot.state])
    np.testing.assert_array_equal(state, recorded["droid_pi0/out/state"])


@pytest.mark.parametrize(
    ("name", "relative", "flipped"),
    [
        ("aloha", [*range(6), *range(7, 13)], [1, 2, 8, 9]),
        ("aloha_sim", [], [1, 2, 8, 9]),
        ("libero", [], []),
        ("libero_delta", range(6), []),
        ("droid", [], []),
        ("droid_joint_position", range(7), []),
    ],
)
def test_presets_treat_each_dimension_as_openpi_does(name, relative, flipped):
    """Which actions move against the state, and which are turned round; grippers of ALOHA have a test of their own."""
    robot = get_robot(name)
    transforms = robot.transforms()

    def converted(state, actions):
        data = {"state": np.full(robot.state_dim, state), "actions": np.full((2, robot.action_dim), actions)}
        return transforms(data)["actions"][1]

    against_state = converted(0.5, 0.25) - converted(0.75, 0.25)
    assert np.flatnonzero(against_state).tolist() == list(relative)
    # Without the chunk's state nothing is relative.
    absolute = robot.joint_transforms()({"actions": np.full((2, robot.action_dim), 0.25)})["actions"][1]
    np.testing.assert_array_equal(converted(0.0, 0.25), absolute)
    by_action = converted(0.5, 0.5) - converted(0.5, 0.25)
    assert np.flatnonzero(by_action < 0).tolist() == flipped
    assert set(robot.cameras) <= set(OPENPI_CAMERAS)


@pytest.mark.usefixtures("unchecked_signatures")
def test_a_description_that_cannot_work_is_refused():
    for changes, message in (
        ({"camera": {}}, "unknown field 'camera'. Did you mean cameras"),
        ({"delta": "6,-1"}, "delta should be a list of whole numbers"),
        ({"delta": [6, True]}, "delta should be a list of whole numbers"),
        ({"cameras": ["front"]}, "cameras should be a mapping"),
        ({"state": "observation.state"}, "state should be a list of texts"),
        ({"state_dim": "7"}, "state_dim should be a whole number or none"),
        ({"adapt": "alhoa"}, "adapt should be none or aloha"),
        ({"actions": []}, "actions names no dataset column"),
        ({"action_dim": 0}, "action_dim = 0 must be positive"),
        ({"action_dim": 6}, r"delta = \(6, -1\) needs 7 dimensions, but action_dim = 6"),
        ({"adapt": "aloha"}, "'aloha' is for 14 dimensions, but state_dim = 7"),
    ):
        with pytest.raises(ConfigError, match=f"robot 'my_arm'.*{message}"):
            Robot.from_dict(CUSTOM | changes)


def test_what_is_missing_is_named():
    with pytest.raises(ConfigError, match="robot 'arm' lacks cameras, state"):
        Robot.from_dict({"name": "arm", "actions": ["action"]})
    with pytest.raises(ConfigError, match="described by a mapping"):
        Robot.from_dict(["arm"])
    with pytest.raises(ConfigError, match="'lbero'. Did you mean libero.*Known: aloha, aloha_sim, libero"):
        get_robot("lbero")


def test_a_robot_may_be_that_of_a_class_and_what_has_none_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "robots_of_classes.py"
    file.write_text(
        "from pirl.data.robots import get_robot\nclass Arm:\n    robot = get_robot('libero')\nclass Other:\n    pass\n"
    )
    assert load_robot(f"{file}:Arm") is get_robot("libero")
    with pytest.raises(ConfigError, match="Other has no class attribute robot, a pirl.data.Robot; it has None"):
        load_robot(f"{file}:Other")
    with pytest.raises(ConfigError, match=r"has no class 'Amr'. Did you mean Arm\? It has Arm, Other\."):
        load_robot(f"{file}:Amr")
    with pytest.raises(ConfigError, match="there is no robot file"):
        load_robot(f"{tmp_path}/absent.py:Arm")
    del sys.modules["robots_of_classes"]
