"""Shared by the tests of commands: calling them, and a small policy for the tabletop."""

import io
import json
import shlex
import sys
from types import SimpleNamespace

import pytest

from pirl.cli.main import main


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Call pirl with a line, and more arguments; gives the exit code, and what was printed to both streams."""
    monkeypatch.setenv("PIRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments, answers=None):
        if answers is not None:
            monkeypatch.setattr("sys.stdin", io.StringIO(answers))
        with pytest.raises(SystemExit) as end:
            main([*shlex.split(arguments[0]), *map(str, arguments[1:])])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return end.value.code or 0, out, err

    return run


@pytest.fixture
def run(call, monkeypatch):
    """Commands on a built dataset; `train` sets everything up and compiles nothing: exit code, text, and the setup."""
    setups = []

    def dry_run(config):
        from pirl.training.setup import set_up

        setups.append(set_up(config))
        return 0

    monkeypatch.setitem(sys.modules, "pirl.training.dry_run", SimpleNamespace(dry_run=dry_run))

    def robot(built, **changes):
        """A robot that sees through the cameras of a dataset, as a file beside it."""
        cameras = dict(zip(("base_0_rgb", "left_wrist_0_rgb"), built.cameras, strict=False))
        described = {"name": "arm", "cameras": cameras, "state": [built.state_key], "actions": [built.action_key]}
        file = built.root.parent / "arm.json"
        file.write_text(json.dumps(described | changes))
        return file

    def train(built, *options, **changes):
        preset = ("demo_bc", "--exp-name", "x", "--env", "none", "--dry-run", "--data.repo-id", built.root)
        code, out, err = call("train", *preset, "--data.robot", robot(built, **changes), *options)
        return code, out + err, setups.pop() if code == 0 else None

    def data(command, built, *options):
        code, out, err = call("data", command, built.root, *options)
        return code, out + err

    return SimpleNamespace(train=train, data=data, call=call, robot=robot)


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    """A checkpoint of an untrained policy for the tabletop."""
    import jax
    import numpy as np

    from pirl.interop import NormStats, save_policy
    from pirl.models import create_model, get_model_config

    directory = tmp_path_factory.mktemp("policies") / "untrained"
    stats = {name: NormStats(np.zeros(3), np.full(3, 0.3)) for name in ("state", "actions")}
    model = create_model(get_model_config("tiny"), jax.random.key(0))
    save_policy(directory, model, norm_stats={"tabletop": stats})
    return directory


@pytest.fixture
def make_run(policy, tmp_path):
    """Make the directory of a run whose newest policy is the untrained one."""
    import dataclasses
    import shutil

    from pirl.config import format_config, get_config

    def make(name, env, execute_steps, denoising_steps=10):
        run = tmp_path / "runs" / name
        shutil.copytree(policy, run / "checkpoints" / "10")
        config = get_config("demo_bc")
        evaluation = dataclasses.replace(config.evaluation, execute_steps=execute_steps)
        agent = dataclasses.replace(config.agent, denoising_steps=denoising_steps)
        config = dataclasses.replace(config, env=env, evaluation=evaluation, agent=agent)
        (run / "config.yaml").write_text(format_config(config))
        return f"runs/{name}"

    return make
