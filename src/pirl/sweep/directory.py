"""The directory of a sweep: begun, gone on with or overwritten, by one process at a time."""

import fcntl
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pirl.errors import DataError
from pirl.files import write_file, writing
from pirl.report import config_differences
from pirl.sweep.plan import SweepPlan

RESULTS_FILE = "sweep.json"
JOURNAL_FILE = "study.journal"
PAGE_FILE = "sweep.html"
_LOCK = "lock"
_ADVICE = "Choose another place (--runs-dir)."
_OWN = re.compile(r"trial-\d+|logs|study\.journal.*|sweep\.html")


@contextmanager
def open_directory(plan: SweepPlan, *, resume: bool, overwrite: bool) -> Iterator[int]:
    """Begin a sweep, or go on with one, alone; gives the lock that keeps others out.

    Trials inherit the lock, so that those that outlive a sweep that was killed are waited for.
    """
    path = plan.directory
    _refuse_foreign(path)
    exists = (path / RESULTS_FILE).exists()
    if exists and not (resume or overwrite):
        raise DataError(
            f"{path} holds a sweep already: --resume goes on with it, --overwrite deletes it and begins again; or choose "
            "another --exp-name."
        )
    if resume and not exists and not (path / _LOCK).exists():
        raise DataError(f"{path} holds no sweep, so there is nothing to resume: leave --resume out to begin one.")
    with writing("the sweep", path, _ADVICE):
        path.mkdir(parents=True, exist_ok=True)
        lock = _take_lock(path)
    try:
        with writing("the sweep", path, _ADVICE):
            if overwrite:
                _clear(path)
            _check_settings(plan)
        yield lock
    finally:
        os.close(lock)


def _refuse_foreign(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise DataError(f"{path} is a file: choose another --exp-name or --runs-dir.")
    # Neither pipes, which would be waited for, nor links, behind which somebody else's file could be changed.
    for file in (path / RESULTS_FILE, path / JOURNAL_FILE):
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise DataError(
                f"{file} is damaged (it is not a regular file): take it away, or choose another --exp-name."
            )
    entries = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if entries - {_LOCK} and RESULTS_FILE not in entries:
        raise DataError(f"{path} is not empty, and holds no sweep: choose another --exp-name or --runs-dir.")


def _take_lock(path: Path) -> int:
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    told = False
    try:
        while not _try_lock(lock):
            holder = os.pread(lock, 20, 0).decode(errors="replace").strip()
            if not holder.isdecimal() or _is_alive(int(holder)):
                raise DataError(f"another `pirl sweep` (process {holder}) works in {path}: wait for it, or stop it.")
            if not told:
                print(f"waiting for the trials that were left at work in {path} …", file=sys.stderr, flush=True)
                told = True
            time.sleep(0.5)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _clear(path: Path) -> None:
    """Delete what a sweep makes, what says that it is one at last."""
    for entry in path.iterdir():
        if _OWN.fullmatch(entry.name):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    (path / RESULTS_FILE).unlink(missing_ok=True)


def _check_settings(plan: SweepPlan) -> None:
    """What is there must have been made as it would be made now, or trials could not be compared."""
    file, now = plan.directory / RESULTS_FILE, plan.settings()
    if not file.exists():
        write_file(file, json.dumps({"settings": now}, indent=2) + "\n")
        return
    try:
        before = json.loads(file.read_text(encoding="utf-8"))["settings"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{file} is damaged ({error!r}): begin anew with --overwrite.") from error
    if differences := config_differences({"before": before, "now": now}):
        lines = "".join(f"\n  {name}: {old} before, {new} now" for name, (old, new) in differences.items())
        raise DataError(
            f"{plan.directory} holds a sweep that was begun with other settings:{lines}\n"
            "Ask for the same again, begin anew with --overwrite, or choose another --exp-name."
        )
