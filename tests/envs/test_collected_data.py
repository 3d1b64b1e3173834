"""What is collected in an environment is data like any other: it passes the checks and trains a policy."""

import dataclasses
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pirl.data import (
    ChunkBatch,
    ChunkIndexSampler,
    ChunkSampler,
    ChunkShape,
    DatasetSource,
    PolicyIO,
    Trajectories,
    check_dataset,
    dataset_norm_stats,
    load_trajectories,
    open_dataset,
)
from pirl.envs import EnvConfig, ExpertConfig
from pirl.envs.collect import collect_dataset
from pirl.envs.pool import open_pool
from pirl.envs.rollout import make_starts
from pirl.models import Pi0, Pi0Config, Tokenizer, create_model, get_model_config

FLAWED = ExpertConfig(aim_bias=0.02, give_up=0.4)


def collected(env: EnvConfig, root: Path, episodes: int) -> list[bool]:
    """Collect with a flawed expert; the outcomes."""
    with open_pool(env, 2) as pool:
        starts = make_starts(pool.description, episodes, seed=3)
        log = collect_dataset(pool, FLAWED, starts, root, execute_steps=10, settings={})
    return [episode.success for episode in log.episodes]


def first_batch(root: Path, env: EnvConfig, config: Pi0Config) -> tuple[Trajectories, ChunkBatch]:
    """The data layer, from files to a batch."""
    with open_pool(env, 1) as pool:
        robot = pool.description.robot
    dataset, problems = check_dataset(str(root))
    assert dataset is not None
    assert not [problem for problem in problems if problem.severity == "problem"]
    dataset = open_dataset(root)
    trajectories = load_trajectories(dataset, robot, config, progress=False)
    policy_io = PolicyIO(
        robot, config, dataset_norm_stats(dataset, robot, config.action_horizon), Tokenizer.for_model(config)
    )
    source = DatasetSource(trajectories, ChunkIndexSampler(trajectories, seed=0), policy_io)
    shape = ChunkShape(horizon=5, actions=config.action_horizon)
    return trajectories, ChunkSampler([source], batch_size=8, shape=shape).batch(0)


def gradient_norm(config: Pi0Config, batch: ChunkBatch) -> float:
    """Of the flow loss on a batch."""
    definition, parameters = nnx.split(create_model(config, jax.random.key(0)))

    def loss(parameters: nnx.State) -> jax.Array:
        policy: Pi0 = nnx.merge(definition, parameters)
        prefix = policy.encode(batch.observations)
        return jnp.mean(policy.flow_loss(prefix, batch.actions, jax.random.key(1), valid=batch.valid))

    gradients = jax.jit(jax.grad(loss))(parameters)
    return float(np.sqrt(sum(float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(gradients))))


@pytest.mark.slow  # the trainer is tested on collected data all the time
def test_a_dataset_collected_in_tabletop_trains_a_batch(tmp_path):
    env, config = EnvConfig("tabletop"), get_model_config("tiny")
    outcomes = collected(env, tmp_path / "data", 8)
    assert 0 < sum(outcomes) < 8  # both kinds, or the test would not see the difference

    trajectories, batch = first_batch(tmp_path / "data", env, config)

    assert (trajectories.success == 1).tolist() == outcomes
    ends = trajectories.ends - 1
    # A success ends the task and pays 1; giving up runs out of time, which is no end of the task.
    for episode, success in enumerate(outcomes):
        assert trajectories.rewards[trajectories.starts[episode] : ends[episode] + 1].sum() == float(success)
        timed_out = ends[episode] + 1 - trajectories.starts[episode] == 80
        assert bool(trajectories.terminals[ends[episode]]) is (success or not timed_out)
    assert 0 < gradient_norm(config, batch) < np.inf


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gym_aloha") is None, reason="gym-aloha is not installed")
def test_a_dataset_collected_in_aloha_trains_a_batch(tmp_path):
    env = EnvConfig("aloha", options={"height": 120, "width": 160})
    config = dataclasses.replace(get_model_config("tiny"), action_dim=14)
    outcomes = collected(env, tmp_path / "data", 4)

    trajectories, batch = first_batch(tmp_path / "data", env, config)

    assert (trajectories.success == 1).tolist() == outcomes
    assert batch.actions.shape == (8, config.action_horizon, 14)
    assert 0 < gradient_norm(config, batch) < np.inf
