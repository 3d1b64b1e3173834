"""The report of one run or of several over each other: one page from what is in their directories."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pirl.errors import DataError, UserError
from pirl.report.comparison import PolicyResult, comparison_section, rate
from pirl.report.curves import arrange_panels, draw_panels, logs
from pirl.report.film import episodes_section, read_strip
from pirl.report.groups import GROUPS, SUCCESS, Group, panels_of
from pirl.report.iterations import iterations_section, over_iterations
from pirl.report.page import Column, Section, build_page, code_block, figure, table
from pirl.report.provenance import provenance_section
from pirl.report.run_facts import Measurement, RunFacts, name_runs, read_facts
from pirl.report.runs import Run, seen_against
from pirl.report.time_split import time_section
from pirl.run_files import RunFiles

# Evaluations of a single run that are compared as bars; the curve has all.
_BARS = 8
# Roll-backs and skipped updates that are listed.
_EVENTS = 50
_OVER_PRACTICE = "The same over the environment steps trained on so far."


def read_runs(paths: Sequence[Path]) -> list[RunFacts]:
    """The runs in these directories; raises if one is no run, or named twice."""
    for index, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:index]]:
            raise DataError(f"{path} is named twice: name each run once.")
    return [read_facts(path, name) for path, name in zip(paths, name_runs(paths), strict=True)]


def build_run_report(runs: Sequence[RunFacts], when: datetime, *, critics: bool = False) -> str:
    """The page; with `critics`, episodes are played again to show what the critics think along them."""
    colours = {facts.name: index for index, facts in enumerate(runs)}
    sections = [
        *([_overview(runs)] if len(runs) > 1 else []),
        _success(runs, colours),
        *([_events(runs)] if any(facts.run.events for facts in runs) else []),
        *(section for group in GROUPS if (section := _group(group, runs, colours)) is not None),
        *(iterations_section(facts.name, facts.iterations, facts.timing) for facts in runs if facts.iterations),
        *_films(runs),
        *([_critics(facts) for facts in runs] if critics else []),
        time_section({facts.name: facts.timing for facts in runs}, colours),
        _provenance(runs),
    ]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return build_page(title, summarise(runs), sections, subtitle=f"pirl report · {when:%d %B %Y, %H:%M}")


def summarise(runs: Sequence[RunFacts]) -> str:
    """How the runs stand, in a few sentences."""
    if len(runs) == 1:
        return " ".join([f"{runs[0].name} {runs[0].state.words}.", *_remarks(runs[0])])
    kinds = [facts.state.kind for facts in runs]
    counts = ", ".join(
        f"{kinds.count(kind)} {kind}{' without a message' * (kind == 'ended')}" for kind in dict.fromkeys(kinds)
    )
    measured = [facts for facts in runs if facts.measurements]
    if not measured:
        return f"{len(runs)} runs: {counts}. None of them was evaluated."
    best = max(measured, key=lambda facts: facts.measurements[-1].success)
    last = rate(_result(best.name, best.measurements[-1]))
    return f"{len(runs)} runs: {counts}. The highest success in a last evaluation is that of {best.name}: {last}."


def _remarks(facts: RunFacts) -> list[str]:
    """What there is to say of a run, in sentences."""
    said = [f"{facts.progress}." if facts.run.curves else "Nothing was logged."]
    if facts.measurements:
        last = facts.measurements[-1]
        said.append(f"Success {rate(_result('', last))} of {last.episodes:,} episodes after {last.step:,.0f} updates.")
    else:
        said.append("It was not evaluated" + (" so far." if facts.state.kind == "under way" else "."))
    if facts.is_torn:
        said.append("The last line of metrics.jsonl is incomplete and is left out.")
    return said


def _overview(runs: Sequence[RunFacts]) -> Section:
    columns = [Column("Run"), Column("Learner", short=True), Column("State", short=True), Column("Remarks")]
    rows = [(facts.name, facts.learner, facts.state.kind, " ".join(_sentences(facts))) for facts in runs]
    return Section("Runs", table(columns, rows))


def _sentences(facts: RunFacts) -> list[str]:
    """The state in words too, where a word is not enough."""
    words = facts.state.words
    told = [] if facts.state.kind == "done" else [f"{words[0].upper()}{words[1:]}."]
    return [*told, *_remarks(facts)]


def _success(runs: Sequence[RunFacts], colours: Mapping[str, int]) -> Section:
    silent = [facts.name for facts in runs if not facts.measurements]
    introduction = f"Not evaluated: {', '.join(silent)}." if silent and len(silent) < len(runs) else ""
    if len(silent) == len(runs):
        return Section("Success", "", "Nothing was evaluated: set --evaluation.every to measure success.")
    if len(runs) == 1:
        measured = runs[0].measurements[-_BARS:]
        results = [_result(f"After {one.step:,.0f} updates", one) for one in measured]
        shades = dict.fromkeys((result.name for result in results), 0)
    else:
        results = [
            replace(_result(facts.name, facts.measurements[-1]), updates=int(facts.measurements[-1].step))
            for facts in runs
            if facts.measurements
        ]
        shades = dict(colours)
        introduction = f"The last evaluation of each run. {introduction}".strip()
    if chosen := [facts.name for facts in runs if facts.measurements and facts.is_best_of_n]:
        introduction += (
            f" Measured with its critics choosing among samples: {', '.join(chosen)}. The exported policy acts without "
            "them, and may succeed less often (pirl eval)."
        )
    compared = comparison_section(results, baseline="", colours=shades)
    over_updates = [facts.with_intervals for facts in runs if facts.measurements]
    charts = draw_panels(over_updates, [SUCCESS], colours)
    practised = [
        seen_against(facts.with_intervals, facts.env_steps_metric)
        for facts in runs
        if facts.measurements and facts.env_steps_metric is not None
    ]
    charts += draw_panels(
        practised,
        [replace(SUCCESS, title="Success over environment steps", caption=_OVER_PRACTICE)],
        colours,
        "environment steps",
    )
    return Section(
        "Success", compared.body + arrange_panels(charts, over_updates, colours=colours), introduction.strip()
    )


def _result(name: str, one: Measurement) -> PolicyResult:
    return PolicyResult(name, one.success, one.low, one.high, one.episodes)


def _group(group: Group, runs: Sequence[RunFacts], colours: Mapping[str, int]) -> Section | None:
    """The charts of a group over what they are to be seen against; None if there are none."""
    if group.axis == "iterations":
        seen = [over_iterations(facts.run, facts.iterations) for facts in runs if facts.iterations]
    elif group.axis == "environment steps":
        seen = [seen_against(facts.run, "online/env_steps") for facts in runs]
    else:
        seen = [_with_memory(facts) for facts in runs]
    panels = panels_of(seen, group)
    seen = [run for run in seen if any(logs(run, panel) for panel in panels)]
    charts = draw_panels(seen, panels, colours, group.axis)
    if not charts:
        return None
    body, introduction = arrange_panels(charts, seen, panels, colours), group.introduction
    said = [(run.name, group.judge(run)) for run in seen] if group.judge else []
    if len(runs) == 1:
        introduction = " ".join([introduction, *(sentence for _, sentence in said)])
    elif said:
        body = table([Column("Run"), Column("Verdict")], said) + body
    return Section(group.title, body, introduction)


def _with_memory(facts: RunFacts) -> Run:
    """What is measured of memory may be among what is measured by the clock."""
    memory = {name: curve for name, curve in facts.timing.items() if name.startswith("memory/")}
    return replace(facts.run, curves={**memory, **facts.run.curves})


def _events(runs: Sequence[RunFacts]) -> Section:
    columns = [Column("Run"), Column("What happened")]
    events = [(facts.name, event) for facts in runs for event in sorted(facts.run.events, key=lambda event: event.step)]
    rows = [(name, f"{event.text[0].upper()}{event.text[1:]}") for name, event in events[:_EVENTS]]
    more = len(events) - len(rows)
    introduction = (
        "An update whose loss or gradient is not finite, or too large, is skipped and changes nothing. A run that goes "
        "wrong is rolled back to an earlier checkpoint, and the curves go on from there."
        + (f" {more:,} more are not listed." if more else "")
    )
    return Section("What went wrong", table(columns, rows), introduction)


def _films(runs: Sequence[RunFacts]) -> list[Section]:
    figures = []
    for facts in runs:
        films = [(film.stat().st_mtime, film) for film in RunFiles(facts.path).videos.glob("*.mp4")]
        if not films:
            continue
        _, film = max(films)
        try:
            figures.append(figure(read_strip(film), f"{film.name}; time runs from left to right.", facts.name))
        except DataError as error:
            figures.append(figure("", str(error), facts.name))
    if not figures:
        return []
    introduction = (
        "The newest video of each run: episodes side by side; green borders are successes, red ones failures."
    )
    return [Section("Videos", "".join(figures), introduction)]


def _critics(facts: RunFacts) -> Section:
    """What the critics of a run think along episodes of its policy; or why that cannot be shown."""
    title = f"Episodes of {facts.name} as its critics value them"
    try:
        from pirl.report.run_critics import watch_run

        episodes, introduction = watch_run(facts)
    except UserError as error:
        return Section(title, "", f"Not available: {error}")
    return episodes_section(episodes, title=title, introduction=introduction)


def _provenance(runs: Sequence[RunFacts]) -> Section:
    metadata = {facts.name: facts.metadata for facts in runs}
    commands = [str(one.get("command", "")) for about in metadata.values() for one in (about, *_resumed(about))]
    columns = [Column(title) for title in ("Run", "Directory", "Begun", "Resumed", "Parameters", "Versions")]
    rows = [
        (
            facts.name,
            str(facts.path.resolve()),
            _time(facts.metadata.get("begun")),
            ", ".join(_time(one.get("time")) for one in _resumed(facts.metadata)),
            _pairs(facts.metadata.get("parameters")),
            _pairs(facts.metadata.get("versions")),
        )
        for facts in runs
    ]
    section = provenance_section(
        commands=list(dict.fromkeys(filter(None, commands))),
        facts={},
        configs=_configs(runs) if len(runs) > 1 else None,
        introduction="The commands as they were run, from the directory they were run in.",
    )
    body = section.body + table(columns, rows)
    if len(runs) == 1:
        text = RunFiles(runs[0].path).config_file.read_text(encoding="utf-8")
        body += f"<details><summary>config.yaml</summary>{code_block(text)}</details>"
    return replace(section, body=body)


def _configs(runs: Sequence[RunFacts]) -> dict[str, Mapping[str, Any]]:
    """Of learners that differ, only what they share: their own fields have no counterpart."""
    configs = {facts.name: facts.config for facts in runs}
    if len({facts.learner for facts in runs}) == 1:
        return configs
    found = {name: config.get("agent") for name, config in configs.items()}
    agents = {name: agent if isinstance(agent, Mapping) else {} for name, agent in found.items()}
    shared = set.intersection(*map(set, agents.values()))
    return {
        name: {**config, "agent": {field: value for field, value in agents[name].items() if field in shared}}
        for name, config in configs.items()
    }


def _resumed(metadata: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    entries = metadata.get("resumed")
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []


def _time(text: Any) -> str:
    try:
        return f"{datetime.fromisoformat(str(text)):%d %B %Y, %H:%M %Z}".strip()
    except ValueError:
        return str(text or "")


def _pairs(values: Any) -> str:
    """Names and what belongs to them; of what is damaged, nothing."""
    pairs = values.items() if isinstance(values, Mapping) else ()
    return ", ".join(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in pairs)
