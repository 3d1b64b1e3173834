"""The hosts of a run: who they are, by flags or by what the cluster says, and how this process joins the others."""

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from pirl.config.schema import HostsConfig
from pirl.errors import ConfigError, in_one_line

# Where nobody has said which port the first host listens on.
_PORT = 29_475
_ASK = "give --hosts.coordinator HOST:PORT, --hosts.processes N and --hosts.process-id I together"


@dataclass(frozen=True)
class Hosts:
    """One of several processes: where the first one listens, how many there are, and which this is."""

    coordinator: str
    processes: int
    process_id: int
    found_by: str
    """What said so, in words."""
    local_id: int | None = None
    """Which of several processes on its machine this is: it takes the accelerator of that number."""


def find_hosts(config: HostsConfig, environment: Mapping[str, str] = os.environ) -> Hosts | None:
    """The processes of this run: as flags say, else the cluster's environment. None where this process is alone."""
    given = {"coordinator": config.coordinator, "processes": config.processes, "process_id": config.process_id}
    for name in ("connect_timeout", "lost_timeout"):
        if getattr(config, name) < 1:
            raise ConfigError(f"hosts.{name} = {getattr(config, name)} should be 1 second or more.")
    if config.processes == 1 and config.process_id in (None, 0):
        return None
    if None not in given.values():
        assert config.coordinator is not None
        assert config.processes is not None
        assert config.process_id is not None
        return _checked(Hosts(config.coordinator, config.processes, config.process_id, "the --hosts flags"))
    found = _detect(environment)
    named = [f"--hosts.{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    if found is None:
        if named:
            raise ConfigError(f"{' and '.join(named)} alone do not say who the other hosts are: {_ASK}.")
        return None
    chosen = Hosts(
        config.coordinator or found.coordinator,
        found.processes if config.processes is None else config.processes,
        found.process_id if config.process_id is None else config.process_id,
        " and ".join([found.found_by, *named]),
        found.local_id,
    )
    return None if chosen.processes == 1 else _checked(chosen)


def join_hosts(hosts: Hosts, config: HostsConfig) -> None:
    """Meet the other processes. It has to come before anything makes JAX look for devices."""
    import jax

    _reach(hosts, config.connect_timeout)
    # What CPUs exchange by; accelerators have their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM, which asks this run to save and end.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            hosts.coordinator,
            hosts.processes,
            hosts.process_id,
            None if hosts.local_id is None else [hosts.local_id],
            cluster_detection_method="deactivate",
            initialization_timeout=config.connect_timeout,
            heartbeat_timeout_seconds=config.lost_timeout,
            shutdown_timeout_seconds=config.lost_timeout,
        )
    except (jax.errors.JaxRuntimeError, RuntimeError) as error:
        raise ConfigError(
            f"the {hosts.processes} processes of this run (known by {hosts.found_by}) did not all meet at "
            f"{hosts.coordinator} within {config.connect_timeout} s: {in_one_line(error)}. Each must be started, with a "
            "process id of its own, and its address be reachable; see --hosts.connect-timeout."
        ) from error
    counts = {sum(device.process_index == index for device in jax.devices()) for index in range(hosts.processes)}
    if len(counts) > 1:
        raise ConfigError(f"every host should have as many devices as the others; there are {sorted(counts)}.")


def _checked(hosts: Hosts) -> Hosts:
    host, colon, port = hosts.coordinator.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65_536):
        raise ConfigError(f"the address of the first host is HOST:PORT; {hosts.coordinator!r} is none.")
    if hosts.processes < 1 or not 0 <= hosts.process_id < hosts.processes:
        raise ConfigError(
            f"process id {hosts.process_id} (by {hosts.found_by}) is none of {hosts.processes} processes: they count "
            f"from 0 to {hosts.processes - 1}."
        )
    return hosts


def _reach(hosts: Hosts, seconds: float) -> None:
    """Raise if the first host cannot be reached. JAX would only end the process."""
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


# --- what clusters say ---------------------------------------------------------------------------------------------


