"""A learner, a robot and an environment from outside the package: each in one file, none known to pirl."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from pirl.cli.main import main
from pirl.config import load_config
from pirl.data import Robot
from pirl.interop import open_checkpoint

ROOT = Path(__file__).parents[1]
ENV = ("--env.id", "point_reach:PointReach-v0", "--env.adapter", "point_reach_adapter.py:PointReachAdapter")
LEARNER = "absolute.py:AbsoluteConfig"


@pytest.fixture
def workplace(tmp_path, monkeypatch, fresh_modules):
    """The environment and its adapter, the learner of the guide, and a robot that goes by its state alone."""
    for file in (ROOT / "examples" / "custom_env").glob("*.py"):
        shutil.copy(file, tmp_path)
    guide = (ROOT / "docs" / "guides" / "own_learner.md").read_text()
    (tmp_path / "absolute.py").write_text(re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[0])
    robot = Robot(name="blind", cameras={}, state=("observation.state",), actions=("action",), delta=(2,))
    (tmp_path / "blind.json").write_text(json.dumps(robot.to_dict()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIRL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def pirl(*arguments: object) -> None:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert not end.value.code, arguments


@pytest.mark.usefixtures("one_device", "unchecked_signatures")  # which know pirl's own learners only
def test_what_pirl_does_not_know_is_trained_evaluated_and_resumed(workplace):
    pirl("collect", *ENV, "--policy", "expert", "--episodes", 4, "--out", "data", "--storage", "image")
    own = ("--data.repo-id", "data", *ENV, "--data.robot", "blind.json", "--agent", LEARNER)
    options = ("--agent.denoising-steps", 2, "--agent.optimizer.warmup-steps", 2, "--logging.tensorboard", "false")
    pirl("train", "demo_state_bc", "--exp-name", "mine", *own, *options, "--debug", "--steps", 4)
    pirl("train", "--exp-name", "mine", "--resume", "--steps", 6)
    pirl("eval", "runs/mine", "--episodes", 2, "--envs", 2, "--json", "success.json")

    config = load_config(Path("runs/mine/config.yaml"))
    assert type(config.agent).__name__ == "AbsoluteConfig"
    assert config.agent.denoising_steps == 2
    lines = [json.loads(line) for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert {1, 2, 3, 4, 5} <= losses.keys()
    assert np.isfinite(list(losses.values())).all()
    assert set(open_checkpoint(Path("runs/mine/checkpoints/6")).norm_stats()) == {"blind"}
    assert json.loads(Path("success.json").read_text())["summary"]["finished"] == 2
