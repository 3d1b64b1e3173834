"""One run of several processes: broadcast and barrier, how they find each other, and the child that each runs in."""

import contextlib
import importlib.util
import itertools
import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import jax
import orbax.checkpoint as ocp

from pirl.config.schema import HostsConfig
from pirl.errors import ConfigError, TrainingError, UserError, in_one_line
from pirl.processes import format_exit

T = TypeVar("T")
# Seconds until a new file has to be visible on a network file system.
FILE_SYSTEM_PATIENCE = 20.0
_POLL_MS = 1_000  # Python handles signals between two polls
_KEPT_MESSAGES = 64  # after so many more, all processes have read a message
_PORT = 29_475  # of the main process, where none is given
_GRACE = 3.0  # seconds for a process to report an error of its own before it is ended by that of another
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
_ENDED = "pirl/ended"
_RESUME = "Start all processes again with --resume; their number may be another."
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
    if min(config.connect_timeout, config.lost_timeout) < 1:
        raise ConfigError("hosts.connect_timeout and hosts.lost_timeout should be 1 second or more.")
    if config.processes == 1 and config.process_id in (None, 0):
        return None
    if None not in given.values():
        return _checked(Hosts(config.coordinator, config.processes, config.process_id, "the --hosts flags"))
    found = _of_jax(environment) or _of_slurm(environment) or _of_launcher(environment) or _of_accelerators(environment)
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    flags = [f"--hosts.{name.replace('_', '-')}" for name in changes]
    if flags and (found is None or found.coordinator is None):
        raise ConfigError(
            f"{' and '.join(flags)} alone do not say who the other hosts are: give --hosts.coordinator HOST:PORT, "
            "--hosts.processes N and --hosts.process-id I together."
        )
    if found is None:
        return None
    found = replace(found, found_by=" and ".join([found.found_by, *flags]), **changes)
    return None if found.processes == 1 else _checked(found)


def _checked(hosts: Hosts) -> Hosts:
    if hosts.coordinator is None or hosts.processes is None or hosts.process_id is None:
        return hosts
    if not re.fullmatch(r".+:\d{1,5}", hosts.coordinator):
        raise ConfigError(f"the address of the first host is HOST:PORT; {hosts.coordinator!r} is none.")
    if hosts.processes < 1 or not 0 <= hosts.process_id < hosts.processes:
        raise ConfigError(
            f"process id {hosts.process_id} (by {hosts.found_by}) is none of {hosts.processes} processes: they count "
            f"from 0 to {hosts.processes - 1}."
        )
    return hosts


def join_hosts(hosts: Hosts, config: HostsConfig) -> None:
    """Meet the other processes. It has to come before anything makes JAX look for devices."""
    # The collectives of CPUs; accelerators have their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM, which asks this run to save and end.
    jax.config.update("jax_enable_preemption_service", False)
    known: dict[str, Any] = {}
    if hosts.coordinator is not None:
        _check_reachable(hosts, config.connect_timeout)
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


