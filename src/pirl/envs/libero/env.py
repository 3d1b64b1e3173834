"""LIBERO as a Gymnasium environment, with the names and numbers of OpenPI's LIBERO policies."""

from typing import Any, ClassVar, Literal, get_args

import numpy as np

from pirl.envs.base import EnvObservation, EnvState, RobotEnv, robot_spaces
from pirl.envs.libero.init_states import read_init_states
from pirl.envs.libero.observations import CAMERAS, ROBOT, STATE_DIM, robot_observation
from pirl.envs.libero.package import LiberoPackage, Suite, find_assets, task_prompt
from pirl.envs.libero.simulation import Simulation
from pirl.envs.mujoco_rendering import LARGEST, Quality
from pirl.errors import ConfigError, ObservationError

# OpenPI's limits; each leaves some room above the longest demonstration of the suite.
MAX_STEPS: dict[Suite, int] = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}


class LiberoEnv(RobotEnv):
    """A Panda arm at a table, told in words what to do: LIBERO as OpenPI evaluates policies in it.

    An action is 7 numbers in [-1, 1] at 20 Hz: a motion of the gripper (5 cm per unit), a rotation (0.5 rad per unit),
    and whether the gripper closes (1) or opens (-1). OpenPI's converted dataset says 10 frames per second; the actions in
    it were recorded at 20. The reward is 1 when the task is done, which ends the episode, and else 0.

    Every task comes with 50 initial states; an episode begins in number `seed % 50`, so that seeds 0 to 49 are the
    episodes of LIBERO's benchmark, and OpenPI's.

    Options:
        suite: Which tasks: libero_spatial, libero_object, libero_goal or libero_10 with 10 each, or libero_90.
        resolution: Height and width of the two cameras' pictures; 256 in OpenPI's data.
        assets: Folder of LIBERO's meshes and textures. Without it: PIRL_LIBERO_ASSETS, the package's own folder,
            ~/.cache/libero/assets.
        max_steps: Steps until an episode is truncated. Without it, OpenPI's: 220, 280, 300, 520 in the order above;
            400 for libero_90.
        settle_steps: Steps without motion before an episode, in which objects come to rest. They do not count.
        quality: "stock" renders what policies for LIBERO were trained on; "fast" leaves out shadows, reflections and
            multisampling, and takes half the time on a CPU.
        render_mode: For Gymnasium; there is only rgb_array.
    """

    name: ClassVar[str] = "pirl/Libero-v0"
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 20}  # type: ignore[misc]
    robot = ROBOT
    fps = 20

    def __init__(
        self,
        *,
        suite: Suite = "libero_goal",
        resolution: int = 256,
        assets: str | None = None,
        max_steps: int | None = None,
        settle_steps: int = 10,
        quality: Quality = "stock",
        render_mode: Literal["rgb_array"] = "rgb_array",
    ) -> None:
        if suite not in get_args(Suite):
            raise ConfigError(f"suite = {suite!r} is none of {', '.join(get_args(Suite))}.")
        if quality not in get_args(Quality):
            raise ConfigError(f"quality = {quality!r} is none of {', '.join(get_args(Quality))}.")
        self.render_mode = render_mode
        self.max_steps = MAX_STEPS[suite] if max_steps is None else max_steps
        limits = (("max_steps", self.max_steps, 1, 10**9), ("settle_steps", settle_steps, 0, 10**9))
        for name, value, low, high in (*limits, ("resolution", resolution, 1, LARGEST)):
            if not low <= value <= high:
                raise ConfigError(f"{name} = {value} should be between {low} and {high}.")
        self._package = LiberoPackage()
        self._assets = find_assets(assets, self._package.root)
        self._suite, self._resolution, self._settle_steps, self._quality = suite, resolution, settle_steps, quality
        self.tasks = self._package.tasks(suite)
        size = (resolution, resolution)
        self.observation_space, self.action_space = robot_spaces(
            self.robot, {name: size for name in CAMERAS}, STATE_DIM, -1.0, 1.0
        )
        # Only of the last task: each takes seconds to load, and hundreds of megabytes.
        self._simulation: Simulation | None = None
        self._task: str | None = None
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[EnvObservation, dict[str, Any]]:
        """Begin an episode: in the initial state that the seed says, or in a state that `get_state` gave."""
        super().reset(seed=seed)
        state = (options or {}).get("state")
        if state is None:
            task = self.choose_task(options)
            number = int(self.np_random.integers(2**31)) if seed is None else seed
            init_states = read_init_states(self._package.init_states_file(self._suite, task))
            self._load(task).reset(number, init_states[number % len(init_states)], self._settle_steps)
            self._steps = 0
        else:
            self._restore(state)
        return self._observe(), {"prompt": task_prompt(self.task), "task": self.task, "success": False}

    def step(self, action: np.ndarray) -> tuple[EnvObservation, float, bool, bool, dict[str, Any]]:
        """Move for a twentieth of a second."""
        action = np.asarray(action, np.float64)
        if action.shape != self.action_space.shape or not np.isfinite(action).all():
            raise ObservationError(f"an action of LIBERO is 7 finite numbers, not {action}.")
        success = self.simulation.step(action)
        self._steps += 1
        truncated = not success and self._steps >= self.max_steps
        return self._observe(), float(success), success, truncated, {"success": success, "task": self.task}

    def get_state(self) -> EnvState:
        """The task, the steps taken, and all that the simulator and the robot's controller remember."""
        counted = {"task": np.array(self.tasks.index(self.task)), "steps": np.array(self._steps)}
        return counted | self.simulation.get_state()

    def render(self) -> np.ndarray:
        """The table as the main camera sees it, left and right as they are."""
        return self.simulation.render(CAMERAS["image"])

    def close(self) -> None:
        """Free the simulator and its cameras."""
        if self._simulation is not None:
            self._simulation.close()
        self._simulation = self._task = None

    @property
    def task(self) -> str:
        """The current task."""
        assert self._task is not None, "reset() comes first"
        return self._task

    @property
    def simulation(self) -> Simulation:
        """The simulator of the current task."""
        assert self._simulation is not None, "reset() comes first"
        return self._simulation

    def _load(self, task: str) -> Simulation:
        if self._simulation is None or task != self._task:
            self.close()
            description = self._package.description_file(self._suite, task)
            self._simulation = Simulation(self._package, self._assets, description, self._resolution, self._quality)
            self._task = task
        return self._simulation

    def _restore(self, state: EnvState) -> None:
        try:
            task, steps = self.tasks[int(state["task"])], int(state["steps"])
        except (KeyError, IndexError) as error:
            raise ConfigError(
                "this state is not one of LIBERO's; use what get_state() of the environment gave."
            ) from error
        self._load(task).set_state(state)
        self._steps = steps

    def _observe(self) -> EnvObservation:
        return robot_observation(self.simulation.observe(cameras_on=self.cameras_on))
