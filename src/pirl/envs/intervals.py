"""What a number of successes tells: intervals of a rate and of a paired difference, and a test of that difference."""

import math
from dataclasses import dataclass
from statistics import NormalDist

# A difference whose p value is below this is told as one.
SIGNIFICANT = 0.05


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a success rate; of no episodes at all, everything is possible."""
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}")
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate = successes / n
    centre = rate + z**2 / (2 * n)
    spread = z * math.sqrt(rate * (1 - rate) / n + z**2 / (4 * n**2))
    # Rounding must not move the ends that are known exactly.
    low = 0.0 if successes == 0 else (centre - spread) / (1 + z**2 / n)
    high = 1.0 if successes == n else (centre + spread) / (1 + z**2 / n)
    return low, high


@dataclass(frozen=True)
class Pairs:
    """How often two policies succeeded from the same starts."""

    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def n(self) -> int:
        """The number of pairs."""
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def difference(self) -> float:
        """The rate of the second minus the rate of the first."""
        return (self.only_second - self.only_first) / self.n if self.n else 0.0


def mcnemar(pairs: Pairs) -> float:
    """The exact two-sided p value of there being no difference, given how many pairs disagree."""
    disagreeing = pairs.only_first + pairs.only_second
    fewer = min(pairs.only_first, pairs.only_second)
    tail = sum(math.comb(disagreeing, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**disagreeing)


def paired_difference(pairs: Pairs, confidence: float = 0.95) -> tuple[float, float]:
    """Newcombe's interval (1998, method 10) of the rate of the second minus the rate of the first.

    Of the intervals that keep what they promise with few pairs and rates near 0 or 1 it is the one in closed form: two
    Wilson intervals, combined by the correlation of the outcomes.
    """
    n = pairs.n
    if n == 0:
        return -1.0, 1.0
    first, second = pairs.both + pairs.only_first, pairs.both + pairs.only_second
    low_1, high_1 = (abs(first / n - end) for end in wilson(first, n, confidence))
    low_2, high_2 = (abs(second / n - end) for end in wilson(second, n, confidence))
    phi = _correlation(pairs)
    below = math.sqrt(max(0.0, low_2**2 - 2 * phi * low_2 * high_1 + high_1**2))
    above = math.sqrt(max(0.0, high_2**2 - 2 * phi * high_2 * low_1 + low_1**2))
    return max(-1.0, pairs.difference - below), min(1.0, pairs.difference + above)


def _correlation(pairs: Pairs) -> float:
    """Of the two outcomes, with a continuity correction where it is positive."""
    first, second = pairs.both + pairs.only_first, pairs.both + pairs.only_second
    product = first * (pairs.n - first) * second * (pairs.n - second)
    if product == 0:
        return 0.0
    excess: float = pairs.both * pairs.neither - pairs.only_first * pairs.only_second
    if excess > 0:
        excess = max(0.0, excess - pairs.n / 2)
    return excess / math.sqrt(product)


def probability(p_value: float) -> str:
    """A p value as it follows a p, with as many digits as it deserves."""
    return "< 0.0001" if p_value < 0.0001 else f"= {p_value:.4f}" if p_value < 0.01 else f"= {p_value:.3f}"
