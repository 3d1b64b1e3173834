"""The progress of a run on the terminal: a live display, or plain lines where there is no terminal."""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
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
from pirl.training.metrics import Number


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
        self._total = total_steps
        self._unit = unit
        self._title = title
        self._every = every
        self._stream = sys.stderr
        self._console = Console(file=self._stream, quiet=quiet, highlight=False, markup=False, emoji=False)
        self._is_quiet = quiet
        self._log_path = log
        self._cleanup = contextlib.ExitStack()
        self._log: logging.Handler | None = None
        self._live: Live | None = None
        self._phase, self._phase_began = "starting", time.monotonic()
        self._note = ""
        self._step = 0
        self._shown_step: int | None = None
        self._values: dict[str, float | int] = {}
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None and error is not None:
            # An unexpected error is logged with its traceback.
            expected = isinstance(error, UserError | KeyboardInterrupt)
            self._to_log(logging.ERROR, str(error) or type(error).__name__, None if expected else error)
        live, self._live = self._live, None
        self._cleanup.close()
        if live is not None and self._step:
            self._print(self._line())

    def update(
        self, step: int, values: Mapping[str, float | int], timing: Mapping[str, float | int] | None = None
    ) -> None:
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
        if self._is_quiet:
            return
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
        words = [f"{self._unit} {self._step}/{self._total}", *describe(self._values), *self._pace()]
        return "  ".join(words)

    def _pace(self) -> list[str]:
        remaining = self._remaining()
        speed = [] if self._speed is None else [f"{self._speed:.3g} steps/s"]
        return speed if remaining is None else [*speed, f"ETA {format_duration(remaining)}"]

    def _remaining(self) -> float | None:
        """Seconds to the end, by the speed since the first steps, which compile."""
        left = self._total - self._step
        if self._began is None or left <= 0:
            return None
        began, first = self._began
        if self._step > first:
            return left * (time.monotonic() - began) / (self._step - first)
        return left / self._speed if self._speed else None

    def _render(self) -> Group:
        phase = f"{self._phase} {format_duration(time.monotonic() - self._phase_began)}"
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(self._total, 1), completed=self._step, width=24)
        head.add_row(self._title, phase, bar, f"{self._step}/{self._total}")
        lines = ["  ".join(describe(self._values)), "  ".join(self._pace()), self._note]
        return Group(head, *(Text(line, no_wrap=True, overflow="ellipsis") for line in lines if line))


def open_display(config: RLTrainConfig, title: str, run: RunFiles) -> Display:
    """The display of a run; a quiet one in all processes but the main one."""
    if config.on_policy:
        # The table of iterations shows the progress.
        total, unit, every = config.rollout.iterations, "iteration", None
    else:
        total, unit = config.steps + int(config.online.env_steps * config.online.utd_ratio), "step"
        every = config.logging.every
    return Display(total, title, unit=unit, every=every, log=run.log_file, quiet=not is_main_process())


def closing_words(
    config: RLTrainConfig, step: int, progress: int, interrupted: bool, stopped_early: bool, is_idle: bool
) -> str:
    """Why the run ends, and what could be done about it. `is_idle`: nothing was left to do."""
    if interrupted:
        return f"stopped at step {step}; continue with --resume."
    if stopped_early:
        return (
            f"stopped at step {step}: {config.stopping.metric} has not improved for {config.stopping.patience} "
            "measurements (--stopping.patience)."
        )
    if is_idle:
        more = "--rollout.iterations" if config.on_policy else "--steps"
        if config.on_policy and progress < config.rollout.iterations:
            more = "--rollout.max-barren (iterations in a row without any signal)"
        return f"all {step} updates are done already; to continue, raise {more}."
    return f"done after {step} updates."


def describe(values: Mapping[str, float | int]) -> list[str]:
    """The main numbers of a run, formatted."""
    words = [
        f"{word} {values[name]:.3g}" for word, name in (("loss", "loss"), ("q", "critic/q_mean")) if name in values
    ]
    if "eval/success" in values:
        success = f"success {values['eval/success']:.1%}".replace("%", " %")
        ends = [values.get(f"eval/success_{end}") for end in ("low", "high")]
        interval = [f"{100 * end:.1f}" for end in ends if end is not None]
        words.append(f"{success} [{', '.join(interval)}]" if len(interval) == 2 else success)
    if values.get("skipped"):
        words.append(f"skipped {values['skipped']:.0f}")
    return words


class _LogFile(logging.FileHandler):
    """A full disk is reported by what needs it more; a missing line of the log is no reason for a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore it."""


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
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is before
    ]
    for handler in handlers:
        handler.setStream(now)
    try:
        yield
    finally:
        for handler in handlers:
            handler.setStream(before)


# --- the table of RIPT -------------------------------------------------------------------------------------------


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


# Heading, width, the metric it shows, and how.
_COLUMNS: tuple[tuple[str, int, str, Callable[[float], str]], ...] = (
    ("iteration", 9, "iteration", lambda value: f"{value:.0f}"),
    ("tried", 5, "rollout/contexts", lambda value: f"{value:.0f}"),
    ("kept", 4, "rollout/groups", lambda value: f"{value:.0f}"),
    ("success", 7, "rollout/success", _share),
    ("before", 6, "rollout/success_kept", _share),
    ("after", 6, "rollout/success_after", _share),
    ("spread", 6, "rollout/advantage_spread", lambda value: f"{value:.2f}"),
    ("loss", 8, "loss", lambda value: f"{value:.4f}"),
    ("drift", 8, "rollout/drift", lambda value: f"{value:.2g}"),
    ("env steps", 9, "rollout/env_steps", lambda value: f"{value:,.0f}"),
    ("steps/s", 7, "env_steps_per_second", lambda value: f"{value:,.0f}"),
    ("policy", 8, "policy_ms", lambda value: f"{value:.1f} ms"),
)


def table_header() -> str:
    """The headings. `before` and `after` are the success at the states that were learned from."""
    return "  ".join(f"{heading:>{width}}" for heading, width, _, _ in _COLUMNS)


def table_row(iteration: int, values: Mapping[str, Number], loss: float | None) -> str:
    """One iteration; what was not measured is a dash."""
    known = {**values, "iteration": iteration, **({} if loss is None else {"loss": loss})}

    def cell(name: str, show: Callable[[float], str]) -> str:
        value = float(known.get(name, math.nan))
        return show(value) if math.isfinite(value) else "–"

    return "  ".join(f"{cell(name, show):>{width}}" for _, width, name, show in _COLUMNS)
