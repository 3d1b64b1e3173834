"""How processes ended, which cores they may use, and how much memory there is."""

import os
import subprocess
import sys

import pytest

from pirl import processes
from pirl.processes import format_exit, machine_memory, read_host, usable_cores

GIB = 2**30


def test_every_exit_is_told_also_by_signals_without_a_name():
    told = {0: "exit code 0", 3: "exit code 3", -9: "ended by SIGKILL", -35: "ended by signal 35"}
    assert {code: format_exit(code) for code in told} == told


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system lets nobody choose cores")
def test_a_process_on_one_core_may_use_one():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    code += "from pirl.processes import usable_cores; print(usable_cores())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "1\n"
    assert usable_cores() == len(os.sched_getaffinity(0))


def test_memory_in_use_grows_by_what_is_taken():
    code = """if True:
        from pirl.processes import read_host
        before = read_host()
        filled = bytearray(b"x") * (64 << 20)
        after = read_host()
        assert 48 << 20 < after.used - before.used < 80 << 20, (before, after)
        assert after.peak >= after.used
        assert 0 < after.available < after.total
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_limit_of_a_container_counts(monkeypatch, tmp_path):
    contents = {"memory.max": GIB, "memory.current": GIB // 2, "memory.stat": f"anon 5\ninactive_file {GIB // 4}"}
    for name, text in contents.items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(processes, "_CGROUPS", (tuple(str(tmp_path / name) for name in contents),))
    assert (read_host().total, read_host().available) == (GIB, GIB - GIB // 4)
    (tmp_path / "memory.max").write_text("max\n")
    assert GIB < read_host().total <= machine_memory()
