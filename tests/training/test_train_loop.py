"""The training loop: what it does when, and what it does when something goes wrong. The learner is a toy."""

import dataclasses
import json
import os
import shutil
import signal

import numpy as np
import pytest
from training_runs import assert_same_run, read_metrics, read_state, values_of

from pirl.data import ChunkSampler
from pirl.envs.policy import find_policy
from pirl.errors import ConfigError, DataError, EnvError, TrainingError, UserError
from pirl.interop import open_checkpoint
from pirl.run_files import RunFiles, saved_steps
from pirl.training.evaluation import StoppablePolicy
from pirl.training.setup import data_identity, refuse_other_data, set_up
from pirl.training.train import train
from python_path import python_path

pytestmark = pytest.mark.usefixtures("toy")
# Without measurements or rollouts.
PLAIN = {"online__env_steps": 0, "evaluation__every": 0, "checkpoints__best_metric": None}
PLAIN |= {"validation_every": 0, "data__validation_fraction": 0.0}


def test_offline_then_online_does_everything_when_it_is_due(configure, tmp_path, capsys):
    config = configure(steps=10, logging__every=3, validation_every=4, evaluation__every=5, checkpoints__every=5)
    assert train(config, exp_name="run") == 0
    run = tmp_path / "run"
    steps = 10 + max(values_of(run, "online/env_steps").values()) // 10
    assert steps >= 14
    assert [*values_of(run, "loss")] == [*sorted({*range(3, 10, 3), *(s for s in (12, 14) if s <= steps), steps})]
    assert [*values_of(run, "val/loss")] == [s for s in range(4, steps + 1) if s % 4 == 0]
    assert [*values_of(run, "eval/success")] == sorted({5, 10, steps}), "and once more at the end"
    assert {int(file.stem) for file in (run / "evaluations").glob("*.json")} == {5, 10, steps}
    assert [*values_of(run, "online/success")] == [10], "one round of 2 episodes is 40 steps"
    assert saved_steps(run / "checkpoints", resumable=True) == [10, steps]
    said = capsys.readouterr().err
    assert said.index("compiling the learner …") < said.index("compiling the update …") < said.index("step 3/")
    assert said.count("compiling") == 4, "learner, update, validation, acting: each once"
    assert f"policy: {run}/checkpoints/{steps}" in said
    assert "compiling the update" in (run / "log.txt").read_text()


def test_online_only_needs_no_dataset_and_survives_crashing_environments(configure, tmp_path, monkeypatch):
    assert train(configure(**PLAIN, steps=2), exp_name="before") == 0
    monkeypatch.setenv("PYTHONPATH", python_path(os.path.dirname(__file__)))
    config = configure(
        **PLAIN | {"online__env_steps": 60, "online__episodes_per_round": 6, "online__prior_ratio": 0.0},
        steps=0,
        data__repo_id=None,
        data__norm_stats="checkpoint",
        checkpoint=str(tmp_path / "before"),
        from_scratch=False,
        env__id="crashing_env:test/CrashingTabletop-v0",
        env__observation="state",
        env__max_steps=20,
        evaluation__envs=2,
        online__seed=0,
    )
    assert train(config, exp_name="run") == 0
    run = tmp_path / "run"
    (*_, last) = (line for line in read_metrics(run) if "online/lost" in line)
    assert last["online/env_steps"] >= 60
    assert last["online/lost"] >= 2, "episodes with odd seeds die"
    assert len(list((run / "replay").glob("*.npz"))) == last["online/episodes"], "what was lost is not learned from"
    assert max(values_of(run, "loss")) == last["online/env_steps"] // 10
    (mine,), (its,) = (
        open_checkpoint(find_policy(tmp_path / name)).norm_stats().values() for name in ("run", "before")
    )
    np.testing.assert_array_equal(mine["state"].mean, its["state"].mean)


def test_where_all_rollouts_are_lost_the_run_ends_with_the_reason(configure, tmp_path, monkeypatch):
    from pirl.training import streams

    def lose(*arguments, **options):
        return [dataclasses.replace(rollout, lost="the floor gave way") for rollout in original(*arguments, **options)]

    original = streams.collect
    monkeypatch.setattr(streams, "collect", lose)
    with pytest.raises(EnvError, match="all episodes of 3 rounds were lost.*the floor gave way"):
        train(configure(steps=2, evaluation__every=0, checkpoints__best_metric=None), exp_name="run")
    assert values_of(tmp_path / "run", "online/lost") == {2: 4.0}


# --- beginning and going on -------------------------------------------------------------------------------------------


