"""The tabletop as an environment: Gymnasium's rules, seeds, states to return to, and many tables that are each one."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from pirl.envs import EnvConfig, ExpertConfig, Start, make_env
from pirl.envs.base import EnvObservation
from pirl.envs.pool import open_pool
from pirl.envs.runner import ChunkResult, ResetResult
from pirl.envs.tabletop.env import TabletopEnv
from pirl.envs.tabletop.world import BLOCK_COLORS
from pirl.errors import ConfigError

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
        ({"objects": 0}, "objects = 0"),
        ({"zones": 5}, "zones = 5"),
        ({"zones": 4}, "zones = 4 do not fit side by side: at most 3, or layout = free"),
        ({"objects": 3, "distractors": 3}, "objects = 3, distractors = 3 do not fit .* layout = free"),
        ({"layout": "heap"}, "layout should be sorted or free; it is 'heap'"),
        ({"distractors": -1}, "distractors = -1 should be 0 to 4"),
        ({"precision": 0}, r"precision = 0\.0"),
        ({"precision": "nan"}, "precision should be a number; it is 'nan'"),
        ({"precision": 0.5}, r"precision = 0\.5"),
        ({"action_noise": -0.1}, r"action_noise = -0\.1"),
        ({"action_noise": "inf"}, "action_noise = inf"),
        ({"max_steps": 0}, "max_steps = 0"),
        ({"image_size": 3}, "image_size = 3"),
        ({"observation": "smell"}, "observation should be pixels or state; it is 'smell'"),
    ],
)
def test_an_option_that_makes_no_table_is_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_env(EnvConfig("tabletop", options=options))


def test_a_pool_refuses_to_act_where_no_episode_goes_on() -> None:
    with open_pool(EnvConfig("tabletop", options=SMALL), 2) as pool:
        with pytest.raises(ValueError, match="slot 1"):
            pool.execute(1, random_actions(2))
        pool.start(0, Start(pool.description.tasks[0], 0))
        pool.wait([0])
        with pytest.raises(ValueError, match="without an expert"):
            pool.execute(0, 3)
        with pytest.raises(ValueError, match="nothing was queued"):
            pool.wait([0])


def test_what_a_table_cannot_take_is_named() -> None:
    env = TabletopEnv(**SMALL)
    with pytest.raises(ConfigError, match="no task 'put the pink block away'; it has 'put the red block in the blue"):
        env.reset(options={"task": "put the pink block away"})
    env.reset(seed=0)
    with pytest.raises(ConfigError, match=r"not finite: .*nan"):
        env.step(np.array([0, np.nan, 0], np.float32))


def test_nobody_is_asked_for_a_distractor() -> None:
    env = TabletopEnv(objects=1, zones=3, distractors=4, observation="state")
    assert {task.split()[2] for task in env.tasks} == {BLOCK_COLORS[0]}
    for seed in range(30):
        env.reset(seed=seed)
        assert env._scene.tables.bodies.shape == (1, 5, 2)
        assert env._scene.tables.goal[0, 0] == 0
