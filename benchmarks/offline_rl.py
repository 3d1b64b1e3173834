"""The scoreboard: offline ACRLPD against clones of the same demonstrations, by true state and from pixels.

Four kinds of demonstrations in Tabletop (DATASETS), each seen by true state and by two cameras. Every policy is made by
commands that a user could type, which are printed, and measured on the same 200 held-out starts. The controls say which
link is weak: chunks weighted by the advantages of others, critics without cameras, critics that are told the true
positions, and, instead of critics, a simulator that tries every chunk. Three rows extract the policy in another way. A
finished measurement is kept (--results) and not repeated, so the benchmark can be stopped at any time and continued, on
another machine too; `--redo POLICY` forgets some. The last line is one JSON object.
"""

import argparse
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pirl.agents.config import ACRLPDConfig
from pirl.config import get_config
from pirl.demo.plans import ACRLPD_EXPERT, CLONE_UPDATES
from pirl.envs.evaluation import wilson
from pirl.envs.experts import ExpertConfig
from pirl.report.replay import newest_evaluation, read_evaluation

DATASETS = {
    "noisy": ACRLPD_EXPERT,  # the demo's: good intentions, a trembling hand
    "mixed": ExpertConfig(aim_bias=0.025, noise=0.2, delay=5, give_up=0.1, flawed=0.7),  # good or bad as a whole
    "off": ExpertConfig(aim_bias=0.04, noise=0.2),  # all aim beside the target; few succeed
    "slow": ExpertConfig(noise=0.3, delay=15, detour=20),  # all succeed, late: steps to success count
}
OBSERVATIONS = ("state", "pixels")
PRESETS = {"state": ("demo_state_bc", "demo_state"), "pixels": ("demo_bc", "demo")}
CLONES = ("bc", "bc_more", "bc_successes", "bc_successes_more", "bc_only_successes")
CONTROLS = ("random_weights", "blind_critic", "perfect_critic", "perfect_choice")
# Other ways from the critics to the policy; and a policy that goes on seeing as the clone does.
OTHERS = {
    "awr": ("--agent.actor-mode", "awr"),
    "condition": ("--agent.actor-mode", "condition"),
    "frozen": ("--agent.freeze", "vision,language"),
}
POLICIES = (*CLONES, "acrlpd", "acrlpd_best_of_n", *OTHERS, "frozen_best_of_n", *CONTROLS)
PIXELS_ONLY = ("condition", "frozen", "frozen_best_of_n", "blind_critic", "perfect_critic")
# The run that each starts from, BC on successes if not said: BC first, then its successes only.
STARTS = {"bc": None, "bc_only_successes": None, "bc_more": "bc", "bc_successes": "bc"}
# Updates of a clone: with more of them, it has made as many in all as ACRLPD's policy; from successes only, as many as
# BC on successes.
LEARNER = get_config("demo")
assert isinstance(LEARNER.agent, ACRLPDConfig)
POLICY_UPDATES = LEARNER.agent.policy_updates(LEARNER.steps)
UPDATES = {
    "bc_more": CLONE_UPDATES + POLICY_UPDATES,
    "bc_successes": CLONE_UPDATES,
    "bc_successes_more": POLICY_UPDATES,
    "bc_only_successes": CLONE_UPDATES,
}
# What is trained, by the policy that is measured.
RUNS = {"acrlpd_best_of_n": "acrlpd", "frozen_best_of_n": "frozen", "perfect_choice": "acrlpd"}
SAMPLES = 8
HELD_OUT = 0  # seed of the starts
SEEN_STATES = 3  # dimensions of the state beside the cameras: the gripper's

Arguments = tuple[object, ...]


@dataclass(frozen=True)
class Cell:
    """Demonstrations, how they are seen, and a training seed."""

    dataset: str
    observation: str
    seed: int
    out: Path
    quick: bool

    @property
    def env(self) -> Arguments:
        """The environment as options of a command."""
        return ("--env", "tabletop", "--env.observation", self.observation)

    @property
    def data(self) -> Path:
        """The demonstrations, which all seeds share."""
        return self.out / f"{self.dataset}-{self.observation}" / "data"

    @property
    def states(self) -> Path:
        """The same demonstrations by true state."""
        return replace(self, observation="state").data

    def run(self, policy: str) -> Path:
        """The run that a policy comes from."""
        return self.data.parent / f"{RUNS.get(policy, policy)}-{self.seed}"


