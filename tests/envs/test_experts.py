"""How experts err: what is drawn for an episode, and what it does to the actions."""

import dataclasses

import numpy as np
import pytest

from pirl.envs.experts import ExpertConfig, Flaws, with_flaws

LENGTH = 30


def draw(seed: int, **flaws: float) -> Flaws:
    return Flaws.draw(ExpertConfig(**flaws), np.random.default_rng(seed), LENGTH)  # type: ignore[arg-type]


def test_a_detour_begins_in_the_episode_and_is_as_long_as_it_may_be() -> None:
    drawn = [draw(seed, detour=6, delay=9) for seed in range(400)]
    lengths = [len(flaws.detour) for flaws in drawn]
    assert set(lengths) == set(range(7))
    assert np.mean(lengths) == pytest.approx(3.0, abs=4 * 2 / 20), "uniform over 0 to 6, which deviates by 2"
    begins = [flaws.detour.start - flaws.late for flaws in drawn]
    assert set(begins) == set(range(LENGTH)), "of what it does once it has started"
    np.testing.assert_allclose([np.linalg.norm(flaws.direction) for flaws in drawn], 1.0)
    mean = np.mean([flaws.direction for flaws in drawn], axis=0)
    assert np.abs(mean).max() < 4 / np.sqrt(3 * 400), "in all directions alike"


def test_detours_change_nothing_else() -> None:
    """Neither what is drawn nor what is drawn later: experts act as they did before there were detours."""
    others = {"aim_bias": 0.1, "noise": 0.2, "delay": 5, "give_up": 0.5}
    for seed in range(20):
        without, wandering = draw(seed, **others), draw(seed, detour=8, **others)
        assert not without.detour
        for field in dataclasses.fields(Flaws):
            if field.name != "detour":
                np.testing.assert_array_equal(getattr(wandering, field.name), getattr(without, field.name))
        assert not draw(seed, detour=8, flawed=0.0).detour, "it does its best"
    rng, expected = np.random.default_rng(3), np.random.default_rng(3)
    Flaws.draw(ExpertConfig(detour=8), rng, LENGTH)
    expected.random(4), expected.normal(size=3)
    assert rng.random() == expected.random()


def test_an_expert_on_a_detour_moves_as_far_as_it_can_and_goes_on_afterwards() -> None:
    direction, motion = np.array([0.6, 0.0, -0.8]), np.array([0.5, 1.0, 2.0, 0.0])
    flaws = Flaws(np.zeros(3), 0.0, 1, None, range(2, 4), direction)
    asked = iter(range(10))
    expert = with_flaws(
        lambda: np.full(4, next(asked), np.float32),
        lambda: np.array([0, 0, 0, 7], np.float32),
        flaws,
        np.random.default_rng(0),
        motion,
    )
    actions = [expert() for _ in range(6)]
    wandering = [0.3, 0.0, -1.6, 7.0]  # what does not move, such as fingers, stays
    np.testing.assert_allclose(actions, [[0, 0, 0, 7], [0] * 4, wandering, wandering, [3] * 4, [4] * 4], rtol=1e-6)
