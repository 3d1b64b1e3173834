"""The soak's own logic: what it would call a difference, a leak or a leftover, and that its faults are faults."""

import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from soak.__main__ import LongRuns  # noqa: E402
from soak.faults import FAULTS, Scene, can_mount, damage, small_disk  # noqa: E402
from soak.runs import LEARNERS, Place, Segment, differences, flags, leftovers  # noqa: E402
from soak.table import LEFT_ALONE, LongRun, Round, Tally, slope  # noqa: E402

from pirl.cli.main import _parse  # noqa: E402

CATCHES = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: None); time.sleep(60)"


@pytest.fixture
def start(tmp_path):
    """Processes as the soak starts them, ended with the test."""
    place, started = Place(tmp_path), []

    def begin(code: str, **environment: str) -> Segment:
        command, settings = [sys.executable, "-c", code], {**place.environment(), **environment}
        started.append(Segment(command, tmp_path / "log", settings))
        return started[-1]

    begin.place = place
    yield begin
    for segment in started:
        segment.kill()


def make_run(directory: Path, metrics: str = '{"step": 8}\n', step: int = 8, **arrays: np.ndarray) -> Path:
    """What is looked at in a finished run."""
    state, policy = (directory / "checkpoints" / kind / str(step) for kind in ("state", "policy"))
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(state / "arrays", {"a": jnp.zeros(3), **arrays})
        writer.save(policy / "params", {"params": {"b": jnp.ones(2)}})
    host = {"log": {"metrics": 1, "timing": len(directory.name)}}
    (state / "state.json").write_text(json.dumps({"host": host}))
    (directory / "metrics.jsonl").write_text(metrics)
    return directory


def test_one_bit_is_a_difference_and_the_clock_is_none(tmp_path):
    one = np.array([0.0, np.nan, 1.0], np.float32)
    reference = make_run(tmp_path / "reference", c=jnp.asarray(one))
    assert differences(make_run(tmp_path / "same", c=jnp.asarray(one)), reference) == []
    one[0] = -0.0
    assert differences(make_run(tmp_path / "signed", c=jnp.asarray(one)), reference) == ["['c']"]
    assert differences(make_run(tmp_path / "more", c=jnp.asarray(one[1:])), reference) == ["['c']"]
    assert differences(make_run(tmp_path / "fewer"), reference) == ["['c']"]
    assert differences(make_run(tmp_path / "other", '{"step": 9}\n'), reference) == ["metrics.jsonl"]
    assert "step 7" in differences(make_run(tmp_path / "early", step=7), reference)[0]


def test_hidden_strange_and_temporary_files_are_leftovers(tmp_path):
    reference, run, temporary = (tmp_path / name for name in ("reference", "run", "tmp"))
    for directory in (reference, run / "checkpoints" / ".8.partial", temporary):
        directory.mkdir(parents=True)
    (reference / "checkpoints").mkdir()
    (temporary / "x").touch()
    (run / "strange").touch()
    assert leftovers(run, reference, temporary) == ["checkpoints/.8.partial", "strange", "tmp/x"]


def test_the_slope_is_that_of_all_groups_whatever_their_levels():
    groups = {
        "a": [(0.0, 100.0), (1.0, 107.0), (2.0, 114.0)],
        "b": [(5.0, 900.0), (7.0, 914.0)],
        "c": [],
        "d": [(1, 5)],
    }
    assert slope(groups) == pytest.approx(7.0)
    assert slope({"a": [(1.0, 2.0)]}) is None
    assert slope({}) is None


@pytest.mark.parametrize("seed", range(40))
def test_damage_changes_a_file_and_never_makes_it_longer(tmp_path, seed):
    file, chance = tmp_path / "file", random.Random(seed)
    before = chance.randbytes(chance.choice([1, 2, 50, 5000]))
    file.write_bytes(before)
    damage(file, chance)
    assert file.read_bytes() != before
    assert len(file.read_bytes()) <= len(before)


def test_a_run_counts_for_each_of_its_faults_and_one_that_differs_for_none():
    tally = Tally(not_injected={"c": "why"})
    tally.rounds = [
        Round(1, "bc", ["a", "b"]),
        Round(2, "bc", ["a"], differences=["x"]),
        Round(3, "bc", ["b", "b"], complaints=["it ended with 1"]),
        Round(4, "bc"),
    ]
    rows = {kind: dataclasses.astuple(row) for kind, row in tally.rows(["a", "b"]).items()}
    assert rows == {"a": (2, 2, 1), "b": (3, 1, 1), LEFT_ALONE: (1, 1, 1)}
    summary, table = tally.summary(["a", "b"]), tally.markdown(["a", "b", "c"])
    assert (summary["rounds"], summary["bit_equal_runs"]) == (4, 2)
    assert "| a | 2 | 2 | 1 |" in table
    assert "| c | not injected: why | | |" in table
    assert "round 3 (bc; b, b): it ended with 1" in table


