"""Runs of `pirl train` for tests: in processes of their own, and what they leave behind."""

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

# RIPT's demo where everything is small and chance decides: what has to be said of it, as fields.
RIPT_TOY = {
    "env.id": "fair_env:test/Fair-v0",
    "model.action_horizon": 4,
    "agent.num_epochs": 2,
    "rollout.iterations": 4,
    "rollout.groups": 2,
    "rollout.attempts": 4,
    "rollout.budget": 8,
    "rollout.discount": 1.0,
    "evaluation.every": 0,
    "evaluation.execute_steps": 2,
    "evaluation.envs": 4,
    "checkpoints.every": 1,
    "checkpoints.max_to_keep": 2,
    "logging.every": 1,
    "logging.tensorboard": False,
    "health.min_success_ratio": 0.0,
    "batch_size": 8,
}


def once(path: Path, make) -> Path:
    """Make a directory if no other worker has."""
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            make(path)
    return path


def pirl_command(*arguments, check: bool = True, **environment) -> subprocess.CompletedProcess[str]:
    """Call pirl in a process of its own."""
    command = [sys.executable, "-m", "pirl.cli.main", *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert not check or done.returncode == 0, done.stderr
    return done


# One device, quickly compiled.
QUICK = {"XLA_FLAGS": " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)}


def start(run: Path, caches: Path, preset: str, program, *options, **environment) -> subprocess.Popen[str]:
    """`pirl train` in a process of its own."""
    place = ("--exp-name", run.name, "--runs-dir", run.parent)
    command = [sys.executable, *program, "train", preset, *place, *options]
    settings = {"PIRL_CACHE": str(caches / "cache"), "JAX_COMPILATION_CACHE_DIR": str(caches / "compiled")}
    settings["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # all that is compiled is kept
    settings = {**os.environ, **settings, **environment}
    return subprocess.Popen(list(map(str, command)), env=settings, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code, and what it said."""
    _, said = process.communicate(timeout=600)
    assert "Traceback" not in said, said
    return process.returncode, said


def kill_when(process: subprocess.Popen[str], condition, delay: float = 0.0) -> None:
    """Kill it once it is so, unless it has ended."""
    while process.poll() is None and not condition():
        time.sleep(0.002)
    time.sleep(delay)
    process.kill()
    finish(process)


def lines_in(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def read_metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def values_of(run: Path, name: str) -> dict[int, float]:
    """A metric by step."""
    return {line["step"]: line[name] for line in read_metrics(run) if name in line}


def read_state(run: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, of the policy and of the rest of the state, read by Orbax alone."""
    import jax
    import orbax.checkpoint as ocp

    arrays = {}
    with ocp.PyTreeCheckpointer() as reader:
        for part in ("params", "train_state"):
            path = run / "checkpoints" / str(step) / part
            tree = reader.metadata(path).item_metadata.tree
            arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            arrays |= {part: reader.restore(path, restore_args=arguments)}
    return {jax.tree_util.keystr(place): leaf for place, leaf in jax.tree_util.tree_leaves_with_path(arrays)}


def assert_same_run(run: Path, reference: Path, step: int) -> None:
    """The same metrics and the same state, bit for bit."""
    assert (run / "metrics.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes()
    left, right = read_state(run, step), read_state(reference, step)
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.dtype == right[name].dtype
        assert array.tobytes() == right[name].tobytes(), name
