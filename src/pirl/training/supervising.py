"""A process of a run with several hosts, watched from outside: when another host is lost, JAX can only be aborted."""

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

from pirl.config.schema import HostsConfig
from pirl.errors import TrainingError, UserError
from pirl.processes import format_exit
from pirl.training.hosts import Hosts, join_hosts

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENDED = "pirl/ended"
# Seconds for a process to say by itself what has ended another one too, before it is ended.
_GRACE = 3.0
_RESUME = "Start all processes again with --resume; their number may be another."


def supervise(hosts: Hosts, config: HostsConfig, work: Callable[[], int]) -> int:
    """Join the others and do the work, in a child process; returns its exit code, or says why it was aborted."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as words:
        alive, held = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(held)
            _be_child(hosts, config, work, words, alive)
        os.close(alive)
        try:
            status = _wait(child)
        finally:
            os.close(held)
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return code
        words.seek(0)
        said = words.read().decode(errors="replace")
    raise TrainingError(f"host {hosts.process_id}: {_explain(code, said, hosts, config)}")


def _wait(child: int) -> int:
    """Until the child has ended. It gets the signals that were meant for it."""

    def forward(number: int, frame: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        return os.waitpid(child, 0)[1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explain(code: int, said: str, hosts: Hosts, config: HostsConfig) -> str:
    """Why the child was ended by a signal, given what its libraries said."""
    ended = format_exit(code)
    if code != -signal.SIGABRT or "distributed service" not in said:
        tail = "\n".join(said.strip().splitlines()[-20:])
        return f"the process was {ended}, and the run cannot continue. {_RESUME} Its last words:\n{tail}"
    if unheard := re.search(r"stopped sending heartbeats\):\s*((?:[\d, ]+\s)+)", said):
        names = ", ".join(unheard[1].split())
        lost = f"host {names} has given no sign of life for {config.lost_timeout} s (--hosts.lost-timeout)"
    elif hosts.process_id != 0:
        lost = f"host 0, at {hosts.coordinator}, is gone or cannot be reached any more"
    else:
        lost = "the connection with another host was lost"
    return f"{lost}, so the run cannot continue. See its log for why. {_RESUME}"


# --- within the child ----------------------------------------------------------------------------------------------


def _be_child(hosts: Hosts, config: HostsConfig, work: Callable[[], int], words: IO[bytes], alive: int) -> None:
    """Join, work and end, in whatever way: it never returns."""
    os.setsid()  # Ctrl-C in the terminal reaches it once, from its parent
    threading.Thread(target=_end_with_parent, args=(alive,), daemon=True).start()
    _keep_words(words, hosts.process_id)
    code = 1
    try:
        try:
            join_hosts(hosts, config)
            threading.Thread(target=_listen, args=(hosts,), daemon=True).start()
            code = work()
            _leave()
        except BaseException as error:
            _wait_for_verdict(error, config)
            code = _last_words(error, hosts)
            _announce(hosts, str(error) or type(error).__name__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of JAX that wait for others do not survive the interpreter's end.
        os._exit(code)


def _keep_words(words: IO[bytes], index: int) -> None:
    """Keep what libraries write by themselves for the parent to look at; what Python says goes where it went.

    Processes but the first have nothing to say but warnings and errors, and say whose they are.
    """
    before = sys.stderr
    sys.stdout = os.fdopen(os.dup(1), "w", errors="replace") if index == 0 else open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    os.dup2(words.fileno(), 1)
    os.dup2(words.fileno(), 2)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is before:
            handler.setStream(sys.stderr)
            if index:
                handler.setFormatter(logging.Formatter(f"host {index}: %(levelname)s: %(message)s"))


def _end_with_parent(alive: int) -> None:
    """The other end of the pipe is the parent's: it closes when it ends, even by force."""
    os.read(alive, 1)
    os._exit(1)


def _last_words(error: BaseException, hosts: Hosts) -> int:
    """Say why this process ends, as the command line would; returns its exit code."""
    who = f"host {hosts.process_id}: "
    if isinstance(error, UserError):
        print(f"{who}error: {error}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        print(f"{who}interrupted", file=sys.stderr)
        return 130
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, OSError):
        print(f"{who}error: {error.filename or 'system'}: {error.strerror or error}", file=sys.stderr)
        return 2
    print(who + "".join(traceback.format_exception(error)), file=sys.stderr)
    return 1


def _wait_for_verdict(error: BaseException, config: HostsConfig) -> None:
    """An exchange with others that fails is most likely due to a lost host: JAX will find out which, and abort."""
    import jax

    if _is_of_others(error) and jax.distributed.is_initialized():
        time.sleep(1.5 * config.lost_timeout + _GRACE)


def _is_of_others(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, speaks of an exchange."""
    while error is not None:
        if re.search("gloo|nccl|coordination|barrier|UNAVAILABLE|heartbeat", str(error), re.IGNORECASE):
            return True
        error = error.__cause__ or error.__context__
    return False


def _announce(hosts: Hosts, reason: str) -> None:
    """Tell the others that this process ends, so that they need not wait for what it will not do."""
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        return
    with contextlib.suppress(Exception):  # another may have been first, or the coordinator be gone
        client.key_value_set(f"{_ENDED}/reason", f"host {hosts.process_id} has ended: {reason.splitlines()[0][:500]}")
    _say_gone(client, hosts)
    if hosts.process_id == 0:
        # The others hear it from here: without, JAX would abort them.
        give_up = time.monotonic() + 3 * _GRACE
        while time.monotonic() < give_up:
            with contextlib.suppress(Exception):
                if len(client.key_value_dir_get(f"{_ENDED}-gone")) == hosts.processes:
                    return
            time.sleep(0.1)


def _listen(hosts: Hosts) -> None:
    """End this process when another one says that it ends."""
    from jax._src import distributed

    client: Any = distributed.global_state.client
    while True:
        try:
            reason = client.blocking_key_value_get(f"{_ENDED}/reason", 10_000)
            break
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                return  # the coordinator is gone; JAX notices too
    if reason.startswith(f"host {hosts.process_id} "):
        return
    time.sleep(_GRACE)  # the same may have happened here, and is said here then
    print(
        f"host {hosts.process_id}: {reason}\nThe run cannot continue without it. {_RESUME}", file=sys.stderr, flush=True
    )
    _announce(hosts, reason)
    os._exit(1)


def _say_gone(client: Any, hosts: Hosts) -> None:
    with contextlib.suppress(Exception):
        client.key_value_set(f"{_ENDED}-gone/{hosts.process_id}", "")


def _leave() -> None:
    """Part from the others when all have done their work."""
    import jax

    with contextlib.suppress(Exception):  # all that had to be done is done
        jax.distributed.shutdown()
