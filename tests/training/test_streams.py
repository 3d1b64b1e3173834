"""Online learning: how much of a batch is prior data, what rewards are, which episodes count, which updates are due."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from fakes import WALKER, CorridorPool, Walker
from pirl.config import OnlineConfig
from pirl.data import ChunkSampler, ChunkShape, PolicyIO, ReplayBuffer
from pirl.data.lerobot.reader import open_dataset
from pirl.data.outcomes import OutcomeConfig, read_outcomes
from pirl.envs.rollout import make_starts
from pirl.models import get_model_config
from pirl.training.health import StopSignal
from pirl.training.setup import set_up
from pirl.training.streams import OnlineStream

MODEL = dataclasses.replace(get_model_config("tiny_state"), action_dim=8, action_horizon=4, max_token_len=0)
BLIND = dataclasses.replace(WALKER, cameras={})
SHAPE = ChunkShape(4, 4)


@pytest.fixture
def make_stream(tmp_path, monkeypatch, unchecked_signatures):
    """Rollouts in the corridor, which some seeds do not survive. Walkers stand for learners, and plan themselves."""
    monkeypatch.setattr("pirl.training.streams.rollout_policy", lambda agent, *_: agent)

    def make(loses=(), directory="replay", reward="sparse", **changes):
        online = dataclasses.replace(OnlineConfig(env_steps=50, episodes_per_round=4), **changes)
        policy_io = PolicyIO(BLIND, MODEL, None, None)
        replay = ReplayBuffer(online.capacity, policy_io, directory=tmp_path / directory)
        sampler = ChunkSampler([replay], batch_size=4, shape=SHAPE)
        pool = CorridorPool(2, loses)
        config = SimpleNamespace(
            online=online,
            evaluation=SimpleNamespace(execute_steps=4),
            data=SimpleNamespace(outcomes=OutcomeConfig(reward=reward)),
        )
        setup = SimpleNamespace(config=config, policy_io=policy_io)
        return OnlineStream(setup, None, pool, replay, sampler, StopSignal()), replay, pool

    return make


def seeds(pool, count, seed=1):
    return [start.seed for start in make_starts(pool.description, count, seed)]


def test_a_lost_episode_is_counted_and_not_learned_from(make_stream):
    _, _, pool = make_stream(directory="unused")
    lost = seeds(pool, 4)[1:3]
    stream, replay, _ = make_stream(loses=lost)
    told = stream.collect(Walker()).metrics
    assert (told["online/lost"], told["online/episodes"], replay.num_episodes) == (2, 2, 2)
    assert told["online/env_steps"] == len(replay)
    assert told["online/success"] == 1.0, "of those that came to an end"


def test_every_round_begins_elsewhere_and_a_resumed_one_where_it_would_have(make_stream):
    stream, replay, _ = make_stream()
    stream.collect(Walker())
    saved = stream.state()
    first, one = replay.num_episodes, stream.collect(Walker()).metrics
    states = replay.gather(0, 50, SHAPE).observations.state
    stream.load_state(saved)
    assert replay.num_episodes == first
    assert stream.collect(Walker()).metrics == one
    np.testing.assert_array_equal(replay.gather(0, 50, SHAPE).observations.state, states)
    assert one["online/episodes"] == 8


@pytest.mark.parametrize(("ratio", "scan"), [(1.0, 1), (0.5, 2), (2.0, 3), (0.1, 1)])
def test_updates_are_owed_in_proportion_to_steps(make_stream, ratio, scan):
    stream, _, _ = make_stream(utd_ratio=ratio, updates_per_scan=scan)
    assert not stream.updates_due
    made = 0
    while not stream.done:
        if stream.updates_due:
            made += len(stream.draw())
        else:
            told = stream.collect(Walker()).metrics
    steps = told["online/env_steps"]
    assert steps >= 50
    assert made == stream.progress == int(steps * ratio) // scan * scan


@pytest.mark.parametrize("reward", ["sparse", "step_penalty", "raw"])
def test_rewards_are_shaped_as_those_of_the_dataset(make_stream, reward):
    stream, replay, pool = make_stream(reward=reward)
    stands = seeds(pool, 4)[0]
    stream.collect(Walker(stands=[stands]))
    trajectories = replay.trajectories
    for number, (start, end) in enumerate(zip(trajectories.starts, trajectories.ends, strict=True)):
        success = bool(trajectories.success[number])
        expected = np.full(end - start, -1.0 if reward == "step_penalty" else 0.0)
        expected[-1] += float(success)
        np.testing.assert_array_equal(trajectories.rewards[start:end], expected)
        assert trajectories.terminals[end - 1] == success, "running out of time is no end"
    assert trajectories.success.tolist().count(0) == 1


def test_online_rewards_of_the_tabletop_equal_those_of_its_recorded_twin(configure, data, tmp_path):
    """The same episodes, once read from the dataset and once acted again, have the same rewards."""
    from pirl.envs.experts import ExpertConfig
    from pirl.envs.pool import open_pool
    from pirl.envs.rollout import roll_out
    from pirl.training.streams import shaped_episode

    config = configure()
    outcomes = config.data.outcomes
    recorded = read_outcomes(open_dataset(str(data)), outcomes)
    with open_pool(config.env, 4) as pool:
        starts = make_starts(pool.description, 20, 1000)
        acted = sorted(roll_out(pool, ExpertConfig(), starts, execute_steps=5), key=lambda rollout: rollout.index)
        robot = set_up(config).policy_io.robot
        rewards = [shaped_episode(rollout, robot, outcomes).rewards for rollout in acted]
    np.testing.assert_array_equal(np.concatenate(rewards), recorded.rewards)
    assert recorded.rewards.max() != recorded.rewards.min()


def test_half_of_every_batch_is_prior_data(configure, tmp_path):
    setup = set_up(configure())
    replay = ReplayBuffer(1_000, setup.policy_io)
    from pirl.data.replay import Episode

    # Nothing in the dataset has such a reward.
    length = 12
    replay.add(
        Episode({}, np.zeros((length, 8), np.float32), np.zeros((length, 3), np.float32),
                np.full(length, 77.0, np.float32), terminal=False, success=False, prompt=setup.trajectories.prompts[0])
    )  # fmt: skip
    sampler = setup.sampler([setup.source(1), replay], [0.5, 0.5])
    for step in range(5):
        rewards = sampler.batch(step).rewards
        assert np.sum(rewards[:, 0] == 77.0) == len(rewards) // 2
