"""The sections of a report, and the page about runs."""

import html
import math
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from pirl.errors import DataError, UserError
from pirl.processes import usable_cores
from pirl.report import plots
from pirl.report.plots import PANELS, Panel, code_block, draw_panels, figure, markup, panel_grid, texts
from pirl.report.runs import ENV_STEPS, PolicyResult, Run, by_step, over_iterations, over_metric
from pirl.run_files import RunFiles
from pirl.text import format_duration, format_p_value

_MOST_BARS, _MOST_EVENTS, _MOST_ITERATIONS = 8, 50, 50
_ACTIVITIES = ("data", "update", "rollout", "evaluation", "checkpoint")
# Rules of thumb for the critics; chance is 0.5.
TELLS_APART = 0.6  # from this pair_auc on, chunks are told apart
CONFUSES = 0.45  # below this outcome_auc, failures are valued above successes
USES_IMAGES = 0.05  # what shuffling the images costs at least if they are used
REMEMBERS = 0.1  # a larger gap of pair_auc is memory of the training episodes


@dataclass(frozen=True)
class Section:
    """A part of the page. `body` is HTML, made by the functions of this package; the rest is text."""

    title: str
    body: str
    introduction: str = ""


class Column(NamedTuple):
    """A column of a table: numbers are aligned to the right, and short text is not broken."""

    title: str
    numeric: bool = False
    short: bool = False


def build_page(title: str, lead: str, sections: Sequence[Section], *, subtitle: str = "") -> str:
    """The whole page, one file without links: the result in a sentence or two, then the sections."""
    # No line ends inside of 81.5 % [75.5, 86.3].
    lead = re.sub(r"\S+ % \[[^]<]*\]", r'<span class="number">\g<0></span>', html.escape(lead))
    return markup("page", title, lead, sections, subtitle)


