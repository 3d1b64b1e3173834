"""Errors are told in one line."""

import pytest

from pirl.errors import in_one_line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("\n the disk is full \nat line 3"), "the disk is full "),
        (RuntimeError(" \n"), "RuntimeError"),
        (ValueError("x" * 1000), "x" * 300),
    ],
)
def test_an_error_is_told_by_its_first_line_or_its_kind(error, said):
    assert in_one_line(error) == said
