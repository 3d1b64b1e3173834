"""Processes that are started, followed through their logs, and never left behind."""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from pirl.errors import DataError

Process = subprocess.Popen[bytes]
# Between a request to stop and the end by force: enough for an update under way to be compiled, made and saved.
GRACE = 90.0
# In a directory that one program at a time works in; it says which process that is.
LOCK_FILE = "lock"
# Between two looks at what is running.
_POLL = 0.2
_TAIL = 1 << 16
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def pirl_command() -> tuple[str, ...]:
    """How this very pirl is called, wherever it is installed."""
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
    """Start a command whose words are added to a log. It inherits the files `keep_open`.

    It is in a session of its own, so that Ctrl-C in the terminal reaches it once, from here.
    """
    with log.open("ab") as output, _on_cores(cores):
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            start_new_session=True,
            pass_fds=tuple(keep_open),
        )


def wait_a_moment(processes: Collection[Process], meanwhile: Callable[[], None]) -> None:
    """Until one of them ends, but not for long, so that `meanwhile` is called often."""
    meanwhile()
    until = time.monotonic() + _POLL
    while time.monotonic() < until and all(process.poll() is None for process in processes):
        time.sleep(0.02)


def stop_processes(
    processes: Collection[Process],
    interruptions: "Interruptions",
    grace: float = GRACE,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Ask them to save and end; by force if they take too long, or somebody asks again."""
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
    """End it, and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def is_alive(process: int) -> bool:
    """Whether there is a process of that number, be it somebody else's."""
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


@contextlib.contextmanager
def alone_in(directory: Path, program: str, work: str) -> Iterator[int]:
    """Keep other calls of a program out of a directory; gives the lock, for processes to inherit (`keep_open`).

    They hold it for as long as they live: what outlives a program that was killed (its `work`, in the plural) is waited
    for.
    """
    lock = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take_lock(lock, directory, program, work)
        yield lock
    finally:
        os.close(lock)


def _take_lock(lock: int, directory: Path, program: str, work: str) -> None:
    told = False
    while not _try_lock(lock):
        holder = os.pread(lock, 20, 0).decode(errors="replace").strip()
        if not holder.isdecimal() or is_alive(int(holder)):
            raise DataError(f"another `{program}` (process {holder}) works in {directory}: wait for it, or stop it.")
        if not told:
            print(f"waiting for the {work} that were left at work in {directory} …", file=sys.stderr, flush=True)
            told = True
        time.sleep(0.5)
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def usable_cores() -> int:
    """Cores that this process may use, where the system tells; macOS only tells how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_cores(parts: int) -> list[set[int] | None]:
    """The cores of this process, divided; None for all of them where they cannot be."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if parts < 2 or len(cores) < parts:
        return [None] * parts
    return [set(cores[part::parts]) for part in range(parts)]


def exit_in_words(code: int) -> str:
    """How a process ended."""
    if code >= 0:
        return f"exit code {code}"
    names = {int(number): number.name for number in signal.Signals}
    return f"ended by {names.get(-code, f'signal {-code}')}"  # not all that there are have names


def last_lines(log: Path, count: int = 1) -> list[str]:
    """What was said last, without what only a terminal understands."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = [line.strip() for line in _CODES.sub("", text).replace("\r", "\n").split("\n")]
    return [line for line in lines if line][-count:]


def handle_stops(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Handle Ctrl-C, SIGTERM and SIGHUP, the last unless it is ignored (nohup); returns what handled them before."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return {number: signal.signal(number, handler) for number in numbers}


class Interruptions:
    """Counts Ctrl-C, SIGTERM and SIGHUP while it is open, and does no more, so that nothing is left half done."""

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


@contextlib.contextmanager
def _on_cores(cores: set[int] | None) -> Iterator[None]:
    """Processes that are started meanwhile stay on these cores: they inherit it from the thread that starts them."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
