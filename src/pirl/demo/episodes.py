"""Episodes of a demo as film strips: what its critics think along them, or the same start before and after."""

from pirl.demo.plan import DemoConfig
from pirl.envs.base import RobotEnv, Start
from pirl.envs.evaluation import compare
from pirl.envs.playing import play
from pirl.report.plots import figure, image_strip
from pirl.report.replay import (
    ATTEMPTS,
    episodes_section,
    evaluated_policy,
    make_video_env,
    read_evaluation,
    replay_episodes,
)
from pirl.report.sections import Section


def seen_by_critics(config: DemoConfig) -> Section:
    """A success and a failure of the baseline, with the values by the critics of the policy that the demo is about."""
    plan = config.plan
    name = plan.names[plan.baseline]
    episodes = replay_episodes(
        config.run(plan.subject),
        config.run(plan.baseline),
        read_evaluation(config.evaluation(plan.baseline)),
        _make_env(config),
        title=name,
        execute_steps=config.rl.evaluation.execute_steps,
    )
    introduction = (
        f"Episodes of {name} from held-out initial states, with the values that the critics of "
        f"{plan.names[plan.subject]} assign to each chunk that the policy planned."
    )
    return episodes_section(episodes, introduction=introduction)


def before_and_after(config: DemoConfig) -> Section:
    """The same start by the baseline and by the policy that the demo is about: the first that it has won, if any."""
    plan, env = config.plan, _make_env(config)
    keys = (plan.baseline, plan.subject)
    first, second = (read_evaluation(config.evaluation(key)) for key in keys)
    planners = [evaluated_policy(config.run(key), first, env) for key in keys]
    after = {(result.task, result.seed): result for result in second.results if result.lost is None}
    pairs = [(one, after[one.task, one.seed]) for one in first.results if (one.task, one.seed) in after]
    won = [one for one, other in pairs if one.lost is None and other.success and not one.success]
    for result in won[:ATTEMPTS] or [first.results[0]]:
        start, steps = Start(result.task, result.seed), config.rl.evaluation.execute_steps
        played = [play(env, planner, start, execute_steps=steps, render=True) for planner in planners]
        if [episode.success for episode, _ in played] == [False, True]:
            break
    figures = []
    for key, (episode, film) in zip(keys, played, strict=True):
        assert film is not None
        outcome = (
            f"success after {episode.length} steps" if episode.success else f"no success in {episode.length} steps"
        )
        figures.append(figure(image_strip(film.frames), "", f"{plan.names[key]}: {outcome}"))
    counts, (before, now) = compare(first, second).pairs, (plan.names[key] for key in keys)
    introduction = (
        f"From {counts.only_second} of the held-out initial states {now} succeeds where {before} fails, and from "
        f"{counts.only_first} it is the reverse. Both are shown from the same one"
        f"{f', among the first where only {now} succeeds' if won else ''}; time runs from left to right: {result.prompt}."
    )
    return Section("Before and after", "".join(figures), introduction)


def _make_env(config: DemoConfig) -> RobotEnv:
    assert config.rl.env is not None
    return make_video_env(config.rl.env)
