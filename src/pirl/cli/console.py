"""What commands show and write: text for people, printed so that a reader that stops reading is handled in one place."""

import os
from pathlib import Path
from typing import Any

import tyro

from pirl.errors import UserError

# Where nothing says how wide lines may be.
WIDE = 160


def default(words: str, metavar: str | None = None) -> Any:
    """How the help shows an option that may be left out: by what follows then, in words."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {words})")


def optional(metavar: str) -> Any:
    """How the help shows an option that may be left out, and nothing follows then."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


def show(*parts: Any, width: int | None = None) -> None:
    """Print tables and strings one below the other: as wide as told, as the terminal, or wide where there is none."""
    from rich.console import Console

    if width is None and not Console().is_terminal:
        width = WIDE
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as text:
        console.print(*parts, sep="\n")
    print(text.get(), end="")


def facts(rows: list[tuple[str, str]]) -> Any:
    """A table of names and what is said about them."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows:
        table.add_row(name, value)
    return table


def count(things: Any, name: str) -> str:
    """How many, in words."""
    return f"{len(things):,} {name}{'' if len(things) == 1 else 's'}"


def check_writable(file: Path) -> None:
    """Refuse a file that could not be written in the end, before the work that it is to hold."""
    if file.is_dir():
        raise UserError(f"{file} is a directory; name a file.")
    there = next(parent for parent in file.absolute().parents if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "you may not write there" if there.is_dir() else "it is no directory"
        raise UserError(f"{file} cannot be written in {there}: {why}. Choose another place.")
