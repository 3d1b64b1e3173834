"""What has become of a run: done, stopped, failed, under way, or gone without a word. Its lock is only looked at."""

import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pirl.processes import is_alive
from pirl.run_files import RunFiles

_LOCKS = Path("/proc/locks")
# The end of the log that is read: more than any traceback.
_TAIL = 1 << 16
_ENTRY = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) (.*)")
_DONE = re.compile(r"done after|all \d+ updates were made already")
# Where nobody can say who holds a lock, files that changed so lately are those of a run at work.
_LATELY = 600.0


@dataclass(frozen=True)
class State:
    """How it stands, in a word, and in words that follow the name of the run."""

    kind: Literal["done", "stopped", "failed", "under way", "ended"]
    words: str


def find_state(run: Path) -> State:
    """Look at the lock, the log, and how old the files are."""
    holder = find_holder(run)
    if holder is not None:
        return State("under way", f"is under way ({holder})")
    level, text = _last_entry(RunFiles(run).log_file)
    if _DONE.match(text) and level == "INFO":
        return State("done", "is done")
    if text.startswith("stopped at step") and level == "INFO":
        return State("stopped", f"was {text.rstrip('.')}")
    if level == "ERROR":
        return State("failed", f"failed: {text.rstrip('.')}")
    age = _age(run)
    if age is not None and age < _LATELY and _is_elsewhere(run):
        return State("under way", f"seems to be running elsewhere: its files changed {age:.0f} s ago")
    return State("ended", "ended without a message: it was killed, or the machine went down")


def find_holder(run: Path) -> str | None:
    """Which process has the run open, as far as this machine knows."""
    lock = RunFiles(run).lock_file
    try:
        about, said = lock.stat(), lock.read_text(errors="replace").strip()
    except OSError:
        return None
    match = re.fullmatch(r"process (\d+) on (.+)", said)
    process, host = (int(match[1]), match[2]) if match else (0, "")
    if _LOCKS.is_file():
        device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}"
        for line in _LOCKS.read_text().splitlines():
            words = line.split()
            # Some file systems give other device numbers there than elsewhere: then the process has to be the one.
            if "FLOCK" in words and "->" not in words and len(words) >= 6:
                place, _, inode = words[5].rpartition(":")
                if inode == str(about.st_ino) and (place == device or words[4] == str(process)):
                    return said or f"process {words[4]}"
        return None
    return said if process and host == socket.gethostname() and is_alive(process) else None


def _is_elsewhere(run: Path) -> bool:
    """Whether the last to open the run was on another machine, or in another container, which this one cannot see."""
    try:
        said = RunFiles(run).lock_file.read_text(errors="replace").strip()
    except OSError:
        return False
    return not said.endswith(f" on {socket.gethostname()}")


def _age(run: Path) -> float | None:
    """Seconds since anything was written."""
    files = RunFiles(run)
    times = [file.stat().st_mtime for file in (files.log_file, files.metrics_file) if file.is_file()]
    return max(0.0, time.time() - max(times)) if times else None


def _last_entry(log: Path) -> tuple[str, str]:
    """The level and the first line of what the run said last, but for where its policy is."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL))
            lines: Sequence[str] = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "", ""
    entries = [match for line in lines if (match := _ENTRY.match(line))]
    for match in reversed(entries):
        # A library may warn of something on the way out.
        if match[1] in ("INFO", "ERROR") and not match[2].startswith("policy: "):
            return match[1], match[2]
    return "", ""