def table(columns: Sequence[Column | str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a row begins with its name. Columns that are empty are left out."""
    kept = [index for index in range(len(columns)) if index == 0 or any(row[index] for row in rows)]
    heads = [Column(column) if isinstance(column, str) else column for column in columns]
    return markup("table", [heads[index] for index in kept], [[row[index] for index in kept] for row in rows])


def _numeric(*titles: str) -> list[Column]:
    return [Column(title, numeric=True) for title in titles]


def read_results(results: Mapping[str, Mapping[str, Any]]) -> list[PolicyResult]:
    """The results of policies by their keys, as a demo writes them, in order."""
    known = {field.name for field in fields(PolicyResult)}
    named = [{"name": key, **result} for key, result in results.items()]
    return [PolicyResult(**{field: result[field] for field in known & result.keys()}) for result in named]


def _difference(result: PolicyResult) -> str:
    if result.paired is None:
        return ""
    shares = (result.paired["difference"], *result.paired["interval"])
    return "{} [{}, {}]".format(*(f"{100 * share:+.1f}".replace("-", "−") for share in shares))


def comparison_section(
    results: Sequence[PolicyResult],
    *,
    baseline: str = "",
    colors: Mapping[str, int] | None = None,
    title: str = "Success",
    introduction: str = "",
) -> Section:
    """Bars in the order given and a table; `baseline` is the name of what paired differences are against."""
    numbers = _numeric("Success", "95 % interval", "Episodes", "Updates", "Minutes", f"Against {baseline}", "p")
    rows = [
        (
            result.name,
            result.description,
            f"{100 * result.success:.1f} %",
            f"{100 * result.low:.1f} – {100 * result.high:.1f}",
            f"{result.episodes:,}",
            "" if result.updates is None else f"{result.updates:,}",
            "" if result.minutes is None else f"{result.minutes:.1f}",
            _difference(result),
            format_p_value(result.paired["p_value"]).removeprefix("= ") if result.paired else "",
        )
        for result in results
    ]
    colored = [replace(one, color=(colors or {}).get(one.name, index)) for index, one in enumerate(results)]
    bars = figure(markup("success_bars", colored), texts["success"])
    about_pairs = texts["paired"] % baseline if any(result.paired for result in results) else ""
    return Section(title, bars + figure(table(["Policy", "What it is", *numbers], rows), about_pairs), introduction)


def curves_section(
    runs: Sequence[Run],
    *,
    panels: Sequence[Panel] = PANELS,
    colors: Mapping[str, int] | None = None,
    title: str = "Training",
    unit: str = "updates",
) -> Section:
    """The panels for which any run has data; colors by name of the run, else in order."""
    runs = [replace(run, color=(colors or {}).get(run.name, index)) for index, run in enumerate(runs)]
    if charts := draw_panels(runs, panels, unit):
        return Section(title, panel_grid(charts, runs, panels), texts["curves"])
    return Section(title, "", "Nothing was logged.")


def build_run_report(runs: Sequence[Run], when: datetime, *, critics: bool = False) -> str:
    """The page about runs from `read_runs`; with `critics`, episodes are replayed to plot what the critics value."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    subtitle = f"pirl report · {when:%d %B %Y, %H:%M}"
    return build_page(title, summarize(runs), run_sections(runs, critics=critics), subtitle=subtitle)


def run_sections(runs: Sequence[Run], *, critics: bool = False) -> list[Section]:
    """All that there is to say about runs."""
    return [
        *([_overview(runs)] if len(runs) > 1 else []),
        _success(runs),
        *_events(runs),
        *_groups(runs),
        *(_iterations(run) for run in runs if run.iterations),
        *_videos(runs),
        *(_critics(run) for run in runs if critics),
        _time(runs),
        _provenance(runs),
    ]


def summarize(runs: Sequence[Run]) -> str:
    """The state of the runs in a few sentences."""
    if len(runs) == 1:
        return f"{runs[0].name} {runs[0].state_text}. {_remarks(runs[0])}"
    states = [run.state for run in runs]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    counts = counts.replace("ended", "ended without a message")
    if not (evaluated := [run for run in runs if run.evaluations]):
        return f"{len(runs)} runs: {counts}. None of them was evaluated."
    best = max(evaluated, key=lambda run: run.evaluations[-1].success)
    highest = f"The highest success in a last evaluation is that of {best.name}: {best.evaluations[-1].rate}."
    return f"{len(runs)} runs: {counts}. {highest}"


def _remarks(run: Run) -> str:
    remarks = f"{run.progress}." if run.curves else "Nothing was logged."
    if run.evaluations:
        last = run.evaluations[-1]
        remarks += f" Success {last.rate} of {last.episodes:,} episodes after {last.updates:,} updates."
    else:
        remarks += f" It was not evaluated{' so far' * (run.state == 'under way')}."
    return remarks + " The last line of metrics.jsonl is incomplete and is left out." * run.is_torn


def _overview(runs: Sequence[Run]) -> Section:
    states = ["" if run.state == "done" else f"{_capitalized(run.state_text)}. " for run in runs]
    rows = [(run.name, run.learner, run.state, state + _remarks(run)) for run, state in zip(runs, states, strict=True)]
    columns = [Column("Run"), Column("Learner", short=True), Column("State", short=True), Column("Remarks")]
    return Section("Runs", table(columns, rows))


def _capitalized(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _success(runs: Sequence[Run]) -> Section:
    evaluated = [run for run in runs if run.evaluations]
    if not evaluated:
        return Section("Success", "", texts["not evaluated"])
    notes = []
    if len(runs) == 1:
        results = [replace(result, updates=None) for result in runs[0].evaluations[-_MOST_BARS:]]
    else:
        results = [replace(run.evaluations[-1], name=run.name) for run in evaluated]
        others = [run.name for run in runs if not run.evaluations]
        notes = ["The last evaluation of each run.", f"Not evaluated: {', '.join(others)}." if others else ""]
    colors = {result.name: 0 for result in results} | {run.name: run.color for run in evaluated}
    acrlpd = [run for run in evaluated if run.learner == "acrlpd"]
    if chosen := [run.name for run in acrlpd if run.metadata["config"]["evaluation"]["best_of_n"]]:
        notes.append(texts["best of N"] % ", ".join(chosen))
    panel = replace(PANELS[0], title="Success over environment steps", caption=texts["over environment steps"])
    over_env_steps = [over_metric(run, *ENV_STEPS) for run in evaluated]
    charts = draw_panels(evaluated, PANELS[:1]) + draw_panels(over_env_steps, [panel], "environment steps")
    bars = comparison_section(results, colors=colors).body
    return Section("Success", bars + panel_grid(charts, evaluated), " ".join(filter(None, notes)))


def _events(runs: Sequence[Run]) -> list[Section]:
    events = [(run.name, _capitalized(event.text)) for run in runs for event in run.events]
    more = max(0, len(events) - _MOST_EVENTS)
    body = table(["Run", "What happened"], events[:_MOST_EVENTS])
    introduction = texts["events"] + (f" {more:,} more are not listed." if more else "")
    return [Section("What went wrong", body, introduction)] if events else []


def _groups(runs: Sequence[Run]) -> list[Section]:
    """A section for each group of metrics of which any run has data; every metric is in the first group that it fits."""
    over = {
        "updates": runs,
        "environment steps": [over_metric(run, "online/env_steps") for run in runs],
        "iterations": [over_iterations(run) for run in runs],
    }
    sections, left = [], {metric.removeprefix("val/") for run in runs for metric in run.curves} - plots.HIDDEN
    for title, pattern, unit, introduction in plots.GROUPS:
        mine = {metric for metric in left if re.match(pattern, metric)}
        left -= mine
        panels = plots.find_panels(mine, runs)
        drawn = [run for run in over[unit] if any(panel.is_logged(run) for panel in panels)]
        if charts := draw_panels(drawn, panels, unit):
            body = panel_grid(charts, drawn, panels)
            verdicts = [(run.name, judge_critics(run)) for run in drawn if title == "What the critics know"]
            if verdicts and len(runs) > 1:
                body = table(["Run", "Verdict"], verdicts) + body
            elif verdicts:
                introduction = f"{introduction} {verdicts[0][1]}"
            sections.append(Section(title, body, introduction))
    return sections


def judge_critics(run: Run) -> str:
    """Whether to trust the critics, in a sentence, by the last validation."""
    pairs = by_step(run.curves, "val/critic/pair_auc")
    if not pairs:
        return texts["not judged"]
    step, pair = max(pairs.items())
    others = ("val/critic/pair_auc_shuffled", "val/critic/outcome_auc", "gap/critic/pair_auc")
    # NaN, which passes, where there is none.
    shuffled, outcome, gap = (by_step(run.curves, name).get(step, math.nan) for name in others)
    if pair < TELLS_APART:
        return f"Do not trust best-of-N: the critics do not tell chunks apart (pair_auc {pair:.2f}; chance is 0.5)."
    if outcome < CONFUSES:
        return f"Do not trust the critics: they value failures above successes (outcome_auc {outcome:.2f})."
    if gap > REMEMBERS:
        return texts["remember"].format(pair + gap, pair)
    if pair - shuffled < USES_IMAGES:
        return texts["blind"].format(pair, shuffled)
    numbers = f"{pair:.2f}" if math.isnan(shuffled) else f"{pair:.2f}, {shuffled:.2f} with the images shuffled"
    return f"Trust the critics: they tell chunks apart in episodes that they have not seen (pair_auc {numbers})."


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


# The columns of RIPT's iterations, with the metric and the format of each.
_COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "States tried": ("rollout/contexts", _count),
    "Groups kept": ("rollout/groups", _count),
    "Success": ("rollout/success", _share),
    "Before": ("rollout/success_kept", _share),
    "After": ("rollout/success_after", _share),
    "Spread": ("rollout/advantage_spread", "{:.2f}".format),
    "Drift": ("rollout/drift", lambda drift: plots.number(float(f"{drift:.2g}"))),
    "Environment steps": ("rollout/env_steps", _count),
    "Steps/s": ("env_steps_per_second", _count),
    "Policy, ms": ("policy_ms", "{:.1f}".format),
}


def _iterations(run: Run) -> Section:
    timing = {metric: by_step(run.timing, metric) for metric in ("env_steps_per_second", "policy_ms")}
    first, rows = max(0, len(run.iterations) - _MOST_ITERATIONS), []
    for number, (step, logged) in enumerate(run.iterations[first:], start=first + 1):
        values = {metric: known[step] for metric, known in timing.items() if step in known} | logged
        cells = [write(values[metric]) if metric in values else "" for metric, write in _COLUMNS.values()]
        rows.append((str(number), f"{step:,.0f}", *cells))
    body = figure(table(["Iteration", *_numeric("Updates before", *_COLUMNS)], rows), texts["iterations"])
    note = f"The last {len(rows)} of {len(run.iterations):,} iterations; metrics.jsonl has all." if first else ""
    return Section(f"Iterations of {run.name}", body, note)


def _videos(runs: Sequence[Run]) -> list[Section]:
    figures = []
    for run in runs:
        if files := list(RunFiles(run.path).videos.glob("*.mp4")):
            video = max(files, key=lambda file: file.stat().st_mtime)
            try:
                strip, caption = plots.video_strip(video), f"{video.name}; time runs from left to right."
            except DataError as error:
                strip, caption = "", str(error)
            figures.append(figure(strip, caption, run.name))
    return [Section("Videos", "".join(figures), texts["videos"])] if figures else []


def _critics(run: Run) -> Section:
    try:
        from pirl.report.replay import replay_run  # loads JAX

        return replay_run(run)
    except UserError as error:
        return Section(f"Episodes of {run.name} as its critics value them", "", f"Not available: {error}")


def _time(runs: Sequence[Run]) -> Section:
    splits = {}
    for run in runs:
        logged = {name: float(np.nansum(curve.values)) for name, curve in run.timing.items()}
        if total := logged.get("seconds"):
            split = {name.split("/")[1]: seconds for name, seconds in logged.items() if name.startswith("seconds/")}
            splits[run.name] = {**split, "the rest": max(0.0, total - sum(split.values()))}
    found = {name for split in splits.values() for name in split} - {"the rest"}
    activities = [*(name for name in _ACTIVITIES if name in found), *sorted(found.difference(_ACTIVITIES))]
    body = ""
    if splits:
        rows = []
        for name, split in splits.items():
            total = sum(split.values())
            cells = {each: f"{format_duration(seconds)} ({_share(seconds / total)})" for each, seconds in split.items()}
            rows.append((name, *(cells.get(each, "") for each in (*activities, "the rest")), format_duration(total)))
        columns = _numeric(*(each.capitalize() for each in (*activities, "the rest", "total")))
        styles = {each: f"c{index % plots.COLORS}" for index, each in enumerate(activities)} | {"the rest": "rest"}
        names = plots.legend([(each, index) for index, each in enumerate(activities)], "", [("rest", "the rest")])
        bars = markup("time_bars", splits, styles) + table(["Run", *columns], rows)
        body = names + figure(bars, texts["time"])
    timed = [replace(run, curves=run.timing, events=()) for run in runs]
    if charts := draw_panels(timed, plots.SPEED):
        body += panel_grid(charts, timed)
    return Section("Time", body, "" if body else "No timings were logged.")


def describe_machine() -> dict[str, str]:
    """What the times depend on."""
    return {"System": f"{platform.system()} {platform.machine()}", "Cores": str(usable_cores())}


def differing_settings(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """The fields, by dotted name, in which configurations differ, with the value in each; empty where it has none."""
    flat = [_flatten(config) for config in configs.values()]
    rows = {name: [config.get(name, "") for config in flat] for config in flat for name in config}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def _flatten(value: Any, prefix: str = "") -> dict[str, str]:
    if not (isinstance(value, Mapping) and value):
        return {prefix: "none" if value is None else str(value)}
    parts = [_flatten(inner, f"{prefix}.{key}".removeprefix(".")) for key, inner in value.items()]
    return {name: text for part in parts for name, text in part.items()}


def provenance_section(
    *,
    commands: Sequence[str],
    configs: Mapping[str, Mapping[str, Any]] | None = None,
    facts: Mapping[str, str] | None = None,
    introduction: str = "",
) -> Section:
    """The commands to copy, the settings in which runs differ, and facts such as versions and times."""
    body = code_block("\n".join(commands))
    if configs and len(configs) > 1:
        # Of learners that differ, only the fields that they share have counterparts.
        shared = set.intersection(*(set(config["agent"]) for config in configs.values()))
        compared = {}
        for name, config in configs.items():
            agent = {field: value for field, value in config["agent"].items() if field in shared}
            compared[name] = {**config, "agent": agent}
        if differences := differing_settings(compared):
            settings = table(["Setting", *configs], [(name, *row) for name, row in differences.items()])
            body += figure(settings, "Only settings that differ between these runs.", "Settings")
    if facts:
        body += table(["Circumstances", ""], list(facts.items()))
    return Section("How to reproduce this", body, introduction)


def _provenance(runs: Sequence[Run]) -> Section:
    commands, rows = dict[str, None](), []
    for run in runs:
        about, resumed = run.metadata, run.metadata["resumed"]
        commands |= dict.fromkeys(entry["command"] for entry in (about, *resumed))
        times = [datetime.fromisoformat(time) for time in (about["begun"], *(entry["time"] for entry in resumed))]
        begun, *again = (f"{time:%d %B %Y, %H:%M %Z}" for time in times)
        parameters = ", ".join(f"{name} {count:,}" for name, count in about.get("parameters", {}).items())
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        rows.append((run.name, str(run.path.resolve()), begun, ", ".join(again), parameters, versions))
    configs = {run.name: run.metadata["config"] for run in runs}
    section = provenance_section(commands=list(commands), configs=configs, introduction=texts["commands"])
    body = section.body + table(["Run", "Directory", "Begun", "Resumed", "Parameters", "Versions"], rows)
    if len(runs) == 1:
        text = RunFiles(runs[0].path).config_file.read_text(encoding="utf-8")
        body += markup("details", "config.yaml", code_block(text))
    return replace(section, body=body)
