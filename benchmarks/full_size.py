"""Full-size π₀ in bfloat16 on a CPU machine: create, save as an OpenPI checkpoint, load, sample one chunk.

Each stage runs in a process of its own, so that its peak memory is its own; `ratio` compares the peak of loading with
the size of the parameters: 1 would be no byte more than the model itself. Run with `make bench-full-size`.
"""

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pirl.interop import load_policy, open_checkpoint, save_policy
from pirl.models import Observation, create_model, get_model_config, get_parameters


def main() -> None:
    """Run the stages one after the other and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pi0_base", help="preset to build (default: pi0_base)")
    parser.add_argument("--directory", type=Path, help="where to put the checkpoint (default: a temporary place)")
    parser.add_argument("--stage", choices=list(STAGES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        print(json.dumps(STAGES[options.stage](options.model, options.directory) | {"peak_gib": peak_gib()}))
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary) / "checkpoint"
        results = {}
        for stage in STAGES:
            command = [sys.executable, __file__, "--stage", stage, "--model", options.model, "--directory", directory]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            results[stage] = json.loads(output.splitlines()[-1])
            print(f"{stage:>12}: {results[stage]}", flush=True)
    size = results["load"]["parameters_gib"]
    summary = {
        "name": "full_size",
        "model": options.model,
        "compared": "peak memory of loading (GiB) with the size of the bfloat16 parameters (GiB)",
        "ratio": round(results["load"]["peak_gib"] / size, 3),
        "target": 1.5,
        "stages": results,
    }
    print(json.dumps(summary))


def create_and_save(model: str, directory: Path) -> dict[str, float]:
    """Random parameters in bfloat16, written as a checkpoint."""
    config = dataclasses.replace(get_model_config(model), param_dtype="bfloat16")
    start = time.perf_counter()
    policy = jax.block_until_ready(create_model(config, jax.random.key(0)))
    created = time.perf_counter()
    peak = peak_gib()
    save_policy(directory, policy)
    return {
        "create_seconds": round(created - start, 1),
        "create_peak_gib": peak,
        "save_seconds": round(time.perf_counter() - created, 1),
    }


def load(model: str, directory: Path) -> dict[str, float]:
    """Read the checkpoint back; nothing else."""
    start = time.perf_counter()
    policy = jax.block_until_ready(load_policy(directory))
    seconds = time.perf_counter() - start
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in get_parameters(policy).values())
    return {"load_seconds": round(seconds, 1), "parameters_gib": round(size / 2**30, 2)}


def sample(model: str, directory: Path) -> dict[str, float]:
    """Load, and sample one chunk from one observation, twice: with and without compilation."""
    assert open_checkpoint(directory).config is not None
    policy = load_policy(directory)
    config = policy.config
    random = np.random.default_rng(0)
    observation = Observation.from_dict(
        {
            "image": {name: random.integers(0, 256, (1, 224, 224, 3), np.uint8) for name in config.cameras},
            "state": random.normal(size=(1, config.action_dim)),
            "tokenized_prompt": random.integers(0, 1000, (1, config.max_token_len)),
            "tokenized_prompt_mask": np.ones((1, config.max_token_len), bool),
        },
        config,
    )
    run = jax.jit(lambda policy, observation, key: policy.sample(policy.encode(observation), key))
    times = []
    for seed in range(2):
        start = time.perf_counter()
        actions = jax.block_until_ready(run(policy, observation, jax.random.key(seed)))
        times.append(time.perf_counter() - start)
    assert actions.shape == (1, 1, config.action_horizon, config.action_dim)
    assert bool(jnp.all(jnp.isfinite(actions)))
    return {"first_chunk_seconds": round(times[0], 1), "next_chunk_seconds": round(times[1], 1)}


def peak_gib() -> float:
    """The most memory this process has held."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)


STAGES: dict[str, Callable[[str, Path], dict[str, float]]] = {
    "create_save": create_and_save,
    "load": load,
    "sample": sample,
}

if __name__ == "__main__":
    main()
