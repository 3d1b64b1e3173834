"""The steps of a demo: commands that run side by side as processes, each resumable by itself."""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pirl.errors import DataError, TrainingError
from pirl.files import write_file
from pirl.jobs import Job, JobTable, Runner
from pirl.processes import GRACE, Interruptions, format_exit, last_lines, pirl_command

STEPS_FILE = "steps.json"
_SHOWN_LINES = 12


@dataclass(frozen=True)
class Step:
    """A `pirl` command, whose result is whole or not; `late` are arguments that only the steps before it tell."""

    name: str
    title: str
    text: str
    is_whole: Callable[[], bool]
    begun: Path | None = None
    """Where this exists, the command is continued with --resume."""
    late: Callable[[], str] = str

    @property
    def command(self) -> tuple[str, ...]:
        return tuple(shlex.split(f"{self.text} {self.late()}"))


# The steps of a lane follow each other, the lanes of a stage run side by side, the stages follow each other.
Stages = Sequence[Sequence[Sequence[Step]]]


def all_steps(stages: Stages) -> Iterator[Step]:
    return (step for lanes in stages for lane in lanes for step in lane)


def run_steps(
    stages: Stages, out: Path, lock: int, *, program: Sequence[str] | None = None, grace: float = GRACE
) -> dict[str, float]:
    """Run the steps that are not done yet, with their logs in `out`/logs; gives the time of each, in all attempts.

    A step that fails ends the others, which save what they have, and is a `TrainingError`.
    """
    program = pirl_command() if program is None else program
    planned = {step.name: step.title for step in all_steps(stages)}
    with JobTable(planned) as shown, Interruptions() as interruptions:
        steps = _Steps(out, shown, tuple(program))
        for lanes in stages:
            Runner(lock, shown, interruptions, grace).run([steps.jobs(lane) for lane in lanes], steps.on_end)
    return {step.name: steps.record(step).seconds for step in all_steps(stages)}


@dataclass(frozen=True)
class _Record:
    """The time of a step in all attempts, and whether it came to its end."""

    command: list[str]
    seconds: float = 0.0
    is_done: bool = False


class _Steps:
    """The steps of a demo in progress, with their records in a file."""

    def __init__(self, out: Path, shown: JobTable, program: tuple[str, ...]) -> None:
        self._out, self._shown, self._program = out, shown, program
        self._started: dict[str, Step] = {}
        self._file = out / STEPS_FILE
        try:
            known = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else {}
            self._records = {name: _Record(**about) for name, about in known.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(
                f"{self._file} is damaged ({error}): delete it; results that are whole are kept."
            ) from error

    def record(self, step: Step) -> _Record:
        """What is known of a step; of another command under its name, nothing."""
        known, command = self._records.get(step.name), list(step.command)
        return known if known and known.command == command else _Record(command)

    def jobs(self, lane: Sequence[Step]) -> Iterator[Job]:
        for step in lane:
            record = self.record(step)
            if record.is_done and step.is_whole():
                self._shown.end(step.name, "done", record.seconds)
                self._shown.say(f"{step.name}: there already", in_table=True)
                continue
            self._started[step.name] = step
            resume = ("--resume",) if step.begun is not None and step.begun.exists() else ()
            log = self._out / "logs" / f"{step.name}.log"
            yield Job(step.name, step.title, (*self._program, *step.command, *resume), log)

    def on_end(self, job: Job, code: int | None, seconds: float) -> None:
        step = self._started[job.name]
        record, is_done = self.record(step), code == 0 and step.is_whole()
        record = replace(record, seconds=round(record.seconds + seconds, 1), is_done=is_done)
        self._records[job.name] = record
        write_file(self._file, json.dumps({name: asdict(one) for name, one in self._records.items()}, indent=2) + "\n")
        state = "done" if is_done else "stopped" if code is None else "failed"
        self._shown.end(job.name, state, record.seconds)
        self._shown.say(f"{job.name}: {state} in {record.seconds:.0f} s", in_table=True)
        if state == "failed":
            how = "ended before its result was whole" if code == 0 else f"failed ({format_exit(code or 0)})"
            raise TrainingError(
                f"{job.title}: this {how}. The end of {job.log}:\n"
                + "".join(f"  {line}\n" for line in last_lines(job.log, _SHOWN_LINES))
                + "Fix the cause and run the same command again: it continues with this step."
            )
