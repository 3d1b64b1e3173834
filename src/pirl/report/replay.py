"""Evaluated episodes replayed, with the values that the critics of a run assign along them. This loads JAX."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float, Float32, Real, UInt8

from pirl.agents.acrlpd import ACRLPDAgent
from pirl.config import load_config
from pirl.data import PolicyIO
from pirl.envs.base import EnvObservation, Policy, RobotEnv, Start
from pirl.envs.evaluation import Evaluation, play
from pirl.envs.policy import load_trained_policy
from pirl.envs.registry import EnvConfig, make_env, with_render_size
from pirl.errors import ConfigError, DataError
from pirl.models import Observation
from pirl.models.types import Array
from pirl.report.plots import Axis, Series, figure, image_strip, line_chart, markup, texts
from pirl.report.runs import Event, Run
from pirl.report.sections import Section
from pirl.run_files import RunFiles
from pirl.training.inspect import load_agent

_RENDER_SIZE = 160
_ENVS = 16  # where the evaluation left the number open
ATTEMPTS = 3  # episodes to try for each outcome: rarely, one that was measured in a batch goes another way by itself


@dataclass(frozen=True)
class Episode:
    """The images of every step, and the value of each critic at some steps."""

    title: str
    frames: UInt8[np.ndarray, "t h w 3"]
    q_steps: Real[np.ndarray, " n"]
    q_values: Float[np.ndarray, "critics n"]
    success: bool


def newest_evaluation(run: Path) -> Path | None:
    """The file of the last evaluation that a run made itself, if any."""
    files = [file for file in RunFiles(run).evaluations.glob("*.json") if file.stem.isdecimal()]
    return max(files, key=lambda file: int(file.stem), default=None)


def read_evaluation(file: Path) -> Evaluation:
    try:
        return Evaluation.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} is no evaluation that can be read: {error!r}. Delete it, evaluate again.") from error


def make_video_env(config: EnvConfig) -> RobotEnv:
    """The environment, with images of the size in which a report shows them, if it can be set."""
    return make_env(with_render_size(config, _RENDER_SIZE))


def evaluated_policy(policy: Path, evaluation: Evaluation, env: RobotEnv) -> Policy:
    """A policy as it was evaluated, also in batches of the same size: another one rounds differently."""
    settings = evaluation.settings
    size, steps = int(settings["envs"] or _ENVS), int(settings["denoising_steps"])
    return load_trained_policy(policy, env.describe(), batch_size=size, num_steps=steps)


def replay_run(run: Run) -> Section:
    """A success and a failure of the newest policy of a run, as its critics value them."""
    config = load_config(RunFiles(run.path).config_file, None)
    measured = newest_evaluation(run.path)
    if run.learner != "acrlpd":
        raise DataError(f"{run.learner} has no critics.")
    if config.env is None:
        raise DataError("the run has no environment.")
    if measured is None:
        raise DataError("the run was not evaluated, so there are no initial states to replay.")
    env, evaluation = make_video_env(config.env), read_evaluation(measured)
    execute_steps = config.evaluation.execute_steps
    episodes = replay_episodes(run.path, run.path, evaluation, env, title=run.name, execute_steps=execute_steps)
    title = f"Episodes of {run.name} as its critics value them"
    return episodes_section(episodes, title=title, introduction=texts["replayed"])


def replay_episodes(
    run: Path, policy: Path, evaluation: Evaluation, env: RobotEnv, *, title: str, execute_steps: int
) -> list[Episode]:
    """The first success and the first failure of a policy, if there are any, with values by the critics of a run."""
    agent, policy_io = load_agent(run)
    if not isinstance(agent, ACRLPDAgent):
        raise ConfigError(f"{run} has no critics: it was trained by {type(agent).__name__}.")
    recorder = _Recorder(evaluated_policy(policy, evaluation, env), agent, policy_io)
    episodes = []
    for success, outcome in ((True, "A success"), (False, "A failure")):
        candidates = [one for one in evaluation.results if one.lost is None and one.success == success]
        for result in candidates[:ATTEMPTS]:
            recorder.steps, recorder.values = [], []
            start = Start(result.task, result.seed)
            played, video = play(env, recorder, start, execute_steps=execute_steps, render=True)
            if video is not None and played.success == success:
                # The image after the last action has no value beside it.
                frames, values = video.frames[:-1], np.concatenate(recorder.values, axis=1)
                episode_title = f"{outcome} of {title}: {played.prompt}"
                episodes.append(Episode(episode_title, frames, np.array(recorder.steps), values, success))
                break
    return episodes


class _Recorder:
    """A policy that also records the values of its chunks."""

    def __init__(self, planner: Policy, agent: ACRLPDAgent, policy_io: PolicyIO) -> None:
        self.horizon = planner.horizon
        self.steps: list[int] = []
        self.values: list[Float[np.ndarray, "critics 1"]] = []
        self._planner, self._agent, self._policy_io = planner, agent, policy_io

    def infer(
        self, observations: EnvObservation, prompts: Sequence[str], seeds: Sequence[int], steps: Sequence[int]
    ) -> Float32[np.ndarray, "n horizon action_dim"]:
        chunk = self._planner.infer(observations, prompts, seeds, steps)
        robot = self._policy_io.robot
        state = np.concatenate([observations[column] for column in robot.state], axis=-1)
        images = {slot: observations[feature] for slot, feature in robot.cameras.items()}
        observation = self._policy_io.observation(images, state, list(prompts))
        self.values.append(np.asarray(_value(self._agent, observation, self._policy_io.actions(chunk, state))))
        self.steps += steps
        return chunk


@jax.jit
def _value(
    agent: ACRLPDAgent, observation: Observation, actions: Float[Array, "b horizon action_dim"]
) -> Float[Array, "critics b"]:
    return agent.value(observation, actions)


def episodes_section(
    episodes: Sequence[Episode], *, title: str = "What the critics see", introduction: str = ""
) -> Section:
    """Episodes below each other as strips over their Q-values, all on one scale."""
    scale = Axis.fit([episode.q_values for episode in episodes], margin=0.08)
    body = ""
    for episode in episodes:
        if not len(episode.frames):
            raise DataError(f"the episode {episode.title!r} has no images. Keep the images of the rollout.")
        length, q = len(episode.frames), episode.q_values
        kind, outcome = ("good", "success after") if episode.success else ("bad", "no success in")
        chart = line_chart(
            [Series("Q", episode.q_steps, q.mean(axis=0), q.min(axis=0), q.max(axis=0))],
            label=f"Q-value along {episode.title}: {outcome} {length} steps",
            x_axis=Axis(0.0, float(length)),
            y_range=(scale.low, scale.high),
            marks=[Event(float(length), kind, f"{outcome} {length} steps")],
            height=140,
        )
        strip = markup("episode", image_strip(episode.frames), chart, kind)
        body += figure(strip, texts["episodes"] if episode is episodes[-1] else "", episode.title)
    found = {episode.success for episode in episodes}
    missing = [word for word, success in (("success", True), ("failure", False)) if success not in found]
    return Section(title, body, introduction + "".join(f" There was no {word} to show." for word in missing))
