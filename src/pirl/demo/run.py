"""Runs a demo: its steps, then the results and the page."""

import json
import platform
import shlex
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pirl.agents.config import ACRLPDConfig
from pirl.config import load_config, to_plain
from pirl.demo.plans import DENOISING_STEPS, Demo, Policy
from pirl.demo.steps import STEPS_FILE, run_steps
from pirl.envs.base import Start
from pirl.envs.collect import LOG_FILE
from pirl.envs.evaluation import Comparison, Evaluation, Pairs, compare, play, versions
from pirl.errors import DataError
from pirl.files import write_file
from pirl.jobs import open_directory
from pirl.report.plots import PANELS, ROLLOUTS, code_block, figure, image_strip
from pirl.report.replay import (
    ATTEMPTS,
    episodes_section,
    evaluated_policy,
    make_video_env,
    newest_evaluation,
    read_evaluation,
    replay_episodes,
)
from pirl.report.runs import over_metric, read_run
from pirl.report.sections import (
    Section,
    build_page,
    comparison_section,
    curves_section,
    describe_machine,
    provenance_section,
    read_results,
)
from pirl.run_files import RunFiles, saved_steps
from pirl.text import format_duration

SETTINGS_FILE, RESULTS_FILE, PAGE_FILE = "demo.json", "results.json", "report.html"
_ADVICE = "choose another directory (--out)."


def run_demo(demo: Demo, *, overwrite: bool = False) -> dict[str, Any]:
    """Run what is not done yet in the directory of the demo; returns what is then in its results.json."""
    own = (*demo.runs, "data", "own", "evaluations", "logs", STEPS_FILE, RESULTS_FILE, PAGE_FILE)
    record, settings = demo.out / SETTINGS_FILE, demo.settings()
    with open_directory(record, settings, what="demo", own=own, overwrite=overwrite, advice=_ADVICE) as lock:
        seconds = run_steps(demo.stages, demo.out, lock)
        results = make_results(demo, seconds)
        write_file(demo.out / RESULTS_FILE, json.dumps(results, indent=2) + "\n")
        return results


# Results


def make_results(demo: Demo, seconds: Mapping[str, float]) -> dict[str, Any]:
    """The evaluated policies, by key, and under `about` where they come from; `seconds` are those of steps."""
    files = {policy.key: _evaluation_file(demo, policy) for policy in demo.policies}
    evaluations = {key: read_evaluation(file) for key, file in files.items() if file is not None and file.exists()}
    results: dict[str, Any] = {
        policy.key: _result(demo, policy, evaluations, seconds) for policy in demo.policies if policy.key in evaluations
    }
    results["about"] = {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": demo.quick,
        "demonstrations": describe_episodes(demo.out / "data"),
        "evaluation": {"episodes": demo.episodes, "seed": demo.rl.evaluation.seed},
        "seconds": dict(seconds),
        "versions": versions(),
        "machine": {"system": platform.platform(), **describe_machine()},
    }
    return dict(json.loads(json.dumps(results)))  # as it will be read back


def _evaluation_file(demo: Demo, policy: Policy) -> Path | None:
    if not policy.is_best_of_n:
        return demo.evaluation(policy.key)
    return newest_evaluation(demo.out / policy.trained[-1]) if demo.rl.evaluation.best_of_n else None


def _result(
    demo: Demo, policy: Policy, evaluations: Mapping[str, Evaluation], seconds: Mapping[str, float]
) -> dict[str, Any]:
    evaluation = evaluations[policy.key]
    summary, settings = evaluation.summary(), evaluation.settings
    if summary.rate is None:
        raise DataError(f"{policy.name} finished no episode: see {demo.evaluation(policy.key)}.")
    *before, run = policy.trained
    # Evaluated while it was trained, or from its checkpoint.
    step = updates = int(settings["step"] if "step" in settings else Path(settings["policy"]).name)
    if run == demo.subject and isinstance(demo.rl.agent, ACRLPDConfig):
        updates = demo.rl.agent.policy_updates(step)  # the critics are trained more often
    result = {
        "name": policy.name,
        "description": policy.description,
        "success": summary.rate,
        "low": summary.interval[0],
        "high": summary.interval[1],
        "episodes": summary.finished,
        "successes": summary.successes,
        "lost": summary.lost,
        "mean_length": summary.mean_length,
        "step": step,
        "updates": updates + sum(max(saved_steps(RunFiles(demo.out / each).checkpoints)) for each in before),
    }
    if not policy.is_halfway:  # the time until there was not measured
        own = policy.own_data
        result["env_steps"] = describe_episodes(demo.out / own)["frames"] if own else demo.env_steps(run)
        result["minutes"] = round(sum(seconds.get(f"train_{each}", 0.0) for each in policy.trained) / 60, 2)
    if policy.key != demo.baseline:
        result["paired"] = asdict(compare(evaluations[demo.baseline], evaluation))
    return result


