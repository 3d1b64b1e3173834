"""Python imports this at its start if it finds it: the wall clock of this process is off by what a file says."""

import os
import time
from collections.abc import Callable
from typing import Any

_LOOK_EVERY = 0.05  # seconds
_file = os.environ.get("SOAK_CLOCK")
_seconds, _looked = 0, float("-inf")
_true_time, _true_time_ns = time.time, time.time_ns


def _offset() -> int:
    """Seconds to add. The first look at another number is noted beside the file, so that it is known to have come."""
    global _looked, _seconds
    if time.monotonic() - _looked > _LOOK_EVERY:
        _looked = time.monotonic()
        try:
            with open(str(_file)) as file:
                found = int(file.read())
        except (OSError, ValueError):  # not there yet, or being written
            return _seconds
        if found != _seconds:
            _seconds = found
            with open(f"{_file}.seen", "a") as seen:
                seen.write(f"{os.getpid()} {found}\n")
    return _seconds


def _shifted(clock: Callable[[], Any], unit: int) -> Callable[[], Any]:
    return lambda: clock() + _offset() * unit


if _file:
    time.time = _shifted(_true_time, 1)
    time.time_ns = _shifted(_true_time_ns, 10**9)
