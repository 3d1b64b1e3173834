"""Episodes of a demo as film strips: what its critics think along them, or the same start before and after."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float, Float32

from pirl.agents.acrlpd import ACRLPDAgent
from pirl.data import PolicyIO
from pirl.demo.plan import DemoConfig
from pirl.demo.results import read_evaluation
from pirl.envs.base import EnvObservation, RobotEnv, Start
from pirl.envs.evaluation import EpisodeResult, Evaluation, compare
from pirl.envs.planner import Planner, load_planner
from pirl.envs.playing import play
from pirl.envs.registry import make_env
from pirl.errors import ConfigError
from pirl.models import Observation
from pirl.models.types import Array
from pirl.report import Episode, Section, episodes_section
from pirl.report.film import film_strip
from pirl.report.page import figure
from pirl.training.loading import load_agent

_PIXELS = 160
# Episodes to try for each outcome: what was measured in a batch may go another way by itself, if rarely.
_ATTEMPTS = 3


def seen_by_critics(config: DemoConfig) -> Section:
    """A success and a failure of the baseline, with the values by the critics of the policy that the demo is about."""
    plan = config.plan
    name = plan.names[plan.baseline]
    episodes = _watch(config, config.run(plan.subject), plan.baseline)
    seen = {episode.success for episode in episodes}
    missing = "".join(
        f" There was no {word} to show."
        for word, success in (("success", True), ("failure", False))
        if success not in seen
    )
    introduction = (
        f"Episodes of {name} from starts that were held out, seen by the critics of {plan.names[plan.subject]}: the "
        f"value of the chunk that the policy planned, each time it planned one.{missing}"
    )
    return episodes_section(episodes, introduction=introduction)


def before_and_after(config: DemoConfig) -> Section:
    """The same start by the baseline and by the policy that the demo is about: the first that it has won, if any."""
    plan, env = config.plan, _make_env(config)
    keys = (plan.baseline, plan.subject)
    first, second = (read_evaluation(config.evaluation(key)) for key in keys)
    planners = [_load_planner(config, key, first, env) for key in keys]
    after = {(result.task, result.seed): result for result in second.results if result.lost is None}
    pairs = [(one, after[one.task, one.seed]) for one in first.results if (one.task, one.seed) in after]
    won = [one for one, other in pairs if one.lost is None and other.success and not one.success]
    for result in won[:_ATTEMPTS] or [first.results[0]]:
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
        figures.append(figure(film_strip(film.frames), "", f"{plan.names[key]}: {outcome}"))
    counts, (before, now) = compare(first, second).pairs, (plan.names[key] for key in keys)
    introduction = (
        f"From {counts.only_second} of the held-out starts {now} succeeds where {before} fails, and from "
        f"{counts.only_first} it is the other way round. Here both begin with the same one"
        f"{', among the first of those that were won' if won else ''}; time goes from left to right: {result.prompt}."
    )
    return Section("Before and after", "".join(figures), introduction)


def _watch(config: DemoConfig, run: Path, policy: str) -> list[Episode]:
    """The first success and the first failure of a policy, played again, with the values by the critics of a run.

    Of an outcome that never was, there is none.
    """
    agent, policy_io = load_agent(run)
    if not isinstance(agent, ACRLPDAgent):
        raise ConfigError(f"{run} has no critics: it was trained by {type(agent).__name__}.")
    evaluation, env = read_evaluation(config.evaluation(policy)), _make_env(config)
    planner = _load_planner(config, policy, evaluation, env)
    title, execute_steps = config.plan.names[policy], config.rl.evaluation.execute_steps
    episodes = []
    for success in (True, False):
        candidates = [one for one in evaluation.results if one.lost is None and one.success == success]
        for result in candidates[:_ATTEMPTS]:
            episode = _play(env, planner, result, agent, policy_io, title, execute_steps)
            if episode.success == success:
                episodes.append(episode)
                break
    return episodes


def _make_env(config: DemoConfig) -> RobotEnv:
    env = config.rl.env
    assert env is not None
    return make_env(replace(env, options={**env.options, "render_size": _PIXELS}))


def _load_planner(config: DemoConfig, policy: str, evaluation: Evaluation, env: RobotEnv) -> Planner:
    # Planned in batches of the same size as when it was measured, because another one rounds differently.
    return load_planner(config.run(policy), env.describe(), batch_size=int(evaluation.settings["envs"]))


def _play(
    env: RobotEnv,
    planner: Planner,
    result: EpisodeResult,
    agent: ACRLPDAgent,
    policy_io: PolicyIO,
    title: str,
    execute_steps: int,
) -> Episode:
    recorder = _Recorder(planner)
    start = Start(result.task, result.seed)
    played, film = play(env, recorder, start, execute_steps=execute_steps, render=True)
    assert film is not None
    outcome = "a success" if played.success else "a failure"
    return Episode(
        title=f"{outcome.capitalize()} of {title}: {played.prompt}",
        # Those before each action; the one behind the last has no value beside it.
        frames=film.frames[:-1],
        q_steps=np.array(recorder.steps),
        q_values=recorder.values(agent, policy_io, env.max_steps // execute_steps + 1),
        success=played.success,
    )


class _Recorder:
    """A planner that remembers what it saw and planned, of one environment."""

    def __init__(self, planner: Planner) -> None:
        self.horizon = planner.horizon
        self.steps: list[int] = []
        self._planner = planner
        self._observations: list[EnvObservation] = []
        self._prompts: list[str] = []
        self._chunks: list[Float32[np.ndarray, "1 horizon action_dim"]] = []

    def plan(
        self, observations: EnvObservation, prompts: Sequence[str], seeds: Sequence[int], steps: Sequence[int]
    ) -> Float32[np.ndarray, "n horizon action_dim"]:
        """What the planner plans."""
        chunk = self._planner.plan(observations, prompts, seeds, steps)
        self._observations.append(observations)
        self._prompts += prompts
        self.steps += steps
        self._chunks.append(chunk)
        return chunk

    def values(self, agent: ACRLPDAgent, policy_io: PolicyIO, rows: int) -> Float[np.ndarray, "critics plans"]:
        """What each critic thinks of every plan, in one batch that is filled up to `rows`."""
        robot, count = policy_io.robot, len(self.steps)
        repeated = np.minimum(np.arange(max(rows, count)), count - 1)
        seen = {name: np.concatenate([one[name] for one in self._observations]) for name in self._observations[0]}
        state = np.concatenate([seen[column] for column in robot.state], axis=-1)
        images = {slot: seen[feature] for slot, feature in robot.cameras.items()}
        observation = policy_io.observation(images, state, self._prompts)
        actions = policy_io.actions(np.concatenate(self._chunks), state)
        observation = jax.tree.map(lambda leaf: leaf[repeated], observation)
        return np.asarray(_value(agent, observation, actions[repeated]))[:, :count]


@jax.jit
def _value(
    agent: ACRLPDAgent, observation: Observation, actions: Float[Array, "b horizon action_dim"]
) -> Float[Array, "critics b"]:
    return agent.value(observation, actions)
