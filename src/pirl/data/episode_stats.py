"""Statistics of one episode's features as LeRobot defines them, and of many episodes from those of each."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Shaped, UInt8

Stats = dict[str, np.ndarray]
"""The statistics of one feature by name. A column's have its width [n], a camera's have shape [3, 1, 1]."""

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
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
    """The exact quantiles of each component."""
    return dict(zip(QUANTILES, np.quantile(values.astype(np.float64), list(QUANTILES.values()), axis=0), strict=True))


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
    marks = np.quantile(levels, list(QUANTILES.values()), weights=histogram, method="inverted_cdf")
    return {"min": seen[0], "max": seen[-1], "mean": mean, "std": std, **dict(zip(QUANTILES, marks, strict=True))}


def combine(stats: Mapping[str, Shaped[np.ndarray, "episodes ..."]]) -> Stats:
    """One feature's statistics over several episodes, from those of each stacked along a leading axis.

    Everything is exact but the quantiles, which those of the parts cannot tell: low ones are the lowest of any episode
    and high ones the highest, so that they enclose the true ones; the median is the average of the episodes' medians.
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
    for name, level in QUANTILES.items():
        if level == 0.5:
            combined[name] = (weights * stats[name]).sum(axis=0)
        else:
            combined[name] = stats[name].min(axis=0) if level < 0.5 else stats[name].max(axis=0)
    return combined
