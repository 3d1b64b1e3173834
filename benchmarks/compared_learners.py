"""RIPT's weightings, and RIPT against ACRLPD and filtered behavior cloning, from one start policy in the Tabletop.

All begin with the start policy of `pirl demo ript` and take as many environment steps as RIPT (positive) does; all act
from the same 200 starts, none of which was practised on. Every line is a user's command, which is printed; `--seeds`
repeats the training with other seeds. Writes a table (Markdown) and every result (JSON) into --out.
"""

import argparse
import concurrent.futures
import functools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pirl.envs.evaluation import wilson
from pirl.run_files import saved_steps

Arguments = tuple[object, ...]
Method = Callable[[], tuple[int, int]]
ENV = ("--env", "tabletop", "--env.observation", "state", "--env.max-steps", "50")
EVALUATED = ("--episodes", "200", "--envs", "64", "--execute-steps", "5", "--denoising-steps", "10")
RIPT = {
    "positive": (),
    "positive, no discount": ("--rollout.discount", "1.0"),
    "positive, all chunks": ("--agent.chunks", "all"),
    "positive, rollouts by Euler's method": ("--agent.rollout-solver", "euler"),
    "signed": ("--agent.weighting", "signed"),
    "exp": ("--agent.weighting", "exp"),
    "guidance": ("--agent.weighting", "guidance"),
}


@dataclass(frozen=True)
class Work:
    """Where everything is, and with what seed."""

    out: Path
    start: Path
    data: Path
    seed: int

    def run(self, name: str) -> Path:
        """The run directory of a method."""
        return self.out / f"{name.replace(' ', '_').replace(',', '').replace(chr(39), '')}-{self.seed}"


def main() -> None:
    """Train and measure; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", type=Path, default=Path("runs/demo_ript"), help="where `pirl demo ript` has been")
    parser.add_argument("--out", type=Path, default=Path("runs/learners"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", help="some of the methods")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[tuple[int, int]]] = {}
    for seed in arguments.seeds:
        work = Work(arguments.out, arguments.demo / "start", arguments.demo / "data", seed)
        for name, counts in measure_all(work, arguments.only).items():
            found.setdefault(name, []).append(counts)
    write_table(arguments.out, found)
    rate = {name: sum(won for won, _ in counts) / sum(all_ for _, all_ in counts) for name, counts in found.items()}
    cloned = rate.get("BC, own successes")
    print(
        json.dumps(
            {
                "name": "compared_learners",
                "ratio": round(rate["RIPT, positive"] / cloned, 3) if cloned else None,
                "target": 1.0,
                "compared": "success of RIPT (positive) against BC on the start policy's own successes, equal steps",
                "success": {name: round(value, 4) for name, value in rate.items()},
                "seeds": arguments.seeds,
            }
        )
    )


def measure_all(work: Work, only: Sequence[str] | None) -> dict[str, tuple[int, int]]:
    """Successes and episodes of every method, two at a time; RIPT first, as it says how many steps the others take."""
    found = {"start": evaluate(work, "start", work.start)}
    found["RIPT, positive"] = ript(work, "positive")
    steps = last(work.run("positive"), "rollout/env_steps")
    methods: dict[str, Method] = {f"RIPT, {name}": functools.partial(ript, work, name) for name in list(RIPT)[1:]}
    methods["BC, own successes"] = functools.partial(filtered_bc, work, steps)
    methods["ACRLPD"] = functools.partial(acrlpd, work, steps)
    chosen = {name: method for name, method in methods.items() if only is None or any(word in name for word in only)}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        results = {name: threads.submit(method) for name, method in chosen.items()}
        found |= {name: result.result() for name, result in results.items()}
    if "RIPT, guidance" in found:
        for weight, what in (("0", "under the plain prompt"), ("1", "under the positive prompt")):
            found[f"RIPT, guidance, {what}"] = ript(work, "guidance", ("--guidance", weight))
    return found


def ript(work: Work, name: str, evaluated: Sequence[str] = ()) -> tuple[int, int]:
    """RIPT in one of its ways, without evaluations on the way."""
    options: Arguments = ("--checkpoint", work.start, "--evaluation.every", 0, *seeds(work, "rollout"), *RIPT[name])
    train(work, "demo_ript", name, options)
    return evaluate(work, name + "".join(evaluated), work.run(name), evaluated)


def filtered_bc(work: Work, steps: int) -> tuple[int, int]:
    """Cloning the successes of the start policy, collected in as many steps, with as many updates as RIPT made."""
    own = work.out / f"own-{work.seed}"
    if not (own / "meta" / "info.json").exists():
        how = ("--execute-steps", "5", "--envs", "64", "--storage", "image", "--seed", work.seed + 1)
        pirl("collect", *ENV, "--policy", work.start, "--env-steps", steps, *how, "--out", own)
    updates = max(saved_steps(work.run("positive") / "checkpoints"))
    options: Arguments = ("--checkpoint", work.start, "--from-scratch", "false", "--data.norm-stats", "checkpoint")
    options += ("--data.repo-id", own, "--data.selection.success", "true", "--steps", updates, "--batch-size", 64)
    options += ("--agent.optimizer.peak-lr", "3e-4", "--agent.optimizer.schedule", "constant", "--seed", work.seed)
    train(work, "demo_ript_start", "filtered_bc", options)
    return evaluate(work, "filtered_bc", work.run("filtered_bc"))


def acrlpd(work: Work, steps: int) -> tuple[int, int]:
    """ACRLPD's online phase alone, which has the demonstrations as prior data, as it is meant to."""
    options: Arguments = (
        "--checkpoint",
        work.start,
        "--data.repo-id",
        work.data,
        "--data.norm-stats",
        "checkpoint",
        "--steps",
        0,
    )
    options += ("--model.max-token-len", 16, "--env.max-steps", 50, "--evaluation.every", 0, *seeds(work, "online"))
    # As many updates as it has in the demo, spread over the steps.
    options += ("--online.env-steps", steps, "--online.utd-ratio", round(2_500 / steps, 5), "--online.capacity", steps)
    train(work, "demo_state", "acrlpd", options)
    return evaluate(work, "acrlpd", work.run("acrlpd"))


