"""A pool of Ray actors: environments run on all machines of a cluster while the policy stays with the learner."""

import contextlib
import dataclasses
import importlib
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32

from pirl.envs.base import Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.pools import Lost, Pictures, Segment, Started
from pirl.envs.ray_cluster import connected, import_ray, reserved
from pirl.envs.registry import EnvConfig, make_env
from pirl.envs.stepping import Stepper
from pirl.envs.watched_pool import LEAVING_TIMEOUT, Answer, Ready, WatchedPool, Worker, explain

# --- in the actor ----------------------------------------------------------------------------------------------------


class _Host:
    """An environment in an actor. What goes wrong is an answer too; after one of these the actor is not used again."""

    _stepper: Stepper

    def make(self, config: EnvConfig, directory: str, search_path: Sequence[str]) -> Answer:
        """Make the environment, from the modules and files that the driver would find, where this machine has them."""

        def make() -> Answer:
            with contextlib.suppress(OSError):
                os.chdir(directory)
            sys.path += [place for place in search_path if place not in sys.path and os.path.exists(place)]
            self._stepper = Stepper(make_env(config))
            return Ready(self._stepper.description, platform.node())

        return _answer(make)

    def start(self, start: Start, expert: ExpertConfig | None) -> Answer:
        """Begin an episode."""
        return _answer(lambda: self._stepper.start(_writable(start), expert))

    def execute(self, actions: Float32[np.ndarray, "k action_dim"] | int, pictures: Pictures) -> Answer:
        """Take these actions, or so many steps of the expert."""
        return _answer(lambda: self._stepper.execute(_writable(actions), pictures))

    def is_there(self) -> bool:
        """A sign of life."""
        return True

    def close(self) -> None:
        """Close the environment."""
        self._stepper.env.close()


def _answer(act: Callable[[], Answer]) -> Answer:
    try:
        return act()
    except Exception as error:
        return explain(error)


def _writable(message: Any) -> Any:
    """A copy of the arrays in a message.

    Ray hands out views of its shared memory, which nobody may write to; simulators do. And an episode that kept them
    would fill that memory, which is much smaller than what pictures of many episodes need.
    """
    if isinstance(message, np.ndarray):
        return message.copy()
    if isinstance(message, dict):
        return {name: _writable(value) for name, value in message.items()}
    if isinstance(message, Start | Started | Segment):
        parts = {part.name: _writable(getattr(message, part.name)) for part in dataclasses.fields(message)}
        return dataclasses.replace(message, **parts)
    return message


# --- in the driver ---------------------------------------------------------------------------------------------------


class _Actor(Worker):
    """An actor, and what it is doing: the answer to come."""

    def __init__(self, ray: Any, actor: Any, making: Any) -> None:
        super().__init__()
        self._ray = ray
        self.actor, self.pending = actor, making

    def ask(self, method: Literal["start", "execute"], *arguments: Any) -> None:
        self.pending = getattr(self.actor, method).remote(*arguments)

    def hear(self) -> Answer | None:
        try:
            answer: Answer = _writable(self._ray.get(self.pending, timeout=0))
        except self._ray.exceptions.GetTimeoutError:
            return None
        except self._ray.exceptions.RayError as error:
            return Lost(f"the environment's actor{self.place} ended: {_describe_end(error)}")
        self.pending = None
        if isinstance(answer, Ready):
            self.place = f" on {answer.host}"
        return answer

    def is_there(self) -> bool:
        if self.pending is not None:  # which `hear` finds out
            return True
        try:
            return bool(self._ray.get(self.actor.is_there.remote(), timeout=LEAVING_TIMEOUT))
        except self._ray.exceptions.RayError:
            return False

    def end(self) -> None:
        self._ray.kill(self.actor)


class RayPool(WatchedPool[_Actor]):
    """An environment in a Ray actor of its own, and a CPU for it, for each slot (see `EnvPool`).

    `address` is that of a cluster (`host:port`, `auto` for the one on this machine, `ray://host:port` for a client from
    outside), else RAY_ADDRESS names it; without either a cluster is started on this machine, for as long as it is used.
    An actor that fails is replaced at the next start, on another machine if its own is gone.
    """

    def __init__(self, config: EnvConfig, size: int, *, timeout: float = 120.0, address: str | None = None) -> None:
        self._ray = import_ray()
        self._open = contextlib.ExitStack()
        try:
            self._open.enter_context(connected(self._ray, address, size))
            self._places = self._open.enter_context(reserved(self._ray, size))
            super().__init__(config, size, timeout)
        except BaseException:
            self._open.close()
            raise

    def close(self) -> None:
        """End all actors: those at rest close their environments before. A cluster that was started for us ends too."""
        if self._ray.is_initialized():
            super().close()
        self._open.close()

    def _hire(self, slot: int) -> _Actor:
        scheduling = importlib.import_module("ray.util.scheduling_strategies")
        place: dict[str, Any] = {
            "num_cpus": 1,
            "scheduling_strategy": scheduling.PlacementGroupSchedulingStrategy(
                self._places, placement_group_bundle_index=slot
            ),
        }
        if self._ray.util.placement_group_table(self._places)["state"] != "CREATED":
            # A machine is gone, and no other has a CPU to spare: share one, rather than wait for it.
            place = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
        actor = self._ray.remote(_Host).options(**place, max_restarts=0).remote()
        return _Actor(self._ray, actor, actor.make.remote(self._config, os.getcwd(), sys.path))

    def _listen(self, workers: Sequence[_Actor], seconds: float) -> None:
        self._ray.wait([worker.pending for worker in workers], timeout=seconds)

    def _let_leave(self, workers: Sequence[_Actor], seconds: float) -> None:
        closing = [worker.actor.close.remote() for worker in workers]
        self._ray.wait(closing, num_returns=len(closing), timeout=seconds)


def _describe_end(error: Exception) -> str:
    """Why an actor is no more, in a line: Ray tells it at length, after a list of numbers."""
    text = str(error)
    if "No module named 'pirl'" in text:
        return "pirl is not installed on its machine, in the Python that Ray was started with there."
    cause = text.partition("The actor is dead because ")[2].partition(" Some common causes")[0]
    return textwrap.shorten(cause or text, 400, placeholder=" …")
