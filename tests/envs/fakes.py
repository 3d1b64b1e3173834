"""Small environments for tests: a point that is to reach a goal, and what can go wrong on the way."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np

from pirl.data.robots import Robot
from pirl.envs.base import RobotEnv, Start, robot_spaces
from pirl.envs.experts import ExpertConfig, Flaws, with_flaws
from pirl.envs.pools import Lost, Pictures
from pirl.envs.stepping import Stepper
from pirl.errors import ConfigError, EnvError

ROBOT = Robot(
    "point",
    cameras={"base_0_rgb": "image"},
    state=("state",),
    actions=("action",),
    state_dim=2,
    action_dim=2,
)
Mishap = Literal[
    "exit", "kill", "segfault", "hang", "raise", "nan", "reward", "shape", "dtype", "refuse", "talk", "disconnect"
]
# By the seed of an episode: what goes wrong in it, and after how many steps.
MISHAPS: dict[int, tuple[Mishap, int]] = {
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
        colour: Of the pixel.
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
        colour: Literal["white", "grey"] = "white",
        shy: bool = False,
        slow: float = 0.0,
        names: tuple[str, ...] = (),
        limit: int | None = 12,
    ) -> None:
        if shy:
            raise ConfigError("the point is shy: pip install 'pirl[courage]'.")
        time.sleep(slow)
        self.max_steps = limit or 1000
        self.size, self.speed, self.colour, self.names = size, speed, colour, names
        self._position, self._goal, self._steps, self._seed = np.zeros(2), np.zeros(2), 0, -1
        self.pictures_taken = 0
        self.observation_space, self.action_space = robot_spaces(ROBOT, {"image": (size, size)}, 2, -1.0, 1.0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._seed = -1 if seed is None else seed
        self._task = self.choose_task(options)
        self._position = self.np_random.uniform(-0.5, 0.5, 2)
        self._goal = np.array([-1.0 if self._task == "left" else 1.0, 0.0])
        self._steps = 0
        state = (options or {}).get("state")
        if state is not None:
            self._position, self._steps = np.array(state["position"]), int(state["steps"])
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

    def get_state(self) -> dict[str, np.ndarray]:
        return {"position": self._position.copy(), "steps": np.array(self._steps)}

    def make_expert(self, config: ExpertConfig, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        flaws = Flaws.draw(config, rng, 10)

        def act() -> np.ndarray:
            away = self._goal + flaws.aim[:2] - self._position
            return np.clip(away / self.speed, -1, 1).astype(np.float32)

        return with_flaws(act, lambda: np.zeros(2, np.float32), flaws, rng, np.ones(2))

    def _observe(self) -> dict[str, np.ndarray]:
        state = np.full(2, np.nan) if self._goes_wrong("nan") else self._position
        return ({"image": self._picture()} if self.cameras_on else {}) | {"state": state.astype(np.float32)}

    def _picture(self) -> np.ndarray:
        self.pictures_taken += 1
        image = np.zeros((self.size + self._goes_wrong("shape"), self.size, 3), np.uint8)
        row, column = np.clip((self._position + 1.5) / 3 * self.size, 0, self.size - 1).astype(int)
        image[row, column] = 255 if self.colour == "white" else 128
        return image / 255.0 if self._goes_wrong("dtype") else image

    def _goes_wrong(self, how: Mishap) -> bool:
        return MISHAPS.get(self._seed) == (how, self._steps)

    def _maybe_go_wrong(self) -> None:
        if self._goes_wrong("exit"):
            os._exit(3)
        if self._goes_wrong("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._goes_wrong("segfault"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._goes_wrong("hang"):
            time.sleep(600)
        if self._goes_wrong("raise"):
            raise ZeroDivisionError("the plane is torn")
        if self._goes_wrong("disconnect"):
            raise ConnectionResetError("the plane hung up")
        if self._goes_wrong("refuse"):
            raise ConfigError("the point was misconfigured.")
        if self._goes_wrong("talk"):
            print("SIMULATOR CHATTER", flush=True)
            os.write(1, b"NATIVE CHATTER\n")
            sys.stdout.flush()


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


class LocalPool:
    """A pool without processes; what raises is lost."""

    groups = 1

    def __init__(self, size: int, **options: Any) -> None:
        self.size = size
        self.envs = [Point(**options) for _ in range(size)]
        self._steppers = [Stepper(env) for env in self.envs]
        self.description = self._steppers[0].description
        self._queue: dict[int, Callable[[], Any]] = {}
        self.log: list[tuple[str, int]] = []

    def start(self, slot: int, start: Start, expert: ExpertConfig | None = None) -> None:
        self.log.append(("start", slot))
        self._queue[slot] = lambda: self._steppers[slot].start(start, expert)

    def execute(self, slot: int, actions: np.ndarray | int, *, pictures: Pictures = "all") -> None:
        assert slot not in self._queue
        self.log.append(("execute", slot))
        self._queue[slot] = lambda: self._steppers[slot].execute(actions, pictures)

    def wait(self, slots: Sequence[int]) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        for slot in slots:
            self.log.append(("wait", slot))
            try:
                answers[slot] = self._queue.pop(slot)()
            except (ArithmeticError, EnvError) as error:
                answers[slot] = Lost(str(error))
        return answers

    def close(self) -> None:
        self._queue.clear()

    def __enter__(self) -> "LocalPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def assert_pictures_change_nothing(env: RobotEnv, start: Start, actions: np.ndarray, execute_steps: int = 5) -> None:
    """Bit by bit the same, whether the cameras are on in every step or only in the last of several."""
    stepper = Stepper(env)
    chunks = [actions[first : first + execute_steps] for first in range(0, len(actions), execute_steps)]
    runs = []
    for pictures in ("all", "last"):
        stepper.start(start)
        segments = []
        for chunk in chunks:
            segments.append(stepper.execute(chunk, pictures))
            if segments[-1].terminated or segments[-1].truncated:
                break
        runs.append((segments, env.get_state()))
    (everything, state), (sparing, same_state) = runs
    assert len(everything) == len(sparing)
    cameras, columns = env.robot.cameras.values(), env.robot.state
    for one, other, chunk in zip(everything, sparing, chunks, strict=False):
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
    assert state.keys() == same_state.keys()
    for name, value in state.items():
        np.testing.assert_array_equal(value, same_state[name], err_msg=name)


class StraightPlanner:
    """Plans towards the goal that the prompt names, with noise from seed and step; remembers what it was asked."""

    def __init__(self, horizon: int = 6, noise: float = 0.3) -> None:
        self.horizon, self.noise = horizon, noise
        self.asked: list[tuple[int, ...]] = []

    def plan(self, observations: Any, prompts: Any, seeds: Any, steps: Any) -> np.ndarray:
        self.asked.append(tuple(seeds))
        chunks = []
        for state, prompt, seed, step in zip(observations["state"], prompts, seeds, steps, strict=True):
            goal = np.array([-1.0 if prompt == "go left" else 1.0, 0.0])
            rng = np.random.default_rng([seed, step])
            direction = np.clip((goal - state) / 0.25, -1, 1)
            chunks.append(direction + self.noise * rng.normal(size=(self.horizon, 2)))
        return np.stack(chunks).astype(np.float32)