def _check_reachable(hosts: Hosts, seconds: float) -> None:  # where JAX would abort the process
    assert hosts.coordinator is not None
    host, _, port = hosts.coordinator.rpartition(":")
    if hosts.process_id == 0:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", int(port)))
            except (OSError, OverflowError) as error:
                raise ConfigError(
                    f"port {port} of this host, at which the others are to meet it, cannot be used: {error}. Choose "
                    "another with --hosts.coordinator."
                ) from error
        return
    give_up = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() > give_up:
                raise ConfigError(
                    f"the first host does not answer at {hosts.coordinator} (known by {hosts.found_by}) within "
                    f"{seconds:g} s: {error}. Was process 0 started there, and does no firewall keep the port shut? It "
                    "may take longer with --hosts.connect-timeout."
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


# --- the process that watches this one -------------------------------------------------------------------------------


def supervise(hosts: Hosts, config: HostsConfig, work: Callable[[], int]) -> int:
    """Join the others and do the work in a child process; returns its exit code, or raises with why it was aborted."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as native_output:
        alive, held = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(held)
            _run_child(hosts, config, work, native_output, alive)
        os.close(alive)

        def forward(number: int, frame: Any) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)

        before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        finally:
            os.close(held)
            for number, handler in before.items():
                signal.signal(number, handler)
        if code >= 0:
            return code
        native_output.seek(0)
        output = native_output.read().decode(errors="replace")
    raise TrainingError(f"{hosts}: {_explain(code, output, hosts, config)}")


def _explain(code: int, output: str, hosts: Hosts, config: HostsConfig) -> str:
    if code != -signal.SIGABRT or "distributed service" not in output:
        tail = "\n".join(output.strip().splitlines()[-20:])
        return f"the process was {format_exit(code)}, and the run cannot continue. {_RESUME} Its last output:\n{tail}"
    if silent := re.search(r"stopped sending heartbeats\):\s*((?:[\d, ]+\s)+)", output):
        names = ", ".join(silent[1].split())
        lost = f"host {names} has given no sign of life for {config.lost_timeout} s (--hosts.lost-timeout)"
    elif hosts.process_id != 0:
        lost = f"host 0, at {hosts.coordinator}, is gone or cannot be reached any more"
    else:
        lost = "the connection with another host was lost"
    return f"{lost}, so the run cannot continue. See its log for why. {_RESUME}"


def _run_child(
    hosts: Hosts, config: HostsConfig, work: Callable[[], int], native_output: IO[bytes], alive: int
) -> None:
    """Join, work and exit; it never returns."""

    def exit_with_parent() -> None:
        os.read(alive, 1)  # the parent holds the other end, which closes when it ends, even by force
        os._exit(1)

    os.setsid()  # Ctrl-C in the terminal reaches it once, from its parent
    threading.Thread(target=exit_with_parent, daemon=True).start()
    _redirect_native_output(native_output, hosts.process_id or 0)
    code = 1
    try:
        try:
            join_hosts(hosts, config)
            if jax.process_count() > 1:
                threading.Thread(target=_exit_with_others, daemon=True).start()
            code = work()
            with contextlib.suppress(Exception):  # all that had to be done is done
                jax.distributed.shutdown()
        except BaseException as error:
            if _is_of_others(error) and jax.distributed.is_initialized():
                # Most likely a host is lost: JAX will find out which, and abort this process.
                time.sleep(1.5 * config.lost_timeout + _GRACE)
            code = _report(error, str(hosts))
            _announce_end(str(error) or type(error).__name__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of JAX that wait for others do not survive the interpreter's end.
        os._exit(code)


def _redirect_native_output(output: IO[bytes], index: int) -> None:
    """Keep what native libraries write for the parent; what Python prints goes where it went.

    Processes but the first print only warnings and errors, and say whose they are.
    """
    before = sys.stderr
    sys.stdout = os.fdopen(os.dup(1), "w", errors="replace") if index == 0 else open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is before:
            handler.setStream(sys.stderr)
            if index:
                handler.setFormatter(logging.Formatter(f"host {index}: %(levelname)s: %(message)s"))


def _report(error: BaseException, who: str) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, UserError):
        text, code = f"error: {error}", error.exit_code
    elif isinstance(error, KeyboardInterrupt):
        text, code = "interrupted", 130
    elif isinstance(error, OSError):
        text, code = f"error: {error.filename or 'system'}: {error.strerror or error}", 2
    else:
        text, code = "".join(traceback.format_exception(error)), 1
    print(f"{who}: {text}", file=sys.stderr)
    return code


def _is_of_others(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is of the communication with other processes."""
    while error is not None:
        if re.search("gloo|nccl|coordination|barrier|UNAVAILABLE|heartbeat", str(error), re.IGNORECASE):
            return True
        error = error.__cause__ or error.__context__
    return False


def _announce_end(reason: str) -> None:
    """Tell the others that this process ends; the first one waits until they know, since JAX would abort them."""
    if not jax.distributed.is_initialized():
        return
    index = jax.process_index()
    with contextlib.suppress(Exception):  # another may have been first, or the coordinator be gone
        client().key_value_set(f"{_ENDED}/reason", f"host {index} has ended: {reason.splitlines()[0][:500]}")
    with contextlib.suppress(Exception):
        client().key_value_set(f"{_ENDED}-gone/{index}", "")
    give_up = time.monotonic() + 3 * _GRACE
    while index == 0 and time.monotonic() < give_up:
        with contextlib.suppress(Exception):
            if len(client().key_value_dir_get(f"{_ENDED}-gone")) == jax.process_count():
                return
        time.sleep(0.1)


def _exit_with_others() -> None:
    index = jax.process_index()
    while True:
        try:
            reason = client().blocking_key_value_get(f"{_ENDED}/reason", 10_000)
            break
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                return  # the coordinator is gone; JAX notices too
    if reason.startswith(f"host {index} "):
        return
    time.sleep(_GRACE)  # the same may have happened here, and is reported here then
    text = f"host {index}: {reason}\nThe run cannot continue without it. {_RESUME}"
    print(text, file=sys.stderr, flush=True)
    _announce_end(reason)
    os._exit(1)
