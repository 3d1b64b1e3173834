"""A tabletop in a process of its own that dies in every second episode, after three steps."""

import os
from typing import Any

import gymnasium

from pirl.envs.tabletop.env import TabletopEnv

ID = "crashing_env:test/CrashingTabletop-v0"


class CrashingTabletop(TabletopEnv):
    make_pool = None
    _seed = _steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._seed, self._steps = seed or 0, 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._seed % 2 and self._steps == 3:
            os._exit(3)
        return super().step(action)


gymnasium.register("test/CrashingTabletop-v0", "crashing_env:CrashingTabletop")
