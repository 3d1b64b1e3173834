"""Tables and text for people, printed so that a reader that stops reading (head) is handled in one place."""

from typing import Any

import tyro


def default(words: str, metavar: str | None = None) -> Any:
    """How the help shows an option that may be left out: by what follows then, in words."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {words})")


def show(*parts: Any) -> None:
    """Print tables and strings one below the other."""
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 160, highlight=False, markup=False, emoji=False)
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
