"""A pool of Ray actors: environments run on all machines of a cluster while the policy stays with the learner."""

import contextlib
import dataclasses
import importlib
import os
import platform
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from jaxtyping import Float32

from pirl.envs.base import EnvDescription, Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.pools import Lost, Pictures, Segment, Started
from pirl.envs.ray_cluster import connected, import_ray, reserved
from pirl.envs.registry import EnvConfig, make_env
from pirl.envs.stepping import Stepper
from pirl.errors import ConfigError, EnvError, UserError

# How long an environment may take to be made: simulators import much, and compile at times.
_MAKING_TIMEOUT = 600.0
# How long actors may take to close their environments, and one at rest to say that it is there.
_LEAVING_TIMEOUT = 3.0


# --- in the actor ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ready:
    """The environment has been made, on this machine."""

    description: EnvDescription
    host: str


@dataclass(frozen=True)
class _Refused:
    """A `UserError` about what was asked for: nobody's crash, and the next attempt would end the same way."""

    message: str


_Answer = _Ready | _Refused | Started | Segment | Lost


class _Host:
    """An environment in an actor. What goes wrong is an answer too; after one of these the actor is not used again."""

    _stepper: Stepper

    def make(self, config: EnvConfig, directory: str, search_path: Sequence[str]) -> _Answer:
        """Make the environment, from the modules and files that the driver would find, where this machine has them."""

        def make() -> _Answer:
            with contextlib.suppress(OSError):
                os.chdir(directory)
            sys.path += [place for place in search_path if place not in sys.path and os.path.exists(place)]
            self._stepper = Stepper(make_env(config))
            return _Ready(self._stepper.description, platform.node())

        return _answer(make)

    def start(self, start: Start, expert: ExpertConfig | None) -> _Answer:
        """Begin an episode."""
        return _answer(lambda: self._stepper.start(_writable(start), expert))

    def execute(self, actions: Float32[np.ndarray, "k action_dim"] | int, pictures: Pictures) -> _Answer:
        """Take these actions, or so many steps of the expert."""
        return _answer(lambda: self._stepper.execute(_writable(actions), pictures))

    def is_there(self) -> bool:
        """A sign of life."""
        return True

    def close(self) -> None:
        """Close the environment."""
        self._stepper.env.close()


