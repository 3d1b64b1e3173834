"""What every command has in common."""

import json
import re
import sys
from pathlib import Path

from pirl.cli.main import COMMANDS, _report_unraisable
from pirl.data import list_robots


class Late:
    """What fails when nobody can hear of it any more."""

    def __init__(self, error):
        self.error = error

    def __del__(self):
        raise self.error


def test_of_errors_that_nobody_can_catch_only_late_answers_of_a_failed_write_are_not_told(capsys, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", _report_unraisable)
    for words, is_told in (("Event loop is closed", False), ("it is another", True)):
        Late(RuntimeError(words))
        assert (words in capsys.readouterr().err) == is_told


def commands(group=COMMANDS, before=()):
    for name, entry in group.items():
        if isinstance(entry, dict):
            yield from commands(entry, (*before, name))
        else:
            yield (*before, name)


def test_the_help_of_every_command_speaks_to_people(call):
    for command in commands():
        code, out, err = call(*command, "--help")
        assert (code, err) == (0, "")
        assert out.startswith(f"usage: pirl {' '.join(command)} ")
        assert "None" not in out, "which is Python for what is left out"


def test_the_help_names_every_robot(call):
    shown = " ".join(call("data", "stats", "--help")[1].replace("│", " ").split())
    assert all(robot in re.findall(r"\w+", shown) for robot in list_robots())


def test_json_goes_to_a_file_or_alone_to_standard_output(call):
    expert = ("eval", "expert", "--episodes", 1, "--env.image-size", 28)
    code, out, err = call(*expert, "--json", "a.json")
    assert (code, err) == (0, "")
    assert "expert: success" in out
    written = json.loads(Path("a.json").read_text())
    for given in (["--json"], ["--json", "-"], ["--json=-"], ["--json", "--seed", "0"]):
        code, out, err = call(*expert, *given)
        assert code == 0
        assert json.loads(out)["episodes"] == written["episodes"]
        assert "expert: success" in err
