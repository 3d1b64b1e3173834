"""The steps of a demo go on where they stopped, leave nothing running, and say what failed."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_steps import go, record, work

from pirl.errors import TrainingError
from pirl.jobs import share_cores
from pirl.processes import is_alive as exists
from pirl.processes import last_lines


def calls(place):
    return (place / "calls").read_text().split("\n")[:-1]


def result(place, name):
    return json.loads((place / f"{name}.result").read_text())


def is_alive(pid):
    return exists(pid) and " Z " not in Path(f"/proc/{pid}/stat").read_text()


def test_lanes_run_side_by_side_on_their_own_cores_and_steps_after_each_other(tmp_path, capfd):
    place = tmp_path / "work"
    first, left, right, behind = (work(place, name, 0.5) for name in ("first", "left", "right", "behind"))
    seconds = go([[[first]], [[left, behind], [right]]], tmp_path / "out")
    times = {name: result(place, name) for name in ("first", "left", "right", "behind")}
    assert times["first"]["ended"] < min(times["left"]["begun"], times["right"]["begun"])
    assert max(times["left"]["begun"], times["right"]["begun"]) < min(times["left"]["ended"], times["right"]["ended"])
    assert times["left"]["ended"] < times["behind"]["begun"]
    shares = share_cores(2)
    if shares[0] is not None:
        assert [times[name]["cores"] for name in ("left", "right")] == [sorted(share) for share in shares]
        assert not shares[0] & shares[1]
        assert set(times["first"]["cores"]) == shares[0] | shares[1] == os.sched_getaffinity(0)
    assert seconds["left"] >= 0.5
    said = capfd.readouterr().err
    assert "left: do left" in said
    assert "left: done in " in said
    assert last_lines(tmp_path / "out/logs/left.log") == ["left at work"]


def test_what_is_done_is_not_done_again_and_what_lost_its_result_is(tmp_path, capfd):
    place, out = tmp_path / "work", tmp_path / "out"
    stages = [[[work(place, "one"), work(place, "two")]]]
    go(stages, out)
    go(stages, out)
    assert calls(place) == ["one", "two"]
    assert "one: there already" in capfd.readouterr().err
    (place / "two.result").unlink()
    go(stages, out)
    assert calls(place) == ["one", "two", "two resumed"]
    # Another command under the same name is another step.
    other = work(place, "one", 0.01)
    go([[[other]]], out)
    assert calls(place)[3:] == ["one resumed"]


def test_a_stage_is_made_when_those_before_it_are_done(tmp_path):
    """What was done with another answer of an earlier step is done again."""
    place, out = tmp_path / "work", tmp_path / "out"

    def stages():
        yield [[work(place, "first")]]
        ended = result(place, "first")["ended"] if (place / "first.result").exists() else 0
        second = work(place, "second")
        yield [[replace(second, text=f"{second.text} --after {ended}")]]

    go(stages, out)
    assert record(out, "second")["command"][-2:] == ["--after", str(result(place, "first")["ended"])]
    go(stages, out)
    assert calls(place) == ["first", "second"]
    (place / "first.result").unlink()
    go(stages, out)
    assert calls(place)[2:] == ["first resumed", "second resumed"]


def test_a_result_without_the_end_of_its_step_does_not_count(tmp_path):
    """A file that a killed process left looks whole from outside."""
    place, out = tmp_path / "work", tmp_path / "out"
    step = work(place, "one")
    (place / "one.result").touch()
    go([[[step]]], out)
    assert calls(place) == ["one"]


def test_a_failing_step_is_named_with_its_log_and_last_lines_and_ends_the_others(tmp_path):
    place, out = tmp_path / "work", tmp_path / "out"
    bad = work(place, "bad", program="import time; time.sleep(0.7); print('a reason'); raise SystemExit(3)")
    slow, after = work(place, "slow", 60), work(place, "after")
    begun = time.monotonic()
    with pytest.raises(TrainingError) as failure:
        go([[[bad, after], [slow]]], out)
    assert time.monotonic() - begun < 30
    for part in ("do bad", "exit code 3", str(out / "logs/bad.log"), "  a reason\n", "run the same command again"):
        assert part in str(failure.value)
    assert (place / "slow.saved").exists()
    assert calls(place) == ["slow"]
    assert not record(out, "slow")["is_done"]


def test_a_step_that_ends_well_without_its_result_has_failed(tmp_path):
    """A trainer that a scheduler ends says 0, though it is not through."""
    step = work(tmp_path / "work", "one", program="print('stopped at step 5')")
    with pytest.raises(TrainingError, match="ended before its result was whole"):
        go([[[step]]], tmp_path / "out")


PROGRAM = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has told even this process to ignore
sys.path.insert(0, {tests!r})
from fake_steps import go, work
place, out = Path(sys.argv[1]), Path(sys.argv[2])
left, right = work(place, "left", 60, *{programs!r}), work(place, "right", 60)
try:
    go([[[left, work(place, "after")], [right]]], out, grace={grace})
except KeyboardInterrupt:
    sys.exit(130)
"""


