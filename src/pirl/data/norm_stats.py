"""Normalization statistics of states and action chunks: what OpenPI's compute_norm_stats estimates, computed exactly."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Float64, Int, Int64

from pirl.errors import DataError
from pirl.interop.norm_stats import NormStats

# What OpenPI's normalizer adds to the standard deviation and to the quantile range before it divides by them.
EPSILON = 1e-6
# Values of this size are no measurement, and their squares would overflow.
_LARGEST = 1e100
# Deltas enumerated at a time: few enough to stay in the processor's cache.
BLOCK = 2**16
_GIVE_RANGE = "give its range in a norm_stats.json (--data.norm-stats FILE)"

# Mean, standard deviation, q01 and q99 of one dimension.
Summary = tuple[float, float, float, float]
# The lowest and the highest value of each dimension, by quantity.
Ranges = Mapping[str, tuple[np.ndarray, np.ndarray]]


def compute_norm_stats(
    states: Float[np.ndarray, "frames state_dim"],
    actions: Float[np.ndarray, "frames action_dim"],
    starts: Int[np.ndarray, " episodes_plus_one"],
    horizon: int,
    delta_mask: Bool[np.ndarray, " dims"] | None = None,
    *,
    ends: Int[np.ndarray, " episodes"] | None = None,
    used: Bool[np.ndarray, " frames"] | None = None,
) -> dict[str, NormStats]:
    """Statistics of `state` and `actions` over all training samples, one sample per frame, or per frame that is `used`.

    Episode i is rows `starts[i]:starts[i + 1]`, or up to `ends[i]`, where it is cut. A sample holds its frame's state and
    the chunk of the `horizon` actions from there on, the last one repeated past the end. Dimensions set in `delta_mask`
    are taken relative to the sample's state; those beyond the mask are absolute.

    A quantile q of n values is the smallest value v with at least q * n values <= v: OpenPI's rule with bins so narrow
    that each holds one value. The two differ by OpenPI's bin width, and by the counts of the lowest bin, which OpenPI can
    lose when a later batch widens the range.
    """
    starts = np.asarray(starts, np.int64)
    mask = np.zeros(0, bool) if delta_mask is None else delta_mask
    _check_shapes(states, actions, starts, horizon, mask)
    samples, last = _samples(starts, ends, used)
    if not len(samples):
        raise DataError("no frames are left to compute statistics of.")
    counts = _occurrences(len(states), samples, last, horizon)
    rows = np.flatnonzero(counts)
    _check_values("states", states, starts, samples)
    _check_values("actions", actions, starts, rows)

    once = np.ones(len(samples), np.int64)
    summaries: dict[str, list[Summary]] = {"state": [], "actions": []}
    for state in np.asarray(states, np.float64).T:
        summaries["state"].append(_summary(state[samples], once))
    for dim, action in enumerate(np.asarray(actions, np.float64).T):
        if dim < len(mask) and mask[dim]:
            state = np.ascontiguousarray(states[:, dim], np.float64)
            summary = _delta_summary(state, np.ascontiguousarray(action), counts, samples, last, horizon)
        else:
            summary = _summary(action[rows], counts[rows])
        summaries["actions"].append(summary)
    return {name: NormStats(*np.array(rows, np.float64).T) for name, rows in summaries.items()}


def sample_range(
    states: Float[np.ndarray, "frames state_dim"],
    actions: Float[np.ndarray, "frames action_dim"],
    starts: Int[np.ndarray, " episodes_plus_one"],
    horizon: int,
    delta_mask: Bool[np.ndarray, " dims"] | None = None,
    *,
    ends: Int[np.ndarray, " episodes"] | None = None,
    used: Bool[np.ndarray, " frames"] | None = None,
) -> Ranges:
    """The lowest and the highest value of each dimension over the same samples."""
    samples, last = _samples(np.asarray(starts, np.int64), ends, used)
    relative = np.zeros(0, np.int64) if delta_mask is None else np.flatnonzero(delta_mask)
    origin = np.zeros((len(samples), actions.shape[1]))
    origin[:, relative] = states[samples][:, relative]
    low, high = np.full(actions.shape[1], np.inf), np.full(actions.shape[1], -np.inf)
    for step in range(horizon):
        values = actions[np.minimum(samples + step, last)] - origin
        low, high = np.minimum(low, values.min(axis=0)), np.maximum(high, values.max(axis=0))
    sampled = np.asarray(states[samples], np.float64)
    return {"state": (sampled.min(axis=0), sampled.max(axis=0)), "actions": (low, high)}


def _samples(
    starts: Int64[np.ndarray, " episodes_plus_one"], ends: np.ndarray | None, used: np.ndarray | None
) -> tuple[Int64[np.ndarray, " samples"], Int64[np.ndarray, " samples"]]:
    last = np.repeat((starts[1:] if ends is None else np.asarray(ends, np.int64)) - 1, np.diff(starts))
    rows = np.arange(starts[-1])
    samples = rows[(rows <= last) & (True if used is None else used)]
    return samples, last[samples]


def _occurrences(
    frames: int, samples: Int64[np.ndarray, " samples"], last: Int64[np.ndarray, " samples"], horizon: int
) -> Int64[np.ndarray, " frames"]:
    """How many steps of all chunks take each row's action."""
    stop = np.minimum(samples + horizon, last + 1)
    changes = np.zeros(frames + 1, np.int64)
    np.add.at(changes, samples, 1)
    np.add.at(changes, stop, -1)
    counts = np.cumsum(changes)[:-1]
    np.add.at(counts, last, samples + horizon - stop)  # past the end, the last action is repeated
    return counts


