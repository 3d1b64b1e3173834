"""Environment steps per second of RIPT's rollout engine, against bare stepping of the same environments.

Tabletop with both cameras, one environment in each of several processes. The engine's attempts are planned for by the
tiny π₀ (two cameras, a prompt, 10 denoising steps), and all pictures are sent to the parent and kept, as training needs
them; so the parent and its policy share the cores with the environments. The bare side steps the same number of
environments in as many processes with random actions, draws the same pictures, and sends nothing. Both sides take
turns; the median of the rounds' ratios is reported, in wall time, and besides in CPU time of all processes, which other
work on the machine hardly changes. Chunks are executed whole, as OpenPI's runtime does; `replanned` plans anew after half
of each, and so twice as often. `without_policy` is the engine with a planner that costs nothing: what is short of 1
there is the engine's own cost, the rest the policy's. `own_pool` is Tabletop's own pool: all tables in the parent,
against the same tables stepped without a policy.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pirl.envs import EnvConfig, make_env
from pirl.envs.pool import EnvPool, open_pool
from pirl.envs.tabletop.env import Scene
from pirl.envs.tabletop.world import TableConfig
from pirl.envs.workers import ProcessPool

if TYPE_CHECKING:
    from pirl.envs.base import Policy

ENV = EnvConfig("tabletop")
# The horizon of the tiny policy.
CHUNK = 10
TICKS = os.sysconf("SC_CLK_TCK")
# A side does so many steps, or a few more, and says how many it did.
Side = Callable[[int], int]


def main() -> None:
    """Time both sides and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=8, help="environments, each a process (default: 8)")
    parser.add_argument("--tables", type=int, default=32, help="tables in Tabletop's own pool (default: 32)")
    parser.add_argument("--attempts", type=int, default=8, help="K (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each side is timed (default: 5)")
    parser.add_argument("--steps", type=int, default=4000, help="environment steps in a round (default: 4000)")
    options = parser.parse_args()
    with ProcessPool(ENV, options.processes) as pool, BareProcesses(options.processes) as bare:
        policy = tiny_policy(pool)
        processes = compare(engine(pool, policy, CHUNK, options), bare.step, options)
        replanned = compare(engine(pool, policy, CHUNK // 2, options), bare.step, options)
        without_policy = compare(engine(pool, RandomPolicy(), CHUNK, options), bare.step, options)
    with open_pool(ENV, options.tables) as pool:
        own_pool = compare(engine(pool, tiny_policy(pool), CHUNK, options), bare_tables(options.tables), options)
    print(
        json.dumps(
            {
                "name": "rollout_engine",
                "compared": f"environment steps per second of {options.processes} Tabletop processes: groups of "
                f"{options.attempts} attempts by the tiny policy, chunks whole, pictures kept, over bare random steps, "
                "wall time",
                "ratio": processes["ratio"],
                "target": 0.7,
                "processes": processes,
                "replanned": replanned,
                "without_policy": without_policy,
                "own_pool": own_pool,
            }
        )
    )


def compare(one: Side, other: Side, options: argparse.Namespace) -> dict[str, Any]:
    """Steps per second of both sides, in turns, and the medians of their ratios in wall and in CPU time."""
    one(1), other(1)  # compilation, and whatever else happens once
    rounds = [[timed(side, options.steps) for side in (one, other)] for _ in range(options.rounds)]
    wall, cpu = ([ours[kind] / theirs[kind] for ours, theirs in rounds] for kind in (0, 1))
    return {
        "ratio": round(statistics.median(wall), 2),
        "rounds": [round(ratio, 2) for ratio in wall],
        "cpu_ratio": round(statistics.median(cpu), 2),
        "steps_per_second": {
            name: round(statistics.median(row[side][0] for row in rounds))
            for side, name in enumerate(("engine", "bare"))
        },
        "cpu_ms_per_step": {
            name: round(statistics.median(1000 / row[side][1] for row in rounds), 2)
            for side, name in enumerate(("engine", "bare"))
        },
    }


def timed(side: Side, steps: int) -> tuple[float, float]:
    """Steps per second and per CPU second."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    done = side(steps)
    return done / (time.perf_counter() - wall), done / (cpu_seconds() - cpu)


def cpu_seconds() -> float:
    """CPU time of this process and of those it has started, all threads together."""
    children = [Path(f"/proc/{child.pid}/stat").read_text() for child in multiprocessing.active_children()]
    ticks = [int(number) for stat in children for number in stat.rsplit(")", 1)[1].split()[11:13]]
    return time.process_time() + sum(ticks) / TICKS


def tiny_policy(pool: EnvPool) -> "Policy":
    """The tiny π₀ with fresh parameters: how it acts does not matter to its cost."""
    # Not at the top: every environment's process imports this file too, and none of them needs a policy.
    import jax

    from pirl.data import PolicyIO
    from pirl.envs.policy import Pi0Policy
    from pirl.models import Tokenizer, create_model, get_model_config

    config = get_model_config("tiny")
    policy_io = PolicyIO(pool.description.robot, config, None, Tokenizer.for_model(config))
    policy = create_model(config, jax.random.key(0))
    return Pi0Policy(policy, policy_io, batch_size=-(-pool.size // pool.groups))


class RandomPolicy:
    """Random actions, cut from a list."""

    horizon = CHUNK

    def __init__(self) -> None:
        self._actions = random_actions(1000)

    def infer(self, observations: object, prompts: object, seeds: Sequence[int], steps: Sequence[int]) -> np.ndarray:
        """Chunks that differ between environments and from step to step."""
        first = (np.array(seeds) + np.array(steps)) % (len(self._actions) - self.horizon)
        return self._actions[first[:, None] + np.arange(self.horizon)]


def engine(pool: EnvPool, policy: "Policy", execute_steps: int, options: argparse.Namespace) -> Side:
    """The engine as training runs it, so many steps of each chunk."""
    from pirl.envs.groups import Context, roll_out_groups

    tasks = pool.description.tasks
    contexts = (Context(tasks[seed % len(tasks)], seed) for seed in itertools.count())

    def run(steps: int) -> int:
        budget = -(-steps // (options.attempts * pool.description.max_steps))
        result = roll_out_groups(
            pool,
            policy,
            contexts,
            attempts=options.attempts,
            groups=budget,
            budget=budget,
            execute_steps=execute_steps,
        )
        return result.env_steps

    return run


class BareProcesses:
    """An environment in each process that steps when it is told to; nothing else passes the pipes."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections = []
        for number in range(count):
            ours, theirs = context.Pipe()
            context.Process(target=step_alone, args=(theirs, number), daemon=True).start()
            self._connections.append(ours)

    def step(self, steps: int) -> int:
        """Step all of them, so that they have done this together."""
        each = -(-steps // len(self._connections))
        for connection in self._connections:
            connection.send(each)
        for connection in self._connections:
            connection.recv()
        return each * len(self._connections)

    def __enter__(self) -> "BareProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.send(None)


def step_alone(connection: Connection, number: int) -> None:
    """What a bare process does."""
    env = make_env(ENV)
    actions = random_actions(1000)
    env.reset(seed=number)
    while (steps := connection.recv()) is not None:
        for index in range(steps):
            _, _, terminated, truncated, _ = env.step(actions[index % len(actions)])
            if terminated or truncated:
                env.reset()
        connection.send(steps)


def bare_tables(count: int) -> Side:
    """Tables in step with random actions, without episodes around them."""
    scene, rows, rng = Scene(count, TableConfig(), 56, "pixels"), np.arange(count), np.random.default_rng(0)
    for row in rows:
        scene.reset(int(row), rng, None)
    actions = random_actions(1000)

    def run(steps: int) -> int:
        turns = -(-steps // count)
        for turn in range(turns):
            outcome = scene.step(rows, actions[(rows + turn) % len(actions)])
            for row in np.flatnonzero(outcome.success | outcome.failed | outcome.truncated):
                scene.reset(int(row), rng, None)
            scene.images(rows)
            scene.state(rows)
        return turns * count

    return run


def random_actions(count: int) -> np.ndarray:
    """Actions of Tabletop."""
    return np.random.default_rng(0).uniform(-1, 1, (count, 3)).astype(np.float32)


if __name__ == "__main__":
    main()