def main() -> None:
    """Measure what is missing, two at a time, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=list(DATASETS))
    parser.add_argument("--observations", nargs="+", choices=OBSERVATIONS, default=list(OBSERVATIONS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--redo", nargs="*", choices=POLICIES, default=[], help="measure these again")
    parser.add_argument("--out", type=Path, default=Path("runs/offline_rl"), help="demonstrations and runs")
    parser.add_argument("--results", type=Path, help="default: docs/results/offline_rl.json, with --quick in --out")
    parser.add_argument("--jobs", type=int, default=2, help="processes at the same time, of one thread each")
    parser.add_argument("--quick", action="store_true", help="a few updates and episodes: whether it works")
    parser.add_argument("--control", choices=CONTROLS, help=argparse.SUPPRESS)  # what `train` calls itself with
    parser.add_argument("--states", type=Path, help=argparse.SUPPRESS)
    options, command = parser.parse_known_args()
    if options.control:
        sys.exit(train_control(options.control, options.states, command))
    if command:
        parser.error(f"unknown arguments: {' '.join(command)}")
    results = options.results or (
        options.out / "results.json" if options.quick else Path("docs/results/offline_rl.json")
    )
    board = Board(results, options.redo)
    cells = [
        Cell(dataset, observation, seed, options.out, options.quick)
        for seed in options.seeds
        for observation in options.observations
        for dataset in options.datasets
    ]
    collecting = {cell.data: threading.Lock() for cell in cells}
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as threads:
        tasks = [threads.submit(measure_cell, cell, options.policies, board, collecting[cell.data]) for cell in cells]
        for task in concurrent.futures.as_completed(tasks):
            task.result()
    print(json.dumps(board.verdict()))


class Board:
    """What has been measured: a row for each seed, in a file that is whole at any time, and the rows of all seeds."""

    def __init__(self, file: Path, redo: Sequence[str]):
        self._file, self._lock = file, threading.Lock()
        self._seeds: list[dict[str, Any]] = []
        if file.exists():
            self._seeds = json.loads(file.read_text(encoding="utf-8"))["seeds"]
        self._seeds = [row for row in self._seeds if row["policy"] not in redo]

    def has(self, cell: Cell, policy: str) -> bool:
        """Whether it has been measured."""
        with self._lock:
            return any(
                (row["dataset"], row["observation"], row["seed"], row["policy"])
                == (cell.dataset, cell.observation, cell.seed, policy)
                for row in self._seeds
            )

    def add(self, cell: Cell, policy: str, **measured: Any) -> None:
        """Keep a measurement."""
        row = dict(dataset=cell.dataset, observation=cell.observation, seed=cell.seed, policy=policy, **measured)
        print(json.dumps(row), flush=True)
        with self._lock:
            self._seeds.append(row)
            content = {"rows": self.rows(), "seeds": self._seeds}
            self._file.parent.mkdir(parents=True, exist_ok=True)
            new = self._file.with_suffix(".new")
            lines = [
                f' "{name}": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]" for name, rows in content.items()
            ]
            new.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
            new.replace(self._file)

    def rows(self) -> list[dict[str, Any]]:
        """Over all seeds: success with a 95 % interval over all episodes, mean steps to success, CPU time of one seed."""
        rows = []
        for dataset in DATASETS:
            for observation in OBSERVATIONS:
                for policy in POLICIES:
                    found = [
                        row
                        for row in self._seeds
                        if (row["dataset"], row["observation"], row["policy"]) == (dataset, observation, policy)
                    ]
                    if found:
                        rows.append(_pool(dataset, observation, policy, found))
        return rows

    def verdict(self) -> dict[str, Any]:
        """Of the cells where ACRLPD and all clones are measured: how many it wins, and how many it loses."""
        by_cell: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
        for row in self.rows():
            by_cell.setdefault((row["dataset"], row["observation"]), {})[row["policy"]] = row
        whole = {cell: rows for cell, rows in by_cell.items() if {*CLONES, "acrlpd"} <= set(rows)}
        wins, losses = [], []
        for (dataset, observation), rows in whole.items():
            ours, best = rows["acrlpd"], max((rows[clone] for clone in CLONES), key=lambda row: row["success"])
            cell = f"{dataset} {observation}"
            if ours["success"] < best["success"] - 0.03:
                losses.append(cell)
            elif ours["steps_high"] < best["steps_low"] if dataset == "slow" else ours["low"] > best["high"]:
                wins.append(cell)
        return {
            "name": "offline_rl",
            "ratio": round(len(wins) / 5, 3) if not losses else 0.0,
            "target": 1.0,
            "compared": "cells won against the best clone, of the five wanted; 0 if a cell is lost by over 3 points",
            "wins": wins,
            "losses": losses,
            "cells": len(whole),
        }


def _pool(dataset: str, observation: str, policy: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    episodes, successes = (sum(row[name] for row in found) for name in ("episodes", "successes"))
    low, high = wilson(successes, episodes)
    lengths = np.concatenate([row["lengths"] for row in found])
    margin = 1.96 * lengths.std() / max(1, len(lengths)) ** 0.5 if len(lengths) else 0.0
    mean = float(lengths.mean()) if len(lengths) else None
    return {
        "dataset": dataset,
        "observation": observation,
        "policy": policy,
        "success": round(successes / episodes, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "episodes": episodes,
        "seeds": sorted(row["seed"] for row in found),
        "by_seed": [round(row["successes"] / row["episodes"], 4) for row in found],
        "steps": None if mean is None else round(mean, 1),
        "steps_low": None if mean is None else round(mean - margin, 1),
        "steps_high": None if mean is None else round(mean + margin, 1),
        "cpu_seconds": round(sum(row["cpu_seconds"] for row in found) / len(found)),
    }


def measure_cell(cell: Cell, policies: Sequence[str], board: Board, collecting: threading.Lock) -> None:
    """Whatever is missing of a cell, in an order in which later policies find what they need."""
    missing = [policy for policy in policies if not board.has(cell, policy)]
    if cell.observation == "state":  # where there are no cameras, and no prompt
        missing = [policy for policy in missing if policy not in PIXELS_ONLY]
    if not missing:
        return
    with collecting:
        for needed in (cell, replace(cell, observation="state")):
            if not (needed.data / "meta" / "info.json").exists():
                collect(needed)
    for policy in missing:
        seconds = train(cell, policy)
        if policy == "perfect_choice":
            lengths, episodes = choose_perfectly(cell)
        else:
            lengths, episodes = evaluate(cell, policy)
        board.add(
            cell, policy, successes=len(lengths), episodes=episodes, lengths=lengths, cpu_seconds=round(seconds, 1)
        )


def collect(cell: Cell) -> None:
    """800 demonstrations; those by state and those by pixels are the same episodes."""
    shutil.rmtree(cell.data, ignore_errors=True)
    flaws = vars(DATASETS[cell.dataset]).items()
    expert = [part for name, value in flaws for part in (f"--expert.{name.replace('_', '-')}", f"{value:g}")]
    episodes = 12 if cell.quick else 800
    pirl(
        "collect",
        *cell.env,
        "--policy",
        "expert",
        "--episodes",
        episodes,
        *expert,
        "--storage",
        "image",
        "--out",
        cell.data,
    )


def train(cell: Cell, policy: str) -> float:
    """Train what a policy comes from, unless it was done before; CPU seconds of that run."""
    clone, learner = PRESETS[cell.observation]
    run = cell.run(policy)
    done = run / "cpu_seconds"
    if done.exists():
        return float(done.read_text())
    common: Arguments = (
        "--exp-name",
        run.name,
        "--runs-dir",
        run.parent,
        "--data.repo-id",
        cell.data,
        "--seed",
        cell.seed,
    )
    common += ("--debug",) if cell.quick else ()
    start = STARTS.get(policy, "bc_successes")
    if start is not None:
        train(cell, start)
        common += ("--checkpoint", cell.run(start), "--from-scratch", "false", "--data.norm-stats", "checkpoint")
    control: Arguments = ()
    if policy in CLONES:
        arguments: Arguments = ("train", clone, *common)
        if updates := UPDATES.get(policy):
            if start is None:
                updates += get_config(clone).steps
            else:  # at half of BC's learning rate
                arguments += ("--agent.optimizer.peak-lr", "1e-3")
            arguments += () if cell.quick else ("--steps", updates, "--agent.optimizer.decay-steps", updates)
        arguments += ("--data.selection.success", "true") if "successes" in policy else ()
    else:
        arguments = ("train", learner, *common, "--online.env-steps", 0)
        arguments += OTHERS.get(RUNS.get(policy, policy), ())
        control = ("--control", policy, "--states", cell.states) if policy in CONTROLS and policy not in RUNS else ()
    resume = ("--resume",) if (run / "lock").exists() else ()
    seconds = pirl(*arguments, *resume, control=control)
    done.write_text(f"{seconds:.1f}\n")
    return seconds


def evaluate(cell: Cell, policy: str) -> tuple[list[int], int]:
    """Steps of the episodes that succeed, and the number of episodes."""
    if policy.endswith("best_of_n"):  # as the run measured itself, at its end
        file = newest_evaluation(cell.run(policy))
        assert file is not None
    else:
        file = cell.run(policy) / "scoreboard.json"
        episodes = 8 if cell.quick else 200
        how = ("--episodes", episodes, "--seed", HELD_OUT, "--execute-steps", 5, "--envs", 64, "--denoising-steps", 10)
        pirl("eval", cell.run(policy), *cell.env, *how, "--json", file)
    results = read_evaluation(file).results
    return [result.length for result in results if result.success], len(results)


def pirl(*arguments: object, control: Arguments = ()) -> float:
    """Run a command on one thread and return its CPU seconds; control commands go through this file."""
    words = [str(argument) for argument in arguments]
    print("pirl", *words, *(("# with", *control) if control else ()), file=sys.stderr, flush=True)
    program = [sys.executable, __file__, *map(str, control)] if control else [sys.executable, "-m", "pirl.cli.main"]
    threads = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    environment = {**os.environ, "XLA_FLAGS": threads, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*program, *words], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"pirl {' '.join(words)} failed with {code}:\n{said.decode()[-3000:]}")
    return used.ru_utime + used.ru_stime


# --- controls --------------------------------------------------------------------------------------------------------


def train_control(control: str, states: Path, command: list[str]) -> int:
    """A pirl command with a learner that lacks something, or knows more than it could."""
    import dataclasses

    import jax

    from pirl.agents import acrlpd
    from pirl.cli.main import main as pirl_main

    if control == "random_weights":

        def advantages(self: Any, seen: Any, chunks: Any) -> Any:
            found, baseline = original(self, seen, chunks)
            order = jax.random.permutation(jax.random.fold_in(jax.random.key(0), self.step), found.size)
            return found.reshape(-1)[order].reshape(found.shape), baseline

        original = acrlpd.ACRLPDAgent.advantages
        acrlpd.ACRLPDAgent.advantages = advantages  # type: ignore[assignment, method-assign]
    elif control == "perfect_critic":
        tell_true_states(states)
    else:
        ensemble = acrlpd.CriticEnsemble

        def blind(config: Any, model: Any, *sizes: Any) -> Any:
            return ensemble(config, dataclasses.replace(model, cameras=(), max_token_len=0), *sizes)

        acrlpd.CriticEnsemble = blind  # type: ignore[assignment, misc]
    return pirl_main(command)


def tell_true_states(states: Path) -> None:
    """Put the true positions behind the gripper's state in every batch of pixels, where critics see them; the policy,
    which has to do without when it acts, sees zeros in their place."""
    from pirl.data import open_dataset, sampler
    from pirl.models.pi0 import Pi0

    true = open_dataset(states).columns(["observation.state"])["observation.state"]
    hidden = slice(SEEN_STATES, true.shape[1])
    true = (true - true.mean(axis=0)) / true.std(axis=0)
    cut, embed = sampler.gather_chunks, Pi0.embed_suffix

    def gather_chunks(trajectories: Any, rows: Any, shape: Any, policy_io: Any) -> Any:
        batch = cut(trajectories, rows, shape, policy_io)
        ends = trajectories.ends[trajectories.episode_of(rows)]
        for observation, at in (
            (batch.observations, rows),
            (batch.next_observations, np.minimum(rows + shape.horizon, ends - 1)),
        ):
            observation.state[:, hidden] = true[at, hidden]  # type: ignore[union-attr]
        return batch

    def embed_suffix(self: Any, state: Any, x_t: Any, time: Any) -> Any:
        return embed(self, state.at[:, hidden].set(0.0), x_t, time)

    sampler.gather_chunks, Pi0.embed_suffix = gather_chunks, embed_suffix  # type: ignore[assignment,method-assign]


def choose_perfectly(cell: Cell) -> tuple[list[int], int]:
    """The exported policy, each of whose chunks is the best of eight by trial: the one after which a flawless expert
    would need the fewest steps. Steps of the episodes that succeed, and the number of episodes."""
    import jax

    from pirl.envs.policy import load_trained_policy
    from pirl.envs.pool import open_pool
    from pirl.envs.registry import EnvConfig
    from pirl.envs.rollout import make_starts
    from pirl.envs.tabletop.world import Tables, _best_actions, step

    def repeat(tables: Tables, times: int) -> Tables:
        return Tables(**{name: np.repeat(value, times, axis=0) for name, value in tables.arrays().items()})

    def cost(tables: Tables, config: Any, chunks: np.ndarray) -> np.ndarray:
        """Steps to success of each table, first by its chunk, then by the expert; many, if it fails."""
        steps = np.full(len(tables), 1_000)
        going = np.ones(len(tables), bool)
        for moment in range(config.max_steps):
            nothing = np.zeros((len(tables), 2))
            actions = chunks[:, moment] if moment < chunks.shape[1] else _best_actions(tables, nothing, nothing)
            outcome = step(tables, config, actions.astype(np.float32))
            steps = np.where(going & outcome.success, moment, steps)
            going &= ~outcome.success & ~outcome.failed
        return steps

    episodes, executed = (8 if cell.quick else 200), 5
    with open_pool(EnvConfig("tabletop", options={"observation": cell.observation}), episodes) as pool:
        planner = load_trained_policy(cell.run("acrlpd"), pool.description, batch_size=episodes, num_steps=10)
        for slot, start in enumerate(make_starts(pool.description, episodes, HELD_OUT)):
            pool.start(slot, start)
        begun = pool.wait(range(episodes))
        scene, going, lengths = pool._scene, list(range(episodes)), []  # type: ignore[attr-defined]
        seen = {slot: begun[slot].observation for slot in going}  # type: ignore[union-attr]
        prompts = {slot: begun[slot].prompt for slot in going}  # type: ignore[union-attr]
        taken = 0
        while going:
            observations = {name: np.stack([seen[slot][name] for slot in going]) for name in seen[going[0]]}
            texts = [prompts[slot] for slot in going]
            samples = np.stack(
                [
                    planner.infer(observations, texts, [1_000 * number + slot for slot in going], [taken] * len(going))
                    for number in range(SAMPLES)
                ],
                axis=1,
            )[:, :, :executed]
            tables = repeat(scene.tables.rows(np.array(going)), SAMPLES)
            costs = cost(tables, scene.config, samples.reshape(-1, *samples.shape[2:]))
            best = costs.reshape(len(going), SAMPLES).argmin(axis=1)
            for row, slot in enumerate(going):
                pool.execute(slot, samples[row, best[row]], images="last")
            segments, still = pool.wait(going), []
            for slot in going:
                segment: Any = segments[slot]
                if segment.success:
                    lengths.append(taken + len(segment.actions))
                elif not segment.terminated and not segment.truncated:
                    still.append(slot)
                    seen[slot] = {name: values[-1] for name, values in segment.observations.items()}
            going, taken = still, taken + executed
    jax.clear_caches()
    return lengths, episodes


if __name__ == "__main__":
    main()
