"""Pools whose environments are each in a worker of its own, and their process backend: dead and hung ones are replaced.

Gymnasium's vector environments step in lockstep and end with the first worker that dies; simulators crash and hang.
"""

import contextlib
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection as pipes
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from pirl.envs.base import EnvDescription, Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.pool import Chunk, EnvPool, EnvRunner, EpisodeFailed, Images, Refused, Result, answer
from pirl.envs.registry import EnvConfig, make_env
from pirl.errors import ConfigError, EnvError
from pirl.processes import format_exit, is_alive

# Making an environment imports much, and compiles at times.
_MAKING_TIMEOUT = 600.0
LEAVING_TIMEOUT = 3.0


@dataclass(frozen=True)
class Ready:
    description: EnvDescription
    host: str = ""


Answer = Ready | Refused | Result


class EnvHost:
    """The environment inside a worker. After a failure it is not used again."""

    _runner: EnvRunner

    def make(self, config: EnvConfig) -> Answer:
        def make() -> Ready:
            self._runner = EnvRunner(make_env(config))
            return Ready(self._runner.description, platform.node())

        return answer(make)

    def start(self, start: Start, expert: ExpertConfig | None) -> Answer:
        return answer(partial(self._runner.start, start, expert))

    def execute(self, actions: Chunk, images: Images) -> Answer:
        return answer(partial(self._runner.execute, actions, images))

    def close(self) -> None:
        if hasattr(self, "_runner"):
            self._runner.env.close()


class Worker(ABC):
    """A remote `EnvHost`: it makes the environment, answers `Ready`, then handles one request at a time."""

    # For messages: " on HOST", where there are several machines.
    place = ""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + _MAKING_TIMEOUT
        self.is_ready = self.is_busy = False

    @property
    @abstractmethod
    def handle(self) -> Any:
        """What to wait for until `recv` has an answer."""

    @abstractmethod
    def send(self, method: Literal["start", "execute"], *arguments: Any) -> None:
        """Call a method of the host, after what it is doing."""

    @abstractmethod
    def recv(self) -> Answer | None:
        """Its next answer, or how it ended; None if there is nothing yet."""

    @abstractmethod
    def is_alive(self) -> bool: ...

    @abstractmethod
    def leave(self) -> None:
        """Ask an idle worker to close its environment and end."""

    @abstractmethod
    def join(self, seconds: float) -> None:
        """Wait until it has left, or the time is over."""

    @abstractmethod
    def kill(self) -> None: ...


class WorkerPool(EnvPool):
    """An environment with a worker of its own for each slot; a worker that fails is replaced at the next start."""

    groups = 2

    def __init__(self, config: EnvConfig, size: int, timeout: float = 120.0) -> None:
        self.size = size
        self._config, self._timeout = config, timeout
        self._workers: list[Worker | None] = [None] * size
        try:
            for slot in range(size):
                self._workers[slot] = self._spawn(slot)
            self.description, *_ = [self._await_ready(worker) for worker in self._workers if worker is not None]
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _spawn(self, slot: int) -> Worker:
        """Start a worker, without waiting until it is ready."""

    @abstractmethod
    def _select(self, handles: list[Any], seconds: float) -> None:
        """Return when one of the workers has an answer, or the time is over."""

    def start(self, slot: int, start: Start, expert: ExpertConfig | None = None) -> None:
        """Begin an episode, in a new worker if this one failed or is busy with an episode that was abandoned."""
        worker = self._workers[slot]
        if worker is None or worker.is_busy or not worker.is_alive():
            self._kill(slot)
            worker = self._workers[slot] = self._spawn(slot)
        self._send(worker, "start", start, expert)

    def execute(self, slot: int, actions: Chunk, *, images: Images = "all") -> None:
        worker = self._workers[slot]
        assert worker is not None, f"slot {slot} has no episode"
        assert not worker.is_busy, f"slot {slot} has not been waited for"
        self._send(worker, "execute", actions, images)

    def wait(self, slots: Sequence[int]) -> dict[int, Result]:
        results: dict[int, Result] = {}
        while waiting := {slot: self._busy_worker(slot) for slot in slots if slot not in results}:
            self._select_in_time(list(waiting.values()))
            for slot, worker in waiting.items():
                received = self._recv(worker)
                if received is None or isinstance(received, Ready):
                    continue
                worker.is_busy = False
                if isinstance(received, EpisodeFailed | Refused):
                    self._kill(slot)
                if isinstance(received, Refused):
                    raise ConfigError(received.message)
                results[slot] = received
        return {slot: results[slot] for slot in slots}

    def close(self) -> None:
        idle = []
        for slot, worker in enumerate(self._workers):
            if worker is not None and worker.is_ready and not worker.is_busy:
                worker.leave()
                idle.append(worker)
            else:
                self._kill(slot)
        deadline = time.monotonic() + LEAVING_TIMEOUT
        for worker in idle:
            worker.join(max(0.0, deadline - time.monotonic()))
        for slot in range(self.size):
            self._kill(slot)

    def _await_ready(self, worker: Worker) -> EnvDescription:
        received = None
        while received is None:
            self._select_in_time([worker])
            received = self._recv(worker)
        if isinstance(received, Refused):
            raise ConfigError(received.message)
        if isinstance(received, EpisodeFailed):
            raise EnvError(f"the environment {self._config.id!r} could not be made: {received.reason}")
        assert isinstance(received, Ready)
        return received.description

    def _send(self, worker: Worker, method: Literal["start", "execute"], *arguments: Any) -> None:
        worker.is_busy = True
        if worker.is_ready:
            worker.deadline = time.monotonic() + self._timeout
        worker.send(method, *arguments)

    def _recv(self, worker: Worker) -> Answer | None:
        received = worker.recv()
        if received is None and time.monotonic() >= worker.deadline:
            what = f"no answer within {self._timeout:g}" if worker.is_ready else f"not made within {_MAKING_TIMEOUT:g}"
            return EpisodeFailed(f"the environment{worker.place} hangs: {what} s")
        if isinstance(received, Ready):
            # The time for a request that was sent before begins now.
            worker.is_ready, worker.deadline = True, time.monotonic() + self._timeout
        return received

    def _busy_worker(self, slot: int) -> Worker:
        worker = self._workers[slot]
        assert worker is not None, f"slot {slot} has no episode"
        assert worker.is_busy, f"nothing is queued for slot {slot}"
        return worker

    def _select_in_time(self, workers: Sequence[Worker]) -> None:
        nearest = min(worker.deadline for worker in workers)
        self._select([worker.handle for worker in workers], max(0.0, nearest - time.monotonic()))

    def _kill(self, slot: int) -> None:
        worker, self._workers[slot] = self._workers[slot], None
        if worker is not None:
            worker.kill()


