"""LIBERO's simulator itself, in the slow target: equal to OpenPI's procedure."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fakes import assert_images_change_nothing
from pirl.envs.base import Start
from pirl.envs.libero.env import MAX_STEPS, REST, LiberoEnv, Simulation, robot_observation
from pirl.envs.libero.package import LiberoPackage, read_init_states
from pirl.errors import ConfigError, ObservationError

TASK = "put_the_bowl_on_the_plate"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libero") is None, reason="hf-libero is not installed"),
]


@pytest.fixture(scope="module")
def env(libero_assets: Path) -> Iterator[LiberoEnv]:
    env = LiberoEnv(assets=str(libero_assets), resolution=64, quality="fast")
    yield env
    env.close()


def actions(count: int, seed: int = 0) -> np.ndarray:
    """Motions that keep a direction for a while, in which the gripper closes and some keep their orientation."""
    motions = np.random.default_rng(seed).uniform(-1, 1, (count, 7)).astype(np.float32)
    motions[1::3, 3:6] = 0
    return motions


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_physics_goes_on_the_same_unseen(env: LiberoEnv) -> None:
    assert_images_change_nothing(env, Start(TASK, 7), actions(13))


def test_physics_and_images_are_those_of_openpis_procedure(libero_assets: Path) -> None:
    """Bit by bit: a scene loaded anew, an initial state, ten steps of rest, and actions, in LIBERO's own wrapper."""
    package = LiberoPackage()
    files = package.description_file("libero_goal", TASK), package.init_states_file("libero_goal", TASK)
    init_state = read_init_states(files[1])[3]
    ours = Simulation(package, libero_assets, files[0], 128, "stock")
    ours.reset(5, init_state, 0)  # an episode before the one that counts
    for action in actions(3, seed=1):
        ours.step(action.astype(np.float64))
    ours.reset(3, init_state, 0)
    theirs = package.wrapper.OffScreenRenderEnv(bddl_file_name=str(files[0]), camera_heights=128, camera_widths=128)
    np.random.seed(3)
    theirs.env.reset()
    expected, observed = robot_observation(theirs.set_init_state(init_state)), robot_observation(ours.observe())
    assert_same(observed, expected)
    for action in [*[REST] * 10, *actions(10)]:
        raw, _, done, _ = theirs.step(action)
        assert ours.step(action.astype(np.float64)) == done
        np.testing.assert_array_equal(ours.data.qpos, theirs.sim.data.qpos)
        np.testing.assert_array_equal(ours.data.qvel, theirs.sim.data.qvel)
        # Theirs is one physics step old; a joint moves by less than 2 rad/s.
        np.testing.assert_allclose(
            robot_observation(ours.observe())["state"], robot_observation(raw)["state"], atol=2e-2
        )
    theirs.close()
    ours.close()


def test_gymnasium_accepts_it(env: LiberoEnv) -> None:
    from gymnasium.utils.env_checker import check_env

    env.max_steps = 5
    check_env(env)
    env.max_steps = MAX_STEPS["libero_goal"]


def test_the_same_seed_gives_the_same_episode(env: LiberoEnv, libero_assets: Path) -> None:
    def episode(env: LiberoEnv, seed: int) -> list[dict[str, np.ndarray]]:
        first, info = env.reset(seed=seed, options={"task": TASK})
        assert info == {"prompt": "put the bowl on the plate", "task": TASK, "success": False}
        return [first, *(env.step(action)[0] for action in actions(6))]

    other = LiberoEnv(assets=str(libero_assets), resolution=64, quality="fast")
    before = np.random.get_state()[1].copy()
    episodes = [episode(env, 7), episode(env, 8), episode(env, 7), episode(other, 7)]
    np.testing.assert_array_equal(np.random.get_state()[1], before)
    other.close()
    for index in (2, 3):
        for one, another in zip(episodes[0], episodes[index], strict=True):
            assert_same(one, another)
    assert (episodes[0][0]["state"] != episodes[1][0]["state"]).any()


def test_success_is_rewarded_and_ends_the_episode(env: LiberoEnv) -> None:
    """The stove is on when its knob is turned beyond half a radian: so we turn it."""
    task = "turn_on_the_stove"
    env.reset(seed=0, options={"task": task})
    assert env.step(REST)[1:3] == (0.0, False)
    simulation = env.simulation
    knob = next(joint for joint in range(simulation.model.njnt) if "flat_stove" in simulation.model.joint(joint).name)
    simulation.data.qpos[simulation.model.jnt_qposadr[knob]] = 1.0
    dark = env.render().astype(int)
    _, reward, terminated, truncated, info = env.step(REST)
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    # The burner of a stove that is on glows.
    glow = env.render().astype(int) - dark
    assert (glow[..., 0] > 20).sum() >= 5


def test_bad_input_to_the_simulator_is_named(env: LiberoEnv, unchecked_signatures: None) -> None:
    env.reset(seed=0, options={"task": TASK})
    for action in (np.zeros(6), np.full(7, np.nan)):
        with pytest.raises(ObservationError, match="7 finite numbers"):
            env.step(action)
    with pytest.raises(ConfigError, match="no task 'fly'; it has 'open_the_middle_drawer"):
        env.reset(options={"task": "fly"})


def test_a_missing_asset_is_named(libero_assets: Path, tmp_path: Path) -> None:
    shutil.copytree(libero_assets, tmp_path / "assets", symlinks=True)
    for pattern in ("stable_scanned_objects/plate/plate.xml", "stable_scanned_objects/plate/**/*.png"):
        removed = next((tmp_path / "assets").glob(pattern))
        removed.rename(tmp_path / "aside")
        env = LiberoEnv(assets=str(tmp_path / "assets"), resolution=64)
        with pytest.raises(ConfigError, match=f"{removed.name}.*hf download"):
            env.reset(seed=0, options={"task": TASK})
        (tmp_path / "aside").rename(removed)


def test_it_is_quiet_and_asks_nothing(libero_assets: Path, tmp_path: Path) -> None:
    code = (
        "from pirl.envs.libero.env import LiberoEnv\n"
        f"env = LiberoEnv(assets={str(libero_assets)!r}, resolution=32, suite='libero_object')\n"
        "env.reset(seed=0, options={'task': env.tasks[0]})\n"
        "env.step(env.action_space.sample())\n"
        "import sys; assert 'torch' not in sys.modules\n"
    )
    variables = os.environ | {"HOME": str(tmp_path), "PIRL_CACHE": str(tmp_path / "cache")}
    variables.pop("LIBERO_CONFIG_PATH", None)
    ran = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=variables
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert not (tmp_path / ".libero").exists()
