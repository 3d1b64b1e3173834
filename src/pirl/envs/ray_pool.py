"""A pool of Ray actors: environments run on all machines of a cluster while the policy stays with the learner."""

import contextlib
import dataclasses
import importlib
import logging
import os
import platform
import signal
import sys
import textwrap
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from pirl.envs.base import Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.pool import LEAVING_TIMEOUT, Answer, Ready, Worker, WorkerPool, describe_exception
from pirl.envs.registry import EnvConfig, make_env
from pirl.envs.runner import Chunk, ChunkResult, EnvRunner, EpisodeFailed, Images, ResetResult
from pirl.errors import ConfigError
from pirl.processes import usable_cores

_CONNECTING_TIMEOUT = 10.0
# Some clusters grow when asked for more CPUs.
_PLACING_TIMEOUT = 60.0

# --- in the actor -----------------------------------------------------------------------------------------------------


class _Host:
    """An environment in an actor. Exceptions are answers too; after one of these the actor is not used again."""

    _runner: EnvRunner

    def make(self, config: EnvConfig, directory: str, search_path: Sequence[str]) -> Answer:
        """Make the environment, with the driver's working directory and search path where this machine has them."""

        def make() -> Answer:
            with contextlib.suppress(OSError):
                os.chdir(directory)
            sys.path += [entry for entry in search_path if entry not in sys.path and os.path.exists(entry)]
            self._runner = EnvRunner(make_env(config))
            return Ready(self._runner.description, platform.node())

        return _answer(make)

    def start(self, start: Start, expert: ExpertConfig | None) -> Answer:
        return _answer(lambda: self._runner.start(start, expert))

    def execute(self, actions: Chunk, images: Images) -> Answer:
        return _answer(lambda: self._runner.execute(_writable(actions), images))

    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        self._runner.env.close()


def _answer(act: Callable[[], Answer]) -> Answer:
    try:
        return act()
    except Exception as error:
        return describe_exception(error)


def _writable(message: Any) -> Any:
    """A copy of the arrays in a message.

    Ray hands out read-only views of its shared memory; simulators write into actions. And episodes that kept views would
    fill that memory, which is much smaller than the images of many episodes.
    """
    if isinstance(message, np.ndarray):
        return message.copy()
    if isinstance(message, dict):
        return {name: _writable(value) for name, value in message.items()}
    if isinstance(message, ResetResult | ChunkResult):
        parts = {part.name: _writable(getattr(message, part.name)) for part in dataclasses.fields(message)}
        return dataclasses.replace(message, **parts)
    return message


# --- in the driver ----------------------------------------------------------------------------------------------------


class _Actor(Worker):
    def __init__(self, ray: Any, actor: Any, config: EnvConfig) -> None:
        super().__init__()
        self._ray, self.actor = ray, actor
        # The answers to come, in order.
        self.pending = deque([actor.make.remote(config, os.getcwd(), sys.path)])

    def send(self, method: Literal["start", "execute"], *arguments: Any) -> None:
        self.pending.append(getattr(self.actor, method).remote(*arguments))

    def recv(self) -> Answer | None:
        try:
            answer: Answer = _writable(self._ray.get(self.pending[0], timeout=0))
        except self._ray.exceptions.GetTimeoutError:
            return None
        except self._ray.exceptions.RayError as error:
            return EpisodeFailed(f"the environment's actor{self.place} ended: {_describe_end(error)}")
        self.pending.popleft()
        if isinstance(answer, Ready):
            self.place = f" on {answer.host}"
        return answer

    def is_alive(self) -> bool:
        try:
            return bool(self._ray.get(self.actor.is_alive.remote(), timeout=LEAVING_TIMEOUT))
        except self._ray.exceptions.RayError:
            return False

    def kill(self) -> None:
        self._ray.kill(self.actor)


