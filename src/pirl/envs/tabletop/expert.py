"""The scripted expert of the tabletop: what it does depends on nothing but what can be seen, and its flaws."""

import numpy as np
from jaxtyping import Float32, Float64, Int64

from pirl.envs.experts import ExpertConfig, Flaws
from pirl.envs.tabletop.world import STEP, WIDTH_OF_BLOCK, Tables

_CLOSE_ENOUGH = 0.005  # metres
_CARE = 0.5  # of the way that is left, done in one step
_USUAL_LENGTH = 30  # steps


class TableExperts:
    """Experts for n tables; each is told anew when an episode begins."""

    def __init__(self, tables: int) -> None:
        self._rngs = [np.random.default_rng(0)] * tables
        self._pick_error, self._place_error = np.zeros((2, tables, 2))
        self._noise = np.zeros(tables)
        self._late = np.zeros(tables, np.int64)
        self._stops_after = np.full(tables, np.iinfo(np.int64).max)
        self._detour = np.zeros((tables, 2), np.int64)  # first step, and the step after the last
        self._direction = np.zeros((tables, 2))

    def begin(self, row: int, config: ExpertConfig, seed: int) -> None:
        """A new episode on one table."""
        rng = self._rngs[row] = np.random.default_rng(np.random.SeedSequence([seed, 0xE86E87]))
        flaws = Flaws.draw(config, rng, _USUAL_LENGTH)
        self._pick_error[row] = flaws.aim[:2]
        # It puts down with another error than it picks up.
        self._place_error[row] = rng.permutation(flaws.aim)[:2] * rng.choice([-1, 1], 2)
        self._noise[row], self._late[row] = flaws.noise, flaws.late
        self._stops_after[row] = np.iinfo(np.int64).max if flaws.stops_after is None else flaws.stops_after
        self._detour[row] = flaws.detour.start, flaws.detour.stop
        self._direction[row] = flaws.direction[:2] / np.linalg.norm(flaws.direction[:2])

    def act(self, tables: Tables, rows: Int64[np.ndarray, " rows"]) -> Float32[np.ndarray, "rows 3"]:
        """What those of some of the tables do now."""
        tables = tables.rows(rows)
        actions = _best_actions(tables, self._pick_error[rows], self._place_error[rows])
        waits = (tables.steps < self._late[rows]) | (tables.steps >= self._stops_after[rows])
        first, last = self._detour[rows].T
        wanders = (tables.steps >= first) & (tables.steps < last)
        # Waiting is holding still, and wandering off is leaving the task: the fingers stay as they are.
        actions[waits] = 0.0
        actions[wanders, :2] = self._direction[rows][wanders]
        idle = waits | wanders
        actions[idle, 2] = np.where(tables.held >= 0, 1.0, 1.0 - 2.0 * tables.opening)[idle]
        for index in np.flatnonzero(self._noise[rows]):
            actions[index, :2] += self._noise[rows[index]] * self._rngs[rows[index]].normal(size=2)
        return np.clip(actions, -1.0, 1.0).astype(np.float32)


def _best_actions(
    tables: Tables, pick_error: Float64[np.ndarray, "n 2"], place_error: Float64[np.ndarray, "n 2"]
) -> Float64[np.ndarray, "n 3"]:
    """Go to the block, close; go to the zone, open. Fingers that closed on nothing, or on another block, open again."""
    rows = np.arange(len(tables))
    block, zone = tables.goal.T
    carries = tables.held == block
    body = tables.bodies[rows, block]
    way = np.where(carries[:, None], tables.zones[rows, zone] + place_error - body, body + pick_error - tables.gripper)
    there = np.abs(way).max(axis=1) < _CLOSE_ENOUGH
    missed = ~carries & (tables.opening < WIDTH_OF_BLOCK - 1e-9) | (tables.held >= 0) & ~carries
    close = np.where(carries, ~there, there & ~missed)
    # Straight towards the target, slowing down before it, as a careful person does.
    speed = _CARE * way / STEP
    speed /= np.maximum(1.0, np.abs(speed).max(axis=1, keepdims=True))
    return np.concatenate([speed, np.where(close, 1.0, -1.0)[:, None]], axis=1)
