"""Rollouts: every episode is what one environment alone would give, in an order that can be told beforehand."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import ROBOT, LocalPool, Point, StraightPolicy
from pirl.envs import ExpertConfig, Start
from pirl.envs.rollout import Rollout, collect, make_starts, roll_out
from pirl.errors import ConfigError, EnvError


def act_alone(start: Start, horizon: int, execute_steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States, actions and rewards of one episode, by the plainest loop there is."""
    env, policy = Point(), StraightPolicy(horizon)
    observation, info = env.reset(seed=start.seed, options={"task": start.task})
    states, actions, rewards, done = [], [], [], False
    while not done:
        batch = {name: value[None] for name, value in observation.items()}
        (chunk,) = policy.infer(batch, [info["prompt"]], [start.seed], [len(actions)])
        for action in chunk[:execute_steps]:
            states.append(observation["state"])
            actions.append(action)
            observation, reward, terminated, truncated, _ = env.step(action)
            rewards.append(reward)
            done = terminated or truncated
            if done:
                break
    return np.array(states), np.array(actions), np.array(rewards, np.float32)


@settings(max_examples=25)
@given(
    size=st.integers(1, 5),
    groups=st.integers(1, 3),
    episodes=st.integers(1, 9),
    horizon=st.integers(1, 6),
    data=st.data(),
)
def test_episodes_do_not_depend_on_who_runs_beside_them(
    size: int, groups: int, episodes: int, horizon: int, data: st.DataObject
) -> None:
    execute_steps = data.draw(st.integers(1, horizon))
    with LocalPool(size) as pool:
        starts = make_starts(pool.description, episodes, 3)
        rollouts = list(
            roll_out(
                pool, StraightPolicy(horizon), starts, execute_steps=execute_steps, keep_images=True, groups=groups
            )
        )
    assert sorted(rollout.index for rollout in rollouts) == list(range(episodes))
    for rollout in rollouts:
        assert rollout.start == starts[rollout.index]
        states, actions, rewards = act_alone(rollout.start, horizon, execute_steps)
        np.testing.assert_array_equal(rollout.observations["state"], states)
        np.testing.assert_array_equal(rollout.actions, actions)
        np.testing.assert_array_equal(rollout.rewards, rewards)
        assert rollout.observations["image"].shape == (len(rewards), 8, 8, 3)
        assert rollout.success == rollout.terminated == (rewards[-1] == 1)
        assert rollout.truncated == (len(rewards) == 12 and not rollout.success)
        assert rollout.prompt == f"go {rollout.task}"


def test_collecting_is_rolling_out_in_the_order_of_the_starts() -> None:
    with LocalPool(4) as pool:
        starts = make_starts(pool.description, 6, 0)
        rollouts = collect(pool, StraightPolicy(), starts, execute_steps=2)
    assert [rollout.start for rollout in rollouts] == starts
    assert all("image" in rollout.observations for rollout in rollouts)


