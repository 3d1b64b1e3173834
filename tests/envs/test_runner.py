"""Pictures that nobody looks at are not taken, and that changes nothing else."""

from typing import Any

import gymnasium
import numpy as np
import pytest

from fakes import LocalPool, StraightPolicy
from pirl.data.robots import Robot
from pirl.envs import EnvAdapter, ExpertConfig, Start
from pirl.envs.pool import ChunkResult, EnvRunner
from pirl.envs.rollout import Rollout, make_starts, roll_out
from pirl.envs.tabletop.env import TabletopEnv

EXPERT = ExpertConfig(noise=0.3, aim_bias=0.02)


def roll_points(execute_steps: int, **options: Any) -> tuple[list[Rollout], LocalPool, StraightPolicy]:
    policy = StraightPolicy()
    with LocalPool(3) as pool:
        starts = make_starts(pool.description, 7, 0)
        rollouts = list(roll_out(pool, policy, starts, execute_steps=execute_steps, **options))
    return sorted(rollouts, key=lambda rollout: rollout.index), pool, policy


def assert_same_episodes(one: list[Rollout], other: list[Rollout]) -> None:
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert (left.success, left.terminated, left.truncated) == (right.success, right.terminated, right.truncated)
        np.testing.assert_array_equal(left.actions, right.actions)
        np.testing.assert_array_equal(left.rewards, right.rewards)
        for column in set(left.observations) & set(right.observations):
            np.testing.assert_array_equal(left.observations[column], right.observations[column])


@pytest.mark.parametrize("execute_steps", [1, 3])
def test_cameras_are_asked_once_for_each_plan(execute_steps: int) -> None:
    rollouts, pool, policy = roll_points(execute_steps)
    plans = sum(len(asked) for asked in policy.asked)
    # That an episode ends with a chunk is known only when its last image has been taken.
    taken_in_vain = sum(len(rollout) % execute_steps == 0 for rollout in rollouts)
    assert sum(env.images_taken for env in pool.envs) == plans + taken_in_vain
    assert all(set(rollout.observations) == {"state"} for rollout in rollouts)
    assert_same_episodes(rollouts, roll_points(execute_steps, keep_images=True)[0])


def test_only_the_episodes_whose_images_are_kept_are_seen_at_every_step() -> None:
    rollouts, pool, _ = roll_points(4, keep_images=range(2))
    everything, _, _ = roll_points(4, keep_images=True)
    assert [rollout.index for rollout in rollouts if "image" in rollout.observations] == [0, 1]
    assert_same_episodes(rollouts, everything)
    at_start_and_every_step = sum(1 + len(rollout) for rollout in rollouts[:2])
    only_for_plans = sum(1 + len(rollout) // 4 for rollout in rollouts[2:])
    assert sum(env.images_taken for env in pool.envs) == at_start_and_every_step + only_for_plans


class Sparing(EnvAdapter):
    """An adapter whose user saves images too."""

    robot = Robot("pole", {"base_0_rgb": "image"}, ("state",), ("action",), state_dim=4, action_dim=1)
    fps, prompt, taken = 50, "balance", 0

    def observe(self, observation: Any, info: Any) -> dict[str, np.ndarray]:
        if not self.cameras_on:
            return {"state": observation}
        self.taken += 1
        return {"image": np.full((4, 4, 3), int(100 * abs(observation[0])), np.uint8), "state": observation}

    def action(self, action: np.ndarray) -> int:
        return int(action[0] > 0)

    def success(self, reward: float, terminated: bool, info: Any) -> bool:
        return False


def test_an_adapter_may_leave_images_out_too() -> None:
    adapter = Sparing(gymnasium.make("CartPole-v1"))
    runner = EnvRunner(adapter)
    runner.start(Start("balance", 0))
    before = adapter.taken
    result = runner.execute(np.array([[1], [-1], [1], [-1]], np.float32), "last")
    assert adapter.taken == before + 1
    assert result.observations["image"].shape == (1, 4, 4, 3)
    assert result.observations["state"].shape == (4, 4)


def test_a_pool_of_tables_shows_what_each_of_them_would() -> None:
    options = {"image_size": 16, "action_noise": 0.3, "max_steps": 14}
    with TabletopEnv.make_pool(3, **options) as pool:
        starts = make_starts(pool.description, 4, 1)
        sparing, everything = (
            sorted(roll_out(pool, EXPERT, starts, execute_steps=4, keep_images=keep), key=lambda one: one.index)
            for keep in ([1, 3], True)
        )
        assert_same_episodes(sparing, everything)
        # Slots that look and slots that do not, of different lengths, at once.
        for slot in range(3):
            pool.start(slot, starts[slot], EXPERT)
        pool.wait([0, 1, 2])
        pool.execute(0, 4, images="last")
        pool.execute(1, 6, images="all")
        pool.execute(2, 2, images="last")
        answers = pool.wait([0, 1, 2])
    for slot, (count, images) in enumerate([(4, "last"), (6, "all"), (2, "last")]):
        runner = EnvRunner(TabletopEnv(**options))
        runner.start(starts[slot], EXPERT)
        alone, answer = runner.execute(count, images), answers[slot]
        assert isinstance(answer, ChunkResult)
        assert answer.observations.keys() == alone.observations.keys()
        for name, values in alone.observations.items():
            np.testing.assert_array_equal(answer.observations[name], values, err_msg=name)
