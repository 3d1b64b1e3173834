"""The process that compiles for a plan."""

import subprocess
import sys

from pirl.config import format_config, get_config


def test_it_ends_when_nobody_waits_for_its_answer_any_more(tmp_path):
    (tmp_path / "config.yaml").write_text(format_config(get_config("demo_state_bc")))
    command = [sys.executable, "-m", "pirl.plan.apart", "cpu:1", str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=300)  # closes its input, as the system does when the other end is gone
    assert (process.returncode, b"Traceback" in said) == (1, False)
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]