def _detect(environment: Mapping[str, str]) -> Hosts | None:
    """Who the hosts are by the environment: the first that knows of more than one process."""
    looks = (_of_jax, _of_slurm, _of_open_mpi, _of_torchrun, _of_mpi, _of_tpu)
    return next((found for look in looks if (found := look(environment)) is not None), None)


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is set."""
    for name in names:
        if value := environment.get(name):
            if not value.isdecimal():
                raise ConfigError(f"the environment variable {name} = {value!r} should be a number.")
            return int(value)
    return None


def _of_jax(environment: Mapping[str, str]) -> Hosts | None:
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    count, index = _number(environment, "JAX_NUM_PROCESSES"), _number(environment, "JAX_PROCESS_ID")
    if address is None or count is None or index is None:
        return None
    return Hosts(address, count, index, "JAX_COORDINATOR_ADDRESS")


def _of_slurm(environment: Mapping[str, str]) -> Hosts | None:
    # What srun sets for a step: a batch script that is not within one is a single process, whatever the job has.
    nodes, count = environment.get("SLURM_STEP_NODELIST"), _number(environment, "SLURM_STEP_NUM_TASKS")
    index, job = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_JOB_ID")
    if not nodes or count is None or index is None or job is None or count == 1:
        return None
    # From node[003-007,9],other the first name, node003.
    first = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    assert first is not None
    # Jobs that share a machine meet at different ports.
    address = f"{first[1]}{first[2] or ''}:{61_440 + job % 4_096}"
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "1"))
    local = _number(environment, "SLURM_LOCALID") if not re.fullmatch(r"1(\(x\d+\))?", per_node) else None
    return Hosts(address, count, index, "SLURM", local)


def _of_open_mpi(environment: Mapping[str, str]) -> Hosts | None:
    count, index = _number(environment, "OMPI_COMM_WORLD_SIZE"), _number(environment, "OMPI_COMM_WORLD_RANK")
    if count is None or index is None or count == 1:
        return None
    local_count = _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE")
    local = _number(environment, "OMPI_COMM_WORLD_LOCAL_RANK") if local_count != 1 else None
    return Hosts(_first_address(environment, count, local_count), count, index, "Open MPI", local)


def _of_mpi(environment: Mapping[str, str]) -> Hosts | None:
    count, index = _number(environment, "PMI_SIZE"), _number(environment, "PMI_RANK")
    if count is None or index is None or count == 1:
        return None
    local_count = _number(environment, "MPI_LOCALNRANKS")
    local = _number(environment, "MPI_LOCALRANKID") if local_count not in (None, 1) else None
    return Hosts(_first_address(environment, count, local_count), count, index, "MPI (PMI)", local)


def _of_torchrun(environment: Mapping[str, str]) -> Hosts | None:
    count, index = _number(environment, "WORLD_SIZE"), _number(environment, "RANK")
    if count is None or index is None or count == 1 or "MASTER_ADDR" not in environment:
        return None
    local = _number(environment, "LOCAL_RANK") if _number(environment, "LOCAL_WORLD_SIZE") not in (None, 1) else None
    # torchrun itself listens at MASTER_PORT.
    port = (_number(environment, "MASTER_PORT") or _PORT - 1) + 1
    return Hosts(f"{environment['MASTER_ADDR']}:{port}", count, index, "MASTER_ADDR, RANK and WORLD_SIZE", local)


def _first_address(environment: Mapping[str, str], count: int, local_count: int | None) -> str:
    """Where the first process of an MPI job is: MPI does not say, unless all are here."""
    if address := environment.get("MASTER_ADDR"):
        return f"{address}:{_number(environment, 'MASTER_PORT') or _PORT}"
    if local_count == count:
        return f"127.0.0.1:{_PORT}"
    raise ConfigError(
        f"MPI has started {count} processes on several hosts and does not say where the first of them is: give "
        "--hosts.coordinator HOST:PORT, with the host of rank 0."
    )


def _of_tpu(environment: Mapping[str, str]) -> Hosts | None:
    """TPU machines and Kubernetes jobs, as JAX itself finds them."""
    from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm

    is_job = "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment
    if not running_in_cloud_tpu_vm and not is_job:
        return None
    from jax._src.clusters import GceTpuCluster, GkeTpuCluster, K8sCluster

    for kind, name in ((GkeTpuCluster, "GKE"), (GceTpuCluster, "Cloud TPU"), (K8sCluster, "Kubernetes")):
        if kind.is_env_present() and (count := kind.get_process_count()) > 1:
            address = kind.get_coordinator_address(timeout_secs=300, override_coordinator_port=None)
            return Hosts(address, count, kind.get_process_id(), name)
    return None
