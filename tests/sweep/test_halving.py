"""Halving against schedules that were worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pirl.errors import UserError
from pirl.sweep.halving import Halving, make_rungs, parse_rungs, rank


@pytest.mark.parametrize(
    ("rungs", "reduction", "trials", "counts", "work"),
    [
        ((5, 15, 45), 3, 9, [9, 3, 1], 9 * 5 + 3 * 10 + 1 * 30),
        ((5, 15, 45), 3, 8, [8, 2, 1], 8 * 5 + 2 * 10 + 1 * 30),
        ((1, 2, 4, 8), 2, 8, [8, 4, 2, 1], 8 + 4 + 4 + 4),
        ((10, 20), 4, 3, [3, 1], 40),
        ((100,), 3, 7, [7], 700),
        ((2, 4, 8), 2, 1, [1, 1, 1], 8),
    ],
)
def test_schedules(rungs, reduction, trials, counts, work):
    halving = Halving(rungs, reduction)
    assert halving.schedule(trials) == list(zip(counts, rungs, strict=True))
    assert halving.work(trials) == work


@pytest.mark.parametrize(
    ("least", "most", "reduction", "rungs"),
    [
        (5, 45, 3, (5, 15, 45)),
        (None, 45, 3, (5, 15, 45)),
        (6, 45, 3, (15, 45)),
        (5, 100, 3, (11, 33, 100)),
        (1, 8, 2, (1, 2, 4, 8)),
        (45, 45, 3, (45,)),
        (None, 2, 3, (2,)),
        (None, 1500, 3, (166, 500, 1500)),
    ],
)
def test_rungs_lead_to_the_last_and_do_not_begin_below_the_least(least, most, reduction, rungs):
    assert make_rungs(least, most, reduction) == rungs


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.integers(2, 10))
def test_rungs_can_always_be_climbed(least, most, reduction):
    if least <= most:
        rungs = Halving(make_rungs(least, most, reduction), reduction).rungs
        assert rungs[-1] == most
        assert rungs[0] >= least
        assert rungs[0] < least * reduction + reduction


def test_the_best_go_on_in_their_order():
    values = {0: 0.2, 1: 0.9, 2: 0.5, 3: 0.9, 4: 0.1, 5: 0.4}
    assert Halving((1, 3), 3).promote(values, "max") == [1, 3]
    assert Halving((1, 3), 3).promote(values, "min") == [4, 0]
    assert Halving((1, 3), 2).promote(values, "max") == [1, 3, 2]


def test_who_failed_does_not_go_on_and_makes_no_room():
    halving = Halving((1, 3), 3)
    assert halving.promote({0: None, 1: 0.1, 2: None, 3: 0.5, 4: 0.2, 5: None}, "max") == [3, 4]
    assert halving.promote({0: None, 1: None, 2: None, 3: None, 4: None, 5: 0.0}, "max") == [5]
    assert halving.promote({0: None, 1: None}, "max") == []


@given(st.dictionaries(st.integers(0, 50), st.floats(allow_nan=False), min_size=1), st.integers(2, 5))
def test_nobody_who_stays_behind_was_better(values, reduction):
    promoted = Halving((1, 2), reduction).promote(values, "max")
    assert len(promoted) == max(1, len(values) // reduction)
    left = [value for number, value in values.items() if number not in promoted]
    assert not left or max(left) <= min(values[number] for number in promoted)
    assert sorted(rank(values, "min")) == sorted(values)


@pytest.mark.parametrize("rungs", [(), (0, 3), (3, 3), (5, 4)])
def test_rungs_that_cannot_be_climbed_are_refused(rungs):
    with pytest.raises(UserError, match="each larger than the one before"):
        Halving(rungs)


def test_words_that_are_no_rungs_are_refused():
    assert parse_rungs("5, 15,45") == (5, 15, 45)
    for text in ("5,x", "", "5,,6", "-1,2"):
        with pytest.raises(UserError, match="such as 5,15,45"):
            parse_rungs(text)
    with pytest.raises(UserError, match="2 or more"):
        Halving((1, 2), 1)
    with pytest.raises(UserError, match="from 1 to 45"):
        make_rungs(50, 45, 3)
    with pytest.raises(UserError, match="1 or more"):
        make_rungs(None, 0, 3)
