"""The errors pirl raises about what it was given: each says what is wrong, where, and what to do about it."""

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints


class UserError(ValueError):
    """Bad input: the command line prints its message without a traceback and exits with this code."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration whose fields contradict each other."""


class ObservationError(UserError):
    """An observation, prompt or action that the model cannot take."""


class CheckpointError(UserError):
    """A checkpoint that is absent, damaged, or of another model."""


class DataError(UserError):
    """A dataset, or a file of it, that cannot be used as asked."""


class EnvError(UserError):
    """An environment that fails: it cannot be started, raises, or says what it should not."""


class TrainingError(UserError):
    """A run that cannot go on: nothing was wrong with what was asked, but training went astray."""

    exit_code = 1


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The nearest of the known names, as a question with a space behind it, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {near[0]}? " if near else ""


def in_one_line(error: BaseException) -> str:
    """The message without what follows its first line; without a message, what kind of error it is."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


class Checked:
    """A dataclass whose numbers lie in the interval of their type, as in Annotated[int, "[1, inf)"]."""

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(config: Any, **intervals: str) -> None:
    """Raise if a Literal field of a dataclass has another value, or a number lies outside its interval, like "[0, 1)"."""
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        if get_origin(hint) is Literal and getattr(config, name) not in get_args(hint):
            known = ", ".join(map(str, get_args(hint)))
            raise ConfigError(f"{name} should be one of {known}; it is {getattr(config, name)!r}.")
        for part in (hint, *get_args(hint)):  # int, or int | None
            if get_origin(part) is Annotated:
                intervals[name] = part.__metadata__[0]
    for name, interval in intervals.items():
        value, (low, high) = getattr(config, name), map(float, interval[1:-1].split(","))
        above = value is None or low < value or (interval[0] == "[" and value == low)
        below = value is None or value < high or (interval[-1] == "]" and value == high)
        if not (above and below):
            bound = f"{'at least' if interval[0] == '[' else 'above'} {low:g}"
            limit = f"in {interval}" if high < float("inf") else f"{bound} and finite" if value == high else bound
            raise ConfigError(f"{name} = {value} should be {limit}.")
