"""Search spaces are read as they are written, schedules are those worked out by hand, and what cannot work is refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import create_trial
from sweeps import FAKE, plan_in

from pirl.config import get_config, override_config
from pirl.errors import UserError
from pirl.sweep.plan import check_plan, length_of, make_rungs, make_space, parse_rungs, spell


def space(*texts, given=(), preset="debug"):
    base = get_config(preset)
    configure = lambda setting: override_config(base, setting, texts=True)  # noqa: E731
    return make_space(texts, {"agent": "agent.learner"}, dict(given), configure)


def test_the_field_says_what_a_range_is_of():
    texts = ("batch-size=4..64", "agent.discount=0.9..1", "steps=log:1..1e4", "agent.critic.hidden-dims=[16, 16],[32]")
    assert space(*texts, "env.precision=0.01..0.03", "data.robot=tabletop,tabletop_state") == {
        "batch_size": IntDistribution(4, 64),
        "agent.discount": FloatDistribution(0.9, 1.0),
        "steps": IntDistribution(1, 10_000, log=True),
        "agent.critic.hidden_dims": CategoricalDistribution(("[16, 16]", "[32]")),
        "env.precision": FloatDistribution(0.01, 0.03),
        "data.robot": CategoricalDistribution(("tabletop", "tabletop_state")),
    }


def test_a_parameter_that_cannot_be_searched_is_refused():
    refused = {
        "agent.discont=0.9,0.99": "Did you mean agent.discount?",
        "batch-size=0.5..8": "should be a whole number",
        "data.repo-id=1..2": "takes no numbers, so it has no range",
        "agent.discount=0.9,0.90": "names 0.90 twice",
        "seed=1,2": "set twice",
        "agent.discount=0.9,,1": "at least two values",
        "agent.discount=1..0.9": "to a larger one",
        "agent.discount=log:0.9": "log:LOW..HIGH",
    }
    for text, words in refused.items():
        with pytest.raises(UserError, match=re.escape(words)):
            space(text, given={"seed": "3"})


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_spelled_so_that_it_comes_back(value):
    assert float(spell(value)) == value


def test_the_grid_is_every_combination_once(tmp_path):
    lists = {"a": CategoricalDistribution(("1", "2")), "b": CategoricalDistribution(("x", "y"))}
    assert plan_in(tmp_path, space=lists).grid == [{"a": a, "b": b} for a in "12" for b in "xy"]
    assert plan_in(tmp_path, space=lists, trials=3).grid is None
    assert plan_in(tmp_path, space={**lists, "c": FloatDistribution(0.0, 1.0)}).grid is None


def test_schedules_and_their_work(tmp_path):
    for rungs, reduction, trials, counts, work in (
        ((5, 15, 45), 3, 9, [9, 3, 1], 9 * 5 + 3 * 10 + 1 * 30),
        ((5, 15, 45), 3, 8, [8, 2, 1], 8 * 5 + 2 * 10 + 1 * 30),
        ((10, 20), 4, 3, [3, 1], 40),
        ((2, 4, 8), 2, 1, [1, 1, 1], 8),
    ):
        values = {"x": FloatDistribution(0.0, 1.0)}
        plan = plan_in(tmp_path, space=values, rungs=rungs, reduction=reduction, trials=trials)
        assert plan.schedule() == list(zip(counts, rungs, strict=True))
        assert plan.work() == work


@given(st.dictionaries(st.integers(0, 50), st.none() | st.floats(allow_nan=False), min_size=1), st.integers(2, 5))
def test_no_trial_left_behind_was_better_and_a_failed_one_makes_no_room(tmp_path_factory, values, reduction):
    plan = plan_in(tmp_path_factory.getbasetemp(), reduction=reduction)
    promoted = plan.promote(values)
    known = {number: value for number, value in values.items() if value is not None}
    assert len(promoted) == min(len(known), max(1, len(values) // reduction))
    left = [value for number, value in known.items() if number not in promoted]
    assert not left or max(left) <= min(known[number] for number in promoted)


def test_rungs_lead_to_the_last_and_do_not_begin_below_the_least():
    assert make_rungs(5, 45, 3) == make_rungs(None, 45, 3) == parse_rungs("5, 15,45") == (5, 15, 45)
    assert make_rungs(6, 45, 3) == (15, 45)
    assert make_rungs(1, 8, 2) == (1, 2, 4, 8)
    assert make_rungs(None, 2, 3) == (2,)
    assert make_rungs(None, 1500, 3) == (166, 500, 1500)
    for text in ("5,x", "", "5,,6", "-1,2", "0,3", "5,4"):
        with pytest.raises(UserError, match="5,15,45"):
            parse_rungs(text)


def test_rungs_count_what_comes_last_in_a_run():
    assert length_of(get_config("demo_state_bc")) == ("steps", get_config("demo_state_bc").steps)
    assert length_of(get_config("debug")) == ("online.env_steps", get_config("debug").online.env_steps)
    assert length_of(get_config("demo_ript"))[0] == "rollout.iterations"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"metric": "val/loss"}, "no episodes are held out"),
        ({"metric": "val/loss", "given": 50}, "measured every 50 updates"),
        ({"space": {"batch_size": CategoricalDistribution(("8", "0"))}}, "batch_size = 0 should be at least 1"),
        ({"space": {"steps": CategoricalDistribution(("8", "9"))}}, "cannot be varied"),
        ({"space": {"online.env_steps": CategoricalDistribution(("0", "9"))}}, "environment steps, other runs updates"),
    ],
)
def test_a_trial_that_could_not_work_or_would_not_be_measured_is_refused(tmp_path, changes, words):
    held_out = {"validation_every": 50, "data.validation_fraction": 0.1} if "given" in changes else {}
    given = {"data.repo_id": str(tmp_path), "evaluation.every": 100, **held_out}
    base = override_config(get_config("demo_state_bc"), given)
    configure = lambda setting: override_config(base, setting, texts=True)  # noqa: E731
    plan = plan_in(tmp_path, **{**changes, "given": {}})
    if words is None:
        check_plan(plan, configure)
        return
    with pytest.raises(UserError, match=words):
        check_plan(plan, configure)


def test_a_trial_is_a_run_of_pirl_train_and_the_best_is_trained_in_full(tmp_path):
    plan = plan_in(tmp_path, given={"steps": "100", "env.precision": "-0.1"})
    rates = {"agent.optimizer.peak_lr": CategoricalDistribution(("1e-3", "1e-2"))}
    trial = create_trial(value=0.0, params={"agent.optimizer.peak_lr": "1e-3"}, distributions=rates)
    trial.number = 3
    options = ("--steps=4", "--env.precision=-0.1", "--agent.optimizer.peak-lr=1e-3")
    assert plan.trial_command(trial, 4) == (*FAKE, "demo_state_bc", "--exp-name", "some/sweep/trial-003", *options)
    (plan.run_of(trial)).mkdir(parents=True)
    (plan.run_of(trial) / "lock").touch()
    assert plan.trial_command(trial, 4)[-1] == "--resume"
    configured = get_config("demo_state_bc").steps
    for last, expected in ((8, configured), (configured + 500, configured + 500)):
        command = plan_in(tmp_path, rungs=(2, last)).full_command(trial)
        assert command.endswith(f" --agent.optimizer.peak-lr=1e-3 --steps={expected}")
