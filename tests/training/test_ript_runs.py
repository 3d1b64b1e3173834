"""Runs of RIPT as a whole, with a toy for a learner in an environment of chance: what is done when, and when it fails."""

import dataclasses
import itertools
import json
import os
import random
import signal
from collections import Counter

import numpy as np
import pytest
import toy_learner
from fair_env import CROWDED, Fair
from training_runs import QUICK, RIPT_TOY, assert_same_run, finish, kill_when, lines_in, read_metrics, start, values_of

from pirl.cli.main import main
from pirl.data import ReplayBuffer, open_dataset
from pirl.data.outcomes import OutcomeConfig, read_outcomes
from pirl.envs.pool import LocalPool
from pirl.errors import CheckpointError, ConfigError, TrainingError
from pirl.run_files import saved_steps
from pirl.training import rollout_stream
from pirl.training.dry_run import dry_run
from pirl.training.rollout_stream import RolloutStream
from pirl.training.train import train

# A run that looks at whether success collapses.
WATCHED = {"health__min_success_ratio": 0.25, "rollout__iterations": 5}


def last_step(run):
    return max(values_of(run, "loss"))


def rollbacks(run):
    return json.loads((run / "metadata.json").read_text()).get("rollbacks", [])


def saved(run):
    return saved_steps(run / "checkpoints", resumable=True)


@pytest.fixture
def at_batch(monkeypatch):
    """Have something happen when the learner gets its n-th batch of this process."""
    moments = {}
    original, count = RolloutStream.draw, 0

    def draw(self):
        nonlocal count
        count += 1
        found = original(self)
        return moments[count](found) or found if count in moments else found

    monkeypatch.setattr(RolloutStream, "draw", draw)
    return moments


def poisoned(batch):
    """The same with advantages that are not numbers."""
    return dataclasses.replace(batch, advantages=batch.advantages * np.float32("nan"))


# --- killed, stopped, resumed -----------------------------------------------------------------------------------------


def begin(run, start_policy, *options, **environment):
    """The toy's run in a process of its own."""
    given = {**RIPT_TOY, "env.slow": 0.002, "rollout.save_dataset": True, "rollout.iterations": 5}
    flags = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value).lower())]
    flags[flags.index("--env.id") + 1] = RIPT_TOY["env.id"]
    flags += ["--checkpoint", str(start_policy), *options]
    return start(run, start_policy.parent, "demo_ript", (toy_learner.__file__,), *flags, **QUICK | environment)


def labels(directory):
    return read_outcomes(open_dataset(str(directory)), OutcomeConfig()).success.tolist()


def assert_same_rollouts(run, reference):
    """The same episodes in the same order, none twice."""
    mine, its = (open_dataset(str(path / "rollouts")) for path in (run, reference))
    assert mine.lengths.tolist() == its.lengths.tolist()
    for name in ("action", "observation.state"):
        np.testing.assert_array_equal(mine.columns([name])[name], its.columns([name])[name])
    assert labels(run / "rollouts") == labels(reference / "rollouts")


def undisturbed(ript_config, tmp_path):
    config = ript_config(env__slow=0.002, rollout__save_dataset=True, rollout__iterations=5)
    assert train(config, exp_name="reference") == 0
    return tmp_path / "reference"


def test_killed_in_rollouts_and_updates_it_comes_to_the_same_bits(ript_config, start_policy, tmp_path):
    reference, run = undisturbed(ript_config, tmp_path), tmp_path / "run"
    # The log of an iteration begins when its rollouts end, and ends when its updates do.
    ends = [number for number, line in enumerate(read_metrics(reference), 1) if "rollout/drift" in line]
    kill_when(begin(run, start_policy), lambda: lines_in(run) >= ends[1] + 1, 0.03)
    killed = finish(begin(run, start_policy, "--resume", TOY_SIGNAL=f"{signal.SIGKILL:d} {ends[3] - 2}"))
    assert killed[0] == -signal.SIGKILL
    assert lines_in(run) < lines_in(reference), "it was killed before its end"
    assert finish(begin(run, start_policy, "--resume"))[0] == 0
    assert_same_run(run, reference, last_step(reference))
    assert_same_rollouts(run, reference)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments_it_comes_to_the_same_bits(ript_config, start_policy, tmp_path, seed):
    reference, run, chance = undisturbed(ript_config, tmp_path), tmp_path / "run", random.Random(seed)
    saving = [
        lambda: any(run.glob("checkpoints/.*.partial*")),
        lambda: any(run.glob("checkpoints/.*.partial/pirl.json")),
    ]
    saving += [lambda: any((run / "replay").glob("*"))]
    moments = [*saving, *(lambda limit=limit: lines_in(run) >= limit for limit in (3, 9, 15, 20))]
    for number, moment in enumerate(moments):
        process = begin(run, start_policy, *(("--resume",) if number else ()))
        kill_when(process, moment, 0.1 * chance.random())
    assert finish(begin(run, start_policy, "--resume"))[0] == 0
    assert_same_run(run, reference, last_step(reference))
    assert_same_rollouts(run, reference)


