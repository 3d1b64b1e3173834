"""LIBERO without its simulator: OpenPI's conventions on recorded observations, the package, its assets, its pickles."""

import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from pirl.envs.libero.env import LiberoEnv, axis_angle, robot_observation
from pirl.envs.libero.package import LiberoPackage, find_assets, read_init_states, task_prompt
from pirl.errors import ConfigError, DataError

RECORDING = Path(__file__).parents[1] / "fixtures" / "libero_observation.npz"


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    """Three observations of LIBERO's own simulator and cameras: see fixtures/make_libero.py."""
    with np.load(RECORDING) as file:
        return dict(file)


def raw_observations(recorded: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    return [{key: values[index] for key, values in recorded.items()} for index in range(3)]


# --- what a policy sees ----------------------------------------------------------------------------------------------


def test_images_are_turned_by_180_degrees(recorded: dict[str, np.ndarray]) -> None:
    for raw in raw_observations(recorded):
        observation = robot_observation(raw)
        np.testing.assert_array_equal(observation["image"], np.rot90(raw["agentview_image"], 2))
        np.testing.assert_array_equal(observation["wrist_image"], np.rot90(raw["robot0_eye_in_hand_image"], 2))


def test_state_is_position_axis_angle_and_fingers(recorded: dict[str, np.ndarray]) -> None:
    for raw in raw_observations(recorded):
        state = robot_observation(raw)["state"]
        np.testing.assert_array_equal(state[:3], raw["robot0_eef_pos"].astype(np.float32))
        # robosuite's own conversion was recorded beside the quaternion.
        np.testing.assert_allclose(state[3:6], raw["axis_angle"], rtol=1e-6)
        np.testing.assert_array_equal(state[6:], raw["robot0_gripper_qpos"].astype(np.float32))


components = st.floats(-1, 1, allow_subnormal=False)


# OpenPI's formula divides by √(1 - w²), whose relative error is about ε / (1 - w²): close to w = -1, where the angle is
# 2π and not 0, the axis is lost. So the vector is 0.001 long at least, which leaves an error of about 1e-9.
@given(st.tuples(components, components, components, components).filter(lambda q: np.linalg.norm(q) > 0.1))
def test_axis_angle_is_the_same_rotation(quaternion: tuple[float, ...]) -> None:
    unit = np.array(quaternion) / np.linalg.norm(quaternion)
    assume(np.linalg.norm(unit[:3]) > 1e-3)
    angle = axis_angle(unit)
    expected = Rotation.from_quat(unit).as_matrix()
    np.testing.assert_allclose(Rotation.from_rotvec(angle).as_matrix(), expected, atol=1e-8)
    assert np.linalg.norm(angle) <= 2 * np.pi + 1e-8


@pytest.mark.parametrize("w", [1.0, -1 - 1e-12, 1.001])
def test_a_quaternion_without_a_rotation_has_no_angle(w: float) -> None:
    np.testing.assert_array_equal(axis_angle(np.array([1e-9, -2e-9, 0.0, w])), np.zeros(3))


# --- the package and its assets, without the simulator ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "prompt"),
    [
        ("put_the_wine_bottle_on_the_rack", "put the wine bottle on the rack"),
        ("KITCHEN_SCENE10_close_the_top_drawer_of_the_cabinet", "close the top drawer of the cabinet"),
        ("LIVING_ROOM_SCENE2_put_both_the_cream_cheese_box_in_it", "put both the cream cheese box in it"),
    ],
)
def test_prompts_are_task_names_in_words(task: str, prompt: str) -> None:
    assert task_prompt(task) == prompt


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that behaves as LIBERO does when it is imported, in a home of its own."""
    root = tmp_path / "packages" / "libero" / "libero"
    (root / "envs").mkdir(parents=True)
    (root / "benchmark").mkdir()
    (root.parent / "__init__.py").touch()
    (root / "__init__.py").write_text(
        "import json, os\n"
        "folder = os.environ.get('LIBERO_CONFIG_PATH', os.path.expanduser('~/.libero'))\n"
        "os.makedirs(folder, exist_ok=True)\n"
        "if not os.path.exists(folder + '/config.yaml'):\n"
        "    input('Do you want to specify a custom path for the dataset folder? (Y/N): ')\n"
        "paths = json.load(open(folder + '/config.yaml'))\n"
        "get_libero_path = paths.get\n"
    )
    (root / "envs" / "__init__.py").touch()
    (root / "envs" / "env_wrapper.py").write_text("import logging\nlogging.FileHandler('/no/such/folder/a.log')\n")
    (root / "benchmark" / "__init__.py").write_text("raise ImportError('torch')\n")
    (root / "benchmark" / "libero_suite_task_map.py").write_text("libero_task_map = {'libero_10': ['b', 'a']}\n")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIRL_CACHE", str(tmp_path / "cache"))
    for name in ("LIBERO_CONFIG_PATH", "PIRL_LIBERO_ASSETS"):
        monkeypatch.delenv(name, raising=False)
    installed = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "libero"}
    yield root
    for name in [name for name in sys.modules if name.partition(".")[0] == "libero"]:
        del sys.modules[name]
    sys.modules.update(installed)


def test_the_package_is_imported_without_a_question_and_without_traces(stand_in: Path, tmp_path: Path) -> None:
    package = LiberoPackage()
    assert package.root == stand_in
    assert package.tasks("libero_10") == ("b", "a")
    assert package.description_file("libero_10", "b") == stand_in / "bddl_files" / "libero_10" / "b.bddl"
    assert package.init_states_file("libero_10", "b") == stand_in / "init_files" / "libero_10" / "b.pruned_init"
    assert not (tmp_path / "home").exists()
    assert "LIBERO_CONFIG_PATH" not in os.environ


def test_the_users_configuration_is_respected(stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "mine"))
    with pytest.raises(ConfigError, match=r"mine has no config.yaml. Unset"):
        LiberoPackage()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text('{"bddl_files": "/my/tasks"}')
    assert LiberoPackage().description_file("libero_10", "b") == Path("/my/tasks/libero_10/b.bddl")
    assert not (tmp_path / "cache").exists()


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libero", None)
    with pytest.raises(ConfigError, match=r"not installed.*pip install 'pirl\[libero\]'"):
        LiberoEnv()


def test_assets_are_looked_for_where_the_user_says_first(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / "option", tmp_path / "variable", stand_in / "assets", tmp_path / "home/.cache/libero/assets"]
    for place in places:
        (place / "scenes").mkdir(parents=True)
    monkeypatch.setenv("PIRL_LIBERO_ASSETS", str(places[1]))
    assert find_assets(str(places[0]), stand_in) == places[0]
    assert find_assets(None, stand_in) == places[1]
    monkeypatch.delenv("PIRL_LIBERO_ASSETS")
    assert find_assets(None, stand_in) == places[2]
    shutil.rmtree(places[2])
    assert find_assets(None, stand_in) == places[3]
    shutil.rmtree(places[3])
    with pytest.raises(ConfigError, match=r"neither in .*libero/assets nor in .*hf download.*--env.assets"):
        find_assets(None, stand_in)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"suite": "libero_100"}, "suite = 'libero_100' is none of libero_spatial"),
        ({"quality": "best"}, "quality = 'best' is none of fast, stock"),
        ({"resolution": 0}, "resolution = 0"),
        ({"resolution": 10**5}, "resolution = 100000"),
        ({"max_steps": 0}, "max_steps = 0"),
        ({"settle_steps": -1}, "settle_steps = -1"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], named: str, unchecked_signatures: None) -> None:
    with pytest.raises(ConfigError, match=named):
        LiberoEnv(**options)


# --- initial states --------------------------------------------------------------------------------------------------

STATES = np.random.default_rng(0).normal(size=(5, 7))


def save(path: Path, content: bytes, name: str = "archive/data.pkl") -> Path:
    """A file such as `torch.save` writes: an archive, not compressed, of a pickle in protocol 2 and a version."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
        archive.writestr("archive/version", "3\n")
    return path


