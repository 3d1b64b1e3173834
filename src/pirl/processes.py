"""Child processes, locks and signals, and the cores and memory of this machine."""

import contextlib
import fcntl
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from pirl.errors import DataError

Process = subprocess.Popen[bytes]
# Seconds between SIGINT and SIGKILL: enough for an update under way to be compiled, made and saved.
GRACE = 90.0
# In a directory that one program at a time works in; holds the number of its process.
LOCK_FILE = "lock"
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


# --- child processes -------------------------------------------------------------------------------------------------


def pirl_command() -> tuple[str, ...]:
    """The command that starts this installation of pirl."""
    script = shutil.which("pirl", path=str(Path(sys.executable).parent))
    return (script,) if script else (sys.executable, "-m", "pirl.cli.main")


def start_process(
    command: Sequence[str],
    log: Path,
    *,
    cores: set[int] | None = None,
    environment: Mapping[str, str] | None = None,
    keep_open: Collection[int] = (),
) -> Process:
    """Start a command whose output is appended to a log. It inherits the file descriptors `keep_open`.

    It gets a session of its own, so that Ctrl-C in the terminal reaches it once, from here.
    """
    with log.open("ab") as output, _pinned_to(cores):
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            start_new_session=True,
            pass_fds=tuple(keep_open),
        )


@contextlib.contextmanager
def _pinned_to(cores: set[int] | None) -> Iterator[None]:
    """Let processes started meanwhile run on these cores only: they inherit it from the thread that starts them."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def wait_a_moment(processes: Collection[Process], meanwhile: Callable[[], None]) -> None:
    """Wait until one of them ends, but at most 0.2 s, so that `meanwhile` is called often."""
    meanwhile()
    until = time.monotonic() + 0.2
    while time.monotonic() < until and all(process.poll() is None for process in processes):
        time.sleep(0.02)


def stop_processes(
    processes: Collection[Process],
    interruptions: "Interruptions",
    grace: float = GRACE,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Send SIGINT, and SIGKILL after `grace` seconds or another interruption."""
    asked, count = time.monotonic(), interruptions.count
    for process in processes:
        process.send_signal(signal.SIGINT)
    while running := [process for process in processes if process.poll() is None]:
        wait_a_moment(running, meanwhile)
        if time.monotonic() - asked > grace or interruptions.count > count:
            break
    for process in processes:
        kill_process(process)
        process.wait()


def kill_process(process: Process) -> None:
    """Kill it and everything it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


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


# --- locks -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def alone_in(directory: Path, program: str, work: str) -> Iterator[int]:
    """Keep other calls of a program out of a directory; yields the lock, for processes to inherit (`keep_open`).

    They hold it as long as they live: those that outlive a killed program (`work` names them, in the plural) are waited
    for.
    """
    lock = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        waiting = False
        while not _try_lock(lock):
            holder = os.pread(lock, 20, 0).decode(errors="replace").strip()
            if not holder.isdecimal() or is_alive(int(holder)):
                raise DataError(
                    f"another `{program}` (process {holder}) works in {directory}: wait for it, or stop it."
                )
            if not waiting:
                waiting = True
                print(f"waiting for the {work} that still run in {directory} …", file=sys.stderr, flush=True)
            time.sleep(0.5)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield lock
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- signals ---------------------------------------------------------------------------------------------------------


def handle_stops(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Handle Ctrl-C, SIGTERM and SIGHUP, the last unless it is ignored (nohup); returns what handled them before."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return {number: signal.signal(number, handler) for number in numbers}


class Interruptions:
    """While it is open, Ctrl-C, SIGTERM and SIGHUP are counted and have no other effect."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruptions":
        self._before = handle_stops(self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


# --- cores and memory ------------------------------------------------------------------------------------------------


def usable_cores() -> int:
    """The number of cores that this process may use; on macOS, of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_cores(parts: int) -> list[set[int] | None]:
    """The cores of this process, divided into parts; None (all of them) where that cannot be done."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if parts < 2 or len(cores) < parts:
        return [None] * parts
    return [set(cores[part::parts]) for part in range(parts)]


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
