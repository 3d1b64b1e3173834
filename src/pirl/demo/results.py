"""From the evaluations of a demo to its results.json: rates with intervals, and each policy paired with the baseline."""

import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pirl.agents.config import ACRLPDConfig
from pirl.demo.plan import DemoConfig, Policy
from pirl.demo.progress import steps_practised
from pirl.envs.collecting import LOG_FILE
from pirl.envs.evaluation import Evaluation, compare, versions
from pirl.errors import DataError
from pirl.files import write_file
from pirl.report.replay import newest_evaluation, read_evaluation
from pirl.report.sections import describe_machine
from pirl.run_files import RunFiles, saved_steps


def make_results(config: DemoConfig, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Every policy that was measured, by its key, and under `about` where it comes from. `seconds` are those of steps."""
    evaluations, baseline = read_evaluations(config), config.plan.baseline
    results: dict[str, Any] = {
        policy.key: _result(config, policy, evaluations[policy.key], evaluations[baseline], seconds)
        for policy in config.plan.policies
        if policy.key in evaluations
    }
    results["about"] = {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": config.quick,
        "demonstrations": describe_episodes(config.data),
        "evaluation": {"episodes": config.episodes, "seed": config.rl.evaluation.seed},
        "seconds": dict(seconds),
        "versions": versions(),
        "machine": {"system": platform.platform(), **describe_machine()},
    }
    return dict(json.loads(json.dumps(results)))  # as it will be read back


def write_results(config: DemoConfig, results: Mapping[str, Any]) -> Path:
    """Write them in one step; says where."""
    file = config.out / "results.json"
    write_file(file, json.dumps(results, indent=2) + "\n")
    return file


def read_evaluations(config: DemoConfig) -> dict[str, Evaluation]:
    """The evaluations that are there, by policy."""
    files = {policy.key: _evaluation_file(config, policy) for policy in config.plan.policies}
    return {key: read_evaluation(file) for key, file in files.items() if file is not None and file.exists()}


def describe_episodes(data: Path) -> dict[str, Any]:
    """How many there are, how long, and how many succeed."""
    episodes = json.loads((data / LOG_FILE).read_text(encoding="utf-8"))["episodes"]
    written = [episode for episode in episodes if episode["lost"] is None]
    successes = sum(episode["success"] for episode in written)
    return {
        "episodes": len(written),
        "successes": successes,
        "success": successes / max(1, len(written)),
        "frames": sum(episode["length"] for episode in written),
    }


def _result(
    config: DemoConfig, policy: Policy, evaluation: Evaluation, baseline: Evaluation, seconds: Mapping[str, float]
) -> dict[str, Any]:
    summary = evaluation.summary()
    if summary.rate is None:
        raise DataError(f"{policy.name} finished no episode: see {config.evaluation(policy.key)}.")
    low, high = summary.interval
    *before, last = policy.trained
    result = {
        "name": policy.name,
        "description": policy.description,
        "success": summary.rate,
        "low": low,
        "high": high,
        "episodes": summary.finished,
        "successes": summary.successes,
        "lost": summary.lost,
        "mean_length": summary.mean_length,
        "step": trained_steps(evaluation),
        "updates": policy_updates(config, last, trained_steps(evaluation))
        + sum(max(saved_steps(_policies(config, run))) for run in before),
    }
    if not policy.is_halfway:
        result["env_steps"] = (
            describe_episodes(config.dataset(policy.own_data))["frames"]
            if policy.own_data
            else steps_practised(config.run(last))
        )
        result["minutes"] = round(sum(seconds.get(f"train_{run}", 0.0) for run in policy.trained) / 60, 2)
    if policy.key != config.plan.baseline:
        result["paired"] = compare(baseline, evaluation).to_json()
    return result


def trained_steps(evaluation: Evaluation) -> int:
    """After how many updates of its run a policy was measured: while it trained, or from its checkpoint."""
    settings = evaluation.settings
    return int(settings["step"] if "step" in settings else Path(settings["policy"]).name)


def policy_updates(config: DemoConfig, run: str, step: int) -> int:
    """How often the policy was trained in a run's first updates: ACRLPD trains its critics more often."""
    agent = config.rl.agent
    if run == config.plan.subject and isinstance(agent, ACRLPDConfig):
        return agent.policy_updates(step)
    return step


def _evaluation_file(config: DemoConfig, policy: Policy) -> Path | None:
    if not policy.is_best_of_n:
        return config.evaluation(policy.key)
    return newest_evaluation(config.run(policy.trained[-1])) if config.rl.evaluation.best_of_n else None


def _policies(config: DemoConfig, run: str) -> Path:
    return RunFiles(config.run(run)).policies
