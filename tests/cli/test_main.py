"""What every command has in common."""

from pirl.cli.main import _tell_uncaught


def test_of_errors_that_nobody_caught_only_late_answers_of_a_failed_write_are_not_told(capsys):
    for error, is_told in ((RuntimeError("Event loop is closed"), False), (RuntimeError("it is another"), True)):
        _tell_uncaught(type(error), error, None)
        assert (str(error) in capsys.readouterr().err) == is_told
