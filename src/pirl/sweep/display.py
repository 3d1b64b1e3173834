"""What a person sees of a sweep under way: a line for all that happens, and below them the trials at work."""

import contextlib
import sys
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pirl.processes import last_lines


class Display:
    """Progress of the trials, on standard error."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[Path, float]] = {}
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None

    def __enter__(self) -> "Display":
        if sys.stderr.isatty() and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True, get_renderable=self._table)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._live is not None:
            self._console.print(text)
            return
        # Its own print, because a line is a line, however wide.
        with contextlib.suppress(BrokenPipeError):
            print(text, file=sys.stderr, flush=True)

    def started(self, name: str, log: Path) -> None:
        """A trial is at work."""
        self._running[name] = (log, time.monotonic())

    def ended(self, name: str) -> None:
        """It is no more."""
        self._running.pop(name, None)
        self.refresh()

    def refresh(self) -> None:
        """Draw it anew."""
        if self._live is not None:
            self._live.refresh()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False, expand=True)
        table.add_column("trial", no_wrap=True, style="bold cyan")
        table.add_column("time", no_wrap=True, justify="right")
        table.add_column("said", no_wrap=True, overflow="ellipsis", ratio=1, style="dim")
        for name, (log, begun) in self._running.items():
            seconds = int(time.monotonic() - begun)
            said = "".join(last_lines(log))
            table.add_row(name, f"{seconds // 60}:{seconds % 60:02d}", Text(said))
        return table
