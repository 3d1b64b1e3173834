"""Two hours of the demo's learners in turn, with faults: each run has to end as if nothing had happened.

    PYTHONPATH=scripts python -m soak --minutes 120 --seed 0 --out runs/soak

First every learner runs undisturbed. Then they run again and again, disturbed up to three times each, resumed until they
end, and compared with the first run bit for bit. Beside them each learner runs once for its share of the time, without an
end: what is watched is its memory. table.md, summary.json, rounds.json and memory.json in the output directory are up to
date after every run; runs that did not end well are kept there, and the logs of odd
ones. The last line printed is the summary.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from soak.faults import FAULTS, NotInjectedError, Scene, UncleanError, can_mount, moment, small_disk
from soak.runs import LEARNERS, Place, Segment, differences, leftovers, lines_in
from soak.table import LongRun, Round, Tally

FULL_DISK = "full disk"
_ATTEMPTS = 3  # to bring a run to its end after its last fault
_LEFT_ALONE_EVERY = 7  # runs; no multiple of the number of learners, so that each has its turn


class Soak:
    """Rounds of runs, until the time is over."""

    def __init__(self, place: Place, learners: list[str], seed: int):
        self._place, self._learners, self._chance = place, learners, random.Random(seed)
        self._seconds: dict[str, float] = {}
        self._began = time.monotonic()
        self._waiting: list[str] = []
        self.tally = Tally(seed=seed)
        self.kinds = list(FAULTS)
        if not can_mount(place.out / "disk"):
            self.tally.not_injected[FULL_DISK] = "mounting a small disk needs root"

    def reference(self, learner: str) -> Path:
        """The run of a learner that nobody disturbs."""
        return self._place.out / "references" / learner

    def prepare(self) -> None:
        """Data, and one undisturbed run of each learner."""
        self._place.prepare()
        for name in self._learners:
            segment = self._start(name, self.reference(name), self._place.out / "logs" / f"{name}.log")
            if segment.finish(3600) != 0:
                raise SystemExit(f"soak: {name} failed though nobody disturbed it; see {segment.log}")
            self._seconds[name] = segment.seconds
            _say(f"{name}: {segment.seconds:.0f} s undisturbed, {lines_in(self.reference(name))} lines of metrics")

    def run(self, minutes: float) -> None:
        """Begin runs for so many minutes."""
        end = self._began + minutes * 60
        beside = LongRuns(self._place.out, self._learners, end, self.tally.long_runs)
        beside.start()
        try:
            while time.monotonic() < end:
                self._play(self._next_round())
        finally:
            beside.stop()
            self._write()

    def _next_round(self) -> Round:
        number = len(self.tally.rounds) + 1
        faults: list[str] = []
        if number % _LEFT_ALONE_EVERY:
            for _ in range(self._chance.randint(1, 3)):
                if not self._waiting:
                    self._waiting = [kind for kind in self.kinds if kind not in self.tally.not_injected]
                    self._chance.shuffle(self._waiting)
                faults.append(self._waiting.pop())
        return Round(number, self._learners[number % len(self._learners)], faults)

    def _play(self, planned: Round) -> None:
        done = Round(planned.number, planned.learner)
        name = f"{done.number:03d}_{done.learner}"
        log = self._place.out / "logs" / f"{name}.log"
        self._place.clock.unlink(missing_ok=True)
        with self._runs_directory(FULL_DISK in planned.faults) as runs:
            run, segments = runs / name, list[Segment]()
            try:
                self._disturb(done, planned.faults, run, log, segments)
                if not done.complaints:
                    done.differences = self._differences(run, done.learner)
                    done.leftovers += leftovers(run, self.reference(done.learner), self._place.out / "tmp")
            finally:
                for segment in segments:
                    segment.kill()
            self._remember(done, segments)
            if done.is_fine:
                shutil.rmtree(run)
                if not done.remarks:
                    log.unlink()
            elif run.exists() and run.parent != self._place.out / "runs":
                shutil.move(run, self._place.out / "runs" / name)
        shutil.rmtree(self._place.out / "tmp", ignore_errors=True)
        self.tally.rounds.append(done)
        self._write()
        verdict = "bit-equal" if done.is_fine else "; ".join([*done.complaints, *done.differences[:3]])
        verdict += f" ({'; '.join(done.remarks)})" if done.remarks else ""
        missed = f" (too late: {', '.join(done.missed)})" if done.missed else ""
        _say(f"round {done.number}: {done.learner}, {', '.join(done.faults) or 'left alone'}{missed}: {verdict}")

    def _disturb(self, done: Round, faults: list[str], run: Path, log: Path, segments: list[Segment]) -> None:
        """Fault after fault, and then to the end. What goes wrong is added to the complaints."""
        total, patience = lines_in(self.reference(done.learner)), 600 + 3 * self._seconds[done.learner]
        lines = sorted(self._chance.randrange(1, max(2, int(0.9 * total))) for _ in faults)
        segment: Segment | None = None
        for kind, line in zip(faults, lines, strict=True):
            if segment is None:
                segments.append(segment := self._start(done.learner, run, log))
            strikes = moment(kind, run, segment, line, self._chance)
            if not segment.wait(strikes, patience):
                done.missed.append(kind)
                if segment.process.poll():
                    self._note_end(done, segment)
                    segment = None
                continue
            try:
                done.faults.append(kind)
                if remark := FAULTS[kind](Scene(self._place, run, segment, self._chance)):
                    done.remarks.append(remark)
            except UncleanError as error:
                done.complaints.append(str(error))
            except NotInjectedError:
                done.missed.append(done.faults.pop())
            if segment.process.poll() is not None:
                segment = None
        for _ in range(_ATTEMPTS):
            if segment is None:
                segments.append(segment := self._start(done.learner, run, log))
            if segment.finish(patience) == 0:
                break
            self._note_end(done, segment)
            segment = None
        else:
            done.complaints.append(f"it did not come to its end in {_ATTEMPTS} attempts after the last fault")
        for process, words in self._place.marked_processes().items():
            done.leftovers.append(f"process {words}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _note_end(self, done: Round, segment: Segment) -> None:
        """A process that ended by itself, as it may when what it needs is gone, as long as it can be resumed."""
        said = [line for line in segment.words.splitlines() if line.startswith("error: ")] or ["nothing"]
        done.remarks.append(f"it ended by itself with {segment.process.poll()}, and said: {said[-1][:300]}")

    def _differences(self, run: Path, learner: str) -> list[str]:
        try:
            return differences(run, self.reference(learner))
        except Exception as error:  # TensorStore's arrive as bare Exceptions
            return [f"what it saved cannot be read: {error!s:.300}"]

    def _remember(self, done: Round, segments: list[Segment]) -> None:
        last, total = segments[-1], lines_in(self.reference(done.learner))
        if not done.complaints and last.memory and last.first_line <= total / 2:
            done.peak = max(mib for _, mib in last.memory)

    def _start(self, learner: str, run: Path, log: Path) -> Segment:
        # A run that died before it took its lock has not begun.
        more = ("--resume",) if (run / "lock").exists() else ()
        command = self._place.command(LEARNERS[learner], run, *more)
        return Segment(command, log, self._place.environment(), lines_in(run))

    @contextlib.contextmanager
    def _runs_directory(self, is_small: bool) -> Iterator[Path]:
        if is_small:
            with small_disk(self._place.out / "disk") as disk:
                yield disk
        else:
            yield self._place.out / "runs"

    def _write(self) -> None:
        self.tally.minutes = (time.monotonic() - self._began) / 60
        self.tally.write(self._place.out, self.kinds)


class LongRuns(threading.Thread):
    """Beside the rounds: every learner in turn, undisturbed, for its share of the time."""

    def __init__(self, out: Path, learners: list[str], end: float, found: dict[str, LongRun]):
        super().__init__(daemon=True)
        self._place, self._learners, self._end = Place(out / "beside", data=out), learners, end
        self._found, self._stopped = found, False

    def run(self) -> None:
        """Until all had their turn, or it is stopped."""
        for index, name in enumerate(self._learners):
            if self._stopped:
                return
            learner = LEARNERS[name]
            endless = dataclasses.replace(learner, options={**learner.options, **learner.without_end})
            run = self._place.out / "runs" / name
            log = self._place.out / "logs" / f"{name}.log"
            segment = Segment(self._place.command(endless, run), log, self._place.environment())
            found = self._found[name] = LongRun()
            share = (self._end - time.monotonic()) / (len(self._learners) - index)
            segment.wait(lambda: self._stopped, share)
            found.ended_with = segment.process.poll()
            segment.kill()
            found.lines, found.memory = lines_in(run), _thinned(segment.memory)

    def stop(self) -> None:
        """End what runs."""
        self._stopped = True
        self.join()


def main() -> int:
    """Returns the exit code: 1 if a fault was not survived or a run ended in other bits, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=120.0, help="how long runs are begun, with the first ones")
    parser.add_argument("--seed", type=int, default=0, help="decides the faults and when they come")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"), help="a directory that is not there yet")
    parser.add_argument("--learners", nargs="+", choices=sorted(LEARNERS), default=sorted(LEARNERS))
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} is there already: delete it, or choose another --out.")
    for name in ("references", "runs"):
        (options.out / name).mkdir(parents=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # what a shell starts in the background ignores the first
        signal.signal(number, signal.default_int_handler)
    soak = Soak(Place(options.out.resolve()), options.learners, options.seed)
    is_interrupted = False
    try:
        soak.prepare()
        soak.run(options.minutes)
    except KeyboardInterrupt:
        is_interrupted = True
    print(soak.tally.markdown(soak.kinds))
    print(json.dumps(soak.tally.summary(soak.kinds)), flush=True)
    if not soak.tally.is_fine:
        return 1
    return 130 if is_interrupted else 0


def _thinned(points: list[tuple[float, float]], most: int = 300) -> list[tuple[float, float]]:
    """Means of neighbors: what a save needs for a moment counts for as long as it lasts."""
    parts = np.array_split(np.asarray(points, np.float64).reshape(-1, 2), min(most, max(1, len(points))))
    return [(float(hours), float(mib)) for hours, mib in (part.mean(0) for part in parts if len(part))]


def _say(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
