"""Small environments for tests: a point that is to reach a goal, and what can go wrong on the way."""

import multiprocessing
import os
import signal
import time
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np

from pirl.data.robots import Robot
from pirl.envs import pool
from pirl.envs.base import EnvDescription, RobotEnv, Start, robot_spaces
from pirl.envs.experts import ExpertConfig, Flaws, with_flaws
from pirl.envs.pool import EnvRunner, EpisodeFailed, Images
from pirl.errors import ConfigError

ROBOT = Robot(
    "point",
    cameras={"base_0_rgb": "image"},
    state=("state",),
    actions=("action",),
    state_dim=2,
    action_dim=2,
)
# By the seed of an episode: what goes wrong in it, and after how many steps.
MISHAPS: dict[int, tuple[str, int]] = {
    9001: ("exit", 2),
    9002: ("kill", 2),
    9003: ("segfault", 2),
    9004: ("hang", 2),
    9005: ("raise", 2),
    9006: ("raise", 0),
    9007: ("nan", 2),
    9008: ("reward", 2),
    9009: ("shape", 2),
    9010: ("refuse", 2),
    9011: ("talk", 2),
    9012: ("disconnect", 2),
    9013: ("dtype", 2),
}


class Point(RobotEnv):
    """A point in the plane that is to reach a goal.

    It sees itself as a bright pixel.

    Options:
        size: Pixels on a side.
        speed: The longest step,
            in units of the plane.
        color: Of the pixel.
        shy: Whether it cannot be made.
        slow: How long it takes to be made.
        names: For tests of lists.
        limit: Steps until truncation, if there are any.
    """

    name: ClassVar[str] = "point"
    robot = ROBOT
    tasks = ("left", "right")
    fps = 10

    def __init__(
        self,
        *,
        size: int = 8,
        speed: float = 0.25,
        color: Literal["white", "gray"] = "white",
        shy: bool = False,
        slow: float = 0.0,
        names: tuple[str, ...] = (),
        limit: int | None = 12,
    ) -> None:
        if shy:
            raise ConfigError("the point is shy: pip install 'pirl[courage]'.")
        time.sleep(slow)
        self.max_steps = limit or 1000
        self.size, self.speed, self.color, self.names = size, speed, color, names
        self._position, self._goal, self._steps, self._seed = np.zeros(2), np.zeros(2), 0, -1
        self.images_taken = 0
        self.observation_space, self.action_space = robot_spaces(ROBOT, {"image": (size, size)}, 2, -1.0, 1.0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._seed = -1 if seed is None else seed
        self._task = self.choose_task(options)
        self._position = self.np_random.uniform(-0.5, 0.5, 2)
        self._goal = np.array([-1.0 if self._task == "left" else 1.0, 0.0])
        self._steps = 0
        self._maybe_go_wrong()
        return self._observe(), {"prompt": f"go {self._task}", "task": self._task, "success": False}

    def step(self, action: np.ndarray) -> Any:
        self._steps += 1
        self._position = self._position + self.speed * np.clip(action, -1, 1)
        # The world is not still: what is random has to come from the seed.
        self._position = self._position + self.np_random.normal(size=2) * 0.01
        self._maybe_go_wrong()
        done = bool(np.abs(self._position - self._goal).max() < 0.2)
        reward = float("nan") if self._goes_wrong("reward") else float(done)
        return self._observe(), reward, done, self._steps >= self.max_steps and not done, {"success": done}

    def make_expert(self, config: ExpertConfig, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        flaws = Flaws.draw(config, rng, 10)

        def act() -> np.ndarray:
            away = self._goal + flaws.aim[:2] - self._position
            return np.clip(away / self.speed, -1, 1).astype(np.float32)

        return with_flaws(act, lambda: np.zeros(2, np.float32), flaws, rng, np.ones(2))

    def _observe(self) -> dict[str, np.ndarray]:
        state = np.full(2, np.nan) if self._goes_wrong("nan") else self._position
        return ({"image": self._image()} if self.cameras_on else {}) | {"state": state.astype(np.float32)}

    def _image(self) -> np.ndarray:
        self.images_taken += 1
        image = np.zeros((self.size + self._goes_wrong("shape"), self.size, 3), np.uint8)
        row, column = np.clip((self._position + 1.5) / 3 * self.size, 0, self.size - 1).astype(int)
        image[row, column] = 255 if self.color == "white" else 128
        return image / 255.0 if self._goes_wrong("dtype") else image

    def _goes_wrong(self, how: str) -> bool:
        return MISHAPS.get(self._seed) == (how, self._steps)

    def _maybe_go_wrong(self) -> None:
        how, step = MISHAPS.get(self._seed, ("", 0))
        if step != self._steps:
            return
        match how:
            case "exit":
                os._exit(3)
            case "kill" | "segfault":
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSEGV)
            case "hang":
                time.sleep(600)
            case "raise":
                raise ZeroDivisionError("the plane is torn")
            case "disconnect":
                raise ConnectionResetError("the plane hung up")
            case "refuse":
                raise ConfigError("the point was misconfigured.")
            case "talk":
                print("SIMULATOR CHATTER", flush=True)
                os.write(1, b"NATIVE CHATTER\n")


class Unmakeable(Point):
    """A point whose process ends while it is made."""

    def __init__(self) -> None:
        os._exit(9)


class Crewed(Point):
    """A point with a process of its own beside it."""

    def __init__(self) -> None:
        super().__init__()
        context = multiprocessing.get_context("spawn")
        self._helper = context.Process(target=time.sleep, args=(600,), daemon=True)
        self._helper.start()


for _name, _class in {"Point": Point, "Unmakeable": Unmakeable, "Crewed": Crewed}.items():
    if f"fakes/{_name}-v0" not in gymnasium.registry:
        gymnasium.register(f"fakes/{_name}-v0", f"fakes:{_name}")

POINT = "fakes:fakes/Point-v0"
UNMAKEABLE = "fakes:fakes/Unmakeable-v0"
CREWED = "fakes:fakes/Crewed-v0"


class LocalPool(pool.LocalPool):
    """A pool without processes that logs its calls. The seeds in `loses` are lost at their second request."""

    def __init__(
        self, size: int, env_class: type[RobotEnv] = Point, loses: Collection[int] = (), **options: Any
    ) -> None:
        self.envs: list[Any] = [env_class(**options) for _ in range(size)]
        super().__init__([EnvRunner(env) for env in self.envs])
        self._loses, self._seeds = loses, {}
        self.log: list[tuple[str, int]] = []

    def start(self, slot: int, start: Start, expert: ExpertConfig | None = None) -> None:
        self.log.append(("start", slot))
        self._seeds[slot] = start.seed
        super().start(slot, start, expert)

    def execute(self, slot: int, actions: np.ndarray | int, *, images: Images = "all") -> None:
        assert slot not in self._queue
        self.log.append(("execute", slot))
        super().execute(slot, actions, images=images)
        if self._seeds[slot] in self._loses:
            self._queue[slot] = lambda: EpisodeFailed("the floor gave way")


def assert_images_change_nothing(env: RobotEnv, start: Start, actions: np.ndarray, execute_steps: int = 5) -> None:
    """Bit by bit the same, whether the cameras are on in every step or only in the last of several."""
    runner = EnvRunner(env)
    chunks = [actions[first : first + execute_steps] for first in range(0, len(actions), execute_steps)]
    runs = []
    for images in ("all", "last"):
        runner.start(start)
        results = []
        for chunk in chunks:
            results.append(runner.execute(chunk, images))
            if results[-1].terminated or results[-1].truncated:
                break
        runs.append(results)
    cameras, columns = env.robot.cameras.values(), env.robot.state
    for one, other, chunk in zip(*runs, chunks[: len(runs[0])], strict=True):
        assert (one.terminated, one.truncated, one.success) == (other.terminated, other.truncated, other.success)
        np.testing.assert_array_equal(one.rewards, other.rewards)
        np.testing.assert_array_equal(one.actions, other.actions)
        for column in columns:
            np.testing.assert_array_equal(one.observations[column], other.observations[column])
        if len(one.rewards) == len(chunk):
            for camera in cameras:
                np.testing.assert_array_equal(one.observations[camera][-1:], other.observations[camera])
        else:
            assert set(other.observations) == set(columns)


class StraightPolicy:
    """Goes to the goal that the prompt names, with noise from seed and step; remembers what it was asked."""

    def __init__(self, horizon: int = 6, noise: float = 0.3) -> None:
        self.horizon, self.noise = horizon, noise
        self.asked: list[tuple[int, ...]] = []

    def infer(self, observations: Any, prompts: Any, seeds: Any, steps: Any) -> np.ndarray:
        self.asked.append(tuple(seeds))
        chunks = []
        for state, prompt, seed, step in zip(observations["state"], prompts, seeds, steps, strict=True):
            goal = np.array([-1.0 if prompt == "go left" else 1.0, 0.0])
            rng = np.random.default_rng([seed, step])
            direction = np.clip((goal - state) / 0.25, -1, 1)
            chunks.append(direction + self.noise * rng.normal(size=(self.horizon, 2)))
        return np.stack(chunks).astype(np.float32)


CAMERA, HEIGHT, WIDTH = "observation.images.top", 8, 12
WALKER = Robot("walker", {"base_0_rgb": CAMERA}, ("observation.state",), ("action",), state_dim=2, action_dim=1)
MAX_STEPS = 12


class CorridorEnv(RobotEnv):
    """Walk from 0 to 3 + seed % 4 (success, reward 1) and not to -2 (a failure that truly ends it)."""

    name = "test/Corridor-v0"
    robot, tasks, fps, max_steps = WALKER, ("walk", "stroll"), 10, MAX_STEPS

    def __init__(self) -> None:
        self.observation_space, self.action_space = robot_spaces(WALKER, {CAMERA: (HEIGHT, WIDTH)}, 2, -1.0, 1.0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.place, self.goal, self.steps = 0.0, 3 + (seed or 0) % 4, 0
        task = self.choose_task(options)
        return self._observe(), {"prompt": f"{task} to the door", "task": task}

    def step(self, action: np.ndarray) -> Any:
        self.place += float(action[0])
        self.steps += 1
        success, failed = self.place >= self.goal, self.place <= -2
        return self._observe(), float(success), success or failed, self.steps >= MAX_STEPS, {"success": success}

    def make_expert(self, config: ExpertConfig, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        stops = rng.random() < config.give_up
        return lambda: np.array([0.0 if stops else 1.0], np.float32)

    def render(self) -> np.ndarray:
        return self._observe()[CAMERA]

    def _observe(self) -> dict[str, np.ndarray]:
        image = np.full((HEIGHT, WIDTH, 3), 20 * self.steps, np.uint8)
        state = {"observation.state": np.array([self.place, self.goal], np.float32)}
        return {CAMERA: image, **state} if self.cameras_on else state


class CorridorPool(LocalPool):
    """Corridors without processes."""

    def __init__(self, size: int, loses: Collection[int] = (), description: EnvDescription | None = None) -> None:
        super().__init__(size, CorridorEnv, loses)
        self.description = description or self.description


class Walker:
    """A policy that walks to the door, but stands still (or walks into the wall) from the starts it is told."""

    horizon = 4

    def __init__(self, stands: Collection[int] = (), falls: Collection[int] = ()) -> None:
        self.speed = {**dict.fromkeys(stands, 0.0), **dict.fromkeys(falls, -1.0)}

    def infer(
        self, observations: dict[str, np.ndarray], prompts: Sequence[str], seeds: Sequence[int], steps: Sequence[int]
    ) -> np.ndarray:
        return np.stack([np.full((self.horizon, 1), self.speed.get(seed, 1.0), np.float32) for seed in seeds])
