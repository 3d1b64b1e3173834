"""`pirl/Tabletop-v0`: put a colored block into a colored zone, seen by two cameras; one table, or a pool of many."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from gymnasium.utils.seeding import np_random
from jaxtyping import Float, Float32, Int64, UInt8

from pirl.data.robots import get_robot
from pirl.envs.base import EnvObservation, Expert, RobotEnv, Start, robot_spaces
from pirl.envs.experts import ExpertConfig
from pirl.envs.pool import Chunk, ChunkResult, EnvPool, Images, ResetResult, Result, stack_observations
from pirl.envs.tabletop.drawing import OVERHEAD, WRIST, View, draw
from pirl.envs.tabletop.world import Layout, Outcome, TableConfig, TableExperts, Tables, lay_table, step
from pirl.errors import ConfigError

FPS = 10
_ONLY = np.zeros(1, np.int64)
Observed = Literal["pixels", "state"]


class TabletopEnv(RobotEnv):
    """A gripper above a table with colored blocks and zones, in plain numpy.

    Actions are motion in x and y and the gripper (-1 open, 1 closed), within ±1; one step moves 2 cm at most. Reward 1
    on success. The episode truly ends when the right block lies in the right zone, when another one does, and when
    something falls off the table. A grasp that is not centered slips, and the block jumps aside.

    Options:
        objects: colored blocks, 1 to 4; a task may ask for any of them
        zones: colored zones, 1 to 4
        distractors: round objects that no task mentions, 0 to 4
        precision: how close to the center of a block a grasp has to be, in meters
        action_noise: noise on every motion, as a fraction of the largest motion
        max_steps: steps until the episode times out
        layout: "sorted" (every zone and block in its own part of the table) or "free" (anywhere, much harder to learn)
        image_size: pixels along the side of both cameras
        observation: "pixels" (two cameras, gripper) or "state" (true positions, no cameras)
        render_size: pixels along the side of rendered images and videos
        render_mode: for Gymnasium; there is only rgb_array
    """

    name: ClassVar[str] = "pirl/Tabletop-v0"
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": FPS}  # type: ignore[misc]
    fps = FPS

    def __init__(
        self,
        *,
        objects: int = 2,
        zones: int = 2,
        distractors: int = 0,
        precision: float = 0.022,
        action_noise: float = 0.0,
        max_steps: int = 80,
        layout: Layout = "sorted",
        image_size: int = 56,
        observation: Observed = "pixels",
        render_size: int = 480,
        render_mode: Literal["rgb_array"] = "rgb_array",
    ) -> None:
        if render_size < 16:
            raise ConfigError(f"render_size = {render_size} should be at least 16 pixels.")
        config = TableConfig(objects, zones, distractors, precision, action_noise, max_steps, layout)
        self.scene_settings = config, image_size, observation
        self._scene = Scene(1, *self.scene_settings)
        self._experts = TableExperts(1)
        self._render_size = render_size
        self.render_mode = render_mode
        self.robot, self.tasks, self.max_steps = self._scene.robot, config.tasks, config.max_steps
        assert self.robot.state_dim is not None
        cameras = dict.fromkeys(self.robot.cameras.values(), (image_size, image_size))
        self.observation_space, self.action_space = robot_spaces(self.robot, cameras, self.robot.state_dim, -1.0, 1.0)

    @classmethod
    def make_pool(cls, size: int, **options: Any) -> "TabletopPool":
        return TabletopPool(cls(**options), size)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[EnvObservation, dict[str, Any]]:
        super().reset(seed=seed)
        self._scene.reset(0, self.np_random, (options or {}).get("task"))
        prompt = self._scene.prompt(0)
        return self._observe(), {"prompt": prompt, "task": prompt, "success": False}

    def step(self, action: np.ndarray) -> tuple[EnvObservation, float, bool, bool, dict[str, Any]]:
        outcome = self._scene.step(_ONLY, self.check_action(action)[None])
        success = bool(outcome.success[0])
        ended = success or bool(outcome.failed[0])
        return self._observe(), float(success), ended, bool(outcome.truncated[0]), {"success": success}

    def make_expert(self, config: ExpertConfig, seed: int) -> Expert:
        self._experts.begin(0, config, seed)
        return lambda: self._experts.act(self._scene.tables, _ONLY)[0]

    def render(self) -> UInt8[np.ndarray, "size size 3"]:
        view, centers = View(OVERHEAD, self._render_size), np.zeros((1, 2))
        return draw(self._scene.tables, self._scene.config.objects, view, centers)[0]

    def _observe(self) -> EnvObservation:
        images = self._scene.images(_ONLY) if self.cameras_on else {}
        return {name: value[0] for name, value in (images | self._scene.state(_ONLY)).items()}


class Scene:
    """Tables with their cameras and their robot: what the single and the pooled environment have in common."""

    def __init__(self, tables: int, config: TableConfig, image_size: int, observed: Observed) -> None:
        if image_size < 16:
            raise ConfigError(f"image_size = {image_size} should be at least 16 pixels.")
        if observed not in ("pixels", "state"):
            raise ConfigError(f"observation = {observed!r} is neither 'pixels' nor 'state'.")
        self.config = config
        self.robot = get_robot("tabletop" if observed == "pixels" else "tabletop_state")
        self._views = (View(OVERHEAD, image_size), View(WRIST, image_size))
        empty = lay_table(config, 0, 0)
        self.tables = Tables(**{name: np.repeat(value, tables, axis=0) for name, value in empty.arrays().items()})

    def reset(self, row: int, rng: np.random.Generator, task: str | None) -> None:
        seed, chosen = int(rng.integers(2**63)), int(rng.integers(len(self.config.tasks)))
        if task is not None:
            if task not in self.config.tasks:
                known = ", ".join(map(repr, self.config.tasks))
                raise ConfigError(f"the tabletop has no task {task!r}; it has {known}.")
            chosen = self.config.tasks.index(task)
        self.tables.replace(row, lay_table(self.config, seed, chosen))

    def step(self, rows: Int64[np.ndarray, " rows"], actions: Float[np.ndarray, "rows 3"]) -> Outcome:
        tables = self.tables.rows(rows)
        outcome = step(tables, self.config, actions.astype(np.float32))
        for name, value in self.tables.arrays().items():
            value[rows] = getattr(tables, name)
        return outcome

    def prompt(self, row: int) -> str:
        block, zone = self.tables.goal[row]
        return self.config.tasks[block * self.config.zones + zone]

    def images(self, rows: Int64[np.ndarray, " rows"]) -> EnvObservation:
        if not self.robot.cameras or not len(rows):
            return {}
        tables = self.tables.rows(rows)
        centers = (np.zeros_like(tables.gripper), tables.gripper)
        return {
            camera: draw(tables, self.config.objects, view, center)
            for camera, view, center in zip(self.robot.cameras.values(), self._views, centers, strict=True)
        }

    def state(self, rows: Int64[np.ndarray, " rows"]) -> EnvObservation:
        tables = self.tables.rows(rows)
        proprioception = np.concatenate([tables.gripper, tables.opening[:, None]], axis=1).astype(np.float32)
        return {self.robot.state[0]: proprioception if self.robot.cameras else _true_state(tables)}


def _true_state(tables: Tables) -> Float32[np.ndarray, "n 8"]:
    """Gripper, opening, whether it holds the right block, and the vectors to the block and to the zone."""
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


class TabletopPool(EnvPool):
    """Tables in this process; what is queued for several of them is done for all at once."""

    def __init__(self, env: TabletopEnv, size: int) -> None:
        self.size, self.description = size, env.describe()
        self._scene = Scene(size, *env.scene_settings)
        self._experts = TableExperts(self.size)
        self._begun: dict[int, ResetResult] = {}
        self._queued: dict[int, tuple[Chunk, Images]] = {}
        # Slots with an episode under way.
        self._running: set[int] = set()

    def start(self, slot: int, start: Start, expert: ExpertConfig | None = None) -> None:
        self._queued.pop(slot, None)  # of an episode that was abandoned
        self._scene.reset(slot, np_random(start.seed)[0], start.task)
        if expert is not None:
            self._experts.begin(slot, expert, start.seed)
        self._running.add(slot)
        prompt, rows = self._scene.prompt(slot), np.array([slot])
        observation = self._scene.images(rows) | self._scene.state(rows)
        self._begun[slot] = ResetResult({name: value[0] for name, value in observation.items()}, prompt, prompt)

    def execute(self, slot: int, actions: Chunk, *, images: Images = "all") -> None:
        assert slot in self._running, f"slot {slot} has no episode"
        self._queued[slot] = actions, images

    def wait(self, slots: Sequence[int]) -> dict[int, Result]:
        results: dict[int, Result] = {slot: self._begun.pop(slot) for slot in slots if slot in self._begun}
        return results | self._execute({slot: self._queued.pop(slot) for slot in slots if slot in self._queued})

    def _execute(self, queued: Mapping[int, tuple[Chunk, Images]]) -> dict[int, ChunkResult]:
        chunks = {slot: chunk for slot, (chunk, _) in queued.items()}
        lengths = {slot: chunk if isinstance(chunk, int) else len(chunk) for slot, chunk in chunks.items()}
        observations: dict[int, list[EnvObservation]] = {slot: [] for slot in queued}
        actions: dict[int, list[np.ndarray]] = {slot: [] for slot in queued}
        ends: dict[int, tuple[bool, bool, bool]] = {}  # success, terminated, truncated
        for index in range(max(lengths.values(), default=0)):
            stepping = [slot for slot in queued if index < lengths[slot] and not any(ends.get(slot, ()))]
            if not stepping:
                break
            rows = np.array(stepping)
            taken = self._actions(rows, chunks, index)
            outcome = self._scene.step(rows, taken)
            imaged = [slot for slot in stepping if queued[slot][1] == "all" or index == lengths[slot] - 1]
            images = _by_slot(imaged, self._scene.images(np.array(imaged, np.int64)))
            states = _by_slot(stepping, self._scene.state(rows))
            for row, slot in enumerate(stepping):
                observations[slot].append(images.get(slot, {}) | states[slot])
                actions[slot].append(taken[row])
                success = bool(outcome.success[row])
                ends[slot] = success, success or bool(outcome.failed[row]), bool(outcome.truncated[row])
        results = {}
        for slot, (success, terminated, truncated) in ends.items():
            rewards = np.zeros(len(actions[slot]), np.float32)
            rewards[-1] = success
            stacked = stack_observations(observations[slot])
            results[slot] = ChunkResult(stacked, np.stack(actions[slot]), rewards, terminated, truncated, success)
            if terminated or truncated:
                self._running.remove(slot)
        return results

    def _actions(
        self, rows: Int64[np.ndarray, " rows"], chunks: Mapping[int, Chunk], index: int
    ) -> Float32[np.ndarray, "rows 3"]:
        # Experts that do not act now must not draw from their generators either.
        actions = np.zeros((len(rows), 3), np.float32)
        by_expert = np.array([isinstance(chunks[row], int) for row in rows.tolist()])
        if by_expert.any():
            actions[by_expert] = self._experts.act(self._scene.tables, rows[by_expert])
        for position in np.flatnonzero(~by_expert):
            actions[position] = np.asarray(chunks[int(rows[position])])[index]
        return actions


def _by_slot(slots: Sequence[int], observations: EnvObservation) -> dict[int, EnvObservation]:
    return {slot: {name: value[row] for name, value in observations.items()} for row, slot in enumerate(slots)}
