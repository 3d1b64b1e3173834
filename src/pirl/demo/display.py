"""What a person sees of a demo under way: a table that follows every step, or plain lines."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from pirl.demo.steps import Step
from pirl.processes import last_lines
from pirl.report.live import LiveTable, clock

_State = Literal["waiting", "running", "done", "there", "failed", "stopped"]
_STYLES: dict[_State, str] = {
    "waiting": "dim",
    "running": "bold cyan",
    "done": "green",
    "there": "green",
    "failed": "bold red",
    "stopped": "yellow",
}


class Display(LiveTable):
    """Progress of the steps, on standard error."""

    is_transient = False

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self._steps = {step.name: step for step in steps}
        self._states: dict[str, _State] = dict.fromkeys(self._steps, "waiting")
        self._seconds: dict[str, float] = {}
        self._begun: dict[str, float] = {}
        self._logs: dict[str, Path] = {}
        self._note = ""

    def started(self, step: Step, log: Path) -> None:
        """A step begins; what it says goes to the log."""
        self._states[step.name], self._logs[step.name] = "running", log
        self._begun[step.name] = time.monotonic()
        self._say(f"{step.name}: {step.title}")

    def finished(self, step: Step, seconds: float) -> None:
        """A step has come to its end, after so long in all."""
        self._end(step, "done", seconds)
        self._say(f"{step.name}: done in {seconds:.0f} s")

    def skipped(self, step: Step, seconds: float) -> None:
        """A step was done before, in so long."""
        self._end(step, "there", seconds)
        self._say(f"{step.name}: there already")

    def failed(self, step: Step) -> None:
        """A step failed."""
        self._end(step, "failed")
        self._say(f"{step.name}: failed")

    def stopped(self, step: Step) -> None:
        """A step was made to end."""
        self._end(step, "stopped")
        self._say(f"{step.name}: stopped")

    def note(self, text: str) -> None:
        """A few words about all of it."""
        self._note = text
        self._say(text)

    def _end(self, step: Step, state: _State, seconds: float | None = None) -> None:
        passed = time.monotonic() - self._begun.get(step.name, time.monotonic())
        self._states[step.name] = state
        self._seconds[step.name] = passed if seconds is None else seconds
        self.refresh()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False, expand=True, caption=self._note or None)
        for name in ("state", "title", "time"):
            table.add_column(name, no_wrap=True, justify="right" if name == "time" else "left")
        table.add_column("said", no_wrap=True, overflow="ellipsis", ratio=1, style="dim")
        for name, step in self._steps.items():
            state = self._states[name]
            running = state == "running"
            seconds = time.monotonic() - self._begun[name] if running else self._seconds.get(name)
            table.add_row(
                Text(state, _STYLES[state]),
                Text(step.title, "" if running else "dim" if state == "waiting" else "default"),
                "" if seconds is None else clock(seconds),
                Text("".join(last_lines(self._logs[name])) if running or state == "failed" else ""),
            )
        return table
