"""Normalisation statistics of states and action chunks: what OpenPI's compute_norm_stats estimates, computed exactly."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Float64, Int, Int64

from pirl.errors import DataError
from pirl.interop.norm_stats import NormStats

# What OpenPI's normaliser adds to the standard deviation and to the quantile range before it divides by them.
EPSILON = 1e-6
# Values of this size are no measurement, and their squares would overflow.
LARGEST = 1e100
# Deltas enumerated at a time: few enough to stay in the processor's cache.
BLOCK = 2**16

# Mean, standard deviation, q01 and q99 of one dimension.
Summary = tuple[float, float, float, float]


def compute_norm_stats(
    states: Float[np.ndarray, "frames state_dim"],
    actions: Float[np.ndarray, "frames action_dim"],
    starts: Int[np.ndarray, " episodes_plus_one"],
    horizon: int,
    delta_mask: Bool[np.ndarray, " dims"] | None = None,
) -> dict[str, NormStats]:
    """Statistics of `state` and `actions` over all training samples, one sample per frame.

    Episode i is rows `starts[i]:starts[i + 1]`. A sample holds its frame's state and the chunk of the `horizon` actions
    from there on, the last one repeated past the end of the episode, so an action counts as often as chunks show it.
    Dimensions set in `delta_mask` are taken relative to the sample's state; those beyond the mask are absolute.

    A quantile q of n values is the smallest value v with at least q * n values <= v. OpenPI looks for the first bin of
    a histogram whose cumulative count reaches q * n and reports its left edge; this is that rule with bins so narrow
    that each holds one value, so every quantile is a value of the data. The two differ by OpenPI's bin width, and by
    the counts of the lowest bin, which OpenPI can lose when a later batch widens the range.
    """
    starts = np.asarray(starts, np.int64)
    mask = np.zeros(0, bool) if delta_mask is None else delta_mask
    _check_shapes(states, actions, starts, horizon, mask)
    _check_values("states", states, starts)
    _check_values("actions", actions, starts)

    def column(values: np.ndarray, dim: int) -> Float64[np.ndarray, " frames"]:
        return np.ascontiguousarray(values[:, dim], np.float64)

    once = np.ones(len(states), np.int64)
    counts = _appearances(starts, horizon)
    last = np.repeat(starts[1:] - 1, np.diff(starts))

    def action_summary(dim: int) -> Summary:
        if dim < len(mask) and mask[dim]:
            return _delta_summary(column(states, dim), column(actions, dim), counts, last, horizon)
        return _summary(column(actions, dim), counts)

    summaries = {
        "state": [_summary(column(states, dim), once) for dim in range(states.shape[1])],
        "actions": [action_summary(dim) for dim in range(actions.shape[1])],
    }
    return {name: NormStats(*np.array(rows, np.float64).T) for name, rows in summaries.items()}


def frame_stats(
    name: str, values: Float[np.ndarray, "frames dims"], starts: Int[np.ndarray, " episodes_plus_one"]
) -> NormStats:
    """Statistics of one quantity in which every frame counts once; `name` is what complaints call it."""
    _check_values(name, values, np.asarray(starts, np.int64))
    once = np.ones(len(values), np.int64)
    columns = np.ascontiguousarray(values.T, np.float64)
    return NormStats(*np.array([_summary(column, once) for column in columns], np.float64).T)


def _appearances(starts: Int64[np.ndarray, " episodes_plus_one"], horizon: int) -> Int64[np.ndarray, " frames"]:
    """How many of the steps of all chunks show each row's action."""
    lengths = np.diff(starts)
    frame = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    counts = np.minimum(frame + 1, horizon)
    # The chunk of the last frame shows the last action `horizon` times, the one before once less, and so on.
    reaching = np.minimum(lengths, horizon)
    counts[starts[1:] - 1] = reaching * horizon - reaching * (reaching - 1) // 2
    return counts