def _answer(act: Callable[[], _Answer]) -> _Answer:
    try:
        return act()
    except ConfigError as error:
        return _Refused(str(error))
    except Exception as error:
        return Lost(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")


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


@dataclass
class _Worker:
    actor: Any
    # What it is doing: the answer to come.
    pending: Any
    deadline: float
    # The machine that it is on, once it has made its environment.
    host: str | None = None
    # Whether somebody wants the answer.
    is_busy: bool = False
    # Sent as soon as it has made its environment, or answered what nobody waits for any more.
    held_back: Any = None


class RayPool:
    """An environment in a Ray actor of its own, and a CPU for it, for each slot (see `EnvPool`).

    `address` is that of a cluster (`host:port`, `auto` for the one on this machine, `ray://host:port` for a client from
    outside), else RAY_ADDRESS names it; without either a cluster is started on this machine, for as long as it is used.
    An actor that fails is replaced at the next start, on another machine if its own is gone.
    """

    groups = 2

    def __init__(self, config: EnvConfig, size: int, *, timeout: float = 120.0, address: str | None = None) -> None:
        self.size = size
        self._config = config
        self._timeout = timeout
        self._workers: list[_Worker | None] = [None] * size
        self._ray = import_ray()
        self._open = contextlib.ExitStack()
        try:
            self._open.enter_context(connected(self._ray, address, size))
            self._places = self._open.enter_context(reserved(self._ray, size))
            for slot in range(size):
                self._hire(slot)
            self.description, *_ = [self._await_made(slot) for slot in range(size)]
        except BaseException:
            self.close()
            raise

    def start(self, slot: int, start: Start, expert: ExpertConfig | None = None) -> None:
        """Begin an episode; what was queued is forgotten, and an actor that ended with the last episode replaced."""
        worker = self._workers[slot]
        if worker is None or not self._is_there(worker):
            self._dismiss(slot)
            worker = self._hire(slot)
        if worker.pending is not None:
            worker.is_busy, worker.held_back = True, (start, expert)
        else:
            self._ask(worker, worker.actor.start, start, expert)

    def execute(
        self, slot: int, actions: Float32[np.ndarray, "k action_dim"] | int, *, pictures: Pictures = "all"
    ) -> None:
        """Take these actions, or so many steps of the expert."""
        worker = self._workers[slot]
        if worker is None or worker.is_busy:
            raise ValueError(f"slot {slot} has " + ("no episode." if worker is None else "not been waited for."))
        self._ask(worker, worker.actor.execute, actions, pictures)

    def wait(self, slots: Sequence[int]) -> dict[int, Started | Segment | Lost]:
        """The answers to what was queued; who does not answer in time is killed."""
        answers: dict[int, Started | Segment | Lost] = {}
        while missing := {slot: self._busy_worker(slot) for slot in slots if slot not in answers}:
            self._await_any(list(missing.values()))
            for slot, worker in missing.items():
                answer = self._receive(worker)
                if worker.held_back is not None and answer is not None:
                    answer = self._go_on(slot, worker, answer)
                if answer is None or isinstance(answer, _Ready):
                    continue
                worker.is_busy = False
                if isinstance(answer, Lost | _Refused):
                    self._dismiss(slot)
                if isinstance(answer, _Refused):
                    raise ConfigError(answer.message)
                answers[slot] = answer
        return {slot: answers[slot] for slot in slots}

    def close(self) -> None:
        """End all actors: those at rest close their environments before. A cluster that was started for us ends too."""
        if self._ray.is_initialized():
            resting = [worker for worker in self._workers if worker is not None and worker.pending is None]
            if closing := [worker.actor.close.remote() for worker in resting]:
                self._ray.wait(closing, num_returns=len(closing), timeout=_LEAVING_TIMEOUT)
            for slot in range(self.size):
                self._dismiss(slot)
        self._open.close()

    def __enter__(self) -> "RayPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hire(self, slot: int) -> _Worker:
        """Start an actor; it makes its environment while others do too."""
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
        making = actor.make.remote(self._config, os.getcwd(), sys.path)
        worker = self._workers[slot] = _Worker(actor, making, time.monotonic() + _MAKING_TIMEOUT)
        return worker

    def _await_made(self, slot: int) -> EnvDescription:
        worker = self._workers[slot]
        assert worker is not None
        answer = None
        while answer is None:
            self._await_any([worker])
            answer = self._receive(worker)
        if isinstance(answer, _Refused):
            raise ConfigError(answer.message)
        if not isinstance(answer, _Ready):
            reason = answer.reason if isinstance(answer, Lost) else f"it said {answer!r:.80}"
            raise EnvError(f"the environment {self._config.id!r} could not be made: {reason}")
        return answer.description

    def _go_on(self, slot: int, worker: _Worker, answer: _Answer) -> _Answer | None:
        """Send what was held back, now that the actor has answered something else; its answer, if it cannot be sent."""
        request, worker.held_back = worker.held_back, None
        if isinstance(answer, Lost) and worker.host is not None:
            # Another episode is lost than the one that is waited for, and nobody wants it any more.
            self._dismiss(slot)
            worker = self._hire(slot)
            worker.is_busy, worker.held_back = True, request
            return None
        if isinstance(answer, Lost | _Refused):
            return answer
        self._ask(worker, worker.actor.start, *request)
        return None

    def _ask(self, worker: _Worker, method: Any, *request: Any) -> None:
        worker.is_busy, worker.deadline = True, time.monotonic() + self._timeout
        worker.pending = method.remote(*request)

    def _busy_worker(self, slot: int) -> _Worker:
        worker = self._workers[slot]
        if worker is None or not worker.is_busy:
            raise ValueError(f"nothing is queued for slot {slot}.")
        return worker

    def _await_any(self, workers: Sequence[_Worker]) -> None:
        """Until one of them answers, or has had its time."""
        nearest = min(worker.deadline for worker in workers)
        self._ray.wait([worker.pending for worker in workers], timeout=max(0.0, nearest - time.monotonic()))

    def _receive(self, worker: _Worker) -> _Answer | None:
        """What the actor says; None while there is time to wait for it."""
        where = f"on {worker.host} " if worker.host else ""
        try:
            answer: _Answer = _writable(self._ray.get(worker.pending, timeout=0))
        except self._ray.exceptions.GetTimeoutError:
            if time.monotonic() < worker.deadline:
                return None
            what = f"no answer within {self._timeout:g} s" if worker.host else f"not made within {_MAKING_TIMEOUT:g} s"
            return Lost(f"the environment {where}hangs: {what}")
        except self._ray.exceptions.RayError as error:
            return Lost(f"the environment's actor {where}ended: {_describe_end(error)}")
        worker.pending = None
        if isinstance(answer, _Ready):
            worker.host = answer.host
        return answer

    def _is_there(self, worker: _Worker) -> bool:
        """Whether an actor at rest, of which nothing is heard, is still there."""
        if worker.pending is not None:
            return True
        try:
            return bool(self._ray.get(worker.actor.is_there.remote(), timeout=_LEAVING_TIMEOUT))
        except self._ray.exceptions.RayError:
            return False

    def _dismiss(self, slot: int) -> None:
        worker, self._workers[slot] = self._workers[slot], None
        if worker is not None:
            self._ray.kill(worker.actor)


def _describe_end(error: Exception) -> str:
    """Why an actor is no more, in a line: Ray tells it at length, after a list of numbers."""
    text = str(error)
    if "No module named 'pirl'" in text:
        return "pirl is not installed on its machine, in the Python that Ray was started with there."
    cause = text.partition("The actor is dead because ")[2].partition(" Some common causes")[0]
    return textwrap.shorten(cause or text, 400, placeholder=" …")
