"""A pool of processes with a watchdog: what happens to an environment costs one episode, and nothing is left behind."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection as pipes
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import numpy as np
from jaxtyping import Float32

from pirl.envs.base import EnvDescription, Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.pools import Lost, Pictures, Segment, Started
from pirl.envs.registry import EnvConfig, make_env
from pirl.envs.stepping import Stepper
from pirl.errors import ConfigError, EnvError, UserError

# How long an environment may take to be made: simulators import much, and compile at times.
_MAKING_TIMEOUT = 600.0
# How long workers may take to leave by themselves, and how often they look whether the parent is still there.
_LEAVING_TIMEOUT = 3.0
_PARENT_CHECK_INTERVAL = 0.5


# --- in the worker ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ready:
    """The environment has been made."""

    description: EnvDescription


@dataclass(frozen=True)
class _Refused:
    """A `UserError` about what was asked for: nobody's crash, and the next attempt would end the same way."""

    message: str


_Answer = _Ready | _Refused | Started | Segment | Lost


class _ParentGone(BaseException):
    """Nobody is at the other end of the pipe: not to be mistaken for a connection that an environment has lost."""


def _send_answer(connection: Connection, answer: _Answer) -> None:
    try:
        connection.send(answer)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise _ParentGone from error


def _receive_request(connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError) as error:
        raise _ParentGone from error


def _serve(connection: Connection, config: EnvConfig, parent: int) -> None:
    """Make the environment, then answer requests until told to leave (None), a failure, or the end of the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what ends
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    os.dup2(2, 1)  # standard output belongs to the parent, and simulators talk
    sys.stdout = sys.stderr
    stepper = None
    with contextlib.suppress(_ParentGone):
        try:
            stepper = Stepper(make_env(config))
            _send_answer(connection, _Ready(stepper.description))
            while (request := _receive_request(connection)) is not None:
                act = stepper.start if isinstance(request[0], Start) else stepper.execute
                _send_answer(connection, act(*request))
        except ConfigError as error:
            _send_answer(connection, _Refused(str(error)))
        except Exception as error:
            reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            _send_answer(connection, Lost(reason))
    if stepper is not None:
        stepper.env.close()


def _leave_with(parent: int) -> None:
    """End the process, whatever it is doing, when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_INTERVAL)
    os._exit(1)


# --- in the parent ---------------------------------------------------------------------------------------------------


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    deadline: float
    is_ready: bool = False
    is_busy: bool = False
    # Sent as soon as it has made its environment, or answered what nobody waits for any more.
    held_back: Any = None


