"""RIPT in the real simulators by the real command, in the slow target: physics and pictures in, updates out."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from pirl.interop import NormStats, save_policy
from pirl.models import Pi0Config, create_model, get_model_config

pytestmark = pytest.mark.slow
needs_aloha = pytest.mark.skipif(
    importlib.util.find_spec("gym_aloha") is None, reason="gym-aloha is not installed (make setup-aloha)"
)
needs_libero = pytest.mark.skipif(
    importlib.util.find_spec("libero") is None, reason="hf-libero is not installed (make setup-libero)"
)
GROUPS, ATTEMPTS, STEPS = 2, 4, 10
ALOHA = replace(get_model_config("tiny"), action_dim=14, cameras=("base_0_rgb",))
ALOHA_OPTIONS = ("--model.action-dim", 14, "--model.cameras", "base_0_rgb", "--env.height", 56, "--env.width", 56)
LIBERO = get_model_config("tiny")
LIBERO_OPTIONS = (
    "--env.resolution",
    56,
    "--env.quality",
    "fast",
    "--env.settle-steps",
    2,
    "--env.suite",
    "libero_goal",
)
# About the pose in which ALOHA begins.
ALOHA_REST = np.array([0, -0.96, 1.16, 0, -0.3, 0, 0.5] * 2)


def start_policy(path: Path, config: Pi0Config, state: np.ndarray, actions: np.ndarray) -> Path:
    """A policy that knows nothing, and moves a little about these actions."""
    stats = {key: NormStats(mean, np.full(len(mean), 0.1)) for key, mean in (("state", state), ("actions", actions))}
    return save_policy(path, create_model(config, jax.random.key(0)), norm_stats={"start": stats})


def practise(preset: str, checkpoint: Path, *options: object, steps: int = STEPS) -> tuple[Path, str]:
    """One iteration, in a process of its own; where the run is, and what it said."""
    command = [sys.executable, "-m", "pirl.cli.main", "train", preset, "--exp-name", "run"]
    command += ["--checkpoint", str(checkpoint), "--model.preset", "tiny", "--batch-size", "8"]
    command += ["--rollout.iterations", "1", "--rollout.groups", str(GROUPS), "--rollout.attempts", str(ATTEMPTS)]
    command += ["--evaluation.every", "0", "--evaluation.execute-steps", "5", "--evaluation.envs", "2"]
    command += ["--checkpoints.best-metric", "none", "--checkpoints.every", "1", "--rollout.videos-every", "0"]
    command += ["--logging.every", "1", "--logging.tensorboard", "false", "--env.max-steps", str(steps)]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, *map(str, options)],
        cwd=checkpoint.parent,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return checkpoint.parent / "runs" / "run", done.stdout + done.stderr


def metrics_of(run: Path) -> dict[str, float]:
    """The last value of each metric."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {name: value for line in lines for name, value in line.items()}


def assert_one_iteration_with_updates(run: Path) -> None:
    metrics = metrics_of(run)
    assert metrics["rollout/groups"] == GROUPS
    assert 0 < metrics["rollout/success_kept"] < 1
    assert metrics["rollout/lost"] == 0
    assert metrics["step"] > 0
    assert math.isfinite(metrics["loss"])
    assert 0 < metrics["rollout/drift"] < 1
    assert (run / "checkpoints" / str(metrics["step"]) / "params").is_dir()


def assert_every_attempt_lasts(run: Path) -> None:
    """To its end; and so does the one with which each kept state is tried again."""
    metrics = metrics_of(run)
    assert metrics["rollout/env_steps"] == (metrics["rollout/contexts"] * ATTEMPTS + GROUPS) * STEPS


@needs_aloha
def test_an_iteration_in_aloha_learns_from_its_attempts(tmp_path: Path) -> None:
    checkpoint = start_policy(tmp_path / "start", ALOHA, ALOHA_REST, ALOHA_REST)
    run, _ = practise("aloha_ript", checkpoint, *ALOHA_OPTIONS, "--env.id", "judged_envs:test/JudgedAloha-v0")
    assert_one_iteration_with_updates(run)
    assert_every_attempt_lasts(run)


@needs_aloha
def test_where_nothing_succeeds_the_iteration_ends_without_an_update_and_says_so(tmp_path: Path) -> None:
    checkpoint = start_policy(tmp_path / "start", ALOHA, ALOHA_REST, ALOHA_REST)
    run, said = practise("aloha_ript", checkpoint, *ALOHA_OPTIONS, "--rollout.budget", 2)
    assert "2 initial states were tried and 0 of 2 groups found" in " ".join(said.split())
    metrics = metrics_of(run)
    assert metrics["rollout/success"] == 0
    assert metrics["rollout/env_steps"] == 2 * ATTEMPTS * STEPS
    assert "loss" not in metrics


@needs_libero
def test_an_iteration_in_libero_learns_from_its_attempts(tmp_path: Path, libero_assets: Path) -> None:
    checkpoint = start_policy(tmp_path / "start", LIBERO, np.zeros(8), np.zeros(7))
    chance = ("--env.id", "judged_envs:test/JudgedLibero-v0", "--env.assets", libero_assets)
    # Only the first initial states of one task after the other: loading another task takes seconds.
    run, _ = practise("libero_ript", checkpoint, *LIBERO_OPTIONS, *chance, "--rollout.curriculum.initial-states", 1)
    assert_one_iteration_with_updates(run)
    assert_every_attempt_lasts(run)
