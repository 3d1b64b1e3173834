"""The steps of a demo: commands that run side by side as processes, each resumable by itself."""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pirl.errors import DataError, TrainingError
from pirl.files import write_file
from pirl.jobs import GRACE, Job, JobTable, run_jobs
from pirl.processes import format_exit, last_lines, pirl_command

STEPS_FILE = "steps.json"
_SHOWN_LINES = 12


@dataclass(frozen=True)
class Step:
    """A `pirl` command, whose result is whole or not."""

    name: str
    title: str
    text: str
    is_whole: Callable[[], bool]
    begun: Path | None = None
    """Where this exists, the command is continued with --resume."""

    @property
    def command(self) -> list[str]:
        return shlex.split(self.text)


# The steps of a lane follow each other, the lanes of a stage run side by side. A stage is made when those before it are
# done, since its commands may depend on their results.
Stages = Iterator[Sequence[Sequence[Step]]]


def run_steps(
    stages: Callable[[], Stages], out: Path, lock: int, *, program: Sequence[str] | None = None, grace: float = GRACE
) -> dict[str, float]:
    """Run the steps that are not done yet, with their logs in `out`/logs; gives the time of each, in all attempts.

    A step that fails ends the others, which save what they have, and is a `TrainingError`.
    """
    program = pirl_command() if program is None else program
    steps = {step.name: step for lanes in stages() for lane in lanes for step in lane}
    file = out / STEPS_FILE
    records: dict[str, dict[str, Any]] = {}
    try:
        if file.exists():
            records = {name: dict(record) for name, record in json.loads(file.read_text(encoding="utf-8")).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is damaged ({error}): delete it; results that are whole are kept.") from error

    def jobs(lane: Sequence[Step]) -> Iterator[Job]:
        for step in lane:
            steps[step.name] = step
            if records.get(step.name, {}).get("command") != step.command:  # another step of that name
                records[step.name] = {"command": step.command, "seconds": 0.0, "is_done": False}
            if records[step.name]["is_done"] and step.is_whole():
                table.end(step.name, "done", records[step.name]["seconds"])
                table.say(f"{step.name}: there already", in_table=True)
                continue
            resume = ["--resume"] if step.begun is not None and step.begun.exists() else []
            command = (*program, *step.command, *resume)
            yield Job(step.name, step.title, command, out / "logs" / f"{step.name}.log")

    def on_end(job: Job, code: int | None, seconds: float) -> None:
        record, is_done = records[job.name], code == 0 and steps[job.name].is_whole()
        record |= {"seconds": round(record["seconds"] + seconds, 1), "is_done": is_done}
        write_file(file, json.dumps(records, indent=2) + "\n")
        state = "done" if is_done else "stopped" if code is None else "failed"
        table.end(job.name, state, record["seconds"])
        table.say(f"{job.name}: {state} in {record['seconds']:.0f} s", in_table=True)
        if state == "failed":
            how = "ended before its result was whole" if code == 0 else f"failed ({format_exit(code or 0)})"
            raise TrainingError(
                f"{job.title}: this {how}. The end of {job.log}:\n"
                + "".join(f"  {line}\n" for line in last_lines(job.log, _SHOWN_LINES))
                + "Fix the cause and run the same command again: it continues with this step."
            )

    with JobTable({name: step.title for name, step in steps.items()}) as table:
        for lanes in stages():
            run_jobs([jobs(lane) for lane in lanes], on_end, lock=lock, table=table, grace=grace)
    return {name: records[name]["seconds"] for name in steps}
