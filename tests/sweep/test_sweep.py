"""A sweep trains what it should for as long as it should, survives what happens to it, and says what came of it."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sweeps import FAKE, plan_in, with_range

from pirl.config import get_config, override_config
from pirl.errors import ConfigError, DataError, TrainingError, UserError
from pirl.report.sections import build_page
from pirl.sweep.halving import Halving
from pirl.sweep.knobs import Knob
from pirl.sweep.page import build_sweep_page, summarise
from pirl.sweep.plan import check_plan, length_of
from pirl.sweep.running import share_devices
from pirl.sweep.trials import Measurement, Trial, find_best, measure, order

needs_optuna = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import optuna"], capture_output=True).returncode != 0,
    reason="Optuna is not installed",
)
WHEN = datetime(2030, 1, 1, tzinfo=UTC)


def sweep(plan, **options):
    from pirl.sweep.sweep import run_sweep

    return run_sweep(plan, **options)


def calls(runs):
    return (runs / "calls").read_text().splitlines()


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# --- from beginning to end ---------------------------------------------------------------------------------------


@needs_optuna
def test_all_are_tried_briefly_and_the_best_for_longer(tmp_path, capfd):
    plan = plan_in(tmp_path)
    trials = sweep(plan)
    # Six rates: 1e-3 is best, then 3e-3, which is half a power of ten away.
    assert calls(tmp_path) == [
        *(f"trial-{number:03d} to 2" for number in range(6)),
        "trial-002 to 4 resumed",
        "trial-005 to 4 resumed",
        "trial-002 to 8 resumed",
    ]
    assert [(trial.number, trial.state, trial.rung) for trial in trials] == [
        (2, "complete", 8),
        (5, "pruned", 4),
        *((number, "pruned", 2) for number in (1, 3, 0, 4)),
    ]
    assert trials[0].measured[8] == Measurement(1 - 0.8**8, 1 - 0.8**8 - 0.1, 1 - 0.8**8 + 0.1)
    results = json.loads((plan.directory / "sweep.json").read_text())
    assert results["is_over"]
    assert results["best"]["name"] == "trial-002"
    assert results["best"]["command"] == (
        f"pirl train demo_state_bc --exp-name some/sweep-best --runs-dir={tmp_path} --agent.optimizer.peak-lr=1e-3 "
        "--steps=1500"
    )
    assert [trial["name"] for trial in results["trials"]] == [trial.name for trial in trials]
    page = (plan.directory / "sweep.html").read_text()
    assert "trial-002 is the best of 6 trials: eval/success 83.2 % [73.2, 93.2] after 8 updates" in page.replace(
        '<span class="number">', ""
    ).replace("</span>", "")
    said = capfd.readouterr().err
    assert "2 of 6 trials continue beyond 2 updates: trial-002, trial-005" in said


@needs_optuna
def test_the_smallest_can_be_the_best(tmp_path):
    trials = sweep(plan_in(tmp_path, "1e-3", "1e-5", "1e-4", mode="min", rungs=(1, 2)))
    assert [trial.number for trial in trials] == [1, 2, 0]


@needs_optuna
def test_a_range_is_kept_to_and_the_same_seed_draws_the_same_again(tmp_path):
    plan = with_range(tmp_path / "a", 12, rungs=(2,))
    rates = [float(trial.setting["agent.optimizer.peak_lr"]) for trial in sweep(plan)]
    assert all(1e-5 <= rate <= 1e-1 for rate in rates)
    again = sweep(with_range(tmp_path / "b", 12, rungs=(2,)))
    assert [float(trial.setting["agent.optimizer.peak_lr"]) for trial in again] == rates
    other = sweep(with_range(tmp_path / "c", 3, rungs=(1,), seed=1))
    assert not {float(trial.setting["agent.optimizer.peak_lr"]) for trial in other} & set(rates)


@needs_optuna
def test_no_combination_is_tried_twice_while_others_are_left(tmp_path):
    knobs = (Knob("agent.optimizer.peak_lr", ("1e-4", "1e-3")), Knob("batch_size", ("4", "8")))
    trials = sweep(plan_in(tmp_path, knobs=knobs, trials=3, rungs=(1,)))
    assert len({tuple(trial.setting.values()) for trial in trials}) == 3


@needs_optuna
def test_several_at_a_time_have_devices_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    sweep(plan_in(tmp_path, "1e-3", "1e-2", jobs=2, rungs=(1,)))
    assert {file.read_text() for file in tmp_path.glob("*.devices")} == {"3,7", "5"}
    assert share_devices(4) == [{}] * 4


# --- failures ----------------------------------------------------------------------------------------------------


@needs_optuna
def test_a_trial_that_fails_is_left_behind_with_its_reason(tmp_path, capfd):
    plan = plan_in(tmp_path, "1e-9", "1e-3", "1e-4", "1e-5", "1e-2", "1e-1")
    trials = sweep(plan)
    assert (trials[0].number, trials[-1].number, trials[-1].state) == (1, 0, "failed")
    assert trials[-1].reason == "exit code 1: error: the loss is not finite."
    assert "trial-000: failed (exit code 1: error: the loss is not finite.). Its log is" in capfd.readouterr().err
    assert "the loss is not finite" in (plan.directory / "sweep.html").read_text()


@needs_optuna
def test_when_all_that_went_on_fail_the_others_still_count(tmp_path, capfd):
    trials = sweep(plan_in(tmp_path, "0.6", "1e-3", mode="min", rungs=(1, 8)))
    assert calls(tmp_path)[2:] == ["trial-000 to 8 resumed"]
    assert [(trial.number, trial.state, trial.rung) for trial in trials] == [(1, "pruned", 1), (0, "failed", 1)]
    assert "none of 1 trials reached 8 updates" in capfd.readouterr().err


@needs_optuna
def test_when_all_fail_the_last_words_are_shown(tmp_path):
    with pytest.raises(TrainingError) as error:
        sweep(plan_in(tmp_path, "1e-9", "1e-8"))
    assert error.value.exit_code == 1
    assert "every trial failed" in str(error.value)
    assert "training some/sweep/trial-001 to 2\n  error: the loss is not finite." in str(error.value)


def test_a_run_without_the_metric_says_what_it_has(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "eval/success": null}\n')
    with pytest.raises(DataError, match="logged no eval/success; it logged eval/success, loss"):
        measure(tmp_path, "eval/success")


def test_a_run_that_was_stopped_on_the_way_is_not_taken_for_one_that_came_to_its_rung(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval/success": 0.5}\n')
    (tmp_path / "metadata.json").write_text('{"stopped": true}')
    with pytest.raises(DataError, match="was stopped before it came to its end"):
        measure(tmp_path, "eval/success")
    (tmp_path / "metadata.json").write_text('{"stopped": false}')
    assert measure(tmp_path, "eval/success") == Measurement(0.5)


def test_an_interval_is_that_of_the_value(tmp_path):
    lines = [
        {"step": 1, "eval/success": 0.5, "eval/success_low": 0.4, "eval/success_high": 0.6},
        {"step": 2, "eval/success": 0.7},
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:1]))
    assert measure(tmp_path, "eval/success") == Measurement(0.5, 0.4, 0.6)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert measure(tmp_path, "eval/success") == Measurement(0.7)


# --- interruptions -----------------------------------------------------------------------------------------------


def start(runs, *options):
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    program = Path(__file__).with_name("sweeps.py")
    return subprocess.Popen(
        [sys.executable, str(program), str(runs), *options],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


@needs_optuna
def test_ctrl_c_saves_what_runs_and_finished_work_is_not_repeated(tmp_path):
    (tmp_path / "slow").touch()
    process = start(tmp_path)
    until((tmp_path / "trial-002.waits").exists)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    assert process.returncode != 0
    before = calls(tmp_path)
    # The first rung is at update 2, so nothing is slow there: it was on the way to the second.
    assert before == [*(f"trial-{number:03d} to 2" for number in range(6)), "trial-002 to 4 resumed"]
    assert (tmp_path / "trial-002.saved").exists()
    (tmp_path / "slow").unlink()
    with pytest.raises(DataError, match="--resume continues it"):
        sweep(plan_in(tmp_path))
    trials = sweep(plan_in(tmp_path), resume=True)
    assert calls(tmp_path)[len(before) :] == [
        "trial-002 to 4 resumed",
        "trial-005 to 4 resumed",
        "trial-002 to 8 resumed",
    ]
    assert trials[0].number == 2
    # All is done: nothing is called any more.
    assert sweep(plan_in(tmp_path), resume=True) == trials
    assert len(calls(tmp_path)) == len(before) + 3


@pytest.mark.slow
@needs_optuna
def test_after_kill_9_the_trial_that_was_left_is_waited_for_and_kept(tmp_path):
    (tmp_path / "slow").touch()
    process = start(tmp_path)
    until((tmp_path / "trial-002.waits").exists)
    with pytest.raises(DataError, match=f"another `pirl sweep` .process {process.pid}. works in"):
        sweep(plan_in(tmp_path), resume=True)
    process.kill()
    process.wait(10)
    journal = tmp_path / "some/sweep/study.journal"
    journal.write_bytes(journal.read_bytes() + b'{"op_code":')  # a line that was being written
    again = start(tmp_path, "--resume")
    assert again.stderr is not None
    assert b"waiting for the trials that were left at work" in again.stderr.readline()
    (tmp_path / "slow").unlink()
    assert again.wait(60) == 0
    assert calls(tmp_path)[7:] == ["trial-002 to 4 resumed", "trial-005 to 4 resumed", "trial-002 to 8 resumed"]
    steps = [json.loads(line)["step"] for line in (tmp_path / "some/sweep/trial-002/metrics.jsonl").open()]
    assert steps == list(range(1, 9))


@needs_optuna
def test_another_sweep_under_the_same_name_is_refused_and_overwrite_begins_anew(tmp_path):
    sweep(plan_in(tmp_path, "1e-3", "1e-4", rungs=(1,)))
    other = plan_in(tmp_path, "1e-3", "1e-2", rungs=(1,))
    with pytest.raises(DataError, match="contains a sweep with other settings"):
        sweep(other, resume=True)
    sweep(other, overwrite=True)
    assert calls(tmp_path)[2:] == ["trial-000 to 1", "trial-001 to 1"]
    # The same arguments, but the file or the preset that they name has changed: what is new could not be compared.
    changed = replace(other, base=override_config(other.base, {"batch_size": 7}))
    with pytest.raises(DataError, match=rf"config.batch_size: {other.base.batch_size} before, 7 now"):
        sweep(changed, resume=True)
    elsewhere = replace(other, base=override_config(other.base, {"runs_dir": "elsewhere"}))
    assert len(sweep(elsewhere, resume=True)) == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(DataError, match="contains no sweep"):
            sweep(plan_in(tmp_path, directory=tmp_path / "mine"), **options)
    assert (tmp_path / "mine/file").exists()
    with pytest.raises(DataError, match="nothing to resume"):
        sweep(plan_in(tmp_path, directory=tmp_path / "none"), resume=True)


@needs_optuna
def test_a_sweep_that_did_not_write_its_configuration_down_goes_on_and_then_does(tmp_path):
    plan = plan_in(tmp_path, "1e-3", "1e-4", rungs=(1,))
    trials = sweep(plan)
    file = plan.directory / "sweep.json"
    record = json.loads(file.read_text())
    config = record["settings"].pop("config")
    file.write_text(json.dumps(record))
    assert sweep(plan, resume=True) == trials
    assert json.loads(file.read_text())["settings"]["config"] == config


# --- checks ------------------------------------------------------------------------------------------------------


def configured(preset, **given):
    base = override_config(get_config(preset), given)
    return lambda setting: override_config(base, setting, "pirl sweep", texts=True)


def evaluated(data):
    return {"data.repo_id": str(data), "evaluation.every": 100}


def check(plan, configure, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # whether Optuna is there or not
    check_plan(plan, configure)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"metric": "eval/sucess"}, "Did you mean eval/success"),
        ({"metric": "online/success"}, "there is no online phase"),
        ({"metric": "val/loss"}, "no episodes are held out"),
        (
            {"knobs": (Knob("batch_size", ("8", "0")),)},
            "with batch_size = 0 and steps = 2, this configuration cannot work",
        ),
        ({"knobs": (Knob("steps", ("8", "9")),)}, "cannot be varied"),
        ({"knobs": (Knob("online.env_steps", ("0", "9")),)}, "environment steps, other runs updates"),
        ({"trials": 0}, "--trials should be at least 1"),
        ({"jobs": 0}, "--jobs should be at least 1"),
    ],
)
def test_nothing_begins_that_cannot_work(tmp_path, monkeypatch, changes, words):
    plan, configure = plan_in(tmp_path, **changes), configured("demo_state_bc", **evaluated(tmp_path))
    if words is None:
        check(plan, configure, monkeypatch)
        return
    with pytest.raises(UserError, match=words):
        check(plan, configure, monkeypatch)


def test_a_metric_that_is_not_measured_by_the_first_rung_is_refused(tmp_path, monkeypatch):
    given = {"data.repo_id": str(tmp_path), "validation_every": 50, "data.validation_fraction": 0.1}
    with pytest.raises(ConfigError, match="measured every 50 updates"):
        check(plan_in(tmp_path, metric="val/loss"), configured("demo_state_bc", **given), monkeypatch)
    check(plan_in(tmp_path, metric="val/loss", rungs=(50, 100)), configured("demo_state_bc", **given), monkeypatch)


def test_without_optuna_it_is_said_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'pirl\[sweep\]'"):
        check_plan(plan_in(tmp_path), configured("demo_state_bc"))


def test_rungs_count_what_comes_last_in_a_run():
    assert length_of(get_config("demo_state_bc")) == ("steps", get_config("demo_state_bc").steps)
    assert length_of(get_config("debug")) == ("online.env_steps", get_config("debug").online.env_steps)
    assert length_of(get_config("demo_ript"))[0] == "rollout.iterations"


def test_a_trial_is_a_run_of_pirl_train(tmp_path):
    plan = plan_in(tmp_path, given={"steps": "100", "env.precision": "-0.1"})
    trial = Trial(3, {"agent.optimizer.peak_lr": "1e-3"})
    assert plan.trial_command(trial, 4, resume=True) == (
        *FAKE,
        "demo_state_bc",
        "--exp-name",
        "some/sweep/trial-003",
        "--steps=4",
        "--env.precision=-0.1",
        "--agent.optimizer.peak-lr=1e-3",
        "--resume",
    )


def test_the_best_setting_in_full_is_never_shorter_than_the_trial_that_won(tmp_path):
    configured = get_config("demo_state_bc").steps
    setting = {"agent.optimizer.peak_lr": "1e-3"}
    for last, expected in ((8, configured), (configured + 500, configured + 500)):
        command = plan_in(tmp_path, rungs=(2, last), given={"env.precision": "-0.1"}).full_command(setting)
        assert command.endswith(f" --env.precision=-0.1 --agent.optimizer.peak-lr=1e-3 --steps={expected}")


# --- the page ----------------------------------------------------------------------------------------------------


def some_trials():
    def one(number, rate, measured, state="pruned", reason=""):
        found = {rung: Measurement(value, max(0.0, value - 0.1), min(1.0, value + 0.1)) for rung, value in measured}
        return Trial(number, {"agent.optimizer.peak_lr": rate, "agent.<b>": "a&b"}, found, state, reason)

    return [
        one(0, "1e-3", [(2, 0.4), (4, 0.5), (8, 0.6)], "complete"),
        one(1, "1e-4", [(2, 0.3), (4, 0.7)]),
        one(2, "1e-5", [(2, 0.35), (4, 0.9)], "failed", "exit code 1: <oops>"),
        one(3, "1e-2", [], "failed", "exit code 2"),
    ]


def test_who_came_further_ranks_higher_and_who_failed_last():
    trials = some_trials()
    assert [trial.number for trial in order(reversed(trials), "max")] == [0, 1, 2, 3]
    assert find_best(trials, "max") == trials[0]
    assert find_best(trials[1:], "max") == trials[1]
    assert find_best(trials[2:], "max") is None


def test_the_page_shows_every_trial_every_knob_and_the_command(tmp_path):
    knobs = (Knob("agent.optimizer.peak_lr", ("1e-3", "1e-4", "1e-5", "1e-2")), Knob("agent.<b>", ("a&b", "c")))
    plan = plan_in(tmp_path, knobs=knobs)
    page = build_sweep_page(plan, some_trials(), WHEN)
    assert page.startswith(build_page("Sweep: some/sweep", "", [])[:60])
    for words in ("trial-000", "60.0 % [50.0, 70.0]", "others were better", "failed: exit code 1: &lt;oops&gt;"):
        assert words in page
    assert "<oops>" not in page
    assert "<b>" not in page
    # A dot for each measurement, in each of the two charts of knobs.
    assert page.count('h0"><title>') == 2 * (3 + 2 + 2)
    assert "<title>trial-001 after 4: 70.0 % [60.0, 80.0]</title>" in page
    assert "pirl train demo_state_bc --exp-name some/sweep-best" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_page_without_results_says_so(tmp_path):
    plan = plan_in(tmp_path, halving=Halving((2, 4)))
    assert summarise(plan, some_trials()[3:]) == "None of 1 trials has a result."
    assert "no data" in build_sweep_page(plan, some_trials()[3:], WHEN)
