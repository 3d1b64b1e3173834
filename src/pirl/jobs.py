"""Commands run as processes, some side by side, in a directory that one program at a time works in."""

import contextlib
import json
import os
import shutil
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
from pirl.processes import (
    GRACE,
    LOCK_FILE,
    Interruptions,
    Process,
    alone_in,
    kill_process,
    last_lines,
    share_cores,
    start_process,
    stop_processes,
    wait_a_moment,
)
from pirl.report.sections import differing_settings

_DEVICES = "CUDA_VISIBLE_DEVICES"
_MOST_DIFFERENCES = 10


@dataclass(frozen=True)
class Job:
    """A command whose output is appended to a log; `title` says what it does."""

    name: str
    title: str
    command: tuple[str, ...]
    log: Path


@contextlib.contextmanager
def open_directory(
    record: Path,
    settings: Mapping[str, Any],
    *,
    program: str,
    jobs: str,
    own: Sequence[str],
    overwrite: bool,
    advice: str,
) -> Iterator[int]:
    """Work alone in the directory of `record`, which holds the settings that everything there was made with.

    Yields the lock, for the jobs to inherit: those that outlive a killed program are waited for. `own` are the patterns
    of what `overwrite` deletes, `jobs` is what the jobs are called, and `advice` says how to choose another directory.
    """
    path, what = record.parent, program.split()[-1]
    if path.exists() and not path.is_dir():
        raise DataError(f"{path} is a file: {advice}")
    if path.is_dir() and not record.exists() and any(entry.name != LOCK_FILE for entry in path.iterdir()):
        raise DataError(f"{path} is not empty and contains no {what}: {advice}")
    with contextlib.ExitStack() as stack:
        with writing(f"the {what}", path, advice.capitalize()):
            path.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(alone_in(path, program, jobs))
            if overwrite:
                for entry in [entry for pattern in own for entry in path.glob(pattern)]:
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
        if not record.is_file():
            raise ValueError("not a regular file")
        before = json.loads(record.read_text(encoding="utf-8"))["settings"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{record} is damaged ({error!r}): start over with --overwrite.") from error
    if differences := differing_settings({"before": before, "now": now}):
        lines = [f"  {name}: {old} before, {new} now" for name, (old, new) in differences.items()]
        more = len(lines) - _MOST_DIFFERENCES
        lines = [*lines[:_MOST_DIFFERENCES], *([f"  and {more} more"] if more > 0 else [])]
        raise DataError(
            f"{record.parent} contains a {what} with other settings:\n"
            + "\n".join(lines)
            + f"\nUse the same settings, start over with --overwrite, or {advice}"
        )


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
        self.refresh()

    def say(self, text: str, *, in_table: bool = False) -> None:
        """A line, also on a terminal unless the table says it."""
        if not self._is_shown:
            with contextlib.suppress(BrokenPipeError):
                print(text, file=sys.stderr, flush=True)
        elif not in_table:
            self._progress.console.print(text)

    def refresh(self) -> None:
        for name, (log, began) in self._running.items():
            state, said = "running", "".join(last_lines(log))
            self._progress.update(self._tasks[name], state=state, time=_clock(time.monotonic() - began), said=said)
        self._progress.refresh()

    def _add(self, title: str, state: str) -> TaskID:
        return self._progress.add_task(title, state=state, time="", said="")


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


# Called with the exit code of a job and the seconds it took; the code is None if the job was stopped.
OnEnd = Callable[[Job, int | None, float], None]


@dataclass(frozen=True)
class Runner:
    """Runs jobs as processes that hold `lock` as long as they live."""

    lock: int
    table: JobTable
    interruptions: Interruptions
    grace: float = GRACE

    def run(self, lanes: Sequence[Iterator[Job]], on_end: OnEnd) -> None:
        """Run the jobs of a lane in order and the lanes side by side, each on its share of the cores and devices.

        The next job of a lane is asked for when the lane is free. An interruption, or an error in `on_end`, stops the
        running jobs, which save what they have.
        """
        cores, environments = share_cores(len(lanes)), share_devices(len(lanes))
        running: dict[int, tuple[Job, Process, float]] = {}
        try:
            while True:
                for lane, jobs in enumerate(lanes):
                    if lane not in running and (job := next(jobs, None)) is not None:
                        job.log.parent.mkdir(parents=True, exist_ok=True)
                        process = start_process(
                            job.command,
                            job.log,
                            cores=cores[lane],
                            environment=environments[lane],
                            keep_open=(self.lock,),
                        )
                        running[lane] = (job, process, time.monotonic())
                        self.table.start(job)
                if not running:
                    return
                wait_a_moment([process for _, process, _ in running.values()], self.table.refresh)
                if self.interruptions.count:
                    raise KeyboardInterrupt
                for lane, (job, process, began) in list(running.items()):
                    if (code := process.poll()) is not None:
                        del running[lane]
                        kill_process(process)  # what it may have left behind
                        on_end(job, code, time.monotonic() - began)
        finally:
            if running:
                self.table.say("stopping and saving; press Ctrl-C again to end at once")
                processes = [process for _, process, _ in running.values()]
                stop_processes(processes, self.interruptions, self.grace, self.table.refresh)
                for job, _, began in running.values():
                    on_end(job, None, time.monotonic() - began)


def share_devices(parts: int) -> list[dict[str, str]]:
    """The variables that give each of several processes its own of the visible devices, where there are enough."""
    devices = [device for device in os.environ.get(_DEVICES, "").split(",") if device]
    if parts < 2 or len(devices) < parts:
        return [{}] * parts
    return [{_DEVICES: ",".join(devices[part::parts])} for part in range(parts)]
