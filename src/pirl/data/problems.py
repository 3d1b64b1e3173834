"""What is wrong, or merely odd, about a dataset: said once, by episode, file, column and value."""

from collections.abc import Iterable
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

    def __init__(self, name: str, problems: Iterable[Problem], what: str = "cannot be read as a LeRobot dataset"):
        self.problems = list(problems)
        lines = "\n".join(f"  {problem}" for problem in self.problems[:20])
        more = f"\n  … and {len(self.problems) - 20} more" if len(self.problems) > 20 else ""
        super().__init__(f"{name} {what}:\n{lines}{more}\nSee: pirl data check {name}")
