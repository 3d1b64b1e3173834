"""The options of an environment: what its constructor takes, read from its signature and explained in its docstring."""

import inspect
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pirl.errors import ConfigError, did_you_mean

_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True)
class EnvOption:
    """An option: its name, what it takes in words, its default, and what it is for."""

    name: str
    kind: str
    default: Any
    help: str


def list_options(env_class: type) -> tuple[EnvOption, ...]:
    """What the constructor takes, in its order."""
    hints, helps = get_type_hints(env_class.__init__), _read_help(env_class)  # type: ignore[misc]
    return tuple(
        EnvOption(name, _kind(hints[name]), parameter.default, helps.get(name, ""))
        for name, parameter in _parameters(env_class).items()
    )


def convert_options(where: str, env_class: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the constructor wants them: texts become numbers and so on; what does not fit is named."""
    hints, known = get_type_hints(env_class.__init__), _parameters(env_class)  # type: ignore[misc]
    converted = {}
    for name, value in options.items():
        if name not in known:
            has = f"It has {', '.join(known)}." if known else "It has none."
            raise ConfigError(f"{where} has no option {name!r}. {did_you_mean(name, known)}{has}")
        try:
            converted[name] = _convert(value, hints[name])
        except ValueError:
            raise ConfigError(f"{where}: {name} should be {_kind(hints[name])}; it is {value!r:.80}.") from None
    return converted


def _parameters(env_class: type) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(env_class).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}


def _convert(value: Any, hint: Any) -> Any:
    """A value of the annotated type from itself or from text; a ValueError if it is none."""
    origin, choices = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        # Text fits everything, so it comes last.
        for choice in sorted(choices, key=lambda choice: choice is str):
            try:
                return _convert(value, choice)
            except ValueError:
                continue
        raise ValueError
    if origin is Literal:
        for choice in choices:
            if value == choice or (isinstance(value, str) and value == str(choice)):
                return choice
        raise ValueError
    if origin is tuple:
        parts = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            raise ValueError
        return tuple(_convert(part, choices[0]) for part in parts)
    return _convert_simple(value, hint)


def _convert_simple(value: Any, kind: type) -> Any:
    if kind is types.NoneType:
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
    elif kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _BOOLS:
            return _BOOLS[value.lower()]
    elif kind in (int, float):
        # By type, because True counts as an int.
        if isinstance(value, str) or type(value) is int or type(value) is kind:
            return kind(value)
    elif isinstance(value, kind):
        return value
    raise ValueError


def _kind(hint: Any) -> str:
    """What a type takes, in words."""
    origin, choices = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_kind, choices))
    if origin is Literal:
        return " or ".join(map(str, choices))
    if origin is tuple:
        return f"a list of {_kind(choices[0])} with commas between"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "none"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def _read_help(env_class: type) -> dict[str, str]:
    """What the docstring says under `Options:`, by name; further lines of an entry are indented deeper."""
    _, _, section = inspect.cleandoc(env_class.__doc__ or "").partition("\nOptions:\n")
    helps: dict[str, list[str]] = {}
    indent = ""
    for line in section.splitlines():
        if line.strip() and not line.startswith(" "):
            break  # the next section
        entry = re.match(r"( +)(?:- )?`?(\w+)`?: (.*)", line)
        if entry and (not helps or entry[1] == indent):
            indent = entry[1]
            helps[entry[2]] = [entry[3]]
        elif line.strip() and helps:
            helps[list(helps)[-1]].append(line.strip())
    return {name: " ".join(lines) for name, lines in helps.items()}
