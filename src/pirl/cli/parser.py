"""Command lines from dataclasses: fields are options, and the strings below them are their help.

argparse formats the help. It does not read the words, because environments have options of their own, switches may be
given a value (--from-scratch false), and an unknown option is answered with the nearest.
"""

import argparse
import ast
import dataclasses
import inspect
import itertools
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from pirl.errors import UserError, did_you_mean
from pirl.files import expand_home
from pirl.text import BOOLS, convert, format_type

_HELP = {"-h", "--help"}
_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


def option(metavar: str = "", *, default: Any = None, shown: str = "", bare: str = "") -> Any:
    """An option whose help names what it takes, or says its default in words; `bare` is its value if none follows."""
    return dataclasses.field(default=default, metadata={"metavar": metavar, "shown": shown, "bare": bare})


def positional(metavar: str, default: Any = MISSING) -> Any:
    """An argument without a flag."""
    return dataclasses.field(default=default, metadata={"metavar": metavar, "positional": True})


@dataclass(frozen=True)
class Option:
    """A field as an option. `shown` is its default in the help, `bare` its value if none follows."""

    name: str
    hint: Any
    help: str
    default: Any = None
    metavar: str = ""
    shown: str = ""
    bare: str = ""
    positional: bool = False

    @property
    def flag(self) -> str:
        """What is typed before its value."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def required(self) -> bool:
        """Whether it cannot be left out."""
        return self.default is MISSING

    @property
    def repeated(self) -> bool:
        """Whether it collects values."""
        return get_origin(self.hint) is tuple

    def read(self, texts: Sequence[str], program: str) -> Any:
        """The value of what was typed."""
        kind, values = get_args(self.hint)[0] if self.repeated else _without_none(self.hint), []
        for text in texts:
            try:
                value = convert(text, kind, texts=True)
            except ValueError:
                name = self.metavar if self.positional else self.flag
                message = f"{program}: {name} should be {format_type(kind)}; it is {text!r:.80}."
                raise UserError(message) from None
            values.append(expand_home(value) if isinstance(value, Path) else value)
        return tuple(values) if self.repeated else values[-1]


@dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand. Its docstring and fields are its help; its field `settings` collects other options."""

    aliases: ClassVar[Mapping[str, str]] = {}
    takes_settings: ClassVar[bool] = False

    def run(self) -> int:
        """Do it; returns the exit code."""
        raise NotImplementedError

    @classmethod
    def setting_types(cls) -> Mapping[str, Any]:
        """The names and types of settings; those of environments, which begin with env., are texts."""
        return {}

    @classmethod
    def help_groups(cls, arguments: Sequence[str], program: str) -> Iterable[tuple[str, str, list[Option]]]:
        """Settings for the help: groups with a title, a description and options."""
        return ()

    @classmethod
    def parse(cls, arguments: Sequence[str], program: str) -> Any:
        """The command as typed; --help is answered here."""
        options = {option.name: option for option in list_options(cls)}
        words, given, settings = _split(cls, arguments, options, program)
        if _HELP & set(words):
            rest = [argument for argument in arguments if argument not in _HELP]
            _print_help(cls, options.values(), cls.help_groups(rest, program), program)
            sys.exit(0)
        for option in options.values():
            if option.positional and words:
                taken = len(words) if option.repeated else 1
                given[option.name], words = words[:taken], words[taken:]
        if words:
            raise UserError(f"{program} does not expect {' '.join(words)!r}. See {program} --help.")
        for option in options.values():
            if option.required and option.name not in given:
                name = option.metavar if option.positional else option.flag
                raise UserError(f"{program} needs {name}. See {program} --help.")
        values = {name: options[name].read(texts, program) for name, texts in given.items()}
        if cls.takes_settings:
            values["settings"] = settings
        return _make(cls, values)


