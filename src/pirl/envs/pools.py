"""Many environments at once: each slot of a pool is started, told actions to execute, and waited for."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from pirl.envs.base import EnvDescription, EnvObservation, EnvState, Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.registry import EnvConfig, find_env_class
from pirl.errors import ConfigError
from pirl.processes import usable_cores

# Of which observations there are pictures: of all, or only of the one after the last action, to plan from.
Pictures = Literal["all", "last"]
# Where environments run: on this machine, or on all of a Ray cluster.
PoolBackend = Literal["local", "ray"]


@dataclass(frozen=True)
class Started:
    """What is there after a reset. The state is empty where the environment cannot tell it."""

    observation: EnvObservation
    prompt: str
    task: str
    state: EnvState


@dataclass(frozen=True)
class Segment:
    """What came of executing actions; it stops early when the episode ends. The observations are those AFTER each.

    Where pictures were asked for of the last only, each camera has one, or is missing if the episode ended before.
    """

    observations: EnvObservation
    actions: Float32[np.ndarray, "k action_dim"]
    rewards: Float32[np.ndarray, " k"]
    terminated: bool
    truncated: bool
    success: bool


def stack_observations(observations: Sequence[EnvObservation]) -> EnvObservation:
    """Those of a segment as one: what the last of them has, of all that have it."""
    return {name: np.stack([one[name] for one in observations if name in one]) for name in observations[-1]}


@dataclass(frozen=True)
class Lost:
    """An episode that cannot go on, after a crash, a hang, an exception or NaN; the slot can be started again."""

    reason: str


@runtime_checkable
class EnvPool(Protocol):
    """Environments of one kind, numbered 0 … size - 1, that work at the same time.

    A request is queued by `start` or `execute`, one at a time for each slot, and answered by `wait`. A `ConfigError`
    from `wait` means that no episode would go better: an unknown task, an adapter that does not fit. `groups` is into
    how many parts its slots are best divided: two where some can step while others are planned for.
    """

    size: int
    groups: int
    description: EnvDescription

    def start(self, slot: int, start: Start, expert: ExpertConfig | None = None) -> None:
        """Begin an episode, with an expert at hand if it is to act; whatever else was queued is forgotten."""
        ...

    def execute(
        self, slot: int, actions: Float32[np.ndarray, "k action_dim"] | int, *, pictures: Pictures = "all"
    ) -> None:
        """Take these actions, or so many steps of the expert."""
        ...

    def wait(self, slots: Sequence[int]) -> dict[int, Started | Segment | Lost]:
        """The answers to what was queued for these slots."""
        ...

    def close(self) -> None:
        """End whatever was begun; nothing is left running."""
        ...

    def __enter__(self) -> "EnvPool": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def default_size(config: EnvConfig) -> int:
    """How many environments at a time are sensible: where each is a process, no more than it may use cores."""
    env_class, _ = find_env_class(config)
    most = 16
    return most if hasattr(env_class, "make_pool") else min(most, usable_cores())


def open_pool(
    config: EnvConfig,
    size: int,
    *,
    timeout: float = 120.0,
    backend: PoolBackend = "local",
    ray_address: str | None = None,
) -> EnvPool:
    """A pool of the environment: its own if it has one (`make_pool`), else a process for each slot, or a Ray actor.

    `timeout` is how many seconds a process may take for one request before it counts as hung. With `backend="ray"` the
    environments run on a cluster: the one at `ray_address`, else at RAY_ADDRESS, else one started on this machine.
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

    return ProcessPool(config, size, timeout=timeout)
