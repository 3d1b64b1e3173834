"""Successive halving: many trials for a short while, the best of them for longer, and so on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pirl.errors import UserError

Mode = Literal["max", "min"]


@dataclass(frozen=True)
class Halving:
    """How long trials are trained: all to the first rung, the best 1/`reduction` of those on it to the next, …"""

    rungs: tuple[int, ...]
    reduction: int = 3

    def __post_init__(self) -> None:
        if not self.rungs or self.rungs[0] < 1 or any(a >= b for a, b in zip(self.rungs, self.rungs[1:], strict=False)):
            shown = ",".join(map(str, self.rungs))
            raise UserError(f"--rungs {shown} should be whole numbers from 1 on, each larger than the one before.")
        if self.reduction < 2:
            raise UserError(f"--reduction {self.reduction} should be 2 or more: one in that many trials goes on.")

    def schedule(self, trials: int) -> list[tuple[int, int]]:
        """How many trials come to each rung, if none fails."""
        counts = [trials]
        while len(counts) < len(self.rungs):
            counts.append(self.places(counts[-1]))
        return list(zip(counts, self.rungs, strict=True))

    def places(self, trials: int) -> int:
        """How many of so many go on."""
        return max(1, trials // self.reduction)

    def promote(self, values: Mapping[int, float | None], mode: Mode) -> list[int]:
        """Which of those on a rung go on, by number, the best first; None is a trial that failed.

        Of equals the earlier ones go on. Those that failed take no place from others, but make no room either.
        """
        return rank(values, mode)[: self.places(len(values))]

    def work(self, trials: int) -> int:
        """What all trials together are trained for, in the unit of the rungs."""
        before = (0, *self.rungs)
        return sum(count * (rung - before[index]) for index, (count, rung) in enumerate(self.schedule(trials)))


def rank(values: Mapping[int, float | None], mode: Mode) -> list[int]:
    """The numbers of those that have a value, the best first, of equals the smaller number."""
    sign = -1 if mode == "max" else 1
    known = {number: value for number, value in values.items() if value is not None}
    return sorted(known, key=lambda number: (sign * known[number], number))


def make_rungs(least: int | None, most: int, reduction: int) -> tuple[int, ...]:
    """Rungs up to `most`, each 1/`reduction` of the next, none below `least`; three of them if that is not said."""
    if least is not None and not 1 <= least <= most:
        raise UserError(f"--min-iterations {least} should be from 1 to {most}, which is where the best trials end.")
    if most < 1:
        raise UserError(f"--iterations {most} should be 1 or more.")
    rungs: list[int] = []
    for power in range(3 if least is None else most.bit_length()):
        rung = math.floor(most / reduction**power)
        if rung < (least or 1) or rung in rungs:
            break
        rungs.insert(0, rung)
    return tuple(rungs)


def parse_rungs(text: str) -> tuple[int, ...]:
    """Rungs from a text such as 5,15,45."""
    parts: Sequence[str] = text.split(",")
    if not all(part.strip().isdecimal() and len(part) < 19 for part in parts):
        raise UserError(f"--rungs {text!r:.60} should be whole numbers separated by commas, such as 5,15,45.")
    return tuple(int(part) for part in parts)