def _split(
    kind: type[Command], arguments: Sequence[str], options: Mapping[str, Option], program: str
) -> tuple[list[str], dict[str, list[str]], dict[str, str]]:
    """Words without a flag, the texts of every option, and settings."""
    words: list[str] = []
    given: dict[str, list[str]] = {}
    settings: dict[str, str] = {}
    waiting = list(reversed(arguments))
    while waiting:
        argument = waiting.pop()
        if argument == "--":
            words += reversed(waiting)
            break
        if not argument.startswith("--") or argument in _HELP:
            words.append(argument)
            continue
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        name = kind.aliases.get(name, name)
        option = options.get(name)
        if option is None or option.positional:
            types = kind.setting_types()
            # Fields of a group that are not known are answered where the group is read: its kind is known there.
            groups = {"env", *(setting.partition(".")[0] for setting in types)} if kind.takes_settings else ()
            if name not in types and not ("." in name and name.partition(".")[0] in groups):
                flags = [option.flag for option in options.values() if not option.positional]
                flags += [f"--{setting.replace('_', '-')}" for setting in types]
                raise UserError(f"{program} has no option {flag}. {did_you_mean(flag, flags)}See {program} --help.")
            option = Option(name, types.get(name, str), "")
        following = waiting[-1] if waiting else "--"
        if not equals and option.hint is bool and following.lower() not in BOOLS:
            value = "true"
        elif not equals and following.startswith("--"):
            if not option.bare:
                raise UserError(f"{program}: {flag} needs a value.")
            value = option.bare
        elif not equals:
            value = waiting.pop()
        if name in options:
            given.setdefault(name, []).append(value)
        else:
            settings[name] = value
    return words, given, settings


def list_options(kind: Any, prefix: str = "") -> Iterator[Option]:
    """The options of a dataclass; those of a group in it begin with its name."""
    hints, docs = get_type_hints(kind), field_docs(kind)
    for field in dataclasses.fields(kind):
        name, hint = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from list_options(hint, f"{name}.")
        elif name != "settings":
            yield Option(name, hint, docs[field.name], field.default, **field.metadata)


def field_docs(kind: Any) -> dict[str, str]:
    """What a dataclass and its bases say of each field: the string below it."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            source = textwrap.dedent(inspect.getsource(base))  # type: ignore[arg-type]
            body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
            for statement, below in itertools.pairwise(body):
                if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr):
                    texts[ast.unparse(statement.target)] = " ".join(ast.literal_eval(below.value).split())
    return {field.name: texts.get(field.name, "") for field in dataclasses.fields(kind)}


def _make(kind: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """A dataclass, and the groups in it, from the values by their dotted names."""
    hints, made = get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hints[field.name]):
            try:
                made[field.name] = _make(hints[field.name], values, f"{name}.")
            except UserError as error:
                raise UserError(f"--{name}: {error}") from error
        elif name in values:
            made[field.name] = values[name]
    return kind(**made)


def _without_none(hint: Any) -> Any:
    is_union = get_origin(hint) in (Union, UnionType)
    return next(kind for kind in get_args(hint) if kind is not NoneType) if is_union else hint


# --- the help ----------------------------------------------------------------------------------------------------


def print_commands(program: str, about: str, commands: Mapping[str, str]) -> None:
    """The help of a group of commands."""
    parser = argparse.ArgumentParser(program, description=about, usage=f"{program} COMMAND …")
    group = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in commands.items():
        group.add_parser(name, help=text.replace("%", "%%"))
    parser.print_help()


def _print_help(
    kind: type[Command], options: Iterable[Option], groups: Iterable[tuple[str, str, list[Option]]], program: str
) -> None:
    width = shutil.get_terminal_size().columns - 2
    about = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    needed = [
        option.metavar if option.positional else f"{option.flag} {_metavar(option)}"
        for option in options
        if option.positional or option.required
    ]
    parser = argparse.ArgumentParser(
        usage=" ".join([program, *needed, "[options]"]),
        description="\n\n".join(textwrap.fill(paragraph, width) for paragraph in about),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=width),
    )
    for option in options:
        _add_help(parser, option)
    for title, description, members in groups:
        group = parser.add_argument_group(title, description)
        for option in members:
            _add_help(group, option)
    parser.print_help()


def _add_help(group: argparse._ActionsContainer, option: Option) -> None:
    default = option.shown or format_value(option.default)
    text = f"{option.help} (default: {default})" if default else option.help
    name = option.name if option.positional else option.flag
    if option.hint is bool and option.default is not True:
        group.add_argument(name, help=text.replace("%", "%%"), action="store_true")
    else:
        group.add_argument(name, help=text.replace("%", "%%"), metavar=_metavar(option))


def _metavar(option: Option) -> str:
    hint = _without_none(option.hint)
    if option.metavar:
        return option.metavar
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        words = [_METAVARS.get(kind, "TEXT") for kind in kinds if kind is not ...]
        return ",".join([*words, "…"] if ... in kinds else words)
    return "true|false" if hint is bool else _METAVARS.get(hint, "VALUE")


def format_value(value: Any) -> str:
    """A value as it is typed; nothing for what is left out."""
    if value is None or value is False or value is MISSING or value in ((), ""):
        return ""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
