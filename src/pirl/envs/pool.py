"""Many environments at once: what runs one of them, the interface of a pool, and how one is opened."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import numpy as np
from jaxtyping import Float32

from pirl.envs.base import EnvDescription, EnvObservation, Expert, RobotEnv, Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.registry import EnvConfig, find_env_class
from pirl.errors import ConfigError, EnvError, UserError
from pirl.processes import usable_cores

T = TypeVar("T")
PoolBackend = Literal["local", "ray"]
# Which observations of a chunk have images: all, or only the one after the last action, for the policy.
Images = Literal["all", "last"]
# Actions to take, or a number of steps of the expert.
Chunk = Float32[np.ndarray, "k action_dim"] | int


@dataclass(frozen=True)
class ResetResult:
    observation: EnvObservation
    prompt: str
    task: str


@dataclass(frozen=True)
class ChunkResult:
    """The result of executing actions, fewer if the episode ends. The observations are those AFTER each action.

    With `images="last"` each camera has one image, or is missing if the episode ended before.
    """

    observations: EnvObservation
    actions: Float32[np.ndarray, "k action_dim"]
    rewards: Float32[np.ndarray, " k"]
    terminated: bool
    truncated: bool
    success: bool


@dataclass(frozen=True)
class EpisodeFailed:
    """An episode that cannot go on, after a crash, a hang, an exception or NaN; the slot can be started again."""

    reason: str


Result = ResetResult | ChunkResult | EpisodeFailed


def stack_observations(observations: Sequence[EnvObservation]) -> EnvObservation:
    return {name: np.stack([one[name] for one in observations if name in one]) for name in observations[-1]}


class EnvRunner:
    """Runs episodes of one environment; invalid observations and rewards are an `EnvError`.

    `on_step` is called after every reset and step.
    """

    def __init__(self, env: RobotEnv, on_step: Callable[[], None] = lambda: None) -> None:
        self.env, self._on_step = env, on_step
        self.description = env.describe()
        self._expert: Expert | None = None
        self._is_running = False

    def start(self, start: Start, expert: ExpertConfig | None = None) -> ResetResult:
        self.env.cameras_on = True
        observation, info = self.env.reset(seed=start.seed, options={"task": start.task})
        observation = self._checked(observation)
        self._expert = None if expert is None else self.env.make_expert(expert, start.seed)
        self._is_running = True
        self._on_step()
        return ResetResult(observation, str(info["prompt"]), str(info["task"]))

    def execute(self, actions: Chunk, images: Images = "all") -> ChunkResult:
        assert self._is_running, "start an episode first"
        count = actions if isinstance(actions, int) else len(actions)
        taken, observations, rewards = [], [], []
        terminated = truncated = success = False
        for index in range(count):
            action = self._ask_expert() if isinstance(actions, int) else actions[index]
            self.env.cameras_on = images == "all" or index == count - 1
            observation, reward, terminated, truncated, info = self.env.step(action)
            taken.append(action)
            observations.append(self._checked(observation))
            rewards.append(float(reward))
            if not np.isfinite(rewards[-1]):
                raise EnvError(f"the reward is {rewards[-1]}.")
            success = bool(info["success"])
            self._on_step()
            if terminated or truncated:
                self._is_running = False
                break
        return ChunkResult(
            observations=stack_observations(observations),
            actions=np.stack(taken).astype(np.float32),
            rewards=np.array(rewards, np.float32),
            terminated=bool(terminated),
            truncated=bool(truncated),
            success=success,
        )

    def _ask_expert(self) -> Float32[np.ndarray, " action_dim"]:
        assert self._expert is not None, "the episode was started without an expert"
        return np.asarray(self._expert(), np.float32)

    def _checked(self, observation: EnvObservation) -> EnvObservation:
        columns, shapes = self.description.robot.state, self.description.shapes
        wanted = {name: shape for name, shape in shapes.items() if self.env.cameras_on or name in columns}
        if not wanted.keys() <= observation.keys() <= shapes.keys():
            raise EnvError(f"an observation has {sorted(observation)} instead of {sorted(wanted)}.")
        checked = {}
        for name, shape in wanted.items():
            # A copy, because simulators like to write the next observation over the last.
            values = np.array(observation[name], np.float32 if name in columns else None)
            if name not in columns and values.dtype != np.uint8:
                raise EnvError(f"{name!r} has the dtype {values.dtype} instead of uint8.")
            if values.shape != shape:
                raise EnvError(f"{name!r} has the shape {values.shape} instead of {shape}.")
            if name in columns and not np.all(np.isfinite(values)):
                raise EnvError(f"{name!r} holds {values[~np.isfinite(values)][0]}.")
            checked[name] = values
        return checked


# --- pools ------------------------------------------------------------------------------------------------------------


class EnvPool(ABC):
    """Environments of one kind, in slots 0 … size - 1, that work at the same time.

    A request is queued by `start` or `execute`, one at a time for each slot, and answered by `wait`. A `ConfigError`
    from `wait` means that no episode would go better: an unknown task, an adapter that does not fit.
    """

    size: int
    description: EnvDescription
    # The number of parts in which its slots are best used: two where some can step while the policy infers for others.
    groups: int = 1

    @abstractmethod
    def start(self, slot: int, start: Start, expert: ExpertConfig | None = None) -> None:
        """Begin an episode, with an expert if it is to act; an episode that was under way is abandoned."""

    @abstractmethod
    def execute(self, slot: int, actions: Chunk, *, images: Images = "all") -> None:
        """Take these actions, or so many steps of the expert."""

    @abstractmethod
    def wait(self, slots: Sequence[int]) -> dict[int, Result]:
        """The results of what was queued for these slots."""

    def close(self) -> None:  # noqa: B027
        """End everything that was started."""

    def __enter__(self) -> "EnvPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def default_size(config: EnvConfig) -> int:
    env_class, _ = find_env_class(config)
    return 16 if hasattr(env_class, "make_pool") else min(16, usable_cores())


def open_pool(
    config: EnvConfig,
    size: int,
    *,
    timeout: float = 120.0,
    backend: PoolBackend = "local",
    ray_address: str | None = None,
) -> EnvPool:
    """A pool of the environment: its own if it has one (`make_pool`), else a process for each slot, or a Ray actor.

    `timeout` is the number of seconds after which a request counts as hung. With `backend="ray"` the environments run on
    a cluster: the one at `ray_address`, else at RAY_ADDRESS, else one started on this machine.
    """
    if size < 1:
        raise ConfigError(f"a pool of {size} environments cannot do anything: ask for at least one.")
    if backend == "ray":
        from pirl.envs.ray_pool import RayPool

        return RayPool(config, size, timeout=timeout, address=ray_address)
    if ray_address is not None:
        raise ConfigError(f"the address {ray_address} of a Ray cluster is for backend = ray; it is {backend}.")
    env_class, options = find_env_class(config)
    if (make_pool := getattr(env_class, "make_pool", None)) is not None:
        pool: EnvPool = make_pool(size, **options)
        return pool
    from pirl.envs.workers import ProcessPool

    return ProcessPool(config, size, timeout)


@dataclass(frozen=True)
class Refused:
    """A `ConfigError`: the next attempt would end the same way."""

    message: str


def answer(request: Callable[[], T]) -> T | Refused | EpisodeFailed:
    """The result of a request, or how it failed."""
    try:
        return request()
    except ConfigError as error:
        return Refused(str(error))
    except Exception as error:
        return EpisodeFailed(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")


class LocalPool(EnvPool):
    """Environments in this process, one after the other: nothing protects from a crash or a hang."""

    def __init__(self, runners: Sequence[EnvRunner]) -> None:
        self.size, self.description = len(runners), runners[0].description
        self._runners = runners
        self._queue: dict[int, Callable[[], Result]] = {}

    def start(self, slot: int, start: Start, expert: ExpertConfig | None = None) -> None:
        self._queue[slot] = partial(self._runners[slot].start, start, expert)

    def execute(self, slot: int, actions: Chunk, *, images: Images = "all") -> None:
        self._queue[slot] = partial(self._runners[slot].execute, actions, images)

    def wait(self, slots: Sequence[int]) -> dict[int, Result]:
        results: dict[int, Result] = {}
        for slot in slots:
            result = answer(self._queue.pop(slot))
            if isinstance(result, Refused):
                raise ConfigError(result.message)
            results[slot] = result
        return results