def test_memory_is_judged_once_it_has_settled_and_an_end_is_told():
    climbing = [(hour / 10, 100.0 * hour) for hour in range(10)]
    level = [(1 + hour / 10, 900.0 + 2.0 * hour) for hour in range(20)]
    tally = Tally(long_runs={"bc": LongRun(climbing + level, lines=7), "ript": LongRun(ended_with=2)})
    assert tally.summary([])["long_runs"]["bc"]["slope_mib_per_hour"] == pytest.approx(20.0)
    assert "| bc | 174 | 7 | +20.0 MiB per hour |" in tally.markdown([])
    assert "| ript | 0 | 0 | too little to tell; it ended by itself with 2 |" in tally.markdown([])
    assert not tally.is_fine
    del tally.long_runs["ript"]
    assert tally.is_fine


def test_long_runs_take_turns_until_the_time_is_over(tmp_path, monkeypatch):
    codes = {
        "bc": "import time; time.sleep(60)",
        "ript": "raise SystemExit(3)",
        "acrlpd": "import time; time.sleep(60)",
    }
    monkeypatch.setattr(Place, "command", lambda self, learner, run: [sys.executable, "-c", codes[run.name]])
    found, end = {}, time.monotonic() + 6
    runs = LongRuns(tmp_path, list(codes), end, found)
    runs.start()
    runs.join(60)
    assert time.monotonic() >= end
    assert {name: run.ended_with for name, run in found.items()} == {"bc": None, "ript": 3, "acrlpd": None}
    assert 1.5 <= 3600 * found["bc"].memory[-1][0] <= 6, "a third of the time, or what a slow machine left of it"
    assert runs._place.marked_processes(patience=0.0) == {}


def test_the_clock_of_a_process_jumps_as_the_file_says_and_that_is_noted(tmp_path, start):
    start.place.clock.write_text("-7200")
    code = "import time; print(time.time(), time.time_ns() / 1e9, time.monotonic())"
    segment = start(code)
    assert segment.finish(60) == 0
    wall, nanoseconds, monotonic = map(float, segment.words.split())
    assert wall == pytest.approx(time.time() - 7200, abs=60)
    assert nanoseconds == pytest.approx(wall, abs=60)
    assert monotonic == pytest.approx(time.monotonic(), abs=60)
    assert Path(f"{start.place.clock}.seen").read_text() == f"{segment.process.pid} -7200\n"


def test_a_process_learns_when_it_catches_sigterm_and_not_before(start):
    catching, plain = start(CATCHES), start("import time; time.sleep(60)")
    assert catching.wait(lambda: catching.is_learning, 60)
    assert not plain.is_learning
    assert plain.finish(0.2) is None, "it took too long, so it was ended"
    assert plain.process.poll() == -9
    assert catching.memory[-1][1] > 1, "MiB"


def test_processes_that_outlive_the_one_that_started_them_are_found(start):
    segment = start("import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])")
    assert segment.finish(60) == 0
    found = start.place.marked_processes(patience=0.0)
    assert ["time.sleep(60)" in words for words in found.values()] == [True]
    for process in found:
        os.kill(process, 9)
    assert start.place.marked_processes() == {}


def test_a_full_disk_stays_full_until_the_process_has_ended(tmp_path, start):
    if not can_mount(tmp_path / "disk"):
        pytest.skip("mounting a small disk needs root")
    with small_disk(tmp_path / "disk") as disk:
        run = disk / "run"
        run.mkdir()
        (run / "old").write_bytes(bytes(1 << 20))
        ready = f"import pathlib, time; run = pathlib.Path({str(run)!r}); time.sleep(2); (run / 'old').unlink(); "
        segment = start(ready + "time.sleep(2); (run / 'new').write_bytes(bytes(100_000))")
        remark = FAULTS["full disk"](Scene(start.place, run, segment, random.Random(0)))
        assert remark == "on a full disk it ended with a traceback"
        assert "No space left" in segment.words
        (run / "new").write_bytes(bytes(1 << 20))  # there is room again
    assert subprocess.run(["mountpoint", "-q", disk], check=False).returncode != 0


@pytest.mark.parametrize("name", sorted(LEARNERS))
def test_the_options_of_every_learner_exist(name, tmp_path):
    words = Place(tmp_path).command(LEARNERS[name], tmp_path / "run")
    config = _parse(words[words.index("pirl.cli.main") + 1 :]).resolve()
    assert config.name == LEARNERS[name].preset
    assert config.checkpoints.max_to_keep >= 2, "one may be damaged"


@pytest.mark.parametrize("name", sorted(LEARNERS))
def test_a_learner_without_an_end_differs_in_what_would_end_it(name, tmp_path):
    learner = LEARNERS[name]
    words = Place(tmp_path).command(learner, tmp_path / "run", *flags(learner.without_end))
    config = _parse(words[words.index("pirl.cli.main") + 1 :]).resolve()
    assert max(config.steps, config.online.env_steps, config.rollout.iterations) >= 10**6
