"""The physics of the tabletop, and its scripted expert: many tables at once, as arrays."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, UInt64

from pirl.envs.experts import ExpertConfig, Flaws
from pirl.errors import ConfigError

# The first blocks and the first zones have different colors: that is the easy end. More of them share some.
BLOCK_COLORS = ("red", "yellow", "blue", "green")
ZONE_COLORS = ("blue", "green", "red", "yellow")
TABLE = 0.20  # half the side of the table, in metres
REACH = 0.19  # how far the gripper goes
BLOCK = 0.026  # half the side of a block
ZONE = 0.055  # half the side of a zone
STEP = 0.02  # the farthest the gripper moves in one step
FINGERS = 0.036  # how far the open fingers stand from the middle
FINGER_SPEED = 1 / 3  # of the way from open to closed, in one step
WIDTH_OF_BLOCK = BLOCK / FINGERS  # the opening at which closing fingers meet a block

Layout = Literal["sorted", "free"]


@dataclass(frozen=True)
class TableConfig:
    objects: int = 2
    zones: int = 2
    distractors: int = 0
    # A grasp holds if the gripper is this close to the middle of a block, in each direction.
    precision: float = 0.022
    # Standard deviation of what the motors add to every motion, as a share of the largest.
    action_noise: float = 0.0
    max_steps: int = 80
    # "sorted": every zone and block stays in its own part of the table; "free": they are anywhere.
    layout: Layout = "sorted"

    def __post_init__(self) -> None:
        for name, most in (("objects", len(BLOCK_COLORS)), ("zones", len(ZONE_COLORS)), ("distractors", 4)):
            least = 0 if name == "distractors" else 1
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name} = {getattr(self, name)} should be {least} to {most}.")
        if self.layout not in get_args(Layout):
            raise ConfigError(f"layout = {self.layout!r} is none of {', '.join(get_args(Layout))}.")
        bodies = self.objects + self.distractors
        if self.layout == "sorted" and (self.zones > 3 or bodies > 5):
            raise ConfigError(
                f"{self.zones} zones, or {bodies} objects and distractors, do not fit side by side: at most 3 and 5, or "
                "layout = free."
            )
        if 2 * self.zones + bodies > 14:
            raise ConfigError(f"{self.zones} zones, {bodies} objects and distractors leave no room on the table.")
        if not 0 < self.precision <= BLOCK:
            raise ConfigError(f"precision = {self.precision} should be more than 0 and at most {BLOCK} metres.")
        if not 0 <= self.action_noise < np.inf or self.max_steps < 1:
            raise ConfigError(f"action_noise = {self.action_noise}, max_steps = {self.max_steps} should be positive.")

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(
            f"put the {block} block in the {zone} zone"
            for block in BLOCK_COLORS[: self.objects]
            for zone in ZONE_COLORS[: self.zones]
        )


@dataclass
class Tables:
    """The state of n tables. Bodies are the blocks, then the distractors."""

    gripper: Float64[np.ndarray, "n 2"]
    opening: Float64[np.ndarray, " n"]  # 1 open, 0 closed
    bodies: Float64[np.ndarray, "n bodies 2"]
    zones: Float64[np.ndarray, "n zones 2"]
    held: Int64[np.ndarray, " n"]  # the body between the fingers, -1 for none
    grip: Float64[np.ndarray, "n 2"]  # where it is, seen from the gripper
    goal: Int64[np.ndarray, "n 2"]  # block, zone
    steps: Int64[np.ndarray, " n"]
    key: UInt64[np.ndarray, " n"]  # what the motors' noise comes from

    def __len__(self) -> int:
        return len(self.steps)

    def rows(self, rows: np.ndarray | slice) -> "Tables":
        return Tables(**{name: np.array(value[rows]) for name, value in self.arrays().items()})

    def replace(self, row: int, source: "Tables") -> None:
        for name, value in self.arrays().items():
            value[row] = getattr(source, name)[0]

    def arrays(self) -> dict[str, np.ndarray]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@dataclass(frozen=True)
class Outcome:
    success: Bool[np.ndarray, " n"]
    failed: Bool[np.ndarray, " n"]  # the task cannot be done any more
    truncated: Bool[np.ndarray, " n"]


def lay_table(config: TableConfig, seed: int, task: int) -> Tables:
    """A table with everything at random positions, none too close to another, and the gripper anywhere."""
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0x7AB1E]))
    bodies = config.objects + config.distractors
    if config.layout == "free":
        positions = _scatter(rng, np.array([ZONE] * config.zones + [BLOCK] * bodies))
    else:
        positions = np.concatenate(
            [_line_up(rng, config.zones, ZONE, 0.075, 0.13), _line_up(rng, bodies, BLOCK, -0.16, -0.02)]
        )
    start = rng.uniform(-0.15, 0.15, 2)
    goal = np.array([[task // config.zones, task % config.zones]])
    return Tables(
        gripper=start[None],
        opening=np.ones(1),
        bodies=positions[None, config.zones :],
        zones=positions[None, : config.zones],
        held=np.full(1, -1),
        grip=np.zeros((1, 2)),
        goal=goal,
        steps=np.zeros(1, np.int64),
        key=rng.integers(2**63, size=1, dtype=np.uint64),
    )


def _line_up(
    rng: np.random.Generator, count: int, half: float, lowest: float, highest: float
) -> Float64[np.ndarray, "count 2"]:
    """Positions side by side, each somewhere in its own share of the table's width, between two heights."""
    share = 2 * TABLE / count
    room = share / 2 - half - 0.008
    middle = (np.arange(count) + 0.5) * share - TABLE
    return np.stack([middle + rng.uniform(-room, room, count), rng.uniform(lowest, highest, count)], axis=1)


