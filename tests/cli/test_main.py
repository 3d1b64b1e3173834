"""What every command has in common, and `pirl configs`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pirl.cli.main import COMMANDS, _report_unraisable
from pirl.config import get_config, list_configs, load_config
from pirl.data import list_robots
from python_path import python_path


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


def test_every_preset_is_listed_with_learner_model_and_purpose(call):
    code, out, _ = call("configs")
    assert code == 0
    assert call("configs", "list")[1] == out
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert set(list_configs()) <= set(lines)
    assert lines["aloha_fold"].split()[1:3] == ["acrlpd", "pi0_base"]
    assert lines["demo_bc"].split()[1:3] == ["bc", "tiny"]


def test_a_preset_is_shown_as_a_file_that_trains(call, tmp_path):
    code, out, _ = call("configs", "show", "droid")
    assert code == 0
    (tmp_path / "droid.yaml").write_text(out)
    assert load_config(tmp_path / "droid.yaml") == get_config("droid")
    assert "# Command: pirl train droid " in out


@pytest.mark.parametrize("program", [("-c", "from pirl.cli.main import main; main()"), ("-m", "pirl.cli.main")])
def test_an_interrupt_while_modules_are_loaded_ends_quietly(tmp_path, program):
    """A module that is loaded early interrupts its own process, as ctrl-C would at that moment."""
    (tmp_path / "argparse.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # who runs tests in the background ignores it
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(30)\n"
    )
    ended = subprocess.run(
        [sys.executable, *program, "--help"],
        env=os.environ | {"PYTHONPATH": python_path(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


INTERRUPTED_WHILE_COMPILING = """
import atexit, os, signal, sys, types
sys.modules["jax"] = types.ModuleType("jax")  # its compiler is at work, and crashes with the interpreter's end:
atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
from pirl.cli.configs import Configs
from pirl.cli.main import main

def run(self):
    print("half of it")
    raise KeyboardInterrupt

Configs.run = run
main()
"""


def test_an_interrupt_does_not_wait_for_the_compiler_to_crash():
    command = [sys.executable, "-c", INTERRUPTED_WHILE_COMPILING, "configs"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "half of it\n", "interrupted\n")
