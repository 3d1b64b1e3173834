"""Tables with their cameras: what the single, the vector and the pooled environment have in common."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Float32, Int64, UInt8

from pirl.data.robots import get_robot
from pirl.envs.base import EnvObservation, EnvState
from pirl.envs.tabletop.drawing import OVERHEAD, WRIST, View, draw
from pirl.envs.tabletop.world import Outcome, TableConfig, Tables, lay_table, step
from pirl.errors import ConfigError

Seen = Literal["pixels", "state"]


class Scene:
    """n tables, what is seen of them, and the robot that works on them."""

    def __init__(self, tables: int, config: TableConfig, image_size: int, seen: Seen) -> None:
        if image_size < 16:
            raise ConfigError(f"image_size = {image_size}: nothing can be seen below 16 pixels.")
        if seen not in ("pixels", "state"):
            raise ConfigError(f"observation = {seen!r} is neither 'pixels' nor 'state'.")
        self.config = config
        self.robot = get_robot("tabletop" if seen == "pixels" else "tabletop_state")
        self.seen: Seen = seen
        self.image_shape = (image_size, image_size)
        self._views = (View(OVERHEAD, image_size), View(WRIST, image_size))
        empty = lay_table(config, 0, 0)
        self.tables = Tables(**{name: np.repeat(value, tables, axis=0) for name, value in empty.arrays().items()})

    def lay(self, row: int, rng: np.random.Generator, task: str | None) -> None:
        """Begin an episode on one table."""
        seed = int(rng.integers(2**63))
        chosen = int(rng.integers(len(self.config.tasks)))
        if task is not None:
            if task not in self.config.tasks:
                raise ConfigError(
                    f"the tabletop has no task {task!r}; it has {', '.join(map(repr, self.config.tasks))}."
                )
            chosen = self.config.tasks.index(task)
        self.tables.replace(row, lay_table(self.config, seed, chosen))

    def state(self, row: int) -> EnvState:
        """All that decides how one table goes on."""
        return {name: value[row].copy() for name, value in self.tables.arrays().items()}

    def set_state(self, row: int, state: EnvState, rng: np.random.Generator | None) -> None:
        """Go on from a state; with a generator, what is still to be random comes from it."""
        arrays = self.tables.arrays()
        for name, value in arrays.items():
            if name not in state or np.shape(state[name]) != value[row].shape:
                raise ConfigError(
                    f"this is no state of such a tabletop: {name} should have the shape {value[row].shape}, and has "
                    f"{np.shape(state[name]) if name in state else 'no value'}. Were objects, zones or distractors other?"
                )
        for name, value in arrays.items():
            value[row] = state[name]
        if rng is not None:
            self.tables.key[row] = rng.integers(2**63, dtype=np.uint64)

    def step(self, rows: Int64[np.ndarray, " rows"], actions: Float[np.ndarray, "rows 3"]) -> Outcome:
        """Let one step pass on some of the tables."""
        if not np.isfinite(actions).all():
            raise ConfigError(
                f"an action of the tabletop is not finite: {actions[~np.isfinite(actions).all(axis=1)][0]}"
            )
        tables = self.tables.rows(rows)
        outcome = step(tables, self.config, actions.astype(np.float32))
        for name, value in self.tables.arrays().items():
            value[rows] = getattr(tables, name)
        return outcome

    def prompt(self, row: int) -> str:
        """What is to be done on one table, in words."""
        block, zone = self.tables.goal[row]
        return self.config.tasks[block * self.config.zones + zone]

    def observe(self, rows: Int64[np.ndarray, " rows"]) -> EnvObservation:
        """What is seen and felt on some of the tables."""
        return self.look(rows) | self.feel(rows)

    def look(self, rows: Int64[np.ndarray, " rows"]) -> EnvObservation:
        """The cameras' pictures of some of the tables."""
        if not self.robot.cameras or not len(rows):
            return {}
        tables = self.tables.rows(rows)
        centres = (np.zeros_like(tables.gripper), tables.gripper)
        return {
            camera: draw(tables, self.config.objects, view, at)
            for camera, view, at in zip(self.robot.cameras.values(), self._views, centres, strict=True)
        }

    def feel(self, rows: Int64[np.ndarray, " rows"]) -> EnvObservation:
        """The states of some of the tables."""
        tables = self.tables.rows(rows)
        proprioception = np.concatenate([tables.gripper, tables.opening[:, None]], axis=1).astype(np.float32)
        return {self.robot.state[0]: proprioception if self.robot.cameras else _true_state(tables)}

    def render(self, row: int, size: int) -> UInt8[np.ndarray, "size size 3"]:
        """A picture of one table for people."""
        return draw(self.tables.rows(slice(row, row + 1)), self.config.objects, View(OVERHEAD, size), np.zeros((1, 2)))[
            0
        ]


def _true_state(tables: Tables) -> Float32[np.ndarray, "n 8"]:
    """Gripper, opening, whether it holds the right block, and the ways to the block and to the zone."""
    rows = np.arange(len(tables))
    block, zone = tables.goal.T
    return np.concatenate(
        [
            tables.gripper,
            tables.opening[:, None],
            (tables.held == block)[:, None],
            tables.bodies[rows, block] - tables.gripper,
            tables.zones[rows, zone] - tables.gripper,
        ],
        axis=1,
    ).astype(np.float32)


def task_in(options: Mapping[str, Any] | None) -> str | None:
    """The task that the options of a reset name."""
    task = (options or {}).get("task")
    return None if task is None else str(task)