def test_stopped_within_an_iteration_it_saves_and_goes_on_to_the_same_bits(ript_config, tmp_path, at_batch, capsys):
    config, run = ript_config(checkpoints__every=2), tmp_path / "run"
    train(config, exp_name="reference")
    made, resume = last_step(tmp_path / "reference"), False
    for number, code, step in ((signal.SIGTERM, 0, 6), (signal.SIGINT, 130, 10)):
        assert step not in values_of(tmp_path / "reference", "rollout/drift"), "that is within an iteration"
        at_batch[made + step] = lambda batches, number=number: os.kill(os.getpid(), number)
        assert train(config, exp_name="run", resume=resume) == code
        assert f"stopped at step {step}; continue with --resume" in capsys.readouterr().err
        assert saved(run)[-1] == step
        resume = True
    assert train(config, exp_name="run", resume=True) == 0
    assert_same_run(run, tmp_path / "reference", made)


def test_stopped_among_rollouts_it_saves_at_once_and_rolls_out_again(ript_config, tmp_path, monkeypatch, capsys):
    config, run = (
        ript_config(rollout__save_dataset=True, rollout__recheck=False, checkpoints__every=9),
        tmp_path / "run",
    )
    train(config, exp_name="reference")
    second = [*values_of(tmp_path / "reference", "rollout/drift")][1]
    steps_since = []

    def stop_in_the_third_iteration(seed, updates):
        steps_since.extend([seed] if updates == second else [])
        if len(steps_since) == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    monkeypatch.setattr(Fair, "fails", staticmethod(stop_in_the_third_iteration))
    assert train(config, exp_name="run") == 0
    assert f"stopped at step {second}; continue with --resume" in capsys.readouterr().err
    assert saved(run)[-1] == second
    stopped_after = len(steps_since)
    assert len(open_dataset(str(run / "rollouts")).lengths) > 0
    assert train(config, exp_name="run", resume=True) == 0
    assert stopped_after < len(steps_since) - stopped_after, "it did not wait for the end of the round"
    assert_same_run(run, tmp_path / "reference", last_step(tmp_path / "reference"))
    assert_same_rollouts(run, tmp_path / "reference")


def test_more_iterations_go_on_as_if_they_had_been_asked_for_at_once(ript_config, tmp_path):
    train(ript_config(rollout__iterations=1), exp_name="run")
    train(ript_config(rollout__iterations=3), exp_name="run", resume=True)
    train(ript_config(rollout__iterations=3), exp_name="reference")
    assert_same_run(tmp_path / "run", tmp_path / "reference", last_step(tmp_path / "reference"))


def test_evaluations_and_checkpoints_count_iterations(ript_config, tmp_path):
    config = ript_config(evaluation__every=2, evaluation__episodes=4, checkpoints__every=2, checkpoints__max_to_keep=9)
    train(config, exp_name="run")
    run = tmp_path / "run"
    ends = [*values_of(run, "rollout/drift")]
    assert len(ends) == 4
    assert [*values_of(run, "eval/success")] == [ends[1], ends[3]]
    assert saved(run) == [0, ends[1], ends[3]], "and the policy that it began with"


# --- when an iteration does not go well -------------------------------------------------------------------------------


