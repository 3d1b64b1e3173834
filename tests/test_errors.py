"""Errors are told in one line."""

from pirl.errors import in_one_line


def test_an_error_is_told_by_its_first_line_or_its_kind():
    assert in_one_line(RuntimeError("\n the disk is full \nat line 3")) == "the disk is full "
    assert in_one_line(RuntimeError(" \n")) == "RuntimeError"
    assert in_one_line(ValueError("x" * 1000)) == "x" * 300
