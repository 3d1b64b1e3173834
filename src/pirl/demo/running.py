"""Runs the steps of a demo as processes, lanes side by side on their own cores, and leaves none of them behind."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from pirl.demo.display import Display
from pirl.demo.steps import Records, Stages, Step
from pirl.errors import TrainingError
from pirl.processes import (
    GRACE,
    Interruptions,
    Process,
    format_exit,
    kill_process,
    last_lines,
    share_cores,
    start_process,
    stop_processes,
    wait_a_moment,
)

_SHOWN_LINES = 12


def run_steps(stages: Stages, directory: Path, display: Display, lock: int, *, grace: float = GRACE) -> Records:
    """Run all that is not done yet; the logs are in `directory`/logs. Says in the end how long everything took.

    The steps hold the lock of the directory too, as long as they live. One that fails ends the others too, which save
    what they have, and is a `TrainingError`; an interruption does the same and is a KeyboardInterrupt.
    """
    records = Records(directory / "steps")
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with Interruptions() as interruptions:
        for lanes in stages:
            _Stage(records, logs, display, lock, interruptions, grace).run(lanes)
    return records


@dataclass(frozen=True)
class _Running:
    """A step under way."""

    step: Step
    process: Process
    log: Path
    begun: float


@dataclass
class _Stage:
    """Lanes that run at the same time."""

    records: Records
    logs: Path
    display: Display
    lock: int
    interruptions: Interruptions
    grace: float

    def run(self, lanes: Sequence[Sequence[Step]]) -> None:
        """Until every lane is through."""
        waiting = [list(lane) for lane in lanes]
        cores = share_cores(len(lanes))
        running: dict[int, _Running] = {}
        try:
            while True:
                for lane, steps in enumerate(waiting):
                    if lane not in running and (step := self._next(steps)) is not None:
                        running[lane] = self._start(step, cores[lane])
                if not running:
                    return
                wait_a_moment([one.process for one in running.values()], self.display.refresh)
                if self.interruptions.count:
                    raise KeyboardInterrupt
                for lane, one in list(running.items()):
                    if (code := one.process.poll()) is not None:
                        del running[lane]
                        self._finish(one, code)
        finally:
            self._stop(running.values())

    def _next(self, steps: list[Step]) -> Step | None:
        """The first of these that is not done."""
        while steps:
            step = steps.pop(0)
            if not self.records.is_done(step):
                return step
            self.display.skipped(step, self.records.read(step).seconds)
        return None

    def _start(self, step: Step, cores: set[int] | None) -> _Running:
        log = self.logs / f"{step.name}.log"
        process = start_process(step.arguments, log, cores=cores, keep_open=(self.lock,))
        self.display.started(step, log)
        return _Running(step, process, log, time.monotonic())

    def _finish(self, one: _Running, code: int) -> None:
        kill_process(one.process)  # what it may have left behind
        seconds = time.monotonic() - one.begun
        is_done = code == 0 and one.step.is_whole()
        self.records.add(one.step, seconds, is_done)
        if is_done:
            self.display.finished(one.step, self.records.read(one.step).seconds)
            return
        self.display.failed(one.step)
        how = "ended before its result was whole" if code == 0 else f"failed ({format_exit(code)})"
        raise TrainingError(
            f"{one.step.title}: this {how}. The end of {one.log}:\n"
            + "".join(f"  {line}\n" for line in last_lines(one.log, _SHOWN_LINES))
            + "Fix the cause and run the same command again: it continues with this step."
        )

    def _stop(self, running: Collection[_Running]) -> None:
        """Ask them to save and end; by force if they take too long, or somebody asks again."""
        if not running:
            return
        self.display.note("stopping and saving; press Ctrl-C again to end at once")
        stop_processes([one.process for one in running], self.interruptions, self.grace, self.display.refresh)
        for one in running:
            self.records.add(one.step, time.monotonic() - one.begun, is_done=False)
            self.display.stopped(one.step)
