"""Knobs are read as they are written, have the types of their fields, and what is wrong with them is said."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pirl.config import get_config, override_config
from pirl.errors import UserError
from pirl.sweep.knobs import Knob, Range, all_combinations, every_value, parse_knob, settle_knobs

words = st.text(st.characters(codec="ascii", exclude_characters=",[]{}= ", categories=("L", "N", "P")), min_size=1)
positive = st.floats(1e-300, 1e300)


def settle(*texts, given=(), preset="debug"):
    base = get_config(preset)
    knobs = [parse_knob(text, {"agent": "agent.learner"}) for text in texts]
    return settle_knobs(knobs, dict(given), lambda setting: override_config(base, setting, "pirl sweep", texts=True))


@given(st.lists(words.filter(lambda word: not word.startswith("log:")), min_size=2))
def test_a_list_is_its_values(values):
    assert parse_knob(f"data.some-field={','.join(values)}", {}) == Knob("data.some_field", tuple(values))


@given(positive, positive, st.booleans())
def test_a_range_is_its_ends(one, other, log):
    low, high = min(one, other), max(one, other)
    text = f"agent.beta={'log:' * log}{low!r}..{high!r}"
    if low == high:
        with pytest.raises(UserError, match="to a larger one"):
            parse_knob(text, {})
    else:
        assert parse_knob(text, {}) == Knob("agent.beta", Range(low, high, log))


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.floats(0, 1))
def test_a_drawn_number_is_spelled_shortly_and_stays_in_its_range(low, width, share):
    values = Range(low, low + width)
    drawn = min(max(low + share * width, values.low), values.high)
    spelled = float(values.spell(drawn))
    assert values.low <= spelled <= values.high
    assert math.isclose(spelled, drawn, rel_tol=1e-3)


def test_lists_may_hold_lists():
    (knob,) = settle("agent.critic.hidden-dims=[16, 16],[32]")
    assert knob.values == ("[16, 16]", "[32]")


def test_the_field_says_what_a_range_is_of():
    whole, real, logarithmic = settle("batch-size=4..64", "agent.discount=0.9..1", "steps=log:1..1e4")
    assert whole.values == Range(4.0, 64.0, whole=True)
    assert real.values == Range(0.9, 1.0)
    assert logarithmic.values == Range(1.0, 10_000.0, log=True, whole=True)
    assert whole.examples == ("4", "64")
    (option,) = settle("env.precision=0.01..0.03")
    assert option.values == Range(0.01, 0.03)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["agent.discont=0.9,0.99"], "Did you mean agent.discount?"),
        (["agent.discount=0.9,high"], "--agent.discount should be a number; it is 'high'"),
        (["batch-size=0.5..8"], "should be a whole number"),
        (["agent.actor-mode=awr,best"], "should be awr or distill or condition or bc"),
        (["data.repo-id=1..2"], "takes no numbers, so it has no range"),
        (["env.precison=0.1,0.2"], "precision"),
        (["agent.discount=0.9,0.90"], "names 0.90 twice"),
        (["model.preset=tiny,tiny"], "names tiny twice"),
        (["agent.discount=0.9,1", "agent.discount=0.8,1"], "set twice"),
        (["seed=1,2"], "set twice"),
        (["agent.discount=0.9"], "at least two values"),
        (["agent.discount=0.9,,1"], "at least two values"),
        (["agent.discount"], "should be FIELD=VALUE,VALUE"),
        (["=1,2"], "should be FIELD=VALUE,VALUE"),
        (["agent.discount=1..0.9"], "to a larger one"),
        (["agent.discount=log:0..0.9"], "above 0"),
        (["agent.discount=log:0.9"], "log:LOW..HIGH"),
    ],
)
def test_what_is_wrong_with_a_knob_is_said(texts, words):
    with pytest.raises(UserError) as error:
        settle(*texts, given={"seed": "3"})
    assert words in str(error.value)


def test_a_field_of_another_learner_is_none_unless_the_learner_is_chosen():
    with pytest.raises(UserError, match="Another learner has it"):
        settle("agent.ema-decay=0.9,0.99")
    assert settle("agent=bc,acrlpd")[0].name == "agent.learner"


@given(st.lists(st.integers(2, 4), min_size=1, max_size=4))
def test_the_grid_is_every_combination_once_and_every_value_occurs_in_few_of_them(sizes):
    knobs = [Knob(f"field{index}", tuple(map(str, range(size)))) for index, size in enumerate(sizes)]
    grid = all_combinations(knobs)
    assert grid is not None
    expected = itertools.product(*(range(size) for size in sizes))
    assert [tuple(map(int, setting.values())) for setting in grid] == list(expected)
    few = list(every_value(knobs))
    assert len(few) == 1 + sum(size - 1 for size in sizes)
    assert {pair for setting in few for pair in setting.items()} == {pair for one in grid for pair in one.items()}
    assert all(setting in grid for setting in few)
    assert all_combinations([*knobs, Knob("other", Range(0.0, 1.0))]) is None
