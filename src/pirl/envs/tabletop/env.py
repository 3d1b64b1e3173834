"""`pirl/Tabletop-v0`: put a coloured block into a coloured zone, seen by two cameras; one table, or many at once."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
from gymnasium.utils.seeding import np_random
from gymnasium.vector.utils import batch_space
from jaxtyping import Bool, Float, Float64, UInt8

from pirl.envs.base import EnvObservation, EnvState, Expert, RobotEnv, robot_spaces
from pirl.envs.experts import ExpertConfig
from pirl.envs.tabletop.expert import TableExperts
from pirl.envs.tabletop.pool import TabletopPool
from pirl.envs.tabletop.scene import Scene, Seen, task_in
from pirl.envs.tabletop.world import Layout, TableConfig
from pirl.errors import ConfigError

FPS = 10
_ONLY = np.zeros(1, np.int64)


class TabletopEnv(RobotEnv):
    """A gripper above a table with coloured blocks and zones, in plain numpy.

    Actions are motion in x and y and the gripper (-1 open, 1 closed), within ±1; one step moves 2 cm at most. Reward 1
    on success. The episode truly ends when the right block lies in the right zone, when another one does, and when
    something falls off the table. A grasp that is not centred slips, and the block jumps aside.

    Options:
        objects: coloured blocks, 1 to 4; a task may ask for any of them
        zones: coloured zones, 1 to 4
        distractors: round objects that no task mentions, 0 to 4
        precision: how close to the centre of a block a grasp has to be, in metres
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
        observation: Seen = "pixels",
        render_size: int = 480,
        render_mode: Literal["rgb_array"] = "rgb_array",
    ) -> None:
        if render_size < 16:
            raise ConfigError(f"render_size = {render_size}: nothing can be seen below 16 pixels.")
        config = TableConfig(objects, zones, distractors, precision, action_noise, max_steps, layout)
        self._scene = Scene(1, config, image_size, observation)
        self._experts = TableExperts(1)
        self._render_size = render_size
        self.render_mode = render_mode
        self.robot, self.tasks, self.max_steps = self._scene.robot, config.tasks, config.max_steps
        self.observation_space, self.action_space = spaces_of(self._scene)

    @classmethod
    def make_pool(cls, size: int, **options: Any) -> TabletopPool:
        """Many tables in one process."""
        env = cls(**options)
        return TabletopPool(env.describe(), Scene(size, env._scene.config, env._scene.image_shape[0], env._scene.seen))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[EnvObservation, dict[str, Any]]:
        """Begin an episode, or go on from a state."""
        super().reset(seed=seed)
        if options and options.get("state") is not None:
            self._scene.set_state(0, options["state"], None if seed is None else self.np_random)
        else:
            self._scene.lay(0, self.np_random, task_in(options))
        prompt = self._scene.prompt(0)
        return self._observe(), {"prompt": prompt, "task": prompt, "success": False}

    def step(self, action: np.ndarray) -> tuple[EnvObservation, float, bool, bool, dict[str, Any]]:
        """Let one step pass."""
        outcome = self._scene.step(_ONLY, np.asarray(action, np.float32)[None])
        success = bool(outcome.success[0])
        ended = success or bool(outcome.failed[0])
        return self._observe(), float(success), ended, bool(outcome.truncated[0]), {"success": success}

    def get_state(self) -> EnvState:
        """All that decides how the episode goes on."""
        return self._scene.state(0)

    def make_expert(self, config: ExpertConfig, seed: int) -> Expert:
        """A scripted expert for the episode that has just begun."""
        self._experts.begin(0, config, seed)
        return lambda: self._experts.act(self._scene.tables, _ONLY)[0]

    def render(self) -> UInt8[np.ndarray, "size size 3"]:
        """The table from above."""
        return self._scene.render(0, self._render_size)

    def _observe(self) -> EnvObservation:
        observe = self._scene.observe if self.cameras_on else self._scene.feel
        return {name: value[0] for name, value in observe(_ONLY).items()}


class TabletopVectorEnv(gymnasium.vector.VectorEnv[EnvObservation, np.ndarray, Any]):
    """Many tables in step, as a native vector environment; row i seeded with s is the single environment seeded with s.

    A table whose episode ended begins the next one at the following step, whose action does not count.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]
        "render_modes": [],
        "render_fps": FPS,
        "autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP,
    }

    def __init__(self, num_envs: int = 1, **options: Any) -> None:
        single = TabletopEnv(**options)
        self.num_envs = num_envs
        scene = single._scene
        self._scene = Scene(num_envs, scene.config, scene.image_shape[0], scene.seen)
        self.single_observation_space, self.single_action_space = single.observation_space, single.action_space
        self.observation_space = batch_space(single.observation_space, num_envs)
        self.action_space = batch_space(single.action_space, num_envs)
        self._rngs = [np_random()[0] for _ in range(num_envs)]
        self._ended = np.zeros(num_envs, bool)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[EnvObservation, dict[str, Any]]:
        """Begin an episode on every table."""
        if seed is not None:
            seeds = list(seed) if isinstance(seed, Sequence) else [int(seed) + row for row in range(self.num_envs)]
            for row, one in zip(range(self.num_envs), seeds, strict=True):
                if one is not None:
                    self._rngs[row] = np_random(one)[0]
        every = np.ones(self.num_envs, bool)
        return self._begin(every, options), self._info(every, np.zeros(self.num_envs, bool))

    def step(
        self, actions: Float[np.ndarray, "n 3"]
    ) -> tuple[
        EnvObservation, Float64[np.ndarray, " n"], Bool[np.ndarray, " n"], Bool[np.ndarray, " n"], dict[str, Any]
    ]:
        """Let one step pass on every table."""
        begins, going = self._ended.copy(), np.flatnonzero(~self._ended)
        success, failed, truncated = np.zeros((3, self.num_envs), bool)
        if len(going):
            outcome = self._scene.step(going, np.asarray(actions)[going])
            success[going], failed[going], truncated[going] = outcome.success, outcome.failed, outcome.truncated
        observation = self._begin(begins, None)
        self._ended = success | failed | truncated
        return observation, success.astype(np.float64), success | failed, truncated, self._info(begins, success)

    def _begin(self, rows: Bool[np.ndarray, " n"], options: dict[str, Any] | None) -> EnvObservation:
        for row in np.flatnonzero(rows):
            self._scene.lay(int(row), self._rngs[row], task_in(options))
        self._ended &= ~rows
        return self._scene.observe(np.arange(self.num_envs))

    def _info(self, begun: Bool[np.ndarray, " n"], success: Bool[np.ndarray, " n"]) -> dict[str, Any]:
        info: dict[str, Any] = {"success": success, "_success": np.ones(self.num_envs, bool)}
        if begun.any():
            prompts = np.array([self._scene.prompt(row) for row in range(self.num_envs)], object)
            info |= {"prompt": prompts, "_prompt": begun.copy(), "task": prompts, "_task": begun.copy()}
        return info


def spaces_of(scene: Scene) -> tuple[gymnasium.Space[EnvObservation], gymnasium.spaces.Box]:
    """Of one table."""
    assert scene.robot.state_dim is not None
    cameras = dict.fromkeys(scene.robot.cameras.values(), scene.image_shape)
    return robot_spaces(scene.robot, cameras, scene.robot.state_dim, -1.0, 1.0)
