"""Options shared by the commands that act in an environment: the environment, the policy, and a progress bar."""

import contextlib
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pirl.cli.console import default, optional
from pirl.cli.trained import agreed, run_configs
from pirl.envs.experts import ExpertConfig
from pirl.errors import UserError
from pirl.files import expand_home
from pirl.run_files import refuse_directory_of_runs

if TYPE_CHECKING:
    from pirl.config import RLTrainConfig
    from pirl.envs.base import EnvDescription
    from pirl.envs.evaluation import EpisodeResult
    from pirl.envs.planner import Planner
    from pirl.envs.registry import EnvConfig

EXPERT = "expert"
DEFAULT_ENV = "tabletop"
DEFAULT_EXECUTE_STEPS = 5
DEFAULT_DENOISING_STEPS = 10
_PREFIX = "--env."


@dataclass(frozen=True, kw_only=True)
class InEnvironment:
    """An environment, by name, with its own options."""

    env: Annotated[str | None, default(DEFAULT_ENV, "NAME")] = None
    """Environment: a name from `pirl envs list`, or a Gymnasium id (--env.id is the same).
    Pass its options as `--env.OPTION VALUE`; `pirl envs show NAME` lists them.
    For your own environment, add --env.adapter MODULE:CLASS."""
    env_options: tyro.conf.Suppress[tyro.conf.Fixed[tuple[tuple[str, str], ...]]] = ()

    def env_config(self) -> "EnvConfig":
        """The environment that was asked for."""
        from pirl.envs.registry import EnvConfig

        options = dict(self.env_options)
        name = DEFAULT_ENV if self.env is None else self.env
        return EnvConfig(id=name, adapter=options.pop("adapter", None), options=options)


