"""Trains trials in processes of their own, some at a time, each on its share of the cores and devices."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pirl.processes import (
    GRACE,
    Interruptions,
    Process,
    kill_process,
    share_cores,
    start_process,
    stop_processes,
    wait_a_moment,
)
from pirl.sweep.display import Display
from pirl.sweep.trials import Trial

_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Job:
    """A trial that is to come to a rung, and how."""

    trial: Trial
    rung: int
    command: tuple[str, ...]
    log: Path


# What a job ended with, and after how many seconds.
OnEnd = Callable[[Job, int, float], None]


@dataclass(frozen=True)
class Runner:
    """Runs jobs, so many at a time. The processes hold `lock` too, as long as they live."""

    slots: int
    lock: int
    display: Display
    interruptions: Interruptions
    grace: float = GRACE

    def run(self, jobs: Iterator[Job], on_end: OnEnd) -> None:
        """Until there are no more; each is asked for when there is room for it. An interruption stops them."""
        cores, environments = share_cores(self.slots), share_devices(self.slots)
        running: dict[int, tuple[Job, Process, float]] = {}
        try:
            while True:
                for slot in range(self.slots):
                    if slot not in running and (job := next(jobs, None)) is not None:
                        job.log.parent.mkdir(parents=True, exist_ok=True)
                        process = start_process(
                            job.command,
                            job.log,
                            cores=cores[slot],
                            environment=environments[slot],
                            keep_open=(self.lock,),
                        )
                        running[slot] = (job, process, time.monotonic())
                        self.display.started(job.trial.name, job.log)
                if not running:
                    return
                wait_a_moment([process for _, process, _ in running.values()], self.display.refresh)
                if self.interruptions.count:
                    raise KeyboardInterrupt
                for slot, (job, process, begun) in list(running.items()):
                    if (code := process.poll()) is not None:
                        del running[slot]
                        kill_process(process)  # what it may have left behind
                        self.display.ended(job.trial.name)
                        on_end(job, code, time.monotonic() - begun)
        finally:
            if running:
                self.display.say("stopping and saving; press Ctrl-C again to end at once")
                processes = [process for _, process, _ in running.values()]
                stop_processes(processes, self.interruptions, self.grace, self.display.refresh)


def share_devices(parts: int) -> list[dict[str, str]]:
    """What each of several processes has to be told to use its own of the devices that this one may use."""
    devices = [device for device in os.environ.get(_DEVICES, "").split(",") if device]
    if parts < 2 or len(devices) < parts:
        return [{}] * parts
    return [{_DEVICES: ",".join(devices[part::parts])} for part in range(parts)]
