"""Processes that are started, followed through their logs, and never left behind."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

Process = subprocess.Popen[bytes]
# Between a request to stop and the end by force: enough for an update under way to be compiled, made and saved.
GRACE = 90.0
_TAIL = 4096
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


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


def stop_processes(processes: Collection[Process], interruptions: "Interruptions", grace: float = GRACE) -> None:
    """Ask them to save and end; by force if they take too long, or somebody asks again."""
    asked, count = time.monotonic(), interruptions.count
    for process in processes:
        process.send_signal(signal.SIGINT)
    while any(process.poll() is None for process in processes):
        time.sleep(0.05)
        if time.monotonic() - asked > grace or interruptions.count > count:
            break
    for process in processes:
        kill_process(process)
        process.wait()


def kill_process(process: Process) -> None:
    """End it, and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def share_cores(parts: int) -> list[set[int] | None]:
    """The cores of this process, divided; None for all of them where they cannot be."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if parts < 2 or len(cores) < parts:
        return [None] * parts
    return [set(cores[part::parts]) for part in range(parts)]


def exit_in_words(code: int) -> str:
    """How a process ended."""
    return f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"


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


class Interruptions:
    """Counts Ctrl-C, SIGTERM and SIGHUP while it is open, and does no more, so that nothing is left half done."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interruptions":
        self._before = {
            number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
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
