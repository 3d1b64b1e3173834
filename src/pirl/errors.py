"""The errors pirl raises about what it was given: each says what is wrong, where, and what to do about it."""

import difflib
from collections.abc import Iterable


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
