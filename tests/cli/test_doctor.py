"""`pirl doctor`: it finds what is broken, says what to do, and never breaks or is held up itself."""

import importlib.metadata
import io
import json
import os
import resource
import sys
import time
from pathlib import Path

import pytest

from pirl import memory
from pirl.cli.main import main
from pirl.doctor import Finding, examine
from pirl.doctor.machine import examine_machine, examine_open_files
from pirl.doctor.probes import Answer
from pirl.doctor.software import (
    examine_extras,
    examine_packages,
    missing_packages,
    needed_packages,
    pinned_versions,
)
from pirl.doctor.storage import examine_place
from python_path import python_path

ROOT = Path(__file__).parents[2]


@pytest.fixture
def doctor(call, tmp_path):
    """Call the doctor; gives the exit code, what was printed, and the findings by name."""

    def run():
        code, out, _ = call("doctor", "--json", "found.json")
        found = json.loads((tmp_path / "found.json").read_text())
        assert found["fit"] == (code == 0)
        return code, out, {finding["name"]: finding for finding in found["findings"]}

    return run


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    """Put a module before all others, here and in processes that are started."""

    def write(name, code):
        (tmp_path / "modules").mkdir(exist_ok=True)
        (tmp_path / "modules" / f"{name}.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", python_path(tmp_path / "modules"))
        monkeypatch.syspath_prepend(tmp_path / "modules")

    return write


def test_a_working_machine_is_told_so_without_leaving_anything_or_calling_anyone(doctor, on_path, tmp_path):
    on_path("sitecustomize", "import socket\nsocket.getaddrinfo = socket.socket.connect = None\n")
    code, out, found = doctor()
    assert code == 0
    assert "pirl works here" in out
    assert found["jax"]["detail"].startswith(importlib.metadata.version("jax"))
    assert found["cpu devices"]["detail"] == "8 × cpu"  # which the suite asks XLA for
    assert found["h264"]["state"] == found["av1"]["state"] == "good"
    assert found["cores"]["detail"].split()[0] == str(len(os.sched_getaffinity(0)))
    assert {package.name for package in needed_packages()} <= set(found)
    assert all(finding["advice"] for finding in found.values() if finding["state"] == "bad")
    assert found["runs"]["detail"].startswith(str(tmp_path / "runs"))
    assert {path.name for path in tmp_path.iterdir()} == {"found.json", "modules"}


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_examined(call, monkeypatch, tmp_path):
    monkeypatch.setattr("pirl.doctor.examine", None)
    (tmp_path / "file").touch()
    code, _, err = call("doctor", "--json", "file/found.json")
    assert (code, "it is no directory" in err) == (2, True)


