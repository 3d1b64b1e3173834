"""Options that commands share: the configuration of a run, the environment, and the policy that acts in it."""

import dataclasses
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_type_hints

from pirl.cli.parser import Command, Option, field_docs, format_value, list_options, option, positional
from pirl.envs.experts import ExpertConfig
from pirl.errors import ConfigError, UserError
from pirl.files import expand_home
from pirl.run_files import RunFiles, refuse_directory_of_runs, saved_steps

if TYPE_CHECKING:
    from pirl.config import RLTrainConfig
    from pirl.envs.base import EnvDescription, Policy
    from pirl.envs.registry import EnvConfig

EXPERT = "expert"
DEFAULT_ENV = "tabletop"
DEFAULT_EXECUTE_STEPS = 5
DEFAULT_DENOISING_STEPS = 10


# --- the configuration of a run ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Configured(Command):
    """A configuration: options override the file, the file overrides the preset."""

    # Groups that begin with a choice may be given it under their own name.
    aliases: ClassVar[Mapping[str, str]] = {"env": "env.id", "model": "model.preset", "agent": "agent.learner"}
    takes_settings: ClassVar[bool] = True

    preset: str | None = positional("[PRESET]", None)
    """Preset to start from; not needed if the configuration file names one (preset: NAME) or is complete."""
    config_file: Path | None = option("FILE")
    """YAML file with fields to set."""
    debug: bool = False
    """Make ten updates of eight chunks, and shrink everything else, to check that all parts work together."""
    settings: Mapping[str, str] = field(default_factory=dict)

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
        return override_config(config, self.settings, texts=True)

    def default_config_file(self) -> Path | None:
        """The file to use if neither a preset nor a file is named."""
        return None

    @classmethod
    def setting_types(cls) -> Mapping[str, Any]:
        """Every field of a configuration."""
        from pirl.config.io import list_fields

        return dict(list_fields())

    @classmethod
    def help_groups(cls, arguments: Sequence[str], program: str) -> Iterator[tuple[str, str, list[Option]]]:
        """Every field with its value in the named configuration, if one is named."""
        command = cls.parse(arguments, program)
        if command.preset is not None or command.config_file is not None:
            yield from _config_groups(command.resolve(), "")


def _config_groups(config: Any, group: str, about: str = "") -> Iterator[tuple[str, str, list[Option]]]:
    """The options of a group, then those of the groups in it."""
    from pirl.config.io import CHOICES, list_choices, to_plain

    hints, docs = get_type_hints(type(config)), field_docs(type(config))
    options: list[Option] = []
    inner: list[tuple[str, str, list[Option]]] = []
    if choice := CHOICES.get(group):
        known = "|".join(list_choices(group))
        options.append(Option(f"{group}.{choice}", str, f"Another {choice}, with its defaults.", metavar=known))
    for member in dataclasses.fields(config):
        name = f"{group}.{member.name}" if group else member.name
        value, text = getattr(config, member.name), docs[member.name]
        optional_group = [kind for kind in get_args(hints[member.name]) if dataclasses.is_dataclass(kind)]
        if name == "env":
            inner.append((name, text, _env_options(value)))
        elif dataclasses.is_dataclass(value):
            inner += _config_groups(value, name, text)
        elif optional_group:
            options += [replace(one, shown="none") for one in list_options(optional_group[0], f"{name}.")]
        else:
            options.append(Option(name, hints[member.name], text, shown=_shown(to_plain(value))))
    yield group or "configuration", about, options
    yield from inner


def _shown(value: Any) -> str:
    return "false" if value is False else format_value(value) or ("none" if value is None else "[]")


def _env_options(env: "EnvConfig | None") -> list[Option]:
    from pirl.envs.registry import find_env_class, list_options

    options = [Option("env.id", str, "Name of the environment (pirl envs list).", shown=_shown(env and env.id))]
    text = "Adapter for your own environment, MODULE:CLASS."
    options.append(Option("env.adapter", str, text, shown=_shown(env and env.adapter)))
    if env is not None and env.adapter is None:
        for one in list_options(find_env_class(env)[0]):
            value = env.options.get(one.name, one.default)
            options.append(
                Option(f"env.{one.name}", str, f"{one.help} ({one.kind})", shown=format_value(value) or "none")
            )
    return options


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


