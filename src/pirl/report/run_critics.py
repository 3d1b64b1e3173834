"""What the critics of a run think along episodes of its own policy, played again from starts it was measured on."""

from pirl.config import load_config
from pirl.errors import DataError
from pirl.report.evaluations import newest_evaluation, read_evaluation
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
    measured = newest_evaluation(facts.path)
    if measured is None:
        raise DataError("the run was not evaluated, so there are no initial states to replay.")
    episodes = watch_episodes(
        facts.path,
        facts.path,
        read_evaluation(measured),
        make_film_env(config.env),
        title=facts.name,
        execute_steps=config.evaluation.execute_steps,
    )
    introduction = (
        "Episodes of the exported policy from initial states of the last evaluation, with the values that the critics "
        f"assign to each chunk it planned.{missing_outcomes(episodes)}"
    )
    return episodes, introduction
