"""One run of several processes: what they tell each other, and which of them writes. Nothing here touches a device."""

import itertools
import json
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from pirl.errors import ConfigError
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
