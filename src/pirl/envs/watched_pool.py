"""A pool of environments that run elsewhere: what is asked of them, how long it may take, and who is replaced."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from jaxtyping import Float32

from pirl.envs.base import EnvDescription, Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.pools import Lost, Pictures, Segment, Started
from pirl.envs.registry import EnvConfig
from pirl.errors import ConfigError, EnvError, UserError

# How long an environment may take to be made: simulators import much, and compile at times.
_MAKING_TIMEOUT = 600.0
# How long workers may take to leave by themselves.
LEAVING_TIMEOUT = 3.0


@dataclass(frozen=True)
class Ready:
    """The environment has been made, on this machine if it matters."""

    description: EnvDescription
    host: str = ""


@dataclass(frozen=True)
class Refused:
    """A `ConfigError` about what was asked for: nobody's crash, and the next attempt would end the same way."""

    message: str


Answer = Ready | Refused | Started | Segment | Lost


def explain(error: Exception) -> Refused | Lost:
    """What a worker answers when its environment raises; it is not used again after that."""
    if isinstance(error, ConfigError):
        return Refused(str(error))
    return Lost(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")


class Worker(ABC):
    """Someone elsewhere who makes an environment as soon as hired, and then does one thing at a time with it."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + _MAKING_TIMEOUT
        self.is_ready = False
        # Whether somebody wants the answer.
        self.is_busy = False
        # A start, asked for as soon as it has made its environment, or answered what nobody waits for any more.
        self.held_back: tuple[Start, ExpertConfig | None] | None = None
        # For messages: the machine that it is on (" on …"), where there are several.
        self.place = ""

    @abstractmethod
    def ask(self, method: Literal["start", "execute"], *arguments: Any) -> None:
        """Have its `Stepper` do something; of one who is gone `hear` finds out."""

    @abstractmethod
    def hear(self) -> Answer | None:
        """What it has answered, or that it has ended; None if there is nothing to hear yet."""

    @abstractmethod
    def is_there(self) -> bool:
        """Whether it can be asked something."""

    @abstractmethod
    def end(self) -> None:
        """End it by force, whatever it is doing."""

    @property
    def is_at_rest(self) -> bool:
        """Whether it is waiting to be asked."""
        return self.is_ready and not self.is_busy


W = TypeVar("W", bound=Worker)


class WatchedPool(ABC, Generic[W]):
    """An environment with a worker of its own for each slot; one that fails is replaced at the next start.

    `timeout` is how many seconds a worker may take for a request before it counts as hung.
    """

    groups = 2

    def __init__(self, config: EnvConfig, size: int, timeout: float) -> None:
        self.size = size
        self._config, self._timeout = config, timeout
        self._workers: list[W | None] = [None] * size
        try:
            for slot in range(size):
                self._workers[slot] = self._hire(slot)
            self.description, *_ = [self._await_made(worker) for worker in self._workers if worker is not None]
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _hire(self, slot: int) -> W:
        """Begin a worker; it makes its environment while others do too."""

    @abstractmethod
    def _listen(self, workers: Sequence[W], seconds: float) -> None:
        """Return as soon as one of them has something to say, or the time is over."""

    @abstractmethod
    def _let_leave(self, workers: Sequence[W], seconds: float) -> None:
        """Give those at rest the time to close their environments."""

    def start(self, slot: int, start: Start, expert: ExpertConfig | None = None) -> None:
        """Begin an episode; what was queued is forgotten, and a worker that ended with the last episode replaced."""
        worker = self._workers[slot]
        if worker is None or not worker.is_there():
            worker = self._replace(slot)
        if worker.is_at_rest:
            self._ask(worker, "start", start, expert)
        else:
            worker.is_busy, worker.held_back = True, (start, expert)

    def execute(
        self, slot: int, actions: Float32[np.ndarray, "k action_dim"] | int, *, pictures: Pictures = "all"
    ) -> None:
        """Take these actions, or so many steps of the expert."""
        worker = self._workers[slot]
        if worker is None or worker.is_busy:
            raise ValueError(f"slot {slot} has " + ("no episode." if worker is None else "not been waited for."))
        self._ask(worker, "execute", actions, pictures)

    def wait(self, slots: Sequence[int]) -> dict[int, Started | Segment | Lost]:
        """The answers to what was queued; who does not answer in time is ended."""
        answers: dict[int, Started | Segment | Lost] = {}
        while missing := {slot: self._busy_worker(slot) for slot in slots if slot not in answers}:
            self._listen_in_time(list(missing.values()))
            for slot, worker in missing.items():
                answer = self._hear(worker)
                if worker.held_back is not None and answer is not None:
                    answer = self._go_on(slot, worker, answer)
                if answer is None or isinstance(answer, Ready):
                    continue
                worker.is_busy = False
                if isinstance(answer, Lost | Refused):
                    self._dismiss(slot)
                if isinstance(answer, Refused):
                    raise ConfigError(answer.message)
                answers[slot] = answer
        return {slot: answers[slot] for slot in slots}

    def close(self) -> None:
        """End all workers: those at rest by themselves, the others by force."""
        for slot, worker in enumerate(self._workers):
            if worker is not None and not worker.is_at_rest:
                self._dismiss(slot)
        if resting := [worker for worker in self._workers if worker is not None]:
            self._let_leave(resting, LEAVING_TIMEOUT)
        for slot in range(self.size):
            self._dismiss(slot)

    def __enter__(self) -> "WatchedPool[W]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _await_made(self, worker: W) -> EnvDescription:
        answer = None
        while answer is None:
            self._listen_in_time([worker])
            answer = self._hear(worker)
        if isinstance(answer, Refused):
            raise ConfigError(answer.message)
        if not isinstance(answer, Ready):
            reason = answer.reason if isinstance(answer, Lost) else f"it said {answer!r:.80}"
            raise EnvError(f"the environment {self._config.id!r} could not be made: {reason}")
        return answer.description

    def _go_on(self, slot: int, worker: W, answer: Answer) -> Answer | None:
        """Ask what was held back, now that the worker has answered something else; its answer, if it cannot be asked."""
        held_back, worker.held_back = worker.held_back, None
        assert held_back is not None
        if isinstance(answer, Lost) and worker.is_ready:
            # Another episode is lost than the one that is waited for, and nobody wants it any more.
            worker = self._replace(slot)
            worker.is_busy, worker.held_back = True, held_back
            return None
        if isinstance(answer, Lost | Refused):
            return answer
        self._ask(worker, "start", *held_back)
        return None

    def _ask(self, worker: W, method: Literal["start", "execute"], *arguments: Any) -> None:
        worker.is_busy, worker.deadline = True, time.monotonic() + self._timeout
        worker.ask(method, *arguments)

    def _busy_worker(self, slot: int) -> W:
        worker = self._workers[slot]
        if worker is None or not worker.is_busy:
            raise ValueError(f"nothing is queued for slot {slot}.")
        return worker

    def _listen_in_time(self, workers: Sequence[W]) -> None:
        nearest = min(worker.deadline for worker in workers)
        self._listen(workers, max(0.0, nearest - time.monotonic()))

    def _hear(self, worker: W) -> Answer | None:
        """What the worker says; None while there is time to wait for it."""
        answer = worker.hear()
        if answer is None and time.monotonic() >= worker.deadline:
            what = f"no answer within {self._timeout:g}" if worker.is_ready else f"not made within {_MAKING_TIMEOUT:g}"
            return Lost(f"the environment{worker.place} hangs: {what} s")
        if isinstance(answer, Ready):
            worker.is_ready = True
        return answer

    def _replace(self, slot: int) -> W:
        self._dismiss(slot)
        worker = self._workers[slot] = self._hire(slot)
        return worker

    def _dismiss(self, slot: int) -> None:
        worker, self._workers[slot] = self._workers[slot], None
        if worker is not None:
            worker.end()
