"""How far two saved states, or two subtrees of them, are apart; one array of each is in memory at a time."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Shaped

from pirl.training.inspecting import SavedState, group_of

# Numbers that are looked at together in float64: little beside the array they are from.
_BLOCK = 1 << 22


@dataclass
class Difference:
    """A subtree of two states. Sums run over the arrays that each has; differences over those that both have."""

    name: str
    leaves: int = 0
    differing: int = 0
    largest: float = 0.0
    only_first: int = 0
    only_second: int = 0
    squares: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # of the first, the second, the difference
    counts: list[int] = field(default_factory=lambda: [0, 0])
    common_square: float = 0.0  # of the second, where both have the array

    @property
    def root_mean_squares(self) -> tuple[float, float]:
        """The typical size of a number, on both sides."""
        first, second = (
            math.sqrt(square / count) if count else 0.0
            for square, count in zip(self.squares[:2], self.counts, strict=True)
        )
        return first, second

    @property
    def relative(self) -> float:
        """The norm of the difference over that of the second."""
        if self.squares[2] == 0:
            return 0.0
        return math.sqrt(self.squares[2] / self.common_square) if self.common_square else math.inf

    def to_json(self) -> dict[str, Any]:
        """The same as plain data; what is infinite is null, which JSON has a word for."""
        first, second = self.root_mean_squares
        return {
            "subtree": self.name,
            "leaves": self.leaves,
            "differing": self.differing,
            "max_difference": _finite(self.largest),
            "relative": _finite(self.relative),
            "rms_first": first,
            "rms_second": second,
            "only_first": self.only_first,
            "only_second": self.only_second,
        }


@dataclass(frozen=True)
class Comparison:
    """Subtrees that were compared, and arrays that could not be."""

    parts: list[Difference]
    only_first: list[str]
    only_second: list[str]
    other_shape: list[str]


def compare_states(
    first: SavedState, second: SavedState, *, depth: int, of: str = "", against: str | None = None
) -> Comparison:
    """Compare the subtree `of` the first state with the one it is put `against` in the second (the same, if not told)."""
    ours, theirs = first.select(of), second.select(of if against is None else against)
    parts: dict[str, Difference] = {}
    other_shape = []
    for name in dict.fromkeys([*ours, *theirs]):
        part = parts.setdefault(group_of(name, depth), Difference(group_of(name, depth)))
        sides = [
            _read(state, paths[name]) if name in paths else None for state, paths in ((first, ours), (second, theirs))
        ]
        if sides[0] is not None and sides[1] is not None and sides[0].shape != sides[1].shape:
            other_shape.append(f"{name}: {_shape(sides[0])} and {_shape(sides[1])}")
        _add(part, *sides)
    return Comparison(
        list(parts.values()),
        [name for name in ours if name not in theirs],
        [name for name in theirs if name not in ours],
        other_shape,
    )


def _read(state: SavedState, path: str) -> Shaped[np.ndarray, "..."]:
    return np.asarray(state.store.read([path])[path])


def _add(part: Difference, first: np.ndarray | None, second: np.ndarray | None) -> None:
    part.only_first += second is None
    part.only_second += first is None
    both = first is not None and second is not None and first.shape == second.shape
    for index, array in enumerate((first, second)):
        if array is not None:
            part.counts[index] += array.size
            if not both:
                part.squares[index] += sum(float(np.sum(np.square(block))) for block in _blocks(array))
    if not both or first is None or second is None:
        return
    part.leaves += 1
    largest = 0.0
    for ours, theirs in zip(_blocks(first), _blocks(second), strict=True):
        change = np.abs(ours - theirs)
        # NaN on both sides is no difference; on one side, it is an infinite one.
        change = np.where(np.isnan(ours) & np.isnan(theirs), 0.0, np.nan_to_num(change, nan=np.inf))
        largest = max(largest, float(np.max(change, initial=0.0)))
        square = float(np.sum(np.square(theirs)))
        part.squares[0] += float(np.sum(np.square(ours)))
        part.squares[1] += square
        part.squares[2] += float(np.sum(np.square(change)))
        part.common_square += square
    part.differing += largest > 0
    part.largest = max(part.largest, largest)


def _blocks(array: np.ndarray) -> Any:
    flat = array.reshape(-1)
    return (flat[start : start + _BLOCK].astype(np.float64) for start in range(0, flat.size, _BLOCK))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _shape(array: np.ndarray) -> str:
    return "×".join(map(str, array.shape)) or "a number"
