"""Commands run as processes, some side by side, in a directory that one program at a time works in."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn
from rich.table import Column

from pirl.errors import DataError
from pirl.files import write_file, writing
from pirl.processes import handle_stops, is_alive, last_lines
from pirl.report.sections import differing_settings

# Seconds between SIGINT and SIGKILL: enough for an update under way to be compiled, made and saved.
GRACE = 90.0
# In the directory; holds the number of the process that works there.
LOCK_FILE = "lock"
_POLL = 0.1  # seconds
_DEVICES = "CUDA_VISIBLE_DEVICES"
_MOST_DIFFERENCES = 10


# --- the directory ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_directory(
    record: Path, settings: Mapping[str, Any], *, what: str, own: Sequence[str], overwrite: bool, advice: str
) -> Iterator[int]:
    """Lock the directory of `record`, which holds the settings that everything there was made with; yields the lock.

    `own` are the patterns of what `overwrite` deletes, and `advice` says how to choose another directory.
    """
    directory = record.parent
    if directory.is_dir() and not record.exists() and any(entry.name != LOCK_FILE for entry in directory.iterdir()):
        raise DataError(f"{directory} is not empty and contains no {what}: {advice}")
    with contextlib.ExitStack() as stack:
        with writing(f"the {what}", directory, advice.capitalize()):
            directory.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(lock_directory(directory, f"pirl {what}"))
            if overwrite:
                for entry in [entry for pattern in own for entry in directory.glob(pattern)]:
                    if entry.is_dir() and not entry.is_symlink():
                        shutil.rmtree(entry)
                    else:
                        entry.unlink()
                record.unlink(missing_ok=True)  # last, because it says whose directory this is
            _check_settings(record, settings, what, advice)
        yield lock


def _check_settings(record: Path, settings: Mapping[str, Any], what: str, advice: str) -> None:
    now = json.loads(json.dumps(settings, default=str))
    if not record.exists():
        write_file(record, json.dumps({"settings": now}, indent=2) + "\n")
        return
    try:
        before = json.loads(record.read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{record} is damaged ({error!r}): start over with --overwrite.") from error
    if differences := differing_settings({"before": before, "now": now}):
        lines = [f"  {name}: {old} before, {new} now" for name, (old, new) in differences.items()]
        if len(lines) > _MOST_DIFFERENCES:
            lines[_MOST_DIFFERENCES:] = [f"  and {len(lines) - _MOST_DIFFERENCES} more"]
        raise DataError(
            f"{record.parent} contains a {what} with other settings:\n"
            + "\n".join(lines)
            + f"\nUse the same settings, start over with --overwrite, or {advice}"
        )


@contextlib.contextmanager
def lock_directory(directory: Path, program: str) -> Iterator[int]:
    """Keep other calls of a program out of a directory; yields the lock, for jobs to inherit.

    Jobs hold it as long as they live: those that outlive a killed program are waited for.
    """
    lock = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        is_waiting = False
        while not _try_lock(lock):
            holder = os.pread(lock, 20, 0).decode(errors="replace").strip()
            if not holder.isdecimal() or is_alive(int(holder)):
                raise DataError(
                    f"another `{program}` (process {holder}) works in {directory}: wait for it, or stop it."
                )
            if not is_waiting:
                is_waiting = True
                print(f"waiting for the jobs that still run in {directory} …", file=sys.stderr, flush=True)
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


# --- running ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A command whose output is appended to a log; `title` says what it does."""

    name: str
    title: str
    command: tuple[str, ...]
    log: Path


