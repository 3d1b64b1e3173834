"""What `pirl train PRESET --help` shows: every option with what it takes, the value it has there, and what it is for."""

import ast
import dataclasses
import inspect
import shutil
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from rich.table import Table

from pirl.cli.console import WIDE, show
from pirl.cli.train import Train
from pirl.config import RLTrainConfig
from pirl.config.values import CHOICES, in_words, to_plain
from pirl.envs.options import list_options
from pirl.envs.registry import EnvConfig, find_env_class

# Of the column with the options.
_WIDTH = 40
# Kinds that a value tells by itself.
_SHOWN_BY_VALUE = ("a whole number", "a number", "true or false", "text", "a path")
# Of an option: how it is given, what it takes, its value, what it is for.
_Row = tuple[str, str, str, str]


def show_options(config: RLTrainConfig, program: str, command: Any) -> None:
    """Print all of them, those of the command and those of the configuration, group by group."""
    print(f"usage: {program} [PRESET] {command.needs} [OPTIONS]\n")
    print(f"{inspect.cleandoc(command.__doc__ or '')}\n")
    print("Every option is shown with its current value. Write lists as a,b or [a, b], and an empty value as none.")
    texts = _explanations(command)
    _show_group(
        f"the {'run' if command is Train else command.__name__.lower()}",
        [
            (f"--{_dashed(field.name)}", _takes(field), _default(field), texts[field.name])
            for field in dataclasses.fields(command)
            if field.name not in ("preset", "settings")
        ],
    )
    for title, rows in _groups(config, "", "the configuration"):
        _show_group(title, rows)


def _takes(field: Any) -> str:
    """What an option of the command takes; a switch takes nothing."""
    hint = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
    return "" if hint is bool else in_words(hint).removesuffix(" or none")


def _default(field: Any) -> str:
    return "" if field.default in (None, False, ()) else _shown(field.default)


def _show_group(title: str, rows: list[_Row]) -> None:
    """The option with its value, and beside it what it is for and what it takes: two columns, for narrow terminals."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(width=_WIDTH, overflow="fold")
    table.add_column()
    for flag, takes, value, text in rows:
        is_shown = not takes or (value and takes in _SHOWN_BY_VALUE)
        table.add_row(f"{flag} {value}".rstrip(), " ".join(filter(None, (text, "" if is_shown else f"({takes})"))))
    show("", title, table, width=shutil.get_terminal_size((WIDE, 0)).columns)


def _groups(config: Any, prefix: str, title: str) -> Iterator[tuple[str, list[_Row]]]:
    """The options of a group, then those of the groups in it."""
    group = prefix.removesuffix(".")
    kind, hints, texts = type(config), get_type_hints(type(config)), _explanations(type(config))
    rows = [_choice(group, config)] if group in CHOICES else []
    inner = []
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        if isinstance(value, EnvConfig) or name == "env":
            inner.append((f"env: {texts['env']}", _environment(value)))
        elif dataclasses.is_dataclass(value):
            inner += _groups(value, f"{name}.", f"{_dashed(name)}: {texts[field.name] or _summary(type(value))}")
        elif any(dataclasses.is_dataclass(choice) for choice in get_args(hints[field.name])):
            fields = next(choice for choice in get_args(hints[field.name]) if dataclasses.is_dataclass(choice))
            rows.append((f"--{_dashed(name)}.…", "a group", "none", f"{_summary(fields)} ({_names(fields)})"))
        else:
            rows.append((f"--{_dashed(name)}", in_words(hints[field.name]), _shown(value), texts[field.name]))
    # Where fields are not explained one by one, their class explains them together.
    about = inspect.cleandoc(kind.__doc__ or "")
    together = "" if any(texts.values()) or about in title else f"\n{textwrap.indent(about, '  ')}"
    yield f"{title}{together}", rows
    yield from inner


def _choice(group: str, config: Any) -> _Row:
    plain = to_plain(config)
    text = (
        "Use another model preset."
        if group == "model"
        else "Use another learner, with its defaults: bc, acrlpd or ript."
    )
    return f"--{group}.{CHOICES[group]}", "text", plain.get(CHOICES[group], ""), text


def _environment(env: EnvConfig | None) -> list[_Row]:
    rows = [
        ("--env.id", "text or none", "none" if env is None else env.id, "Name of the environment (pirl envs list)."),
        (
            "--env.adapter",
            "text or none",
            _shown(env and env.adapter),
            "Adapter for your own environment: MODULE:CLASS.",
        ),
    ]
    if env is not None and env.adapter is None:
        for option in list_options(find_env_class(env)[0]):
            value = env.options.get(option.name, option.default)
            rows.append((f"--env.{_dashed(option.name)}", option.kind, _shown(value), option.help))
    return rows


def _explanations(kind: Any) -> dict[str, str]:
    """What is said of each field, by the class itself or by those that it has it from."""
    texts: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if dataclasses.is_dataclass(one):
            texts |= _own_explanations(one)
    return {field.name: texts.get(field.name, "") for field in dataclasses.fields(kind)}


def _own_explanations(kind: Any) -> dict[str, str]:
    """What stands below each field of a dataclass as a string, or directly above it as a comment."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines, body = source.splitlines(), ast.parse(source).body[0].body  # type: ignore[attr-defined]
    texts: dict[str, str] = {}
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        comment: list[str] = []
        for line in reversed(lines[: statement.lineno - 1]):
            if not line.strip().startswith("#"):
                break
            comment.insert(0, line.strip().lstrip("# "))
        text = " ".join(comment)
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = " ".join(str(following.value.value).split())
        texts[statement.target.id] = text
    return texts


def _summary(kind: Any) -> str:
    return inspect.cleandoc(kind.__doc__ or "").splitlines()[0]


def _names(kind: Any) -> str:
    return ", ".join(field.name for field in dataclasses.fields(kind))


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "[]"
    return str(value)


def _dashed(name: str) -> str:
    return name.replace("_", "-")
