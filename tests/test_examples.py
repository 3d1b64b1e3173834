"""The examples work: an environment of somebody else's runs through its adapter."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from pirl.envs import EnvConfig, ExpertConfig, RobotEnv, make_env
from pirl.envs.pool import open_pool
from pirl.envs.rollout import make_starts, roll_out

CUSTOM_ENV = Path(__file__).resolve().parents[1] / "examples" / "custom_env"
CONFIG = EnvConfig("point_reach:PointReach-v0", adapter="point_reach_adapter.py:PointReachAdapter")


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> RobotEnv:
    monkeypatch.chdir(CUSTOM_ENV)
    monkeypatch.syspath_prepend(str(CUSTOM_ENV))
    return make_env(CONFIG)


@pytest.mark.filterwarnings("ignore:.*WARN:UserWarning")
def test_gymnasiums_checker_accepts_the_adapted_environment(env: RobotEnv) -> None:
    check_env(env)


def test_observations_and_actions_are_translated(env: RobotEnv) -> None:
    observation, info = env.reset(seed=1)
    image, before = observation["observation.images.screen"], observation["observation.state"]
    assert image.shape == (48, 48, 3)
    assert image.dtype == np.uint8
    # A white square with a red point where the state says it is.
    assert np.median(image) == 255
    column, row = (before * 48).astype(int)
    assert image[row, column, 0] > 200 > 100 > image[row, column, 1]
    assert info["prompt"] == "bring the red point to the green disc"
    # An action of 1 is five centimetres, and so is one of 9.
    after = env.step(np.array([1.0, 9.0], np.float32))[0]["observation.state"]
    np.testing.assert_allclose(after - before, [0.05, 0.05], atol=1e-6)


def test_experts_roll_out_in_worker_processes_and_flaws_make_some_fail(env: RobotEnv) -> None:
    starts = make_starts(env.describe(), 12, seed=0, task=None)
    with open_pool(CONFIG, 2) as pool:
        best = list(roll_out(pool, ExpertConfig(), starts, execute_steps=5))
        flawed = list(roll_out(pool, ExpertConfig(aim_bias=0.1), starts, execute_steps=5))
    assert all(rollout.success and rollout.lost is None for rollout in best)
    assert 0 < sum(rollout.success for rollout in flawed) < 12
    assert all(rollout.truncated and len(rollout) == 60 for rollout in flawed if not rollout.success)


@pytest.mark.slow  # docs/guides/simulator.md takes the same way, and its commands are run with the others
def test_the_readmes_commands_work(tmp_path: Path) -> None:
    work = shutil.copytree(CUSTOM_ENV, tmp_path / "custom_env", ignore=shutil.ignore_patterns("__pycache__", "data"))
    (block,) = re.findall(r"```bash\n(.*?)```", (work / "README.md").read_text(), re.DOTALL)
    lines = block.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line) for line in lines if line and not line.startswith("#")]
    assert [command[1] for command in commands] == ["envs", "collect", "eval", "train", "eval"]
    said = []
    for _, *arguments in commands:
        program = [sys.executable, "-m", "pirl.cli.main", *arguments]
        done = subprocess.run(program, cwd=work, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert "100.0 %" in said[2]
    assert (work / "data" / "point_reach" / "meta" / "info.json").is_file()
    assert "as in runs/point: --env point_reach:PointReach-v0 --env.adapter" in said[4]
