"""`pirl train`: a preset, a YAML file and dotted options become a configuration, which is checked and run."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pirl.errors import ConfigError, UserError, did_you_mean
from pirl.files import expand_home

if TYPE_CHECKING:
    from pirl.config import RLTrainConfig

Settings = tuple[tuple[str, str], ...]
# Groups that begin with a choice may be given it under their own name.
SHORT_NAMES = {"env": "env.id", "model": "model.preset", "agent": "agent.learner"}
_BOOLS = ("true", "false", "yes", "no", "on", "off", "1", "0")


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a policy. `pirl train PRESET --help` shows every option with its default in that preset.

    Options come over the configuration file, the file over the preset. A run's own config.yaml runs it again. Options of
    the environment are given as `--env.OPTION VALUE`: see `pirl envs show NAME`. For presets see `pirl configs`.
    """

    preset: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[PRESET]")] = None
    """Preset to begin with; not needed if the configuration file names one (preset: NAME) or is complete."""
    exp_name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the run, and of its directory in runs_dir."""
    config_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """YAML file with fields to set."""
    dry_run: bool = False
    """Build everything, make a few updates, print parameters, memory and time, and write nothing but caches."""
    debug: bool = False
    """Ten updates of eight chunks, and everything else small too, to see whether it works together."""
    resume: bool = False
    """Go on with the run of that name."""
    overwrite: bool = False
    """Delete the run of that name, and begin anew."""
    settings: tyro.conf.Suppress[tyro.conf.Fixed[Settings]] = ()

    def run(self) -> int:
        """Do it; the return value is the exit code."""
        name = self.checked_name()
        config = self.resolve()
        from pirl.training.hosts import find_hosts

        hosts = find_hosts(config.hosts)
        # Where it computes is no part of the run: whoever resumes it may be alone.
        timeouts = dataclasses.replace(config.hosts, coordinator=None, processes=None, process_id=None)
        config = dataclasses.replace(config, hosts=timeouts)
        if hosts is not None:
            from pirl.training.supervising import supervise

            return supervise(hosts, config.hosts, lambda: self._train(config, name))
        try:
            return self._train(config, name)
        except KeyboardInterrupt:
            # The compiler goes on in its own threads, and does not survive the interpreter's end.
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(130)

    def _train(self, config: "RLTrainConfig", name: str) -> int:
        """On the devices that there are, now that all processes know of each other."""
        import jax

        from pirl.config import check_config

        check_config(config, device_count=jax.device_count(), process_count=jax.process_count(), resume=self.resume)
        if self.dry_run:
            from pirl.training.dry_run import dry_run

            return dry_run(config)
        from pirl.training.trainer import train

        return train(config, exp_name=name, resume=self.resume, overwrite=self.overwrite)

    def checked_name(self) -> str:
        """The name of the run, if it can be one."""
        if self.resume and self.overwrite:
            raise UserError("--resume goes on with a run, --overwrite deletes it: choose one.")
        if self.exp_name is None and not self.dry_run:
            raise UserError("the run needs a name: --exp-name NAME.")
        name = self.exp_name or ""
        path = Path(name)
        if self.exp_name is not None and (
            path.is_absolute() or path == Path(".") or ".." in path.parts or "\0" in name
        ):
            raise UserError(f"--exp-name {name!r} is no name of a directory inside runs_dir.")
        if unfit := sorted(set(name) & set("[]*?")):
            raise UserError(f"--exp-name {name!r}: checkpoints cannot be written under a name with {' '.join(unfit)}.")
        return name

    def _own_config(self) -> Path:
        """What a run that is resumed was begun with."""
        if not self.resume:
            return Path()
        return expand_home(dict(self.settings).get("runs_dir", "runs")) / (self.exp_name or "") / "config.yaml"

    def resolve(self) -> "RLTrainConfig":
        """The configuration that is meant: the preset, the file over it, --debug, and the options over all of them."""
        from pirl.config import debug_config, get_config, load_config, override_config

        if self.config_file is not None:
            config = load_config(self.config_file, self.preset)
        elif self.preset is not None:
            config = get_config(self.preset)
        elif (own := self._own_config()).is_file():
            config = load_config(own, None)
        else:
            raise ConfigError("what is to be trained? Name a preset (see pirl configs), or give a --config-file.")
        if self.debug:
            config = debug_config(config)
        return override_config(config, dict(self.settings), "pirl train", texts=True)


def take_settings(arguments: Sequence[str], program: str, command: Any) -> tuple[list[str], Settings]:
    """Separate the options of the configuration from the command's own. Answers --help, which depends on the preset."""
    own_fields = {f"--{field.name.replace('_', '-')}": field for field in dataclasses.fields(command)[1:-1]}
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