# --- the environment and the policy ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InEnvironment(Command):
    """An environment, by name, with its own options."""

    aliases: ClassVar[Mapping[str, str]] = {"env.id": "env"}
    takes_settings: ClassVar[bool] = True

    env: str | None = option("NAME", shown=DEFAULT_ENV)
    """Environment: a name from `pirl envs list`, or a Gymnasium id (--env.id is the same).
    Pass its options as `--env.OPTION VALUE`; `pirl envs show NAME` lists them.
    For your own environment, add --env.adapter MODULE:CLASS."""
    settings: Mapping[str, str] = field(default_factory=dict)

    def env_config(self) -> "EnvConfig":
        """The environment to use."""
        from pirl.envs.registry import EnvConfig

        options: dict[str, Any] = {name.removeprefix("env."): text for name, text in self.settings.items()}
        return EnvConfig(DEFAULT_ENV if self.env is None else self.env, options.pop("adapter", None), options)


@dataclass(frozen=True, kw_only=True)
class Acting(InEnvironment):
    """A policy that acts in an environment. The policy of a run uses the run's environment and settings by default."""

    env: str | None = option("NAME", shown=f"that of the run, else {DEFAULT_ENV}")
    """Environment: a name from `pirl envs list`, or a Gymnasium id (--env.id is the same).
    Pass its options as `--env.OPTION VALUE`; `pirl envs show NAME` lists them.
    For your own environment, add --env.adapter MODULE:CLASS.
    A run brings its own environment and options; --env.OPTION changes an option, --env replaces the environment."""
    task: str | None = option("TASK", shown="all tasks in turn")
    """Use only this task."""
    seed: int = 0
    """Random seed: determines the initial states and everything random after them."""
    execute_steps: int | None = option(shown=f"as in the run, else {DEFAULT_EXECUTE_STEPS}")
    """Actions of each chunk to execute before replanning."""
    denoising_steps: int | None = option(shown=f"as in the run, else {DEFAULT_DENOISING_STEPS}")
    """Integration steps from noise to actions. OpenPI acts with 10."""
    model: str | None = option("PRESET")
    """Model preset, for a checkpoint without pirl.json."""
    robot: str | None = option("NAME|FILE", shown="the policy's own, else the environment's")
    """Robot preset or JSON file, if the policy was trained for another robot description than the environment's."""
    asset_id: str | None = option("ID")
    """Normalization statistics to use, if the checkpoint has several; `none` if it was trained without."""
    guidance: float | None = option("W", shown="as in the checkpoint")
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
                    raise UserError(
                        f"--{name.replace('_', '-')} is for checkpoints; the scripted expert does not use it."
                    )
        elif len(checkpoints) == len(self.policies) and self.expert != ExpertConfig():
            raise UserError("--expert.* is for the scripted expert; a checkpoint does not use it.")
        for checkpoint in checkpoints:
            directory = expand_home(checkpoint)
            if not directory.is_dir():
                raise UserError(f"{checkpoint} is not a checkpoint directory; for the scripted expert, use {EXPERT!r}.")
            refuse_directory_of_runs(directory)

    @cached_property
    def _runs(self) -> "dict[str, RLTrainConfig]":
        """The configurations of the policies that are runs, if anything is to be as in them."""
        if None not in (self.env, self.execute_steps, self.denoising_steps):
            return {}
        return {policy: config for policy in self.policies if (config := _run_config(policy)) is not None}

    @cached_property
    def _env(self) -> "EnvConfig":
        given, trained = super().env_config(), {run: config.env for run, config in self._runs.items() if config.env}
        if self.env is not None or not trained:
            return given
        _check_agreement("environment", {run: shlex.join(env.flags()) for run, env in trained.items()})
        base = next(iter(trained.values()))
        return replace(base, adapter=given.adapter or base.adapter, options={**base.options, **given.options})

    @cached_property
    def resolved_execute_steps(self) -> int:
        """The number of actions to execute: as given, as in the runs, or the default."""
        if self.execute_steps is not None or not self._runs:
            return self.execute_steps or DEFAULT_EXECUTE_STEPS
        steps = {run: config.evaluation.execute_steps for run, config in self._runs.items()}
        _check_agreement("number of steps", {run: f"--execute-steps {number}" for run, number in steps.items()})
        return next(iter(steps.values()))

    def _denoising_steps_of(self, policy: str) -> int:
        own = self._runs[policy].agent.denoising_steps if policy in self._runs else DEFAULT_DENOISING_STEPS
        return self.denoising_steps or own

    def print_notes(self) -> None:
        """Print, as flags, what is as in the runs of the policies."""
        env, taken = self.env_config(), []
        if self.env is None and any(config.env is not None for config in self._runs.values()):
            own = {name: value for name, value in env.options.items() if f"env.{name}" not in self.settings}
            taken.append(shlex.join(replace(env, options=own).flags()))
        if self.execute_steps is None:
            taken.append(f"--execute-steps {self.resolved_execute_steps}")
        steps = {run: self._denoising_steps_of(run) for run in self._runs}
        differ = len(set(steps.values())) > 1
        if self.denoising_steps is None and steps and not differ:
            taken.append(f"--denoising-steps {next(iter(steps.values()))}")
        if steps and taken:
            print(f"as in {' and '.join(steps)}: {' '.join(taken)}")
        if differ:
            for run, number in steps.items():
                print(f"as in {run}, for its own policy: --denoising-steps {number}")

    def env_config(self) -> "EnvConfig":
        """The environment to use: as given, or that of the runs with the options that were given."""
        return self._env

    def load_policy(self, policy: str, description: "EnvDescription", batch_size: int) -> "Policy | ExpertConfig":
        """The expert, or the policy of a checkpoint."""
        if policy == EXPERT:
            if not description.has_expert:
                raise UserError(f"{description.name} has no scripted expert; pass a checkpoint.")
            return self.expert
        from pirl.envs.policy import load_trained_policy
        from pirl.training.setup import prepare_jax

        prepare_jax()
        loaded = load_trained_policy(
            expand_home(policy),
            description,
            batch_size=batch_size,
            model=self.model,
            robot=self.robot,
            asset_id=self.asset_id,
            num_steps=self._denoising_steps_of(policy),
            guidance=self.guidance,
        )
        if (steps := self.resolved_execute_steps) > loaded.horizon:
            raise UserError(f"--execute-steps {steps} is more than the policy's chunk length, {loaded.horizon}.")
        return loaded

    def describe(self, policy: str) -> dict[str, Any]:
        """Everything that decides how the episodes of a policy go, ready for JSON."""
        from pirl.envs.policy import find_policy
        from pirl.envs.registry import find_env_class

        env = self.env_config()
        if policy == EXPERT:
            who: dict[str, Any] = {"policy": EXPERT, "expert": asdict(self.expert)}
        else:
            who = {
                "policy": str(find_policy(expand_home(policy)).resolve()),
                "execute_steps": self.resolved_execute_steps,
            }
            who |= {"denoising_steps": self._denoising_steps_of(policy)}
            who |= {name: getattr(self, name) for name in ("model", "robot", "asset_id", "guidance")}
        where = {"id": env.id, "adapter": env.adapter, "options": find_env_class(env)[1]}
        return {**who, "env": where, "task": self.task, "seed": self.seed}


@dataclass(frozen=True, kw_only=True)
class ActingInMany(Acting):
    """A policy that acts in several environments in parallel."""

    envs: int | None = option(shown="16, or the number of cores if each needs a process")
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
    if policy == EXPERT or not (run.config_file.is_file() and saved_steps(run.checkpoints)):
        return None
    from pirl.config import load_config

    try:
        return load_config(run.config_file)
    except UserError as error:
        why = "It defines the environment and settings of the policy: without it, pass "
        raise ConfigError(f"{error} {why}--env, --execute-steps and --denoising-steps.") from error


def _check_agreement(what: str, flags: Mapping[str, str]) -> None:
    (first, ours), *others = flags.items()
    for other, theirs in others:
        if theirs != ours:
            raise UserError(
                f"{first} and {other} were not trained with the same {what}: {ours} in one, {theirs} in the other. "
                "Pass the one to use for both."
            )
