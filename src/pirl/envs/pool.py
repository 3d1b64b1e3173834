"""Many environments at once: the interface of a pool, and a pool of processes in which dead or hung ones are replaced.

Gymnasium's vector environments step in lockstep and end with the first worker that dies; simulators crash and hang.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection as pipes
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

from pirl.envs.base import EnvDescription, Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.registry import EnvConfig, find_env_class, make_env
from pirl.envs.runner import Chunk, EnvRunner, EpisodeFailed, Images, Result
from pirl.errors import ConfigError, EnvError, UserError
from pirl.processes import format_exit, is_alive, usable_cores

PoolBackend = Literal["local", "ray"]


@runtime_checkable
class EnvPool(Protocol):
    """Environments of one kind, in slots 0 … size - 1, that work at the same time.

    A request is queued by `start` or `execute`, one at a time for each slot, and answered by `wait`. A `ConfigError`
    from `wait` means that no episode would go better: an unknown task, an adapter that does not fit. `groups` is the
    number of parts in which its slots are best used: two where some can step while the policy infers for others.
    """

    size: int
    groups: int
    description: EnvDescription

    def start(self, slot: int, start: Start, expert: ExpertConfig | None = None) -> None:
        """Begin an episode, with an expert if it is to act; an episode that was under way is abandoned."""
        ...

    def execute(self, slot: int, actions: Chunk, *, images: Images = "all") -> None:
        """Take these actions, or so many steps of the expert."""
        ...

    def wait(self, slots: Sequence[int]) -> dict[int, Result]:
        """The results of what was queued for these slots."""
        ...

    def close(self) -> None:
        """End everything that was started."""
        ...

    def __enter__(self) -> "EnvPool": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def default_size(config: EnvConfig) -> int:
    """A sensible number of environments: where each is a process, no more than there are cores."""
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
    return ProcessPool(config, size, timeout)


# --- workers: environments elsewhere, watched -------------------------------------------------------------------------

# Making an environment imports much, and compiles at times.
_MAKING_TIMEOUT = 600.0
LEAVING_TIMEOUT = 3.0


@dataclass(frozen=True)
class Ready:
    """The environment has been made, on this machine if there are several."""

    description: EnvDescription
    host: str = ""


@dataclass(frozen=True)
class Refused:
    """A `ConfigError` in the worker: the next attempt would end the same way."""

    message: str


Answer = Ready | Refused | Result


def describe_exception(error: Exception) -> Refused | EpisodeFailed:
    """What a worker answers when its environment raises; it is not used again after that."""
    if isinstance(error, ConfigError):
        return Refused(str(error))
    return EpisodeFailed(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")


class Worker(ABC):
    """A remote environment; it makes the environment, answers `Ready`, then handles one request at a time."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + _MAKING_TIMEOUT
        self.is_ready = self.is_busy = False
        # For messages: " on HOST", where there are several machines.
        self.place = ""

    @abstractmethod
    def send(self, method: Literal["start", "execute"], *arguments: Any) -> None:
        """Call a method of its `EnvRunner`, after what it is doing."""

    @abstractmethod
    def recv(self) -> Answer | None:
        """Its next answer, or how it ended; None if there is nothing yet."""

    @abstractmethod
    def is_alive(self) -> bool: ...

    @abstractmethod
    def kill(self) -> None: ...


W = TypeVar("W", bound=Worker)