def take_env_options(arguments: Sequence[str], program: str) -> tuple[list[str], tuple[tuple[str, str], ...]]:
    """Separate `--env.OPTION VALUE`, which no parser can know beforehand, from the other arguments."""
    others: list[str] = []
    options: dict[str, str] = {}
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--":
            others += [argument, *remaining]
            break
        if not argument.startswith(_PREFIX):
            others.append(argument)
            continue
        flag, given, value = argument.partition("=")
        if not given:
            value = next(remaining, "--")
            if value.startswith("--"):
                raise UserError(f"{program}: {flag} needs a value, such as {flag}=true for something to switch on.")
        name = flag.removeprefix(_PREFIX).replace("-", "_")
        if name == "id":
            others += ["--env", value]
        else:
            options[name] = value
    return others, tuple(options.items())


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
    """Normalisation statistics to use, if the checkpoint has several; `none` if it was trained without."""
    guidance: Annotated[float | None, default("as in the checkpoint", "W")] = None
    """Guidance weight, for a policy trained with guidance: 0 plain prompt, 1 positive prompt, above 1 extrapolates."""
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    """Flaws of the scripted expert."""

    @property
    def policies(self) -> list[str]:
        """The policies: checkpoints, runs, or the expert."""
        raise NotImplementedError

    def check(self, **counts: int) -> None:
        """Refuse, before anything is started, what cannot work."""
        steps = {"execute-steps": self.execute_steps, "denoising-steps": self.denoising_steps}
        for name, value in {**counts, **steps}.items():
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

    # --- what the runs say ---------------------------------------------------------------------------------------

    @cached_property
    def _runs(self) -> "dict[str, RLTrainConfig]":
        """The configurations of runs among those who act, if anything is left to them."""
        if None not in (self.env, self.execute_steps, self.denoising_steps):
            return {}
        return run_configs([policy for policy in self.policies if policy != EXPERT])

    def _trained_env(self) -> "EnvConfig | None":
        """The environment of the runs, unless another was asked for."""
        own = {run: config.env for run, config in self._runs.items() if config.env is not None}
        return agreed("environment", own, _in_flags) if self.env is None and own else None

    def env_config(self) -> "EnvConfig":
        """The environment that was asked for, or that of the runs with the options that were given."""
        if (trained := self._trained_env()) is None:
            return super().env_config()
        options = dict(self.env_options)
        adapter = options.pop("adapter", trained.adapter)
        return replace(trained, adapter=adapter, options={**trained.options, **options})

    def executed_steps(self) -> int:
        """Actions of a chunk to execute: as asked for, or as in the runs."""
        if self.execute_steps is not None or not self._runs:
            return self.execute_steps or DEFAULT_EXECUTE_STEPS
        own = {run: config.evaluation.execute_steps for run, config in self._runs.items()}
        return agreed("number of steps", own, lambda steps: f"--execute-steps {steps}")

    def denoising_steps_of(self, policy: str) -> int:
        """Steps from noise to actions: as asked for, or as in its own run, for this is a matter of each policy."""
        if self.denoising_steps is not None:
            return self.denoising_steps
        run = self._runs.get(policy)
        return DEFAULT_DENOISING_STEPS if run is None else run.agent.denoising_steps

    def tell_what_runs_say(self) -> None:
        """Print what was taken from runs, as one would give it."""
        taken = []
        if (env := self._trained_env()) is not None:
            given = dict(self.env_options)
            options = {name: value for name, value in env.options.items() if name not in given}
            taken.append(_in_flags(replace(env, adapter=None if "adapter" in given else env.adapter, options=options)))
        if self._runs and self.execute_steps is None:
            taken.append(f"--execute-steps {self.executed_steps()}")
        denoising = {run: f"--denoising-steps {self.denoising_steps_of(run)}" for run in self._runs}
        alike = len(set(denoising.values())) == 1
        if alike and self.denoising_steps is None:
            taken += set(denoising.values())
        if taken:
            print(f"as in {' and '.join(self._runs)}: {' '.join(taken)}")
        if not alike:
            for run, flag in denoising.items():
                print(f"as in {run}, for its own policy: {flag}")

    # --- who acts ------------------------------------------------------------------------------------------------

    def actor(self, policy: str, description: "EnvDescription", batch_size: int) -> "Planner | ExpertConfig":
        """Who acts: the expert, or the policy of a checkpoint."""
        if policy == EXPERT:
            if not description.has_expert:
                raise UserError(f"{description.name} has no scripted expert; pass a checkpoint.")
            return self.expert
        from pirl.envs.planner import load_planner
        from pirl.training.compiling import prepare_jax

        prepare_jax()
        planner = load_planner(
            expand_home(policy),
            description,
            batch_size=batch_size,
            model=self.model,
            robot=self.robot,
            asset_id=self.asset_id,
            num_steps=self.denoising_steps_of(policy),
            guidance=self.guidance,
        )
        if (steps := self.executed_steps()) > planner.horizon:
            raise UserError(f"--execute-steps {steps} is more than the policy's chunk length, {planner.horizon}.")
        return planner

    def settings(self, policy: str) -> dict[str, Any]:
        """All that decides how its episodes go."""
        from pirl.envs.registry import find_env_class

        config = self.env_config()
        _, options = find_env_class(config)
        if policy == EXPERT:
            who: dict[str, Any] = {"policy": EXPERT, "expert": asdict(self.expert)}
        else:
            from pirl.envs.planner import find_policy

            who = {"policy": str(find_policy(expand_home(policy)).resolve()), "execute_steps": self.executed_steps()}
            who |= {"denoising_steps": self.denoising_steps_of(policy)}
            who |= {name: getattr(self, name) for name in ("model", "robot", "asset_id", "guidance")}
        return {
            **who,
            "env": {"id": config.id, "adapter": config.adapter, "options": options},
            "task": self.task,
            "seed": self.seed,
        }


@dataclass(frozen=True, kw_only=True)
class ActingInMany(Acting):
    """A policy that acts in several environments in parallel."""

    envs: Annotated[int | None, default("16, or the number of cores if each needs a process", "INT")] = None
    """Environments to run in parallel."""
    timeout: float = 120.0
    """Seconds after which an environment that does not respond is restarted and its episode counted as lost."""

    def check(self, **counts: int) -> None:
        """Refuse, before anything is started, what cannot work."""
        super().check(**counts, **({} if self.envs is None else {"envs": self.envs}))
        if not 0 < self.timeout < math.inf:
            raise UserError(f"--timeout should be a number of seconds above 0; it is {self.timeout:g}.")

    def at_a_time(self) -> int:
        """How many environments run at the same time."""
        from pirl.envs.pools import default_size

        return default_size(self.env_config()) if self.envs is None else self.envs


def _in_flags(env: "EnvConfig") -> str:
    return shlex.join(env.flags())


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator["Callable[[EpisodeResult], None]"]:
    """A progress bar with the success rate so far, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda result: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        finished = successes = 0

        def advance(result: "EpisodeResult") -> None:
            nonlocal finished, successes
            finished += result.lost is None
            successes += result.success
            rate = f", success {successes / finished:.0%}" if finished else ""
            bar.update(task, advance=1, description=f"{what}{rate}")

        yield advance
