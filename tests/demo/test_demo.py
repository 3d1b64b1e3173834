"""The demo goes on where it stopped, leaves nothing running, says what failed, and compares what it claims to."""

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
from fake_steps import go, work

from pirl.config import get_config
from pirl.demo.demo import open_directory, run_demo
from pirl.demo.display import last_line
from pirl.demo.page import summarise
from pirl.demo.plan import EXPERT, POLICIES, DemoConfig, make_plan, shown
from pirl.demo.results import describe_demonstrations, make_results, write_results
from pirl.demo.running import share_cores
from pirl.demo.steps import Records, all_steps
from pirl.envs.evaluation import EpisodeResult, Evaluation
from pirl.errors import DataError, TrainingError


def calls(place):
    return (place / "calls").read_text().split("\n")[:-1]


def result(place, name):
    return json.loads((place / f"{name}.result").read_text())


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z" if Path("/proc").is_dir() else True


# --- steps -------------------------------------------------------------------------------------------------------


def test_lanes_run_side_by_side_on_their_own_cores_and_steps_after_each_other(tmp_path, capfd):
    place = tmp_path / "work"
    first, left, right, behind = (work(place, name, 0.5) for name in ("first", "left", "right", "behind"))
    records = go([[[first]], [[left, behind], [right]]], tmp_path / "out")
    times = {name: result(place, name) for name in ("first", "left", "right", "behind")}
    assert times["first"]["ended"] < min(times["left"]["begun"], times["right"]["begun"])
    assert max(times["left"]["begun"], times["right"]["begun"]) < min(times["left"]["ended"], times["right"]["ended"])
    assert times["left"]["ended"] < times["behind"]["begun"]
    shares = share_cores(2)
    if shares[0] is not None:
        assert [times[name]["cores"] for name in ("left", "right")] == [sorted(share) for share in shares]
        assert not shares[0] & shares[1]
        assert set(times["first"]["cores"]) == shares[0] | shares[1] == os.sched_getaffinity(0)
    assert records.read(left).seconds >= 0.5
    said = capfd.readouterr().err
    assert "left: do left" in said
    assert "left: done in " in said
    assert last_line(tmp_path / "out/logs/left.log") == "left at work"


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
    for part in ("do bad", "exit code 3", str(out / "logs/bad.log"), "  a reason\n", "call the same command again"):
        assert part in str(failure.value)
    assert (place / "slow.saved").exists()
    assert calls(place) == ["slow"]
    assert not Records(out / "steps").is_done(slow)


def test_a_step_that_ends_well_without_its_result_has_failed(tmp_path):
    """A trainer that a scheduler ends says 0, though it is not through."""
    step = work(tmp_path / "work", "one", program="print('stopped at step 5')")
    with pytest.raises(TrainingError, match="ended before its result was whole"):
        go([[[step]]], tmp_path / "out")


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from fake_steps import go, work
place, out = Path(sys.argv[1]), Path(sys.argv[2])
left, right = work(place, "left", 60, *{programs!r}), work(place, "right", 60)
try:
    go([[[left, work(place, "after")], [right]]], out, grace={grace})
except KeyboardInterrupt:
    sys.exit(130)
"""


@contextlib.contextmanager
def demo_under_way(tmp_path, programs=(), grace=30.0):
    """A process with two lanes at work."""
    place = tmp_path / "work"
    program = PROGRAM.format(tests=str(Path(__file__).parent), programs=tuple(programs), grace=grace)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(place), str(tmp_path / "out")], stderr=subprocess.PIPE, text=True
    ) as process:
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
    # The time so far is kept, and the next attempt is told to go on.
    left = work(tmp_path / "work", "left", 60)
    record = Records(tmp_path / "out/steps").read(left)
    assert 0 < record.seconds < 60
    assert not record.is_done
    assert left.arguments[-1] == "--resume"


STUBBORN = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.SIG_IGN)
import os
(Path(sys.argv[1]) / "left.pid").write_text(str(os.getpid()))
time.sleep(60)
"""


def test_who_does_not_end_in_time_is_ended(tmp_path):
    with demo_under_way(tmp_path, [STUBBORN], grace=1.0) as (process, children):
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 130
    assert not any(map(is_alive, children))


def test_a_second_interruption_does_not_wait(tmp_path):
    with demo_under_way(tmp_path, [STUBBORN], grace=600.0) as (process, children):
        process.send_signal(signal.SIGINT)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 130
    assert not any(map(is_alive, children))


def test_the_last_line_is_text_without_what_moves_a_cursor(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"x" * 10_000 + b"\nfirst\n\x1b[2K\x1b[1mstep 5\x1b[0m\rstep \xc3\xb66\n\n")
    assert last_line(log) == "step ö6"
    assert last_line(tmp_path / "absent") == ""


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