class RayPool(WorkerPool[_Actor]):
    """An environment in a Ray actor of its own, and a CPU for it, for each slot (see `EnvPool`).

    `address` is that of a cluster (`host:port`, `auto` for the one on this machine, `ray://host:port` for a client from
    outside), else RAY_ADDRESS; without either a cluster is started on this machine, for as long as the pool is open.
    An actor that fails is replaced at the next start, on another machine if its own is gone.
    """

    def __init__(self, config: EnvConfig, size: int, *, timeout: float = 120.0, address: str | None = None) -> None:
        self._ray = _import_ray()
        with contextlib.ExitStack() as stack:
            stack.enter_context(_connected(self._ray, address, size))
            self._placement = stack.enter_context(_reserved(self._ray, size))
            super().__init__(config, size, timeout)
            self._cluster = stack.pop_all()

    def close(self) -> None:
        """End all actors: idle ones close their environments before. A cluster that was started for the pool ends too."""
        if self._ray.is_initialized():
            super().close()
        if hasattr(self, "_cluster"):
            self._cluster.close()

    def _spawn(self, slot: int) -> _Actor:
        scheduling = importlib.import_module("ray.util.scheduling_strategies")
        strategy = scheduling.PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=slot)
        options: dict[str, Any] = {"num_cpus": 1, "scheduling_strategy": strategy}
        if self._ray.util.placement_group_table(self._placement)["state"] != "CREATED":
            # A machine is gone, and no other has a CPU to spare: share one, rather than wait for it.
            options = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
        actor = self._ray.remote(_Host).options(**options, max_restarts=0).remote()
        return _Actor(self._ray, actor, self._config)

    def _select(self, workers: Sequence[_Actor], seconds: float) -> None:
        self._ray.wait([worker.pending[0] for worker in workers], timeout=seconds)

    def _let_leave(self, workers: Sequence[_Actor], seconds: float) -> None:
        closing = [worker.actor.close.remote() for worker in workers]
        self._ray.wait(closing, num_returns=len(closing), timeout=seconds)


def _describe_end(error: Exception) -> str:
    """Why an actor ended, in a line of Ray's long text."""
    text = str(error)
    if "No module named 'pirl'" in text:
        return "pirl is not installed on its machine, in the Python that Ray was started with there."
    cause = text.partition("The actor is dead because ")[2].partition(" Some common causes")[0]
    return textwrap.shorten(cause or text, 400, placeholder=" …")


# --- the cluster ------------------------------------------------------------------------------------------------------


def _import_ray(module: str = "ray") -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed, which environments on a Ray cluster need: pip install 'pirl[ray]'."
        ) from error


@contextlib.contextmanager
def _connected(ray: Any, address: str | None, size: int) -> Iterator[None]:
    """Be connected to a cluster; a connection that was there before is used as it is, and left alone."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if ray.is_initialized():
        yield
        return
    _connect(ray, address, size)
    try:
        yield
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str, size: int) -> None:
    settings: dict[str, Any] = {}
    if address == "local":
        # As with processes, more environments than cores are allowed.
        settings = {"num_cpus": max(size, usable_cores()), "include_dashboard": False}
    elif address != "auto":
        _check_address(address)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings():
            # JAX warns of every fork; Ray's are followed at once by another program.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **settings)
    except BaseException as error:
        ray.shutdown()
        if not isinstance(error, Exception):  # an interrupt
            raise
        reason = textwrap.shorten(str(error.__cause__ or error).strip().splitlines()[-1], 400, placeholder=" …")
        what = "could not be started on this machine" if address == "local" else f"at {address} cannot be used"
        raise ConfigError(f"a Ray cluster {what}: {reason}") from error
    finally:
        # Ray takes SIGTERM for itself, which is how a scheduler asks a run to save and end.
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _check_address(address: str) -> None:
    """Refuse an address where nobody answers: Ray itself would try for minutes, or for ever."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"the address of a Ray cluster is host:port, ray://host:port, auto or local; got {address!r}."
        )
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return
    grpc = _import_ray("grpc")
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_CONNECTING_TIMEOUT)
        except grpc.FutureTimeoutError as error:
            raise ConfigError(
                f"no Ray cluster answers at {address} within {_CONNECTING_TIMEOUT:g} s: start one there with `ray start "
                "--head`, which says its address, or leave the address out for one on this machine."
            ) from error


@contextlib.contextmanager
def _reserved(ray: Any, size: int) -> Iterator[Any]:
    """A CPU for each environment, over as many machines as there are."""
    placement = ray.util.placement_group([{"CPU": 1}] * size, strategy="SPREAD")
    try:
        if not placement.wait(timeout_seconds=_PLACING_TIMEOUT):
            free, total = (found.get("CPU", 0) for found in (ray.available_resources(), ray.cluster_resources()))
            raise ConfigError(
                f"{size} environments need a CPU each; of the {total:g} of the Ray cluster {free:g} are free: ask for "
                "fewer environments, add machines, or start these with a larger `ray start --num-cpus`."
            )
        yield placement
    finally:
        if ray.is_initialized():
            ray.util.remove_placement_group(placement)