def saved(path: Path, value: Any) -> Path:
    return save(path, pickle.dumps(value, protocol=2))


def old_numpy(content: bytes) -> bytes:
    """As numpy 1 wrote it, which is what LIBERO ships."""
    return content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


@pytest.mark.parametrize("array", [STATES, np.asfortranarray(STATES)], ids=["rows", "columns"])
def test_states_are_read_exactly(tmp_path: Path, array: np.ndarray) -> None:
    content = pickle.dumps(array, protocol=2)
    assert b"numpy._core.multiarray" in content
    for number, written in enumerate((content, old_numpy(content))):
        read = read_init_states(save(tmp_path / f"{number}.pruned_init", written))
        np.testing.assert_array_equal(read, array)
        assert read.dtype == np.float64
        read[0, 0] = 1.0  # it can be written to


class Malicious:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def touch(path: str) -> None:
    Path(path).touch()


@pytest.mark.parametrize(
    ("function", "named"),
    [(touch, "test_libero.touch"), (exec, r"__builtin__\.exec"), (eval, r"__builtin__\.eval")],
    ids=["function", "exec", "eval"],
)
def test_code_in_a_pickle_is_not_run_but_named(tmp_path: Path, function: Any, named: str) -> None:
    victim = tmp_path / "victim"
    argument = str(victim) if function is touch else f"open({str(victim)!r}, 'w')"
    for number, value in enumerate((Malicious(function, argument), [STATES, Malicious(function, argument)])):
        path = saved(tmp_path / f"{number}.pruned_init", value)
        with pytest.raises(DataError, match=f"{number}.pruned_init wants to call .*{named}"):
            read_init_states(path)
        assert not victim.exists()
    # The file does what it was made for where nothing stops it.
    pickle.loads(pickle.dumps(Malicious(function, argument), protocol=2))
    assert victim.exists()


