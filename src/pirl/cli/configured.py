"""Shared by the commands that take a configuration: merges a preset, a YAML file and dotted options."""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from pirl.cli.console import optional
from pirl.errors import ConfigError, UserError, did_you_mean

if TYPE_CHECKING:
    from pirl.config import RLTrainConfig

Settings = tuple[tuple[str, str], ...]
# Groups that begin with a choice may be given it under their own name.
SHORT_NAMES = {"env": "env.id", "model": "model.preset", "agent": "agent.learner"}
_BOOLS = ("true", "false", "yes", "no", "on", "off", "1", "0")


@dataclass(frozen=True, kw_only=True)
class Configured:
    """A configuration: options override the file, the file overrides the preset."""

    program: ClassVar[str]
    """The command as typed."""
    needs: ClassVar[str]
    """Required options, as the help shows them."""

    preset: Annotated[tyro.conf.Positional[str | None], optional("[PRESET]")] = None
    """Preset to start from; not needed if the configuration file names one (preset: NAME) or is complete."""
    config_file: Annotated[Path | None, optional("FILE")] = None
    """YAML file with fields to set."""
    debug: bool = False
    """Make ten updates of eight chunks, and shrink everything else, to check that all parts work together."""
    settings: tyro.conf.Suppress[tyro.conf.Fixed[Settings]] = ()

    def resolve(self) -> "RLTrainConfig":
        """The configuration that is meant: the preset, the file over it, --debug, and the options over all of them."""
        from pirl.config import debug_config, get_config, load_config, override_config

        if self.config_file is not None:
            config = load_config(self.config_file, self.preset)
        elif self.preset is not None:
            config = get_config(self.preset)
        elif (own := self.own_config()) is not None:
            config = load_config(own, None)
        else:
            raise ConfigError("no configuration: name a preset (see pirl configs), or pass a --config-file.")
        if self.debug:
            config = debug_config(config)
        return override_config(config, dict(self.settings), self.program, texts=True)

    def own_config(self) -> Path | None:
        """The file to begin with where none is named, if there is one."""
        return None


def checked_name(name: str | None, *, resume: bool, overwrite: bool, is_needed: bool = True) -> str:
    """The name of a run or a sweep, if it can be one; where none is needed, it may be empty."""
    if resume and overwrite:
        raise UserError("--resume continues a run, --overwrite deletes it: choose one.")
    if name is None:
        if is_needed:
            raise UserError("the run needs a name: --exp-name NAME.")
        return ""
    path = Path(name)
    if path.is_absolute() or path == Path(".") or ".." in path.parts or "\0" in name:
        raise UserError(f"--exp-name {name!r} is not a directory name inside runs_dir.")
    if unfit := sorted(set(name) & set("[]*?")):
        raise UserError(f"--exp-name {name!r}: checkpoints cannot be written under a name with {' '.join(unfit)}.")
    return name


def take_settings(arguments: Sequence[str], program: str, command: Any) -> tuple[list[str], Settings]:
    """Separate the options of the configuration from the command's own. Answers --help, which depends on the preset."""
    own_fields = {
        f"--{field.name.replace('_', '-')}": field
        for field in dataclasses.fields(command)
        if field.name not in ("preset", "settings")
    }
    own: list[str] = []
    settings: dict[str, str] = {}
    waiting = list(reversed(arguments))
    while waiting:
        argument = waiting.pop()
        flag, given, value = argument.partition("=")
        flag = flag.replace("_", "-")
        if argument == "--":
            own += [argument, *reversed(waiting)]
            break
        if flag in own_fields or not argument.startswith("--") or flag == "--help":
            own.append(f"{flag}{given}{value}" if flag in own_fields else argument)
            if flag in own_fields and own_fields[flag].type is not bool and not given and waiting:
                own.append(waiting.pop())
            continue
        name = flag.removeprefix("--").replace("-", "_")
        name = SHORT_NAMES.get(name, name)
        switch = _is_switch(name, flag, list(own_fields), program)
        if given:
            settings[name] = value
        elif switch and not (waiting and waiting[-1].lower() in _BOOLS):
            settings[name] = "true"
        elif not waiting or waiting[-1].startswith("--"):
            raise UserError(f"{program}: {flag} needs a value.")
        else:
            settings[name] = waiting.pop()
    taken = tuple(settings.items())
    if {"--help", "-h"} & set(own):
        _help(command, [argument for argument in own if argument not in ("--help", "-h")], taken, program)
    return own, taken


def _is_switch(name: str, flag: str, own: list[str], program: str) -> bool:
    """Whether a field of the configuration is true or false; raises for a name that is none of its fields."""
    from pirl.config.values import list_fields

    if name.startswith("env."):
        return False  # the environment itself will say
    fields = dict(list_fields())
    if name not in fields:
        flags = [*own, *(f"--{field.replace('_', '-')}" for field in fields)]
        raise UserError(f"{program} has no option {flag}. {did_you_mean(flag, flags)}See {program} PRESET --help.")
    return fields[name] is bool


def _help(command: Any, own: list[str], settings: Settings, program: str) -> None:
    """Show every option as it is in what would be trained; if that is not said, the command's own help will do."""
    asked = tyro.cli(command, args=own, prog=program, config=(tyro.conf.FlagCreatePairsOff,))
    if asked.preset is not None or asked.config_file is not None:
        from pirl.cli.train_help import show_options

        show_options(dataclasses.replace(asked, settings=settings).resolve(), program, command)
        sys.exit(0)