def _scatter(rng: np.random.Generator, radii: Float64[np.ndarray, " things"]) -> Float64[np.ndarray, "things 2"]:
    """Positions of squares of these half sides, at least a finger's width apart, nothing near the edge."""
    while True:
        positions = np.empty((len(radii), 2))
        for index, radius in enumerate(radii):
            limit = TABLE - radius - 0.015
            for _ in range(50):
                positions[index] = rng.uniform(-limit, limit, 2)
                gaps = np.abs(positions[:index] - positions[index]).max(axis=1) - radii[:index] - radius
                if (gaps > 0.012).all():
                    break
            else:
                break  # no room left: begin again
        else:
            return positions


def step(tables: Tables, config: TableConfig, actions: Float32[np.ndarray, "n 3"]) -> Outcome:
    """Let one step pass, in place. Actions are motion in x and y, and the gripper (-1 open, 1 closed), within ±1."""
    rows = np.arange(len(tables))
    actions = np.clip(actions.astype(np.float64), -1.0, 1.0)
    motion = actions[:, :2]
    if config.action_noise:
        motion = motion + config.action_noise * _normal(tables.key, tables.steps)
    tables.gripper[:] = np.clip(tables.gripper + STEP * motion, -REACH, REACH)

    was_open = tables.opening >= WIDTH_OF_BLOCK
    wanted = (1.0 - actions[:, 2]) / 2.0
    opening = tables.opening + np.clip(wanted - tables.opening, -FINGER_SPEED, FINGER_SPEED)
    released = (tables.held >= 0) & (opening > WIDTH_OF_BLOCK)
    dropped = np.where(released, tables.held, -1)
    tables.held[released] = -1
    _close(tables, config, was_open & (opening < WIDTH_OF_BLOCK) & (tables.held < 0))
    holds = tables.held >= 0
    tables.opening[:] = np.where(holds, WIDTH_OF_BLOCK, opening)
    tables.bodies[rows[holds], tables.held[holds]] = (tables.gripper + tables.grip)[holds]
    tables.steps += 1

    block, zone = tables.goal.T
    goal_zone = tables.zones[rows, zone]
    inside = np.abs(tables.bodies - goal_zone[:, None]).max(axis=2) <= ZONE - BLOCK / 2
    success = released & (dropped == block) & inside[rows, block]
    wrong = released & (dropped != block) & inside[rows, dropped]
    resting = np.arange(tables.bodies.shape[1]) != tables.held[:, None]
    fallen = (resting & (np.abs(tables.bodies).max(axis=2) > TABLE)).any(axis=1)
    failed = (wrong | fallen) & ~success
    return Outcome(success, failed, (tables.steps >= config.max_steps) & ~success & ~failed)


def _close(tables: Tables, config: TableConfig, closing: Bool[np.ndarray, " n"]) -> None:
    """Fingers meet: what is well between them is held, what is not slips out to the side."""
    rows = np.flatnonzero(closing)
    away = tables.bodies[rows] - tables.gripper[rows, None]
    off_centre = np.abs(away).max(axis=2)
    nearest = off_centre.argmin(axis=1)
    distance, away = off_centre[np.arange(len(rows)), nearest], away[np.arange(len(rows)), nearest]
    firm = distance <= config.precision
    tables.held[rows[firm]] = nearest[firm]
    tables.grip[rows[firm]] = away[firm]
    slips = ~firm & (distance < FINGERS)
    direction = away[slips] / np.maximum(np.linalg.norm(away[slips], axis=1, keepdims=True), 1e-9)
    tables.bodies[rows[slips], nearest[slips]] += 0.03 * direction


def _normal(key: UInt64[np.ndarray, " n"], steps: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, "n 2"]:
    """Two standard normal numbers for each table and step, by hashing: there is no generator with a state."""
    counter = (2 * steps.astype(np.uint64))[:, None] + np.arange(2, dtype=np.uint64)
    bits = _mix(key[:, None] + (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53
    radius, angle = np.sqrt(-2.0 * np.log(uniform[:, 0])), 2.0 * np.pi * uniform[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)


def _mix(bits: UInt64[np.ndarray, "n two"]) -> UInt64[np.ndarray, "n two"]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


# --- the expert -------------------------------------------------------------------------------------------------------

_CLOSE_ENOUGH = 0.005  # metres
_CARE = 0.5  # of the way that is left, done in one step
_USUAL_LENGTH = 30  # steps


class TableExperts:
    """Experts for n tables. Their actions depend on nothing but what can be seen, and on their flaws."""

    def __init__(self, tables: int) -> None:
        self._rngs = [np.random.default_rng(0)] * tables
        self._pick_error, self._place_error = np.zeros((2, tables, 2))
        self._noise = np.zeros(tables)
        self._late = np.zeros(tables, np.int64)
        self._stops_after = np.full(tables, np.iinfo(np.int64).max)
        self._detour = np.zeros((tables, 2), np.int64)  # first step, and the step after the last
        self._direction = np.zeros((tables, 2))

    def begin(self, row: int, config: ExpertConfig, seed: int) -> None:
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
