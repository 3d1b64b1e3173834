"""What a sweep is going to do, decided and checked before anything starts."""

import functools
import importlib.util
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pirl.config import RLTrainConfig, check_config, to_plain
from pirl.config.metrics import check_metric
from pirl.errors import ConfigError, UserError
from pirl.processes import pirl_command
from pirl.sweep.halving import Halving, Mode
from pirl.sweep.knobs import Configure, Knob, Setting, all_combinations, every_value
from pirl.sweep.trials import Trial

# What rungs count, by the field that says how long a run is, and what it is called.
UNITS = {"steps": "updates", "online.env_steps": "environment steps", "rollout.iterations": "iterations"}


@dataclass(frozen=True)
class SweepPlan:
    """Everything that decides what a sweep does."""

    name: str
    directory: Path
    base: RLTrainConfig
    """The configuration that the knobs are turned in."""
    train: tuple[str, ...]
    """How `pirl train` is asked for it: preset, file and switches."""
    given: Mapping[str, str]
    """Fields that are set for all trials."""
    length_field: str
    """What rungs count."""
    knobs: tuple[Knob, ...]
    halving: Halving
    trials: int
    metric: str
    mode: Mode
    seed: int
    """Decides which settings are tried."""
    jobs: int = 1
    """Trials that are trained at the same time."""
    program: tuple[str, ...] = field(default_factory=lambda: (*pirl_command(), "train"))

    @property
    def grid(self) -> list[Setting] | None:
        """All combinations, if there are no more of them than trials."""
        combinations = all_combinations(self.knobs)
        return combinations if combinations is not None and len(combinations) <= self.trials else None

    @property
    def count(self) -> int:
        """How many trials there are: of a small grid, no more than it has combinations."""
        return self.trials if self.grid is None else len(self.grid)

    @property
    def unit(self) -> str:
        """What a rung is a number of."""
        return UNITS[self.length_field]

    def run_of(self, trial: Trial) -> Path:
        """The run directory of a trial."""
        return self.directory / trial.name

    def log_of(self, trial: Trial) -> Path:
        """What the process of a trial says."""
        return self.directory / "logs" / f"{trial.name}.log"

    def trial_command(self, trial: Trial, rung: int, *, resume: bool) -> tuple[str, ...]:
        """Trains a trial up to a rung."""
        fields = {**self.given, **trial.setting, self.length_field: str(rung)}
        again = ("--resume",) if resume else ()
        return (*self.program, *self.train, "--exp-name", f"{self.name}/{trial.name}", *_options(fields), *again)

    def full_command(self, setting: Mapping[str, str], separator: str = " ") -> str:
        """Trains a setting in full, as a run of its own; options behind a separator."""
        # As long as the configuration says; but a trial that went further than that is not to be cut short.
        configured: int = functools.reduce(getattr, self.length_field.split("."), self.base)  # type: ignore[assignment]
        length = {self.length_field: str(max(configured, self.halving.rungs[-1]))}
        command = shlex.join(("pirl", "train", *self.train, "--exp-name", f"{self.name}-best"))
        return separator.join((command, *map(shlex.quote, _options({**self.given, **setting, **length}))))

    def settings(self) -> dict[str, Any]:
        """What has to be the same when the sweep is resumed: a preset or a file may have changed meanwhile."""
        config = to_plain(self.base)
        del config["runs_dir"]
        return {
            "train": list(self.train),
            "options": dict(self.given),
            "knobs": [knob.to_json() for knob in self.knobs],
            "counts": self.length_field,
            "rungs": list(self.halving.rungs),
            "reduction": self.halving.reduction,
            "trials": self.trials,
            "metric": self.metric,
            "mode": self.mode,
            "seed": self.seed,
            "config": config,
        }


def length_of(config: RLTrainConfig) -> tuple[str, int]:
    """The field that says how long a run is, and its value: what comes last in a run is what can be made longer."""
    if config.goes_by_iterations:
        return "rollout.iterations", config.rollout.iterations
    if config.online.env_steps:
        return "online.env_steps", config.online.env_steps
    return "steps", config.steps


def check_plan(plan: SweepPlan, configure: Configure) -> None:
    """Raise if a trial could not work, or would not be measured. Devices are left to the trials to count."""
    for name, value in (("trials", plan.trials), ("jobs", plan.jobs)):
        if value < 1:
            raise UserError(f"--{name} should be at least 1; it is {value}.")
    for knob in plan.knobs:
        if knob.name in (plan.length_field, "name", "runs_dir"):
            why = "rungs set" if knob.name == plan.length_field else "the sweep sets"
            raise UserError(f"--knob {knob.flag} cannot be varied: {why} it.")
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("a sweep needs Optuna, which is not installed: pip install 'pirl[sweep]'.")
    first = plan.halving.rungs[0]
    for setting in plan.grid or every_value(plan.knobs):
        shown = ", ".join(f"{name} = {value}" for name, value in setting.items())
        config = configure(setting)
        if length_of(config)[0] != plan.length_field:
            raise ConfigError(
                f"with {shown} a run counts {UNITS[length_of(config)[0]]}, other runs {plan.unit}: these cannot be "
                "compared rung by rung. Make one sweep for each."
            )
        try:
            check_config(configure({**setting, plan.length_field: str(first)}))
        except ConfigError as error:
            raise ConfigError(f"with {shown} and {plan.length_field} = {first}, {error}") from error
        if problems := list(check_metric(config, plan.metric)):
            raise ConfigError(f"--metric {plan.metric}: {problems[0]}")
        if plan.metric.startswith("val/") and first < config.validation_every and plan.length_field == "steps":
            raise ConfigError(
                f"--metric {plan.metric} is measured every {config.validation_every} updates, and not before the first "
                f"rung, {first}: lower --validation-every, or raise the rungs."
            )


def _options(fields: Mapping[str, str]) -> tuple[str, ...]:
    # Joined by =, because a value may begin with a dash.
    return tuple(f"--{name.replace('_', '-')}={value}" for name, value in fields.items())
