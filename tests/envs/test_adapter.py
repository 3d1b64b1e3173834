"""Adapters: a user's small class makes a Gymnasium environment one of ours, and its mistakes are explained to them."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from pirl.data import Robot
from pirl.envs import EnvAdapter
from pirl.errors import ConfigError, EnvError

ROBOT = Robot(
    "car", cameras={"base_0_rgb": "top"}, state=("joints", "grip"), actions=("action",), state_dim=3, action_dim=2
)


class Car(gymnasium.Env[Any, Any]):
    """A foreign environment: float pictures with channels first, and its own names."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]
    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    action_space = gymnasium.spaces.Box(-1, 1, (2,))

    def __init__(self, limit: int | None = 5) -> None:
        if limit is not None:
            self.spec = gymnasium.envs.registration.EnvSpec("Car-v0", "x:y", max_episode_steps=limit)
        self.where, self.options = np.zeros(3), None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.where, self.options = self.np_random.normal(size=3), options
        return self.where, {}

    def step(self, action: Any) -> Any:
        self.where = self.where + [*action, 0.0] + self.np_random.normal(size=3) * 0.1
        return self.where, 1.0, bool(self.where[0] > 2), False, {"reached": bool(self.where[0] > 2)}


class CarAdapter(EnvAdapter):
    robot = ROBOT
    fps = 20
    tasks = ("go", "stay")

    def observe(self, observation: Any, info: Any) -> Any:
        picture = np.full((3, 4, 6), 0.5)
        return {"top": picture, "joints": observation[:2], "grip": observation[2:].astype(np.float64)}

    def action(self, action: np.ndarray) -> Any:
        return action * 0.5

    def success(self, reward: float, terminated: bool, info: Any) -> bool:
        return info.get("reached", False)

    def reset_options(self, task: str) -> dict[str, Any]:
        return {"which": task}


def test_an_adapted_environment_passes_gymnasiums_own_checker() -> None:
    check_env(CarAdapter(Car()), skip_render_check=True)


def test_observations_have_the_dtypes_and_shapes_of_datasets() -> None:
    env = CarAdapter(Car())
    observation, info = env.reset(seed=1, options={"task": "stay"})
    assert observation["top"].shape == (4, 6, 3)
    assert observation["top"].dtype == np.uint8
    assert np.all(observation["top"] == 127)
    assert observation["grip"].dtype == np.float32
    assert env.describe().shapes == {"top": (4, 6, 3), "joints": (2,), "grip": (1,)}
    assert (info["task"], info["prompt"], env.env.unwrapped.options) == ("stay", "stay", {"which": "stay"})  # type: ignore[attr-defined]


def test_actions_are_translated_and_time_runs_out() -> None:
    env, bare = CarAdapter(Car()), Car()
    env.reset(seed=2, options={"task": "go"})
    bare.reset(seed=2)
    for step in range(1, 6):
        action = np.array([-1.0, 1.0], np.float32)
        observation, reward, terminated, truncated, info = env.step(action)
        np.testing.assert_array_equal(observation["joints"], bare.step(action * 0.5)[0][:2].astype(np.float32))
        assert (reward, terminated, truncated, info["success"]) == (1.0, False, step == 5, False)


def test_success_is_what_the_adapter_says() -> None:
    env = CarAdapter(Car())
    env.reset(seed=2)
    _, _, terminated, truncated, info = env.step(np.array([20.0, 0.0], np.float32))
    assert (terminated, truncated, info["success"]) == (True, False, True)


def adapted(limit: int | None = 5, **attributes: Any) -> EnvAdapter:
    env: EnvAdapter = type("Mine", (CarAdapter,), attributes)(Car(limit))
    return env


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize(
    ("attributes", "complaint"),
    [
        ({"robot": None}, "Mine needs the class attribute robot"),
        ({"fps": None}, "Mine needs the class attribute fps"),
        ({"tasks": ()}, "Mine needs the class attribute prompt"),
        ({"observe": EnvAdapter.observe}, r"Mine needs a method observe\(observation, info\)"),
        ({"observe": lambda *_: None}, r"Mine: observe\(\) should return cameras and state by name; it returned None"),
        (
            {"observe": lambda *_: {"joints": np.zeros(2), "grip": np.zeros(1)}},
            r"Mine: observe\(\) returned \['grip', 'joints'\]; top of the robot is missing",
        ),
        (
            {"observe": lambda *_: {"top": np.zeros((4, 4)), "joints": np.zeros(2), "grip": np.zeros(1)}},
            r"Mine: top has the shape \(4, 4\); expected an image",
        ),
        (
            {"observe": lambda *_: {"top": np.ones((4, 4, 3), int), "joints": np.zeros(2), "grip": np.zeros(1)}},
            "Mine: top: an image has dtype int64; expected uint8",
        ),
        (
            {"observe": lambda *_: {"top": np.zeros((4, 4, 3)), "joints": "ab", "grip": np.zeros(1)}},
            r"Mine: joints has the dtype <U2 and the shape \(\); expected a row of numbers",
        ),
        (
            {"observe": lambda *_: {"top": np.zeros((4, 4, 3)), "joints": np.zeros(5), "grip": np.zeros(1)}},
            r"Mine: joints \+ grip has 6 numbers; the robot has state_dim = 3",
        ),
    ],
)
def test_a_mistake_in_an_adapter_is_explained_when_it_is_made(attributes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        adapted(**attributes)


def test_a_limit_of_steps_must_come_from_somewhere() -> None:
    with pytest.raises(ConfigError, match="Mine needs the class attribute max_steps"):
        adapted(limit=None)
    assert adapted(limit=None, max_steps=9).max_steps == 9


def test_a_mistake_in_success_is_explained_at_the_first_step() -> None:
    env = adapted(success=lambda *_: "yes")
    env.reset(seed=0)
    with pytest.raises(ConfigError, match=r"Mine: success\(\) should be true or false; it is 'yes'"):
        env.step(np.zeros(2, np.float32))


def test_after_a_good_step_it_is_the_environment_that_fails() -> None:
    class Fading(CarAdapter):
        def observe(self, observation: Any, info: Any) -> Any:
            seen = super().observe(observation, info)
            return seen if self._steps < 2 else {**seen, "top": np.full((3, 4, 6), np.nan)}

    env = Fading(Car())
    env.reset(seed=0)
    env.step(np.zeros(2, np.float32))
    with pytest.raises(EnvError, match="Fading: top: a float image has values from nan"):
        env.step(np.zeros(2, np.float32))
