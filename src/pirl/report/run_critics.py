"""What the critics of a run think along episodes of its own policy, played again from starts it was measured on."""

import json
from pathlib import Path

from pirl.config import load_config
from pirl.envs.evaluation import Evaluation
from pirl.errors import DataError
from pirl.report.film import Episode
from pirl.report.replay import make_film_env, missing_outcomes, watch_episodes
from pirl.report.run_facts import RunFacts
from pirl.run_files import RunFiles


def watch_run(facts: RunFacts) -> tuple[list[Episode], str]:
    """A success and a failure of the newest policy, and how to read them. It loads the learner: this takes a while."""
    config = load_config(RunFiles(facts.path).config_file, None)
    if facts.learner != "acrlpd":
        raise DataError(f"{facts.learner} has no critics.")
    if config.env is None:
        raise DataError("the run has no environment.")
    evaluation = _newest_evaluation(facts.path)
    episodes = watch_episodes(
        facts.path,
        facts.path,
        evaluation,
        make_film_env(config.env),
        title=facts.name,
        execute_steps=config.evaluation.execute_steps,
    )
    introduction = (
        "Episodes of the exported policy, from starts of the last evaluation: the value of the chunk that it planned, "
        f"each time it planned one.{missing_outcomes(episodes)}"
    )
    return episodes, introduction


def _newest_evaluation(run: Path) -> Evaluation:
    files = [file for file in RunFiles(run).evaluations.glob("*.json") if file.stem.isdecimal()]
    if not files:
        raise DataError("the run was not evaluated, so there are no starts to play from.")
    newest = max(files, key=lambda file: int(file.stem))
    try:
        return Evaluation.from_json(json.loads(newest.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{newest} is no evaluation that can be read: {error!r}.") from error
