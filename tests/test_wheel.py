"""The wheel works by itself: in an environment with nothing else in it, away from the sources."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the sources, in which nothing is left of earlier builds."""
    sources, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", sources / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, sources]
    subprocess.run(command, check=True, timeout=600)
    (built,) = out.glob("pirl-*.whl")
    return built


@pytest.fixture(scope="module")
def elsewhere(wheel, tmp_path_factory):
    """Call the installed `pirl` in a directory of its own, as somebody would who has only the wheel."""
    place = tmp_path_factory.mktemp("elsewhere")
    venv.create(place / "venv", with_pip=True)
    pip = [place / "venv" / "bin" / "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel]
    subprocess.run(pip, check=True, cwd=place, timeout=1800)
    kept = ("HOME", "LANG", "TMPDIR", "JAX_COMPILATION_CACHE_DIR")
    env = {name: os.environ[name] for name in kept if name in os.environ} | {"PIRL_CACHE": str(place / "cache")}

    def run(*arguments):
        command = [place / "venv" / "bin" / "pirl", *arguments]
        ended = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=1800)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
        return ended.stdout

    run.place = place
    return run


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel):
    files = (ROOT / "src").rglob("*")
    sources = {
        file.relative_to(ROOT / "src").as_posix()
        for file in files
        if file.is_file() and "__pycache__" not in file.parts and not file.parts[-2].endswith(".egg-info")
    }
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == sources


def test_the_doctor_finds_what_was_installed(elsewhere):
    elsewhere("doctor", "--json", "found.json")
    found = json.loads((elsewhere.place / "found.json").read_text())
    assert found["fit"]
    (own,) = (entry for entry in found["findings"] if entry["name"] == "pirl")
    assert str(elsewhere.place / "venv") in own["detail"], "the wheel, not the sources"
    needed = [entry for entry in found["findings"] if entry["section"] == "software"]
    assert {entry["state"] for entry in needed} == {"good"}


def test_the_demo_runs_from_nothing_to_its_report(elsewhere):
    elsewhere("demo", "--quick")
    results = json.loads((elsewhere.place / "runs" / "demo" / "results.json").read_text())
    assert results["about"]["finished"]
    assert (elsewhere.place / "runs" / "demo" / "report.html").stat().st_size > 10_000
    assert "as in runs/demo/bc: --env tabletop" in elsewhere("eval", "runs/demo/bc", "--episodes", "2")
