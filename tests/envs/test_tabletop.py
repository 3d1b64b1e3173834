"""The tabletop as an environment: Gymnasium's rules, seeds, states to return to, and many tables that are each one."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from pirl.envs import EnvConfig, ExpertConfig, Segment, Start, Started, make_env, open_pool, roll_out
from pirl.envs.base import EnvObservation
from pirl.envs.tabletop.env import TabletopEnv, TabletopVectorEnv
from pirl.envs.tabletop.world import BLOCK_COLOURS
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


def differs(left: EnvObservation, right: EnvObservation) -> bool:
    return any(not np.array_equal(value, right[name]) for name, value in left.items())


@pytest.mark.parametrize("observation", ["pixels", "state"])
def test_gymnasiums_checker_has_nothing_to_say(observation: str) -> None:
    env = gymnasium.make("pirl/Tabletop-v0", observation=observation).unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # States are unbounded in all environments of ours.
        warnings.filterwarnings("ignore", ".*Box observation space m..imum value is -?infinity")
        check_env(env)


@pytest.mark.parametrize("observation", ["pixels", "state"])
def test_a_vector_keeps_gymnasiums_conventions(observation: str) -> None:
    env = TabletopVectorEnv(3, max_steps=4, observation=observation, **SMALL)
    assert env.metadata["autoreset_mode"] == gymnasium.vector.AutoresetMode.NEXT_STEP
    assert env.observation_space == gymnasium.vector.utils.batch_space(env.single_observation_space, 3)
    first, info = env.reset(seed=5)
    assert first in env.observation_space
    assert info["_prompt"].all()
    still = np.zeros((3, 3), np.float32)
    for step in range(1, 11):
        observation_now, rewards, terminated, truncated, info = env.step(still)
        assert observation_now in env.observation_space
        assert rewards.shape == terminated.shape == truncated.shape == (3,)
        assert rewards.dtype == np.float64
        assert not terminated.any()
        # Four steps, then one that only begins the next episode.
        assert (truncated == (step % 5 == 4)).all()
        assert ("prompt" in info) == (step % 5 == 0)
        if step % 5:
            assert info["success"].shape == info["_success"].shape == (3,)


def test_a_vector_is_seeded_row_by_row() -> None:
    consecutive, _ = TabletopVectorEnv(3, **SMALL).reset(seed=7)
    listed, _ = TabletopVectorEnv(3, **SMALL).reset(seed=[7, 8, 9])
    assert_same(consecutive, listed)
    _, info = TabletopVectorEnv(3, **SMALL).reset(options={"task": "put the yellow block in the green zone"})
    assert set(info["task"]) == {"put the yellow block in the green zone"}


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


@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_an_episode_goes_on_from_its_state_as_if_nothing_had_been(noise: float) -> None:
    options = SMALL | {"action_noise": noise, "distractors": 1, "max_steps": 45}
    env = TabletopEnv(**options)
    env.reset(seed=1)
    expert = env.make_expert(ExpertConfig(), 0)
    while env.get_state()["held"] < 0:
        now = env.step(expert())[0]
    state, prompt = env.get_state(), env.reset(options={"state": env.get_state()})[1]["prompt"]
    actions = random_actions(45)
    expected = list(steps_of(env, actions[: 45 - int(state["steps"])]))
    assert expected[-1][3]  # time ran out, counted from the beginning of the episode

    other = TabletopEnv(**options)
    other.reset(seed=99)
    again, info = other.reset(options={"state": state})
    assert_same(again, now)
    assert info["prompt"] == prompt
    for left, right in zip(expected, steps_of(other, actions), strict=False):
        assert_same(left[0], right[0])
        assert left[1:] == right[1:]

    # With a seed besides, the start is the same, and what is random comes from the seed.
    ends = []
    for seed in (1, 2, 1):
        start, _ = other.reset(seed=seed, options={"state": state})
        assert_same(start, now)
        ends.append(list(steps_of(other, actions[:5]))[-1][0])
    assert_same(ends[0], ends[2])
    assert differs(ends[0], ends[1]) == (noise > 0)
    assert differs(ends[0], expected[4][0]) == (noise > 0)


def test_a_state_is_the_callers_own() -> None:
    env = TabletopEnv(**SMALL)
    before, _ = env.reset(seed=0)
    state = env.get_state()
    kept = {name: value.copy() for name, value in state.items()}
    list(steps_of(env, random_actions(10)))
    for name, value in kept.items():
        np.testing.assert_array_equal(state[name], value)
    start, _ = env.reset(options={"state": state})
    assert_same(start, before)
    for value in state.values():
        np.asarray(value)[...] = 0
    assert_same(env.reset(options={"state": kept})[0], before)


@pytest.mark.parametrize("observation", ["pixels", "state"])
def test_every_row_of_a_vector_is_the_single_environment(observation: Any) -> None:
    options = NOISY | {"observation": observation, "max_steps": 9, "distractors": 1}
    seeds = [11, 5, 300]
    vector = TabletopVectorEnv(3, **options)
    singles = [TabletopEnv(**options) for _ in seeds]
    seen, info = vector.reset(seed=seeds)
    ended = [False] * 3
    for row, (single, seed) in enumerate(zip(singles, seeds, strict=True)):
        observation_alone, info_alone = single.reset(seed=seed)
        assert_same({name: value[row] for name, value in seen.items()}, observation_alone)
        assert info["prompt"][row] == info_alone["prompt"]
    # One row ends earlier than the others: from there on they are out of step.
    for step, actions in enumerate(random_actions(3 * 35).reshape(35, 3, 3)):
        if step == 4:
            _throw_off_the_table(vector, singles[1])
        seen, rewards, terminated, truncated, info = vector.step(actions)
        for row, single in enumerate(singles):
            if ended[row]:
                alone, info_alone = single.reset()
                result: list[Any] = [alone, 0.0, False, False]
                assert info["prompt"][row] == info_alone["prompt"]
                assert info["_prompt"][row]
            else:
                *result, _ = single.step(actions[row])
            assert_same({name: value[row] for name, value in seen.items()}, result[0])
            assert (rewards[row], terminated[row], truncated[row]) == tuple(result[1:])
            ended[row] = result[2] or result[3]
        assert step != 4 or ended == [False, True, False]


def _throw_off_the_table(vector: TabletopVectorEnv, single: TabletopEnv) -> None:
    """Put something over the edge in the second row and in the single environment that goes with it."""
    state = dict(single.get_state())
    state["bodies"] = np.array(state["bodies"])
    state["bodies"][0] = 0.5
    single.reset(options={"state": state})
    vector._scene.set_state(1, state, None)


def alone(
    options: dict[str, Any], start: Start, parts: list[np.ndarray | int], expert: ExpertConfig
) -> list[list[Any]]:
    """What pools answer, by the plainest loop: for each part the observations, actions and rewards until it ended."""
    env = TabletopEnv(**options)
    given: dict[str, Any] = {"task": start.task} | ({} if start.state is None else {"state": start.state})
    observation, _ = env.reset(seed=start.seed, options=given)
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
            states = []
            for slot, start in enumerate(starts):
                pool.start(slot, start, flawed)
            for slot, answer in pool.wait([0, 1, 2]).items():
                assert isinstance(answer, Started)
                assert answer.task == starts[slot].task
                assert_same(answer.observation, expected[slot][0][0])
                states.append(answer.state)
            for turn in range(3):
                going = [slot for slot in range(3) if turn + 1 < len(expected[slot])]
                for slot in going:
                    pool.execute(slot, parts[slot][turn])
                for slot, answer in pool.wait(going).items():
                    assert isinstance(answer, Segment)
                    _assert_segment(answer, expected[slot][turn + 1])
            # The second time from the state of the first, in other slots.
            starts = [Start(starts[slot].task, 77 + slot, states[slot]) for slot in (2, 0, 1)]


def _assert_segment(segment: Segment, steps: list[Any]) -> None:
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


def test_make_vec_gives_the_native_vector_environment() -> None:
    vector = gymnasium.make_vec("pirl/Tabletop-v0", num_envs=3, **SMALL)
    assert isinstance(vector, TabletopVectorEnv)


def test_a_rollout_tells_the_state_from_which_others_can_begin() -> None:
    with open_pool(EnvConfig("tabletop", options=NOISY), 3) as pool:
        expert, task = ExpertConfig(noise=0.3), pool.description.tasks[1]
        (first,) = roll_out(pool, expert, [Start(task, 5)], execute_steps=4, keep_images=True)
        again = [Start(task, seed, first.initial_state) for seed in (5, 6, 7)]
        attempts = sorted(roll_out(pool, expert, again, execute_steps=4, keep_images=True), key=lambda one: one.index)
    for attempt in attempts:
        for name, values in attempt.observations.items():
            np.testing.assert_array_equal(values[0], first.observations[name][0], err_msg=name)
    # The same start, but what is random goes its own way.
    assert not np.array_equal(attempts[1].actions[:10], attempts[2].actions[:10])


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
    larger = TabletopEnv(objects=3, **SMALL)
    larger.reset(seed=0)
    with pytest.raises(ConfigError, match=r"bodies should have the shape \(2, 2\), and has \(3, 2\)"):
        env.reset(options={"state": larger.get_state()})
    with pytest.raises(ConfigError, match="gripper should have the shape .*, and has no value"):
        env.reset(options={"state": {"qpos": np.zeros(3)}})


def test_nobody_is_asked_for_a_distractor() -> None:
    env = TabletopEnv(objects=1, zones=3, distractors=4, observation="state")
    assert {task.split()[2] for task in env.tasks} == {BLOCK_COLOURS[0]}
    for seed in range(30):
        env.reset(seed=seed)
        state = env.get_state()
        assert state["bodies"].shape == (5, 2)
        assert state["goal"][0] == 0
