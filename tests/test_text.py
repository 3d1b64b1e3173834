"""Sizes and times as people read them; typed values become what annotations ask for, or nothing at all."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pirl.text import BOOLS, LARGEST, convert, format_duration, format_seconds, format_size, format_type


def test_sizes_and_times_are_told_in_their_largest_unit() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536 * 1024: "1.5 MiB", 2**42: "4,096.0 GiB"}
    assert {count: format_size(count) for count in sizes} == sizes
    assert format_size(2**30 * 1.25, digits=2) == "1.25 GiB"
    waits = {0.2: "0 s", 89.4: "89 s", 89.6: "1 min", 3599: "1 h 00 min", 7500: "2 h 05 min", 273700: "3 d 04 h"}
    assert {seconds: format_duration(seconds) for seconds in waits} == waits
    times = {2.5e-4: "250 µs", 0.0123: "12.3 ms", 1.25: "1.25 s"}
    assert {seconds: format_seconds(seconds) for seconds in times} == times


def test_what_a_person_types_becomes_what_is_wanted() -> None:
    wanted: list[tuple[Any, Any, Any]] = [
        ("1e3", int, 1000),
        (50.0, int, 50),
        (str(LARGEST - 1), int, LARGEST - 1),
        ("none", int | None, None),
        ("twelve", int | str, "twelve"),
        ("Yes", bool, True),
        ("2", Literal[1, 2], 2),
        ("a, b", tuple[str, ...], ("a", "b")),
        ("3,4", tuple[int, int], (3, 4)),
        ("runs/here", Path, Path("runs/here")),
        ({"a": "1"}, Mapping[str, int], {"a": 1}),
        ([1, "x"], Any, [1, "x"]),
    ]
    for text, hint, value in wanted:
        found = convert(text, hint, texts=True)
        assert (found, type(found)) == (value, type(value)), text


def test_what_does_not_fit_is_refused() -> None:
    unfit: list[tuple[Any, Any]] = [
        *(("nan", float), (math.nan, float), ("1.5", int), (str(LARGEST), int), (True, int), ("", int)),
        *(("1,2,3", tuple[int, int]), ("x", tuple[int, ...]), (True, Literal[1, 2]), (1, bool), ("a\0b", Path)),
    ]
    for value, hint in unfit:
        with pytest.raises(ValueError, match="^"):
            convert(value, hint, texts=True)


@given(st.one_of(st.integers(), st.floats(), st.booleans(), st.text()))
def test_texts_are_read_only_where_there_are_texts(value: Any) -> None:
    """In a file, '1' is no number, 'yes' is not true, and 'none' is a word."""
    for hint in (int, float, bool, type(None)):
        if isinstance(value, str):
            with pytest.raises(ValueError, match="^"):
                convert(value, hint, texts=False)
    if isinstance(value, bool):
        assert convert(value, bool, texts=False) is value


@given(st.sampled_from(sorted(BOOLS)), st.booleans())
def test_true_and_false_have_many_names(word: str, loud: bool) -> None:
    assert convert(word.upper() if loud else word, bool, texts=True) == (word in ("true", "yes", "on", "1"))


def test_a_type_is_told_in_words() -> None:
    words = {
        int | None: "a whole number or none",
        Literal["a", "b"]: "a or b",
        tuple[str, ...]: "a list of texts",
        tuple[int, int]: "a list of 2, each a whole number",
        Mapping[str, float]: "a mapping to a number",
        Path: "a path",
        list[int]: "list",
    }
    assert {hint: format_type(hint) for hint in words} == words
