"""Values from files and from texts become what annotations ask for, or nothing at all."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pirl.conversion import BOOLS, LARGEST, convert, in_words


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("1e3", int, 1000),
        ("50.0", int, 50),
        (50.0, int, 50),
        (str(LARGEST - 1), int, LARGEST - 1),
        ("3e-4", float, 3e-4),
        ("none", int | None, None),
        ("none", str, "none"),
        ("12", int | str, 12),
        ("twelve", int | str, "twelve"),
        ("Yes", bool, True),
        ("2", Literal[1, 2], 2),
        ("a, b", tuple[str, ...], ("a", "b")),
        ("3,4", tuple[int, int], (3, 4)),
        ("runs/here", Path, Path("runs/here")),
        (Path("runs"), Path | None, Path("runs")),
        ({"a": "1"}, Mapping[str, int], {"a": 1}),
        ([1, "x"], Any, [1, "x"]),
    ],
)
def test_what_a_person_types_becomes_what_is_wanted(text: Any, hint: Any, value: Any) -> None:
    found = convert(text, hint, texts=True)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        *(("nan", float), ("nan", int), (math.nan, float), ("1.5", int), (str(LARGEST), int), (True, int), ("", int)),
        *(("1,2,3", tuple[int, int]), ("1", tuple[int, int]), (3, tuple[int, ...]), ("x", tuple[int, ...])),
        *((True, Literal[1, 2]), ("3", Literal[1, 2]), ("maybe", bool), (1, bool), (3, str), ("a\0b", Path)),
        *(("a=1", Mapping[str, int]), (3, list[int])),
    ],
)
def test_what_does_not_fit_is_refused(value: Any, hint: Any) -> None:
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


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int | None, "a whole number or none"),
        (Literal["a", "b"], "a or b"),
        (tuple[str, ...], "a list of texts"),
        (tuple[int, int], "a list of 2, each a whole number"),
        (Mapping[str, float], "a mapping to a number"),
        (Path, "a path"),
        (list[int], "list"),
    ],
)
def test_a_type_is_told_in_words(hint: Any, words: str) -> None:
    assert in_words(hint) == words
