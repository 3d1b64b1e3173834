"""The progress of a run on the terminal: a live display, or plain lines where there is no terminal."""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pirl.config import RLTrainConfig
from pirl.errors import UserError
from pirl.run_files import RunFiles
from pirl.text import format_duration
from pirl.training.distributed import is_main_process

Number = float | int


class Display:
    """Progress of a run. Lines of text come at most every `every` steps, or not by themselves (None).

    What is said also goes to the file `log`. `unit` is what steps are called. A quiet one has only the log, for errors.
    """

    def __init__(
        self,
        total_steps: int,
        title: str,
        *,
        unit: str = "step",
        every: int | None = 1,
        log: Path | None = None,
        quiet: bool = False,
    ):
        self._total, self._title, self._unit, self._every = total_steps, title, unit, every
        self._stream = sys.stderr
        self._console = Console(file=self._stream, quiet=quiet, highlight=False, markup=False, emoji=False)
        self._is_quiet, self._log_path = quiet, log
        self._cleanup = contextlib.ExitStack()
        self._log: logging.Handler | None = None
        self._live: Live | None = None
        self._phase, self._phase_began = "starting", time.monotonic()
        self._note = ""
        self._step = 0
        self._shown_step: int | None = None
        self._values: dict[str, Number] = {}
        self._speed: float | None = None
        self._began: tuple[float, int] | None = None

    def __enter__(self) -> "Display":
        if self._log_path is not None:
            self._log = self._cleanup.enter_context(_logging_to(self._log_path))
        if not self._is_quiet and self._stream.isatty() and not self._console.is_dumb_terminal:
            # Redirected output shows above the display; a standard output that goes to a file is left alone.
            live = Live(
                get_renderable=self._render, console=self._console, transient=True, redirect_stdout=sys.stdout.isatty()
            )
            self._live = self._cleanup.enter_context(live)
            self._cleanup.enter_context(_warnings_moved(self._stream, sys.stderr))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            # An unexpected error is logged with its traceback.
            expected = isinstance(error, UserError | KeyboardInterrupt)
            self._to_log(logging.ERROR, str(error) or type(error).__name__, None if expected else error)
        live, self._live = self._live, None
        self._cleanup.close()
        if live is not None and self._step:
            self._print(self._line())

    def update(self, step: int, values: Mapping[str, Number], timing: Mapping[str, Number] | None = None) -> None:
        """Show a step. What a step does not measure, such as success, stays as it was last measured."""
        self._step = step
        self._values.update(values)
        self._speed = (timing or {}).get("steps_per_second", self._speed)
        if self._began is None:
            self._began = time.monotonic(), step
        if self._live is not None or self._every is None:
            return
        due = self._shown_step is None or step >= self._shown_step + self._every or step == self._total
        if due and step != self._shown_step:
            self._shown_step = step
            self._print(self._line())

    def say(self, text: str) -> None:
        """A line that stays, and goes to the log."""
        if not self._is_quiet:
            self._print(text)
            self._to_log(logging.INFO, text)

    def note(self, text: str) -> None:
        """Show a note below the phase; safe to call from a signal handler."""
        self._note = text

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show what is being done."""
        before = self._phase, self._phase_began
        self._phase, self._phase_began = name, time.monotonic()
        try:
            yield
        finally:
            self._phase, self._phase_began = before

    def _print(self, text: str) -> None:
        if self._console.quiet:
            return
        try:
            self._console.print(Text(text), soft_wrap=True)
            self._stream.flush()
        except (OSError, SystemExit) as error:  # the latter is what rich makes of a broken pipe
            # The reader of a pipe has gone; the run goes on.
            self._console.quiet = True
            self._to_log(logging.WARNING, f"nothing can be printed any more ({error!r}); the run continues.")

    def _to_log(self, level: int, text: str, error: BaseException | None = None) -> None:
        if self._log is not None:
            trace = None if error is None else (type(error), error, error.__traceback__)
            self._log.handle(logging.LogRecord("pirl", level, "", 0, text, None, trace))

    def _line(self) -> str:
        return "  ".join([f"{self._unit} {self._step}/{self._total}", *describe(self._values), *self._pace()])

    def _pace(self) -> list[str]:
        """The speed, and the time to the end by the speed since the first steps, which compile."""
        words = [] if self._speed is None else [f"{self._speed:.3g} steps/s"]
        left = self._total - self._step
        if self._began is None or left <= 0:
            return words
        began, first = self._began
        speed = self._speed
        if self._step > first:
            speed = (self._step - first) / max(time.monotonic() - began, 1e-9)
        return [*words, f"ETA {format_duration(left / speed)}"] if speed else words

    def _render(self) -> Group:
        phase = f"{self._phase} {format_duration(time.monotonic() - self._phase_began)}"
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(self._total, 1), completed=self._step, width=24)
        head.add_row(self._title, phase, bar, f"{self._step}/{self._total}")
        lines = ["  ".join(describe(self._values)), "  ".join(self._pace()), self._note]
        return Group(head, *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines if line))


def open_display(config: RLTrainConfig, title: str, run: RunFiles) -> Display:
    """The display of a run; a quiet one in all processes but the main one."""
    total, unit = config.steps + int(config.online.env_steps * config.online.utd_ratio), "step"
    every: int | None = config.logging.every
    if config.on_policy:
        # The table of iterations shows the progress.
        total, unit, every = config.rollout.iterations, "iteration", None
    return Display(total, title, unit=unit, every=every, log=run.log_file, quiet=not is_main_process())


def describe(values: Mapping[str, Number]) -> list[str]:
    """The main numbers of a run, formatted."""
    names = (("loss", "loss"), ("q", "critic/q_mean"))
    words = [f"{word} {values[name]:.3g}" for word, name in names if name in values]
    if "eval/success" in values:
        success = f"success {100 * values['eval/success']:.1f} %"
        if "eval/success_low" in values:
            success += f" [{100 * values['eval/success_low']:.1f}, {100 * values['eval/success_high']:.1f}]"
        words.append(success)
    if values.get("skipped"):
        words.append(f"skipped {values['skipped']:.0f}")
    return words


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore it: a full disk is reported by what needs it more."""


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[logging.Handler]:
    """Have this file hold everything that is logged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger().removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()


@contextlib.contextmanager
def _warnings_moved(before: Any, now: Any) -> Iterator[None]:
    """Let log messages on their way to the terminal appear above the display instead of within it."""
    streams = (each for each in logging.getLogger().handlers if isinstance(each, logging.StreamHandler))
    handlers = [handler for handler in streams if handler.stream is before]
    for handler in handlers:
        handler.setStream(now)
    try:
        yield
    finally:
        for handler in handlers:
            handler.setStream(before)


# --- the table of RIPT ------------------------------------------------------------------------------------------------

# Heading, width, the metric it shows, and its format.
_COLUMNS = (
    ("iteration", 9, "iteration", "{:.0f}"),
    ("tried", 5, "rollout/contexts", "{:.0f}"),
    ("kept", 4, "rollout/groups", "{:.0f}"),
    ("success", 7, "rollout/success", "{:.0%}"),
    ("before", 6, "rollout/success_kept", "{:.0%}"),
    ("after", 6, "rollout/success_after", "{:.0%}"),
    ("spread", 6, "rollout/advantage_spread", "{:.2f}"),
    ("loss", 8, "loss", "{:.4f}"),
    ("drift", 8, "rollout/drift", "{:.2g}"),
    ("env steps", 9, "rollout/env_steps", "{:,.0f}"),
    ("steps/s", 7, "env_steps_per_second", "{:,.0f}"),
    ("policy", 8, "policy_ms", "{:.1f} ms"),
)


def table_header() -> str:
    """The headings. `before` and `after` are the success at the states that were learned from."""
    return "  ".join(f"{heading:>{width}}" for heading, width, _, _ in _COLUMNS)


def table_row(values: Mapping[str, Number]) -> str:
    """One iteration; what was not measured is a dash."""
    cells = []
    for _, width, name, form in _COLUMNS:
        value = float(values.get(name, math.nan))
        cell = form.format(value).replace("%", " %") if math.isfinite(value) else "–"
        cells.append(f"{cell:>{width}}")
    return "  ".join(cells)
