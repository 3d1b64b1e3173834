"""The statistics of episodes, against their definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pirl.data.lerobot.metadata import QUANTILES, Stats, column_stats, combine, image_stats

NUMBERS = st.integers(-1000, 1000).map(float)


def stack(parts: list[Stats]) -> Stats:
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}


@given(st.lists(NUMBERS, min_size=1, max_size=300))
def test_a_quantile_is_the_smallest_value_that_reaches_its_share(values: list[float]) -> None:
    stats = column_stats(np.array(values)[:, None])
    for name, percent in QUANTILES.items():
        (mark,) = stats[name]
        assert mark in values
        assert 100 * sum(value <= mark for value in values) >= percent * len(values)
        assert 100 * sum(value < mark for value in values) < percent * len(values)


@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=50), min_size=1, max_size=6))
def test_episodes_combine_to_the_statistics_of_all_their_frames(episodes: list[list[float]]) -> None:
    combined = combine(stack([column_stats(np.array(values)[:, None]) for values in episodes]))
    together = np.concatenate(episodes)
    true = column_stats(together[:, None])
    for name in ("min", "max", "count"):
        np.testing.assert_array_equal(combined[name], true[name])
    np.testing.assert_allclose(combined["mean"], together.mean(), atol=1e-9)
    np.testing.assert_allclose(combined["std"], together.std(), atol=1e-6)  # of numbers up to 1000
    for name, percent in QUANTILES.items():
        if percent != 50:
            assert (combined[name] - true[name]) * (percent - 50) >= 0, "low quantiles from below, high ones from above"


@pytest.mark.parametrize("length", [1, 101])
def test_statistics_of_images_are_those_of_their_pixels(length: int) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (length, 4, 6, 3)).astype(np.uint8)
    frames[..., 1] //= 3
    stats = image_stats(frames)
    sample = frames if length <= 100 else frames[np.round(np.linspace(0, 100, 100)).astype(int)]
    pixels = sample.reshape(-1, 3) / 255
    true = column_stats(pixels)
    assert stats.pop("count") == [len(sample)]
    for name, value in stats.items():
        np.testing.assert_allclose(value, true[name].reshape(3, 1, 1), atol=1e-12, err_msg=name)


def test_long_episodes_and_large_images_are_sampled_as_lerobot_does() -> None:
    assert image_stats(np.zeros((2000, 1, 1, 3), np.uint8))["count"] == [299]  # 2000^0.75
    frames = np.zeros((1, 480, 640, 3), np.uint8)
    frames[:, ::4, ::4] = 255  # 640 pixels are thinned to every fourth
    assert image_stats(frames)["min"].ravel().tolist() == [1, 1, 1]
