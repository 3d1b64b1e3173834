"""The report of a demo as one HTML page."""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pirl.config import RLTrainConfig, load_config, to_plain
from pirl.demo.commands import DENOISING_STEPS, shown
from pirl.demo.curves import draw_curves
from pirl.demo.episodes import before_and_after, seen_by_critics
from pirl.demo.plan import DemoConfig
from pirl.demo.steps import Stages, all_steps
from pirl.files import write_file
from pirl.report.plots import code_block
from pirl.report.sections import (
    Section,
    build_page,
    comparison_section,
    describe_machine,
    headline,
    provenance_section,
    read_results,
)
from pirl.run_files import RunFiles

_FILMS = {"critics": seen_by_critics, "before_and_after": before_and_after}


def summarise(config: DemoConfig, results: Mapping[str, Any]) -> str:
    """What came of it, in one honest sentence."""
    plan = config.plan
    compared = {result.name: result for result in read_results(_policies(config, results))}
    return headline(compared[plan.names[plan.subject]], compared[plan.names[plan.baseline]])


def next_commands(config: DemoConfig, results: Mapping[str, Any]) -> list[str]:
    """What to run next: watch it, compare it with the best control, check what it exports, take it somewhere real."""
    plan, subject = config.plan, config.run(config.plan.subject)
    exported = RunFiles(subject).policies / str(results[plan.subject]["step"])
    commands = [
        ("envs", "play", "--checkpoint", subject, "--out", config.out / "film.gif"),
        ("eval", config.run(plan.rival), subject, *DENOISING_STEPS),
        ("convert", exported, "--check"),
    ]
    return [*(shlex.join(("pirl", *map(str, command))) for command in commands), plan.next_command]


def write_report(config: DemoConfig, results: Mapping[str, Any]) -> Path:
    """Write the page; says where."""
    plan, about = config.plan, results["about"]
    data, when = about["demonstrations"], datetime.fromisoformat(about["finished"])
    colours = {policy.name: index for index, policy in enumerate(plan.policies)}
    introduction = plan.introduction.format(
        policies=len(_policies(config, results)),
        episodes=config.episodes,
        demonstrations=f"{data['episodes']:,}",
        success=f"{100 * data['success']:.0f} %",
        env_steps=f"{results[plan.subject]['env_steps']:,}",
    )
    page = build_page(
        plan.title,
        summarise(config, results),
        [
            comparison_section(
                read_results(_policies(config, results)),
                baseline=plan.names[plan.baseline],
                colors=colours,
                introduction=introduction,
            ),
            *(draw_curves(config, curves, colours) for curves in plan.curves),
            _FILMS[plan.film](config),
            Section("What to run next", code_block("\n".join(next_commands(config, results)))),
            _provenance(config, about),
        ],
        subtitle=f"{plan.command} · Tabletop · {when:%d %B %Y}"
        + (" · quick run: the numbers mean nothing" * config.quick),
    )
    file = config.out / "report.html"
    write_file(file, page)
    return file


def _policies(config: DemoConfig, results: Mapping[str, Any]) -> dict[str, Any]:
    return {key: result for key, result in results.items() if key in config.plan.names}


def _provenance(config: DemoConfig, about: Mapping[str, Any]) -> Section:
    stages, names = config.plan.stages(config), config.plan.names
    steps = list(all_steps(stages))
    seconds: Mapping[str, float] = about["seconds"]
    facts = {
        "Finished": datetime.fromisoformat(about["finished"]).strftime("%d %B %Y, %H:%M UTC"),
        "Total time": _duration(time_in_all(stages, seconds)),
        **{f"Time: {step.title}": _duration(seconds.get(step.name, 0.0)) for step in steps},
        **describe_machine(),
        "Versions": ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
    }
    return provenance_section(
        commands=[shlex.join(shown(step.whole_command)) for step in steps],
        configs={
            names[run]: _settings(load_config(RunFiles(config.run(run)).config_file, None)) for run in config.plan.runs
        },
        facts=facts,
        introduction=(
            f"Every number and image on this page comes from these commands, which {config.plan.command} runs, some of "
            "them two at a time. In the table of settings, a dash means the default, or that the learner has no such "
            "setting; the config.yaml of each run has all settings."
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
