"""The knobs of a sweep: fields of the configuration, each with the values it may take."""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pirl.config import RLTrainConfig, to_plain
from pirl.config.values import list_fields
from pirl.errors import UserError, did_you_mean

# One value for each knob, as a command line spells it.
Setting = dict[str, str]
# The configuration with these fields set.
Configure = Callable[[Mapping[str, str]], RLTrainConfig]

_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log:)?({_NUMBER})\.\.({_NUMBER})")
_DIGITS = 4


@dataclass(frozen=True)
class Range:
    """Numbers between two; with `log`, every ratio is as likely as every other."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def spell(self, value: int | float) -> str:
        """A number of the range as text: no longer than it needs to be, and still within."""
        if self.whole:
            return str(round(value))
        short = f"{value:.{_DIGITS}g}"
        return short if self.low <= float(short) <= self.high else repr(float(value))


@dataclass(frozen=True)
class Knob:
    """A dotted field and what it may be: some texts, or the numbers of a range."""

    name: str
    values: tuple[str, ...] | Range

    @property
    def flag(self) -> str:
        """The field as a command line names it, without dashes before it."""
        return self.name.replace("_", "-")

    @property
    def examples(self) -> tuple[str, ...]:
        """All values, or the ends of the range."""
        if isinstance(self.values, Range):
            return self.values.spell(self.values.low), self.values.spell(self.values.high)
        return self.values

    def to_json(self) -> dict[str, Any]:
        """What files say of it."""
        if not isinstance(self.values, Range):
            return {"name": self.name, "values": list(self.values)}
        low, high = self.examples
        return {"name": self.name, "low": low, "high": high, "log": self.values.log}


def parse_knob(text: str, names: Mapping[str, str]) -> Knob:
    """A knob from FIELD=VALUE,VALUE,… or FIELD=LOW..HIGH or FIELD=log:LOW..HIGH; `names` are short ones of fields."""
    flag, given, values = text.partition("=")
    name = flag.strip().removeprefix("--").replace("-", "_")
    name = names.get(name, name)
    if not given or not name:
        raise UserError(f"--knob {text!r} should be FIELD=VALUE,VALUE or FIELD=LOW..HIGH, such as batch-size=16,32.")
    if found := _RANGE.fullmatch(values.strip()):
        low, high, log = float(found[2]), float(found[3]), found[1] is not None
        if not low < high < math.inf or (log and low <= 0):
            raise UserError(f"--knob {text}: a range goes from a number to a larger one{', above 0' if log else ''}.")
        return Knob(name, Range(low, high, log))
    if values.strip().startswith("log:"):
        raise UserError(f"--knob {text}: a range is written as log:LOW..HIGH, such as log:1e-5..1e-3.")
    choices = _split(values)
    if "" in choices or len(choices) < 2:
        raise UserError(
            f"--knob {text} needs at least two values, separated by commas; pass a single one as an option: --{flag} …"
        )
    return Knob(name, choices)


def settle_knobs(knobs: Sequence[Knob], given: Mapping[str, str], configure: Configure) -> tuple[Knob, ...]:
    """The knobs with the types of their fields. Raises for what is no field, or no value of it.

    `given` are fields that are set for all trials.
    """
    fields = [name.replace("_", "-") for name, _ in list_fields()]
    for index, knob in enumerate(knobs):
        if not knob.name.startswith("env.") and knob.flag not in fields:
            raise UserError(
                f"--knob {knob.flag}: there is no such field. {did_you_mean(knob.flag, fields)}"
                "`pirl train PRESET --help` shows all of them."
            )
        if knob.name in given or knob.name in [other.name for other in knobs[:index]]:
            raise UserError(f"--knob {knob.flag}: this field is set twice; leave one of them out.")
    first = {knob.name: knob.examples[0] for knob in knobs}
    return tuple(_settle(knob, lambda setting: configure({**first, **setting})) for knob in knobs)


def all_combinations(knobs: Sequence[Knob]) -> list[Setting] | None:
    """The whole grid, the last knob turning fastest; None if there is a range."""
    choices = [knob.values for knob in knobs if not isinstance(knob.values, Range)]
    if len(choices) < len(knobs):
        return None
    names = [knob.name for knob in knobs]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*choices)]


def every_value(knobs: Sequence[Knob]) -> Iterator[Setting]:
    """Settings in which every value of every knob occurs, the other knobs at their first."""
    first = {knob.name: knob.examples[0] for knob in knobs}
    yield first
    for knob in knobs:
        yield from ({**first, knob.name: value} for value in knob.examples[1:])


def as_number(text: str) -> float | None:
    """The number that a value is, if it is one that can be drawn."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _settle(knob: Knob, configure: Configure) -> Knob:
    ends = (knob.values.low, knob.values.high) if isinstance(knob.values, Range) else ()
    texts = [f"{end:.17g}" for end in ends] or knob.examples
    found = [_value(configure({knob.name: text}), knob.name) for text in texts]
    if isinstance(knob.values, Range):
        kinds = {type(value) for value in found}
        if not kinds <= {int, float}:
            raise UserError(f"--knob {knob.flag} takes no numbers, so it has no range: list its values.")
        return Knob(knob.name, replace(knob.values, whole=kinds == {int}))
    for index, value in enumerate(found):
        if value in found[:index] or knob.examples[index] in knob.examples[:index]:
            raise UserError(f"--knob {knob.flag} names {knob.examples[index]} twice.")
    return knob


def _value(config: RLTrainConfig, name: str) -> Any:
    value: Any = to_plain(config)
    for part in name.split("."):
        # What a choice refines is no field itself: a preset of the model leaves its numbers, and not its name.
        value = value.get(part, object()) if isinstance(value, Mapping) else object()
    return value


def _split(text: str) -> tuple[str, ...]:
    """At the commas that are not inside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return tuple(part.strip() for part in parts)
