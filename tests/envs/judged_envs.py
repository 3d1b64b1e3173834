"""Simulators with another judge: when time is over chance decides about success, by the last action alone.

No policy that a test can train masters these tasks. But RIPT's way from pictures to updates is the same whoever judges.
"""

import importlib.util
import math
from typing import Any

import gymnasium
import numpy as np

from pirl.envs.base import RobotEnv


class Judged(RobotEnv):
    """To be put before the class of a simulator."""

    _taken = 0

    def reset(self, **arguments: Any) -> Any:
        self._taken = 0
        return super().reset(**arguments)

    def step(self, action: np.ndarray) -> Any:
        observation, reward, *_, info = super().step(action)
        self._taken += 1
        is_over = self._taken >= self.max_steps
        success = is_over and math.modf(1000 * abs(float(np.sum(action))))[0] < 0.5
        return observation, reward, success, is_over and not success, info | {"success": success}


if importlib.util.find_spec("gym_aloha") is not None:
    from pirl.envs.aloha.env import AlohaEnv

    class JudgedAloha(Judged, AlohaEnv):
        """ALOHA with another judge."""

    gymnasium.register("test/JudgedAloha-v0", JudgedAloha)

if importlib.util.find_spec("libero") is not None:
    from pirl.envs.libero.env import LiberoEnv

    class JudgedLibero(Judged, LiberoEnv):
        """LIBERO with another judge."""

    gymnasium.register("test/JudgedLibero-v0", JudgedLibero)