def test_a_run_is_neither_mixed_with_another_nor_overwritten_unasked(configure, tmp_path):
    config = configure(**PLAIN, steps=3)
    train(config, exp_name="run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="already holds a run, with checkpoints up to step 3: --resume"):
        train(config, exp_name="run")
    other = configure(**PLAIN, steps=3, batch_size=16, agent__discount=0.5)
    with pytest.raises(ConfigError, match=r"agent.discount: 0.99 in the run, 0.5 now\n  batch_size: 8 in .*, 16 now"):
        train(other, exp_name="run", resume=True)
    with pytest.raises(ConfigError, match="holds no run, so there is nothing to resume"):
        train(config, exp_name="another", resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert train(other, exp_name="run", overwrite=True) == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() != before


def test_resuming_a_finished_run_says_so_and_does_nothing(configure, tmp_path, capsys):
    # The last step is neither logged, evaluated nor saved by its number.
    config = configure(steps=11, logging__every=4, evaluation__every=4, validation_every=4, checkpoints__every=4)
    train(config, exp_name="run")
    run = tmp_path / "run"
    kept = [*(run / "checkpoints").rglob("*"), *(run / "evaluations").iterdir()]
    before = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in kept}
    metrics = (run / "metrics.jsonl").read_bytes()
    assert train(config, exp_name="run", resume=True) == 0
    assert "updates are done already; to continue, raise --steps." in capsys.readouterr().err
    assert {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in kept} == before
    assert (run / "metrics.jsonl").read_bytes() == metrics


def test_more_steps_go_on_as_if_they_had_been_asked_for_at_once(configure, tmp_path):
    for exp_name, steps in (("run", 5), ("run", 9), ("reference", 9)):
        train(configure(**PLAIN, steps=steps), exp_name=exp_name, resume=exp_name == "run" and steps == 9)
    assert_same_run(tmp_path / "run", tmp_path / "reference", 9)


def test_more_offline_steps_after_online_ones_are_all_made(configure, tmp_path):
    changes = {"evaluation__every": 0, "checkpoints__best_metric": None}
    train(configure(**changes, steps=4), exp_name="run")
    online = max(values_of(tmp_path / "run", "loss")) - 4
    train(configure(**changes, steps=7), exp_name="run", resume=True)
    assert max(values_of(tmp_path / "run", "loss")) == 7 + online
    state = json.loads((tmp_path / "run" / "checkpoints" / str(7 + online) / "state.json").read_text())
    assert state["host"]["parts"]["stream"]["OfflineStream"]["sampler"]["step"] == 7, "the data goes on where it was"


def test_what_does_not_improve_is_stopped_and_stays_so(configure, tmp_path, capsys):
    # Losses of the toy do not fall by a million.
    changes = {"stopping__metric": "val/loss", "stopping__mode": "min", "stopping__min_delta": 1e6, "steps": 40}
    changes |= {"validation_every": 3, "logging__every": 2, "checkpoints__every": 3}
    config = configure(**PLAIN | {"data__validation_fraction": 0.2} | changes, stopping__patience=2)
    for resume in (False, True):
        assert train(config, exp_name="run", resume=resume) == 0
        said = capsys.readouterr().err
        assert "stopped at step 9: val/loss has not improved for 2 measurements" in said
        assert [*values_of(tmp_path / "run", "val/loss")] == [3, 6, 9]
        assert [*values_of(tmp_path / "run", "loss")] == [2, 4, 6, 8, 9]
    more = dataclasses.replace(config, stopping=dataclasses.replace(config.stopping, patience=3))
    assert train(more, exp_name="run", resume=True) == 0
    assert [*values_of(tmp_path / "run", "val/loss")] == [3, 6, 9, 12]


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.fixture
def poison(monkeypatch):
    """Make the batches of some steps hold NaN."""
    bad: set[int] = set()
    original = ChunkSampler.batch

    def batch(self, step):
        found = original(self, step)
        return dataclasses.replace(found, actions=found.actions * np.float32("nan")) if step in bad else found

    monkeypatch.setattr(ChunkSampler, "batch", batch)
    return bad


def test_a_bad_batch_is_skipped_counted_and_recorded(configure, tmp_path, poison):
    config = configure(**PLAIN, steps=6, checkpoints__every=1, checkpoints__max_to_keep=9)
    poison |= {2, 4}
    assert train(config, exp_name="run") == 0
    run = tmp_path / "run"
    assert values_of(run, "skipped") == {1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 2}
    assert [*values_of(run, "loss")] == [1, 2, 4, 6]
    before, after = read_state(run, 2), read_state(run, 3)
    assert all(np.array_equal(before[name], after[name]) for name in before), "a skipped update changes nothing"
    assert sorted(file.name for file in (run / "bad_batches").glob("*.npz")) == ["00000002.npz", "00000004.npz"]
    assert json.loads((run / "bad_batches" / "00000002.json").read_text())["leaves"]["actions"]["not_finite"] > 0
    assert train(dataclasses.replace(config, steps=7), exp_name="run", resume=True) == 0
    assert values_of(run, "skipped")[7] == 2, "a run that goes on goes on counting"


def test_too_many_bad_batches_in_a_row_end_the_run_with_the_last_good_state_kept(configure, tmp_path, poison):
    config = configure(**PLAIN, steps=9, checkpoints__every=4, health__max_skipped=3)
    poison |= set(range(5, 9))
    with pytest.raises(TrainingError, match="3 updates in a row were skipped.*last good state is .*/4") as error:
        train(config, exp_name="run")
    assert not isinstance(error.value, AssertionError)
    run = tmp_path / "run"
    assert saved_steps(run / "checkpoints") == [4]
    assert "updates in a row were skipped" in (run / "log.txt").read_text()
    poison.clear()  # the cause was seen to
    assert train(config, exp_name="run", resume=True) == 0
    train(config, exp_name="reference")
    assert_same_run(run, tmp_path / "reference", 9)


def test_a_run_that_could_not_begin_leaves_its_name_free(configure, tmp_path):
    for change in ({"data__outcomes__success_column": "nothing_of_the_kind"}, {"env__observation": "pixels"}):
        with pytest.raises(UserError):
            train(configure(**change), exp_name="run")
        assert not (tmp_path / "run").exists(), change


def test_a_run_does_not_go_on_with_another_dataset(configure, tmp_path, monkeypatch):
    train(configure(steps=4, checkpoints__every=2, **PLAIN), exp_name="run")
    other = {"episodes": 20, "frames": 1, "content": "another"}
    monkeypatch.setattr("pirl.training.train.data_identity", lambda setup: other)
    before = [(tmp_path / "run" / name).read_bytes() for name in ("config.yaml", "metadata.json")]
    with pytest.raises(DataError, match="not the dataset that this run began with: it had 20 episodes"):
        train(configure(steps=6, checkpoints__every=2, **PLAIN), exp_name="run", resume=True)
    assert read_state(tmp_path / "run", 4), "and nothing is lost"
    after = [(tmp_path / "run" / name).read_bytes() for name in ("config.yaml", "metadata.json")]
    assert after == before, "nor said of it that is not so"


def test_where_an_evaluation_fails_what_was_learned_is_saved_and_the_evaluation_owed(configure, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise EnvError("the first 3 episodes were lost")

    config = configure(steps=6, evaluation__every=5, checkpoints__best_metric=None, online__env_steps=0)
    train(config, exp_name="reference")
    with monkeypatch.context() as broken:
        broken.setattr("pirl.training.evaluation.measure_success", fail)
        with pytest.raises(EnvError, match="were lost"):
            train(config, exp_name="run")
    assert read_state(tmp_path / "run", 5)
    assert train(config, exp_name="run", resume=True) == 0
    assert_same_run(tmp_path / "run", tmp_path / "reference", 6)


def test_data_that_were_moved_are_known_by_what_is_in_them(configure, data, tmp_path):
    train(configure(steps=3, **PLAIN), exp_name="run")
    shutil.copytree(data, tmp_path / "moved")
    train(configure(steps=5, **PLAIN, data__repo_id=str(tmp_path / "moved")), exp_name="run", resume=True)
    assert max(values_of(tmp_path / "run", "loss")) == 5


def test_data_do_not_come_or_go_or_change_while_a_run_goes_on(configure):
    setup = set_up(configure())
    known = data_identity(setup)
    actions = setup.trajectories.actions.copy()
    actions[7, 0] += 1e-6
    other = data_identity(
        dataclasses.replace(setup, trajectories=dataclasses.replace(setup.trajectories, actions=actions))
    )
    refuse_other_data("x", None, None)
    refuse_other_data("x", known, data_identity(set_up(configure())))
    for before, now, words in (
        *((known, None, "has none now"), (None, known, "with no dataset, and has x now")),
        *((known, other, "labels or prompts"), (known, {**known, "prompts": "c"}, "labels or prompts")),
    ):
        with pytest.raises(DataError, match=words):
            refuse_other_data("x", before, now)


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({"steps": 12}, 4),  # to be saved when it is measured
        ({"steps": 12, "checkpoints__every": 8, "checkpoints__best_metric": None}, 4),  # not to be saved then
        ({"steps": 8, "logging__every": 3}, 8),  # the last update, which is logged after it
        ({"steps": 10}, 10),  # the end, whatever the interval
    ],
)
def test_a_stop_in_the_middle_of_an_evaluation_saves_what_was_learned(configure, tmp_path, monkeypatch, changes, step):
    every = {"evaluation__every": 4, "validation_every": 4, "checkpoints__every": 4, "online__env_steps": 0}
    config, run, infer = configure(**{**every, **changes}), tmp_path / "run", StoppablePolicy.infer
    train(config, exp_name="reference")

    def infer_until_stopped(self, *given):
        if len(list(run.glob("evaluations/*.json"))) == (step - 1) // 4:
            signal.raise_signal(signal.SIGTERM)
        return infer(self, *given)

    with monkeypatch.context() as stopped:
        stopped.setattr(StoppablePolicy, "infer", infer_until_stopped)
        assert train(config, exp_name="run") == 0
    assert (run / "checkpoints" / str(step)).is_dir()
    assert not (run / "evaluations" / f"{step}.json").exists()
    assert RunFiles(run).was_stopped
    assert train(config, exp_name="run", resume=True) == 0
    assert not RunFiles(run).was_stopped
    assert_same_run(run, tmp_path / "reference", changes["steps"])
    best = [tmp_path / name / "checkpoints" / "best.json" for name in ("run", "reference")]
    assert not best[1].exists() or best[0].read_text() == best[1].read_text()
