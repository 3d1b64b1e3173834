"""What a person sees of a sweep under way: a line for all that happens, and below them the trials at work."""

import time
from pathlib import Path

from rich.table import Table
from rich.text import Text

from pirl.processes import last_lines
from pirl.report.live import LiveTable, clock


class Display(LiveTable):
    """Progress of the trials, on standard error."""

    is_transient = True

    def __init__(self) -> None:
        super().__init__()
        self._running: dict[str, tuple[Path, float]] = {}

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._live is not None:
            self._console.print(text)
        self._say(text)

    def started(self, name: str, log: Path) -> None:
        """A trial is at work."""
        self._running[name] = (log, time.monotonic())

    def ended(self, name: str) -> None:
        """It is no more."""
        self._running.pop(name, None)
        self.refresh()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False, expand=True)
        table.add_column("trial", no_wrap=True, style="bold cyan")
        table.add_column("time", no_wrap=True, justify="right")
        table.add_column("said", no_wrap=True, overflow="ellipsis", ratio=1, style="dim")
        for name, (log, begun) in self._running.items():
            table.add_row(name, clock(time.monotonic() - begun), Text("".join(last_lines(log))))
        return table
