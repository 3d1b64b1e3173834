"""What is wrong, or merely odd, about a dataset: said once, by episode, file, column and value."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pirl.errors import DataError


@dataclass(frozen=True)
class Problem:
    """One complaint. A `problem` keeps a dataset from training as it is; a `note` says how an oddity was read."""

    message: str
    severity: Literal["problem", "note"] = "problem"
    episode: int | None = None
    file: str | None = None
    column: str | None = None
    value: str | None = None

    def __str__(self) -> str:
        where = [
            f"episode {self.episode}" if self.episode is not None else "",
            self.file or "",
            f"column {self.column}" if self.column else "",
        ]
        place = ", ".join(part for part in where if part)
        value = f" (found {self.value})" if self.value is not None else ""
        return f"{place}: {self.message}{value}" if place else f"{self.message}{value}"

    def to_json(self) -> dict[str, Any]:
        """Only what is known."""
        return {key: value for key, value in asdict(self).items() if value is not None}


class BrokenDatasetError(DataError):
    """A dataset that cannot be used, with everything that was found to be wrong. `what` is what it comes to."""

    def __init__(
        self,
        name: str,
        problems: Iterable[Problem],
        what: str = "cannot be read as a LeRobot dataset",
        remedy: str | None = None,
    ):
        self.problems = list(problems)
        lines = [f"  {line}" for line in format_problems(self.problems)]
        shown = "\n".join([*lines[:20], *([f"  … and {len(lines) - 20} more"] if len(lines) > 20 else [])])
        super().__init__(f"{name} {what}:\n{shown}\n{remedy or f'See: pirl data check {name}'}")


def format_problems(problems: Iterable[Problem]) -> list[str]:
    """One line for each; what is wrong with several episodes or files in the same way is said once."""
    groups: dict[tuple[str, str | None, str | None], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.message, problem.column, problem.value), []).append(problem)
    return [_format_group(group) for group in groups.values()]


def _format_group(group: Sequence[Problem]) -> str:
    first = group[0]
    episodes = sorted({problem.episode for problem in group if problem.episode is not None})
    files = list(dict.fromkeys(problem.file for problem in group if problem.file))
    if len(episodes) < 2 and len(files) < 2:
        return str(first)
    more = f" and {len(files) - 1} more {'file' if len(files) == 2 else 'files'}" if len(files) > 1 else ""
    where = [
        f"episode{'s' if len(episodes) > 1 else ''} {format_episodes(episodes)}" if episodes else "",
        f"{files[0]}{more}" if files else "",
        f"column {first.column}" if first.column else "",
    ]
    value = f" (found {first.value})" if first.value is not None else ""
    return f"{', '.join(filter(None, where))}: {first.message}{value}"


def format_episodes(numbers: Iterable[int]) -> str:
    """Episode numbers as options take them: 0,3,7-12."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
