"""An environment without eyes in which chance decides: success comes by what the policy draws, quickly and cheaply."""

import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any, ClassVar

import gymnasium
import numpy as np

from pirl.data.robots import get_robot
from pirl.envs.base import RobotEnv, robot_spaces
from pirl.envs.pool import EnvRunner, LocalPool

FAIR = "fair_env:test/Fair-v0"
CROWDED = "fair_env:test/Crowded-v0"
ROBOT = get_robot("tabletop_state")


class Fair(RobotEnv):
    """Who draws well succeeds after a few steps, the others run out of time.

    Options:
        skill: How often that is.
        steps: When time is over.
        slow: Seconds that a beginning takes.
    """

    name: ClassVar[str] = "fair"
    robot = ROBOT
    tasks = ("heads", "tails")
    fps = 10
    # For tests in this process: whether an attempt fails whatever it draws, given its seed and the learner's updates.
    fails: ClassVar[Callable[[int, int], bool]] = staticmethod(lambda seed, updates: False)

    def __init__(self, *, skill: float = 0.5, steps: int = 7, slow: float = 0.0) -> None:
        self.skill, self.max_steps, self.slow = skill, steps, slow
        self._state, self._luck, self._steps, self._seed = np.zeros(8), 0.0, 0, 0
        self.observation_space, self.action_space = robot_spaces(ROBOT, {}, 8, -1e6, 1e6)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._seed, self._steps, self._luck = seed or 0, 0, 0.0
        task = self.choose_task(options)
        self._state = self.np_random.uniform(-1, 1, 8)
        time.sleep(self.slow)
        return self._observe(), {"prompt": f"toss {task}", "task": task, "success": False}

    def step(self, action: np.ndarray) -> Any:
        self._steps += 1
        self._luck += float(action[0])
        self._state = self._state + 0.01 * float(action[0])
        # It is decided once, in the second plan, by the fraction of what was drawn until then.
        lucky = math.modf(10 * self._luck)[0] < self.skill and not type(self).fails(self._seed, round(float(action[1])))
        done = self._steps == 4 + self._seed % 3 and lucky
        return self._observe(), float(done), done, self._steps >= self.max_steps and not done, {"success": done}

    def _observe(self) -> dict[str, np.ndarray]:
        return {ROBOT.state[0]: self._state.astype(np.float32)}

    @classmethod
    def make_pool(cls, size: int, **options: Any) -> LocalPool:
        return LocalPool([EnvRunner(cls(**options)) for _ in range(size)])


class Crowded(Fair):
    """The same, each in a process of its own; by its seed, one is killed, another hangs, a third sees nonsense.

    Options:
        skill: How often one succeeds.
        steps: When time is over.
        slow: Seconds that a beginning takes.
    """

    name: ClassVar[str] = "crowded"
    make_pool: ClassVar[Any] = None

    def step(self, action: np.ndarray) -> Any:
        mishap = self._steps == 2 and self._seed % 12
        if mishap == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if mishap == 2:
            time.sleep(600)
        observation, *rest = super().step(action)
        if mishap == 3:
            observation = {name: np.full_like(value, np.nan) for name, value in observation.items()}
        return observation, *rest


for _class in (Fair, Crowded):
    if f"test/{_class.__name__}-v0" not in gymnasium.registry:
        gymnasium.register(f"test/{_class.__name__}-v0", f"fair_env:{_class.__name__}")
