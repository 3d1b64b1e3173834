"""The chunk batch: for every start frame, the table of the batch holds, step by step."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pirl.data.chunks import ChunkShape, gather_chunks
from pirl.errors import DataError
from trajectories import IO, build, episodes


def rows_of(trajectories):
    return np.concatenate([np.arange(s, e) for s, e in zip(trajectories.starts, trajectories.ends, strict=True)])


def expected_sample(data, row, horizon, chunk, discount):
    """One sample, written down from its definition with loops."""
    episode = max(e for e in range(len(data.starts)) if data.starts[e] <= row)
    first, T = int(data.starts[episode]), int(data.ends[episode] - data.starts[episode])
    t = row - first
    ended = bool(data.terminals[first + T - 1])
    n = min(horizon, T - t)
    total = sum(discount**k * float(data.rewards[row + k]) for k in range(T - t))
    return {
        "valid": [t + k <= T - 1 for k in range(chunk)],
        "rewards": [data.rewards[row + k] if k < n else 0.0 for k in range(horizon)],
        "terminals": [ended and t + k == T - 1 for k in range(horizon)],
        "masks": [not (ended and t + k >= T - 1) for k in range(horizon)],
        "next_terminal": ended and t + horizon > T - 1,
        "sequence_mask": t + horizon <= T - 1 or (ended and t + horizon > T - 1),
        "success": data.success[episode] == 1,
    }, {
        "actions": [data.actions[first + min(t + k, T - 1)] for k in range(chunk)],
        "state": data.states[row],
        "next_state": data.states[first + min(t + horizon, T - 1)],
        "returns": total if ended and data.success[episode] >= 0 else -np.inf,
    }


@settings(deadline=None, max_examples=100)
@given(
    data=episodes(),
    horizon=st.integers(1, 15),
    extra=st.integers(0, 5),
    discount=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
)
def test_the_table_holds_for_every_start(data, horizon, extra, discount):
    rows = rows_of(data)
    batch = gather_chunks(data, rows, ChunkShape(horizon, horizon + extra, discount=discount), IO)
    assert batch.returns.dtype == np.float32
    for i, row in enumerate(rows):
        flags, values = expected_sample(data, int(row), horizon, horizon + extra, discount)
        for key, expected in flags.items():
            np.testing.assert_array_equal(getattr(batch, key)[i], np.asarray(expected), err_msg=key)
        np.testing.assert_array_equal(batch.actions[i, :, :2], np.array(values["actions"], np.float32))
        np.testing.assert_array_equal(batch.actions[i, :, 2:], 0)
        np.testing.assert_array_equal(batch.observations.state[i, :3], values["state"])
        np.testing.assert_array_equal(batch.next_observations.state[i, :3], values["next_state"])
        np.testing.assert_allclose(batch.returns[i], values["returns"], rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=50)
@given(data=episodes(), horizon=st.integers(1, 15))
def test_no_chunk_ever_mixes_episodes(data, horizon):
    """Numbers that name their episode come back from that episode only, in every field."""
    named = np.repeat(np.arange(len(data.starts)), np.diff([*data.starts, len(data.rewards)]))
    marked = dataclasses.replace(
        data,
        actions=np.stack([named] * 2, axis=1).astype(np.float32),
        states=np.stack([named] * 3, axis=1).astype(np.float32),
        rewards=named.astype(np.float32) + 1,
    )
    rows = rows_of(marked)
    batch, mine = gather_chunks(marked, rows, ChunkShape(horizon), IO), named[rows]
    assert batch.returns is None, "only where the shape asks for them"
    assert np.all(batch.actions[:, :, 0] == mine[:, None])
    assert np.all(batch.observations.state[:, 0] == mine)
    assert np.all(batch.next_observations.state[:, 0] == mine)
    assert np.all((batch.rewards == mine[:, None] + 1) | (~batch.valid & (batch.rewards == 0)))


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**16), discount=st.sampled_from([0.5, 0.9, 1.0]))
def test_no_return_is_above_the_optimal_value(seed, discount):
    """Episodes of a random policy in a random graph without cycles, whose optimal values follow by induction."""
    rng = np.random.default_rng(seed)
    states, choices, limit = 12, 3, int(rng.integers(2, 12))
    # Edges lead to higher numbers; the last state is the end.
    edges = np.array([[rng.integers(s + 1, states) for _ in range(choices)] for s in range(states - 1)])
    rewards = rng.normal(size=edges.shape)
    optimum = np.zeros(states)
    for state in reversed(range(states - 1)):
        optimum[state] = np.max(rewards[state] + discount * optimum[edges[state]])
    paths, gains, over = [], [], []
    for _ in range(8):
        path, gain = [int(rng.integers(states - 1))], []
        while path[-1] != states - 1 and len(gain) < limit:
            choice = rng.integers(choices)
            gain.append(rewards[path[-1], choice])
            path.append(int(edges[path[-1], choice]))
        paths.append(path[:-1])
        gains.append(gain)
        over.append(path[-1] == states - 1)
    data = build([len(path) for path in paths], terminal=over)
    data = dataclasses.replace(
        data, rewards=np.concatenate(gains).astype(np.float32), success=np.ones(len(paths), np.int8)
    )
    returns = data.returns(discount)
    assert np.all(returns <= optimum[np.concatenate(paths)] + 1e-5)
    assert np.isfinite(returns).tolist() == np.repeat(over, [len(path) for path in paths]).tolist()


def test_episodes_and_shapes_that_cannot_be_are_refused():
    good = build([4])
    with pytest.raises(DataError, match="after a terminal"):
        dataclasses.replace(good, terminals=np.array([False, True, False, False]))
    with pytest.raises(DataError, match="overlap"):
        dataclasses.replace(good, ends=np.array([0]))
    for horizon, actions in ((0, None), (4, 3)):
        with pytest.raises(DataError):
            ChunkShape(horizon, actions)
