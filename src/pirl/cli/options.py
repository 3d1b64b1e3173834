"""Options that commands share: the configuration of a run, the environment, and the policy that acts in it."""

import dataclasses
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import tyro

from pirl.cli.console import default, optional
from pirl.envs.experts import ExpertConfig
from pirl.errors import ConfigError, UserError, did_you_mean
from pirl.files import expand_home
from pirl.run_files import RunFiles, refuse_directory_of_runs

if TYPE_CHECKING:
    from pirl.config import RLTrainConfig
    from pirl.envs.base import EnvDescription, Policy
    from pirl.envs.registry import EnvConfig

EXPERT = "expert"
DEFAULT_ENV = "tabletop"
DEFAULT_EXECUTE_STEPS = 5
DEFAULT_DENOISING_STEPS = 10
# Groups that begin with a choice may be given it under their own name.
SHORT_NAMES = {"env": "env.id", "model": "model.preset", "agent": "agent.learner"}
_BOOLS = ("true", "false", "yes", "no", "on", "off", "1", "0")
_Value = TypeVar("_Value")
Settings = tuple[tuple[str, str], ...]


# --- the configuration of a run ----------------------------------------------------------------------------------


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
        """The preset, the file over it, --debug, and the options over all of them."""
        from pirl.config import debug_config, get_config, load_config, override_config

        if self.config_file is not None:
            config = load_config(self.config_file, self.preset)
        elif self.preset is not None:
            config = get_config(self.preset)
        elif (file := self.default_config_file()) is not None:
            config = load_config(file)
        else:
            raise ConfigError("no configuration: name a preset (see pirl configs), or pass a --config-file.")
        if self.debug:
            config = debug_config(config)
        return override_config(config, dict(self.settings), self.program, texts=True)

    def default_config_file(self) -> Path | None:
        """The file to use if neither a preset nor a file is named."""
        return None


def checked_name(name: str | None, *, resume: bool, overwrite: bool, is_needed: bool = True) -> str:
    """The name of a run or a sweep, if it can be one; it may be left out where none is needed."""
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
        flag, equals, value = argument.partition("=")
        flag = flag.replace("_", "-")
        if argument == "--":
            own += [argument, *reversed(waiting)]
            break
        if flag in own_fields or not argument.startswith("--") or flag == "--help":
            own.append(f"{flag}{equals}{value}" if flag in own_fields else argument)
            if flag in own_fields and own_fields[flag].type is not bool and not equals and waiting:
                own.append(waiting.pop())
            continue
        name = flag.removeprefix("--").replace("-", "_")
        name = SHORT_NAMES.get(name, name)
        is_switch = _is_switch(name, flag, list(own_fields), program)
        if equals:
            settings[name] = value
        elif is_switch and not (waiting and waiting[-1].lower() in _BOOLS):
            settings[name] = "true"
        elif not waiting or waiting[-1].startswith("--"):
            raise UserError(f"{program}: {flag} needs a value.")
        else:
            settings[name] = waiting.pop()
    if {"--help", "-h"} & set(own):
        _help(command, [argument for argument in own if argument not in ("--help", "-h")], settings, program)
    return own, tuple(settings.items())


def _is_switch(name: str, flag: str, own: list[str], program: str) -> bool:
    """Whether a field of the configuration is true or false; raises if there is no such field."""
    from pirl.config.io import list_fields

    if name.startswith("env."):
        return False  # the environment knows its options
    fields = dict(list_fields())
    if name not in fields:
        flags = [*own, *(f"--{field.replace('_', '-')}" for field in fields)]
        raise UserError(f"{program} has no option {flag}. {did_you_mean(flag, flags)}See {program} PRESET --help.")
    return fields[name] is bool


def _help(command: Any, own: list[str], settings: dict[str, str], program: str) -> None:
    """Show every option with its value in the named configuration; without one, the command's own help follows."""
    asked = tyro.cli(command, args=own, prog=program, config=(tyro.conf.FlagCreatePairsOff,))
    if asked.preset is not None or asked.config_file is not None:
        from pirl.cli.preset_help import show_options

        config = dataclasses.replace(asked, settings=tuple(settings.items())).resolve()
        show_options(config, program, command)
        sys.exit(0)


# --- the environment and the policy ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InEnvironment:
    """An environment, by name, with its own options."""

    env: Annotated[str | None, default(DEFAULT_ENV, "NAME")] = None
    """Environment: a name from `pirl envs list`, or a Gymnasium id (--env.id is the same).
    Pass its options as `--env.OPTION VALUE`; `pirl envs show NAME` lists them.
    For your own environment, add --env.adapter MODULE:CLASS."""
    env_options: tyro.conf.Suppress[tyro.conf.Fixed[Settings]] = ()

    def env_config(self) -> "EnvConfig":
        """The environment to use."""
        from pirl.envs.registry import EnvConfig

        options = dict(self.env_options)
        name = DEFAULT_ENV if self.env is None else self.env
        return EnvConfig(id=name, adapter=options.pop("adapter", None), options=options)


