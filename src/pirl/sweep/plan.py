"""What a sweep is going to do: its search space, its rungs and its commands, checked before anything starts."""

import functools
import itertools
import math
import operator
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial

from pirl.config import RLTrainConfig, check_config, to_plain
from pirl.config.checks import check_metric
from pirl.config.io import list_fields
from pirl.errors import ConfigError, UserError, did_you_mean
from pirl.processes import pirl_command
from pirl.run_files import RunFiles

# What rungs count, by the field that says how long a run is.
UNITS = {"steps": "updates", "online.env_steps": "environment steps", "rollout.iterations": "iterations"}

Space = dict[str, BaseDistribution]
# The configuration with these fields set, as a command line spells them.
Configure = Callable[[Mapping[str, str]], RLTrainConfig]

_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log:)?({_NUMBER})\.\.({_NUMBER})")
_COMMA = re.compile(r",(?![^\[{]*[\]}])")  # not inside brackets


def parse_parameter(text: str, short_names: Mapping[str, str]) -> tuple[str, BaseDistribution]:
    """A field and its values from FIELD=VALUE,VALUE,… or FIELD=LOW..HIGH or FIELD=log:LOW..HIGH."""
    flag, given, values = text.partition("=")
    name = flag.strip().removeprefix("--").replace("-", "_")
    name, values = short_names.get(name, name), values.strip()
    if not given or not name:
        raise UserError(f"--param {text!r} should be FIELD=VALUE,VALUE or FIELD=LOW..HIGH, such as batch-size=16,32.")
    if found := _RANGE.fullmatch(values):
        low, high, log = float(found[2]), float(found[3]), found[1] is not None
        if not low < high < math.inf or (log and low <= 0):
            raise UserError(f"--param {text}: a range goes from a number to a larger one{', above 0' if log else ''}.")
        return name, FloatDistribution(low, high, log=log)
    if values.startswith("log:"):
        raise UserError(f"--param {text}: a range is written as log:LOW..HIGH, such as log:1e-5..1e-3.")
    choices = [choice.strip() for choice in _COMMA.split(values)]
    if "" in choices or len(choices) < 2:
        raise UserError(
            f"--param {text} needs at least two values, separated by commas; pass a single one as an option: --{flag} …"
        )
    return name, CategoricalDistribution(choices)


def make_space(texts: Sequence[str], short: Mapping[str, str], given: Mapping[str, str], configure: Configure) -> Space:
    """The search space, with the types of its fields; `given` are the fields that are set for all trials."""
    fields = [flag_of(name) for name, _ in list_fields()]
    space: Space = {}
    for text in texts:
        name, distribution = parse_parameter(text, short)
        if not name.startswith("env.") and flag_of(name) not in fields:
            raise UserError(
                f"--param {flag_of(name)}: there is no such field. {did_you_mean(flag_of(name), fields)}"
                "`pirl train PRESET --help` shows all of them."
            )
        if name in given or name in space:
            raise UserError(f"--param {flag_of(name)}: this field is set twice; leave one of them out.")
        space[name] = distribution
    first = {name: examples(distribution)[0] for name, distribution in space.items()}
    for name, distribution in space.items():
        found = [_value(configure({**first, name: text}), name) for text in examples(distribution)]
        if isinstance(distribution, FloatDistribution):
            kinds = {type(value) for value in found}
            if not kinds <= {int, float}:
                raise UserError(f"--param {flag_of(name)} takes no numbers, so it has no range: list its values.")
            if kinds == {int}:
                space[name] = IntDistribution(int(distribution.low), int(distribution.high), log=distribution.log)
            continue
        for index, text in enumerate(examples(distribution)):
            if found[index] in found[:index] or text in examples(distribution)[:index]:
                raise UserError(f"--param {flag_of(name)} names {text} twice.")
    return space


def _value(config: RLTrainConfig, name: str) -> Any:
    value: Any = to_plain(config)
    for part in name.split("."):
        # A choice such as model.preset is no field of the configuration that it makes.
        value = value.get(part, object()) if isinstance(value, Mapping) else object()
    return value


def flag_of(name: str) -> str:
    """A field as a command line names it, without the dashes before it."""
    return name.replace("_", "-")


