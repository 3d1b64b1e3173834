"""Whether the tabletop can be learned: BC of the tiny π₀ from clean demonstrations, by true state and from pixels.

The gate before anything is asked of RL: at least 90 % success after about five CPU minutes of training. The way is a
user's: collect a LeRobot dataset, load it through the data layer, train, evaluate. The third variant has demonstrations
of mixed quality; BC is meant to land between 30 and 60 % there, so that there is something left to learn.
"""

import argparse
import functools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from pirl.data import (
    ChunkBatch,
    ChunkIndexSampler,
    ChunkSampler,
    ChunkShape,
    DatasetSource,
    PolicyIO,
    dataset_norm_stats,
    load_trajectories,
    open_dataset,
)
from pirl.envs import EnvConfig, ExpertConfig
from pirl.envs.collect import DatasetFormat, collect_dataset
from pirl.envs.evaluation import evaluate
from pirl.envs.policy import Pi0Policy
from pirl.envs.pool import EnvPool, open_pool
from pirl.envs.rollout import make_starts
from pirl.models import Pi0, Tokenizer, create_model, get_model_config

SEEDS_OF_DATA, SEEDS_OF_EVALUATION = 1, 0
TARGET = 0.9
IMAGES = DatasetFormat(storage="image")
MIXED = ExpertConfig(aim_bias=0.025, noise=0.2, delay=5, give_up=0.1, flawed=0.7)


def main() -> None:
    """Run the variants that were asked for; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", nargs="+", default=["state", "pixels", "mixed"])
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--updates", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--evaluated", type=int, default=200)
    arguments = parser.parse_args()
    results = {variant: run(variant, arguments) for variant in arguments.variants}
    clean = [result["success"] for variant, result in results.items() if variant != "mixed"]
    print(
        json.dumps(
            {
                "name": "tabletop_gate",
                "ratio": round(min(clean, default=0.0) / TARGET, 3),
                "target": 1.0,
                "compared": f"success of BC from clean demonstrations (the worse variant) against {TARGET:.0%}",
                "variants": results,
            }
        )
    )


def run(variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Collect, train, evaluate."""
    options = {"observation": "state"} if variant == "state" else {}
    expert = MIXED if variant == "mixed" else ExpertConfig(noise=0.2)
    with tempfile.TemporaryDirectory() as directory, open_pool(EnvConfig("tabletop", options=options), 64) as pool:
        root = Path(directory) / "data"
        starts = make_starts(pool.description, arguments.episodes, SEEDS_OF_DATA)
        log = collect_dataset(pool, expert, starts, root, execute_steps=10, settings={}, dataset_format=IMAGES)
        demonstrated = float(np.mean([episode.success for episode in log.episodes]))
        before = time.process_time()
        planner = train(root, pool, arguments)
        cpu_minutes = (time.process_time() - before) / 60
        starts = make_starts(pool.description, arguments.evaluated, SEEDS_OF_EVALUATION)
        summary = evaluate(pool, planner, starts, execute_steps=5).summary()
    print(f"{variant}: data {demonstrated:.0%}, BC {summary}, {cpu_minutes:.1f} CPU minutes of training", flush=True)
    return {
        "data": demonstrated,
        "success": summary.rate,
        "interval": summary.interval,
        "episodes": summary.finished,
        "cpu_minutes": round(cpu_minutes, 2),
    }


def train(root: Path, pool: EnvPool, arguments: argparse.Namespace) -> Pi0Policy:
    """Behavior cloning on all chunks of a dataset, the EMA of the parameters being the policy."""
    robot = pool.description.robot
    config = get_model_config("tiny" if robot.cameras else "tiny_state")
    dataset = open_dataset(root)
    trajectories = load_trajectories(dataset, robot, config, progress=False)
    statistics = dataset_norm_stats(dataset, robot, config.action_horizon)
    policy_io = PolicyIO(robot, config, statistics, Tokenizer.for_model(config) if config.max_token_len else None)
    source = DatasetSource(trajectories, ChunkIndexSampler(trajectories, seed=0), policy_io)
    shape = ChunkShape(horizon=config.action_horizon, actions=config.action_horizon)
    sampler = ChunkSampler([source], batch_size=arguments.batch, shape=shape)

    definition, parameters = nnx.split(create_model(config, jax.random.key(0)))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, 100, arguments.updates, 1e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=1e-4))

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: Any, batch: ChunkBatch, rng: jax.Array) -> tuple[Any, jax.Array]:
        parameters, average, moments = state

        def loss(parameters: Any) -> jax.Array:
            policy: Pi0 = nnx.merge(definition, parameters)
            errors = policy.flow_loss(
                policy.encode(batch.observations),
                batch.actions,
                rng,
                valid=batch.valid,
                real_action_dim=robot.action_dim,
            )
            return jnp.sum(errors) / jnp.sum(batch.valid)

        value, gradient = jax.value_and_grad(loss)(parameters)
        change, moments = optimizer.update(gradient, moments, parameters)
        parameters = optax.apply_updates(parameters, change)
        average = jax.tree.map(lambda old, new: 0.99 * old + 0.01 * new, average, parameters)
        return (parameters, average, moments), value

    state = (parameters, jax.tree.map(jnp.copy, parameters), optimizer.init(parameters))
    losses = []
    for step in range(arguments.updates):
        state, loss = update(state, sampler.batch(step), jax.random.key(step))
        losses.append(loss)
        if (step + 1) % 500 == 0:
            print(f"  {step + 1} updates, loss {np.mean(jax.device_get(losses[-500:])):.3f}", flush=True)
    return Pi0Policy(nnx.merge(definition, state[1]), policy_io, batch_size=pool.size)


if __name__ == "__main__":
    main()