class ProcessPool:
    """An environment in a process of its own for each slot; a process that fails is replaced at the next start."""

    groups = 2

    def __init__(self, config: EnvConfig, size: int, *, timeout: float = 120.0) -> None:
        self.size = size
        self._config = config
        self._timeout = timeout
        self._workers: list[_Worker | None] = [None] * size
        try:
            for slot in range(size):
                self._workers[slot] = self._hire()
            self.description, *_ = [self._await_made(slot) for slot in range(size)]
        except BaseException:
            self.close()
            raise

    def start(self, slot: int, start: Start, expert: ExpertConfig | None = None) -> None:
        """Begin an episode; what was queued is forgotten, and a worker that ended with the last episode replaced."""
        worker = self._workers[slot]
        if worker is None or not worker.process.is_alive():
            worker = self._replace(slot)
        if worker.is_busy or not worker.is_ready:
            worker.is_busy, worker.held_back = True, (start, expert)
        else:
            self._send(worker, (start, expert))

    def execute(
        self, slot: int, actions: Float32[np.ndarray, "k action_dim"] | int, *, pictures: Pictures = "all"
    ) -> None:
        """Take these actions, or so many steps of the expert."""
        worker = self._workers[slot]
        if worker is None or worker.is_busy:
            raise ValueError(f"slot {slot} has " + ("no episode." if worker is None else "not been waited for."))
        self._send(worker, (actions, pictures))

    def wait(self, slots: Sequence[int]) -> dict[int, Started | Segment | Lost]:
        """The answers to what was queued; who does not answer in time is killed."""
        answers: dict[int, Started | Segment | Lost] = {}
        while missing := {slot: self._busy_worker(slot) for slot in slots if slot not in answers}:
            nearest = min(worker.deadline for worker in missing.values())
            pipes.wait([worker.connection for worker in missing.values()], max(0.0, nearest - time.monotonic()))
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
        """End all workers: those at rest by themselves, the others by force."""
        workers = [worker for worker in self._workers if worker is not None]
        for worker in workers:
            if worker.is_busy or not worker.is_ready:
                worker.process.kill()
            else:
                with contextlib.suppress(OSError):
                    worker.connection.send(None)
        deadline = time.monotonic() + _LEAVING_TIMEOUT
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        for slot in range(self.size):
            self._dismiss(slot)

    def __enter__(self) -> "ProcessPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hire(self) -> _Worker:
        """Start a process; it makes its environment while others do too."""
        # Spawned, not forked: a fork would copy the threads' locks of JAX and of the simulators, but not the threads.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._config, os.getpid()), daemon=True)
        with _without_interrupts():
            process.start()
        theirs.close()  # so that the end of the worker is the end of the pipe
        return _Worker(process, ours, time.monotonic() + _MAKING_TIMEOUT)

    def _await_made(self, slot: int) -> EnvDescription:
        worker = self._workers[slot]
        assert worker is not None
        pipes.wait([worker.connection], max(0.0, worker.deadline - time.monotonic()))
        answer = self._receive(worker)
        if isinstance(answer, _Refused):
            raise ConfigError(answer.message)
        if not isinstance(answer, _Ready):
            reason = answer.reason if isinstance(answer, Lost) else f"it was not done after {_MAKING_TIMEOUT:g} s"
            raise EnvError(f"the environment {self._config.id!r} could not be made: {reason}")
        worker.is_ready = True
        return answer.description

    def _go_on(self, slot: int, worker: _Worker, answer: _Answer) -> _Answer | None:
        """Send what was held back, now that the worker has answered something else; its answer, if it cannot be sent."""
        request, worker.held_back = worker.held_back, None
        if isinstance(answer, Lost) and worker.is_ready:
            # Another episode is lost than the one that is waited for, and nobody wants it any more.
            worker = self._replace(slot)
            worker.is_busy, worker.held_back = True, request
            return None
        if isinstance(answer, Lost | _Refused):
            return answer
        worker.is_ready = True
        self._send(worker, request)
        return None

    def _replace(self, slot: int) -> _Worker:
        self._dismiss(slot)
        worker = self._workers[slot] = self._hire()
        return worker

    def _send(self, worker: _Worker, request: Any) -> None:
        worker.is_busy, worker.deadline = True, time.monotonic() + self._timeout
        with contextlib.suppress(OSError):  # it is gone, which `wait` will find out
            worker.connection.send(request)

    def _busy_worker(self, slot: int) -> _Worker:
        worker = self._workers[slot]
        if worker is None or not worker.is_busy:
            raise ValueError(f"nothing is queued for slot {slot}.")
        return worker

    def _receive(self, worker: _Worker) -> _Answer | None:
        """What the worker says; None while there is time to wait for it."""
        try:
            if worker.connection.poll():
                answer: _Answer = worker.connection.recv()
                return answer
        except (EOFError, OSError):
            worker.process.join(_LEAVING_TIMEOUT)
            return Lost(f"the environment's process ended: {_describe_end(worker.process.exitcode)}")
        if time.monotonic() < worker.deadline:
            return None
        what = f"no answer within {self._timeout:g} s" if worker.is_ready else f"not made within {_MAKING_TIMEOUT:g} s"
        return Lost(f"the environment hangs: {what}")

    def _dismiss(self, slot: int) -> None:
        worker, self._workers[slot] = self._workers[slot], None
        if worker is not None:
            worker.connection.close()
            worker.process.kill()
            worker.process.join()


def _describe_end(code: int | None) -> str:
    if code is None:
        return "it closed its pipe"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back: a child born meanwhile never gets it, and the parent does right after."""
    # Starting this helper of multiprocessing lets interrupts through again, so it has to run before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
