"""What every command has in common."""

import sys

from pirl.cli.main import _tell_unraisable


class Late:
    """What fails when nobody can hear of it any more."""

    def __init__(self, error):
        self.error = error

    def __del__(self):
        raise self.error


def test_of_errors_that_nobody_can_catch_only_late_answers_of_a_failed_write_are_not_told(capsys, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", _tell_unraisable)
    for words, is_told in (("Event loop is closed", False), ("it is another", True)):
        Late(RuntimeError(words))
        assert (words in capsys.readouterr().err) == is_told
