"""`pirl train PRESET --help`: every option with its value in the configuration and what it is for."""

import ast
import dataclasses
import inspect
import shutil
import textwrap
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pirl.cli.console import WIDE, show
from pirl.config import RLTrainConfig
from pirl.config.io import CHOICES, to_plain
from pirl.envs.registry import EnvConfig, find_env_class, list_options
from pirl.text import format_type

_OPTION_WIDTH = 40
# Types that a value shows by itself.
_PLAIN_TYPES = ("a whole number", "a number", "true or false", "text", "a path")
# An option: its flag, what it takes, its value, what it is for.
_Row = tuple[str, str, str, str]


def show_options(config: RLTrainConfig, program: str, command: Any) -> None:
    """Print the options of the command and those of the configuration, group by group."""
    print(f"usage: {program} [PRESET] {command.needs} [OPTIONS]\n")
    print(f"{inspect.cleandoc(command.__doc__ or '')}\n")
    print("Every option is shown with its current value. Write lists as a,b or [a, b], and an empty value as none.")
    texts, rows = _explanations(command), []
    for field in dataclasses.fields(command):
        if field.name not in ("preset", "settings"):
            hint = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
            takes = "" if hint is bool else format_type(hint).removesuffix(" or none")
            value = "" if field.default in (None, False, ()) else _shown(field.default)
            rows.append((_flag(field.name), takes, value, texts[field.name]))
    _show_group(f"the {'run' if command.__name__ == 'Train' else command.__name__.lower()}", rows)
    for title, rows in _groups(config, "", "the configuration"):
        _show_group(title, rows)


def _show_group(title: str, rows: list[_Row]) -> None:
    """The option with its value, and beside it what it is for and what it takes: two columns, for narrow terminals."""
    from rich.table import Table

    columns = Table(show_header=False, box=None, pad_edge=False)
    columns.add_column(width=_OPTION_WIDTH, overflow="fold")
    columns.add_column()
    for flag, takes, value, text in rows:
        is_plain = not takes or (value and takes in _PLAIN_TYPES)
        columns.add_row(f"{flag} {value}".rstrip(), " ".join(filter(None, (text, "" if is_plain else f"({takes})"))))
    show("", title, columns, width=shutil.get_terminal_size((WIDE, 0)).columns)


def _groups(config: Any, prefix: str, title: str) -> Iterator[tuple[str, list[_Row]]]:
    """The options of a group, then those of the groups in it."""
    group = prefix.removesuffix(".")
    kind, hints, texts = type(config), get_type_hints(type(config)), _explanations(type(config))
    rows, inner = [], []
    if group in CHOICES:
        text = "Use another learner, with its defaults: bc, acrlpd or ript."
        text = "Use another model preset." if group == "model" else text
        rows.append((f"--{group}.{CHOICES[group]}", "text", to_plain(config).get(CHOICES[group], ""), text))
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        optional_group = [choice for choice in get_args(hints[field.name]) if dataclasses.is_dataclass(choice)]
        if name == "env":
            inner.append((f"env: {texts['env']}", _env_rows(value)))
        elif dataclasses.is_dataclass(value):
            inner += _groups(value, f"{name}.", f"{name.replace('_', '-')}: {texts[field.name] or _summary(value)}")
        elif optional_group:
            names = ", ".join(field.name for field in dataclasses.fields(optional_group[0]))
            rows.append((f"{_flag(name)}.…", "a group", "none", f"{_summary(optional_group[0])} ({names})"))
        else:
            rows.append((_flag(name), format_type(hints[field.name]), _shown(value), texts[field.name]))
    # Fields that are not explained one by one are explained by their class.
    about = inspect.cleandoc(kind.__doc__ or "")
    together = "" if any(texts.values()) or about in title else f"\n{textwrap.indent(about, '  ')}"
    yield f"{title}{together}", rows
    yield from inner


def _env_rows(env: EnvConfig | None) -> list[_Row]:
    rows = [
        ("--env.id", "text or none", _shown(env and env.id), "Name of the environment (pirl envs list)."),
        (
            *("--env.adapter", "text or none", _shown(env and env.adapter)),
            "Adapter for your own environment: MODULE:CLASS.",
        ),
    ]
    if env is not None and env.adapter is None:
        for option in list_options(find_env_class(env)[0]):
            value = env.options.get(option.name, option.default)
            rows.append((_flag(f"env.{option.name}"), option.kind, _shown(value), option.help))
    return rows


def _explanations(kind: Any) -> dict[str, str]:
    """What a dataclass and its bases say of each field: the string below it, or the comment above it."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        source = textwrap.dedent(inspect.getsource(base))  # type: ignore[arg-type]
        lines, body = source.splitlines(), ast.parse(source).body[0].body  # type: ignore[attr-defined]
        for statement, following in zip(body, [*body[1:], None], strict=True):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = str(following.value.value)
            else:
                text = ""
                for line in reversed(lines[: statement.lineno - 1]):
                    if not line.strip().startswith("#"):
                        break
                    text = f"{line.strip().lstrip('# ')} {text}"
            texts[statement.target.id] = " ".join(text.split())
    return {field.name: texts.get(field.name, "") for field in dataclasses.fields(kind)}


def _summary(kind: Any) -> str:
    return inspect.cleandoc(kind.__doc__ or "").splitlines()[0]


def _shown(value: Any) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "[]"
    return str(value)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
