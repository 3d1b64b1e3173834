"""The tabletop: its rules, its images, its expert, and a pool in which every table is the single environment."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from pirl.envs import EnvConfig, ExpertConfig, Start, make_env
from pirl.envs.base import EnvObservation
from pirl.envs.pool import ChunkResult, ResetResult, open_pool
from pirl.envs.rollout import Rollout, make_starts, roll_out
from pirl.envs.tabletop.drawing import OVERHEAD, WRIST, View, draw
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
from pirl.errors import ConfigError, ObservationError

SMALL: dict[str, Any] = {"image_size": 24}
NOISY: dict[str, Any] = SMALL | {"action_noise": 0.4}
Step = tuple[EnvObservation, float, bool, bool]


def random_actions(steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (steps, 3)).astype(np.float32)


def steps_of(env: TabletopEnv, actions: np.ndarray) -> Iterator[Step]:
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        yield observation, reward, terminated, truncated


def assert_same(left: EnvObservation, right: EnvObservation) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


@pytest.mark.parametrize("observation", ["pixels", "state"])
def test_gymnasiums_checker_has_nothing_to_say(observation: str) -> None:
    env = gymnasium.make("pirl/Tabletop-v0", observation=observation).unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # States are unbounded in all environments of ours.
        warnings.filterwarnings("ignore", ".*Box observation space m..imum value is -?infinity")
        check_env(env)


def test_the_same_seed_gives_the_same_pixels_and_another_seed_others() -> None:
    def episode(seed: int) -> list[EnvObservation]:
        env = TabletopEnv(**NOISY)
        first, _ = env.reset(seed=seed)
        return [first, *(observation for observation, *_ in steps_of(env, random_actions(12)))]

    for left, right, other in zip(episode(3), episode(3), episode(4), strict=True):
        assert_same(left, right)
        for name in left:
            assert not np.array_equal(left[name], other[name])


def test_seeds_choose_every_task_and_a_named_task_is_kept() -> None:
    env = TabletopEnv(objects=3, zones=2, observation="state")
    assert len(env.tasks) == 6
    assert {env.reset(seed=seed)[1]["task"] for seed in range(60)} == set(env.tasks)
    for task in env.tasks:
        info = env.reset(seed=1, options={"task": task})[1]
        assert info["task"] == info["prompt"] == task


def alone(
    options: dict[str, Any], start: Start, parts: list[np.ndarray | int], expert: ExpertConfig
) -> list[list[Any]]:
    """What pools answer, by the plainest loop: for each part the observations, actions and rewards until it ended."""
    env = TabletopEnv(**options)
    observation, _ = env.reset(seed=start.seed, options={"task": start.task})
    act: Callable[[], np.ndarray] = env.make_expert(expert, start.seed)
    answers: list[list[Any]] = [[observation]]
    for part in parts:
        answers.append([])
        for index in range(part if isinstance(part, int) else len(part)):
            action = act() if isinstance(part, int) else part[index]
            observation, reward, terminated, truncated, info = env.step(action)
            answers[-1].append((observation, action, reward, terminated, truncated, info["success"]))
            if terminated or truncated:
                return answers
    return answers


@pytest.mark.parametrize("observation", ["pixels", "state"])
def test_every_slot_of_a_pool_is_the_single_environment(observation: str) -> None:
    options = NOISY | {"observation": observation, "max_steps": 45}
    flawed = ExpertConfig(aim_bias=0.01, noise=0.2, delay=4)
    actions = random_actions(20)
    # Slots with actions, with the expert, and with both in turn, whose requests have different lengths.
    parts: list[list[np.ndarray | int]] = [[7, 5, 60], [actions[:3], actions[3:9], 60], [4, actions[9:], 3]]
    with open_pool(EnvConfig("tabletop", options=options), 3) as pool:
        starts = [Start(task, 20 + slot) for slot, task in enumerate(pool.description.tasks[:3])]
        for _ in range(2):
            expected = [alone(options, start, part, flawed) for start, part in zip(starts, parts, strict=True)]
            for slot, start in enumerate(starts):
                pool.start(slot, start, flawed)
            for slot, answer in pool.wait([0, 1, 2]).items():
                assert isinstance(answer, ResetResult)
                assert answer.task == starts[slot].task
                assert_same(answer.observation, expected[slot][0][0])
            for turn in range(3):
                going = [slot for slot in range(3) if turn + 1 < len(expected[slot])]
                for slot in going:
                    pool.execute(slot, parts[slot][turn])
                for slot, answer in pool.wait(going).items():
                    assert isinstance(answer, ChunkResult)
                    _assert_segment(answer, expected[slot][turn + 1])
            # The second time from other seeds, in other slots.
            starts = [Start(starts[slot].task, 77 + slot) for slot in (2, 0, 1)]


def _assert_segment(segment: ChunkResult, steps: list[Any]) -> None:
    observations, actions, rewards, terminated, truncated, success = zip(*steps, strict=True)
    assert_same(segment.observations, {name: np.stack([one[name] for one in observations]) for name in observations[0]})
    np.testing.assert_array_equal(segment.actions, np.stack(actions))
    np.testing.assert_array_equal(segment.rewards, rewards)
    assert (segment.terminated, segment.truncated, segment.success) == (terminated[-1], truncated[-1], success[-1])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"objects": 9}, "objects = 9 should be 1 to 4"),
        ({"zones": 4}, "4 zones, or 2 objects and distractors, do not fit .* layout = free"),
        ({"objects": 3, "distractors": 3}, "6 objects and distractors, do not fit .* layout = free"),
        ({"distractors": -1}, "distractors = -1 should be 0 to 4"),
        ({"precision": 0}, r"precision = 0\.0"),
        ({"action_noise": "inf"}, "action_noise = inf"),
        ({"max_steps": 0}, "max_steps = 0"),
        ({"image_size": 3}, "image_size = 3"),
        ({"observation": "smell"}, "observation should be pixels or state; it is 'smell'"),
    ],
)
def test_an_option_that_makes_no_table_is_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_env(EnvConfig("tabletop", options=options))


def test_another_task_or_an_action_that_is_not_finite_is_refused() -> None:
    env = TabletopEnv(**SMALL)
    with pytest.raises(ConfigError, match="no task 'juggle'; it has 'put the red block in the blue"):
        env.reset(options={"task": "juggle"})
    env.reset(seed=0)
    with pytest.raises(ObservationError, match=r"3 finite numbers, not \[ 0. nan"):
        env.step(np.array([0, np.nan, 0], np.float32))


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


def test_a_block_that_slips_over_the_edge_ends_the_episode() -> None:
    place, off_centre = TABLE - 0.005, (TableConfig().precision + FINGERS) / 2
    env = table(gripper=(place - off_centre, 0.0), objects=1)
    put(env, bodies=[[place, 0.0]])
    assert close_fingers(env) == (False, True)
    assert np.abs(state_of(env)["bodies"]).max() > TABLE


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
    ):
        assert abs((left * right).mean()) < 4.5 * left.std() * right.std() / np.sqrt(left.size)


def episodes_of(expert: ExpertConfig, episodes: int, **options: Any) -> list[Rollout]:
    with open_pool(EnvConfig("tabletop", options={"observation": "state", **options}), episodes) as pool:
        return list(roll_out(pool, expert, make_starts(pool.description, episodes, 0), execute_steps=200))


@pytest.mark.parametrize(
    ("objects", "zones", "distractors", "layout"),
    [
        (2, 2, 0, "sorted"),
        (3, 3, 2, "sorted"),
        (4, 4, 0, "free"),
        (2, 2, 4, "free"),
    ],
)
def test_the_expert_at_its_best_hardly_ever_fails(objects: int, zones: int, distractors: int, layout: str) -> None:
    rollouts = episodes_of(ExpertConfig(), 200, objects=objects, zones=zones, distractors=distractors, layout=layout)
    assert {rollout.task for rollout in rollouts} == set(TableConfig(objects, zones, layout="free").tasks)
    assert sum(rollout.success for rollout in rollouts) >= 196


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


AWAY = 9.0  # meters: out of sight


def empty_tables(count: int, objects: int = 4, distractors: int = 0) -> Tables:
    """Tables with nothing in sight."""
    laid = lay_table(TableConfig(objects, 1, distractors, layout="free"), 0, 0)
    tables = Tables(**{name: np.repeat(value, count, axis=0) for name, value in laid.arrays().items()})
    tables.gripper[:], tables.bodies[:], tables.zones[:] = AWAY, AWAY, AWAY
    return tables


def overhead(tables: Tables, size: int, objects: int = 4) -> np.ndarray:
    return draw(tables, objects, View(OVERHEAD, size), np.zeros((len(tables), 2))).astype(np.float64)


def center_of_color(image: np.ndarray) -> np.ndarray:
    """Column and row of the middle of what is colored; the table, the gripper and shadows are gray."""
    color = image.max(axis=2) - image.min(axis=2)
    # How a block is shaded makes it less colorful in places, but not by half.
    weight = np.clip((color - 15) / (0.5 * color.max() - 15), 0, 1)
    rows, columns = np.mgrid[: len(image), : len(image)] + 0.5
    return np.array([(weight * columns).sum(), (weight * rows).sum()]) / weight.sum()


@pytest.mark.parametrize("size", [56, 224])
def test_blocks_are_seen_where_they_are(size: int) -> None:
    count = 60
    rng = np.random.default_rng(size)
    places = rng.uniform(-TABLE + BLOCK, TABLE - BLOCK, (count, 2))
    tables = empty_tables(count)
    tables.bodies[np.arange(count), rng.integers(4, size=count)] = places
    pixels_per_meter = size / (2 * OVERHEAD)
    for place, image in zip(places, overhead(tables, size), strict=True):
        error = center_of_color(image) - (size / 2 + place * (1, -1) * pixels_per_meter)
        assert np.abs(error).max() <= 0.5


def test_the_wrist_camera_stays_with_the_gripper() -> None:
    env = TabletopEnv(objects=1, zones=1)
    env.reset(seed=0)
    tables = env._scene.tables
    rng = np.random.default_rng(0)
    for _ in range(30):
        # The gripper is open towards -y, where nothing covers the block.
        away = np.array([rng.uniform(-0.7, 0.7), -0.7]) * WRIST
        gripper = rng.uniform(-0.1, 0.1, 2)
        tables.gripper[0], tables.bodies[0], tables.zones[0] = gripper, (gripper + away)[None], AWAY
        image = env._observe()[env.robot.cameras["left_wrist_0_rgb"]].astype(np.float64)
        error = center_of_color(image) - len(image) / 2 * (1 + away / WRIST * (1, -1))
        assert np.abs(error).max() <= 0.5