def seeds(work: Work, phase: str) -> Arguments:
    """The training seed, and that of the initial states to practise on."""
    return ("--seed", work.seed, f"--{phase}.seed", work.seed + 1)


def train(work: Work, preset: str, name: str, options: Sequence[object]) -> None:
    """Train into a run directory, unless it was done before."""
    run = work.run(name)
    if not (run / "done").exists():
        again = ("--resume",) if (run / "lock").exists() else ()
        pirl("train", preset, "--exp-name", run.name, "--runs-dir", run.parent, *options, *again)
        (run / "done").touch()


def evaluate(work: Work, name: str, policy: Path, options: Sequence[str] = ()) -> tuple[int, int]:
    """Successes, and of how many episodes."""
    file = work.out / f"eval-{work.run(name).name}.json"
    if not file.exists():
        pirl("eval", policy, *ENV, *EVALUATED, *options, "--json", file)
    summary = json.loads(file.read_text())["summary"]
    return summary["successes"], summary["finished"]


def last(run: Path, metric: str) -> int:
    """The last value of a metric."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return int([record[metric] for record in records if metric in record][-1])


def write_table(out: Path, found: dict[str, list[tuple[int, int]]]) -> None:
    """One row for each method: all seeds together with the interval of all episodes, and each by itself."""
    lines = ["| | success | 95 % interval | episodes | by seed |", "|---|---|---|---|---|"]
    for name, counts in found.items():
        won, episodes = (sum(column) for column in zip(*counts, strict=True))
        low, high = wilson(won, episodes)
        each = ", ".join(f"{100 * one / of:.1f}" for one, of in counts)
        spread = f" (deviation {100 * statistics.stdev(one / of for one, of in counts):.1f})" if len(counts) > 1 else ""
        lines.append(
            f"| {name} | {100 * won / episodes:.1f} % | {100 * low:.1f}–{100 * high:.1f} | {episodes} | {each}{spread} |"
        )
    (out / "table.md").write_text("\n".join(lines) + "\n")
    (out / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(lines))


def pirl(*words: object) -> None:
    """A command of pirl, which has to succeed."""
    command = [str(word) for word in words]
    print("pirl", *command, file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "pirl.cli.main", *command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"pirl {' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    main()
