"""How processes ended, and what they may use."""

import os
import subprocess
import sys

import pytest

from pirl.processes import exit_in_words, usable_cores


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "ended by SIGKILL"), (-35, "ended by signal 35")]
)
def test_every_end_has_words_also_by_signals_without_a_name(code, words):
    assert exit_in_words(code) == words


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system lets nobody choose cores")
def test_a_process_on_one_core_may_use_one():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    code += "from pirl.processes import usable_cores; print(usable_cores())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "1\n"
    assert usable_cores() == len(os.sched_getaffinity(0))
