"""`--json`: writes a command's results as JSON, to a file or to standard output."""

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

from pirl.cli.console import check_writable, optional
from pirl.files import write_file, writing

_FLAG = "--json"
_STANDARD_OUTPUT = Path("-")
# The standard output, while what people read goes elsewhere.
_for_programs: ContextVar[TextIO] = ContextVar("for_programs")


@dataclass(frozen=True, kw_only=True)
class WithJson:
    """A command that can write what it finds as JSON."""

    json: Annotated[Path | None, optional("[FILE]")] = None
    """Also write the result as JSON: to FILE or, without one (or with -), to standard output.
    Text output then goes to standard error."""

    def check_json(self) -> None:
        """Refuse a file that could not be written in the end."""
        if self.json not in (None, _STANDARD_OUTPUT):
            check_writable(self.json)

    def write_json(self, content: Any, what: str) -> None:
        """Write what was found, if it was asked for."""
        if self.json is None:
            return
        text = json.dumps(content, indent=2) + "\n"
        if self.json == _STANDARD_OUTPUT:
            _for_programs.get().write(text)
            return
        with writing(what, self.json.parent, "Choose another place."):
            write_file(self.json, text)
        print(f"written to {self.json}")


def name_standard_output(arguments: Sequence[str]) -> list[str]:
    """The same arguments, with a `-` behind a --json that no file follows: the parser wants a value."""
    named: list[str] = []
    for argument, following in itertools.pairwise([*arguments, "--"]):
        named.append(argument)
        if argument == _FLAG and following.startswith("--"):
            named.append(str(_STANDARD_OUTPUT))
    return named


@contextlib.contextmanager
def people_beside_programs(command: Any) -> Iterator[None]:
    """While a command writes JSON to standard output, all that it prints for people goes to standard error."""
    if getattr(command, "json", None) != _STANDARD_OUTPUT:
        yield
        return
    before = _for_programs.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _for_programs.reset(before)
