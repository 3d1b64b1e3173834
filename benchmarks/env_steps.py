"""Steps of environments with their pictures: Tabletop on one core, and ALOHA as pirl renders it against gym-aloha itself.

Both sides of ALOHA take the same actions from the same start in one process, in turns, and each step makes the
observation of the top camera at 480×640; gym-aloha renders two more cameras that nobody asked for. CPU seconds of all
threads are compared, so other work on the machine counts little; the median of several rounds is taken.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

from pirl.envs.aloha.env import AlohaEnv
from pirl.envs.mujoco import import_simulator
from pirl.envs.tabletop.env import Scene
from pirl.envs.tabletop.world import TableConfig
from pirl.errors import ConfigError

TASK = "transfer_cube"


def main() -> None:
    """Time everything that is installed and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each side is timed (default: 5)")
    parser.add_argument("--steps", type=int, default=20, help="steps of ALOHA in a round (default: 20)")
    parser.add_argument("--tables", type=int, default=64, help="Tabletop environments in a batch (default: 64)")
    options = parser.parse_args()
    report: dict[str, Any] = {
        "name": "env_steps",
        "compared": "CPU time of a rendered ALOHA step: gym-aloha over pirl",
        "ratio": None,
        "target": 8,
        "tabletop_steps_per_cpu_second": round(tabletop_steps(options.tables, options.rounds)),
    }
    try:
        milliseconds = aloha_milliseconds(options.steps, options.rounds)
    except ConfigError as error:
        print(f"Without ALOHA: {error}")
    else:
        report["ratio"] = round(milliseconds["gym-aloha"] / milliseconds["pirl"], 1)
        report["cpu_ms_per_step"] = {name: round(value, 1) for name, value in milliseconds.items()}
    print(json.dumps(report))


def tabletop_steps(tables: int, rounds: int) -> float:
    """Rendered steps of Tabletop (both cameras) per CPU second, many tables at once."""
    scene, rows, rng = Scene(tables, TableConfig(), 56, "pixels"), np.arange(tables), np.random.default_rng(0)
    for row in rows:
        scene.reset(int(row), rng, None)
    actions = rng.uniform(-1, 1, (20, tables, 3)).astype(np.float32)

    def run() -> None:
        for action in actions:
            outcome = scene.step(rows, action)
            for row in np.flatnonzero(outcome.success | outcome.failed | outcome.truncated):
                scene.reset(int(row), rng, None)
            scene.images(rows)
            scene.state(rows)

    seconds = [cpu_seconds(run) for _ in range(rounds)]
    return tables * len(actions) / statistics.median(seconds)


def aloha_milliseconds(steps: int, rounds: int) -> dict[str, float]:
    """CPU milliseconds of one step with its observation: as pirl renders it, with stock quality, and in gym-aloha."""
    fast, stock = AlohaEnv(), AlohaEnv(quality="stock")
    import_simulator("gym_aloha", "aloha")
    package = gymnasium.make(
        "gym_aloha/AlohaTransferCube-v0", obs_type="pixels_agent_pos", disable_env_checker=True
    ).unwrapped
    resets: dict[str, Callable[[], Any]] = {
        "pirl": lambda: fast.reset(seed=0, options={"task": TASK}),
        "pirl, stock quality": lambda: stock.reset(seed=0, options={"task": TASK}),
        "gym-aloha": lambda: package.reset(seed=0),
    }
    envs: dict[str, gymnasium.Env[Any, Any]] = {"pirl": fast, "pirl, stock quality": stock, "gym-aloha": package}
    observation, _ = fast.reset(seed=0, options={"task": TASK})
    # Small motions about the start, the same for everybody.
    start = observation["observation.state"]
    actions = start + 0.05 * np.random.default_rng(0).normal(size=(steps, start.size)).astype(np.float32)

    def run(env: gymnasium.Env[Any, Any]) -> None:
        for action in actions:
            env.step(action)

    seconds: dict[str, list[float]] = {name: [] for name in envs}
    for _ in range(rounds):
        for name, env in envs.items():
            resets[name]()
            seconds[name].append(cpu_seconds(functools.partial(run, env)))
    for env in envs.values():
        env.close()
    return {name: 1000 * statistics.median(times) / steps for name, times in seconds.items()}


def cpu_seconds(run: Callable[[], Any]) -> float:
    """CPU time of all threads while it runs."""
    start = time.process_time()
    run()
    return time.process_time() - start


if __name__ == "__main__":
    main()