@dataclass(frozen=True)
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    began: float

    def kill(self) -> None:
        """Kill it and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


# Called with the exit code of a job and the seconds it took; the code is None if the job was stopped.
OnEnd = Callable[[Job, int | None, float], None]


def run_jobs(
    lanes: Sequence[Iterator[Job]], on_end: OnEnd, *, lock: int, table: "JobTable", grace: float = GRACE
) -> None:
    """Run the jobs of a lane in order and the lanes side by side, each on its share of the cores and devices.

    The next job of a lane is asked for when the lane is free. An interruption, or an error in `on_end`, stops the running
    jobs: they get SIGINT, to save what they have, and SIGKILL after `grace` seconds or another interruption.
    """
    cores, devices = share_cores(len(lanes)), share_devices(len(lanes))
    running: dict[int, _Running] = {}
    with _count_interruptions() as interruptions:
        try:
            while True:
                for lane, jobs in enumerate(lanes):
                    if lane not in running and (job := next(jobs, None)) is not None:
                        running[lane] = _start(job, cores[lane], devices[lane], lock)
                        table.start(job)
                if not running:
                    return
                table.refresh()
                time.sleep(_POLL)
                if interruptions:
                    raise KeyboardInterrupt
                for lane, one in list(running.items()):
                    if (code := one.process.poll()) is not None:
                        del running[lane]
                        one.kill()  # what it may have left behind
                        on_end(one.job, code, time.monotonic() - one.began)
        finally:
            if running:
                table.say("stopping and saving; press Ctrl-C again to end at once")
                asked, count = time.monotonic(), len(interruptions)
                for one in running.values():
                    one.process.send_signal(signal.SIGINT)
                while any(one.process.poll() is None for one in running.values()):
                    if time.monotonic() - asked > grace or len(interruptions) > count:
                        break
                    table.refresh()
                    time.sleep(_POLL)
                for one in running.values():
                    one.kill()
                for one in running.values():
                    on_end(one.job, None, time.monotonic() - one.began)


def _start(job: Job, cores: set[int] | None, environment: Mapping[str, str], lock: int) -> _Running:
    """Start a job in a session of its own, so that Ctrl-C in the terminal reaches it once, from here."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    before = None if cores is None else os.sched_getaffinity(0)
    try:
        if cores is not None:  # inherited from the thread that starts the process
            os.sched_setaffinity(0, cores)
        with job.log.open("ab") as output:
            process = subprocess.Popen(
                job.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                start_new_session=True,
                pass_fds=(lock,),
            )
    finally:
        if before is not None:
            os.sched_setaffinity(0, before)
    return _Running(job, process, time.monotonic())


@contextlib.contextmanager
def _count_interruptions() -> Iterator[list[int]]:
    """Meanwhile, Ctrl-C, SIGTERM and SIGHUP only append to the list."""
    received: list[int] = []
    before = handle_stops(lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def share_cores(parts: int) -> list[set[int] | None]:
    """The cores of this process, divided into parts; None (all of them) where that cannot be done."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if parts < 2 or len(cores) < parts:
        return [None] * parts
    return [set(cores[part::parts]) for part in range(parts)]


def share_devices(parts: int) -> list[dict[str, str]]:
    """The variables that give each of several processes its own of the visible devices, where there are enough."""
    devices = [device for device in os.environ.get(_DEVICES, "").split(",") if device]
    if parts < 2 or len(devices) < parts:
        return [{}] * parts
    return [{_DEVICES: ",".join(devices[part::parts])} for part in range(parts)]


# --- showing ---------------------------------------------------------------------------------------------------------


class JobTable:
    """Jobs on standard error: a table on a terminal, lines elsewhere.

    Jobs that are planned from the beginning stay in the table; others are in it while they run.
    """

    def __init__(self, planned: Mapping[str, str] | None = None) -> None:
        self._is_shown, self._keeps = sys.stderr.isatty() and os.environ.get("TERM") != "dumb", bool(planned)
        columns = ("{task.fields[state]}", "{task.description}", "{task.fields[time]}", "{task.fields[said]}")
        self._progress = Progress(
            *(TextColumn(column, markup=False, table_column=Column(no_wrap=True)) for column in columns),
            console=Console(stderr=True, highlight=False, markup=False, emoji=False),
            auto_refresh=False,
            transient=not self._keeps,
            disable=not self._is_shown,
        )
        self._tasks = {name: self._add(title, "waiting") for name, title in (planned or {}).items()}
        self._running: dict[str, tuple[Path, float]] = {}

    def __enter__(self) -> "JobTable":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def start(self, job: Job) -> None:
        self._running[job.name] = (job.log, time.monotonic())
        if job.name not in self._tasks:
            self._tasks[job.name] = self._add(job.name, "running")
        self.say(f"{job.name}: {job.title}", in_table=self._keeps)

    def end(self, name: str, state: str, seconds: float) -> None:
        """A job is done, failed or stopped, after so long in all."""
        self._running.pop(name, None)
        self._progress.update(self._tasks[name], state=state, time=_clock(seconds), said="")
        if not self._keeps:
            self._progress.remove_task(self._tasks.pop(name))
        self._progress.refresh()

    def say(self, text: str, *, in_table: bool = False) -> None:
        """A line, also on a terminal unless the table says it."""
        if not self._is_shown:
            with contextlib.suppress(BrokenPipeError):
                print(text, file=sys.stderr, flush=True)
        elif not in_table:
            self._progress.console.print(text)

    def refresh(self) -> None:
        if not self._is_shown:
            return
        for name, (log, began) in self._running.items():
            said, time_ = "".join(last_lines(log)), _clock(time.monotonic() - began)
            self._progress.update(self._tasks[name], state="running", time=time_, said=said)
        self._progress.refresh()

    def _add(self, title: str, state: str) -> TaskID:
        return self._progress.add_task(title, state=state, time="", said="")


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
