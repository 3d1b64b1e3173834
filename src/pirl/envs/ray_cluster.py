"""The Ray cluster that environments run on: joined or started, shared by the pools of a process, and left as it was."""

import contextlib
import importlib
import logging
import os
import signal
import textwrap
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from pirl.errors import ConfigError
from pirl.processes import usable_cores

# How long a cluster may take to answer at all, and to find a CPU for every environment: some grow when asked.
_CONNECTING_TIMEOUT = 10.0
_PLACING_TIMEOUT = 60.0


class _Connection:
    """The one connection to a cluster that a process can have: its pools share it, and the last of them ends it."""

    def __init__(self) -> None:
        self._pools = 0
        self._address = ""

    @contextlib.contextmanager
    def shared(self, ray: Any, address: str | None, size: int) -> Iterator[None]:
        """Be connected; a connection that was there before any pool is used as it is, and left alone."""
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        if not self._pools and ray.is_initialized():
            yield
            return
        if not self._pools:
            _connect(ray, address, size)
            self._address = address
        elif address != self._address:
            raise ConfigError(f"Ray is in use at {self._address}: there cannot be a pool at {address} besides.")
        self._pools += 1
        try:
            yield
        finally:
            self._pools -= 1
            if not self._pools:
                ray.shutdown()


_connection = _Connection()
connected = _connection.shared


def import_ray(module: str = "ray") -> Any:
    """Ray, or a module that comes with it; says what to install when it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed, which environments on a Ray cluster need: pip install 'pirl[ray]'."
        ) from error


def _connect(ray: Any, address: str, size: int) -> None:
    settings: dict[str, Any] = {}
    if address == "local":
        # As with processes, who asks for more environments than there are cores gets them.
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
    # Ray announces the end of every actor on standard output, which belongs to results; `Lost` says it already.
    with contextlib.suppress(ImportError):
        importlib.import_module("ray._private.worker").__dict__["print_to_stdstream"] = lambda *_, **__: None


def _check_address(address: str) -> None:
    """Refuse an address where nobody answers: Ray itself would try for minutes, or for ever."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"the address of a Ray cluster is host:port, ray://host:port, auto or local; got {address!r}."
        )
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return
    grpc = import_ray("grpc")
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_CONNECTING_TIMEOUT)
        except grpc.FutureTimeoutError as error:
            raise ConfigError(
                f"no Ray cluster answers at {address} within {_CONNECTING_TIMEOUT:g} s: start one there with `ray start "
                "--head`, which says its address, or leave the address out for one on this machine."
            ) from error


@contextlib.contextmanager
def reserved(ray: Any, size: int) -> Iterator[Any]:
    """A CPU for each environment, over as many machines as there are."""
    places = ray.util.placement_group([{"CPU": 1}] * size, strategy="SPREAD")
    try:
        if not places.wait(timeout_seconds=_PLACING_TIMEOUT):
            free, total = (found.get("CPU", 0) for found in (ray.available_resources(), ray.cluster_resources()))
            raise ConfigError(
                f"{size} environments need a CPU each; of the {total:g} of the Ray cluster {free:g} are free: ask for "
                "fewer environments, add machines, or start these with a larger `ray start --num-cpus`."
            )
        yield places
    finally:
        if ray.is_initialized():
            ray.util.remove_placement_group(places)
