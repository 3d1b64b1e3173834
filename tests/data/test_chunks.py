"""The chunk batch: for every anchor, the table of the batch holds, step by step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pirl.data.chunks import ChunkShape, Trajectories, gather_chunks
from pirl.errors import DataError
from trajectories import IO, build, episodes


def anchors_of(trajectories):
    return np.concatenate([np.arange(s, e) for s, e in zip(trajectories.starts, trajectories.ends, strict=True)])


def expected_sample(trajectories, row, horizon, chunk):
    """One sample, written down from its definition with loops."""
    episode = max(e for e in range(len(trajectories.starts)) if trajectories.starts[e] <= row)
    first, T = int(trajectories.starts[episode]), int(trajectories.ends[episode] - trajectories.starts[episode])
    t = row - first
    ended = bool(trajectories.terminals[first + T - 1])
    n = min(horizon, T - t)
    sample = {
        "actions": [trajectories.actions[first + min(t + k, T - 1)] for k in range(chunk)],
        "valid": [t + k <= T - 1 for k in range(chunk)],
        "rewards": [trajectories.rewards[first + t + k] if k < n else 0.0 for k in range(horizon)],
        "terminals": [ended and t + k == T - 1 for k in range(horizon)],
        "masks": [not (ended and t + k >= T - 1) for k in range(horizon)],
        "next_terminal": ended and t + horizon > T - 1,
        "sequence_mask": t + horizon <= T - 1 or (ended and t + horizon > T - 1),
        "state": trajectories.states[row],
        "next_state": trajectories.states[first + min(t + horizon, T - 1)],
        "success": trajectories.success[episode] == 1,
    }
    return sample


@settings(deadline=None, max_examples=100)
@given(trajectories=episodes(), horizon=st.integers(1, 15), extra=st.integers(0, 5))
def test_the_table_holds_for_every_anchor(trajectories, horizon, extra):
    rows = anchors_of(trajectories)
    batch = gather_chunks(trajectories, rows, ChunkShape(horizon, horizon + extra), IO)
    for place, row in enumerate(rows):
        sample = expected_sample(trajectories, int(row), horizon, horizon + extra)
        np.testing.assert_array_equal(batch.actions[place, :, :2], np.array(sample["actions"], np.float32))
        np.testing.assert_array_equal(batch.actions[place, :, 2:], 0)
        for key in ("valid", "rewards", "terminals", "masks", "next_terminal", "sequence_mask", "success"):
            np.testing.assert_array_equal(getattr(batch, key)[place], np.asarray(sample[key]), err_msg=key)
        np.testing.assert_array_equal(batch.observations.state[place, :3], sample["state"])
        np.testing.assert_array_equal(batch.next_observations.state[place, :3], sample["next_state"])


@settings(deadline=None, max_examples=50)
@given(trajectories=episodes(), horizon=st.integers(1, 15))
def test_no_chunk_ever_mixes_episodes(trajectories, horizon):
    """Numbers that name their episode come back from that episode only, in every field."""
    named = np.repeat(np.arange(len(trajectories.starts)), np.diff([*trajectories.starts, len(trajectories.rewards)]))
    marked = Trajectories(
        **{
            **trajectories.__dict__,
            "actions": np.stack([named, named], axis=1).astype(np.float32),
            "states": np.stack([named] * 3, axis=1).astype(np.float32),
            "rewards": named.astype(np.float32) + 1,
        }
    )
    rows = anchors_of(marked)
    batch = gather_chunks(marked, rows, ChunkShape(horizon), IO)
    mine = named[rows]
    assert np.all(batch.actions[:, :, 0] == mine[:, None])
    assert np.all(batch.observations.state[:, 0] == mine)
    assert np.all(batch.next_observations.state[:, 0] == mine)
    assert np.all((batch.rewards == mine[:, None] + 1) | (~batch.valid & (batch.rewards == 0)))


@settings(deadline=None, max_examples=50)
@given(trajectories=episodes(), horizon=st.integers(1, 6), discount=st.sampled_from([0.5, 0.9, 1.0]))
def test_returns_from_batches_equal_returns_from_episodes(trajectories, horizon, discount):
    """Chunks laid end to end give the episode's return: each from where the last one's next observation stands."""
    rows = anchors_of(trajectories)
    batch = gather_chunks(trajectories, rows, ChunkShape(horizon), IO)
    sums = {int(row): float(np.sum(batch.rewards[i] * discount ** np.arange(horizon))) for i, row in enumerate(rows)}
    for first, end in zip(trajectories.starts.tolist(), trajectories.ends.tolist(), strict=True):
        rewards = trajectories.rewards[first:end]
        direct = float(np.sum(rewards * discount ** np.arange(end - first)))
        chained = sum(discount ** (row - first) * sums[row] for row in range(first, end, horizon))
        np.testing.assert_allclose(chained, direct, rtol=1e-4, atol=1e-4)


def test_the_critic_leaves_out_chunks_that_run_into_a_timeout_and_keeps_those_that_run_into_an_end():
    ended, cut_off = build([5], terminal=[True]), build([5], terminal=[False])
    rows, shape = np.arange(5), ChunkShape(3)
    assert gather_chunks(ended, rows, shape, IO).sequence_mask.tolist() == [True] * 5
    assert gather_chunks(cut_off, rows, shape, IO).sequence_mask.tolist() == [True, True, False, False, False]
    assert not gather_chunks(cut_off, rows, shape, IO).next_terminal.any()


def test_an_episode_that_goes_on_after_a_terminal_is_refused():
    good = build([4])
    with pytest.raises(DataError, match="after a terminal"):
        Trajectories(**{**good.__dict__, "terminals": np.array([False, True, False, False])})
    with pytest.raises(DataError, match="overlap"):
        Trajectories(**{**good.__dict__, "ends": np.array([0])})


@pytest.mark.parametrize("shape", [(0, None), (4, 3)])
def test_a_chunk_has_steps_and_enough_actions(shape):
    with pytest.raises(DataError):
        ChunkShape(*shape)