def describe_episodes(data: Path) -> dict[str, Any]:
    """How many episodes a collected dataset has, how long they are, and how many succeed."""
    episodes = json.loads((data / LOG_FILE).read_text(encoding="utf-8"))["episodes"]
    written = [episode for episode in episodes if episode["lost"] is None]
    successes, frames = (sum(episode[name] for episode in written) for name in ("success", "length"))
    about = {"episodes": len(written), "successes": successes, "success": successes / max(1, len(written))}
    return {**about, "frames": frames}


def summarize(demo: Demo, results: Mapping[str, Any]) -> str:
    """The subject against the baseline, in a sentence or two."""
    subject, baseline = read_results({key: results[key] for key in (demo.subject, demo.baseline)})
    paired = dict(results[demo.subject]["paired"])
    paired |= {"pairs": Pairs(**paired["pairs"]), "interval": tuple(paired["interval"])}
    rates = f"{subject.name} {subject.rate} against {baseline.name} {baseline.rate}"
    return f"{rates}. {Comparison(**paired).format(baseline.name, subject.name)}"


def next_commands(demo: Demo, results: Mapping[str, Any]) -> list[str]:
    """Watch it, compare it with the best control, check what it exports, use it on something real."""
    subject = demo.path(demo.subject)
    exported = RunFiles(demo.out / demo.subject).checkpoints / str(results[demo.subject]["step"])
    return [
        f"pirl envs play --checkpoint {subject} --out {demo.path('film.gif')}",
        f"pirl eval {demo.path(demo.rival)} {subject} {DENOISING_STEPS}",
        f"pirl convert {shlex.quote(str(exported))} --check",
        demo.next_command,
    ]


# Page


def write_report(demo: Demo, results: Mapping[str, Any]) -> Path:
    """Write the page; gives its path."""
    about, measured = results["about"], {key: result for key, result in results.items() if key in demo.names}
    data, when = about["demonstrations"], datetime.fromisoformat(about["finished"])
    colors = {policy.name: index for index, policy in enumerate(demo.policies)}
    introduction = demo.introduction.format(
        policies=len(measured),
        episodes=demo.episodes,
        demonstrations=f"{data['episodes']:,}",
        success=f"{100 * data['success']:.0f} %",
        env_steps=f"{results[demo.subject]['env_steps']:,}",
    )
    baseline = demo.names[demo.baseline]
    is_ript = not isinstance(demo.rl.agent, ACRLPDConfig)
    sections = [
        comparison_section(read_results(measured), baseline=baseline, colors=colors, introduction=introduction),
        *draw_curves(demo, colors),
        _before_and_after(demo) if is_ript else _critics(demo),
        Section("What to run next", code_block("\n".join(next_commands(demo, results)))),
        _provenance(demo, about),
    ]
    quick = " · quick run: the numbers mean nothing" * demo.quick
    subtitle = f"{demo.command} · Tabletop · {when:%d %B %Y}{quick}"
    write_file(demo.out / PAGE_FILE, build_page(demo.title, summarize(demo, results), sections, subtitle=subtitle))
    return demo.out / PAGE_FILE


