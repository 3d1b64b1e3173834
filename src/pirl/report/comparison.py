"""How often each policy succeeds: one honest sentence, bars with intervals, and a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pirl.envs.intervals import SIGNIFICANT, probability
from pirl.errors import DataError
from pirl.report.page import Column, Section, figure, table
from pirl.report.svg import bar, bar_axis


@dataclass(frozen=True)
class Difference:
    """The rate less the baseline's on the same starts, with its 95 % interval and the p value of there being none."""

    difference: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True)
class PolicyResult:
    """How one policy did. Rates are shares of 1; what is not known is None."""

    name: str
    success: float
    low: float
    high: float
    episodes: int
    description: str = ""
    updates: int | None = None
    minutes: float | None = None
    paired: Difference | None = None


def read_results(results: Mapping[str, Mapping[str, Any]]) -> list[PolicyResult]:
    """The results of a `results.json`, in its order.

    Each has `success`, `low`, `high` and `episodes`, and may have `name`, `description`, `updates`, `minutes` and
    `paired`: the comparison with the baseline (`difference`, `interval`, `p_value`) as `Comparison.to_json` gives it.
    """
    return [_read_result(key, result) for key, result in results.items()]


def headline(policy: PolicyResult, baseline: PolicyResult) -> str:
    """What was measured and what follows from it, in one sentence or two."""
    if policy.episodes == baseline.episodes:
        episodes = f"{policy.episodes} episodes each"
    else:
        episodes = f"{policy.episodes} and {baseline.episodes} episodes"
    same = " on the same initial states" if policy.paired else ""
    facts = f"{policy.name} {rate(policy)} against {baseline.name} {rate(baseline)}, {episodes}{same}"
    if policy.low > baseline.high:
        return f"{facts}: {policy.name} is better, and the 95 % intervals do not overlap."
    if policy.high < baseline.low:
        return f"{facts}: {policy.name} is worse, and the 95 % intervals do not overlap."
    if policy.paired is None:
        return f"{facts}. The 95 % intervals overlap: these episodes do not tell which is better."
    difference = f"{_difference(policy.paired)} points, p {probability(policy.paired.p_value)}"
    if policy.paired.p_value >= SIGNIFICANT:
        return f"{facts}. The 95 % intervals overlap, and the pairwise difference is not significant ({difference})."
    better = "better" if policy.paired.difference > 0 else "worse"
    return f"{facts}. The 95 % intervals overlap, but compared pairwise {policy.name} is {better} ({difference})."


def comparison_section(
    results: Sequence[PolicyResult],
    *,
    baseline: str,
    colours: Mapping[str, int] | None = None,
    title: str = "Success",
    introduction: str = "",
) -> Section:
    """Bars in the order given and the table beneath; `baseline` is the name of what paired differences are against."""
    caption = (
        "Each bar is the fraction of episodes that succeeded, and the line across its end the 95 % Wilson interval of "
        "the true rate. Where two lines do not overlap, chance does not explain the difference."
    )
    about_pairs = (
        f"The difference to {baseline} compares the same initial states pairwise, in percentage points; its interval is "
        "Newcombe's, and p is from the exact McNemar test: the probability of a difference this large if there were none."
    )
    bars = figure(_bars(results, colours or {}), caption)
    paired = any(result.paired for result in results)
    return Section(title, bars + figure(_table(results, baseline), about_pairs if paired else ""), introduction)


def rate(result: PolicyResult) -> str:
    """A success rate with its interval: 81.5 % [75.5, 86.3]."""
    return f"{100 * result.success:.1f} % [{100 * result.low:.1f}, {100 * result.high:.1f}]"


def _read_result(key: str, result: Mapping[str, Any]) -> PolicyResult:
    updates, minutes, paired = (result.get(field) for field in ("updates", "minutes", "paired"))
    try:
        read = PolicyResult(
            name=str(result.get("name", key)),
            success=float(result["success"]),
            low=float(result["low"]),
            high=float(result["high"]),
            episodes=int(result["episodes"]),
            description=str(result.get("description", "")),
            updates=None if updates is None else int(updates),
            minutes=None if minutes is None else float(minutes),
            paired=None if paired is None else _read_difference(paired),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the result of {key} cannot be used: {error!r}. Evaluate that policy again.") from error
    if not 0 <= read.low <= read.success <= read.high <= 1:
        raise DataError(
            f"the result of {key} is no rate within its interval: {read.success} in [{read.low}, {read.high}]."
        )
    return read


def _read_difference(paired: Mapping[str, Any]) -> Difference:
    low, high = paired["interval"]
    return Difference(float(paired["difference"]), float(low), float(high), float(paired["p_value"]))


def _bars(results: Sequence[PolicyResult], colours: Mapping[str, int]) -> str:
    rows = []
    for index, result in enumerate(results):
        drawn = bar(
            result.success,
            result.low,
            result.high,
            colour=colours.get(result.name, index),
            label=f"{result.name}: {rate(result)}",
        )
        value, interval = rate(result).split(" [")
        rows.append(
            f'<div class="bar-row"><div class="bar-label">{escape(result.name)}'
            f"<small>{result.episodes} episodes</small></div>{drawn}"
            f'<div class="bar-value">{value}<small>[{interval}</small></div></div>'
        )
    return f'<div class="bars">{"".join(rows)}<div class="bar-row">{bar_axis()}</div></div>'


def _table(results: Sequence[PolicyResult], baseline: str) -> str:
    columns = [
        Column("Policy"),
        Column("What it is"),
        Column("Success", numeric=True),
        Column("95 % interval", numeric=True),
        Column("Episodes", numeric=True),
        Column("Updates", numeric=True),
        Column("Minutes", numeric=True),
        Column(f"Against {baseline}", numeric=True),
        Column("p", numeric=True),
    ]
    rows = [
        (
            result.name,
            result.description,
            f"{100 * result.success:.1f} %",
            f"{100 * result.low:.1f} – {100 * result.high:.1f}",
            f"{result.episodes:,}",
            "" if result.updates is None else f"{result.updates:,}",
            "" if result.minutes is None else f"{result.minutes:.1f}",
            _difference(result.paired) if result.paired else "",
            probability(result.paired.p_value).removeprefix("= ") if result.paired else "",
        )
        for result in results
    ]
    return table(columns, rows)


def _difference(paired: Difference) -> str:
    low, high = _points(paired.low), _points(paired.high)
    return f"{_points(paired.difference)} [{low}, {high}]"


def _points(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "−")
