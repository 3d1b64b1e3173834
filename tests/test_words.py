"""Sizes and times as people read them."""

import pytest

from pirl.words import duration, short_duration, size


@pytest.mark.parametrize(
    ("count", "words"),
    [
        *((0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 * 1024, "1.5 MiB")),
        *((2**30, "1.0 GiB"), (2**42, "4,096.0 GiB")),
    ],
)
def test_bytes_have_the_largest_unit_that_they_fill(count, words):
    assert size(count) == words


def test_as_many_digits_as_are_asked_for():
    assert size(2**30 * 1.25, digits=2) == "1.25 GiB"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *((0.2, "0 s"), (35, "35 s"), (89.4, "89 s"), (89.6, "1 min"), (239, "4 min")),
        *((3599, "1 h 00 min"), (7500, "2 h 05 min"), (48 * 3600 - 31, "47 h 59 min"), (76 * 3600 + 100, "3 d 04 h")),
    ],
)
def test_a_wait_is_told_as_people_tell_it(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(("seconds", "words"), [(2.5e-4, "250 µs"), (0.0123, "12.3 ms"), (1.25, "1.25 s")])
def test_a_computation_is_told_in_three_digits(seconds, words):
    assert short_duration(seconds) == words
