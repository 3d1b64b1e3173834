"""Meta-World: names of tasks; and with the package, the same seed gives the same pixels, and images stand upright."""

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest

from fakes import assert_images_change_nothing
from pirl.envs.base import Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.metaworld.env import MetaWorldEnv, Simulator, make_expert
from pirl.envs.metaworld.tasks import GROUPS, PROMPTS, choose_tasks
from pirl.envs.mujoco import import_simulator
from pirl.errors import ConfigError, ObservationError

# Looked for without importing it: MuJoCo has to be imported by the environment, which chooses how it renders.
IS_INSTALLED = importlib.util.find_spec("metaworld") is not None
installed = pytest.mark.skipif(not IS_INSTALLED, reason="metaworld is not installed: pip install 'pirl[metaworld]'")
BASE, WRIST, STATE = "observation.images.corner", "observation.images.gripper", "observation.state"


@pytest.fixture(scope="module")
def env() -> Iterator[MetaWorldEnv]:
    env = MetaWorldEnv(tasks="pick-place,door-open,reach", image_size=64)
    yield env
    env.close()


def _same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return set(one) == set(other) and all(np.array_equal(one[name], other[name]) for name in one)


def _expert_actions(env: MetaWorldEnv, count: int) -> np.ndarray:
    expert = env.make_expert(ExpertConfig(noise=0.2), 0)
    actions = []
    for _ in range(count):
        actions.append(expert())
        env.step(actions[-1])
    return np.stack(actions)


@installed
@pytest.mark.parametrize("task", ["pick-place-v3", "door-open-v3"])
def test_physics_goes_on_the_same_unseen(env: MetaWorldEnv, task: str) -> None:
    env.reset(seed=7, options={"task": task})
    assert_images_change_nothing(env, Start(task, 7), _expert_actions(env, 32))


@installed
def test_tasks_are_those_of_the_package() -> None:
    package = import_simulator("metaworld.env_dict", "metaworld")
    assert set(PROMPTS) == set(package.ALL_V3_ENVIRONMENTS)
    assert set(GROUPS["mt10"]) == set(package.MT10_V3)


@installed
def test_a_seed_decides_the_start_whatever_went_before(env: MetaWorldEnv) -> None:
    options = {"task": "pick-place-v3"}
    first, info = env.reset(seed=3, options=options)
    assert info["prompt"] == PROMPTS["pick-place-v3"]
    assert info["task"] == "pick-place-v3"
    _expert_actions(env, 40)
    env.reset(seed=9, options={"task": "door-open-v3"})
    again, _ = env.reset(seed=3, options=options)
    other, _ = env.reset(seed=4, options=options)
    fresh = MetaWorldEnv(tasks="pick-place", image_size=64)
    np.random.seed(99)
    assert _same(first, again)
    assert _same(first, fresh.reset(seed=3)[0])
    fresh.close()
    # The puck is elsewhere; the hand begins where it always does.
    assert np.abs(first[BASE].astype(int) - other[BASE]).max() > 50
    np.testing.assert_allclose(first[STATE], other[STATE], atol=1e-3)


def _finger(image: np.ndarray) -> np.ndarray:
    """Row and column of the cyan finger of the gripper."""
    red, green, blue = np.moveaxis(image.astype(int), -1, 0)
    places = np.argwhere((green - red > 60) & (blue - red > 60))
    assert len(places) > 5
    return places.mean(0)


@installed
@pytest.mark.parametrize("camera", ["corner", "corner2", "corner3", "corner4"])
def test_images_stand_upright_and_are_not_mirrored(camera: str) -> None:
    env = MetaWorldEnv(tasks="reach", camera=camera, wrist_camera=False)  # type: ignore[arg-type]
    env.reset(seed=0)
    start = _finger(env.render())
    for _ in range(12):
        env.step(np.array([0, 0, 1, -1], np.float32))
    up = _finger(env.render())
    for _ in range(12):
        env.step(np.array([0, 1, 0, -1], np.float32))
    away = _finger(env.render())
    env.close()
    assert up[0] < start[0] - 5
    # Away from the robot's base is to the left for the camera on its left, to the right for those on its right.
    moved = away[1] - up[1]
    assert moved < -5 if camera == "corner" else moved > 5


@installed
def test_the_expert_succeeds_and_that_ends_the_episode(env: MetaWorldEnv) -> None:
    env.reset(seed=2, options={"task": "reach-v3"})
    expert = env.make_expert(ExpertConfig(), 2)
    rewards: list[float] = []
    for _ in range(100):
        action = expert()
        assert env.action_space.contains(action)
        observation, reward, terminated, truncated, info = env.step(action)
        rewards.append(reward)
        if terminated or truncated:
            break
    assert terminated
    assert info["success"]
    assert not truncated
    assert rewards[-1] > rewards[0] > 0
    assert env.observation_space.contains(observation)


@installed
def test_what_is_not_an_action_of_it_is_refused(env: MetaWorldEnv) -> None:
    env.reset(seed=0, options={"task": "reach-v3"})
    with pytest.raises(ObservationError, match="4 finite numbers"):
        env.step(np.zeros(7, np.float32))
    with pytest.raises(ObservationError, match="4 finite numbers"):
        env.step(np.full(4, np.nan, np.float32))


@installed
@pytest.mark.slow
@pytest.mark.parametrize("task", PROMPTS)
def test_every_task_repeats_exactly_and_its_expert_succeeds(task: str) -> None:
    one, other = Simulator(task), Simulator(task)
    successes = 0
    for seed in range(5):
        one.reset(seed)
        expert = make_expert(one, ExpertConfig(), seed)
        other.reset(seed)
        for step in range(400):
            action = expert()
            outcome = one.step(action)
            if step < 60:
                assert other.step(action) == outcome
                assert np.array_equal(other.full_observation(), one.full_observation())
            if outcome[1]:
                successes += 1
                break
    assert successes >= 4


# --- without the package -------------------------------------------------------------------------------------------


def test_tasks_are_named_as_people_type_them() -> None:
    assert choose_tasks("pick-place-v3,drawer-close-v3") == ("pick-place-v3", "drawer-close-v3")
    assert choose_tasks(" Reach, push-v3 ,reach-v3,") == ("reach-v3", "push-v3")
    assert choose_tasks("all") == tuple(PROMPTS)
    assert len(choose_tasks("mt10")) == 10
    assert choose_tasks("hammer,mt10")[0] == "hammer-v3"


@pytest.mark.parametrize(("text", "said"), [("pick-plac", "pick-place-v3"), ("xyz", "assembly-v3"), (" ,", "mt10")])
def test_an_unknown_task_is_answered_with_what_there_is(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_tasks(text)


@pytest.mark.parametrize("max_steps", [0, 501])
def test_an_episode_longer_than_the_package_allows_is_refused(max_steps: int) -> None:
    with pytest.raises(ConfigError, match=f"max_steps = {max_steps}"):
        MetaWorldEnv(max_steps=max_steps)


@pytest.mark.skipif(IS_INSTALLED, reason="metaworld is installed")
def test_a_missing_package_says_how_to_install_it() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'pirl\[metaworld\]'"):
        MetaWorldEnv()