# --- the plan ----------------------------------------------------------------------------------------------------


def test_every_command_of_the_plan_is_one_that_pirl_understands(tmp_path, monkeypatch):
    """The arguments are parsed, and what they configure is checked as far as it goes without the data."""
    from pirl.cli.main import _parse

    for quick in (False, True):
        config = DemoConfig(tmp_path / "demo", episodes=20, demonstrations=30, quick=quick)
        steps = {step.name: _parse(shown(step.command)[1:]) for step in all_steps(make_plan(config))}
        assert steps["collect"].expert == EXPERT
        assert steps["collect"].out == config.data
        extra = steps["train_acrlpd"].resolve()
        total = extra.steps + int(extra.online.env_steps * extra.online.utd_ratio)
        for name in ("bc_more", "bc_successes"):
            control = steps[f"train_{name}"].resolve()
            assert total - extra.online.updates_per_scan < control.steps <= total
            assert control.checkpoint == str(config.run("bc"))
            assert control.data.selection.success is (True if name == "bc_successes" else None)
            assert control.batch_size == steps["train_bc"].resolve().batch_size == extra.batch_size
        evaluations = [step for name, step in steps.items() if name.startswith("eval_")]
        assert len(evaluations) == 5
        assert {(each.seed, each.episodes, each.execute_steps, each.env) for each in evaluations} == {
            (extra.evaluation.seed, 20, extra.evaluation.execute_steps, "tabletop")
        }
        assert extra.evaluation.episodes == 20


def test_the_preset_keeps_what_the_demo_measures():
    """The policy at the end of the offline phase is evaluated after the online one."""
    config = get_config("demo")
    if config.online.env_steps:
        assert config.checkpoints.keep_period
        assert config.steps % config.checkpoints.keep_period == 0


# --- the directory -----------------------------------------------------------------------------------------------


def test_a_demo_goes_on_only_as_it_was_begun(tmp_path):
    config = DemoConfig(tmp_path / "demo", episodes=20)
    with open_directory(config, overwrite=False):
        pass
    with open_directory(config, overwrite=False):
        pass
    other = replace(config, demonstrations=7)
    with pytest.raises(DataError, match="demonstrations: 500 there, 7 now"), open_directory(other, overwrite=False):
        pass
    (config.out / "data").mkdir()
    (config.out / "mine.txt").touch()
    with open_directory(other, overwrite=True):
        assert not (config.out / "data").exists()
        assert (config.out / "mine.txt").exists()


def test_nobody_elses_directory_is_touched(tmp_path):
    (tmp_path / "mine.txt").touch()
    for overwrite in (False, True):
        with (
            pytest.raises(DataError, match="no demo was made in it"),
            open_directory(DemoConfig(tmp_path), overwrite=overwrite),
        ):
            pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]


def test_two_demos_do_not_share_a_directory(tmp_path):
    config = DemoConfig(tmp_path / "demo")
    with (
        open_directory(config, overwrite=False),
        pytest.raises(DataError, match="another `pirl demo` works"),
        open_directory(config, overwrite=False),
    ):
        pass


# --- results -----------------------------------------------------------------------------------------------------


def evaluation(successes, policy="", episodes=20, **settings):
    results = tuple(
        EpisodeResult(index, "task", "prompt", 100 + index, index in successes, 1.0, 30, True, False, None)
        for index in range(episodes)
    )
    return Evaluation(results, {"policy": policy, "seed": 0, "envs": 16, **settings}, 1.0)


@pytest.fixture
def measured(tmp_path):
    """A demo whose policies were measured: the baseline succeeds from the first 4 of 20 starts."""
    config = DemoConfig(tmp_path / "demo", episodes=20)
    steps = {"bc": 4000, "bc_more": 3000, "bc_successes": 3000, "acrlpd": 3100}
    for run, step in steps.items():
        (config.run(run) / "checkpoints/policy" / str(step)).mkdir(parents=True)
    successes = {"bc": 4, "bc_more": 4, "bc_successes": 6, "acrlpd_offline": 12, "acrlpd": 18}
    for key, count in successes.items():
        step = steps.get(key, 3000)
        file = config.evaluation(key)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(evaluation(range(count), f"/x/checkpoints/policy/{step}").to_json()))
    during = config.run("acrlpd") / "evaluations"
    during.mkdir()
    for step, found in ((500, range(3)), (3050, range(1, 20))):
        (during / f"{step}.json").write_text(json.dumps(evaluation(found, step=step).to_json()))
    log = config.data / "meta/pirl_collect.json"
    log.parent.mkdir(parents=True)
    episodes = [{"success": number < 3, "length": 10, "lost": None} for number in range(5)]
    log.write_text(json.dumps({"complete": True, "episodes": [*episodes, {"success": True, "length": 5, "lost": "x"}]}))
    return config


