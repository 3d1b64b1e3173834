"""One episode in one environment, seen through the pictures it makes for people."""

import contextlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import UInt8

from pirl.envs.base import RobotEnv, Start
from pirl.envs.evaluation import EpisodeResult
from pirl.envs.experts import ExpertConfig
from pirl.envs.planner import Planner
from pirl.envs.stepping import Stepper
from pirl.envs.video import Film
from pirl.errors import ConfigError, EnvError, UserError


def play(
    env: RobotEnv, actor: Planner | ExpertConfig, start: Start, *, execute_steps: int, render: bool, index: int = 0
) -> tuple[EpisodeResult, Film | None]:
    """Act from a start as a rollout does; with `render`, keep a picture of the beginning and one after each step."""
    stepper, expert = Stepper(env), actor if isinstance(actor, ExpertConfig) else None
    with _failures_of(env, start, after=0):
        begun = stepper.start(start, expert)
    pictures = [_render(env)] if render else []
    seen = {name: value[None] for name, value in begun.observation.items()}
    plan = np.zeros((0, 0), np.float32)
    steps, total, terminated, truncated, success = 0, 0.0, False, False, False
    while not (terminated or truncated):
        if not isinstance(actor, ExpertConfig) and steps % execute_steps == 0:
            plan = actor.plan(seen, [begun.prompt], [start.seed], [steps])[0]
        now = steps % execute_steps
        with _failures_of(env, start, after=steps):
            segment = stepper.execute(1 if expert is not None else plan[now : now + 1])
        seen, terminated, truncated, success = (
            segment.observations,
            segment.terminated,
            segment.truncated,
            segment.success,
        )
        steps, total = steps + 1, total + float(segment.rewards[0])
        if render:
            pictures.append(_render(env))
    result = EpisodeResult(
        index, begun.task, begun.prompt, start.seed, success, total, steps, terminated, truncated, lost=None
    )
    return result, Film(np.stack(pictures), success) if render else None


@contextlib.contextmanager
def _failures_of(env: RobotEnv, start: Start, after: int) -> Iterator[None]:
    """Say where it was that an environment failed; there is nobody to start it anew."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        raise EnvError(f"{env.name} failed after {after} steps from seed {start.seed}: {reason}") from error


def _render(env: RobotEnv) -> UInt8[np.ndarray, "H W 3"]:
    picture = env.render()
    if not isinstance(picture, np.ndarray):
        raise ConfigError(f"{env.name} makes no pictures (render() gave {type(picture).__name__}, not an array).")
    return picture
