"""A run with several hosts: the first one writes it, the others follow and write nothing but what goes wrong."""

import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from pirl.config import RLTrainConfig
from pirl.errors import ConfigError
from pirl.files import write_file
from pirl.training.display import Display
from pirl.training.exchange import Exchange
from pirl.training.metrics import MetricsLog
from pirl.training.run import RunDirectory
from pirl.training.writers import Number

_TOKEN_FILE = ".hosts"
# File systems on a network may show a new file a little later.
_PATIENCE = 20.0


def open_run(begin: Callable[[], RunDirectory]) -> RunDirectory:
    """The directory of a run: the first host begins it, the others see it on the file system that they share."""
    exchange = Exchange("run")
    if exchange.count == 1:
        return begin()
    run = begin() if exchange.is_first else None

    def tell() -> dict[str, Any]:
        assert run is not None
        token = secrets.token_hex(8)
        write_file(run.path / _TOKEN_FILE, token)
        return {"token": token, "path": str(run.path), "metadata": run.metadata}

    told = exchange.share(tell)
    place = Path(told["path"])
    sees = exchange.gather(_appears(place / _TOKEN_FILE, told["token"]))
    if run is not None:
        (run.path / _TOKEN_FILE).unlink()
    if blind := [f"host {index}" for index, seen in enumerate(sees) if not seen]:
        if run is not None:
            run.abandon()
            run.close()
        raise ConfigError(
            f"{place}, where this run is written, is not on a file system that all hosts share: {', '.join(blind)} "
            "cannot see what host 0 wrote there. Choose a directory that all of them see (--runs-dir)."
        )
    return run or FollowedRun(place, told["metadata"], exchange.index)


def _appears(file: Path, content: str) -> bool:
    give_up = time.monotonic() + _PATIENCE
    while True:
        try:
            if file.read_text() == content:
                return True
        except OSError:
            pass
        if time.monotonic() > give_up:
            return False
        time.sleep(0.1)


class FollowedRun(RunDirectory):
    """A run that the first host has open; this one remembers what is noted, and has files of its own for trouble."""

    def __init__(self, path: Path, metadata: dict[str, Any], host: int) -> None:
        super().__init__(path, None, metadata)
        self._host = host

    @property
    def log_file(self) -> Path:
        """What went wrong on this host."""
        return self.path / f"log-host-{self._host}.txt"

    @property
    def bad_batches(self) -> Path:
        """This host's part of batches whose update was skipped."""
        return self.path / "bad_batches" / f"host-{self._host}"

    def note(self, **facts: Any) -> None:
        """Remember facts; the first host writes them."""
        self._metadata |= facts

    def abandon(self) -> None:
        """That is for the first host to do."""


class FollowedLog(MetricsLog):
    """Metrics that the first host writes: all hosts compute the same."""

    def __init__(self) -> None:
        """There is nothing to open."""

    @property
    def hints(self) -> list[str]:
        """None."""
        return []

    def rewind(self, position: Mapping[str, Any]) -> None:
        """There is nothing to take back."""

    def add(self, metrics: Mapping[str, Any]) -> None:
        """They are added up elsewhere."""

    def flush(self, step: int) -> dict[str, Number]:
        """They are written elsewhere."""
        return {}

    def write(self, step: int, values: Mapping[str, Number]) -> dict[str, Number]:
        """They are written elsewhere."""
        return dict(values)

    def write_timing(self, step: int, values: Mapping[str, Number]) -> None:
        """It is written elsewhere."""

    def position(self) -> dict[str, Any]:
        """It is known elsewhere."""
        return {}

    def close(self) -> None:
        """There is nothing to close."""


class FollowedDisplay(Display):
    """A display that shows nothing; its log has what went wrong."""

    def __init__(self, log: Path) -> None:
        super().__init__(0, "", every=None, log=log)
        self._stream = open(os.devnull, "w")  # noqa: SIM115 - as long as the display lives
        self._console = Console(file=self._stream)

    def say(self, text: str) -> None:
        """The first host says it."""


def open_log(config: RLTrainConfig, run: RunDirectory, position: Any, hyperparameters: Mapping[str, Any]) -> MetricsLog:
    """Where the metrics of a run go on this host."""
    if isinstance(run, FollowedRun):
        return FollowedLog()
    return MetricsLog(run.path, config.logging, position, hyperparameters)


def open_display(config: RLTrainConfig, title: str, run: RunDirectory) -> Display:
    """What a person watches on this host."""
    if isinstance(run, FollowedRun):
        return FollowedDisplay(run.log_file)
    if config.goes_by_iterations:
        # Its table says how it goes.
        return Display(config.rollout.iterations, title, unit="iteration", every=None, log=run.log_file)
    total = config.steps + int(config.online.env_steps * config.online.utd_ratio)
    return Display(total, title, every=config.logging.every, log=run.log_file)
