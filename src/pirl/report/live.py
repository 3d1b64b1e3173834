"""What a person watches of work that takes long: a table that is drawn anew, or lines where there is no terminal."""

import contextlib
import sys
from abc import ABC, abstractmethod
from types import TracebackType
from typing import ClassVar, TypeVar

from rich.console import Console
from rich.live import Live
from rich.table import Table

_Kind = TypeVar("_Kind", bound="LiveTable")


class LiveTable(ABC):
    """A table on standard error, while it is open."""

    is_transient: ClassVar[bool]
    """Whether it goes away in the end."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None

    def __enter__(self: _Kind) -> _Kind:
        if sys.stderr.isatty() and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=self.is_transient, get_renderable=self._table
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def refresh(self) -> None:
        """Draw it anew."""
        if self._live is not None:
            self._live.refresh()

    @abstractmethod
    def _table(self) -> Table:
        """As it is now."""

    def _say(self, text: str) -> None:
        """A line, where there is no table to show it."""
        if self._live is None:
            # Its own print, because a line is a line, however wide.
            with contextlib.suppress(BrokenPipeError):
                print(text, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
