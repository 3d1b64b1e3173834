"""The steps of a demo as data: named commands in stages of lanes, and what is known of each afterwards."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pirl.errors import DataError
from pirl.files import write_file


@dataclass(frozen=True)
class Step:
    """A command, in full, and how to tell that its result is whole.

    What was interrupted goes on: where `begun` exists, the command is given --resume. `title` says what it does, to
    follow "12 s:". `late` are arguments that are known only when the steps before it are done; they end the command.
    """

    name: str
    title: str
    command: tuple[str, ...]
    is_whole: Callable[[], bool]
    begun: Path | None = None
    late: Callable[[], tuple[str, ...]] = tuple

    @property
    def whole_command(self) -> tuple[str, ...]:
        """The command with all of its arguments."""
        return (*self.command, *self.late())

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command as it has to be now."""
        is_begun = self.begun is not None and self.begun.exists()
        return (*self.whole_command, "--resume") if is_begun else self.whole_command


# The steps of a lane follow each other, the lanes of a stage run at the same time, the stages follow each other.
Stages = Sequence[Sequence[Sequence[Step]]]


def all_steps(stages: Stages) -> Iterator[Step]:
    """Every step, lane by lane."""
    for lanes in stages:
        for lane in lanes:
            yield from lane


@dataclass(frozen=True)
class Record:
    """What is known of a step: the time it took, in all attempts together, and whether it came to its end."""

    command: list[str]
    seconds: float = 0.0
    is_done: bool = False


class Records:
    """The records of steps, each in a file of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, step: Step) -> Record:
        """What is known of a step; of another command under its name, nothing."""
        file, command = self._file(step), list(step.whole_command)
        if not file.exists():
            return Record(command)
        try:
            record = Record(**json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{file} is damaged ({error}): delete it, and that step is looked at as if it had not ended."
            ) from error
        return record if record.command == command else Record(command)

    def add(self, step: Step, seconds: float, is_done: bool) -> None:
        """Note that a step was at work for so long."""
        before = self.read(step)
        record = Record(before.command, round(before.seconds + seconds, 1), is_done)
        write_file(self._file(step), json.dumps(asdict(record), indent=2) + "\n")

    def is_done(self, step: Step) -> bool:
        """Whether it came to its end, and its result is still there."""
        return self.read(step).is_done and step.is_whole()

    def _file(self, step: Step) -> Path:
        return self._directory / f"{step.name}.json"
