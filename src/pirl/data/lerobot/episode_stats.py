"""Statistics of one episode's features as LeRobot defines them, and of many episodes from those of each."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Shaped, UInt8

from pirl.data.statistics import rank

Stats = dict[str, np.ndarray]
"""The statistics of one feature by name. A column's have its width [n], a camera's have shape [3, 1, 1]."""

QUANTILES = {"q01": 1, "q10": 10, "q50": 50, "q90": 90, "q99": 99}
"""Quantiles by name, in percent. That of n values is the smallest value v for which that many of them are <= v."""

STATISTICS = ("min", "max", "mean", "std", "count", *QUANTILES)

# LeRobot looks at T^0.75 frames of an episode (all of the first hundred), and thins images to about 150 pixels a side.
_FRAMES_AT_LEAST, _FRAMES_AT_MOST = 100, 10_000
_THIN_FROM, _THIN_TO = 300, 150


def column_stats(values: Shaped[np.ndarray, "T n"]) -> Stats:
    """Statistics over the frames of an episode; `min` and `max` stay booleans or integers where the feature is."""
    kept = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64}[values.dtype.kind]
    numbers = values.astype(np.float64)
    return {
        "min": values.min(axis=0).astype(kept),
        "max": values.max(axis=0).astype(kept),
        "mean": numbers.mean(axis=0),
        "std": numbers.std(axis=0),
        "count": np.array([len(values)]),
        **quantiles(numbers),
    }


def quantiles(values: Shaped[np.ndarray, "T n"]) -> Stats:
    """The quantiles of each component."""
    ordered = np.sort(values, axis=0)
    return {name: ordered[rank(percent, len(values)) - 1].astype(np.float64) for name, percent in QUANTILES.items()}


def image_stats(frames: UInt8[np.ndarray, "T H W 3"]) -> Stats:
    """Statistics of each colour in [0, 1] over the pixels of a sample of frames; `count` is the number of frames."""
    count = max(min(len(frames), _FRAMES_AT_LEAST), min(int(len(frames) ** 0.75), _FRAMES_AT_MOST))
    side = max(frames.shape[1:3])
    step = 1 if side < _THIN_FROM else side // _THIN_TO
    pixels = frames[np.round(np.linspace(0, len(frames) - 1, count)).astype(int), ::step, ::step]
    colours = [_level_stats(np.bincount(pixels[..., colour].ravel(), minlength=256)) for colour in range(3)]
    stats = {name: np.array([colour[name] for colour in colours]).reshape(3, 1, 1) for name in colours[0]}
    return {**stats, "count": np.array([count])}


def _level_stats(histogram: Shaped[np.ndarray, "256"]) -> dict[str, float]:
    """Statistics of one colour from how often each of its 256 levels occurs: exact, and without a float per pixel."""
    levels = np.arange(256) / 255
    seen = levels[histogram > 0]
    mean = np.average(levels, weights=histogram)
    std = np.sqrt(np.average((levels - mean) ** 2, weights=histogram))
    reached = np.cumsum(histogram)
    marks = {name: levels[np.searchsorted(reached, rank(p, int(reached[-1])))] for name, p in QUANTILES.items()}
    return {"min": seen[0], "max": seen[-1], "mean": mean, "std": std, **marks}


def combine(stats: Mapping[str, Shaped[np.ndarray, "episodes ..."]]) -> Stats:
    """One feature's statistics over several episodes, from those of each stacked along a leading axis.

    Everything is exact but the quantiles, which those of the parts cannot tell: they lie between the lowest and the
    highest of any episode. Taken are the lowest of the low ones, the highest of the high ones, so that the range between
    them holds no less than it promises, and the average of the medians.
    """
    count = stats["count"].sum(axis=0)
    weights = (stats["count"] / count).reshape(-1, *[1] * (stats["mean"].ndim - 1))
    mean = (weights * stats["mean"]).sum(axis=0)
    combined = {
        "min": stats["min"].min(axis=0),
        "max": stats["max"].max(axis=0),
        "mean": mean,
        "std": np.sqrt((weights * (stats["std"] ** 2 + (stats["mean"] - mean) ** 2)).sum(axis=0)),
        "count": count,
    }
    for name, percent in QUANTILES.items():
        if percent == 50:
            combined[name] = (weights * stats[name]).sum(axis=0)
        else:
            combined[name] = stats[name].min(axis=0) if percent < 50 else stats[name].max(axis=0)
    return combined
