"""`pirl configs`: every preset in one table, and each of them as YAML that trains."""

import os
import subprocess
import sys

import pytest

from pirl.config import get_config, list_configs, load_config
from python_path import python_path


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
