"""LIBERO from where a demonstration was about to succeed: the cream cheese is held above the bowl, and LIBERO judges.

A policy that knows nothing opens the gripper by chance, in time or too late. So its attempts differ in their outcome.
"""

import gymnasium
import numpy as np

from pirl.envs.libero.env import LiberoEnv

TASK = "put_the_cream_cheese_in_the_bowl"
OPEN, CLOSED = -1.0, 1.0
# Moments of the demonstration from which episodes begin.
BEGINNINGS = 3


class DemonstratedLibero(LiberoEnv):
    """LIBERO with one task and its own judge; an episode begins near the end of a demonstration, where by its seed.

    Options:
        assets: As in LIBERO.
        max_steps: As in LIBERO.
    """

    def __init__(self, *, assets: str, max_steps: int) -> None:
        super().__init__(assets=assets, max_steps=max_steps, resolution=56, quality="fast")
        self._actions: list[np.ndarray] = []

    def reset(self, *, seed=None, options=None):
        _, info = super().reset(seed=0, options={"task": TASK})
        cameras_on, self.cameras_on = self.cameras_on, False
        if not self._actions:
            self._demonstrate()
            super().reset(seed=0, options={"task": TASK})
        for action in self._actions[: len(self._actions) - (seed or 0) % BEGINNINGS]:
            self.step(action)
        self.cameras_on, self._steps = cameras_on, 0
        return self._observe(), info

    def _demonstrate(self) -> None:
        """Fetch the cream cheese from where it lies and hold it above the bowl."""
        hand = self._observe()["state"][:3]

        def move(target: np.ndarray, gripper: float, steps: int) -> None:
            nonlocal hand
            for _ in range(steps):
                motion = np.clip(12 * (target - hand), -1, 1)  # slower as it gets there
                self._actions.append(np.array([*motion, 0, 0, 0, gripper]))
                observation, *_, info = self.step(self._actions[-1])
                assert not info["success"]
                hand = observation["state"][:3]

        def position_of(thing: str) -> np.ndarray:
            return np.array(self.simulation.data.body(f"{thing}_main").xpos)

        cheese, up = position_of("cream_cheese_1"), np.array([0, 0, 0.1])
        move(cheese + up, OPEN, 30)
        move(cheese, OPEN, 18)
        move(cheese, CLOSED, 10)
        move(cheese + 1.5 * up, CLOSED, 20)
        above = position_of("akita_black_bowl_1") - (position_of("cream_cheese_1") - hand) * [1, 1, 0]
        move(above + 1.5 * up, CLOSED, 22)
        move(above + 0.7 * up, CLOSED, 18)


gymnasium.register("test/DemonstratedLibero-v0", DemonstratedLibero)
