"""A run directory is read as it is, whatever became of the run, and is left alone."""

import fcntl
import json
import math
import os

import numpy as np
import pytest

from made_runs import HOST, NOBODY, RIPT, ROLLBACKS, evaluation, learning, make_run, rollouts, write_lines
from pirl.errors import DataError
from pirl.report.runs import Curve, Event, Run, over_iterations, over_metric, read_run, read_runs


def write_run(directory, records, end=""):
    write_lines(directory / "metrics.jsonl", records, end)
    return directory


def finite(curve):
    known = np.isfinite(curve.values)
    return curve.steps[known].tolist(), curve.values[known].tolist()


def test_metrics_are_curves_and_a_step_logged_again_after_a_resume_counts_once(tmp_path):
    records = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2, "note": "text"}, {"step": 2, "loss": 1.0}]
    curves = read_run(write_run(tmp_path, [*records, {"step": 1, "eval/success": 0.0}])).curves
    assert {metric: finite(curve) for metric, curve in curves.items()} == {
        "loss": ([1, 2], [3, 1]),
        "eval/success": ([1], [0]),
    }


def test_a_hole_in_a_metric_is_a_gap_but_its_rhythm_is_not(tmp_path):
    records = [{"step": step} for step in range(1, 501)]
    for step in (*range(10, 101, 10), *range(150, 201, 10)):
        records[step - 1]["hole"] = math.nan if step == 70 else 1.0
    for step in (100, 300, 500):
        records[step - 1]["rare"] = 1.0
    curves = read_run(write_run(tmp_path, records)).curves
    assert curves["hole"].steps[np.isnan(curves["hole"].values)].tolist() == [70, 125]
    assert np.isfinite(curves["rare"].values).all()


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path):
    for end in ('{"step": 3, "lo', "\x00\x00"):
        run = read_run(write_run(tmp_path, [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}], end))
        assert (finite(run.curves["loss"])[0], run.is_torn) == ([1, 2], True)


def test_a_damaged_line_is_refused_by_its_number(tmp_path):
    for line in ('{"st', '{"loss": 1}', "[1]", '{"step": NaN}'):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
        with pytest.raises(DataError, match=r"metrics.jsonl, line 2"):
            read_run(tmp_path)


def test_a_directory_that_is_no_run_or_damaged_is_refused(tmp_path):
    run = make_run(tmp_path / "mine", learning())
    for damage in ("{", '{"config": {}}'):
        (run / "metadata.json").write_text(damage)
        with pytest.raises(DataError, match=r"metadata\.json cannot be read"):
            read_runs([run])
    (run / "metadata.json").unlink()
    with pytest.raises(DataError, match="is not a run"):
        read_runs([run])
    with pytest.raises(DataError, match="there is no run"):
        read_runs([tmp_path / "none"])
    with pytest.raises(DataError, match=r"no metrics\.jsonl"):
        read_run(tmp_path)


def test_the_log_says_how_a_run_ended_until_it_is_resumed(tmp_path):
    ends = {"done": "done", "stopped": "stopped at step 60", "failed": "the disk is <full>", "ended": "killed"}
    for end, text in ends.items():
        run = make_run(tmp_path / end, learning(), end=end)
        (found,) = read_runs([run])
        assert (found.state, text in found.state_text) == (end, True)
        with (run / "log.txt").open("a") as log:
            log.write("2026-01-03 10:00:00,000 INFO demo in runs/mine\n")
        assert read_runs([run])[0].state == "ended"


def test_an_active_run_is_known_by_its_lock_and_nothing_is_locked_or_changed(tmp_path, monkeypatch):
    run = make_run(tmp_path / "mine", [*learning(), evaluation(100, 50)], end="ended")

    def listing():
        return {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in run.rglob("*") if file.is_file()}

    before = listing()
    with (run / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", lambda *_: pytest.fail("a lock was taken"))
        (found,) = read_runs([run])
    assert (found.state, found.state_text) == ("under way", f"is under way (process {NOBODY} on {HOST})")
    assert read_runs([run])[0].state == "ended"
    assert listing() == before


def test_a_run_of_another_machine_is_active_while_its_files_change(tmp_path):
    run = make_run(tmp_path / "mine", learning(), end="ended", host="elsewhere")
    assert read_runs([run])[0].state == "under way"
    for file in ("log.txt", "metrics.jsonl"):
        os.utime(run / file, (1e9, 1e9))
    assert read_runs([run])[0].state == "ended"


def test_rollbacks_and_skipped_updates_are_events_where_they_happened(tmp_path):
    records = learning()
    for record in records[4:]:
        record["skipped"] = 3
    run = make_run(tmp_path / "mine", records, rollbacks=ROLLBACKS)
    (run / "bad_batches").mkdir()
    (run / "bad_batches" / "00000044.json").write_text(json.dumps({"step": 44, "reason": "loss is nan"}))
    (run / "bad_batches" / "00000045.json").write_text('{"step"')
    (found,) = read_runs([run])
    assert [(event.step, event.kind) for event in found.events] == [
        (20, "rollback"),
        (45, "skipped"),
        (50, "skipped"),
    ]
    assert "loss is nan" in found.events[1].text
    assert found.events[2].text.startswith("2 skipped")


def test_what_is_measured_at_a_step_is_drawn_over_the_count_before_it():
    counted = Curve(np.array([10.0, 20.0]), np.array([500.0, 1000.0]))
    success = Curve(np.array([0.0, 10.0, 20.0, 30.0]), np.array([0.0, 0.1, 0.2, 0.3]))
    run = Run("mine", {"env_steps": counted, "success": success}, events=[Event(20, "skipped", "")])
    over = over_metric(run, "none", "env_steps")
    assert over.curves["success"].steps.tolist() == [0, 0, 500, 1000]
    assert [event.step for event in over.events] == [500]
    assert not over_metric(run, "none").curves


def test_an_iteration_has_its_rollouts_and_what_its_updates_reached(tmp_path):
    (run,) = read_runs([make_run(tmp_path / "mine", rollouts(), config=RIPT, rollbacks=[{**ROLLBACKS[0], "to": 20}])])
    assert [step for step, _ in run.iterations] == [0, 20, 20, 40]
    over = over_iterations(run)
    assert finite(over.curves["rollout/success_after"]) == ([1, 3, 4], [0.5, 0.5, 0.5])
    assert [event.step for event in over.events] == [1]


def test_runs_have_different_names_and_no_run_is_named_twice(tmp_path):
    paths = [make_run(tmp_path / place / "run", learning(1)) for place in ("x", "y")]
    assert [run.name for run in read_runs(paths)] == ["x/run", "y/run"]
    (tmp_path / "link").symlink_to(paths[0])
    with pytest.raises(DataError, match="twice"):
        read_runs([paths[0], tmp_path / "link"])
    with pytest.raises(DataError, match="There are runs in it"):
        read_runs([tmp_path / "x"])