def take_env_options(arguments: Sequence[str], program: str, command: Any) -> tuple[list[str], Settings]:
    """Separate `--env.OPTION VALUE`, which the parser cannot know, from the other arguments."""
    others: list[str] = []
    options: dict[str, str] = {}
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--":
            others += [argument, *remaining]
            break
        if not argument.startswith("--env."):
            others.append(argument)
            continue
        flag, equals, value = argument.partition("=")
        if not equals:
            value = next(remaining, "--")
            if value.startswith("--"):
                raise UserError(f"{program}: {flag} needs a value, such as {flag}=true for something to switch on.")
        name = flag.removeprefix("--env.").replace("-", "_")
        if name == "id":
            others += ["--env", value]
        else:
            options[name] = value
    return others, tuple(options.items())


@dataclass(frozen=True)
class _Resolved:
    """Where policies act and how: as given on the command line, else as in their runs, else by default."""

    env: "EnvConfig"
    execute_steps: int
    denoising_steps: dict[str, int]
    notes: list[str]
    """What was taken from runs, in flags."""


@dataclass(frozen=True, kw_only=True)
class Acting(InEnvironment):
    """A policy that acts in an environment. The policy of a run uses the run's environment and settings by default."""

    env: Annotated[str | None, default(f"that of the run, else {DEFAULT_ENV}", "NAME")] = None
    """Environment: a name from `pirl envs list`, or a Gymnasium id (--env.id is the same).
    Pass its options as `--env.OPTION VALUE`; `pirl envs show NAME` lists them.
    For your own environment, add --env.adapter MODULE:CLASS.
    A run brings its own environment and options; --env.OPTION changes an option, --env replaces the environment."""
    task: Annotated[str | None, default("all tasks in turn", "TASK")] = None
    """Use only this task."""
    seed: int = 0
    """Random seed: determines the initial states and everything random after them."""
    execute_steps: Annotated[int | None, default(f"as in the run, else {DEFAULT_EXECUTE_STEPS}", "INT")] = None
    """Actions of each chunk to execute before replanning."""
    denoising_steps: Annotated[int | None, default(f"as in the run, else {DEFAULT_DENOISING_STEPS}", "INT")] = None
    """Integration steps from noise to actions. OpenPI acts with 10."""
    model: Annotated[str | None, optional("PRESET")] = None
    """Model preset, for a checkpoint without pirl.json."""
    robot: Annotated[str | None, default("the policy's own, else the environment's", "NAME|FILE")] = None
    """Robot preset or JSON file, if the policy was trained for another robot description than the environment's."""
    asset_id: Annotated[str | None, optional("ID")] = None
    """Normalization statistics to use, if the checkpoint has several; `none` if it was trained without."""
    guidance: Annotated[float | None, default("as in the checkpoint", "W")] = None
    """Guidance weight, for a policy trained with guidance: 0 plain prompt, 1 positive prompt, above 1 extrapolates."""
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    """Flaws of the scripted expert."""

    @property
    def policies(self) -> list[str]:
        """The policies: checkpoints, runs, or the expert."""
        raise NotImplementedError

    def check(self, **counts: int | None) -> None:
        """Raise, before anything is started, if the options cannot work."""
        counts |= {"execute-steps": self.execute_steps, "denoising-steps": self.denoising_steps}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise UserError(f"--{name} should be at least 1; it is {value}.")
        if self.seed < 0:
            raise UserError(f"--seed should be zero or more; it is {self.seed}.")
        if self.guidance is not None and not 0 <= self.guidance < math.inf:
            raise UserError(f"--guidance should be a number of at least 0; it is {self.guidance:g}.")
        checkpoints = [policy for policy in self.policies if policy != EXPERT]
        if not checkpoints:
            for name in ("model", "robot", "asset_id", "guidance"):
                if getattr(self, name) is not None:
                    flag = f"--{name.replace('_', '-')}"
                    raise UserError(f"{flag} is for checkpoints; the scripted expert does not use it.")
        elif len(checkpoints) == len(self.policies) and self.expert != ExpertConfig():
            raise UserError("--expert.* is for the scripted expert; a checkpoint does not use it.")
        for checkpoint in checkpoints:
            directory = expand_home(checkpoint)
            if not directory.is_dir():
                raise UserError(f"{checkpoint} is not a checkpoint directory; for the scripted expert, use {EXPERT!r}.")
            refuse_directory_of_runs(directory)

    @cached_property
    def resolved(self) -> _Resolved:
        """The environment and the steps, with what was taken from the configurations of runs."""
        runs: dict[str, RLTrainConfig] = {}
        if None in (self.env, self.execute_steps, self.denoising_steps):
            runs = {policy: config for policy in self.policies if (config := _run_config(policy)) is not None}
        env, given, taken = super().env_config(), dict(self.env_options), []
        trained = {run: config.env for run, config in runs.items() if config.env is not None}
        if self.env is None and trained:
            base = _agreed("environment", trained, lambda env: shlex.join(env.flags()))
            options = {name: value for name, value in given.items() if name != "adapter"}
            env = replace(base, adapter=given.get("adapter", base.adapter), options={**base.options, **options})
            kept = {name: value for name, value in base.options.items() if name not in given}
            shown = replace(base, adapter=None if "adapter" in given else base.adapter, options=kept)
            taken.append(shlex.join(shown.flags()))
        execute_steps = self.execute_steps or DEFAULT_EXECUTE_STEPS
        if runs and self.execute_steps is None:
            steps = {run: config.evaluation.execute_steps for run, config in runs.items()}
            execute_steps = _agreed("number of steps", steps, lambda steps: f"--execute-steps {steps}")
            taken.append(f"--execute-steps {execute_steps}")
        denoising = {run: self.denoising_steps or config.agent.denoising_steps for run, config in runs.items()}
        differ = len(set(denoising.values())) > 1
        if denoising and self.denoising_steps is None and not differ:
            taken.append(f"--denoising-steps {next(iter(denoising.values()))}")
        notes = [f"as in {' and '.join(runs)}: {' '.join(taken)}"] if taken else []
        if differ:
            notes += [f"as in {run}, for its own policy: --denoising-steps {own}" for run, own in denoising.items()]
        default_steps = self.denoising_steps or DEFAULT_DENOISING_STEPS
        denoising = dict.fromkeys(self.policies, default_steps) | denoising
        return _Resolved(env, execute_steps, denoising, notes)

    def print_notes(self) -> None:
        """Print what was taken from runs, as flags."""
        for note in self.resolved.notes:
            print(note)

    def env_config(self) -> "EnvConfig":
        """The environment to use: as given, or that of the runs with the options that were given."""
        return self.resolved.env

    def load_policy(self, policy: str, description: "EnvDescription", batch_size: int) -> "Policy | ExpertConfig":
        """The expert, or the policy of a checkpoint."""
        if policy == EXPERT:
            if not description.has_expert:
                raise UserError(f"{description.name} has no scripted expert; pass a checkpoint.")
            return self.expert
        from pirl.envs.policy import load_trained_policy
        from pirl.training.setup import prepare_jax

        prepare_jax()
        planner = load_trained_policy(
            expand_home(policy),
            description,
            batch_size=batch_size,
            model=self.model,
            robot=self.robot,
            asset_id=self.asset_id,
            num_steps=self.resolved.denoising_steps[policy],
            guidance=self.guidance,
        )
        if (steps := self.resolved.execute_steps) > planner.horizon:
            raise UserError(f"--execute-steps {steps} is more than the policy's chunk length, {planner.horizon}.")
        return planner

    def describe(self, policy: str) -> dict[str, Any]:
        """Everything that decides how the episodes of a policy go, ready for JSON."""
        from pirl.envs.policy import find_policy
        from pirl.envs.registry import find_env_class

        env, used = self.env_config(), self.resolved
        if policy == EXPERT:
            who: dict[str, Any] = {"policy": EXPERT, "expert": asdict(self.expert)}
        else:
            who = {"policy": str(find_policy(expand_home(policy)).resolve()), "execute_steps": used.execute_steps}
            who |= {"denoising_steps": used.denoising_steps[policy]}
            who |= {name: getattr(self, name) for name in ("model", "robot", "asset_id", "guidance")}
        where = {"id": env.id, "adapter": env.adapter, "options": find_env_class(env)[1]}
        return {**who, "env": where, "task": self.task, "seed": self.seed}


