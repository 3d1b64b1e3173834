"""The errors pirl raises about what it was given: each says what is wrong, where, and what to do about it."""

import difflib
from collections.abc import Iterable
from typing import Annotated, Literal, get_args, get_origin, get_type_hints


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


# Numbers with bounds, for the fields of a `Checked` dataclass.
Count = Annotated[int, "[1, inf)"]
NotNegative = Annotated[int, "[0, inf)"]
Positive = Annotated[float, "(0, inf)"]
Weight = Annotated[float, "[0, inf)"]
Fraction = Annotated[float, "[0, 1)"]
Share = Annotated[float, "(0, 1)"]


class Checked:
    """A dataclass whose Literal fields have one of their values, and whose numbers lie in the interval of their type."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            if get_origin(hint) is Literal and value not in get_args(hint):
                known = ", ".join(map(str, get_args(hint)))
                raise ConfigError(f"{name} should be one of {known}; it is {value!r}.")
            for part in (hint, *get_args(hint)):  # int, or int | None
                if value is not None and get_origin(part) is Annotated:
                    _check_interval(name, value, part.__metadata__[0])


def _check_interval(name: str, value: int | float, interval: str) -> None:
    low, high = map(float, interval[1:-1].split(","))
    above = low < value or (interval[0] == "[" and value == low)
    below = value < high or (interval[-1] == "]" and value == high)
    if not (above and below):
        bound = f"{'at least' if interval[0] == '[' else 'above'} {low:g}"
        limit = f"in {interval}" if high < float("inf") else f"{bound} and finite" if value == high else bound
        raise ConfigError(f"{name} = {value} should be {limit}.")
