"""How numbers become places and labels on an axis, and how a long series becomes a short one that looks the same."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, Real

# Beyond these, differences and logarithms leave what a double can hold.
_LARGEST, _SMALLEST, _ZERO = 1e300, 1e-300, 1e-280
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# A range narrower than this share of its values is noise of rounding, if to float32: it is drawn as a constant.
_NARROWEST = 5e-7


@dataclass(frozen=True)
class Axis:
    """A range of values; with `log`, equal ratios lie equally far apart and what is not positive has no place."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def fit(cls, arrays: Iterable[Real[np.ndarray, "..."]], log: bool = False, margin: float = 0.0) -> "Axis":
        """The axis on which every finite value has a place, with a margin on both ends as a share of its length."""
        values = np.concatenate([np.empty(0), *(np.ravel(_drawable(array, log)) for array in arrays)])
        values = values[np.isfinite(values)]
        if not values.size:
            return cls(0.1, 10.0, log) if log else cls(0.0, 1.0)
        low, high = float(values.min()), float(values.max())
        size = max(abs(low), abs(high))
        if log:
            low, high = math.log10(low), math.log10(high)
            spare = (high - low) * margin if high - low > _NARROWEST else 0.5
            return cls(max(10 ** (low - spare), _SMALLEST), min(10 ** min(high + spare, 305.0), _LARGEST), log)
        if size < _ZERO:
            return cls(-1.0, 1.0)
        spare = (high - low) * margin if high - low > _NARROWEST * size else size / 2
        return cls(low - spare, high + spare)

    def place(self, values: Real[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Where values lie: 0 at the low end, 1 at the high end, NaN for what cannot be drawn."""
        drawable = _drawable(values, self.log)
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            return (np.log10(drawable) - low) / (high - low)
        return (drawable - self.low) / (self.high - self.low)

    def ticks(self, about: int = 5) -> list[tuple[float, str]]:
        """Round values inside the range, with their labels."""
        if not self.log:
            return _linear_ticks(self.low, self.high, about)
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if last - first < 1:
            return _linear_ticks(self.low, self.high, about - 1)
        if last - first < 2:
            values = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
            return [(value, number(value)) for value in values if self.low <= value <= self.high]
        every = math.ceil((last - first + 1) / (about + 1))
        return [(float(f"1e{power}"), _power_label(power)) for power in range(first, last + 1, every)]


def number(value: float, digits: int = 4) -> str:
    """A number as a person writes it, to so many digits: 0.05, 2,000, 20k, 1.5M, 3·10⁻⁵."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-4 or size >= 1e9:
        mantissa, power = f"{size:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        text = f"10{str(int(power)).translate(_SUPERSCRIPT)}"
        text = text if mantissa == "1" else f"{mantissa}·{text}"
    elif size >= 1e6:
        text = f"{size / 1e6:.{digits}g}M"
    elif size >= 1e4:
        text = f"{size / 1e3:.{digits}g}k"
    else:
        decimals = max(0, digits - 1 - math.floor(math.log10(size)))
        text = f"{size:,.{decimals}f}"
        text = text.rstrip("0").rstrip(".") if decimals else text
    return ("−" if value < 0 else "") + text


def thin(lower: Float[np.ndarray, " n"], upper: Float[np.ndarray, " n"], limit: int) -> Int[np.ndarray, " m"]:
    """Which points to keep of a long series: of every stretch its lowest, its highest, or that there is none.

    At most `limit` and the two ends; no peak is lost. A gap shorter than a stretch is.
    """
    if len(lower) <= limit:
        return np.arange(len(lower))
    keep = {0, len(lower) - 1}
    for stretch in np.array_split(np.arange(len(lower)), max(1, limit // 2)):
        finite = stretch[np.isfinite(lower[stretch]) & np.isfinite(upper[stretch])]
        if not finite.size:
            keep.add(int(stretch[0]))
            continue
        keep.update((int(finite[np.argmin(lower[finite])]), int(finite[np.argmax(upper[finite])])))
    return np.array(sorted(keep))


def split_at_gaps(present: Bool[np.ndarray, " n"]) -> list[slice]:
    """The stretches of consecutive points that are there."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], present, [False]]).astype(np.int8)))
    return [slice(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _drawable(values: Real[np.ndarray, "..."], log: bool) -> Float[np.ndarray, "..."]:
    numbers = np.asarray(values, np.float64)
    if log:
        return np.where((numbers >= _SMALLEST) & (numbers <= _LARGEST), numbers, np.nan)
    return np.where(np.abs(numbers) <= _LARGEST, numbers, np.nan)


def _linear_ticks(low: float, high: float, about: int) -> list[tuple[float, str]]:
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough)))
    values = [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    # As many digits as it takes to tell neighbours apart.
    digits = max(4, math.ceil(math.log10(max(abs(low), abs(high)) / step)) + 2)
    return [(value, number(value, digits)) for value in values]


def _power_label(power: int) -> str:
    return number(10.0**power) if power >= -2 else f"10{str(power).translate(_SUPERSCRIPT)}"
