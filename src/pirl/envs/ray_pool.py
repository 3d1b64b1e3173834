"""A pool of Ray actors: environments run on all machines of a cluster while the policy stays with the learner."""

import contextlib
import copy
import importlib
import logging
import os
import signal
import socket
import sys
import textwrap
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pirl.envs.pool import Chunk, EpisodeFailed, Images
from pirl.envs.registry import EnvConfig
from pirl.envs.workers import LEAVING_TIMEOUT, Answer, EnvHost, Ready, Worker, WorkerPool
from pirl.errors import ConfigError
from pirl.processes import usable_cores

_CONNECTING_TIMEOUT = 10.0
# Some clusters grow when asked for more CPUs.
_PLACING_TIMEOUT = 60.0


class _Host(EnvHost):
    def enter(self, directory: str, search_path: Sequence[str]) -> None:
        """Use the driver's working directory and search path, where this machine has them."""
        with contextlib.suppress(OSError):
            os.chdir(directory)
        sys.path += [entry for entry in search_path if entry not in sys.path and os.path.exists(entry)]

    def execute(self, actions: Chunk, images: Images) -> Answer:
        # Ray hands out read-only views of its shared memory; simulators write into actions.
        return super().execute(copy.deepcopy(actions), images)

    def is_alive(self) -> bool:
        return True


class _Actor(Worker):
    def __init__(self, ray: Any, actor: Any, config: EnvConfig) -> None:
        super().__init__()
        self._ray, self._actor = ray, actor
        actor.enter.remote(os.getcwd(), sys.path)
        # The answers to come, in order.
        self._pending = deque([actor.make.remote(config)])

    @property
    def handle(self) -> Any:
        return self._pending[0]

    def send(self, method: Literal["start", "execute"], *arguments: Any) -> None:
        self._pending.append(getattr(self._actor, method).remote(*arguments))

    def recv(self) -> Answer | None:
        try:
            # A copy: episodes that kept views would fill Ray's shared memory, which is much smaller than their images.
            answer: Answer = copy.deepcopy(self._ray.get(self._pending[0], timeout=0))
        except self._ray.exceptions.GetTimeoutError:
            return None
        except self._ray.exceptions.RayError as error:
            return EpisodeFailed(f"the environment's actor{self.place} ended: {_describe_end(error)}")
        self._pending.popleft()
        if isinstance(answer, Ready):
            self.place = f" on {answer.host}"
        return answer

    def is_alive(self) -> bool:
        try:
            return bool(self._ray.get(self._actor.is_alive.remote(), timeout=LEAVING_TIMEOUT))
        except self._ray.exceptions.RayError:
            return False

    def leave(self) -> None:
        self._pending.append(self._actor.close.remote())

    def join(self, seconds: float) -> None:
        self._ray.wait([self._pending[-1]], timeout=seconds)

    def kill(self) -> None:
        self._ray.kill(self._actor)


class RayPool(WorkerPool):
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

    def _select(self, handles: list[Any], seconds: float) -> None:
        self._ray.wait(handles, timeout=seconds)


def _describe_end(error: Exception) -> str:
    """Why an actor ended, in a line of Ray's long text."""
    text = str(error)
    if "No module named 'pirl'" in text:
        return "pirl is not installed on its machine, in the Python that Ray was started with there."
    cause = text.partition("The actor is dead because ")[2].partition(" Some common causes")[0]
    return textwrap.shorten(cause or text, 400, placeholder=" …")


# --- the cluster ------------------------------------------------------------------------------------------------------


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "ray is not installed, which environments on a Ray cluster need: pip install 'pirl[ray]'."
        ) from error


@contextlib.contextmanager
def _connected(ray: Any, address: str | None, size: int) -> Iterator[None]:
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
    try:
        socket.create_connection((host, int(port)), _CONNECTING_TIMEOUT).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"nobody answers at {address} ({error}): start a Ray cluster there with `ray start --head`, which says its "
            "address, or leave the address out for one on this machine."
        ) from error


@contextlib.contextmanager
def _reserved(ray: Any, size: int) -> Iterator[Any]:
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