def spell(value: str | int | float) -> str:
    """A value as a command line spells it."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def examples(distribution: BaseDistribution) -> tuple[str, ...]:
    """All values, or the ends of the range."""
    if isinstance(distribution, CategoricalDistribution):
        return tuple(map(str, distribution.choices))
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return spell(distribution.low), spell(distribution.high)


@dataclass(frozen=True)
class SweepPlan:
    """All that decides what a sweep does."""

    name: str
    directory: Path
    base: RLTrainConfig
    train: tuple[str, ...]
    """How `pirl train` is asked for the configuration: preset, file and switches."""
    given: Mapping[str, str]
    """Fields that are set for all trials."""
    length_field: str
    """The field that rungs set."""
    space: Space
    rungs: tuple[int, ...]
    reduction: int
    """One trial in so many goes on to the next rung."""
    trials: int
    metric: str
    mode: Literal["max", "min"]
    seed: int
    jobs: int = 1
    program: tuple[str, ...] = field(default_factory=lambda: (*pirl_command(), "train"))

    @functools.cached_property
    def grid(self) -> list[dict[str, str]] | None:
        """All combinations, the last parameter varying fastest; None with a range, or with more of them than trials."""
        lists = [examples(values) for values in self.space.values() if isinstance(values, CategoricalDistribution)]
        if len(lists) < len(self.space) or math.prod(map(len, lists)) > self.trials:
            return None
        return [dict(zip(self.space, combination, strict=True)) for combination in itertools.product(*lists)]

    @property
    def count(self) -> int:
        return self.trials if self.grid is None else len(self.grid)

    @property
    def unit(self) -> str:
        return UNITS[self.length_field]

    @property
    def direction(self) -> Literal["maximize", "minimize"]:
        return "maximize" if self.mode == "max" else "minimize"

    def schedule(self) -> list[tuple[int, int]]:
        """How many trials come to each rung, if none fails."""
        counts = itertools.accumulate(self.rungs[1:], lambda count, _: self.places(count), initial=self.count)
        return list(zip(counts, self.rungs, strict=True))

    def places(self, trials: int) -> int:
        """How many of so many trials on a rung go on."""
        return max(1, trials // self.reduction)

    def promote(self, values: Mapping[int, float | None]) -> list[int]:
        """The trials on a rung that go on, by number; None is the value of a trial that failed, which takes no place."""
        sign = -1 if self.mode == "max" else 1
        known = {number: sign * value for number, value in values.items() if value is not None}
        return sorted(sorted(known, key=lambda number: (known[number], number))[: self.places(len(values))])

    def work(self) -> int:
        """The length of all trials together."""
        return sum(
            count * (rung - last) for (count, rung), last in zip(self.schedule(), (0, *self.rungs), strict=False)
        )

    def run_of(self, trial: FrozenTrial) -> Path:
        return self.directory / name_of(trial)

    def log_of(self, trial: FrozenTrial) -> Path:
        return self.directory / "logs" / f"{name_of(trial)}.log"

    def trial_command(self, trial: FrozenTrial, rung: int) -> tuple[str, ...]:
        fields = {**self.given, **setting_of(trial), self.length_field: str(rung)}
        resume = ("--resume",) if RunFiles(self.run_of(trial)).lock_file.exists() else ()
        return (*self.program, *self.train, "--exp-name", f"{self.name}/{name_of(trial)}", *_options(fields), *resume)

    def full_command(self, trial: FrozenTrial, separator: str = " ") -> str:
        """Trains the setting of a trial at full length, as a run of its own."""
        length = max(operator.attrgetter(self.length_field)(self.base), self.rungs[-1])
        fields = {**self.given, **setting_of(trial), self.length_field: str(length)}
        command = shlex.join(("pirl", "train", *self.train, "--exp-name", f"{self.name}-best"))
        return separator.join((command, *map(shlex.quote, _options(fields))))

    def describe(self) -> list[tuple[str, str]]:
        """What is going to be done, and how much it is, as names and texts."""
        rows = []
        for name, values in self.space.items():
            is_list = isinstance(values, CategoricalDistribution)
            words = (", " if is_list else " to ").join(examples(values))
            rows.append((flag_of(name), words + ", log" * getattr(values, "log", False)))
        tried = "half at random, then by TPE" if self.grid is None else "all combinations"
        counts = ", ".join(f"{count} to {rung:,}" for count, rung in self.schedule())
        whole, better = self.count * self.rungs[-1], "larger" if self.mode == "max" else "smaller"
        return [
            ("sweep", str(self.directory)),
            *rows,
            ("trials", f"{self.count}, {tried}: {counts} {self.unit}"),
            ("work", f"{self.work():,} {self.unit} in total, instead of {whole:,}"),
            ("compared by", f"{self.metric}, the {better} the better"),
        ]

    def settings(self) -> dict[str, Any]:
        """What has to be the same when the sweep is resumed."""
        config = to_plain(self.base)
        del config["runs_dir"]  # may be named in another way
        same = ("train", "length_field", "rungs", "reduction", "trials", "metric", "mode", "seed")
        space = {name: str(distribution) for name, distribution in self.space.items()}
        return {name: getattr(self, name) for name in same} | {"options": self.given, "space": space, "config": config}


def name_of(trial: FrozenTrial) -> str:
    """The name of a trial and of its run directory."""
    return f"trial-{trial.number:03d}"


def setting_of(trial: FrozenTrial) -> dict[str, str]:
    return {name: spell(value) for name, value in trial.params.items()}


def _options(fields: Mapping[str, str]) -> list[str]:
    # Joined by =, because a value may begin with a dash.
    return [f"--{flag_of(name)}={value}" for name, value in fields.items()]


def make_rungs(least: int | None, most: int, reduction: int) -> tuple[int, ...]:
    """Rungs up to `most`, each 1/`reduction` of the next, none below `least`; without it, three of them."""
    if reduction < 2:
        raise UserError(f"--reduction {reduction} should be at least 2: one in so many trials goes on.")
    if most < 1:
        raise UserError(f"--iterations {most} should be 1 or more.")
    if least is not None and not 1 <= least <= most:
        raise UserError(f"--min-iterations {least} should be from 1 to {most}, which is where the best trials end.")
    rungs = {most // reduction**power for power in range(3 if least is None else most.bit_length())}
    return tuple(sorted(rung for rung in rungs if rung >= (least or 1)))


def parse_rungs(text: str) -> tuple[int, ...]:
    """Rungs from a text such as 5,15,45."""
    parts = [part.strip() for part in text.split(",")]
    rungs = [int(part) if part.isdecimal() and len(part) < 19 else 0 for part in parts]
    if rungs[0] < 1 or any(a >= b for a, b in itertools.pairwise(rungs)):
        raise UserError(f"--rungs {text:.60} should be whole numbers from 1 on, each larger than the last: 5,15,45.")
    return tuple(rungs)


def length_of(config: RLTrainConfig) -> tuple[str, int]:
    """The field that makes a run longer, and its value."""
    if config.on_policy:
        return "rollout.iterations", config.rollout.iterations
    if config.online.env_steps:
        return "online.env_steps", config.online.env_steps
    return "steps", config.steps


def check_plan(plan: SweepPlan, configure: Configure) -> None:
    """Raise if a trial could not work, or would not be measured."""
    for name, value, least in (("trials", plan.trials, 1), ("jobs", plan.jobs, 1), ("reduction", plan.reduction, 2)):
        if value < least:
            raise UserError(f"--{name} should be at least {least}; it is {value}.")
    for name in {plan.length_field, "name", "runs_dir"} & plan.space.keys():
        raise UserError(f"--param {flag_of(name)} cannot be varied: the sweep sets it.")
    first = plan.rungs[0]
    settings = plan.grid
    if settings is None:  # every value once, with the first of the others
        start = {name: examples(distribution)[0] for name, distribution in plan.space.items()}
        settings = [{**start, name: text} for name, values in plan.space.items() for text in examples(values)]
    for setting in settings:
        shown = ", ".join(f"{name} = {value}" for name, value in setting.items())
        config = configure(setting)
        if (other := length_of(config)[0]) != plan.length_field:
            raise ConfigError(
                f"with {shown} a run counts {UNITS[other]}, other runs {plan.unit}: these cannot be compared rung by "
                "rung. Make one sweep for each."
            )
        try:
            check_config(configure({**setting, plan.length_field: str(first)}))
        except ConfigError as error:
            raise ConfigError(f"with {shown} and {plan.length_field} = {first}, {error}") from error
        if problems := list(check_metric(config, plan.metric)):
            raise ConfigError(f"--metric {plan.metric}: {problems[0]}")
        if plan.metric.startswith("val/") and plan.length_field == "steps" and first < config.validation_every:
            raise ConfigError(
                f"--metric {plan.metric} is measured every {config.validation_every} updates, and not before the first "
                f"rung, {first}: lower --validation-every, or raise the rungs."
            )