def rank(percent: int, total: int) -> int:
    """The smallest count that is at least `percent` of `total`; in integers, so that no rounding can move it."""
    return -(-percent * total // 100)


def _mean(values: Float64[np.ndarray, " frames"], counts: Int64[np.ndarray, " frames"]) -> float:
    """The mean where each value counts so often, summed from the first value so that a constant is its own mean."""
    return float(values[0] + counts @ (values - values[0]) / counts.sum())


def _summary(values: Float64[np.ndarray, " frames"], counts: Int64[np.ndarray, " frames"]) -> Summary:
    """Statistics where each value counts so often."""
    mean = _mean(values, counts)
    order = np.argsort(values)
    reached = np.cumsum(counts[order])
    total = int(reached[-1])
    q01, q99 = values[order[np.searchsorted(reached, [rank(1, total), rank(99, total)])]]
    return mean, float(np.sqrt(counts @ (values - mean) ** 2 / total)), float(q01), float(q99)


def _delta_summary(
    state: Float64[np.ndarray, " frames"],
    action: Float64[np.ndarray, " frames"],
    counts: Int64[np.ndarray, " frames"],
    last: Int64[np.ndarray, " frames"],
    horizon: int,
) -> Summary:
    """Statistics of `action[min(t + k, last[t])] - state[t]` over all frames t and steps k.

    Each of these differences is its own number, so they are enumerated, block by block; kept are only the lowest and
    the highest hundredth, which for a horizon of 50 is less than the states and actions themselves take.
    """
    total = len(state) * horizon
    mean = _mean(action, counts) - _mean(state, np.ones_like(counts))
    lowest, highest = _Lowest(rank(1, total)), _Lowest(total - rank(99, total) + 1)
    squares = 0.0
    rows = max(1, BLOCK // horizon)
    for begin in range(0, len(state), rows):
        frames = np.arange(begin, min(begin + rows, len(state)))[:, None]
        deltas = (action[np.minimum(frames + np.arange(horizon), last[frames])] - state[frames]).ravel()
        lowest.add(deltas)
        highest.add(-deltas)
        deltas -= mean
        squares += float(deltas @ deltas)
    return mean, float(np.sqrt(squares / total)), lowest.greatest(), 0.0 - highest.greatest()  # no -0.0


class _Lowest:
    """The `size` lowest of the numbers shown to it, in memory for a few times as many."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.bound = np.inf
        self.kept: list[np.ndarray] = []
        self.number = 0

    def add(self, values: Float64[np.ndarray, " values"]) -> None:
        """Show it more numbers."""
        below = values[values < self.bound]
        self.kept.append(below)
        self.number += len(below)
        if self.number >= 2 * self.size:
            self.greatest()

    def greatest(self) -> float:
        """The greatest of the lowest; drops what lies above it. At least `size` numbers must have been shown."""
        values = np.concatenate(self.kept)
        values.partition(self.size - 1)
        # A copy, or the view would hold on to all the values.
        self.kept, self.number = [values[: self.size].copy()], self.size
        self.bound = values[self.size - 1]
        return float(self.bound)


def _check_shapes(states: np.ndarray, actions: np.ndarray, starts: np.ndarray, horizon: int, mask: np.ndarray) -> None:
    if horizon < 1:
        raise DataError(f"an action chunk needs at least one step; the horizon is {horizon}.")
    for name, values in (("states", states), ("actions", actions)):
        if values.ndim != 2 or 0 in values.shape:
            raise DataError(
                f"{name} should be rows of numbers, one row per frame; the shape is {values.shape}. "
                "Statistics need at least one frame and one dimension."
            )
        if len(mask) > values.shape[1]:
            raise DataError(
                f"the delta mask covers {len(mask)} dimensions, but {name} have {values.shape[1]}: "
                f"there is no dimension {values.shape[1]}. Shorten the mask."
            )
    if len(states) != len(actions):
        raise DataError(
            f"there are {len(states)} rows of states but {len(actions)} of actions: row "
            f"{min(len(states), len(actions))} has no partner. Every frame needs both."
        )
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != len(states):
        raise DataError(f"episodes should start at row 0 and end at row {len(states)}; starts = {_shorten(starts)}.")
    if len(wrong := np.flatnonzero(np.diff(starts) < 1)):
        episode = int(wrong[0])
        raise DataError(
            f"episode {episode} would start at row {starts[episode]} and end before row {starts[episode + 1]}: "
            "starts must increase, and every episode needs a frame."
        )


def _shorten(values: np.ndarray) -> str:
    return np.array2string(values, threshold=6, edgeitems=2, separator=", ")


def _check_values(name: str, values: np.ndarray, starts: np.ndarray) -> None:
    for dim in range(values.shape[1]):
        usable = np.abs(values[:, dim], dtype=np.float64) < LARGEST  # False for NaN as well
        if not usable.all():
            row = int(np.argmin(usable))
            episode = int(np.searchsorted(starts, row, side="right")) - 1
            raise DataError(
                f"{name}: row {row} (episode {episode}, frame {row - starts[episode]}), dimension {dim} is "
                f"{values[row, dim]}. Statistics need finite numbers: repair the episode or leave it out."
            )


def degenerate_dimensions(
    stats: Mapping[str, NormStats], names: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """A sentence for each dimension whose spread is too small to divide by; none for healthy statistics."""
    sentences = []
    for quantity, entry in stats.items():
        magnitude = np.abs(entry.mean)
        flat = np.zeros(len(magnitude), bool)
        if entry.q01 is not None and entry.q99 is not None:
            magnitude = np.max(np.abs([entry.mean, entry.q01, entry.q99]), axis=0)
            flat = _is_tiny(entry.q99 - entry.q01, magnitude)
        still = _is_tiny(entry.std, magnitude)
        known = (names or {}).get(quantity, ())
        for dim in map(int, np.flatnonzero(flat | still)):
            title = f"{quantity} dimension {dim}" + (f" ({known[dim]})" if dim < len(known) else "")
            sentences.append(f"{title} {_describe(entry, dim, bool(flat[dim]), bool(still[dim]))}")
    return sentences


def _usual(spread: np.ndarray, dim: int) -> float:
    """The median spread of the other dimensions that move at all; 0 if none does."""
    others = np.delete(spread, dim)
    moving = others[others > EPSILON]
    return float(np.median(moving)) if len(moving) else 0.0


def _is_tiny(
    spread: Float64[np.ndarray, " dims"], magnitude: Float64[np.ndarray, " dims"]
) -> Bool[np.ndarray, " dims"]:
    usual = np.array([_usual(spread, dim) for dim in range(len(spread))])
    thresholds = [
        np.full_like(spread, EPSILON),  # the divisor is mostly the normaliser's constant
        1e-5 * magnitude,  # a hundred steps of float32: rounding, not motion
        1e-4 * usual,  # no mixture of units explains this
        1e-2 * np.minimum(magnitude, usual),  # a sensor's jitter about a fixed value, while other dimensions move
    ]
    return spread <= np.max(thresholds, axis=0)


def _describe(entry: NormStats, dim: int, flat: bool, still: bool) -> str:
    std = float(entry.std[dim])
    facts, effects = f"std {std:.4g}", []
    # What does occur in the data, or else a hundredth of what is usual around it.
    deviation = 0.01 * (_usual(entry.std, dim) or abs(float(entry.mean[dim])) or 1.0) if still else std
    if entry.q01 is not None and entry.q99 is not None:
        q01, q99 = float(entry.q01[dim]), float(entry.q99[dim])
        facts = f"q01 {q01:.6g}, q99 {q99:.6g}, {facts}"
        if flat:
            effects.append(f"{2 * deviation / (q99 - q01 + EPSILON):.2g} after quantile normalisation")
    if still:
        effects.append(f"{deviation / (std + EPSILON):.2g} after z-score normalisation")
    becomes = f"a deviation of {deviation:.2g} becomes {' and '.join(effects)}"
    if not still:
        return (
            f"moves too rarely for its quantiles ({facts}): {becomes}, while z-scores are fine; normalise with "
            "z-scores, or set its q01 and q99 in norm_stats.json to the range it can take."
        )
    return (
        f"hardly varies ({facts}): {becomes}; use data in which it moves, or set its statistics in norm_stats.json to "
        "the range it can take."
    )
