"""One episode in one environment, seen through the pictures it makes for people."""

import numpy as np
from jaxtyping import UInt8

from pirl.envs.base import RobotEnv, Start
from pirl.envs.evaluation import EpisodeResult
from pirl.envs.experts import ExpertConfig
from pirl.envs.planner import Planner
from pirl.envs.video import Film
from pirl.errors import ConfigError


def play(
    env: RobotEnv, actor: Planner | ExpertConfig, start: Start, *, execute_steps: int, render: bool, index: int = 0
) -> tuple[EpisodeResult, Film | None]:
    """Act from a start as a rollout does; with `render`, keep a picture of the beginning and one after each step."""
    observation, info = env.reset(seed=start.seed, options={"task": start.task, "state": start.state})
    prompt, task = str(info["prompt"]), str(info["task"])
    expert = env.make_expert(actor, start.seed) if isinstance(actor, ExpertConfig) else None
    pictures = [_render(env)] if render else []
    plan = np.zeros((0, 0), np.float32)
    steps, total, terminated, truncated, success = 0, 0.0, False, False, False
    while not (terminated or truncated):
        if expert is not None:
            action = expert()
        else:
            assert not isinstance(actor, ExpertConfig)
            if steps % execute_steps == 0:
                seen = {name: value[None] for name, value in observation.items()}
                plan = actor.plan(seen, [prompt], [start.seed], [steps])[0]
            action = plan[steps % execute_steps]
        observation, reward, terminated, truncated, info = env.step(action)
        steps, total, success = steps + 1, total + float(reward), bool(info["success"])
        if render:
            pictures.append(_render(env))
    result = EpisodeResult(index, task, prompt, start.seed, success, total, steps, terminated, truncated, lost=None)
    return result, Film(np.stack(pictures), success) if render else None


def _render(env: RobotEnv) -> UInt8[np.ndarray, "H W 3"]:
    picture = env.render()
    if not isinstance(picture, np.ndarray):
        raise ConfigError(f"{env.name} makes no pictures (render() gave {type(picture).__name__}, not an array).")
    return picture