def test_after_a_collapse_it_goes_back_to_the_last_good_policy_and_on_with_other_rollouts(
    ript_config, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "run"
    # Who has made so many updates succeeds no more; but only until the run has gone back.
    monkeypatch.setattr(Fair, "fails", staticmethod(lambda seed, updates: updates >= 10 and not rollbacks(run)))
    assert train(ript_config(**WATCHED, rollout__save_dataset=True), exp_name="run") == 0
    (entry,) = rollbacks(run)
    assert entry["to"] < 10 <= entry["from"]
    assert "success has collapsed: 0.0 % of the attempts" in entry["reason"]
    assert f"going back from step {entry['from']} to the checkpoint of step {entry['to']}." in capsys.readouterr().err
    ends = [*values_of(run, "rollout/drift")]
    assert len(ends) == 5, "it makes as many iterations as it was asked for"
    assert entry["to"] in ends
    assert 0 not in [*values_of(run, "rollout/success").values()], "what was wrong is not part of the run"
    # The dataset has the attempts of both ways, and they began elsewhere.
    dataset = open_dataset(str(run / "rollouts"))
    assert len(dataset.lengths) > max(values_of(run, "rollout/episodes").values())
    states = dataset.columns(["observation.state"])["observation.state"][dataset.starts[:-1]]
    assert max(Counter(map(tuple, states.tolist())).values()) <= 4, "no group is tried twice"


def test_a_run_that_was_stopped_within_an_iteration_goes_back_to_what_needs_no_attempts(
    ript_config, tmp_path, monkeypatch, at_batch
):
    run = tmp_path / "run"
    config = ript_config(**WATCHED)
    at_batch[6] = lambda batches: os.kill(os.getpid(), signal.SIGTERM)
    train(config, exp_name="run")
    first, before, within = saved(run)
    monkeypatch.setattr(Fair, "fails", staticmethod(lambda seed, updates: updates > within and not rollbacks(run)))
    assert train(config, exp_name="run", resume=True) == 0
    (entry,) = rollbacks(run)
    assert first == 0 < before < within < entry["from"]
    assert entry["to"] == before, "it knows still that this one was fine"
    assert len(values_of(run, "rollout/drift")) == 5


@pytest.mark.slow
def test_a_run_that_went_back_can_be_killed_and_resumed_too(ript_config, tmp_path, monkeypatch, at_batch):
    config = ript_config(**WATCHED, rollout__save_dataset=True)
    reference, run = tmp_path / "reference", tmp_path / "run"
    monkeypatch.setattr(Fair, "fails", staticmethod(lambda seed, updates: updates >= 12 and not rollbacks(place)))
    place, counted = reference, []
    at_batch.update({number: lambda batches: counted.append(1) for number in range(1, 100)})
    train(config, exp_name="reference")
    (went_back,) = rollbacks(reference)

    class Killed(BaseException):
        pass

    def die(batches):
        raise Killed

    place, before = run, len(counted)
    # Just before it goes back; just after, which is once more from the checkpoint that it goes back to; and later.
    for number, batch in enumerate((went_back["from"], 2, 6)):
        at_batch.clear()
        at_batch[before + batch] = die
        with pytest.raises(Killed):
            train(config, exp_name="run", resume=number > 0)
        before += batch
    assert train(config, exp_name="run", resume=True) == 0
    assert_same_run(run, reference, last_step(reference))
    assert_same_rollouts(run, reference)


def test_where_success_collapses_again_and_again_the_run_stops_and_says_so(ript_config, tmp_path, monkeypatch):
    monkeypatch.setattr(Fair, "fails", staticmethod(lambda seed, updates: updates >= 8))
    with pytest.raises(TrainingError, match="after 1 rollbacks: success has collapsed.*Try a lower learning") as error:
        train(ript_config(**WATCHED, health__max_rollbacks=1), exp_name="run")
    assert error.value.exit_code == 1
    assert len(rollbacks(tmp_path / "run")) == 1
    assert saved(tmp_path / "run"), "what was saved is kept"


@pytest.mark.parametrize("action", ["stop", "warn"])
def test_a_collapse_may_also_only_be_said_or_end_the_run(ript_config, tmp_path, monkeypatch, capsys, action):
    monkeypatch.setattr(Fair, "fails", staticmethod(lambda seed, updates: 4 <= updates < 12))
    config = ript_config(**WATCHED, health__action=action, rollout__max_barren=2)
    if action == "stop":
        with pytest.raises(TrainingError, match="stopped at step [0-9]+: success has collapsed"):
            train(config, exp_name="run")
    else:
        assert train(config, exp_name="run") == 0
        assert "warning: success has collapsed" in capsys.readouterr().err
    assert rollbacks(tmp_path / "run") == []


def test_updates_that_are_not_finite_lead_back_too(ript_config, tmp_path, at_batch, capsys):
    at_batch.update(dict.fromkeys((5, 6), poisoned))
    assert train(ript_config(health__max_skipped=2, rollout__iterations=3), exp_name="run") == 0
    (entry,) = rollbacks(tmp_path / "run")
    assert "2 updates in a row were skipped" in entry["reason"]
    assert entry["to"] < 6
    assert set(values_of(tmp_path / "run", "skipped").values()) == {0}, "none of them is part of this run"
    assert len(values_of(tmp_path / "run", "rollout/drift")) == 3


def test_a_drift_beyond_its_limit_leads_back(ript_config, tmp_path):
    with pytest.raises(TrainingError, match="the policy has drifted by .*, beyond health.max_drift = 1e-06"):
        train(ript_config(health__max_drift=1e-6, health__max_rollbacks=1), exp_name="run")
    assert [entry["to"] for entry in rollbacks(tmp_path / "run")] == [0]


def test_what_drift_is_measured_by_is_named_when_it_is_damaged(ript_config, tmp_path):
    train(ript_config(rollout__iterations=1), exp_name="run")
    probe = tmp_path / "run" / "drift_probe.npz"
    probe.write_bytes(probe.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="drift_probe.npz holds what the drift .* cannot be read"):
        train(ript_config(rollout__iterations=2), exp_name="run", resume=True)


# --- where there is nothing to learn ----------------------------------------------------------------------------------


def test_who_never_succeeds_is_told_so_with_advice(ript_config, tmp_path):
    with pytest.raises(TrainingError, match="for 2 iterations there was nothing.*Begin with a policy that") as error:
        train(ript_config(env__skill=0.0, rollout__max_barren=2), exp_name="run")
    assert error.value.exit_code == 1


def test_who_always_succeeds_is_done(ript_config, tmp_path, capsys):
    config = ript_config(env__skill=1.0, rollout__max_barren=2)
    assert train(config, exp_name="run") == 0
    said = capsys.readouterr().err
    assert "These initial states have nothing more to teach." in said
    assert "done after 0 updates" in said
    assert "8 initial states were tried and 0 of 2 groups found" in said
    lines = read_metrics(tmp_path / "run")
    assert [line["rollout/success"] for line in lines] == [1.0, 1.0]
    # What it came to is saved: nothing is tried again.
    assert train(config, exp_name="run", resume=True) == 0
    assert "0 updates are done already; to continue, raise --rollout.max-barren" in capsys.readouterr().err
    assert read_metrics(tmp_path / "run") == lines
    assert train(ript_config(env__skill=1.0, rollout__max_barren=3), exp_name="run", resume=True) == 0
    assert len(read_metrics(tmp_path / "run")) == len(lines) + 1, "more patience goes on"


def test_with_the_budget_spent_it_goes_on_with_what_it_has(ript_config, tmp_path, capsys):
    assert train(ript_config(rollout__groups=8, rollout__budget=8, rollout__iterations=1), exp_name="run") == 0
    said = capsys.readouterr().err
    (found,) = values_of(tmp_path / "run", "rollout/groups").values()
    assert 0 < found < 8
    assert f"8 initial states were tried and {found} of 8 groups found whose attempts differ" in said
    assert last_step(tmp_path / "run") > 0


def test_a_success_is_worth_less_the_later_it_comes(ript_config, monkeypatch):
    compared, learned, compute, add = [], [], rollout_stream.group_advantages, ReplayBuffer.add

    def compare(config, rewards):
        compared.extend(rewards)
        return compute(config, rewards)

    monkeypatch.setattr(rollout_stream, "group_advantages", compare)
    monkeypatch.setattr(ReplayBuffer, "add", lambda self, episode: (learned.append(episode), add(self, episode))[1])
    assert train(ript_config(rollout__discount=0.5, rollout__groups=4, rollout__iterations=1), exp_name="run") == 0
    assert [*itertools.chain(*compared)] == [0.5 ** len(each) if each.success else 0.0 for each in learned]
    assert len({len(each) for each in learned if each.success}) > 1


def test_what_was_learned_from_is_tried_once_more_with_noise_of_its_own(ript_config, tmp_path, monkeypatch):
    begun, start = [], LocalPool.start

    def note(self, slot, how, expert=None):
        begun.append((how.task, how.seed, how.attempt))
        start(self, slot, how, expert)

    monkeypatch.setattr(LocalPool, "start", note)
    assert train(ript_config(rollout__iterations=1), exp_name="run") == 0
    assert len(set(begun)) == len(begun), "no attempt is made twice"
    again = [each for each in begun if each[2] == RIPT_TOY["rollout.attempts"]]
    assert begun[-len(again) :] == again, "beyond those that were learned from, and after them"
    assert [len(again)] == [*values_of(tmp_path / "run", "rollout/groups").values()]


# --- what is kept of rollouts -----------------------------------------------------------------------------------------


def test_all_attempts_become_a_dataset_with_the_outcomes_that_the_run_reports(ript_config, tmp_path, monkeypatch):
    train(ript_config(rollout__save_dataset=True), exp_name="run")
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as end:
        main(["data", "check", str(run / "rollouts")])
    assert not end.value.code
    found = labels(run / "rollouts")
    episodes = [0, *values_of(run, "rollout/episodes").values()]
    assert len(found) == episodes[-1]
    parts = [found[first:last] for first, last in itertools.pairwise(episodes)]
    assert [np.mean(part) for part in parts] == pytest.approx([*values_of(run, "rollout/success").values()])
    assert {0, 1} == set(found)


def test_workers_that_are_killed_hang_or_see_nonsense_are_counted_and_nothing_of_them_is_learned(
    ript_config, tmp_path, monkeypatch, capsys
):
    seen = []
    add = ReplayBuffer.add
    monkeypatch.setattr(ReplayBuffer, "add", lambda self, episode: (seen.append(episode), add(self, episode))[1])
    few = {"rollout__iterations": 2, "rollout__groups": 3, "rollout__attempts": 2, "rollout__save_dataset": True}
    config = ript_config(**few, env__id=CROWDED, evaluation__timeout=3.0, evaluation__envs=2)
    assert train(config, exp_name="run") == 0
    run, (*_, last) = tmp_path / "run", (line for line in read_metrics(tmp_path / "run") if "rollout/lost" in line)
    assert last["rollout/lost"] >= 2
    assert "attempts were lost and left out; the last: " in capsys.readouterr().err
    assert all(len(episode) > 3 for episode in seen), "mishaps come after three steps"
    dataset = open_dataset(str(run / "rollouts"))
    assert dataset.lengths.min() > 3
    assert len(dataset.lengths) == max(values_of(run, "rollout/episodes").values())
    assert len(values_of(run, "rollout/drift")) == 2


# --- trying it out ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked_signatures")  # what a program is compiled for is described by shapes
def test_a_dry_run_acts_and_updates_and_leaves_nothing(ript_config, tmp_path, capsys):
    assert dry_run(ript_config(agent__weighting="guidance")) == 0
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert facts["batch"].startswith("state 8×8, prompt 8×16, actions 8×4×8")
    assert "a chunk of 4×3 in fair" in facts["acting"]
    assert "samples per second" in facts["update"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("weighting", ["signed", "guidance"])
def test_every_weighting_and_way_to_batch_makes_a_run(ript_config, tmp_path, weighting):
    config = ript_config(agent__weighting=weighting, agent__batch_by="groups", rollout__iterations=1)
    assert train(config, exp_name="run") == 0
    policy = tmp_path / "run" / "checkpoints" / str(last_step(tmp_path / "run")) / "pirl.json"
    said = json.loads(policy.read_text()).get("guidance")
    assert said == (2.0 if weighting == "guidance" else None)


def test_demonstrations_are_mixed_in_where_they_have_a_weight(ript_config, data, tmp_path):
    with pytest.raises(ConfigError, match="mixes demonstrations in"):
        ript_config(agent__bc_loss_weight=0.5)
    config = ript_config(agent__bc_loss_weight=0.5, data__repo_id=str(data), rollout__iterations=1)
    assert train(config, exp_name="run") == 0
