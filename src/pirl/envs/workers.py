"""A pool of processes with a watchdog: what happens to an environment costs one episode, and nothing is left behind."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing import connection as pipes
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from pirl.envs.pools import Lost
from pirl.envs.registry import EnvConfig, make_env
from pirl.envs.stepping import Stepper
from pirl.envs.watched_pool import LEAVING_TIMEOUT, Answer, Ready, WatchedPool, Worker, explain
from pirl.processes import format_exit, is_alive

# How often workers look whether the parent is still there.
_PARENT_CHECK_INTERVAL = 0.5


# --- in the worker ---------------------------------------------------------------------------------------------------


class _ParentGone(BaseException):
    """Nobody is at the other end of the pipe: not to be mistaken for a connection that an environment has lost."""


def _send_answer(connection: Connection, answer: Answer) -> None:
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
    os.setsid()  # a group of its own, which what the environment starts belongs to, and ends with
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever sends it: the parent decides what ends
    # For the parent it is a daemon; as one, it might not start processes itself.
    multiprocessing.current_process().daemon = False
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    os.dup2(2, 1)  # standard output belongs to the parent, and simulators talk
    sys.stdout = sys.stderr
    stepper = None
    with contextlib.suppress(_ParentGone):
        try:
            stepper = Stepper(make_env(config))
            _send_answer(connection, Ready(stepper.description))
            while (request := _receive_request(connection)) is not None:
                method, arguments = request
                _send_answer(connection, getattr(stepper, method)(*arguments))
        except Exception as error:
            _send_answer(connection, explain(error))
    if stepper is not None:
        stepper.env.close()


def _leave_with(parent: int) -> None:
    """End the process, whatever it is doing, and all that it has started, when its parent is gone."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_INTERVAL)
    os.killpg(os.getpid(), signal.SIGKILL)


# --- in the parent ---------------------------------------------------------------------------------------------------


class _Process(Worker):
    """A process at the other end of a pipe."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        super().__init__()
        self.process, self.connection = process, connection
        # Also where nobody closes the pool: by itself, multiprocessing would end the process, but not what it started.
        self._kill = weakref.finalize(self, _kill_group, process, os.getpid())

    def ask(self, method: Literal["start", "execute"], *arguments: Any) -> None:
        self.send((method, arguments))

    def send(self, request: Any) -> None:
        """A method of the stepper and its arguments, or None to let it leave."""
        with contextlib.suppress(OSError):  # it is gone
            self.connection.send(request)

    def hear(self) -> Answer | None:
        try:
            answer: Answer | None = self.connection.recv() if self.connection.poll() else None
        except (EOFError, OSError):
            self.process.join(LEAVING_TIMEOUT)
            code = self.process.exitcode
            how = "it closed its pipe" if code is None else format_exit(code)
            return Lost(f"the environment's process is gone: {how}")
        return answer

    def is_there(self) -> bool:
        return self.process.is_alive()

    def end(self) -> None:
        self.connection.close()
        self._kill()
        self.process.join()


def _kill_group(process: BaseProcess, owner: int) -> None:
    """End a worker and all that it has started, which may outlive it."""
    if process.pid is None or os.getpid() != owner:
        return  # a fork of the owner ends nothing
    if process.exitcode is None:
        process.kill()  # it may not have got as far as a group of its own
    elif is_alive(process.pid):
        return  # nobody of the group is left: the number is somebody else's by now
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


class ProcessPool(WatchedPool[_Process]):
    """An environment in a process of its own for each slot (see `EnvPool`)."""

    def __init__(self, config: EnvConfig, size: int, *, timeout: float = 120.0) -> None:
        super().__init__(config, size, timeout)

    def _hire(self, slot: int) -> _Process:
        # Spawned, not forked: a fork would copy the threads' locks of JAX and of the simulators, but not the threads.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._config, os.getpid()), daemon=True)
        with _without_interrupts():
            process.start()
        theirs.close()  # so that the end of the worker is the end of the pipe
        return _Process(process, ours)

    def _listen(self, workers: Sequence[_Process], seconds: float) -> None:
        pipes.wait([worker.connection for worker in workers], seconds)

    def _let_leave(self, workers: Sequence[_Process], seconds: float) -> None:
        for worker in workers:
            worker.send(None)
        deadline = time.monotonic() + seconds
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))


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
