"""When an iteration of RIPT counts as one that went wrong, and when it does not."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pirl.config.parts import HealthConfig
from pirl.training.iteration_health import IterationHealth


def watch(**changes):
    return IterationHealth(HealthConfig(**changes))


def test_success_far_below_the_best_is_a_collapse_and_a_little_below_is_none():
    health = watch(min_success_ratio=0.25)
    for success in (0.2, 0.8, 0.5, 0.21):
        assert health.after_rollouts(success, None) is None, "a quarter of the best"
    problem = health.after_rollouts(0.19, None)
    assert problem is not None
    assert problem.can_go_back
    assert "19.0 % of the attempts, after 80.0 % in the best iteration" in problem.reason


def test_the_first_iterations_are_not_judged():
    health = watch(min_success_ratio=0.25)
    assert health.after_rollouts(1.0, None) is None
    assert health.after_rollouts(0.0, None) is None
    assert health.after_rollouts(0.0, None) is not None


def test_where_nothing_was_measured_or_nothing_is_watched_nothing_is_wrong():
    health = watch(min_success_ratio=0.25)
    for success in (1.0, 1.0, None, math.nan):
        assert health.after_rollouts(success, None) is None
    careless = watch(min_success_ratio=0.0)
    assert [careless.after_rollouts(success, 1.0) for success in (1.0, 1.0, 0.0)] == [None] * 3


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0, 0.99))
@settings(max_examples=60)
def test_a_collapse_is_what_falls_below_the_ratio_of_the_best_that_was_sound(rates, ratio):
    health, sound = watch(min_success_ratio=ratio), []
    for rate in rates:
        collapsed = len(sound) >= 2 and rate < ratio * max(sound)
        assert (health.after_rollouts(rate, None) is not None) == collapsed
        if not collapsed:
            sound.append(rate)


@given(st.lists(st.floats(0, 1), max_size=5), st.lists(st.floats(0, 1), max_size=5))
@settings(max_examples=40)
def test_from_a_checkpoint_it_judges_as_it_would_have(before, after):
    one, other = watch(min_success_ratio=0.5), watch(min_success_ratio=0.5)
    for rate in before:
        one.after_rollouts(rate, None)
    other.restore(json.loads(json.dumps(one.state())))
    assert [one.after_rollouts(rate, None) for rate in after] == [other.after_rollouts(rate, None) for rate in after]
    assert one.state() == other.state()


def test_drift_is_too_much_beyond_its_limit_and_never_a_number_that_is_none():
    health = watch(max_drift=0.5)
    assert health.after_updates(None) is health.after_updates(0.5) is None
    assert "drifted by 0.6 from where it began, beyond health.max_drift = 0.5" in health.after_updates(0.6).reason
    careless = watch()
    assert careless.after_updates(1e9) is None
    for drift in (math.nan, math.inf):
        assert "drifted by" in careless.after_updates(drift).reason


def test_rollouts_are_slow_when_three_in_a_row_are_and_going_back_would_not_help():
    health = watch(min_speed_ratio=0.5)
    for speed in (100.0, 102.0, 98.0, 40.0, 40.0, 100.0, 40.0, 40.0):
        assert health.after_rollouts(None, speed) is None, "never three in a row"
    problem = health.after_rollouts(None, 40.0)
    assert problem is not None
    assert not problem.can_go_back
    assert "40 environment steps per second, where 100 are usual" in problem.reason
    assert health.after_rollouts(None, 40.0) is None, "it is said once in three iterations"


@pytest.mark.parametrize("speeds", [(1.0, 1000.0, 1.0, 1.0), (1e-9,) * 9])
def test_the_first_iterations_say_what_is_usual(speeds):
    health = watch(min_speed_ratio=0.9)
    assert [health.after_rollouts(0.5, speed) for speed in speeds] == [None] * len(speeds)


def test_a_collapse_weighs_more_than_slowness():
    health = watch(min_speed_ratio=0.5, min_success_ratio=0.5)
    for _ in range(3):
        health.after_rollouts(1.0, 100.0)
    for _ in range(2):
        health.after_rollouts(1.0, 1.0)
    assert "collapsed" in health.after_rollouts(0.1, 1.0).reason