class WorkerPool(ABC, Generic[W]):
    """An environment with a worker of its own for each slot; a worker that fails is replaced at the next start."""

    groups = 2

    def __init__(self, config: EnvConfig, size: int, timeout: float) -> None:
        self.size = size
        self._config, self._timeout = config, timeout
        self._workers: list[W | None] = [None] * size
        try:
            for slot in range(size):
                self._workers[slot] = self._spawn(slot)
            self.description, *_ = [self._await_ready(worker) for worker in self._workers if worker is not None]
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _spawn(self, slot: int) -> W:
        """Start a worker, without waiting until it is ready."""

    @abstractmethod
    def _select(self, workers: Sequence[W], seconds: float) -> None:
        """Return when one of them has an answer, or the time is over."""

    @abstractmethod
    def _let_leave(self, workers: Sequence[W], seconds: float) -> None:
        """Give idle workers the time to close their environments."""

    def start(self, slot: int, start: Start, expert: ExpertConfig | None = None) -> None:
        """Begin an episode, in a new worker if this one failed or is busy with an episode that was abandoned."""
        worker = self._workers[slot]
        if worker is None or worker.is_busy or not worker.is_alive():
            self._kill(slot)
            worker = self._workers[slot] = self._spawn(slot)
        self._send(worker, "start", start, expert)

    def execute(self, slot: int, actions: Chunk, *, images: Images = "all") -> None:
        """Take these actions, or so many steps of the expert."""
        worker = self._workers[slot]
        if worker is None or worker.is_busy:
            raise ValueError(f"slot {slot} has " + ("no episode." if worker is None else "not been waited for."))
        self._send(worker, "execute", actions, images)

    def wait(self, slots: Sequence[int]) -> dict[int, Result]:
        """The results of what was queued; a worker that does not answer in time is killed."""
        results: dict[int, Result] = {}
        while waiting := {slot: self._busy_worker(slot) for slot in slots if slot not in results}:
            self._select_in_time(list(waiting.values()))
            for slot, worker in waiting.items():
                answer = self._recv(worker)
                if answer is None or isinstance(answer, Ready):
                    continue
                worker.is_busy = False
                if isinstance(answer, EpisodeFailed | Refused):
                    self._kill(slot)
                if isinstance(answer, Refused):
                    raise ConfigError(answer.message)
                results[slot] = answer
        return {slot: results[slot] for slot in slots}

    def close(self) -> None:
        """End all workers: the idle ones close their environments, the others are killed."""
        idle = []
        for slot, worker in enumerate(self._workers):
            if worker is not None and worker.is_ready and not worker.is_busy:
                idle.append(worker)
            else:
                self._kill(slot)
        if idle:
            self._let_leave(idle, LEAVING_TIMEOUT)
        for slot in range(self.size):
            self._kill(slot)

    def __enter__(self) -> "WorkerPool[W]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _await_ready(self, worker: W) -> EnvDescription:
        answer = None
        while answer is None:
            self._select_in_time([worker])
            answer = self._recv(worker)
        if isinstance(answer, Refused):
            raise ConfigError(answer.message)
        if isinstance(answer, EpisodeFailed):
            raise EnvError(f"the environment {self._config.id!r} could not be made: {answer.reason}")
        assert isinstance(answer, Ready)
        return answer.description

    def _send(self, worker: W, method: Literal["start", "execute"], *arguments: Any) -> None:
        worker.is_busy = True
        if worker.is_ready:
            worker.deadline = time.monotonic() + self._timeout
        worker.send(method, *arguments)

    def _recv(self, worker: W) -> Answer | None:
        """The worker's answer; None while there is time to wait for it."""
        answer = worker.recv()
        if answer is None and time.monotonic() >= worker.deadline:
            what = f"no answer within {self._timeout:g}" if worker.is_ready else f"not made within {_MAKING_TIMEOUT:g}"
            return EpisodeFailed(f"the environment{worker.place} hangs: {what} s")
        if isinstance(answer, Ready):
            # The time for a request that was sent before begins now.
            worker.is_ready, worker.deadline = True, time.monotonic() + self._timeout
        return answer

    def _busy_worker(self, slot: int) -> W:
        worker = self._workers[slot]
        if worker is None or not worker.is_busy:
            raise ValueError(f"nothing is queued for slot {slot}.")
        return worker

    def _select_in_time(self, workers: Sequence[W]) -> None:
        nearest = min(worker.deadline for worker in workers)
        self._select(workers, max(0.0, nearest - time.monotonic()))

    def _kill(self, slot: int) -> None:
        worker, self._workers[slot] = self._workers[slot], None
        if worker is not None:
            worker.kill()


# --- the process backend: in the worker -------------------------------------------------------------------------------


class _ParentGone(BaseException):
    """The pipe is closed; not to be mistaken for a connection that an environment has lost."""


def _serve(connection: Connection, config: EnvConfig, parent: int) -> None:
    """Make the environment, then answer requests until told to leave (None), a failure, or the end of the parent."""
    os.setsid()  # a process group of its own, which the environment's children belong to
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what ends
    # For the parent it is a daemon; as one, it might not start processes itself.
    multiprocessing.current_process().daemon = False
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    os.dup2(2, 1)  # standard output belongs to the parent, and simulators print
    sys.stdout = sys.stderr
    runner = None
    with contextlib.suppress(_ParentGone):
        try:
            runner = EnvRunner(make_env(config))
            with _or_parent_gone():
                connection.send(Ready(runner.description))
            while True:
                with _or_parent_gone():
                    request = connection.recv()
                if request is None:
                    break
                method, arguments = request
                answer = getattr(runner, method)(*arguments)
                with _or_parent_gone():
                    connection.send(answer)
        except Exception as error:
            with _or_parent_gone():
                connection.send(describe_exception(error))
    if runner is not None:
        runner.env.close()


@contextlib.contextmanager
def _or_parent_gone() -> Iterator[None]:
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        raise _ParentGone from error


def _exit_with(parent: int) -> None:
    """Kill this process and its children when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpid(), signal.SIGKILL)


# --- the process backend: in the parent -------------------------------------------------------------------------------


class _Process(Worker):
    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        super().__init__()
        self.process, self.connection = process, connection
        # Also where nobody closes the pool: multiprocessing by itself would end the process, but not its children.
        self._kill = weakref.finalize(self, _kill_group, process, os.getpid())

    def send(self, method: Literal["start", "execute"], *arguments: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone, as `recv` finds out
            self.connection.send((method, arguments))

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(None)

    def recv(self) -> Answer | None:
        try:
            answer: Answer | None = self.connection.recv() if self.connection.poll() else None
        except (EOFError, OSError):
            self.process.join(LEAVING_TIMEOUT)
            code = self.process.exitcode
            how = "it closed its pipe" if code is None else format_exit(code)
            return EpisodeFailed(f"the environment's process is gone: {how}")
        return answer

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def kill(self) -> None:
        self.connection.close()
        self._kill()
        self.process.join()


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


class ProcessPool(WorkerPool[_Process]):
    """An environment in a process of its own for each slot (see `EnvPool`)."""

    def __init__(self, config: EnvConfig, size: int, timeout: float = 120.0) -> None:
        super().__init__(config, size, timeout)

    def _spawn(self, slot: int) -> _Process:
        # Spawned, not forked: a fork would copy the threads' locks of JAX and of the simulators, but not the threads.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._config, os.getpid()), daemon=True)
        with _without_interrupts():
            process.start()
        theirs.close()  # so that the end of the worker is the end of the pipe
        return _Process(process, ours)

    def _select(self, workers: Sequence[_Process], seconds: float) -> None:
        pipes.wait([worker.connection for worker in workers], seconds)

    def _let_leave(self, workers: Sequence[_Process], seconds: float) -> None:
        for worker in workers:
            worker.leave()
        deadline = time.monotonic() + seconds
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))


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
