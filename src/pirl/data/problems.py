"""What is wrong, or merely odd, about a dataset: reported once, by episode, file, column and value."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pirl.errors import DataError


@dataclass(frozen=True)
class Problem:
    """One result of a check. A `problem` blocks training; a `note` says how an oddity is read."""

    message: str
    severity: Literal["problem", "note"] = "problem"
    episode: int | None = None
    file: str | None = None
    column: str | None = None
    value: str | None = None

    def __str__(self) -> str:
        return _format([self])

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


class BrokenDatasetError(DataError):
    """A dataset that cannot be used, with everything that was found to be wrong; `what` is the consequence."""

    def __init__(
        self,
        name: str,
        problems: Iterable[Problem],
        what: str = "cannot be read as a LeRobot dataset",
        remedy: str | None = None,
    ):
        self.problems = list(problems)
        lines = [f"  {line}" for line in format_problems(self.problems)]
        listed = "\n".join([*lines[:20], *([f"  … and {len(lines) - 20} more"] if len(lines) > 20 else [])])
        super().__init__(f"{name} {what}:\n{listed}\n{remedy or f'See: pirl data check {name}'}")


def format_problems(problems: Iterable[Problem]) -> list[str]:
    """One line for each; the same problem of several episodes or files takes one line."""
    groups: dict[tuple[str, str | None, str | None], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.message, problem.column, problem.value), []).append(problem)
    return [_format(group) for group in groups.values()]


def _format(group: Sequence[Problem]) -> str:
    first = group[0]
    episodes = sorted({problem.episode for problem in group if problem.episode is not None})
    files = list(dict.fromkeys(problem.file for problem in group if problem.file))
    more = f" and {len(files) - 1} more {'file' if len(files) == 2 else 'files'}" if len(files) > 1 else ""
    where = [
        f"episode{'s' if len(episodes) > 1 else ''} {format_episodes(episodes)}" if episodes else "",
        f"{files[0]}{more}" if files else "",
        f"column {first.column}" if first.column else "",
    ]
    prefix = ", ".join(filter(None, where))
    value = f" (found {first.value})" if first.value is not None else ""
    return f"{prefix}{': ' if prefix else ''}{first.message}{value}"


def format_episodes(numbers: Iterable[int]) -> str:
    """Episode numbers as options take them: 0,3,7-12."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
