"""The directory of a sweep: begun, gone on with or overwritten, by one process at a time."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pirl.errors import DataError
from pirl.files import write_file, writing
from pirl.processes import LOCK_FILE, alone_in
from pirl.report.sections import differing_settings
from pirl.sweep.plan import SweepPlan

RESULTS_FILE = "sweep.json"
JOURNAL_FILE = "study.journal"
PAGE_FILE = "sweep.html"
_ADVICE = "Choose another place (--runs-dir)."
_SHOWN_DIFFERENCES = 10
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
            f"{path} already contains a sweep: --resume continues it, --overwrite deletes it and starts over; or choose "
            "another --exp-name."
        )
    if resume and not exists and not (path / LOCK_FILE).exists():
        raise DataError(f"{path} contains no sweep, so there is nothing to resume: leave --resume out to start one.")
    with ExitStack() as stack:
        with writing("the sweep", path, _ADVICE):
            path.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(alone_in(path, "pirl sweep", "trials"))
            if overwrite:
                _clear(path)
            _check_settings(plan)
        yield lock


def _refuse_foreign(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise DataError(f"{path} is a file: choose another --exp-name or --runs-dir.")
    # Neither pipes, which would be waited for, nor links, behind which somebody else's file could be changed.
    for file in (path / RESULTS_FILE, path / JOURNAL_FILE):
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise DataError(f"{file} is damaged (it is not a regular file): delete it, or choose another --exp-name.")
    entries = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if entries - {LOCK_FILE} and RESULTS_FILE not in entries:
        raise DataError(f"{path} is not empty and contains no sweep: choose another --exp-name or --runs-dir.")


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
        raise DataError(f"{file} is damaged ({error!r}): start over with --overwrite.") from error
    if isinstance(before, dict) and "config" not in before:
        del now["config"]  # a sweep from before it was written down
    if differences := differing_settings({"before": before, "now": now}):
        lines = [f"\n  {name}: {old} before, {new} now" for name, (old, new) in differences.items()]
        more = len(lines) - _SHOWN_DIFFERENCES
        raise DataError(
            f"{plan.directory} contains a sweep with other settings:"
            + "".join([*lines[:_SHOWN_DIFFERENCES], *([f"\n  and {more} more"] if more > 0 else [])])
            + "\n"
            "Use the same settings, start over with --overwrite, or choose another --exp-name."
        )
