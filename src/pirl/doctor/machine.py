"""The machine: cores, memory, open files, and the devices that JAX computes on."""

import os
import resource
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pirl.doctor.findings import Finding
from pirl.doctor.probes import Answer
from pirl.memory import machine_memory, read_host
from pirl.processes import usable_cores
from pirl.words import size

# A checkpoint is many files at once, and so is a dataset of many cameras.
FEWEST_OPEN_FILES = 1024
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def examine_machine() -> Iterator[Finding]:
    """Cores, memory and how many files may be open."""
    yield Finding("machine", "cores", "good", _cores())
    yield Finding("machine", "memory", "good", _memory())
    yield examine_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def _cores() -> str:
    total = os.cpu_count() or 1
    usable = usable_cores()
    words = f"{usable}" if usable == total else f"{usable} of {total}"
    quota = _read(_CONTROL_GROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        words += f"; the container may use {int(quota[0]) / int(quota[1]):.1f}"
    return words


def _memory() -> str:
    host, machine = read_host(), machine_memory()
    words = size(machine)
    if host.available is not None:
        words += f", {size(host.available)} available"
    if host.total is not None and host.total < machine:
        words += f"; the container may use {size(host.total)}"
    return words


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def examine_open_files(soft: int, hard: int) -> Finding:
    """How many files a process may have open, given both limits."""
    unlimited = resource.RLIM_INFINITY
    words = "no limit" if soft == unlimited else f"at most {soft:,}"
    if soft != unlimited and soft < FEWEST_OPEN_FILES:
        wanted = 4 * FEWEST_OPEN_FILES if hard == unlimited else min(hard, 4 * FEWEST_OPEN_FILES)
        return Finding("machine", "open files", "bad", words, f"ulimit -n {wanted}, in the shell that runs pirl")
    return Finding("machine", "open files", "good", words)


def examine_devices(answer: Answer) -> Iterator[Finding]:
    """What JAX computes on, and whether it leaves an accelerator unused."""
    platforms = os.environ.get("JAX_PLATFORMS")
    if answer.failure or not answer.said:
        advice = (
            f"JAX_PLATFORMS={platforms} is set: unset it, or install what it names."
            if platforms
            else "Is another process using the device? JAX_PLATFORMS=cpu avoids it."
        )
        detail = f"JAX finds no device that computes: {answer.failure or 'it names none'}"
        yield Finding("machine", "devices", "bad", detail, advice, needed=True)
        return
    kinds = Counter((entry["platform"], entry["kind"], entry["memory"]) for entry in answer.said)
    for (platform, kind, memory), count in kinds.items():
        words = f"{count} × {kind}" if kind != platform else f"{count} × {platform}"
        words += f", {size(memory)} each" if memory else ""
        yield Finding("machine", f"{platform} devices", "good", words, needed=True)
    if {platform for platform, *_ in kinds} == {"cpu"}:
        yield _unused_accelerator(platforms)


def _unused_accelerator(platforms: str | None) -> Finding:
    gpu = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    tpu = any(Path("/dev").glob("accel*"))
    if not gpu and not tpu:
        return Finding("machine", "accelerator", "absent", "none found: full-size policies need one to train")
    advice = f"pip install 'jax[{'cuda13' if gpu else 'tpu'}]'"
    if platforms:
        advice = f"JAX_PLATFORMS={platforms} is set: unset it"
    detail = f"there is {'an NVIDIA GPU' if gpu else 'a TPU'}, but JAX does not use it"
    return Finding("machine", "accelerator", "absent", detail, advice)