def start_demo(tmp_path, programs=(), grace=30.0):
    program = PROGRAM.format(tests=str(Path(__file__).parent), programs=tuple(programs), grace=grace)
    places = [str(tmp_path / "work"), str(tmp_path / "out")]
    return subprocess.Popen([sys.executable, "-c", program, *places], stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def demo_under_way(tmp_path, programs=(), grace=30.0):
    """A process with two lanes at work."""
    place = tmp_path / "work"
    with start_demo(tmp_path, programs, grace) as process:
        until = time.monotonic() + 60
        while not all((place / f"{name}.pid").exists() for name in ("left", "right")) and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.2)
        try:
            yield process, [int((place / f"{name}.pid").read_text()) for name in ("left", "right")]
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_lets_the_steps_save_and_leaves_none_of_them(tmp_path, number):
    with demo_under_way(tmp_path) as (process, children):
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert not any(map(is_alive, children))
    assert {file.name for file in (tmp_path / "work").glob("*.saved")} == {"left.saved", "right.saved"}
    assert sorted(calls(tmp_path / "work")) == ["left", "right"]
    # The time so far is kept.
    left = record(tmp_path / "out", "left")
    assert 0 < left["seconds"] < 60
    assert not left["is_done"]


STUBBORN = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.SIG_IGN)
import os
(Path(sys.argv[1]) / "left.pid").write_text(str(os.getpid()))
time.sleep(60)
"""


@pytest.mark.parametrize(("grace", "interruptions"), [(1.0, 1), (600.0, 2)])
def test_who_does_not_end_in_time_or_at_the_second_interruption_is_killed(tmp_path, grace, interruptions):
    with demo_under_way(tmp_path, [STUBBORN], grace=grace) as (process, children):
        for _ in range(interruptions):
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        process.communicate(timeout=20)
    assert process.returncode == 130
    assert not any(map(is_alive, children))


def test_after_kill_9_the_steps_that_were_left_are_waited_for_and_not_begun_beside_them(tmp_path):
    with demo_under_way(tmp_path) as (process, children):
        process.kill()
        process.wait(10)
        with start_demo(tmp_path) as again:
            assert "waiting for the jobs" in again.stderr.readline()
            assert all(map(is_alive, children))
            assert sorted(calls(tmp_path / "work")) == ["left", "right"]
            for child in children:
                os.kill(child, signal.SIGINT)
            until = time.monotonic() + 30
            while len(calls(tmp_path / "work")) < 4 and time.monotonic() < until:
                time.sleep(0.05)
            again.send_signal(signal.SIGINT)
            again.communicate(timeout=30)
    assert sorted(calls(tmp_path / "work")) == ["left", "left resumed", "right", "right resumed"]


ON_A_TERMINAL = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from fake_steps import go, work
place, out = Path(sys.argv[1]), Path(sys.argv[2])
stages = [[[work(place, "one")]], [[work(place, "left", 1.0)], [work(place, "right", 1.0)]]]
go(stages, out)
"""


def test_on_a_terminal_one_table_shows_every_step_and_what_it_said_last(tmp_path):
    ours, theirs = os.openpty()
    arguments = [str(tmp_path / "work"), str(tmp_path / "out"), str(Path(__file__).parent)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen([sys.executable, "-c", ON_A_TERMINAL, *arguments], stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # which is how a terminal without a writer ends
            while read := os.read(ours, 65536):
                shown += read
    os.close(ours)
    assert process.returncode == 0
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r", "\n").splitlines()
    assert any(re.match(r"running +do left +0:0\d +left at work", line) for line in lines)
    assert any(re.match(r"waiting +do right", line) for line in lines)
    assert [line.split()[:3] for line in lines if line.strip()][-3:] == [
        ["done", "do", name] for name in ("one", "left", "right")
    ]
