"""Text for people: sizes and times, values of an annotated type as they are typed, and what such a type takes."""

import contextlib
import dataclasses
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pirl.errors import ConfigError, did_you_mean

BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
SIGNIFICANT = 0.05  # a difference whose p value is below this is called significant
LARGEST = 2**63  # what a whole number stays below
_LONGEST_RANGE = 10_000_000


def format_p_value(p_value: float) -> str:
    """A p value with its relation sign: `< 0.0001`, `= 0.0012`, `= 0.123`."""
    return "< 0.0001" if p_value < 0.0001 else f"= {p_value:.4f}" if p_value < 0.01 else f"= {p_value:.3f}"


def format_size(count: int | float, digits: int = 1) -> str:
    """Bytes: 512 B, 12.5 KiB, 1.0 GiB."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if count >= 1024:
            count, unit = count / 1024, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:,.{digits}f} {unit}"


def format_duration(seconds: int | float) -> str:
    """A time to wait for: 35 s, 4 min, 2 h 05 min, 3 d 04 h."""
    if round(seconds) < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60:02d} h"


def format_seconds(seconds: int | float) -> str:
    """The time of a computation: 250 µs, 12.3 ms, 1.25 s."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.3g} µs"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def convert(value: Any, hint: Any, *, texts: bool) -> Any:
    """A value of the annotated type, also from text where `texts` are given; a ValueError if it is none."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        # Text fits everything, so it comes last.
        for choice in sorted(parts, key=lambda choice: choice is str):
            with contextlib.suppress(ValueError):
                return convert(value, choice, texts=texts)
    elif origin is Literal:
        for choice in parts:
            # By type, because True equals 1.
            if (type(value) is type(choice) and value == choice) or (texts and value == str(choice)):
                return choice
    elif origin is tuple:
        if texts and isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
            if parts == (int, ...):
                return tuple(number for part in value for number in _numbers(part))
        if isinstance(value, list | tuple) and (parts[-1] is ... or len(value) == len(parts)):
            kinds = parts[:1] * len(value) if parts[-1] is ... else parts
            return tuple(convert(entry, kind, texts=texts) for entry, kind in zip(value, kinds, strict=True))
    elif origin is not None and issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            pairs = value.items()
            return {convert(key, parts[0], texts=texts): convert(one, parts[1], texts=texts) for key, one in pairs}
    else:
        return _convert_simple(value, origin or hint, texts)
    raise ValueError


def read_dataclass(kind: type, data: Any, what: str) -> Any:
    """A dataclass, and those in it, from a mapping of JSON; what is unknown, missing or of another type is named."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{what} should be described by a mapping; it is {data!r:.60}.")
    hints, values = get_type_hints(kind), {}
    optional = {field.name for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING}
    for name, value in data.items():
        if name not in hints:
            question = did_you_mean(str(name), hints)
            raise ConfigError(f"{what} has an unknown field {name!r}. {question}Known: {', '.join(hints)}.")
        if value is None and name in optional:
            continue
        hint = hints[name]
        if nested := [part for part in (hint, *get_args(hint)) if dataclasses.is_dataclass(part)]:
            values[name] = read_dataclass(nested[0], value, f"{what}.{name}")  # type: ignore[arg-type]
            continue
        try:
            values[name] = convert(value, hint, texts=False)
        except ValueError:
            raise ConfigError(f"{what}: {name} should be {format_type(hint)}; it is {value!r:.60}.") from None
    if missing := [name for name in hints if name not in optional and name not in data]:
        raise ConfigError(f"{what} lacks {', '.join(missing)}.")
    return kind(**values)


def _numbers(text: str) -> list[int]:
    """Whole numbers between spaces, and ranges of them such as 7-12."""
    numbers: list[int] = []
    for part in re.sub(r"(?<=\d)\s*-\s*(?=\d)", "-", text).split():
        bounds = re.fullmatch(r"(\d{1,18})-(\d{1,18})", part)
        if bounds is None:
            numbers.append(int(_number(part, int)))
        elif 0 <= int(bounds[2]) - int(bounds[1]) < _LONGEST_RANGE:
            numbers += range(int(bounds[1]), int(bounds[2]) + 1)
        else:
            raise ValueError
    return numbers


def _convert_simple(value: Any, kind: type, texts: bool) -> Any:
    text = value if isinstance(value, str) else None
    if kind is types.NoneType:
        if value is None or (texts and text is not None and text.lower() == "none"):
            return None
    elif kind is bool:
        if isinstance(value, bool):
            return value
        if texts and text is not None and text.lower() in BOOLS:
            return BOOLS[text.lower()]
    elif kind in (int, float):
        # By type, because True counts as an int.
        if type(value) in (int, float) or (texts and text is not None):
            return _number(value, kind)
    elif kind in (str, Path) and text is not None:
        if "\0" not in text:
            return kind(text)
    elif isinstance(value, kind):
        return value
    raise ValueError


def _number(value: int | float | str, kind: type) -> int | float:
    """A number, but not NaN; a ValueError if it is none. A whole million may be written as 1e6."""
    try:
        number = float(value)
    except OverflowError:
        raise ValueError from None
    if number != number:
        raise ValueError
    if kind is float:
        return number
    whole = int(number) if number.is_integer() else None
    if not isinstance(value, float):
        with contextlib.suppress(ValueError):
            whole = int(value)  # to the last digit
    if whole is None or abs(whole) >= LARGEST:
        raise ValueError
    return whole


def format_type(hint: Any) -> str:
    """What a type takes, in words."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(format_type, parts))
    if origin is Literal:
        return " or ".join(map(str, parts))
    if origin is tuple and parts[-1] is ...:
        return {int: "a list of whole numbers", str: "a list of texts"}.get(
            parts[0], f"a list: {format_type(parts[0])}"
        )
    if origin is tuple:
        return f"a list of {len(parts)}, each {format_type(parts[0])}"
    if origin is not None and issubclass(origin, Mapping):
        return f"a mapping to {format_type(parts[1])}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "none"}
    return words.get(hint, "a path" if hint is Path else getattr(hint, "__name__", str(hint)))
