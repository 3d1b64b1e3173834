"""The rules of the tabletop: what ends an episode and how, when a grasp holds, noise in the motors, and the expert."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pirl.envs import EnvConfig, ExpertConfig
from pirl.envs.experts import Flaws
from pirl.envs.pool import open_pool
from pirl.envs.rollout import Rollout, make_starts, roll_out
from pirl.envs.tabletop.env import TabletopEnv
from pirl.envs.tabletop.world import (
    BLOCK,
    FINGERS,
    REACH,
    STEP,
    TABLE,
    WIDTH_OF_BLOCK,
    ZONE,
    TableConfig,
    Tables,
    lay_table,
    step,
)

OPEN, CLOSE = np.array([0, 0, -1], np.float32), np.array([0, 0, 1], np.float32)
ZONE_PLACE = np.array([-0.1, -0.08])


def state_of(env: TabletopEnv) -> dict[str, np.ndarray]:
    """A copy of everything about the only table."""
    return {name: value[0].copy() for name, value in env._scene.tables.arrays().items()}


def put(env: TabletopEnv, **changes: Any) -> None:
    """Change the only table."""
    for name, value in changes.items():
        env._scene.tables.arrays()[name][0] = value


def table(body: int | None = None, *, gripper: Any = (0.0, 0.0), **options: Any) -> TabletopEnv:
    """Two blocks on the right, the goal (the first block in the first zone) on the left, and what the gripper holds."""
    env = TabletopEnv(observation="state", **options)
    env.reset(seed=0, options={"task": env.tasks[0]})
    state = {name: np.array(value) for name, value in state_of(env).items()}
    state["zones"][:] = [ZONE_PLACE, (-0.1, 0.1)][: len(state["zones"])]
    state["bodies"][:, 0], state["bodies"][:, 1] = 0.1, np.linspace(-0.1, 0.1, len(state["bodies"]))
    state["gripper"][:] = gripper
    if body is not None:
        state["held"], state["opening"], state["bodies"][body] = np.array(body), np.array(WIDTH_OF_BLOCK), gripper
    put(env, **state)
    return env


def let_go(env: TabletopEnv) -> tuple[float, bool, bool, bool]:
    """Reward, terminated, truncated and success of opening the fingers as far as they go, or until it is over."""
    for _ in range(5):
        _, reward, terminated, truncated, info = env.step(OPEN)
        if terminated or truncated:
            break
    return reward, terminated, truncated, info["success"]


def close_fingers(env: TabletopEnv) -> tuple[bool, bool]:
    """Whether something is held after closing, and whether it is over."""
    for _ in range(5):
        _, _, terminated, _, _ = env.step(CLOSE)
        if terminated:
            break
    return int(state_of(env)["held"]) >= 0, terminated


def test_the_right_block_let_go_in_the_right_zone_is_the_only_success() -> None:
    env = table(0, gripper=ZONE_PLACE)
    _, reward, terminated, _, info = env.step(CLOSE)  # carried there, and not let go yet
    assert (reward, terminated, info["success"]) == (0.0, False, False)
    assert let_go(env) == (1.0, True, False, True)


@pytest.mark.parametrize("body", [1, 2])
def test_anything_else_let_go_there_ends_the_episode_without_success(body: int) -> None:
    assert let_go(table(body, gripper=ZONE_PLACE, distractors=1)) == (0.0, True, False, False)


@settings(max_examples=60)
@given(place=st.tuples(st.floats(-0.1, 0.1), st.floats(-0.1, 0.1)))
def test_a_block_counts_as_inside_when_three_quarters_of_each_side_are(place: tuple[float, float]) -> None:
    distance = max(abs(place[0]), abs(place[1]))
    if abs(distance - (ZONE - BLOCK / 2)) < 1e-9:
        return
    reward, terminated, _, success = let_go(table(0, gripper=np.clip(ZONE_PLACE + place, -REACH, REACH), zones=1))
    assert success == terminated == (reward == 1.0) == (distance < ZONE - BLOCK / 2)


def test_the_right_block_in_another_zone_can_be_fetched_again() -> None:
    env = table(0, gripper=(-0.1, 0.1))
    assert let_go(env) == (0.0, False, False, False)
    assert close_fingers(env) == (True, False)


def test_a_block_that_slips_over_the_edge_ends_the_episode() -> None:
    place, off_centre = TABLE - 0.005, (TableConfig().precision + FINGERS) / 2
    env = table(gripper=(place - off_centre, 0.0), objects=1)
    put(env, bodies=[[place, 0.0]])
    assert close_fingers(env) == (False, True)
    assert np.abs(state_of(env)["bodies"]).max() > TABLE


def test_what_is_held_beyond_the_edge_falls_when_it_is_let_go() -> None:
    env = table(0, gripper=(REACH, 0.0))
    put(env, grip=[TABLE - REACH + 0.002, 0.0])
    assert not env.step(CLOSE)[2]
    assert let_go(env) == (0.0, True, False, False)


def test_running_out_of_time_is_no_end_of_the_task() -> None:
    env = table(max_steps=6)
    flags = [env.step(OPEN)[2:4] for _ in range(6)]
    assert flags == [(False, False)] * 5 + [(False, True)]
    # Success in the last step is success.
    env = table(0, gripper=ZONE_PLACE, max_steps=1)
    assert let_go(env) == (1.0, True, False, True)


def test_the_gripper_moves_as_told_and_not_beyond_its_reach() -> None:
    env = table(gripper=(0.0, 0.0))
    env.step(np.array([0.5, -1, -1], np.float32))
    np.testing.assert_allclose(state_of(env)["gripper"], [0.5 * STEP, -STEP], atol=1e-9)
    for _ in range(20):
        env.step(np.array([7, 0, -1], np.float32))  # more than the largest motion is the largest
    np.testing.assert_allclose(state_of(env)["gripper"], [REACH, -STEP], atol=1e-9)


@settings(max_examples=150)
@given(
    precision=st.floats(0.004, BLOCK),
    nearly=st.one_of(st.floats(0.9, 1.1), st.floats(0, 2.5 * FINGERS / BLOCK)),
    other=st.floats(-1, 1),
    side=st.sampled_from([(1, 0), (-1, 0), (0, 1), (0, -1)]),
)
def test_a_grasp_holds_within_the_precision_and_else_the_block_slips_away(
    precision: float, nearly: float, other: float, side: tuple[int, int]
) -> None:
    distance = nearly * precision
    if min(abs(distance - precision), abs(distance - FINGERS)) < 1e-9:
        return
    offset = np.array(side) * distance + np.array(side[::-1]) * other * distance
    env = table(objects=1, precision=precision)
    put(env, bodies=offset[None])
    holds, terminated = close_fingers(env)
    assert not terminated
    (place,) = state_of(env)["bodies"]
    assert holds == (distance < precision)
    if holds or distance > FINGERS:
        np.testing.assert_allclose(place, offset, atol=1e-12)
    else:
        # It moves straight away from the gripper.
        assert np.linalg.norm(place) > np.linalg.norm(offset) + 0.01
        np.testing.assert_allclose(place / np.linalg.norm(place), offset / np.linalg.norm(offset), atol=1e-6)
    env.step(np.array([1, 0.5, 1], np.float32))
    moved = state_of(env)["bodies"][0] - place
    np.testing.assert_allclose(moved, [STEP, 0.5 * STEP] if holds else [0, 0], atol=1e-9)


@pytest.mark.parametrize("layout", ["sorted", "free"])
def test_nothing_begins_within_another_thing_or_near_the_edge(layout: Any) -> None:
    config = TableConfig(objects=3, zones=2, distractors=2, layout=layout)
    for seed in range(100):
        tables = lay_table(config, seed, 0)
        places = np.concatenate([tables.zones[0], tables.bodies[0]])
        halves = np.array([ZONE] * 2 + [BLOCK] * 5)
        assert (np.abs(places).max(axis=1) + halves < TABLE).all()
        gaps = np.abs(places[:, None] - places).max(axis=2) - halves - halves[:, None]
        assert gaps[~np.eye(7, dtype=bool)].min() > 0


def test_noise_in_the_motors_is_normal_and_forgets_everything() -> None:
    """For keys that follow each other, too: the noise comes from hashing, which must not let that through."""
    count, steps, noise = 500, 120, 0.01
    laid = [lay_table(TableConfig(), seed, 0).arrays() for seed in range(count)]
    tables = Tables(**{name: np.concatenate([one[name] for one in laid]) for name in laid[0]})
    tables.gripper[:] = 0
    tables.key[: count // 2] = np.arange(count // 2)
    places = [np.zeros((count, 2))]
    for _ in range(steps):
        step(tables, TableConfig(action_noise=noise, max_steps=1000), np.zeros((count, 3), np.float32))
        places.append(tables.gripper.copy())
    drawn = np.diff(places, axis=0) / (STEP * noise)  # steps × tables × 2
    bound = 4.5 / np.sqrt(drawn.size)
    assert abs(drawn.mean()) < bound
    assert abs(drawn.var() - 1) < np.sqrt(2) * bound
    for limit, share in ((1, 0.682689), (2, 0.954500), (3, 0.997300)):
        assert abs((np.abs(drawn) < limit).mean() - share) < bound
    for left, right in (
        (drawn[:-1], drawn[1:]),
        (drawn[:, :-1], drawn[:, 1:]),
        (drawn[..., 0], drawn[..., 1]),
        (drawn[:-1, :, 0], drawn[1:, :, 1]),
        (drawn[:-1, 1:], drawn[1:, :-1]),
        (drawn[:-1] ** 2 - 1, drawn[1:] ** 2 - 1),
    ):
        assert abs((left * right).mean()) < 4.5 * left.std() * right.std() / np.sqrt(left.size)


def episodes_of(expert: ExpertConfig, episodes: int, **options: Any) -> list[Rollout]:
    with open_pool(EnvConfig("tabletop", options={"observation": "state", **options}), episodes) as pool:
        return list(roll_out(pool, expert, make_starts(pool.description, episodes, 0), execute_steps=200))


@pytest.mark.parametrize(
    ("objects", "zones", "distractors", "layout"),
    [
        (1, 1, 0, "sorted"),
        (2, 2, 0, "sorted"),
        (3, 3, 2, "sorted"),
        (1, 1, 0, "free"),
        (3, 3, 0, "free"),
        (4, 4, 0, "free"),
        (2, 2, 4, "free"),
    ],
)
def test_the_expert_at_its_best_hardly_ever_fails(objects: int, zones: int, distractors: int, layout: str) -> None:
    rollouts = episodes_of(ExpertConfig(), 200, objects=objects, zones=zones, distractors=distractors, layout=layout)
    assert {rollout.task for rollout in rollouts} == set(TableConfig(objects, zones, layout="free").tasks)
    assert sum(rollout.success for rollout in rollouts) >= 196


def test_an_expert_who_aims_about_as_well_as_a_grasp_needs_succeeds_half_the_time() -> None:
    rollouts = episodes_of(ExpertConfig(aim_bias=TableConfig().precision), 300)
    assert 0.35 < np.mean([rollout.success for rollout in rollouts]) < 0.65
    # It fails in both ways: out of time, and over the edge.
    assert {rollout.terminated for rollout in rollouts if not rollout.success} == {True, False}
    better = episodes_of(ExpertConfig(aim_bias=TableConfig().precision, flawed=0.5), 300)
    assert 0.65 < np.mean([rollout.success for rollout in better]) < 0.87


def test_each_flaw_of_the_expert_costs_what_it_says() -> None:
    best = episodes_of(ExpertConfig(), 100)
    late = episodes_of(ExpertConfig(delay=20), 100)
    assert all(rollout.success for rollout in late)
    assert 5 < np.mean([len(rollout) for rollout in late]) - np.mean([len(rollout) for rollout in best]) < 15
    quitting = episodes_of(ExpertConfig(give_up=0.5), 200)
    assert 0.4 < np.mean([rollout.success for rollout in quitting]) < 0.85
    assert all(rollout.truncated for rollout in quitting if not rollout.success)
    noisy = episodes_of(ExpertConfig(noise=0.3), 100)
    assert np.mean([len(rollout) for rollout in noisy]) > np.mean([len(rollout) for rollout in best])
    wandering = episodes_of(ExpertConfig(detour=10), 100)
    assert np.mean([rollout.success for rollout in wandering]) > 0.9
    assert np.mean([len(rollout) for rollout in wandering]) > np.mean([len(rollout) for rollout in best]) + 3


def test_an_expert_on_a_detour_goes_straight_on_and_keeps_what_it_holds() -> None:
    config, env = ExpertConfig(detour=12), TabletopEnv(observation="state", max_steps=100)
    carried = 0
    for seed in range(20):
        env.reset(seed=seed)
        expert = env.make_expert(config, seed)
        detour = Flaws.draw(config, np.random.default_rng(np.random.SeedSequence([seed, 0xE86E87])), 30).detour
        headings = []
        for number in range(100):
            action, before = expert(), state_of(env)
            _, _, terminated, _, _ = env.step(action)
            if number in detour:
                headings.append(action[:2])
                assert int(state_of(env)["held"]) == int(before["held"])
                assert state_of(env)["opening"] == pytest.approx(before["opening"], abs=1e-6)
                carried += int(before["held"]) >= 0
            if terminated:
                break
        if headings:
            np.testing.assert_array_equal(headings, [headings[0]] * len(headings))
            assert np.linalg.norm(headings[0]) == pytest.approx(1.0, abs=1e-6)
    assert carried > 10
