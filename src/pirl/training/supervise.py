"""A process of a run with several hosts, in a child that is watched: when another host is lost, JAX can only abort it."""

import contextlib
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import IO, Any

import jax

from pirl.config.schema import HostsConfig
from pirl.errors import TrainingError, UserError
from pirl.processes import format_exit
from pirl.training.distributed import Hosts, client, join_hosts

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENDED = "pirl/ended"
# Seconds for a process to report an error of its own before it is ended by that of another.
_GRACE = 3.0
_RESUME = "Start all processes again with --resume; their number may be another."


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
        try:
            code = os.waitstatus_to_exitcode(_wait(child))
        finally:
            os.close(held)
        if code >= 0:
            return code
        native_output.seek(0)
        output = native_output.read().decode(errors="replace")
    raise TrainingError(f"{hosts}: {_explain(code, output, hosts, config)}")


def _wait(child: int) -> int:
    """Wait for the child, and forward to it the signals that come meanwhile."""

    def forward(number: int, frame: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        return os.waitpid(child, 0)[1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explain(code: int, output: str, hosts: Hosts, config: HostsConfig) -> str:
    """Why a signal ended the child, given what its native libraries wrote."""
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


# --- in the child -----------------------------------------------------------------------------------------------------


def _run_child(
    hosts: Hosts, config: HostsConfig, work: Callable[[], int], native_output: IO[bytes], alive: int
) -> None:
    """Join, work and exit; it never returns."""
    os.setsid()  # Ctrl-C in the terminal reaches it once, from its parent
    threading.Thread(target=_exit_with_parent, args=(alive,), daemon=True).start()
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


def _exit_with_parent(alive: int) -> None:
    """The parent holds the other end of the pipe, which closes when it ends, even by force."""
    os.read(alive, 1)
    os._exit(1)


def _report(error: BaseException, who: str) -> int:
    """Print why this process ends, as the command line would; returns its exit code."""
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
    """End this process when another one says that it ends."""
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
