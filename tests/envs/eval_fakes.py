"""A corridor to walk along, a pool of corridors in one process, and walkers whose outcomes are known beforehand."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from pirl.data import Robot
from pirl.envs.base import EnvDescription, RobotEnv, Start, robot_spaces
from pirl.envs.experts import ExpertConfig
from pirl.envs.pools import Lost, Pictures, Segment, Started, stack_observations

CAMERA, HEIGHT, WIDTH = "observation.images.top", 8, 12
ROBOT = Robot("walker", {"base_0_rgb": CAMERA}, ("observation.state",), ("action",), state_dim=2, action_dim=1)
MAX_STEPS = 12


class CorridorEnv(RobotEnv):
    """Walk from 0 to 3 + seed % 4 (success, reward 1) and not to -2 (a failure that truly ends it)."""

    name = "test/Corridor-v0"
    robot, tasks, fps, max_steps = ROBOT, ("walk", "stroll"), 10, MAX_STEPS

    def __init__(self) -> None:
        self.observation_space, self.action_space = robot_spaces(ROBOT, {CAMERA: (HEIGHT, WIDTH)}, 2, -1.0, 1.0)

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

    def get_state(self) -> dict[str, np.ndarray]:
        return {"place": np.array([self.place, self.goal, self.steps])}

    def make_expert(self, config: ExpertConfig, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        stops = rng.random() < config.give_up
        return lambda: np.array([0.0 if stops else 1.0], np.float32)

    def render(self) -> np.ndarray:
        return self._observe()[CAMERA]

    def _observe(self) -> dict[str, np.ndarray]:
        picture = np.full((HEIGHT, WIDTH, 3), 20 * self.steps, np.uint8)
        state = {"observation.state": np.array([self.place, self.goal], np.float32)}
        return {CAMERA: picture, **state} if self.cameras_on else state


class CorridorPool:
    """Slots that answer when waited for; episodes of the seeds in `loses` are lost at their second request."""

    groups = 1

    def __init__(self, size: int, loses: Collection[int] = (), description: EnvDescription | None = None) -> None:
        self.size, self.loses = size, loses
        self.envs = [CorridorEnv() for _ in range(size)]
        self.description = description or self.envs[0].describe()
        self.queued: dict[int, Any] = {}
        self.experts: dict[int, Any] = {}
        self.starts: dict[int, Start] = {}
        self.closed = False

    def start(self, slot: int, start: Start, expert: ExpertConfig | None = None) -> None:
        self.queued[slot] = (start, expert)

    def execute(self, slot: int, actions: np.ndarray | int, *, pictures: Pictures = "all") -> None:
        self.queued[slot] = [actions, pictures]

    def wait(self, slots: Sequence[int]) -> dict[int, Started | Segment | Lost]:
        return {slot: self._answer(slot, self.queued.pop(slot)) for slot in slots}

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> "CorridorPool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _answer(self, slot: int, request: Any) -> Started | Segment | Lost:
        env = self.envs[slot]
        if isinstance(request, tuple):
            start, config = self.starts[slot], _ = request
            env.cameras_on = True
            observation, info = env.reset(seed=start.seed, options={"task": start.task})
            self.experts[slot] = None if config is None else env.make_expert(config, start.seed)
            return Started(observation, info["prompt"], info["task"], env.get_state())
        if self.starts[slot].seed in self.loses:
            return Lost("the floor gave way")
        actions, pictures = request
        count = actions if isinstance(actions, int) else len(actions)
        seen, done, rewards = [], [], []
        terminated = truncated = success = False
        for step in range(count):
            action = self.experts[slot]() if isinstance(actions, int) else actions[step]
            env.cameras_on = pictures == "all" or step == count - 1
            observation, reward, terminated, truncated, info = env.step(action)
            seen.append(observation)
            done.append(action)
            rewards.append(reward)
            success = info["success"]
            if terminated or truncated:
                break
        taken = np.array(done, np.float32)
        return Segment(stack_observations(seen), taken, np.array(rewards, np.float32), terminated, truncated, success)


class Walker:
    """A planner that walks to the door, but stands still (or walks into the wall) from the starts it is told."""

    horizon = 4

    def __init__(self, stands: Collection[int] = (), falls: Collection[int] = ()) -> None:
        self.speed = {**dict.fromkeys(stands, 0.0), **dict.fromkeys(falls, -1.0)}

    def plan(
        self, observations: dict[str, np.ndarray], prompts: Sequence[str], seeds: Sequence[int], steps: Sequence[int]
    ) -> np.ndarray:
        return np.stack([np.full((self.horizon, 1), self.speed.get(seed, 1.0), np.float32) for seed in seeds])
