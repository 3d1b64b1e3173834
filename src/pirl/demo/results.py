"""From the evaluations of a demo to its results.json: rates with intervals, and each policy paired with the baseline."""

import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pirl.demo.plan import POLICIES, DemoConfig, Policy
from pirl.envs.collecting import LOG_FILE
from pirl.envs.evaluation import Evaluation, compare, versions
from pirl.errors import DataError
from pirl.files import write_file
from pirl.report import describe_machine
from pirl.training.run import saved_steps

BASELINE = "bc"


def make_results(config: DemoConfig, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Every policy that was measured, by its key, and under `about` where it comes from. `seconds` are those of steps."""
    evaluations = read_evaluations(config)
    results: dict[str, Any] = {
        policy.key: _result(config, policy, evaluations[policy.key], evaluations[BASELINE], seconds)
        for policy in POLICIES
        if policy.key in evaluations
    }
    results["about"] = {
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": config.quick,
        "demonstrations": describe_demonstrations(config.data),
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
    files = {policy.key: config.evaluation(policy.key) for policy in POLICIES}
    # The learner with its critics was measured while it trained: the newest of these.
    trained = config.run("acrlpd") / "evaluations"
    measured = sorted(
        (file for file in trained.glob("*.json") if file.stem.isdecimal()), key=lambda file: int(file.stem)
    )
    if measured and config.rl.evaluation.best_of_n:
        files["acrlpd_best_of_n"] = measured[-1]
    return {key: read_evaluation(file) for key, file in files.items() if file.exists()}


def read_evaluation(file: Path) -> Evaluation:
    """An evaluation from its file."""
    try:
        return Evaluation.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} is no evaluation that can be read: {error!r}. Delete it to measure again.") from error


def describe_demonstrations(data: Path) -> dict[str, Any]:
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
    before = policy.trained[:-1]
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
        "updates": trained_steps(evaluation) + sum(max(saved_steps(_policies(config, run))) for run in before),
    }
    # How long the offline part of a run took nobody has measured.
    if policy.key != "acrlpd_offline":
        result["minutes"] = round(sum(seconds.get(f"train_{run}", 0.0) for run in policy.trained) / 60, 2)
    if policy.key != BASELINE:
        result["paired"] = compare(baseline, evaluation).to_json()
    return result


def trained_steps(evaluation: Evaluation) -> int:
    """After how many updates of its run a policy was measured: while it trained, or from its checkpoint."""
    settings = evaluation.settings
    return int(settings["step"] if "step" in settings else Path(settings["policy"]).name)


def _policies(config: DemoConfig, run: str) -> Path:
    return config.run(run) / "checkpoints" / "policy"
