"""`pirl doctor`: it finds what is broken, says what to do, and never breaks or is held up itself."""

import contextlib
import importlib.metadata
import io
import json
import os
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pirl import doctor, processes
from pirl.cli.main import main
from pirl.doctor import CheckResult, check_directory, check_extras, check_machine, check_packages, run_checks
from python_path import python_path

ROOT = Path(__file__).parents[2]


@pytest.fixture
def diagnose(call, tmp_path):
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


def test_a_working_machine_passes_without_leaving_anything_or_calling_anyone(diagnose, on_path, tmp_path):
    on_path("sitecustomize", "import socket\nsocket.getaddrinfo = socket.socket.connect = None\n")
    code, out, found = diagnose()
    assert code == 0
    assert "pirl works here" in out
    assert found["jax"]["detail"].startswith(importlib.metadata.version("jax"))
    assert found["cpu devices"]["detail"] == "8 × cpu"  # which the suite asks XLA for
    assert found["h264"]["state"] == found["av1"]["state"] == "good"
    assert found["cores"]["detail"].split()[0] == str(len(os.sched_getaffinity(0)))
    assert {package.name for package in doctor.needed_packages()} <= set(found)
    assert all(finding["advice"] for finding in found.values() if finding["state"] == "bad")
    assert found["runs"]["detail"].startswith(str(tmp_path / "runs"))
    assert {path.name for path in tmp_path.iterdir()} == {"found.json", "modules"}


