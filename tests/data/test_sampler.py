"""The sampler: everything once per epoch, the same for the same step, on however many hosts."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from pirl.data.chunks import ChunkShape
from pirl.data.policy_io import PolicyIO
from pirl.data.robots import Robot
from pirl.data.sampler import ChunkIndexSampler, ChunkSampler, DatasetSource, Loader
from pirl.errors import ConfigError, DataError, ObservationError
from pirl.models import Tokenizer, get_model_config
from pirl.training.sharding import make_mesh
from trajectories import IO, Painted, build, episodes


def source(lengths=(5, 7, 4), *, seed=0, rows_seed=0, **options):
    trajectories = build(lengths, seed=rows_seed)
    return DatasetSource(trajectories, ChunkIndexSampler(trajectories, seed=seed, **options), IO)


def rows_of(batch):
    """Which rows a batch is made of, by its states."""
    return [tuple(state) for state in np.asarray(batch.observations.state[:, :3])]


@settings(deadline=None, max_examples=50)
@given(trajectories=episodes(), pool=st.integers(1, 7), seed=st.integers(0, 99))
def test_an_epoch_brings_every_row_once_pool_by_pool(trajectories, pool, seed):
    stream = ChunkIndexSampler(trajectories, seed=seed, episodes_per_memory_pool=pool)
    rows = np.concatenate([np.arange(s, e) for s, e in zip(trajectories.starts, trajectories.ends, strict=True)])
    assert stream.size == len(rows)
    for epoch in (0, 1):
        taken = stream.take(epoch * stream.size, stream.size)
        assert sorted(taken.tolist()) == rows.tolist()
        pools: dict = {}
        for position, row in enumerate(taken):
            pools.setdefault(stream.pool_at(epoch * stream.size + position), set()).add(
                int(trajectories.episode_of(row[None])[0])
            )
        assert all(len(held) <= pool for held in pools.values())
        assert len(pools) == -(-len(trajectories.starts) // pool)
        assert list(pools) == sorted(pools)


@pytest.mark.parametrize("pool", [None, 2])
def test_rows_are_drawn_in_proportion_to_their_weight(pool):
    trajectories = build([50] * 8)
    weights = np.repeat([0.0, 1, 1, 3, 3, 0, 4, 4], 50)
    stream = ChunkIndexSampler(trajectories, seed=0, weights=weights, episodes_per_memory_pool=pool)
    taken = stream.take(0, stream.size * 50)
    share = np.bincount(trajectories.episode_of(taken), minlength=8) / len(taken)
    np.testing.assert_allclose(share, np.array([0, 1, 1, 3, 3, 0, 4, 4]) / 16, atol=0.02)
    assert share[0] == share[5] == 0


def test_batches_depend_on_nothing_but_the_step():
    first, second = (ChunkSampler([source()], batch_size=6, shape=ChunkShape(3)) for _ in range(2))
    went = [rows_of(next(first)) for _ in range(7)]
    assert rows_of(second.batch(5)) == went[5]
    second.restore({**first.state(), "step": 4})
    assert [rows_of(next(second)) for _ in range(3)] == went[4:]
    assert second.state() == first.state()
    assert len(json.dumps(first.state())) < 100


def test_a_state_of_another_order_is_refused_and_of_the_same_order_taken():
    def sampler(*sources, batch_size=6):
        return ChunkSampler(sources, batch_size=batch_size, shape=ChunkShape(3))

    state = {**sampler(source()).state(), "step": 4}
    for other in (
        sampler(source(), batch_size=4),
        sampler(source(seed=1)),
        sampler(source((5, 7))),
        sampler(source(), source()),
        # As many rows, otherwise dealt out, or others.
        sampler(source((7, 5, 4))),
        sampler(source(episodes_per_memory_pool=2)),
        sampler(source((5, 7, 5), weights=1.0 * (np.arange(17) > 0))),
        sampler(source(weights=np.arange(16) + 1.0)),
    ):
        with pytest.raises(ConfigError, match="another order"):
            other.restore(state)
    for same in (
        source(rows_seed=1),
        source(episodes_per_memory_pool=3),
        source(episodes_per_memory_pool=99),
        source(weights=np.full(16, 7.0)),
    ):
        assert source().indices.take(0, 64).tolist() == same.indices.take(0, 64).tolist()
        resumed = sampler(same)
        resumed.restore(state)
        assert resumed.step == 4


@pytest.mark.parametrize("processes", [2, 6])
def test_the_shares_of_all_hosts_are_the_one_batch(processes):
    def sampler(**host):
        sources = [source(rows_seed=1), source((9, 9), rows_seed=2)]
        return ChunkSampler(sources, batch_size=12, shape=ChunkShape(3), ratios=[0.3, 0.7], **host)

    for step in range(5):
        whole = rows_of(sampler().batch(step))
        shares = [
            rows_of(sampler(process_index=index, process_count=processes).batch(step)) for index in range(processes)
        ]
        assert sorted(anchor for share in shares for anchor in share) == sorted(whole)
        assert {len(share) for share in shares} == {12 // processes}


class CountingSource:
    """Gives the numbers of its samples for a batch."""

    def __init__(self):
        self.taken = []

    def gather(self, position, count, shape):
        numbers = np.arange(position, position + count)
        self.taken += numbers.tolist()
        return numbers

    def identity(self):
        return []


@pytest.mark.usefixtures("unchecked_signatures")
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ratios=st.lists(st.floats(0.001, 1), min_size=1, max_size=5),
    local=st.integers(1, 40),
    processes=st.integers(1, 4),
)
def test_every_batch_is_full_and_no_sample_of_any_source_is_left_out_or_repeated(ratios, local, processes):
    sources = [CountingSource() for _ in ratios]
    shared = {"batch_size": local * processes, "shape": ChunkShape(2), "ratios": ratios, "process_count": processes}
    hosts = [ChunkSampler(sources, process_index=index, **shared) for index in range(processes)]
    for step in range(30):
        for host in hosts:
            assert len(host.batch(step)) == local
    drawn = 30 * local * processes
    for source, ratio in zip(sources, ratios, strict=True):
        assert source.taken == list(range(len(source.taken)))
        assert abs(len(source.taken) - drawn * ratio / sum(ratios)) <= len(ratios)


def test_a_used_up_pool_is_let_go():
    frames = Painted()
    trajectories = build([4] * 6, frames={"base_0_rgb": frames})
    stream = ChunkIndexSampler(trajectories, seed=0, episodes_per_memory_pool=2)
    sampler = ChunkSampler([DatasetSource(trajectories, stream, IO)], batch_size=4, shape=ChunkShape(2))
    released = []
    for _ in range(6):
        next(sampler)
        released.append(frames.released)
    assert released == [0, 0, 1, 1, 2, 2]


def test_a_prompt_that_does_not_fit_is_refused_at_the_start_but_only_if_a_frame_has_it():

    model = get_model_config("tiny")
    robot = Robot("arm", cameras={}, state=("state",), actions=("action",), state_dim=3, action_dim=2)
    io = PolicyIO(robot, model, None, Tokenizer.for_model(model))
    trajectories = dataclasses.replace(build([4]), prompts=["do it", "and then " * 50])
    DatasetSource(trajectories, ChunkIndexSampler(trajectories, seed=0), io)
    trajectories = dataclasses.replace(trajectories, prompt_of_row=np.array([0, 0, 1, 1]))
    with pytest.raises(ObservationError, match="tokens"):
        DatasetSource(trajectories, ChunkIndexSampler(trajectories, seed=0), io)


def test_samplers_that_cannot_run_are_refused():
    for options, message in (
        ({"weights": np.zeros(16)}, "no frames are left"),
        ({"weights": np.ones(3)}, "3 sampling"),
        ({"weights": -np.ones(16)}, "not negative"),
        ({"seed": -1}, "seed"),
        ({"episodes_per_memory_pool": 0}, "at least 1"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            source(**options)
    for options in ({"batch_size": 0}, {"ratios": [0.0]}, {"ratios": [1.0, 1.0]}, {"process_count": 3}):
        with pytest.raises(ConfigError):
            ChunkSampler([source()], **{"batch_size": 4, "shape": ChunkShape(2), **options})


# --- the loader -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 3])
def test_the_loader_brings_the_samplers_batches_in_order_and_knows_where_it_is(prefetch):
    reference = ChunkSampler([source()], batch_size=8, shape=ChunkShape(3))
    with Loader(ChunkSampler([source()], batch_size=8, shape=ChunkShape(3)), prefetch=prefetch) as loader:
        for step in range(4):
            assert loader.state()["step"] == step
            assert rows_of(next(loader)) == rows_of(reference.batch(step))
    resumed = ChunkSampler([source()], batch_size=8, shape=ChunkShape(3))
    resumed.restore(loader.state())
    with Loader(resumed, prefetch=prefetch) as loader:
        assert rows_of(next(loader)) == rows_of(reference.batch(4))


def test_batches_arrive_sharded_over_all_devices():
    sharding = NamedSharding(make_mesh(2), PartitionSpec(("data", "fsdp")))
    sampler = ChunkSampler([source()], batch_size=16, shape=ChunkShape(3))
    with Loader(sampler, sharding=sharding) as loader:
        batch = next(loader)
    for leaf in jax.tree.leaves(batch):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        assert leaf.addressable_shards[0].data.shape[0] == 16 // len(jax.devices())
    assert rows_of(batch) == rows_of(sampler.batch(0))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_goes_wrong_in_the_background_is_raised_in_front(prefetch):
    sampler = ChunkSampler([source()], batch_size=4, shape=ChunkShape(3))
    good = sampler.batch
    sampler.batch = lambda step: good(step) if step < 2 else (_ for _ in ()).throw(DataError("frame 7 is damaged"))
    with Loader(sampler, prefetch=prefetch) as loader:
        next(loader)
        next(loader)
        with pytest.raises(DataError, match="frame 7"):
            next(loader)
