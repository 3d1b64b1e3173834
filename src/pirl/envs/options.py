"""The options of an environment: what its constructor takes, read from its signature and explained in its docstring."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from pirl.errors import ConfigError, did_you_mean
from pirl.text import convert, format_type

# What `gymnasium.make` may hand over; there is nothing to choose in it.
_FOR_GYMNASIUM = "render_mode"


@dataclass(frozen=True)
class EnvOption:
    """An option: its name, what it takes in words, its default, and what it is for."""

    name: str
    kind: str
    default: Any
    help: str


def list_options(env_class: type) -> tuple[EnvOption, ...]:
    """What there is to choose, in the order of the constructor."""
    hints, helps = get_type_hints(env_class.__init__), _read_help(env_class)  # type: ignore[misc]
    return tuple(
        EnvOption(name, _kind(hints[name]), parameter.default, helps.get(name, ""))
        for name, parameter in _parameters(env_class).items()
        if name != _FOR_GYMNASIUM
    )


def convert_options(where: str, env_class: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the constructor wants them: texts become numbers and so on; what does not fit is named."""
    hints, known = get_type_hints(env_class.__init__), _parameters(env_class)  # type: ignore[misc]
    converted = {}
    for name, value in options.items():
        if name not in known:
            shown = [name for name in known if name != _FOR_GYMNASIUM]
            has = f"It has {', '.join(shown)}." if shown else "It has none."
            raise ConfigError(f"{where} has no option {name!r}. {did_you_mean(name, shown)}{has}")
        try:
            converted[name] = convert(value, hints[name], texts=True)
        except ValueError:
            raise ConfigError(f"{where}: {name} should be {_kind(hints[name])}; it is {value!r:.80}.") from None
    return converted


def _parameters(env_class: type) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(env_class).parameters
    return {name: parameter for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}


def _kind(hint: Any) -> str:
    """What a type takes, in words, and how lists are typed."""
    lists = any(get_origin(choice) is tuple for choice in (hint, *get_args(hint)))
    return f"{format_type(hint)}{' with commas between' if lists else ''}"


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
