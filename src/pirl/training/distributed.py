"""One run of several processes: broadcast and barrier, the shared run directory, and how they find each other."""

import importlib.util
import itertools
import json
import os
import re
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from pirl.config.schema import HostsConfig
from pirl.errors import ConfigError, in_one_line
from pirl.files import write_file
from pirl.training.run import RunDirectory

T = TypeVar("T")
# Python handles signals between two polls.
_POLL_MS = 1_000
# A message is deleted when so many more have been sent: by then all processes have read it.
_KEPT_MESSAGES = 64
_TOKEN_FILE = ".hosts"
# Seconds until a new file has to be visible on a network file system.
_FILE_SYSTEM_PATIENCE = 20.0
# Port of the main process where none is given.
_PORT = 29_475
_TORCHRUN = "MASTER_ADDR, RANK and WORLD_SIZE"
# Variables with the number of processes and the rank, of all and on this machine.
_LAUNCHERS = {
    "Open MPI": (
        *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        *("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ),
    _TORCHRUN: ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    "MPI (PMI)": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
}
# All processes use a channel in the same order; the thread that writes checkpoints has one of its own.
_channels: defaultdict[str, "itertools.count[int]"] = defaultdict(itertools.count)


def is_main_process() -> bool:
    """Whether this process acts in environments and writes the run."""
    return jax.process_index() == 0


def broadcast(make: Callable[[], T], channel: str = "main") -> T:
    """Call `make` in the main process and return its result, as JSON holds it, in all."""
    if jax.process_count() == 1:
        return make()
    key = _next_key(channel)
    if not is_main_process():
        return json.loads(_receive(key))
    made = make()
    client().key_value_set(key, json.dumps(made))
    return made


def all_gather(value: Any, channel: str = "main") -> list[Any]:
    """The values of all processes, in their order, as JSON holds them."""
    if jax.process_count() == 1:
        return [value]
    key = _next_key(channel)
    client().key_value_set(f"{key}/{jax.process_index()}", json.dumps(value))
    return [json.loads(_receive(f"{key}/{index}")) for index in range(jax.process_count())]


def barrier(channel: str = "main") -> None:
    """Wait until all processes are here. One that is lost ends the others, see `supervise`."""
    all_gather(None, channel)


def main_process_first(work: Callable[[], None]) -> None:
    """Call `work` in the main process, then in the others, which read what it left."""
    if is_main_process():
        work()
    barrier()
    if not is_main_process():
        work()


def client() -> Any:
    """JAX's connection to the coordinator, by the name that Orbax gives it; JAX has no public one."""
    return ocp.multihost.get_jax_distributed_client()


def _next_key(channel: str) -> str:
    number = next(_channels[channel])
    if is_main_process() and number >= _KEPT_MESSAGES:
        client().key_value_delete(f"pirl/{channel}/{number - _KEPT_MESSAGES}")
    return f"pirl/{channel}/{number}"


def _receive(key: str) -> str:
    while True:
        try:
            return str(client().blocking_key_value_get(key, _POLL_MS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


class SharedRequest:
    """A request that any process may make at any time, and that all act on at the same step."""

    EVERY = 4  # each poll costs a message or two
    _KEY = "pirl/request"

    def __init__(self) -> None:
        self._polls = itertools.count()
        self._sent = False

    def poll(self, mine: int | None) -> int | None:
        """What was requested, by this process or another; all processes call it equally often."""
        if jax.process_count() == 1:
            return mine
        if mine is not None and not self._sent:
            client().key_value_set(f"{self._KEY}/{jax.process_index()}", str(mine))
            self._sent = True
        return None if next(self._polls) % self.EVERY else broadcast(self._first)

    def _first(self) -> int | None:
        requests = client().key_value_dir_get(self._KEY)
        return int(requests[0][1]) if requests else None


# --- the run directory ------------------------------------------------------------------------------------------------


def open_shared_run(begin: Callable[[], RunDirectory]) -> RunDirectory:
    """The run directory: the main process opens it, the others find it on the file system that they share."""
    if jax.process_count() == 1:
        return begin()
    run = begin() if is_main_process() else None

    def announce() -> dict[str, Any]:
        assert run is not None
        token = secrets.token_hex(8)
        write_file(run.path / _TOKEN_FILE, token)
        return {"token": token, "path": str(run.path), "metadata": run.metadata}

    announced = broadcast(announce)
    path = Path(announced["path"])
    visible = all_gather(_appears(path / _TOKEN_FILE, announced["token"]))
    if run is not None:
        (run.path / _TOKEN_FILE).unlink()
    if blind := [f"host {index}" for index, is_visible in enumerate(visible) if not is_visible]:
        if run is not None:
            run.abandon()
            run.close()
        raise ConfigError(
            f"{path}, where this run is written, is not on a file system that all hosts share: {', '.join(blind)} "
            "cannot see what host 0 wrote there. Choose a directory that all of them see (--runs-dir)."
        )
    return run or FollowerRun(path, None, announced["metadata"])


def _appears(file: Path, content: str) -> bool:
    give_up = time.monotonic() + _FILE_SYSTEM_PATIENCE
    while True:
        try:
            if file.read_text() == content:
                return True
        except OSError:
            pass
        if time.monotonic() > give_up:
            return False
        time.sleep(0.1)


class FollowerRun(RunDirectory):
    """A run that the main process has open; this one writes only its own log and bad batches."""

    @property
    def log_file(self) -> Path:
        """Warnings and errors of this process."""
        return self.path / f"log-host-{jax.process_index()}.txt"

    @property
    def bad_batches(self) -> Path:
        """This process's rows of batches whose update was skipped."""
        return self.path / "bad_batches" / f"host-{jax.process_index()}"

    def note(self, **facts: Any) -> None:
        """Remember facts; the main process writes them."""
        self._metadata |= facts

    def abandon(self) -> None:
        """Left to the main process."""


# --- who belongs to the run -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hosts:
    """The processes of a run, and which of them this is; without a coordinator, JAX finds out by itself."""

    coordinator: str | None
    processes: int | None
    process_id: int | None
    found_by: str
    local_id: int | None = None
    """Which of several processes on its machine this is: it takes the accelerator of that number."""

    def __str__(self) -> str:
        return "this host" if self.process_id is None else f"host {self.process_id}"


def find_hosts(config: HostsConfig, environment: Mapping[str, str] = os.environ) -> Hosts | None:
    """The processes of this run by flags, else by the cluster's environment; None if this process is alone."""
    given = {"coordinator": config.coordinator, "processes": config.processes, "process_id": config.process_id}
    for name in ("connect_timeout", "lost_timeout"):
        if getattr(config, name) < 1:
            raise ConfigError(f"hosts.{name} = {getattr(config, name)} should be 1 second or more.")
    if config.processes == 1 and config.process_id in (None, 0):
        return None
    if None not in given.values():
        return _checked(Hosts(config.coordinator, config.processes, config.process_id, "the --hosts flags"))
    found = _of_jax(environment) or _of_slurm(environment) or _of_launcher(environment) or _of_accelerators(environment)
    flags = [f"--hosts.{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    if found is None or (found.coordinator is None and flags):
        if flags:
            raise ConfigError(
                f"{' and '.join(flags)} alone do not say who the other hosts are: give --hosts.coordinator HOST:PORT, "
                "--hosts.processes N and --hosts.process-id I together."
            )
        return None
    changes = {name: value for name, value in given.items() if value is not None}
    found = replace(found, found_by=" and ".join([found.found_by, *flags]), **changes)  # type: ignore[arg-type]
    return None if found.processes == 1 else _checked(found)


def _checked(hosts: Hosts) -> Hosts:
    if hosts.coordinator is None or hosts.processes is None or hosts.process_id is None:
        return hosts
    host, colon, port = hosts.coordinator.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65_536):
        raise ConfigError(f"the address of the first host is HOST:PORT; {hosts.coordinator!r} is none.")
    if hosts.processes < 1 or not 0 <= hosts.process_id < hosts.processes:
        raise ConfigError(
            f"process id {hosts.process_id} (by {hosts.found_by}) is none of {hosts.processes} processes: they count "
            f"from 0 to {hosts.processes - 1}."
        )
    return hosts


def join_hosts(hosts: Hosts, config: HostsConfig) -> None:
    """Meet the other processes. It has to come before anything makes JAX look for devices."""
    _check_reachable(hosts, config.connect_timeout)
    # The collectives of CPUs; accelerators have their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM, which asks this run to save and end.
    jax.config.update("jax_enable_preemption_service", False)
    known: dict[str, Any] = {}
    if hosts.coordinator is not None:
        known = {
            "coordinator_address": hosts.coordinator,
            "num_processes": hosts.processes,
            "process_id": hosts.process_id,
            "local_device_ids": None if hosts.local_id is None else [hosts.local_id],
            "cluster_detection_method": "deactivate",
        }
    try:
        jax.distributed.initialize(
            **known,
            initialization_timeout=config.connect_timeout,
            heartbeat_timeout_seconds=config.lost_timeout,
            shutdown_timeout_seconds=config.lost_timeout,
        )
    except ValueError:
        if known:
            raise
        return  # JAX finds no other hosts
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        raise ConfigError(
            f"the {hosts.processes or ''} processes of this run (known by {hosts.found_by}) did not all meet at "
            f"{hosts.coordinator} within {config.connect_timeout} s: {in_one_line(error)}. Each must be started, with a "
            "process id of its own, and its address be reachable; see --hosts.connect-timeout."
        ) from error
    counts = {sum(device.process_index == index for device in jax.devices()) for index in range(jax.process_count())}
    if len(counts) > 1:
        raise ConfigError(f"every host should have as many devices as the others; there are {sorted(counts)}.")


def _check_reachable(hosts: Hosts, seconds: float) -> None:
    """Raise if the first host cannot be reached, where JAX would abort the process."""
    if hosts.coordinator is None:
        return
    host, _, port = hosts.coordinator.rpartition(":")
    if hosts.process_id == 0:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", int(port)))
            except OSError as error:
                raise ConfigError(
                    f"port {port} of this host, at which the others are to meet it, cannot be used: {error.strerror}. "
                    "Choose another with --hosts.coordinator."
                ) from error
        return
    give_up = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
            return
        except OSError as error:
            if time.monotonic() > give_up:
                raise ConfigError(
                    f"the first host does not answer at {hosts.coordinator} (known by {hosts.found_by}) within "
                    f"{seconds:g} s: {error.strerror or error}. Was process 0 started there, and does no firewall "
                    "keep the port shut? It may take longer with --hosts.connect-timeout."
                ) from error
            time.sleep(0.2)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name)
    if value and not value.isdecimal():
        raise ConfigError(f"the environment variable {name} = {value!r} should be a number.")
    return int(value) if value else None


def _of_jax(environment: Mapping[str, str]) -> Hosts | None:
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    count, index = _number(environment, "JAX_NUM_PROCESSES"), _number(environment, "JAX_PROCESS_ID")
    if address is None or count is None or index is None:
        return None
    return Hosts(address, count, index, "JAX_COORDINATOR_ADDRESS")


def _of_slurm(environment: Mapping[str, str]) -> Hosts | None:
    # What srun sets for a step: a batch script outside of one is a single process, whatever the job has.
    nodes, count = environment.get("SLURM_STEP_NODELIST"), _number(environment, "SLURM_STEP_NUM_TASKS")
    index, job = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_JOB_ID")
    if not nodes or count in (None, 1) or index is None or job is None:
        return None
    # From node[003-007,9],other the first name, node003.
    first = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    assert first is not None
    # Jobs that share a machine meet at different ports.
    address = f"{first[1]}{first[2] or ''}:{61_440 + job % 4_096}"
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "1"))
    local = _number(environment, "SLURM_LOCALID") if not re.fullmatch(r"1(\(x\d+\))?", per_node) else None
    return Hosts(address, count, index, "SLURM", local)


def _of_launcher(environment: Mapping[str, str]) -> Hosts | None:
    for launcher, names in _LAUNCHERS.items():
        count, index, local_count, local = (_number(environment, name) for name in names)
        is_torch = launcher == _TORCHRUN
        if count in (None, 1) or index is None or (is_torch and "MASTER_ADDR" not in environment):
            continue
        port = _number(environment, "MASTER_PORT")
        if address := environment.get("MASTER_ADDR"):
            # torchrun itself listens at MASTER_PORT.
            address = f"{address}:{port + is_torch if port else _PORT}"
        elif local_count == count:
            address = f"127.0.0.1:{_PORT}"
        else:
            raise ConfigError(
                f"MPI has started {count} processes on several hosts and does not say where the first of them is: give "
                "--hosts.coordinator HOST:PORT, with the host of rank 0."
            )
        return Hosts(address, count, index, launcher, local if local_count not in (None, 1) else None)
    return None


def _of_accelerators(environment: Mapping[str, str]) -> Hosts | None:
    """On machines with TPUs and in indexed Kubernetes jobs, JAX detects the hosts when it joins them."""
    has_tpu = importlib.util.find_spec("libtpu") is not None and any(
        next(Path("/dev").glob(pattern), None) for pattern in ("accel[0-9]*", "vfio/[0-9]*")
    )
    is_job = "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment
    return Hosts(None, None, None, "JAX") if has_tpu or is_job else None