def test_one_inference_serves_all_who_need_a_chunk() -> None:
    policy = StraightPolicy()
    with LocalPool(3) as pool:
        starts = [Start("left", seed) for seed in (11, 12, 13)]
        list(roll_out(pool, policy, starts, execute_steps=2))
    assert policy.asked[0] == (11, 12, 13)
    lengths = [len(act_alone(start, 6, 2)[1]) for start in starts]
    assert len(policy.asked) == max(-(-length // 2) for length in lengths)


def test_the_expert_acts_in_the_same_pools() -> None:
    with LocalPool(2) as pool:
        starts = make_starts(pool.description, 6, 1)
        best = list(roll_out(pool, ExpertConfig(), starts, execute_steps=5))
        late = list(roll_out(pool, ExpertConfig(delay=11), starts, execute_steps=5))
        same = list(roll_out(pool, ExpertConfig(delay=11), starts, execute_steps=1))
    assert all(rollout.success for rollout in best)
    assert sum(map(len, late)) > sum(map(len, best))
    by_index = {rollout.index: rollout for rollout in same}
    for rollout in late:
        np.testing.assert_array_equal(rollout.actions, by_index[rollout.index].actions)


def test_lost_episodes_are_told_and_not_tried_again() -> None:
    with LocalPool(2) as pool:
        starts = [Start("left", seed) for seed in (1, 9005, 9006, 9007, 9008, 9009, 9013, 2)]
        rollouts = {r.start.seed: r for r in roll_out(pool, StraightPolicy(), starts, execute_steps=1)}
    assert len(rollouts) == len(starts)
    assert rollouts[1].lost is None
    assert rollouts[9005].lost == "ZeroDivisionError: the plane is torn"
    assert len(rollouts[9005]) == 1
    assert rollouts[9006].lost == "ZeroDivisionError: the plane is torn"
    assert rollouts[9006].actions.shape == (0, 2)
    assert rollouts[9006].observations["state"].shape == (0, 2)
    assert rollouts[9007].lost == "'state' holds nan."
    assert rollouts[9008].lost == "the reward is nan."
    assert rollouts[9009].lost == "'image' has the shape (9, 8, 3) instead of (8, 8, 3)."
    assert rollouts[9013].lost == "'image' has the dtype float64 instead of uint8."
    assert rollouts[2].success


def test_a_pool_in_which_nothing_ever_works_does_not_spin() -> None:
    with LocalPool(1) as pool, pytest.raises(EnvError, match="first 3 episodes .* the plane is torn"):
        list(roll_out(pool, StraightPolicy(), (Start("left", 9006) for _ in range(10**9)), execute_steps=3))
    # As long as one is on its way, or something has worked, bad luck is bad luck.
    with LocalPool(8) as pool:
        starts = [Start("left", seed) for seed in (9006, 9006, 1, 9006, 9006)]
        lost = [rollout.lost for rollout in roll_out(pool, StraightPolicy(), starts, execute_steps=3)]
        assert sorted(map(bool, lost)) == [False, True, True, True, True]
    with LocalPool(1) as pool:
        starts = [Start("left", seed) for seed in (1, 9006, 9006, 9006, 9006, 2)]
        assert len(list(roll_out(pool, StraightPolicy(), starts, execute_steps=3))) == 6


class BadPolicy(StraightPolicy):
    """Infers what no environment should be given."""

    def __init__(self, chunk: np.ndarray) -> None:
        super().__init__(horizon=len(chunk))
        self.chunk = chunk

    def infer(self, observations, prompts, seeds, steps):  # type: ignore[no-untyped-def]
        return np.stack([self.chunk] * len(seeds)).astype(np.float32)


@pytest.mark.parametrize(
    ("chunk", "complaint"),
    [
        (np.full((4, 2), np.nan), "not finite"),
        (np.full((4, 2), -np.inf), "not finite"),
        (np.zeros((4, 3)), "actions of 3 numbers; point takes 2"),
    ],
)
def test_a_plan_that_cannot_be_executed_ends_it_at_once(chunk: np.ndarray, complaint: str) -> None:
    with LocalPool(2) as pool, pytest.raises(ConfigError, match=complaint):
        list(roll_out(pool, BadPolicy(chunk), make_starts(pool.description, 4, 0), execute_steps=2))
    assert "execute" not in {what for what, _ in pool.log}


def test_what_cannot_be_done_is_refused_before_anything_runs() -> None:
    with LocalPool(1) as pool:
        starts = make_starts(pool.description, 1, 0)
        with pytest.raises(ConfigError, match="execute_steps = 7, but the policy infers 6 steps"):
            roll_out(pool, StraightPolicy(6), starts, execute_steps=7)
        with pytest.raises(ConfigError, match="execute_steps = 0"):
            roll_out(pool, StraightPolicy(6), starts, execute_steps=0)
        assert pool.log == []


def test_starts_take_the_tasks_in_turn_and_share_no_seed_with_another_evaluation() -> None:
    description = LocalPool(1).description
    starts = make_starts(description, 6, 2)
    assert [start.task for start in starts] == ["left", "right"] * 3
    assert starts[:3] == make_starts(description, 3, 2)
    others = {start.seed for seed in (0, 1, 3) for start in make_starts(description, 1000, seed)}
    assert not others & {start.seed for start in make_starts(description, 1000, 2)}
    assert {start.task for start in make_starts(description, 5, 0, "right")} == {"right"}
    with pytest.raises(ConfigError, match=r"no task 'rihgt'. Did you mean right\?"):
        make_starts(description, 5, 0, "rihgt")
    with pytest.raises(ConfigError, match="0 episodes"):
        make_starts(description, 0, 0)


def test_every_task_counts_its_own_episodes() -> None:
    """An environment that takes one of 50 initial states by the seed goes through all of them, for every task."""
    description = dataclasses.replace(LocalPool(1).description, tasks=tuple(f"task {number}" for number in range(10)))
    starts = make_starts(description, 507, 3)
    for number, task in enumerate(description.tasks):
        seeds = [start.seed for start in starts if start.task == task]
        assert [seed % 10_000 for seed in seeds] == list(range(51 if number < 7 else 50))
        assert {seed % 50 for seed in seeds} == set(range(50))
        # One task alone begins exactly as it does among the others.
        assert [start.seed for start in make_starts(description, len(seeds), 3, task)] == seeds
    everything = [start for seed in (2, 3, 4) for start in make_starts(description, 1_000, seed)]
    assert len({(start.task, start.seed) for start in everything}) == len(everything)
    assert len({start.seed for start in starts}) == len(starts)


def test_a_rollout_becomes_an_episode_for_the_replay_buffer() -> None:
    with LocalPool(1) as pool:
        (rollout,) = roll_out(pool, ExpertConfig(), [Start("left", 4)], execute_steps=3, keep_images=True)
    episode = rollout.episode(ROBOT)
    assert isinstance(rollout, Rollout)
    assert episode.terminal
    # Running out of time is no end of the task.
    assert not dataclasses.replace(rollout, terminated=False, truncated=True).episode(ROBOT).terminal
    assert episode.success
    np.testing.assert_array_equal(episode.images["base_0_rgb"], rollout.observations["image"])
    np.testing.assert_array_equal(episode.states, rollout.observations["state"])
    # The last action is the one that reached the goal, and no observation comes after it.
    assert len(episode.states) == len(episode.actions) == len(episode)