@dataclass(frozen=True, kw_only=True)
class ActingInMany(Acting):
    """A policy that acts in several environments in parallel."""

    envs: Annotated[int | None, default("16, or the number of cores if each needs a process", "INT")] = None
    """Environments to run in parallel."""
    timeout: float = 120.0
    """Seconds after which an environment that does not respond is restarted and its episode counted as lost."""

    def check(self, **counts: int | None) -> None:
        """Raise, before anything is started, if the options cannot work."""
        super().check(**counts, envs=self.envs)
        if not 0 < self.timeout < math.inf:
            raise UserError(f"--timeout should be a number of seconds above 0; it is {self.timeout:g}.")

    def num_envs(self) -> int:
        """How many environments run in parallel."""
        from pirl.envs.pool import default_size

        return default_size(self.env_config()) if self.envs is None else self.envs


def _run_config(policy: str) -> "RLTrainConfig | None":
    """The configuration of the run whose policy it is, if it is named by its run."""
    run = RunFiles(expand_home(policy))
    if policy == EXPERT or not (run.config_file.is_file() and run.policies.is_dir()):
        return None
    from pirl.config import load_config

    try:
        return load_config(run.config_file)
    except UserError as error:
        why = "It defines the environment and settings of the policy: without it, pass "
        raise ConfigError(f"{error} {why}--env, --execute-steps and --denoising-steps.") from error


def _agreed(what: str, by_run: Mapping[str, _Value], in_flags: Callable[[_Value], str]) -> _Value:
    """What all runs have; raises if they differ."""
    (first, value), *others = by_run.items()
    for other, another in others:
        if another != value:
            raise UserError(
                f"{first} and {other} were not trained with the same {what}: {in_flags(value)} in one, "
                f"{in_flags(another)} in the other. Pass the one to use for both."
            )
    return value
