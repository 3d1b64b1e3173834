"""Statistics: those of every training sample enumerated, OpenPI's up to its bins, and fair warnings."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden import ATOL, RTOL, arrays, needs_golden
from pirl.data import norm_stats
from pirl.data.norm_stats import compute_norm_stats, degenerate_dimensions, safe_scales, sample_range
from pirl.errors import DataError
from pirl.interop import NormStats


def enumerated_samples(states, actions, starts, horizon, mask):
    """Every training sample, one at a time: the states [n, S] and the steps of the chunks [n * horizon, A]."""
    sample_states, steps = [], []
    for begin, end in pairwise(starts):
        for t in range(begin, end):
            sample_states.append(states[t].astype(np.float64))
            for k in range(horizon):
                step = actions[min(t + k, end - 1)].astype(np.float64)
                for dim, relative in enumerate(mask):
                    step[dim] -= float(states[t, dim]) if relative else 0.0
                steps.append(step)
    return np.array(sample_states), np.array(steps)


def assert_statistics_of(entry: NormStats, samples: np.ndarray) -> None:
    scale = np.abs(samples).max()
    np.testing.assert_allclose(entry.mean, samples.mean(0), rtol=1e-12, atol=1e-14 * scale)
    np.testing.assert_allclose(entry.std, samples.std(0), rtol=1e-12, atol=1e-14 * scale)
    for percent, quantile in ((0.01, entry.q01), (0.99, entry.q99)):
        np.testing.assert_array_equal(quantile, np.quantile(samples, percent, axis=0, method="inverted_cdf"))


@st.composite
def recordings(draw):
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    starts = np.cumsum([0, *lengths], dtype=draw(st.sampled_from([np.int32, np.int64])))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    state_dim, action_dim = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    offset, decimals = draw(st.sampled_from([0.0, 3.0, 1000.0])), draw(st.sampled_from([1, 12]))

    # Few decimals make ties, also at the quantiles; a random walk makes the extremes come late.
    def walk(dims):
        values = random.standard_normal((starts[-1], dims)).cumsum(0) + offset
        return np.round(values, decimals).astype(dtype)

    widest = min(state_dim, action_dim)
    mask = draw(st.none() | st.lists(st.booleans(), max_size=widest).map(lambda flags: np.array(flags, bool)))
    return walk(state_dim), walk(action_dim), starts, draw(st.integers(1, 12)), mask


@settings(max_examples=150)
@given(recordings(), st.sampled_from([1, 7, 64, 2**16]))
def test_statistics_are_those_of_every_sample_enumerated(recording, block):
    states, actions, starts, horizon, mask = recording
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm_stats, "BLOCK", block)  # small blocks: the result may not depend on where they end
        stats = compute_norm_stats(states, actions, starts, horizon, mask)
    sample_states, steps = enumerated_samples(states, actions, starts, horizon, () if mask is None else mask)
    assert set(stats) == {"state", "actions"}
    assert_statistics_of(stats["state"], sample_states)
    assert_statistics_of(stats["actions"], steps)


def test_quantile_ranks_round_as_stated():
    # Values 1..n: the smallest v with v >= q * n is ceil(q * n), here in integers.
    for frames in (1, 99, 100, 101, 199, 200):
        values = np.random.default_rng(0).permutation(np.arange(1.0, frames + 1))[:, None]
        for entry in compute_norm_stats(values, values, np.array([0, frames]), 1, np.array([False])).values():
            assert entry.q01.tolist() == [(frames + 99) // 100]
            assert entry.q99.tolist() == [(99 * frames + 99) // 100]


def test_a_small_motion_far_from_zero_keeps_its_spread():
    # Closed form: +-d about 1e6 has standard deviation d; E[x^2] - E[x]^2 in float64 would lose all of it.
    small = 2.0**-20
    values = 1e6 + small * np.tile([[1.0], [-1.0]], (500, 1))
    stats = compute_norm_stats(values, values, np.array([0, 1000]), 1)
    assert stats["state"].std.tolist() == stats["actions"].std.tolist() == [small]


@pytest.mark.parametrize("relative", [True, False])
def test_a_constant_has_itself_as_mean_and_no_spread(relative):
    values = np.full((777, 1), 0.1)
    entry = compute_norm_stats(values, 3 * values, np.array([0, 300, 777]), 9, np.array([relative]))["actions"]
    constant = [0.1 * 3 - 0.1 if relative else 0.1 * 3]
    assert (entry.mean.tolist(), entry.q01.tolist(), entry.q99.tolist()) == (constant,) * 3
    assert entry.std.tolist() == [0.0]


@needs_golden
@pytest.mark.parametrize("batches", [1, 3])
def test_statistics_agree_with_openpis_histograms(batches):
    recorded = arrays("transforms", "running_stats", "running_stats.npz")
    chunks = [recorded[f"batch{i}/actions"] for i in range(batches)]
    # The recorded steps as they stand (horizon 1); each state once per step, which changes no share of the whole.
    actions = np.concatenate([chunk.reshape(-1, chunk.shape[-1]) for chunk in chunks])
    states = np.concatenate([recorded[f"batch{i}/state"] for i in range(batches)]).repeat(chunks[0].shape[1], axis=0)
    stats = compute_norm_stats(states, actions, np.array([0, len(actions)]), 1)
    for name, values in (("state", states), ("actions", actions)):
        mean, std, q01, q99 = (recorded[f"after{batches - 1}/{name}/{key}"] for key in ("mean", "std", "q01", "q99"))
        np.testing.assert_allclose(stats[name].mean, mean, rtol=RTOL, atol=ATOL)
        np.testing.assert_allclose(stats[name].std, std, rtol=RTOL, atol=ATOL)
        width = np.ptp(values, axis=0) / 5000
        below = np.stack([stats[name].q01 - q01, stats[name].q99 - q99])  # OpenPI reports the left edge of the bin
        if name == "state" and batches > 1:
            # The second batch raises the maximum but not the minimum: OpenPI's re-binning loses the lowest value, and
            # its q01 (with so few samples: the lowest) is that of the second lowest.
            lowest, second = np.unique(values[:, 0])[:2]
            assert stats[name].q01[0] == lowest
            below[0, 0] = second - q01[0]
        assert np.all((below >= 0) & (below <= width * (1 + 1e-6)))


@needs_golden
@pytest.mark.parametrize(
    ("case", "mask"),
    [
        ("aloha", "aloha_6_-1_6_-1"),
        ("libero", "libero_6_-1"),
        ("none_mask", None),
    ],
)
def test_deltas_are_those_openpi_takes(case, mask):
    recorded = arrays("transforms", "actions.npz")
    actions, deltas = recorded[f"delta/{case}/in/actions"], recorded[f"delta/{case}/out/actions"].astype(np.float64)
    # One state for the whole recorded chunk: as an episode of single steps in which the robot stands still.
    states = np.tile(recorded[f"delta/{case}/in/state"], (len(actions), 1))
    delta_mask = None if mask is None else recorded[f"bool_mask/{mask}"]
    entry = compute_norm_stats(states, actions, np.array([0, len(actions)]), 1, delta_mask)["actions"]
    expected = (deltas.mean(0), deltas.std(0), deltas.min(0), deltas.max(0))  # of ten values, q01 and q99 are the ends
    for value, of_openpi in zip((entry.mean, entry.std, entry.q01, entry.q99), expected, strict=True):
        np.testing.assert_allclose(value, of_openpi, rtol=0, atol=5e-7)  # OpenPI subtracts in float32


def arrays_with(**changes):
    usual = {"states": np.zeros((10, 3)), "actions": np.zeros((10, 2)), "starts": np.array([0, 4, 10]), "horizon": 5}
    return usual | changes


def spoiled(shape, value, row, dim):
    values = np.zeros(shape, np.float32 if np.isnan(value) else np.float64)
    values[row, dim] = value
    return values


@pytest.mark.usefixtures("unchecked_signatures")
def test_unusable_arrays_are_refused_by_row_and_dimension():
    for changes, message in (
        ({"actions": np.zeros((10, 0))}, r"actions .*\(10, 0\)"),
        ({"states": spoiled((10, 3), np.nan, 5, 2)}, r"states: row 5 \(episode 1, frame 1\), dimension 2 is nan"),
        ({"actions": spoiled((10, 2), 1e300, 9, 0)}, r"actions: row 9 \(episode 1, frame 5\), dimension 0 is 1e\+300"),
        ({"actions": np.zeros((8, 2))}, "actions have the shape"),
        ({"states": np.zeros((10, 1)), "delta_mask": np.ones(2, bool)}, "covers 2 dimensions, but states have 1"),
        ({"horizon": 0}, "the horizon is 0"),
    ):
        with pytest.raises(DataError, match=message):
            compute_norm_stats(**arrays_with(**changes))


def motion(**columns):
    """Statistics of dimensions that move in their own ways: 5000 frames of each column."""
    values = np.stack(list(columns.values()), axis=1)
    stats = compute_norm_stats(values, values, np.array([0, len(values)]), 1)
    return {"state": stats["state"]}, {"state": list(columns)}


RANDOM = np.random.default_rng(7)
HEALTHY = {
    "shoulder in radians": RANDOM.normal(-1.5, 0.6, 5000),
    "height in meters": RANDOM.normal(0.3, 0.01, 5000),
    "force in newtons": RANDOM.normal(0, 40, 5000),
    "finger in meters": RANDOM.uniform(0, 0.04, 5000),
    "gripper, open or closed": RANDOM.integers(0, 2, 5000).astype(float),
    "small corrections in meters": RANDOM.normal(0, 0.001, 5000),
    "odometer": 1000 + np.linspace(0, 3, 5000),
    "wrist, hardly used": RANDOM.normal(0.8, 0.03, 5000),
}


def test_healthy_dimensions_are_not_mentioned():
    stats, names = motion(**HEALTHY)
    assert degenerate_dimensions(stats, names) == []
    assert degenerate_dimensions(stats) == []


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (np.full(5000, 0.1), "never changes"),
        (RANDOM.normal(0, 1e-7, 5000), "never changes"),  # the normalizer's constant is larger
        (1.5 + 0.0015 * RANDOM.integers(0, 2, 5000), "hardly varies"),  # one tick of an encoder
        (RANDOM.normal(0, 4e-6, 5000), "hardly varies"),  # the same, seen as a delta
    ],
)
def test_a_still_dimension_is_named_with_its_numbers_and_the_remedy(column, said):
    stats, names = motion(**HEALTHY, elbow=column)
    (sentence,) = degenerate_dimensions(stats, names)
    dim, entry = len(HEALTHY), stats["state"]
    assert sentence.startswith(f"state dimension {dim} (elbow) {said}")
    numbers = f"(q01 {entry.q01[dim]:.6g}, q99 {entry.q99[dim]:.6g}, std {entry.std[dim]:.4g})"
    assert numbers in sentence
    assert "norm_stats.json (--data.norm-stats FILE)" in sentence
    (unnamed,) = degenerate_dimensions(stats)
    assert unnamed == sentence.replace(" (elbow)", "")


def test_a_constant_dimension_is_scaled_like_the_others_and_a_rare_one_by_its_range():
    rare = np.zeros(5000)
    rare[:40] = 1.0
    stats, _ = motion(
        constant=np.full(5000, 3.0), rare=rare, jitter=1.5 + 0.0015 * RANDOM.integers(0, 2, 5000), **HEALTHY
    )
    before = stats["state"]
    after = safe_scales(stats, lambda: {"state": (np.zeros(len(before.mean)), np.ones(len(before.mean)))})["state"]
    assert after.mean.tolist() == before.mean.tolist()
    assert after.std[0] == np.median(before.std[1:])
    assert (after.q01[0], after.q99[0]) == pytest.approx((3 - (after.q99[0] - 3), after.q99[0]))
    assert after.q99[0] - after.q01[0] == pytest.approx(np.median((before.q99 - before.q01)[2:]))
    assert (after.std[1], after.q01[1], after.q99[1]) == (before.std[1], 0.0, 1.0)
    for key in ("std", "q01", "q99"):
        assert getattr(after, key)[2:].tolist() == getattr(before, key)[2:].tolist(), "what varies is OpenPI's"


def test_statistics_are_those_of_the_samples_that_are_used_up_to_the_ends():
    random = np.random.default_rng(0)
    states, actions = random.normal(size=(30, 3)), random.normal(size=(30, 3))
    starts, ends = np.array([0, 10, 18, 30]), np.array([7, 18, 25])
    used = random.random(30) < 0.7
    used[10:18] = False  # held out
    actions[7:18], states[25:], states[10:18] = np.nan, np.inf, 1e200  # never seen
    mask = np.array([True, False])
    samples = [(t, end) for s, end in zip(starts, ends, strict=False) for t in range(s, end) if used[t]]
    seen = np.array([states[t] for t, _ in samples])
    shown = np.array([[actions[min(t + k, end - 1)] - states[t] * [1, 0, 0] for k in range(4)] for t, end in samples])
    stats = compute_norm_stats(states, actions, starts, 4, mask, ends=ends, used=used)
    for values, entry in ((seen, stats["state"]), (shown.reshape(-1, 3), stats["actions"])):
        ordered = np.sort(values, axis=0)
        np.testing.assert_allclose(entry.mean, values.mean(axis=0), atol=1e-12)
        np.testing.assert_allclose(entry.std, values.std(axis=0), atol=1e-12)
        np.testing.assert_allclose(entry.q01, ordered[-(-len(values) // 100) - 1], atol=1e-12)
        np.testing.assert_allclose(entry.q99, ordered[-(-99 * len(values) // 100) - 1], atol=1e-12)
    ranges = sample_range(states, actions, starts, 4, mask, ends=ends, used=used)
    np.testing.assert_allclose(ranges["actions"], [shown.min(axis=(0, 1)), shown.max(axis=(0, 1))])
    np.testing.assert_allclose(ranges["state"], [seen.min(axis=0), seen.max(axis=0)])
