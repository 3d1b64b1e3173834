"""What the trainer knows of practice: rounds in which the learner acts, and the updates that follow each of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pirl.agents.common import Agent
from pirl.training.writers import Number


@dataclass(frozen=True)
class Told:
    """What there is to tell of a round: values for the log, values that the clock has a part in, lines for people."""

    metrics: Mapping[str, Number] = field(default_factory=dict)
    timing: Mapping[str, Number] = field(default_factory=dict)
    lines: Sequence[str] = ()


class Interrupted(Exception):  # noqa: N818
    """Somebody said stop in the middle of a round: it is as if it had not begun, and comes again another time."""


@runtime_checkable
class Practice(Protocol):
    """Rounds of acting and learning. Between rounds nothing is under way, and within one only updates are."""

    @property
    def owes_updates(self) -> bool:
        """Whether there are batches for the next updates."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether all has been tried, and all updates are made."""
        ...

    @property
    def updates(self) -> int:
        """Updates made so far, or at least given their batches."""
        ...

    @property
    def rounds(self) -> int:
        """Rounds that have come to their end, with their updates."""
        ...

    def collect(self, agent: Agent, is_stopped: Callable[[], bool] = lambda: False) -> Told:
        """Act; the updates that follow from it are owed then. Raises `Interrupted` if it is stopped meanwhile."""
        ...

    def batches(self) -> list[Any]:
        """The batches of the next updates that are made in one go."""
        ...

    def conclude(self, agent: Agent, loss: float | None) -> Told:
        """When a round has no more updates to make: what came of it, given their mean loss."""
        ...

    def close(self) -> None:
        """Finish what was written."""
        ...

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        ...

    def shown(self) -> dict[str, Any]:
        """For other hosts, which restore it as from a checkpoint; it is not kept for later."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        ...