# --- the process backend ----------------------------------------------------------------------------------------------


def _serve(connection: Connection, config: EnvConfig, parent: int) -> None:
    """Make the environment, then answer requests until told to leave (None), a failure, or the end of the parent."""
    os.setsid()  # a process group of its own, which the environment's children belong to
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what ends
    # For the parent it is a daemon; as one, it might not start processes itself.
    multiprocessing.current_process().daemon = False
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    os.dup2(2, 1)  # standard output belongs to the parent, and simulators print
    sys.stdout = sys.stderr
    host = EnvHost()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        result = host.make(config)
        connection.send(result)
        while not isinstance(result, Refused | EpisodeFailed) and (request := connection.recv()) is not None:
            method, arguments = request
            result = getattr(host, method)(*arguments)
            connection.send(result)
    host.close()


def _exit_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpid(), signal.SIGKILL)


class _Process(Worker):
    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        super().__init__()
        self._process, self._connection = process, connection
        # Also where nobody closes the pool: multiprocessing by itself would end the process, but not its children.
        self._kill = weakref.finalize(self, _kill_group, process, os.getpid())

    @property
    def handle(self) -> Connection:
        return self._connection

    def send(self, method: Literal["start", "execute"], *arguments: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone, as `recv` finds out
            self._connection.send((method, arguments))

    def recv(self) -> Answer | None:
        try:
            received: Answer | None = self._connection.recv() if self._connection.poll() else None
        except (EOFError, OSError):
            self._process.join(LEAVING_TIMEOUT)
            code = self._process.exitcode
            how = "it closed its pipe" if code is None else format_exit(code)
            return EpisodeFailed(f"the environment's process is gone: {how}")
        return received

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(None)

    def join(self, seconds: float) -> None:
        self._process.join(seconds)

    def kill(self) -> None:
        self._connection.close()
        self._kill()
        self._process.join()


def _kill_group(process: BaseProcess, owner: int) -> None:
    """Kill a worker and its children, which may outlive it."""
    if process.pid is None or os.getpid() != owner:
        return  # a fork of the owner ends nothing
    if process.exitcode is None:
        process.kill()  # it may not have got as far as a group of its own
    elif is_alive(process.pid):
        return  # nobody of the group is left: the number is somebody else's by now
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class ProcessPool(WorkerPool):
    """An environment in a process of its own for each slot (see `EnvPool`)."""

    def _spawn(self, slot: int) -> _Process:
        # Spawned, not forked: a fork would copy the threads' locks of JAX and of the simulators, but not the threads.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._config, os.getpid()), daemon=True)
        with _without_interrupts():
            process.start()
        theirs.close()  # so that the end of the worker is the end of the pipe
        return _Process(process, ours)

    def _select(self, handles: list[Any], seconds: float) -> None:
        pipes.wait(handles, seconds)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back: a child born meanwhile never gets it, and the parent does right after."""
    # Starting this process of multiprocessing lets interrupts through again, so it has to be there before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
