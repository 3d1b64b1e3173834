"""A sweep trains what it should for as long as it should, survives what happens to it, and says what came of it."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from optuna.distributions import CategoricalDistribution
from sweeps import plan_in, with_range

from pirl.config import override_config
from pirl.errors import DataError, TrainingError
from pirl.sweep.plan import name_of
from pirl.sweep.run import measure
from pirl.sweep.run import run_sweep as sweep


def ends(trials):
    return [(trial.number, trial.state.name, trial.last_step) for trial in trials]


def rates(trials):
    return [trial.params["agent.optimizer.peak_lr"] for trial in trials]


def calls(runs):
    return (runs / "calls").read_text().splitlines()


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# --- from beginning to end ---------------------------------------------------------------------------------------


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
    assert ends(trials) == [(2, "COMPLETE", 8), (5, "PRUNED", 4), *((n, "PRUNED", 2) for n in (1, 3, 0, 4))]
    results = json.loads((plan.directory / "sweep.json").read_text())
    assert results["is_over"]
    assert results["best"]["name"] == "trial-002"
    assert results["best"]["command"] == (
        f"pirl train demo_state_bc --exp-name some/sweep-best --runs-dir={tmp_path} --agent.optimizer.peak-lr=1e-3 "
        "--steps=1500"
    )
    success = 1 - 0.8**8
    assert results["best"]["rungs"]["8"] == {"value": success, "low": success - 0.1, "high": success + 0.1}
    assert [trial["name"] for trial in results["trials"]] == [name_of(trial) for trial in trials]
    page = (plan.directory / "sweep.html").read_text()
    assert "trial-002 is the best of 6 trials: eval/success 83.2 % [73.2, 93.2] after 8 updates" in page.replace(
        '<span class="number">', ""
    ).replace("</span>", "")
    # The report of all runs is on it, and a dot for each measurement.
    for words in ("73.2, 93.2", "others were better", "Success during training", "peak-lr"):
        assert words in page
    for number, rung in ((2, 2), (2, 4), (2, 8), (5, 4), (0, 2)):
        assert f'data-name="trial-{number:03d} after {rung}"' in page
    said = capfd.readouterr().err
    assert "2 of 6 trials continue beyond 2 updates: trial-002, trial-005" in said


def test_a_range_is_kept_to_and_the_same_seed_draws_the_same_again(tmp_path):
    plan = with_range(tmp_path / "a", 12, rungs=(2,))
    drawn = rates(sweep(plan))
    assert all(1e-5 <= rate <= 1e-1 for rate in drawn)
    assert rates(sweep(with_range(tmp_path / "b", 12, rungs=(2,)))) == drawn
    assert not set(rates(sweep(with_range(tmp_path / "c", 3, rungs=(1,), seed=1)))) & set(drawn)


def test_no_combination_is_tried_twice_while_others_are_left(tmp_path):
    lists = {"agent.optimizer.peak_lr": ("1e-4", "1e-3"), "batch_size": ("4", "8")}
    space = {name: CategoricalDistribution(values) for name, values in lists.items()}
    trials = sweep(plan_in(tmp_path, space=space, trials=3, rungs=(1,)))
    assert len({tuple(trial.params.values()) for trial in trials}) == 3


def test_several_at_a_time_have_devices_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    sweep(plan_in(tmp_path, "1e-3", "1e-2", jobs=2, rungs=(1,)))
    assert {file.read_text() for file in tmp_path.glob("*.devices")} == {"3,7", "5"}


# --- failures ----------------------------------------------------------------------------------------------------


def test_a_trial_that_fails_is_left_behind_with_its_reason(tmp_path, capfd):
    plan = plan_in(tmp_path, "1e-9", "1e-3", "1e-4", "1e-5", "1e-2", "1e-1")
    trials = sweep(plan)
    assert (ends(trials)[0][0], ends(trials)[-1]) == (1, (0, "FAIL", None))
    assert trials[-1].user_attrs["reason"] == "exit code 1: error: the loss is not finite."
    assert "trial-000: failed (exit code 1: error: the loss is not finite.). Its log is" in capfd.readouterr().err
    assert "the loss is not finite" in (plan.directory / "sweep.html").read_text()


def test_when_all_that_went_on_fail_the_others_still_count(tmp_path, capfd):
    trials = sweep(plan_in(tmp_path, "0.6", "1e-3", mode="min", rungs=(1, 8)))
    assert calls(tmp_path)[2:] == ["trial-000 to 8 resumed"]
    assert ends(trials) == [(1, "PRUNED", 1), (0, "FAIL", 1)]
    assert "none of 1 trials reached 8 updates" in capfd.readouterr().err


def test_when_all_fail_the_last_words_are_shown(tmp_path):
    with pytest.raises(TrainingError) as error:
        sweep(plan_in(tmp_path, "1e-9", "1e-8"))
    assert error.value.exit_code == 1
    assert "every trial failed" in str(error.value)
    assert "training some/sweep/trial-001 to 2\n  error: the loss is not finite." in str(error.value)


def test_what_a_run_measured_last_counts_with_its_own_interval_unless_it_was_stopped(tmp_path):
    interval = '"eval/success_low": 0.4, "eval/success_high": 0.6'
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "eval/success": 0.5, {interval}}}\n')
    assert measure(tmp_path, "eval/success") == (0.5, [0.4, 0.6])
    with pytest.raises(DataError, match="logged no online/success; it logged eval/success, "):
        measure(tmp_path, "online/success")
    with (tmp_path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 2, "eval/success": 0.7}\n')
    (tmp_path / "metadata.json").write_text('{"stopped": true}')
    with pytest.raises(DataError, match="was stopped before it came to its end"):
        measure(tmp_path, "eval/success")
    (tmp_path / "metadata.json").write_text('{"stopped": false}')
    assert measure(tmp_path, "eval/success") == (0.7, [])


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
    assert b"waiting for the jobs" in again.stderr.readline()
    (tmp_path / "slow").unlink()
    assert again.wait(60) == 0
    assert calls(tmp_path)[7:] == ["trial-002 to 4 resumed", "trial-005 to 4 resumed", "trial-002 to 8 resumed"]
    steps = [json.loads(line)["step"] for line in (tmp_path / "some/sweep/trial-002/metrics.jsonl").open()]
    assert steps == list(range(1, 9))


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
