"""Evaluations count what happened, comparisons pair the same starts, and intervals are the published ones."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import CAMERA, MAX_STEPS, CorridorEnv, CorridorPool, Walker
from pirl.envs.base import Start
from pirl.envs.evaluation import Evaluation, Pairs, compare, evaluate, mcnemar, paired_difference, play, wilson
from pirl.envs.experts import ExpertConfig
from pirl.envs.rollout import make_starts
from pirl.errors import EnvError, UserError

DESCRIPTION = CorridorEnv().describe()
STARTS = make_starts(DESCRIPTION, 12, 0, None)
SEEDS = [start.seed for start in STARTS]


def run(actor, *, size=3, loses=(), starts=STARTS, **options):
    return evaluate(CorridorPool(size, loses), actor, starts, execute_steps=2, **options)


def test_every_episode_is_counted_as_it_went():
    evaluation = run(Walker(stands=SEEDS[:2], falls=SEEDS[2:3]), loses=SEEDS[5:6])
    assert [result.index for result in evaluation.results] == list(range(12))
    assert [result.seed for result in evaluation.results] == SEEDS
    stood, fell, walked = (evaluation.results[index] for index in (0, 2, 3))
    assert (stood.success, stood.terminated, stood.truncated, stood.length) == (False, False, True, MAX_STEPS)
    assert (fell.success, fell.terminated, fell.truncated, fell.length) == (False, True, False, 2)
    assert (walked.success, walked.terminated, walked.episode_return) == (True, True, 1.0)
    assert walked.length == 3 + SEEDS[3] % 4
    assert walked.prompt == f"{walked.task} to the door"
    assert evaluation.results[5].lost == "the floor gave way"
    assert not evaluation.results[5].success


def test_a_lost_episode_is_reported_beside_the_rate_and_not_in_it():
    summary = run(Walker(stands=SEEDS[:3]), loses=SEEDS[-2:]).summary()
    assert (summary.episodes, summary.finished, summary.lost, summary.successes) == (12, 10, 2, 7)
    assert summary.rate == 0.7
    assert summary.interval == wilson(7, 10)
    assert summary.mean_return == pytest.approx(0.7)
    lengths = [3 + seed % 4 for seed in SEEDS[3:-2]]
    assert summary.mean_length_of_successes == pytest.approx(np.mean(lengths))
    assert summary.mean_length == pytest.approx((3 * MAX_STEPS + sum(lengths)) / 10)
    assert summary.rate_if_lost_failed == 7 / 12
    assert str(summary) == "success 70.0 % [39.7, 89.2], 7 of 10, 2 lost (58.3 % if these failed)"


@pytest.mark.parametrize("size", [1, 2, 12])
def test_the_same_starts_give_the_same_json_whatever_the_number_of_environments(size):
    settings = {"policy": "walker"}
    actor = ExpertConfig(give_up=0.5)
    first, second = (run(actor, size=n, settings=settings).to_json() for n in (3, size))
    assert 0 < first["summary"]["successes"] < 12
    for content in (first, second):
        assert content.pop("seconds") >= 0
    assert json.dumps(first) == json.dumps(second)
    assert first["settings"] == settings
    assert {"pirl", "jax", "numpy", "gymnasium", "python"} <= set(first["versions"])


def test_where_everything_was_lost_there_is_no_rate():
    summary = run(Walker(), loses=SEEDS[1:3], starts=STARTS[1:3]).summary()
    assert summary.rate is None
    assert str(summary) == "no episode was finished, 2 lost"


def test_videos_are_kept_of_as_many_episodes_as_asked_for():
    videos = run(Walker(falls=SEEDS[1:2]), videos=3).videos
    assert [(index, video.success) for index, video in videos.items()] == [(0, True), (1, False), (2, True)]
    assert videos[1].frames.shape == (2, *CorridorEnv().observation_space[CAMERA].shape)
    assert not run(Walker()).videos


def test_playing_an_episode_is_what_a_rollout_of_it_would_be():
    env = CorridorEnv()
    for actor in (Walker(stands=SEEDS[:1], falls=SEEDS[1:2]), ExpertConfig(give_up=0.5)):
        rolled = run(actor)
        for index, start in enumerate(STARTS):
            result, video = play(env, actor, start, execute_steps=2, render=True, index=index)
            assert result == rolled.results[index]
            assert video is not None
            assert (len(video.frames), video.success) == (result.length + 1, result.success)


@pytest.mark.parametrize(
    ("failure", "message"),
    [(RuntimeError("it fell over"), "RuntimeError: it fell over"), (np.nan, "the reward is nan")],
)
def test_an_environment_that_fails_while_it_is_watched_is_named_with_its_seed(monkeypatch, failure, message):
    env, start = CorridorEnv(), STARTS[3]
    step, taken = env.step, []

    def failing(action):
        taken.append(action)
        if len(taken) < 3:
            return step(action)
        if isinstance(failure, Exception):
            raise failure
        observation, _, *rest = step(action)
        return observation, failure, *rest

    monkeypatch.setattr(env, "step", failing)
    with pytest.raises(EnvError, match=f"after 2 steps from seed {start.seed}: {message}"):
        play(env, Walker(), start, execute_steps=2, render=False)


def test_two_policies_are_compared_start_by_start():
    first = run(Walker(stands=SEEDS[:6]), loses=SEEDS[:1])
    second = run(Walker(stands=SEEDS[5:8]), loses=SEEDS[-1:])
    comparison = compare(first, second)
    pairs = comparison.pairs
    assert (pairs.both, pairs.only_first, pairs.only_second, pairs.neither) == (3, 2, 4, 1)
    assert comparison.left_out == 2
    assert comparison.difference == pytest.approx(0.2)
    assert comparison.p_value == pytest.approx(2 * (1 + 6 + 15) / 64)
    assert "No significant difference between A and B: +20.0 points" in comparison.format("A", "B")
    json.dumps(dataclasses.asdict(comparison))


def test_a_clear_difference_is_called_by_its_name():
    good, bad = run(Walker()), run(Walker(stands=SEEDS))
    assert compare(bad, good).format("A", "B").startswith("B is better than A: +100.0 points [")
    assert compare(good, bad).format("A", "B").startswith("B is worse than A: -100.0 points [")
    assert "on 12 paired episodes, p = 0.0005" in compare(good, bad).format("A", "B")


def test_the_same_seed_of_another_task_is_another_start():
    measured = run(Walker(), starts=[Start(task, 5) for task in DESCRIPTION.tasks])
    assert compare(measured, measured).pairs.both == len(DESCRIPTION.tasks) == 2


def test_the_same_start_twice_cannot_be_paired():
    twice = Evaluation(run(Walker()).results * 2, {})
    with pytest.raises(UserError, match="same task and seed"):
        compare(twice, twice)


Z = 1.959963984540054
counts = st.integers(0, 60)
pairs_of_outcomes = st.builds(Pairs, counts, counts, counts, counts)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        # Newcombe (1998), two-sided intervals for the single proportion, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_published_intervals(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 5000))
def test_without_or_with_only_successes_wilson_has_a_closed_form(n):
    assert wilson(0, n) == (0.0, pytest.approx(Z**2 / (n + Z**2)))
    assert wilson(n, n) == (pytest.approx(n / (n + Z**2)), 1.0)


def test_of_no_episodes_nothing_is_known():
    assert wilson(0, 0) == (0.0, 1.0)
    assert paired_difference(Pairs(0, 0, 0, 0)) == (-1.0, 1.0)
    assert mcnemar(Pairs(0, 0, 0, 0)) == 1.0


def test_paired_outcomes_of_a_published_study():
    """Airway hyper-responsiveness (Bentur et al. 2009), as analysed by Fagerland, Lydersen and Laake (2014)."""
    pairs = Pairs(both=1, only_first=1, only_second=7, neither=12)
    assert pairs.difference == pytest.approx(0.286, abs=5e-4)
    assert paired_difference(pairs) == pytest.approx((0.026, 0.507), abs=5e-4)
    assert mcnemar(pairs) == pytest.approx(0.0703, abs=5e-5)


def test_mcnemar_counts_coin_tosses():
    tosses = {(0, 5): 2 / 32, (0, 6): 2 / 64, (3, 3): 1.0, (2, 10): 2 * (1 + 12 + 66) / 4096, (0, 1): 1.0}
    for (first, second), p in tosses.items():
        assert mcnemar(Pairs(17, first, second, 4)) == pytest.approx(p)


@given(pairs_of_outcomes)
def test_exchanging_the_two_turns_the_difference_around(pairs):
    turned = Pairs(pairs.both, pairs.only_second, pairs.only_first, pairs.neither)
    low, high = paired_difference(pairs)
    assert paired_difference(turned) == pytest.approx((-high, -low), abs=1e-12)
    assert mcnemar(turned) == mcnemar(pairs)
    assert -1 <= low <= pairs.difference <= high <= 1
