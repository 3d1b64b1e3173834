"""ALOHA: gym-aloha's physics and images behind pirl's interface, and experts that succeed."""

import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("gym_aloha", reason="gym-aloha is not installed (make setup-aloha)")

import gymnasium
from gymnasium.utils.env_checker import check_env

from fakes import assert_images_change_nothing
from pirl.envs.aloha.env import AlohaEnv, Simulation
from pirl.envs.aloha.expert import SIDES, Kinematics, make_expert
from pirl.envs.base import Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.mujoco import choose_gl
from pirl.errors import ConfigError, ObservationError

choose_gl()  # gym-aloha itself, where a test makes it first, would look for a screen

TOP, STATE = "observation.images.top", "observation.state"
TASKS = ("transfer_cube", "insertion")
SMALL = {"height": 48, "width": 64}


@pytest.fixture(scope="module")
def env():
    with_small_images = AlohaEnv(**SMALL)
    yield with_small_images
    with_small_images.close()


@pytest.fixture(scope="module")
def simulations():
    return {task: Simulation(task) for task in TASKS}


def wander(env, steps, seed=0):
    """Random motions about the start, and all that comes of them."""
    start = np.array([0, -0.96, 1.16, 0, -0.3, 0, 0.1] * 2)
    actions = start + 0.3 * np.random.default_rng(seed).normal(size=(steps, 14))
    return [env.step(action.astype(np.float32)) for action in actions]


def assert_same(one, other):
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert left[1:] == right[1:]
        for name in (TOP, STATE):
            np.testing.assert_array_equal(left[0][name], right[0][name])


@pytest.mark.parametrize("task", TASKS)
def test_physics_goes_on_the_same_unseen(env, task):
    start = np.array([0, -0.96, 1.16, 0, -0.3, 0, 0.1] * 2)
    actions = start + 0.3 * np.random.default_rng(3).normal(size=(12, 14))
    assert_images_change_nothing(env, Start(task, 4), actions.astype(np.float32))


def run_expert(simulation, task, config, seed, steps=300):
    simulation.reset(seed)
    act = make_expert(simulation, task, config, seed)
    rewards = []
    while len(rewards) < steps and 4 not in rewards:
        rewards.append(simulation.step(act()))
    return rewards


# --- the environment ---


def test_gymnasiums_checker_accepts_it(env):
    check_env(env, skip_render_check=True)
    assert env.render().shape == (480, 640, 3)


def test_stock_quality_is_gym_aloha_to_the_pixel():
    package = gymnasium.make("gym_aloha/AlohaTransferCube-v0", obs_type="pixels_agent_pos").unwrapped
    ours = AlohaEnv(quality="stock")
    theirs, _ = package.reset(seed=3)
    observation, _ = ours.reset(seed=3, options={"task": "transfer_cube"})
    for step in range(2):
        np.testing.assert_array_equal(observation[TOP], theirs["pixels"]["top"])
        np.testing.assert_array_equal(observation[STATE], theirs["agent_pos"].astype(np.float32))
        action = np.full(14, 0.1 * step, np.float32)
        theirs, their_reward, *_ = package.step(action)
        observation, reward, *_ = ours.step(action)
        assert reward == their_reward
    ours.close()


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_pixels_whatever_happened_before(env, task):
    env.reset(seed=7, options={"task": task})
    first = wander(env, 10)
    env.reset(seed=8)
    wander(env, 5, seed=1)
    env.reset(seed=7, options={"task": task})
    assert_same(first, wander(env, 10))
    other = AlohaEnv(**SMALL)
    other.reset(seed=7, options={"task": task})
    assert_same(first, wander(other, 10))
    other.close()


def test_what_it_cannot_use_is_refused_in_words(env):
    env.reset(seed=0, options={"task": "insertion"})
    for action in (np.zeros(7), np.full(14, np.nan)):
        with pytest.raises(ObservationError, match="14 finite numbers"):
            env.step(action)
    with pytest.raises(ConfigError, match="no task 'juggle'"):
        env.reset(options={"task": "juggle"})
    with pytest.raises(ConfigError, match="max_steps"):
        AlohaEnv(max_steps=0)
    with pytest.raises(ConfigError, match="height"):
        AlohaEnv(height=0)


@pytest.mark.parametrize("backend", ["nonsense", pytest.param("glfw", marks=pytest.mark.slow)])
def test_without_gl_it_says_what_to_install(backend):
    environment = {key: value for key, value in os.environ.items() if not key.endswith("DISPLAY")}
    script = (
        "from pirl.envs.aloha.env import AlohaEnv\nfrom pirl.errors import ConfigError\n"
        "try: AlohaEnv()\nexcept ConfigError as error: print(error)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment | {"MUJOCO_GL": backend}, capture_output=True, text=True
    )
    assert f"MUJOCO_GL={backend}" in run.stdout
    assert "make setup-aloha" in run.stdout


# --- the experts ---


def test_inverse_kinematics_brings_the_gripper_where_it_should_be(simulations):
    kinematics = Kinematics(simulations["transfer_cube"].model)
    random = np.random.default_rng(0)
    for side in SIDES:
        for _ in range(10):
            # Within comfortable reach, the wrist bent: a straight one cannot turn in every direction.
            joints = np.array([0, -0.5, 0.7, 0, 0.7, 0]) + random.uniform(-0.25, 0.25, 6)
            position, rotation = kinematics.pose(side, joints)
            solved = kinematics.solve(side, position, rotation, joints + random.uniform(-0.2, 0.2, 6))
            reached, facing = kinematics.pose(side, solved)
            np.testing.assert_allclose(reached, position, atol=1e-4)
            np.testing.assert_allclose(facing, rotation, atol=1e-4)


@pytest.mark.parametrize("task", TASKS)
def test_an_expert_repeats_itself_from_the_same_start(simulations, task):
    simulation = simulations[task]
    config = ExpertConfig(aim_bias=0.01, noise=0.2, delay=10)

    def actions(seed):
        simulation.reset(11)
        act = make_expert(simulation, task, config, seed)
        taken = []
        for _ in range(60):
            taken.append(act())
            simulation.step(taken[-1])
        return np.stack(taken)

    first = actions(0)
    np.testing.assert_array_equal(first, actions(0))
    assert not np.array_equal(first, actions(1))


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_the_expert_succeeds_from_nearly_every_start(simulations, task):
    successes = sum(4 in run_expert(simulations[task], task, ExpertConfig(), seed) for seed in range(100, 150))
    assert successes >= 48
