"""LIBERO from where a demonstration was about to succeed: the cream cheese is held above the bowl, and LIBERO judges.

A policy that knows nothing opens the gripper by chance, in time or too late. So its attempts differ in their outcome.
"""

from pathlib import Path

import gymnasium
import numpy as np

from pirl.envs.base import EnvState
from pirl.envs.libero.env import LiberoEnv

TASK = "put_the_cream_cheese_in_the_bowl"
OPEN, CLOSED = -1.0, 1.0
# Moments of the demonstration from which episodes begin.
BEGINNINGS = 3


def demonstrate(env: LiberoEnv, seed: int) -> list[EnvState]:
    """Fetch the cream cheese from where it lies and hold it above the bowl; the last states of that, as first ones."""
    observation, _ = env.reset(seed=seed, options={"task": TASK})
    hand = observation["state"][:3]
    states: list[EnvState] = []

    def move(target: np.ndarray, gripper: float, steps: int) -> None:
        nonlocal hand
        for _ in range(steps):
            motion = np.clip(12 * (target - hand), -1, 1)  # slower as it gets there
            observation, *_, info = env.step(np.array([*motion, 0, 0, 0, gripper]))
            assert not info["success"]
            hand = observation["state"][:3]
            states.append(env.get_state())

    def place_of(thing: str) -> np.ndarray:
        return np.array(env.simulation.data.body(f"{thing}_main").xpos)

    cheese, up = place_of("cream_cheese_1"), np.array([0, 0, 0.1])
    move(cheese + up, OPEN, 30)
    move(cheese, OPEN, 18)
    move(cheese, CLOSED, 10)
    move(cheese + 1.5 * up, CLOSED, 20)
    above = place_of("akita_black_bowl_1") - (place_of("cream_cheese_1") - hand) * [1, 1, 0]
    move(above + 1.5 * up, CLOSED, 22)
    move(above + 0.7 * up, CLOSED, 18)
    return [{**state, "steps": np.array(0)} for state in states[-BEGINNINGS:]]


def save_states(states: list[EnvState], path: Path) -> Path:
    np.savez(
        path, **{f"{number}/{name}": value for number, state in enumerate(states) for name, value in state.items()}
    )
    return path


class DemonstratedLibero(LiberoEnv):
    """LIBERO with one task and its own judge; an episode begins in one of the saved states, by its seed.

    Options:
        beginnings: The file of the states.
        assets: As in LIBERO.
        max_steps: As in LIBERO.
    """

    def __init__(self, *, beginnings: str, assets: str, max_steps: int) -> None:
        super().__init__(assets=assets, max_steps=max_steps, resolution=56, quality="fast")
        with np.load(beginnings) as saved:
            names = {name.partition("/")[2] for name in saved}
            self._beginnings = [{name: saved[f"{number}/{name}"] for name in names} for number in range(BEGINNINGS)]

    def reset(self, *, seed=None, options=None):
        options = {"state": self._beginnings[(seed or 0) % BEGINNINGS], **(options or {})}
        return super().reset(seed=seed, options=options)


gymnasium.register("test/DemonstratedLibero-v0", DemonstratedLibero)
