"""Run directories as `pirl train` leaves them, made in a moment."""

import json
import socket

import numpy as np
import yaml

from pirl.envs.evaluation import wilson

# A process that cannot be: no kernel counts so far.
NOBODY, HOST = 2**22 + 1, socket.gethostname()
BEGUN = "2026-01-02 10:00:00,000 INFO demo in runs/mine\n"
ENDS = {
    "done": "2026-01-02 10:05:00,000 INFO done after 100 updates.\n2026-01-02 10:05:00,001 INFO policy: runs/mine/p\n",
    "stopped": "2026-01-02 10:05:00,000 INFO stopped at step 60; continue with --resume.\n",
    "failed": "2026-01-02 10:05:00,000 ERROR the disk is <full>\nTraceback (most recent call last):\n  File\n",
    "ended": "2026-01-02 10:05:00,000 INFO compiling the update …\n",
}


def write_lines(file, records, end=""):
    file.write_text("".join(json.dumps(record) + "\n" for record in records) + end)


def make_run(directory, records=None, *, timing=(), config=None, end="done", torn="", host=HOST, **metadata):
    """A run of BC, unless the config says otherwise; `end` is how its log ends."""
    directory.mkdir(parents=True)
    plain = {"name": "demo", "agent": {"learner": "bc", "lr": 0.1}, "steps": 100, "online": {"env_steps": 0}}
    plain |= {"evaluation": {"best_of_n": True}} | (config or {})
    (directory / "config.yaml").write_text(yaml.safe_dump(plain))
    about = {"begun": "2026-01-02T10:00:00+00:00", "command": f"pirl train demo --exp-name {directory.name}"}
    about |= {"versions": {"jax": "0.1"}, "resumed": [], "parameters": {"policy": 12345}, "config": plain, **metadata}
    (directory / "metadata.json").write_text(json.dumps(about))
    (directory / "log.txt").write_text(BEGUN + ENDS[end])
    (directory / "lock").write_text(f"process {NOBODY} on {host}\n")
    if records is not None:
        write_lines(directory / "metrics.jsonl", records, torn)
        write_lines(directory / "timing.jsonl", timing)
    return directory


def learning(steps=10, every=10):
    """What a learner logs."""
    noise = np.random.default_rng(0).random(steps)
    return [
        {
            "step": every * (index + 1),
            "loss": 2 / (index + 1),
            "bc/loss": 2 / (index + 1) + 0.1 * float(noise[index]),
            "grad_norm/policy": 1.0 + float(noise[index]),
            "lr/policy": 1e-3,
            "param_norm/policy": 40.0 + index,
            "memory/device": 10.5,
            "skipped": 0,
        }
        for index in range(steps)
    ]


def evaluation(step, successes, episodes=200):
    low, high = wilson(successes, episodes)
    rate = {"eval/success": successes / episodes, "eval/success_low": low, "eval/success_high": high}
    return {"step": step, **rate, "eval/episodes": episodes, "eval/lost": 0}


def rollouts(iterations=4):
    """What RIPT logs; the second iteration has nothing to learn from."""
    records, step, env_steps = [], 0, 0
    for number in range(iterations):
        env_steps += 1000
        groups = 0 if number == 1 else 8
        records.append(
            {
                "step": step,
                "rollout/contexts": 10 + number,
                "rollout/groups": groups,
                "rollout/success": 0.3 + 0.1 * number,
                "rollout/env_steps": env_steps,
                "curriculum/tried": 1.0,
            }
        )
        if groups:
            step, env_steps = step + 20, env_steps + 50
            records.append({"step": step, "loss": 1 / (1 + number), "skipped": 0})
            records.append(
                {
                    "step": step,
                    "rollout/drift": 0.01 * (1 + number),
                    "rollout/success_after": 0.5,
                    "rollout/env_steps": env_steps,
                }
            )
    return records


RIPT = {"agent": {"learner": "ript"}, "steps": 0, "rollout": {"iterations": 6}}
ROLLBACKS = [{"from": 60, "to": 20, "reason": "success has collapsed"}]