def test_what_is_allowed_calls_nothing_else(tmp_path: Path) -> None:
    """The few names that are allowed cannot be combined into more: codecs, object arrays, attributes of modules."""
    import _codecs

    for number, value in enumerate(
        (Malicious(_codecs.encode, "abc", "hex"), np.array([[STATES, None]], object), np.ndarray, np.dtype("f8"))
    ):
        with pytest.raises(DataError, match=f"{number}.pruned_init"):
            read_init_states(saved(tmp_path / f"{number}.pruned_init", value))
    with pytest.raises(DataError, match=r"wants to call numpy.ndarray.tofile"):
        read_init_states(save(tmp_path / "dotted.pruned_init", b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93."))


@pytest.mark.parametrize(
    "value",
    [STATES.astype(np.float32), STATES[0], STATES[None], np.arange(4).reshape(2, 2), [1.0], None],
    ids=["float32", "one dimension", "three dimensions", "integers", "list", "nothing"],
)
def test_anything_but_a_table_of_numbers_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(DataError, match="file.pruned_init is damaged, or not initial states"):
        read_init_states(saved(tmp_path / "file.pruned_init", value))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_a_file_cut_short_is_named(tmp_path: Path, data: st.DataObject) -> None:
    whole = saved(tmp_path / "whole", STATES).read_bytes()
    path = tmp_path / "cut.pruned_init"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(DataError, match="cut.pruned_init is damaged"):
        read_init_states(path)


def test_a_file_that_is_missing_or_something_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing.pruned_init does not exist"):
        read_init_states(tmp_path / "nothing.pruned_init")
    (tmp_path / "legacy.pruned_init").write_bytes(pickle.dumps(STATES, protocol=2))
    with pytest.raises(DataError, match="legacy.pruned_init is damaged"):
        read_init_states(tmp_path / "legacy.pruned_init")
    with pytest.raises(DataError, match="other.pruned_init is damaged"):
        read_init_states(save(tmp_path / "other.pruned_init", b"", name="archive/other.pkl"))


def test_every_file_of_libero_reads_as_with_torch() -> None:
    pytest.importorskip("libero", reason="hf-libero is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    folder = LiberoPackage().root / "init_files"
    files = sorted(folder.glob("*/*.pruned_init"))
    assert {path.parent.name for path in files} >= {"libero_spatial", "libero_object", "libero_goal", "libero_10"}
    assert len(files) >= 130
    for path in files:
        np.testing.assert_array_equal(read_init_states(path), torch.load(path, weights_only=False))
