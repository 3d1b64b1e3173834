"""What runs say about how their policies are to act: where, and how many actions of a chunk at a time."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from pirl.errors import ConfigError, UserError
from pirl.files import expand_home
from pirl.run_files import RunFiles

if TYPE_CHECKING:
    from pirl.config import RLTrainConfig

_Value = TypeVar("_Value")


def run_configs(policies: Sequence[str]) -> "dict[str, RLTrainConfig]":
    """The configurations of those policies that are named by their run."""
    runs = {}
    for policy in policies:
        run = RunFiles(expand_home(policy))
        if run.config_file.is_file() and run.policies.is_dir():
            from pirl.config import load_config

            try:
                runs[policy] = load_config(run.config_file, None)
            except UserError as error:
                why = (
                    "It defines the environment and settings of the policy: without it, pass --env, --execute-steps and "
                    "--denoising-steps."
                )
                raise ConfigError(f"{error} {why}") from error
    return runs


def agreed(what: str, said: Mapping[str, _Value], in_flags: Callable[[_Value], str]) -> _Value:
    """What all runs say; to those that do not agree, somebody has to say it, in flags."""
    (first, value), *others = said.items()
    for other, another in others:
        if another != value:
            raise UserError(
                f"{first} and {other} were not trained with the same {what}: {in_flags(value)} in one, "
                f"{in_flags(another)} in the other. Pass the one to use for both."
            )
    return value