def rank(percent: int, total: int) -> int:
    """The smallest count that is at least `percent` of `total`; in integers, so that no rounding can move it."""
    return -(-percent * total // 100)


def _mean(values: Float64[np.ndarray, " frames"], counts: Int64[np.ndarray, " frames"]) -> float:
    """The mean where each value counts so often, summed from the first value so that a constant is its own mean."""
    return float(values[0] + counts @ (values - values[0]) / counts.sum())


def _summary(values: Float64[np.ndarray, " frames"], counts: Int64[np.ndarray, " frames"]) -> Summary:
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
    samples: Int64[np.ndarray, " samples"],
    last: Int64[np.ndarray, " samples"],
    horizon: int,
) -> Summary:
    """Statistics of `action[min(t + k, last)] - state[t]` over all samples t and steps k.

    Each of these differences is its own number, so they are enumerated, block by block; kept are only the lowest and
    the highest hundredth, which for a horizon of 50 is less than the states and actions themselves take.
    """
    total, rows = len(samples) * horizon, np.flatnonzero(counts)
    mean = _mean(action[rows], counts[rows]) - _mean(state[samples], np.ones(len(samples), np.int64))
    lowest, highest = _Lowest(rank(1, total)), _Lowest(total - rank(99, total) + 1)
    squares = 0.0
    block = max(1, BLOCK // horizon)
    for begin in range(0, len(samples), block):
        frames, ends = samples[begin : begin + block, None], last[begin : begin + block, None]
        deltas = (action[np.minimum(frames + np.arange(horizon), ends)] - state[frames]).ravel()
        lowest.add(deltas)
        highest.add(-deltas)
        deltas -= mean
        squares += float(deltas @ deltas)
    return mean, float(np.sqrt(squares / total)), lowest.greatest(), 0.0 - highest.greatest()  # no -0.0


class _Lowest:
    """The `size` lowest of a stream of numbers, in memory for a few times as many."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.bound = np.inf
        self.kept: list[np.ndarray] = []
        self.number = 0

    def add(self, values: Float64[np.ndarray, " values"]) -> None:
        below = values[values < self.bound]
        self.kept.append(below)
        self.number += len(below)
        if self.number >= 2 * self.size:
            self.greatest()

    def greatest(self) -> float:
        """The greatest of the lowest; drops what lies above it. At least `size` numbers must have been added."""
        values = np.concatenate(self.kept)
        values.partition(self.size - 1)
        # A copy, or the view would hold on to all the values.
        self.kept, self.number = [values[: self.size].copy()], self.size
        self.bound = values[self.size - 1]
        return float(self.bound)


def _check_shapes(states: np.ndarray, actions: np.ndarray, starts: np.ndarray, horizon: int, mask: np.ndarray) -> None:
    if horizon < 1:
        raise DataError(f"an action chunk needs at least one step; the horizon is {horizon}.")
    relative = int(np.max(np.flatnonzero(mask), initial=-1)) + 1
    for name, values, needed in (("states", states, relative), ("actions", actions, len(mask))):
        if values.ndim != 2 or 0 in values.shape or len(values) != starts[-1]:
            raise DataError(f"{name} have the shape {values.shape}; expected {starts[-1]} frames, and a dimension.")
        if needed > values.shape[1]:
            raise DataError(
                f"the delta mask covers {needed} dimensions, but {name} have {values.shape[1]}: shorten it."
            )


def _check_values(name: str, values: np.ndarray, starts: np.ndarray, rows: Int64[np.ndarray, " rows"]) -> None:
    for dim in range(values.shape[1]):
        usable = np.abs(values[rows, dim], dtype=np.float64) < _LARGEST  # False for NaN as well
        if not usable.all():
            row = int(rows[np.argmin(usable)])
            episode = int(np.searchsorted(starts, row, side="right")) - 1
            raise DataError(
                f"{name}: row {row} (episode {episode}, frame {row - starts[episode]}), dimension {dim} is "
                f"{values[row, dim]}. Statistics need finite numbers: repair the episode or leave it out."
            )


# --- dimensions that hardly move -------------------------------------------------------------------------------------


def safe_scales(stats: Mapping[str, NormStats], ranges: Callable[[], Ranges]) -> dict[str, NormStats]:
    """The same statistics, with safe divisors for dimensions that do not vary.

    A constant one is scaled as the others are (as the median of those that vary; by 1 where none does). One that moves
    too rarely for its quantiles gets its `ranges` (lowest and highest values) in their place.
    """
    result = {}
    for quantity, entry in stats.items():
        flat, still = _degenerate(entry, strictly=True)
        std, q01, q99 = entry.std.copy(), entry.q01, entry.q99
        std[still] = np.median(entry.std[~still]) if not still.all() else 1.0
        if q01 is not None and q99 is not None and (flat | still).any():
            moving = ~(flat | still)
            width = np.median((q99 - q01)[moving]) if moving.any() else 2.0
            low, high = ranges()[quantity]
            rare = flat & ~still
            q01 = np.select([still, rare], [entry.mean - width / 2, low], q01)
            q99 = np.select([still, rare], [entry.mean + width / 2, high], q99)
        result[quantity] = NormStats(entry.mean, std, q01, q99)
    return result


def degenerate_dimensions(
    stats: Mapping[str, NormStats], names: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """A sentence for each dimension whose spread is small to divide by; none for healthy statistics."""
    sentences = []
    for quantity, entry in stats.items():
        (flat, still), (is_rare, is_constant) = _degenerate(entry), _degenerate(entry, strictly=True)
        known = (names or {}).get(quantity, ())
        for dim in map(int, np.flatnonzero(flat | still)):
            facts = f"std {float(entry.std[dim]):.4g}"
            if entry.q01 is not None and entry.q99 is not None:
                facts = f"q01 {float(entry.q01[dim]):.6g}, q99 {float(entry.q99[dim]):.6g}, {facts}"
            if is_constant[dim]:
                text = f"never changes ({facts}), so it is scaled like the others; if the robot moves it, {_GIVE_RANGE}"
            elif is_rare[dim]:
                text = f"moves too rarely for its quantiles ({facts}): its least and greatest values take their place"
            else:
                text = f"hardly varies ({facts}), so small deviations count much; if that is not meant, {_GIVE_RANGE}"
            title = f"{quantity} dimension {dim}" + (f" ({known[dim]})" if dim < len(known) else "")
            sentences.append(f"{title} {text}")
    return sentences


def _degenerate(
    entry: NormStats, *, strictly: bool = False
) -> tuple[Bool[np.ndarray, " dims"], Bool[np.ndarray, " dims"]]:
    """Dimensions whose quantiles, and whose deviation, are small to divide by; `strictly`: nothing but rounding."""
    magnitude = np.abs(entry.mean)
    flat = np.zeros(len(magnitude), bool)
    if entry.q01 is not None and entry.q99 is not None:
        magnitude = np.max(np.abs([entry.mean, entry.q01, entry.q99]), axis=0)
        flat = _is_tiny(entry.q99 - entry.q01, magnitude, strictly)
    return flat, _is_tiny(entry.std, magnitude, strictly)


def _is_tiny(
    spread: Float64[np.ndarray, " dims"], magnitude: Float64[np.ndarray, " dims"], strictly: bool
) -> Bool[np.ndarray, " dims"]:
    usual = np.zeros_like(spread)  # the median spread of the other dimensions that move
    for dim in range(0 if strictly else len(spread)):
        others = np.delete(spread, dim)
        usual[dim] = np.median(others[others > EPSILON]) if (others > EPSILON).any() else 0.0
    thresholds = [
        np.full_like(spread, EPSILON),  # the divisor is mostly the normalizer's constant
        1e-5 * magnitude,  # a hundred steps of float32: rounding, not motion
        1e-4 * usual,  # no mixture of units explains this
        1e-2 * np.minimum(magnitude, usual),  # a sensor's jitter about a fixed value, while other dimensions move
    ]
    return spread <= np.max(thresholds, axis=0)
