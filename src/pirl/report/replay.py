"""Episodes that were measured, played again, with what the critics of a run think along them."""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float, Float32

from pirl.agents.acrlpd import ACRLPDAgent
from pirl.data import PolicyIO
from pirl.envs.base import EnvObservation, RobotEnv, Start
from pirl.envs.evaluation import EpisodeResult, Evaluation
from pirl.envs.planner import Planner, load_planner
from pirl.envs.playing import play
from pirl.envs.registry import EnvConfig, make_env, with_render_size
from pirl.errors import ConfigError
from pirl.models import Observation
from pirl.models.types import Array
from pirl.report.film import Episode
from pirl.training.loading import load_agent

_PIXELS = 160
# Environments at the same time where nobody has said how many.
_ENVS = 16
# Of evaluations that do not say it yet.
_DENOISING_STEPS = 10
# Episodes to try for each outcome: what was measured in a batch may go another way by itself, if rarely.
ATTEMPTS = 3


def watch_episodes(
    run: Path, policy: Path, evaluation: Evaluation, env: RobotEnv, *, title: str, execute_steps: int
) -> list[Episode]:
    """The first success and the first failure of a policy, played again, with the values by the critics of a run.

    Of an outcome that never was, there is none.
    """
    agent, policy_io = load_agent(run)
    if not isinstance(agent, ACRLPDAgent):
        raise ConfigError(f"{run} has no critics: it was trained by {type(agent).__name__}.")
    planner = measured_planner(policy, evaluation, env)
    episodes = []
    for success in (True, False):
        candidates = [one for one in evaluation.results if one.lost is None and one.success == success]
        for result in candidates[:ATTEMPTS]:
            episode = _play(env, planner, result, agent, policy_io, title, execute_steps)
            if episode.success == success:
                episodes.append(episode)
                break
    return episodes


def missing_outcomes(episodes: Sequence[Episode]) -> str:
    """What to say of an outcome that is not among the episodes."""
    seen = {episode.success for episode in episodes}
    outcomes = (("success", True), ("failure", False))
    return "".join(f" There was no {word} to show." for word, success in outcomes if success not in seen)


def make_film_env(config: EnvConfig) -> RobotEnv:
    """The environment, with pictures of the size in which they are shown, if it can be told."""
    return make_env(with_render_size(config, _PIXELS))


def measured_planner(policy: Path, evaluation: Evaluation, env: RobotEnv) -> Planner:
    """A policy that plans as when it was measured, also in batches of the same size: another one rounds differently."""
    settings = evaluation.settings
    steps = int(settings.get("denoising_steps", _DENOISING_STEPS))
    return load_planner(policy, env.describe(), batch_size=int(settings["envs"] or _ENVS), num_steps=steps)


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