def test_what_pirl_needs_and_is_broken_ends_in_exit_code_1(diagnose, on_path, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PIRL_CACHE", str(tmp_path / "file" / "cache"))
    on_path("jinja2", "import os\nos.abort()\n")
    (tmp_path / "modules" / "flax-99.dist-info").mkdir()
    wrong = "Metadata-Version: 2.1\nName: flax\nVersion: 99\n"
    (tmp_path / "modules" / "flax-99.dist-info" / "METADATA").write_text(wrong)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    code, out, found = diagnose()
    assert code == 1
    broken = {name for name, finding in found.items() if finding["state"] == "bad" and finding["needed"]}
    assert {"cache", "jinja2", "flax", "devices"} <= broken
    assert "PIRL_CACHE" in found["cache"]["advice"]
    assert "SIGABRT" in found["jinja2"]["detail"]
    assert "<0.13,>=0.12.8" in found["flax"]["detail"]
    assert "JAX_PLATFORMS=cuda" in found["devices"]["advice"]
    assert "devices" in out.splitlines()[-2]


def test_a_simulator_that_hangs_or_renders_nothing_does_not_work(on_path, monkeypatch, tmp_path):
    on_path("mujoco", "import time\ntime.sleep(1000)\n")
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    monkeypatch.setenv("PIRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "needed_packages", list)  # which take longer than the time that is allowed here
    begun = time.monotonic()
    found = {result.name: result for result in run_checks(tmp_path, timeout=1.0)}
    assert time.monotonic() - begun < 500  # half of what the simulator would take
    assert (found["rendering"].state, found["rendering"].needed) == ("bad", False)
    assert "osmesa: no answer in time" in found["rendering"].detail
    assert "egl" not in found["rendering"].detail  # MUJOCO_GL has chosen
    renderer = SimpleNamespace(update_scene=lambda data: None, render=lambda: SimpleNamespace(max=lambda: 0))
    names = {"MjModel": SimpleNamespace(from_xml_string=lambda text: None), "MjData": lambda model: None}
    names |= {"mj_forward": lambda *_: None, "Renderer": lambda *_: contextlib.nullcontext(renderer)}
    monkeypatch.setitem(sys.modules, "mujoco", SimpleNamespace(**names))
    with pytest.raises(RuntimeError, match="black"):
        doctor.probe_rendering()


def test_the_tokenizer_of_full_size_policies_is_found_missed_or_refused(monkeypatch, tmp_path):
    for variable in ("XDG_CACHE_HOME", "OPENPI_DATA_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.delenv("PIRL_TOKENIZER", raising=False)
    missed = list(doctor.check_tokenizers())[1]
    assert (missed.state, missed.needed) == ("absent", False)
    assert missed.advice.startswith("curl ")
    (tmp_path / "damaged").write_bytes(b"no vocabulary")
    tiny = ROOT / "src/pirl/models/assets/tiny_tokenizer.model"
    for file, state in ((tmp_path / "nowhere", "bad"), (tmp_path / "damaged", "bad"), (tiny, "good")):
        monkeypatch.setenv("PIRL_TOKENIZER", str(file))
        result = list(doctor.check_tokenizers())[1]
        assert result.state == state
        assert ("PIRL_TOKENIZER" in result.advice) == (state == "bad")


def test_a_file_system_that_lacks_something_is_named_with_it(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise OSError(95, "Operation not supported")

    broken = {"os.replace": "renamed", "fcntl.flock": "locked", "mmap.mmap": "memory-mapped"}
    for function, verb in broken.items():
        with monkeypatch.context() as patch:
            patch.setattr(function, refuse)
            found = check_directory("runs", tmp_path / "not" / "yet", "Go elsewhere.")
        assert (found.state, found.needed, found.advice) == ("bad", True, "Go elsewhere.")
        assert f"{verb}: Operation not supported" in found.detail
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    found = check_directory("runs", tmp_path, "Go elsewhere.")
    assert (found.state, "locked" in found.detail) == ("bad", True), "locks that lock nobody out"
    assert list(tmp_path.iterdir()) == []


def test_limits_of_open_files_and_of_the_container_are_found(monkeypatch, tmp_path):
    files = {"limit_in_bytes": 2**30, "usage_in_bytes": 0, "stat": "total_inactive_file 0"}
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(processes, "_CGROUPS", (tuple(tmp_path / name for name in files),))
    advice = {(256, 10**6): "ulimit -n 4096", (256, 2000): "ulimit -n 2000", (256, resource.RLIM_INFINITY): "ulimit"}
    for limits, words in advice.items():
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        found = {result.name: result for result in check_machine()}
        assert (found["open files"].state, found["open files"].needed) == ("bad", False)
        assert found["open files"].advice.startswith(words)
    assert found["memory"].detail.endswith("the container may use 1.0 GiB")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    assert {result.state for result in check_machine()} == {"good"}


def test_packages_and_extras_are_compared_with_what_the_installation_asks_for(tmp_path, monkeypatch):
    pins, tested = (ROOT / "constraints.txt").read_text().splitlines(), doctor.tested_versions()
    assert {f"{name}=={tested[name]}" for name in ("jax", "flax", "optax")} <= set(pins)
    assert {package.name for package in doctor.needed_packages()} <= set(tested)
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
    packages = {result.name: result for result in check_packages({})}
    states = {name: result.state for name, result in packages.items()}
    assert states == {"python": "good", "pirl": "good", "numpy": "bad", "rich": "good", "nowhere": "bad"}
    assert packages["nowhere"].advice == "pip install 'nowhere>=2'"
    missing = {extra: doctor.missing_packages(extra) for extra in ("wandb", "ray", "trackio", "plan")}
    assert missing == {"wandb": ["nowhere"], "ray": [], "trackio": None, "plan": ["nowhere"]}
    extras = {result.name: result for result in check_extras()}
    states = {name: result.state for name, result in extras.items()}
    assert states == {"wandb": "absent", "ray": "good", "sweep": "bad", "plan": "absent"}
    assert extras["plan"].advice == "pip install 'pirl[plan]'"
    assert not any(result.needed for result in extras.values())


def test_a_terminal_without_check_marks_still_tells_good_from_bad(monkeypatch):
    """Every mark would be a question mark in ASCII."""
    states = ("good", "absent", "bad")
    monkeypatch.setattr("pirl.doctor.run_checks", lambda _: [CheckResult(state, state, "so") for state in states])
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(SystemExit):
        main(["doctor"])
    words = [line.split()[:2] for line in stream.buffer.getvalue().decode().splitlines()[1:4]]
    assert words == [["+", "good"], ["-", "absent"], ["x", "bad"]]
