"""What is said of the host's memory is what is there."""

import numpy as np

from pirl import memory
from pirl.memory import machine_memory, read_host

GIB = 2**30


def test_the_host_s_memory_grows_by_what_is_taken():
    before = read_host()
    filled = np.ones(64 << 20, np.uint8)
    after = read_host()
    assert 48 << 20 < after.used - before.used < 80 << 20
    assert after.peak >= after.used
    assert 0 < after.available < after.total
    assert filled.size


def test_a_container_s_limit_counts(monkeypatch, tmp_path):
    contents = {"memory.max": GIB, "memory.current": GIB // 2, "memory.stat": f"anon 5\ninactive_file {GIB // 4}"}
    for name, text in contents.items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(memory, "_GROUPS", (tuple(tmp_path / name for name in contents),))
    assert (read_host().total, read_host().available) == (GIB, GIB - GIB // 4)
    (tmp_path / "memory.max").write_text("max\n")
    assert GIB < read_host().total <= machine_memory()
