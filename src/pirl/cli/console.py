"""What commands print and write: tables, a progress bar, and JSON."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pirl.cli.parser import Command, option
from pirl.errors import UserError
from pirl.files import write_file, writing

if TYPE_CHECKING:
    from pirl.envs.evaluation import EpisodeResult

WIDE = 160
"""Width of lines where there is no terminal."""
STDOUT = Path("-")
_json_stdout: ContextVar[TextIO] = ContextVar("json_stdout")


def show(*parts: Any, width: int | None = None) -> None:
    """Print tables and strings one below the other, as wide as the terminal."""
    from rich.console import Console

    if width is None and not Console().is_terminal:
        width = WIDE
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as text:
        console.print(*parts, sep="\n")
    print(text.get(), end="")


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, left: int | None = None) -> Any:
    """A table without lines. The first `left` columns are aligned to the left (none: all)."""
    from rich.table import Table

    columns = Table(box=None, pad_edge=False, show_header=any(headers))
    for index, header in enumerate(headers):
        columns.add_column(header, justify="left" if left is None or index < left else "right", overflow="fold")
    for row in rows:
        columns.add_row(*row)
    return columns


def facts(rows: Iterable[tuple[str, str]]) -> Any:
    """A table of names and values."""
    return table(("", ""), rows)


def check_writable(file: Path) -> None:
    """Raise if a file could not be written, before the work that it is to hold."""
    if file.is_dir():
        raise UserError(f"{file} is a directory; name a file.")
    there = next(parent for parent in file.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "you may not write there" if there.is_dir() else "it is no directory"
        raise UserError(f"{file} cannot be written in {there}: {why}. Choose another place.")


@contextlib.contextmanager
def progress(total: int | None, what: str) -> "Iterator[Callable[[EpisodeResult], None]]":
    """A progress bar with the success rate so far, if standard error is a terminal and the total is known."""
    if total is None or not sys.stderr.isatty():
        yield lambda result: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        successes: list[bool] = []

        def advance(result: "EpisodeResult") -> None:
            if result.lost is None:
                successes.append(result.success)
            rate = f", success {sum(successes) / len(successes):.0%}" if successes else ""
            bar.update(task, advance=1, description=f"{what}{rate}")

        yield advance


@dataclass(frozen=True, kw_only=True)
class WithJson(Command):
    """A command that can write its result as JSON."""

    json: Path | None = option("[FILE]", bare=str(STDOUT))
    """Also write the result as JSON: to FILE or, without one (or with -), to standard output.
    Text output then goes to standard error."""

    def check_json(self) -> None:
        """Raise if the file could not be written."""
        if self.json not in (None, STDOUT):
            check_writable(self.json)

    def write_json(self, content: Any, what: str) -> None:
        """Write the result, if --json was given."""
        if self.json is None:
            return
        text = json.dumps(content, indent=2) + "\n"
        if self.json == STDOUT:
            _json_stdout.get().write(text)
            return
        with writing(what, self.json.parent, "Choose another place."):
            write_file(self.json, text)
        print(f"written to {self.json}")


@contextlib.contextmanager
def text_beside_json(command: Command) -> Iterator[None]:
    """While a command writes JSON to standard output, its text output goes to standard error."""
    with contextlib.ExitStack() as stack:
        if getattr(command, "json", None) == STDOUT:
            _json_stdout.set(sys.stdout)
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield
