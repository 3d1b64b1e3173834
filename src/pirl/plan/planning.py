"""Measurements, each made in a process of its own (JAX has to be started for the topology) and kept for the next time."""

import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pirl.config import RLTrainConfig, check_layout, format_config, to_plain
from pirl.data.robots import load_robot
from pirl.errors import TrainingError, UserError
from pirl.files import cache_directory, write_file
from pirl.plan.measuring import Measurement
from pirl.plan.topologies import Topology, check_topology, environment
from pirl.processes import exit_in_words, last_lines

Say = Callable[[str], None]
# What decides an update's program; where its data comes from, and how often it is made, does not.
_DECISIVE = ("model", "agent", "batch_size", "fsdp_devices")
_KILLED = -9


def plan_run(config: RLTrainConfig, topology: Topology, say: Say, *, fresh: bool = False) -> Measurement:
    """What a run needs on a topology: from the cache, unless `fresh`, or compiled now, which takes minutes."""
    if not topology.here:  # how many devices those are, is known where JAX runs
        check_layout(config, topology.count)
    file = cache_directory() / "plans" / f"{cache_key(config, topology)}.json"
    if not fresh and not topology.here and file.is_file():
        say("was compiled before")
        return _on(topology, Measurement.from_plain(json.loads(file.read_text())))
    check_topology(topology)
    answer = _compile_apart(config, topology, say)
    if not topology.here:
        write_file(file, answer)
    return Measurement.from_plain(json.loads(answer))


def _on(topology: Topology, measured: Measurement) -> Measurement:
    """What was compiled for simulated devices holds for all chips that they stand in for."""
    chip = topology.chip
    return (
        replace(measured, topology=topology.name, kind=chip.kind, memory=chip.memory)
        if topology.simulated
        else measured
    )


def cache_key(config: RLTrainConfig, topology: Topology) -> str:
    """The same for what compiles to the same: configuration, devices, versions, and pirl's own sources."""
    plain, target = to_plain(config), f"{topology.count} simulated" if topology.simulated else topology.name
    facts = {name: plain[name] for name in _DECISIVE} | {"name": config.name}
    facts |= {"robot": load_robot(config.data.robot).to_dict()}
    facts |= {"limit": config.health.loss_limit, "compiled_for": target}
    facts |= {"versions": _versions(), "sources": _sources()}
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _compile_apart(config: RLTrainConfig, topology: Topology, say: Say) -> str:
    """Ask another process, and tell what it says meanwhile; the answer is JSON."""
    with tempfile.TemporaryDirectory(prefix="pirl-plan-") as place:
        directory = Path(place)
        (directory / "config.yaml").write_text(format_config(config))
        log, answer = directory / "log", directory / "answer.json"
        command = [sys.executable, "-m", "pirl.plan.apart", topology.name, place]
        with (
            log.open("wb") as errors,
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # nothing is written: when it closes, nobody waits any more
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment(topology)},
                text=True,
            ) as process,
        ):
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    say(line.rstrip())
            finally:
                if sys.exc_info()[0] is not None:
                    process.kill()
        if answer.is_file():
            return answer.read_text()
        if process.returncode == UserError.exit_code:
            raise UserError((directory / "refusal").read_text())
        why = "most likely, this machine has too little memory for the compiler"
        said = why if process.returncode == _KILLED else " ".join(last_lines(log, 3))
        raise TrainingError(f"{topology.name}: the compiler gave up ({exit_in_words(process.returncode)}): {said}.")


def _versions() -> dict[str, str]:
    found = {}
    for name in ("jax", "jaxlib", "libtpu", "optax", "flax"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def _sources() -> str:
    digest = hashlib.blake2b(digest_size=16)
    root = Path(__file__).parents[1]
    for part in ("agents", "config", "data", "models", "plan", "training"):
        for file in sorted((root / part).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
