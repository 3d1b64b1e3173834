"""Processes and signals, and the cores and memory of this machine."""

import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

_TAIL = 1 << 16
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Limit, use and statistics of a container's memory: control groups version 2, and version 1.
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


def pirl_command() -> tuple[str, ...]:
    """The command that starts this installation of pirl."""
    script = shutil.which("pirl", path=str(Path(sys.executable).parent))
    return (script,) if script else (sys.executable, "-m", "pirl.cli.main")


def is_alive(process: int) -> bool:
    """Whether there is a process of that number, of whatever user."""
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def format_exit(code: int) -> str:
    """How a process ended."""
    if code >= 0:
        return f"exit code {code}"
    names = {int(number): number.name for number in signal.Signals}
    return f"ended by {names.get(-code, f'signal {-code}')}"  # not all that there are have names


def last_lines(log: Path, count: int = 1) -> list[str]:
    """The last lines of a log that are not empty, without terminal escapes."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = [line.strip() for line in _ESCAPES.sub("", text).replace("\r", "\n").split("\n")]
    return [line for line in lines if line][-count:]


def handle_stops(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Handle Ctrl-C, SIGTERM and SIGHUP, the last unless it is ignored (nohup); returns what handled them before."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return {number: signal.signal(number, handler) for number in numbers}


def usable_cores() -> int:
    """The number of cores that this process may use; on macOS, of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class HostMemory:
    """Bytes of this process, and of the machine or the container around it; None where the system does not tell."""

    peak: int
    used: int | None = None
    available: int | None = None
    total: int | None = None


def read_host() -> HostMemory:
    """Read it from the system."""
    # Kilobytes everywhere but on macOS.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        machine = {words[0]: int(words[1]) * 1024 for words in lines}
        total, available = machine["MemTotal:"], machine["MemAvailable:"]
    except (OSError, KeyError, ValueError, IndexError):  # not Linux
        return HostMemory(peak, total=machine_memory())
    for limit, used in _container_limits():
        total, available = min(total, limit), min(available, max(limit - used, 0))
    # The kernel's account of the peak lags behind that of what is resident.
    return HostMemory(max(peak, resident), resident, available, total)


def machine_memory() -> int:
    """Bytes of the whole machine, of which a container may have a part."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_limits() -> list[tuple[int, int]]:
    """The limit of the container, if there is one, and what counts towards it and cannot be given back."""
    found = []
    for limit_file, used_file, stat_file in _CGROUPS:
        try:
            limit, used = int(Path(limit_file).read_text()), int(Path(used_file).read_text())
            stat = dict(line.split()[:2] for line in Path(stat_file).read_text().splitlines())
            found.append((limit, used - int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))))
        except (OSError, ValueError):  # no such group; or "max", which is no limit
            continue
    return found