def test_what_pirl_needs_and_is_broken_ends_in_exit_code_1(doctor, on_path, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PIRL_CACHE", str(tmp_path / "file" / "cache"))
    on_path("tyro", "import os\nos.abort()\n")
    (tmp_path / "modules" / "flax-99.dist-info").mkdir()
    (tmp_path / "modules" / "flax-99.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: flax\nVersion: 99\n"
    )
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    code, out, found = doctor()
    assert code == 1
    broken = {name for name, finding in found.items() if finding["state"] == "bad" and finding["needed"]}
    assert {"cache", "tyro", "flax", "devices"} <= broken
    assert "PIRL_CACHE" in found["cache"]["advice"]
    assert "SIGABRT" in found["tyro"]["detail"]
    assert "pirl needs <0.13,>=0.12.8" in found["flax"]["detail"]
    assert "JAX_PLATFORMS=cuda" in found["devices"]["advice"]
    assert "pirl does not work here yet. Fix: devices" in out


def test_a_simulator_that_crashes_takes_nothing_with_it(doctor, on_path):
    on_path("mujoco", "import os\nos.abort()\n")
    code, out, found = doctor()
    assert code == 0
    assert found["rendering"]["state"] == "bad"
    assert "egl: ended by SIGABRT" in found["rendering"]["detail"]
    assert "libegl1" in found["rendering"]["advice"]
    assert "some optional parts do not: rendering" in out


def test_a_simulator_that_hangs_holds_nothing_up(on_path, monkeypatch, tmp_path):
    on_path("mujoco", "import time\ntime.sleep(1000)\n")
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    monkeypatch.setenv("PIRL_CACHE", str(tmp_path / "cache"))
    begun = time.monotonic()
    found = {finding.name: finding for finding in examine(tmp_path, timeout=1.0)}
    assert time.monotonic() - begun < 500  # half of what the simulator would take
    assert "osmesa: no answer in time" in found["rendering"].detail
    assert "egl" not in found["rendering"].detail  # MUJOCO_GL has chosen


@pytest.mark.slow
def test_black_pictures_are_no_pictures(on_path, monkeypatch, tmp_path):
    on_path(
        "mujoco",
        """
import contextlib, types
import numpy as np
class MjModel:
    from_xml_string = staticmethod(lambda text: None)
MjData = lambda model: None
mj_forward = lambda model, data: None
Renderer = lambda *_: contextlib.nullcontext(
    types.SimpleNamespace(update_scene=lambda data: None, render=lambda: np.zeros((32, 32, 3), np.uint8)))
""",
    )
    monkeypatch.setenv("PIRL_CACHE", str(tmp_path / "cache"))
    found = {finding.name: finding for finding in examine(tmp_path)}
    assert found["rendering"].state == "bad"
    assert "egl: the picture is black" in found["rendering"].detail


def test_the_tokeniser_of_full_size_policies_is_found_missed_or_refused(monkeypatch, tmp_path):
    from pirl.doctor.media import examine_tokenizers

    def look():
        return list(examine_tokenizers())[1]

    monkeypatch.delenv("PIRL_TOKENIZER", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OPENPI_DATA_HOME", str(tmp_path))
    missed = look()
    assert (missed.state, missed.needed) == ("absent", False)
    assert missed.advice.startswith("curl ")
    monkeypatch.setenv("PIRL_TOKENIZER", str(tmp_path / "nowhere"))
    refused = look()
    assert refused.state == "bad"
    assert "PIRL_TOKENIZER" in refused.advice
    (tmp_path / "damaged").write_bytes(b"no vocabulary")
    monkeypatch.setenv("PIRL_TOKENIZER", str(tmp_path / "damaged"))
    assert look().state == "bad"
    monkeypatch.setenv("PIRL_TOKENIZER", str(ROOT / "src/pirl/models/assets/tiny_tokenizer.model"))
    assert look().state == "good"


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("os.replace", "renamed"),
        ("fcntl.flock", "locked"),
        ("mmap.mmap", "memory-mapped"),
    ],
)
def test_a_filesystem_that_lacks_something_is_named_with_it(broken, said, monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(broken, refuse)
    found = examine_place("runs", tmp_path / "not" / "yet", "Go elsewhere.")
    assert found.breaks_pirl
    assert f"files cannot be {said}: Operation not supported" in found.detail
    assert found.advice == "Go elsewhere."
    assert list(tmp_path.iterdir()) == []


def test_locks_that_lock_nobody_out_are_found_out(monkeypatch, tmp_path):
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    found = examine_place("runs", tmp_path, "Go elsewhere.")
    assert found.breaks_pirl
    assert "locked, but it has no effect" in found.detail


@pytest.mark.parametrize(
    ("soft", "hard", "advice"),
    [(256, 10**6, "ulimit -n 4096"), (256, 2000, "ulimit -n 2000"), (256, resource.RLIM_INFINITY, "ulimit -n 4096")],
)
def test_too_few_open_files_can_be_raised_as_far_as_the_system_lets_one(soft, hard, advice):
    found = examine_open_files(soft, hard)
    assert found.state == "bad"
    assert not found.breaks_pirl
    assert found.advice.startswith(advice)
    assert examine_open_files(1024, hard).state == "good"


def test_the_limit_of_a_container_is_told(monkeypatch, tmp_path):
    """As version 1 of control groups writes it."""
    files = {"limit_in_bytes": 2**30, "usage_in_bytes": 0, "stat": "total_inactive_file 0"}
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(memory, "_GROUPS", (tuple(tmp_path / name for name in files),))
    (found,) = (finding for finding in examine_machine() if finding.name == "memory")
    assert found.detail.endswith(" available; the container may use 1.0 GiB")


def test_packages_and_extras_are_held_against_what_the_installation_asks_for(tmp_path, monkeypatch):
    wanted = [
        *("numpy<1", "rich", "nowhere>=2"),
        *('nowhere; extra == "wandb"', 'rich>=1; extra == "ray"', 'rich>=999; extra == "sweep"'),
        'inner[deep]; extra == "plan"',  # inner is installed, what its extra needs is not
    ]
    for name, requirements in {"pirl": wanted, "inner": ['nowhere; extra == "deep"']}.items():
        extras = [line.split('"')[1] for line in requirements if "extra" in line]
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1", "Requires-Python: >=3.11"]
        lines += [f"Requires-Dist: {line}" for line in requirements] + [f"Provides-Extra: {extra}" for extra in extras]
        (tmp_path / f"{name}-1.dist-info").mkdir()
        (tmp_path / f"{name}-1.dist-info" / "METADATA").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    packages = {finding.name: finding for finding in examine_packages(Answer([], ""))}
    assert {name: finding.state for name, finding in packages.items()} == {
        "numpy": "bad",
        "rich": "good",
        "nowhere": "bad",
    }
    assert packages["nowhere"].advice == "pip install 'nowhere>=2'"
    assert (missing_packages("wandb"), missing_packages("ray"), missing_packages("trackio")) == (["nowhere"], [], None)
    assert missing_packages("plan") == ["nowhere"]
    extras = {finding.name: finding for finding in examine_extras()}
    assert {name: finding.state for name, finding in extras.items()} == {
        **{"wandb": "absent", "ray": "good", "sweep": "bad", "plan": "absent"}
    }
    assert extras["plan"].advice == "pip install 'pirl[plan]'"
    assert not any(finding.breaks_pirl for finding in extras.values())


def test_the_tested_versions_are_the_pinned_ones():
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    tested = pinned_versions()
    assert {f"{name}=={tested[name]}" for name in ("jax", "flax", "optax")} <= set(pins)
    assert {package.name for package in needed_packages()} <= set(tested)


def test_a_terminal_without_check_marks_still_tells_good_from_bad(monkeypatch):
    """Every mark would be a question mark in ASCII."""
    states = ("good", "absent", "bad")
    monkeypatch.setattr("pirl.doctor.examine", lambda _: iter(Finding("room", state, state, "so") for state in states))
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(SystemExit):
        main(["doctor"])
    words = [line.split()[:2] for line in stream.buffer.getvalue().decode().splitlines()[1:4]]
    assert words == [["+", "good"], ["-", "absent"], ["x", "bad"]]