def test_results_hold_rates_intervals_and_a_paired_comparison_with_the_baseline(measured):
    seconds = {"train_bc": 60.0, "train_acrlpd": 120.0}
    file = write_results(measured, make_results(measured, seconds))
    results = json.loads(file.read_text())
    assert list(results) == [*(policy.key for policy in POLICIES), "about"]
    assert {key: results[key]["success"] for key in results if key != "about"} == {
        "bc": 0.2,
        "bc_more": 0.2,
        "bc_successes": 0.3,
        "acrlpd_offline": 0.6,
        "acrlpd": 0.9,
        "acrlpd_best_of_n": 0.95,
    }
    # Wilson's interval of 18 of 20, by its closed form.
    assert [results["acrlpd"][edge] for edge in ("low", "high")] == pytest.approx([0.69896, 0.97214], abs=5e-5)
    assert results["acrlpd"]["episodes"] == 20
    assert results["acrlpd"]["successes"] == 18
    assert {key: result["updates"] for key, result in results.items() if key != "about"} == {
        "bc": 4000,
        "bc_more": 7000,
        "bc_successes": 7000,
        "acrlpd_offline": 7000,
        "acrlpd": 7100,
        "acrlpd_best_of_n": 7050,
    }
    assert results["acrlpd"]["minutes"] == 3.0
    assert "paired" not in results["bc"]
    assert results["bc_more"]["paired"]["p_value"] == 1.0
    # 14 starts are won and none lost: McNemar's exact p is 2 · 2⁻¹⁴.
    assert results["acrlpd"]["paired"]["p_value"] == pytest.approx(2 * 0.5**14)
    assert results["acrlpd"]["paired"]["difference"] == pytest.approx(0.7)
    # Of the learner with its critics start 0 is lost, which the baseline has.
    assert results["acrlpd_best_of_n"]["paired"]["pairs"] == {
        "both": 3,
        "only_first": 1,
        "only_second": 16,
        "neither": 0,
    }
    assert results["about"]["demonstrations"] == describe_demonstrations(measured.data)
    assert results["about"]["demonstrations"] == {"episodes": 5, "successes": 3, "success": 0.6, "frames": 50}
    assert not list(measured.out.glob(".results*"))


def test_the_headline_claims_no_more_than_was_measured(measured):
    assert summarise(make_results(measured, {})).endswith("ACRLPD is better, and the 95 % intervals do not overlap.")
    measured.evaluation("acrlpd").write_text(json.dumps(evaluation(range(1, 7), "/x/3100").to_json()))
    assert "no difference can be told" in summarise(make_results(measured, {}))
    measured.evaluation("bc").write_text(json.dumps(evaluation(range(20), "/x/4000").to_json()))
    assert "ACRLPD is worse" in summarise(make_results(measured, {}))


def test_a_damaged_evaluation_is_named(measured):
    measured.evaluation("bc_more").write_text("{")
    with pytest.raises(DataError, match="bc_more.json is no evaluation"):
        make_results(measured, {})


def test_an_evaluation_comes_back_from_json_as_it_was():
    before = evaluation(range(5), "x")
    assert Evaluation.from_json(json.loads(json.dumps(before.to_json()))) == before


def test_a_demo_of_other_steps_ends_with_its_results(measured):
    """With what is measured already there: the steps run, then the results are written."""
    with open_directory(replace(measured, out=measured.out.parent / "new"), overwrite=False):
        pass
    (measured.out.parent / "new/demo.json").rename(measured.out / "demo.json")
    place = measured.out.parent / "work"
    results = run_demo(measured, stages=[[[work(place, "one")]]])
    assert json.loads((measured.out / "results.json").read_text()) == results
    assert results["about"]["seconds"].keys() == {"one"}


# --- the whole of it ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_quick_demo_runs_from_nothing_to_a_report(tmp_path):
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "PIRL_CACHE": str(tmp_path / "cache"),
        "COLUMNS": "200",
    }
    pirl = [str(Path(sys.executable).with_name("pirl")), "demo", "--quick"]
    done = subprocess.run(pirl, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "runs/demo/results.json").read_text())
    assert {"bc", "bc_more", "bc_successes", "acrlpd_offline", "acrlpd", "about"} <= results.keys()
    page = (tmp_path / "runs/demo/report.html").read_text()
    for part in ("ACRLPD offline", "pirl collect --env tabletop", "What the critics see", "data:image/png"):
        assert part in page
    assert "runs/demo/report.html" in done.stdout
    checked = next(line.split("next")[-1].strip() for line in done.stdout.splitlines() if "convert" in line).split()
    subprocess.run([pirl[0], *checked[1:]], cwd=tmp_path, env=environment, check=True, capture_output=True)
    again = subprocess.run(pirl, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert again.stderr.count("there already") == 10
