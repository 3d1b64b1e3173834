"""How much memory this process takes, and how much the machine, or the container around it, has."""

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

# Where the limit of a container stands, and what it uses: in version 2 of control groups, and in version 1.
_GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory.stat")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.stat"),
    ),
)


@dataclass(frozen=True)
class HostMemory:
    """Bytes of this process, and of the machine or the container it is in; None where the system does not say."""

    peak: int
    used: int | None = None
    available: int | None = None
    total: int | None = None


def read_host() -> HostMemory:
    """What the system says about this process and the memory around it."""
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
    for limit_file, used_file, stat_file in _GROUPS:
        try:
            limit, used = int(limit_file.read_text()), int(used_file.read_text())
            stat = dict(line.split()[:2] for line in stat_file.read_text().splitlines())
            found.append((limit, used - int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))))
        except (OSError, ValueError):  # no such group; or "max", which is no limit
            continue
    return found
