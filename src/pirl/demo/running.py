"""Runs the steps of a demo as processes, lanes side by side on their own cores, and leaves none of them behind."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from pirl.demo.display import Display
from pirl.demo.steps import Records, Stages, Step
from pirl.errors import TrainingError

# Between a request to stop and the end by force: enough for an update under way to be compiled, made and saved.
GRACE = 90.0
_POLL = 0.2
_SHOWN_LINES = 12


def run_steps(stages: Stages, directory: Path, display: Display, *, grace: float = GRACE) -> Records:
    """Run all that is not done yet; the logs are in `directory`/logs. Says in the end how long everything took.

    A step that fails ends the others too, which save what they have, and is a `TrainingError`; an interruption does
    the same and is a KeyboardInterrupt.
    """
    records = Records(directory / "steps")
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with _Interruptions() as interruptions:
        for lanes in stages:
            _Stage(records, logs, display, interruptions, grace).run(lanes)
    return records


def share_cores(parts: int) -> list[set[int] | None]:
    """The cores of this process, divided; None for all of them where they cannot be."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if parts < 2 or len(cores) < parts:
        return [None] * parts
    return [set(cores[part::parts]) for part in range(parts)]


@dataclass(frozen=True)
class _Running:
    """A step under way."""

    step: Step
    process: subprocess.Popen[bytes]
    log: Path
    begun: float


@dataclass
class _Stage:
    """Lanes that run at the same time."""

    records: Records
    logs: Path
    display: Display
    interruptions: "_Interruptions"
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
                self._wait(running.values())
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
        # In a session of its own, so that Ctrl-C in the terminal reaches it once, from here.
        with log.open("ab") as output, _on_cores(cores):
            process = subprocess.Popen(
                step.arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        self.display.started(step, log)
        return _Running(step, process, log, time.monotonic())

    def _finish(self, one: _Running, code: int) -> None:
        _kill(one)  # what it may have left behind
        seconds = time.monotonic() - one.begun
        is_done = code == 0 and one.step.is_whole()
        self.records.add(one.step, seconds, is_done)
        if is_done:
            self.display.finished(one.step, self.records.read(one.step).seconds)
            return
        self.display.failed(one.step)
        how = "ended before its result was whole" if code == 0 else f"failed ({_in_words(code)})"
        lines = one.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
        raise TrainingError(
            f"{one.step.title}: this {how}. The end of {one.log}:\n"
            + "".join(f"  {line}\n" for line in lines)
            + "See to the cause and call the same command again: it goes on with this step."
        )

    def _stop(self, running: Collection[_Running]) -> None:
        """Ask them to save and end; by force if they take too long, or somebody asks again."""
        if not running:
            return
        self.display.note("stopping, so that what was learned is saved; Ctrl-C ends at once")
        asked, count = time.monotonic(), self.interruptions.count
        for one in running:
            one.process.send_signal(signal.SIGINT)
        while any(one.process.poll() is None for one in running):
            self._wait(running)
            if time.monotonic() - asked > self.grace or self.interruptions.count > count:
                break
        for one in running:
            _kill(one)
            one.process.wait()
            self.records.add(one.step, time.monotonic() - one.begun, is_done=False)
            self.display.stopped(one.step)

    def _wait(self, running: Collection[_Running]) -> None:
        """A moment, or until one of them ends."""
        self.display.refresh()
        until = time.monotonic() + _POLL
        while time.monotonic() < until and all(one.process.poll() is None for one in running):
            time.sleep(0.02)


class _Interruptions:
    """Counts Ctrl-C, SIGTERM and SIGHUP while it is open, and does no more, so that nothing is left half done."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Interruptions":
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


def _kill(one: _Running) -> None:
    """End it, and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(one.process.pid, signal.SIGKILL)


def _in_words(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"