def draw_curves(demo: Demo, colors: Mapping[str, int]) -> list[Section]:
    """The curves of all runs over updates; those of RIPT's rollouts over environment steps."""
    runs = {run: read_run(demo.out / run, demo.names[run]) for run in demo.runs}
    if isinstance(demo.rl.agent, ACRLPDConfig):
        return [curves_section(list(runs.values()), colors=colors)]
    success, *others = ROLLOUTS
    held_out = replace(PANELS[0], title="Success on held-out initial states")
    panels = (replace(success, title="Success in rollouts"), held_out, *others)
    ript = [over_metric(runs[demo.subject], "rollout/env_steps")]
    rollouts = curves_section(ript, panels=panels, colors=colors, title="Rollouts", unit="environment steps")
    rollouts = replace(rollouts, introduction="RIPT by iteration, over environment steps.")
    return [rollouts, curves_section(list(runs.values()), panels=PANELS[1:], colors=colors)]


def _critics(demo: Demo) -> Section:
    """A success and a failure of the baseline, with the values by the critics of the subject."""
    assert demo.rl.env is not None
    baseline, subject = demo.names[demo.baseline], demo.names[demo.subject]
    episodes = replay_episodes(
        demo.out / demo.subject,
        demo.out / demo.baseline,
        read_evaluation(demo.evaluation(demo.baseline)),
        make_video_env(demo.rl.env),
        title=baseline,
        execute_steps=demo.rl.evaluation.execute_steps,
    )
    introduction = (
        f"Episodes of {baseline} from held-out initial states, with the values that the critics of {subject} assign to "
        "each chunk that the policy planned."
    )
    return episodes_section(episodes, introduction=introduction)


def _before_and_after(demo: Demo) -> Section:
    """The same start by the baseline and by the subject: the first that it has won, if any."""
    assert demo.rl.env is not None
    env, keys = make_video_env(demo.rl.env), (demo.baseline, demo.subject)
    first, second = (read_evaluation(demo.evaluation(key)) for key in keys)
    policies = [evaluated_policy(demo.out / key, first, env) for key in keys]
    after = {(result.task, result.seed): result for result in second.results if result.lost is None}
    pairs = [(one, after[one.task, one.seed]) for one in first.results if (one.task, one.seed) in after]
    won = [one for one, other in pairs if one.lost is None and other.success and not one.success]
    for result in won[:ATTEMPTS] or [first.results[0]]:
        start, steps = Start(result.task, result.seed), demo.rl.evaluation.execute_steps
        played = [play(env, policy, start, execute_steps=steps, render=True) for policy in policies]
        if [episode.success for episode, _ in played] == [False, True]:
            break
    body = ""
    for key, (episode, video) in zip(keys, played, strict=True):
        assert video is not None
        outcome = "success after" if episode.success else "no success in"
        body += figure(image_strip(video.frames), "", f"{demo.names[key]}: {outcome} {episode.length} steps")
    counts, (before, now) = compare(first, second).pairs, (demo.names[key] for key in keys)
    introduction = (
        f"From {counts.only_second} of the held-out initial states {now} succeeds where {before} fails, and from "
        f"{counts.only_first} it is the reverse. Both are shown from the same one"
        f"{f', among the first where only {now} succeeds' if won else ''}; time runs from left to right: {result.prompt}."
    )
    return Section("Before and after", body, introduction)


def _provenance(demo: Demo, about: Mapping[str, Any]) -> Section:
    steps, seconds = demo.steps(), about["seconds"]
    total = sum(max(sum(seconds.get(step.name, 0.0) for step in lane) for lane in lanes) for lanes in demo.stages())
    facts = {
        "Finished": datetime.fromisoformat(about["finished"]).strftime("%d %B %Y, %H:%M UTC"),
        "Total time": format_duration(total),
        **{f"Time: {step.title}": format_duration(seconds.get(step.name, 0.0)) for step in steps},
        **describe_machine(),
        "Versions": ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
    }
    configs = {demo.names[run]: to_plain(load_config(RunFiles(demo.out / run).config_file, None)) for run in demo.runs}
    introduction = (
        f"Every number and image on this page comes from these commands, which {demo.command} runs, some of them two at "
        "a time. The config.yaml of each run has all settings."
    )
    return provenance_section(
        commands=[shlex.join(("pirl", *step.command)) for step in steps],
        configs=configs,
        facts=facts,
        introduction=introduction,
    )
