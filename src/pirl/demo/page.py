"""The report of a demo as one HTML page."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pirl.config import RLTrainConfig, load_config, to_plain
from pirl.demo.episodes import watch
from pirl.demo.plan import POLICIES, RUNS, DemoConfig, make_plan, shown
from pirl.demo.results import BASELINE, read_evaluation
from pirl.demo.steps import Stages, all_steps
from pirl.files import write_file
from pirl.report import (
    Section,
    build_page,
    comparison_section,
    curves_section,
    describe_machine,
    episodes_section,
    headline,
    provenance_section,
    read_results,
    read_run,
)

TITLE = "RL on a π₀ policy: the demo"
_NAMES = {policy.key: policy.name for policy in POLICIES}
_COLOURS = {policy.name: index for index, policy in enumerate(POLICIES)}


def summarise(results: Mapping[str, Any]) -> str:
    """What came of it, in one honest sentence."""
    compared = {result.name: result for result in read_results(_policies(results))}
    return headline(compared[_NAMES["acrlpd"]], compared[_NAMES[BASELINE]])


def write_report(config: DemoConfig, results: Mapping[str, Any]) -> Path:
    """Write the page; says where."""
    about = results["about"]
    data, when = about["demonstrations"], datetime.fromisoformat(about["finished"])
    introduction = (
        f"{len(_policies(results))} policies acted from the same {config.episodes} starts, none of which was trained on. "
        f"All learned from {data['episodes']:,} demonstrations of which {100 * data['success']:.0f} % succeed. The "
        "controls show what more updates, or only the good demonstrations, do without RL."
    )
    runs = [read_run(config.run(name), _NAMES[name]) for name in RUNS]
    page = build_page(
        TITLE,
        summarise(results),
        [
            comparison_section(
                read_results(_policies(results)),
                baseline=_NAMES[BASELINE],
                colours=_COLOURS,
                introduction=introduction,
            ),
            curves_section(runs, colours=_COLOURS),
            _episodes(config),
            _provenance(config, about),
        ],
        subtitle=f"pirl demo · Tabletop · {when:%d %B %Y}"
        + (" · a quick try: its numbers mean nothing" * config.quick),
    )
    file = config.out / "report.html"
    write_file(file, page)
    return file


def _policies(results: Mapping[str, Any]) -> dict[str, Any]:
    return {key: result for key, result in results.items() if key in _NAMES}


def _episodes(config: DemoConfig) -> Section:
    assert config.rl.env is not None
    episodes = watch(
        config.run("acrlpd"),
        config.run(BASELINE),
        read_evaluation(config.evaluation(BASELINE)),
        config.rl.env,
        title=_NAMES[BASELINE],
        execute_steps=config.rl.evaluation.execute_steps,
    )
    seen = {episode.success for episode in episodes}
    missing = "".join(
        f" There was no {word} to show."
        for word, success in (("success", True), ("failure", False))
        if success not in seen
    )
    introduction = (
        f"Episodes of {_NAMES[BASELINE]} from starts that were held out, seen by the critics of ACRLPD: the value of the "
        f"chunk that the policy planned, each time it planned one.{missing}"
    )
    return episodes_section(episodes, introduction=introduction)


def _provenance(config: DemoConfig, about: Mapping[str, Any]) -> Section:
    steps = list(all_steps(make_plan(config)))
    seconds: Mapping[str, float] = about["seconds"]
    facts = {
        "Finished": datetime.fromisoformat(about["finished"]).strftime("%d %B %Y, %H:%M UTC"),
        "Time in all": _duration(time_in_all(make_plan(config), seconds)),
        **{f"Time: {step.title}": _duration(seconds.get(step.name, 0.0)) for step in steps},
        **describe_machine(),
        "Versions": ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
    }
    return provenance_section(
        commands=[shlex.join(shown(step.command)) for step in steps],
        configs={_NAMES[name]: _settings(load_config(config.run(name) / "config.yaml", None)) for name in RUNS},
        facts=facts,
        introduction=(
            "Every number and picture on this page comes from these commands, which pirl demo runs two at a time. In the "
            "table of settings, a dash is what a learner has by default or not at all; the config.yaml of a run has all."
        ),
    )


def _settings(config: RLTrainConfig) -> dict[str, Any]:
    """A configuration without what its learner has by default: learners share few fields, and most say nothing."""
    plain = to_plain(config)
    default = to_plain(replace(config, agent=type(config.agent)()))["agent"]
    return plain | {"agent": {"learner": plain["agent"]["learner"], **_changed(plain["agent"], default)}}


def _changed(values: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    changed = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and isinstance(default.get(name), Mapping):
            value = _changed(value, default[name])
            if value:
                changed[name] = value
        elif value != default.get(name):
            changed[name] = value
    return changed


def time_in_all(stages: Stages, seconds: Mapping[str, float]) -> float:
    """How long the steps take with lanes side by side."""
    return sum(max(sum(seconds.get(step.name, 0.0) for step in lane) for lane in lanes) for lanes in stages)


def _duration(seconds: float) -> str:
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
