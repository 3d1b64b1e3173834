"""Intervals and tests of success rates: published values, closed forms, and how often they are right."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pirl.envs.evaluation import Pairs, mcnemar, paired_difference, wilson

Z = 1.959963984540054
counts = st.integers(0, 60)
pairs_of_outcomes = st.builds(Pairs, counts, counts, counts, counts)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        # Newcombe (1998), two-sided intervals for the single proportion, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_published_intervals(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 5000))
def test_without_or_with_only_successes_wilson_has_a_closed_form(n):
    assert wilson(0, n) == (0.0, pytest.approx(Z**2 / (n + Z**2)))
    assert wilson(n, n) == (pytest.approx(n / (n + Z**2)), 1.0)


@given(st.integers(1, 2000), st.data())
def test_the_ends_of_wilson_are_where_the_score_test_stops_to_reject(n, data):
    successes = data.draw(st.integers(0, n))
    for end in wilson(successes, n):
        if 0 < end < 1:
            assert abs(successes / n - end) == pytest.approx(Z * math.sqrt(end * (1 - end) / n))


def test_of_no_episodes_nothing_is_known():
    assert wilson(0, 0) == (0.0, 1.0)
    assert paired_difference(Pairs(0, 0, 0, 0)) == (-1.0, 1.0)
    assert mcnemar(Pairs(0, 0, 0, 0)) == 1.0


def test_more_successes_than_episodes_are_refused():
    with pytest.raises(ValueError, match="3 successes of 2"):
        wilson(3, 2)


@pytest.mark.parametrize(("n", "rate"), [(20, 0.5), (50, 0.9), (200, 0.83), (200, 0.98)])
def test_wilson_covers_the_truth_about_95_times_in_a_hundred(n, rate):
    """Exactly, by the probability of every outcome."""
    probability = [math.comb(n, k) * rate**k * (1 - rate) ** (n - k) for k in range(n + 1)]
    covered = sum(p for k, p in enumerate(probability) if wilson(k, n)[0] <= rate <= wilson(k, n)[1])
    assert 0.92 < covered < 0.98


def test_paired_outcomes_of_a_published_study():
    """Airway hyper-responsiveness (Bentur et al. 2009), as analysed by Fagerland, Lydersen and Laake (2014)."""
    pairs = Pairs(both=1, only_first=1, only_second=7, neither=12)
    assert pairs.difference == pytest.approx(0.286, abs=5e-4)
    assert paired_difference(pairs) == pytest.approx((0.026, 0.507), abs=5e-4)
    assert mcnemar(pairs) == pytest.approx(0.0703, abs=5e-5)


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [(0, 5, 2 / 32), (0, 6, 2 / 64), (3, 3, 1.0), (2, 10, 2 * (1 + 12 + 66) / 4096), (0, 1, 1.0)],
)
def test_mcnemar_counts_coin_tosses(first, second, p):
    assert mcnemar(Pairs(17, first, second, 4)) == pytest.approx(p)


def test_mcnemar_of_thousands_of_pairs_is_finite():
    # A normal approximation with continuity correction is good to a few per cent here.
    z = (abs(2100 - 1900) - 1) / math.sqrt(4000)
    assert mcnemar(Pairs(0, 1900, 2100, 0)) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=0.02)


@given(pairs_of_outcomes)
def test_exchanging_the_two_turns_the_difference_around(pairs):
    turned = Pairs(pairs.both, pairs.only_second, pairs.only_first, pairs.neither)
    low, high = paired_difference(pairs)
    assert paired_difference(turned) == pytest.approx((-high, -low), abs=1e-12)
    assert mcnemar(turned) == mcnemar(pairs)
    assert -1 <= low <= pairs.difference <= high <= 1


@pytest.mark.parametrize("cells", [(0.4, 0.1, 0.2, 0.3), (0.8, 0.05, 0.1, 0.05), (0.1, 0.4, 0.4, 0.1)])
def test_the_interval_of_the_difference_covers_the_truth(cells):
    rng = np.random.default_rng(0)
    truth, n, trials = cells[2] - cells[1], 60, 3000
    covered = 0
    for counts in rng.multinomial(n, cells, size=trials).tolist():
        low, high = paired_difference(Pairs(*counts))
        covered += low <= truth <= high
    assert 0.93 < covered / trials < 0.98
    # Equal policies are called different less often than promised: the exact test is on the safe side.
    equal = (cells[0], *[(cells[1] + cells[2]) / 2] * 2, cells[3])
    rejected = sum(mcnemar(Pairs(*counts)) < 0.05 for counts in rng.multinomial(n, equal, size=trials).tolist())
    assert rejected / trials < 0.05
