"""Samples per second that two processes load, each its share of every batch, against one process: weak scaling.

Each process stands for a host: it has a core of its own, and its own loader on the same dataset (two cameras, resized to
224, normalized, tokenized; frame cache built). The batch grows with the number of processes, so that each loads as much
as one alone does. One process and two take turns; the ratio is that of the medians. That the shares do not overlap, and
are together what one process loads, is seen from the rows that each of them drew.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from loader import MODEL, ROBOT, write
from pirl.data import (
    ChunkBatch,
    ChunkIndexSampler,
    ChunkSampler,
    ChunkShape,
    DatasetSource,
    FrameCacheConfig,
    Loader,
    PolicyIO,
    dataset_norm_stats,
    load_trajectories,
    open_dataset,
)
from pirl.models import Tokenizer

# Of a batch, a process loads so many.
HORIZON, SHARE = 20, 64


class RecordedSource(DatasetSource):
    """Remembers the rows it was asked for."""

    rows: list[int]

    def gather(self, position: int, count: int, shape: ChunkShape) -> ChunkBatch:
        """The next samples of the stream."""
        self.rows += self.indices.take(position, count).tolist()
        return super().gather(position, count, shape)


def main() -> None:
    """Measure both and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=6, help="episodes of 150 frames (default: 6)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side (default: 5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a turn (default: 3)")
    parser.add_argument("--share", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share:
        data, index, count = options.share
        serve(Path(data), int(index), int(count))
        return
    with tempfile.TemporaryDirectory() as directory:
        os.environ["PIRL_CACHE"] = f"{directory}/cache"
        data = Path(directory) / "data"
        write(data, options.episodes)
        open_source(data)  # so that the frame cache is there
        sides = {1: [start(data, 0, 1)], 2: [start(data, 0, 2), start(data, 1, 2)]}
        rows = {count: [json.loads(answer(process)) for process in side] for count, side in sides.items()}
        turns: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
        for _ in range(options.rounds):
            for count, side in sides.items():
                turns[count].append(samples_per_second(side, options.seconds))
        for process in (process for side in sides.values() for process in side):
            process.communicate("\n")
    (whole,), (first, second) = rows[1], rows[2]
    medians = {count: statistics.median(speed for speed, _ in found) for count, found in turns.items()}
    undisturbed = {count: statistics.median(speed for _, speed in found) for count, found in turns.items()}
    print(
        json.dumps(
            {
                "name": "loader_scaling",
                "compared": "samples per second of two processes, each loading its share, over those of one",
                "ratio": round(medians[2] / medians[1], 2),
                "target": 1.6,
                "samples_per_second": {str(count): round(speed) for count, speed in medians.items()},
                "rounds": {str(count): [round(speed) for speed, _ in found] for count, found in turns.items()},
                # As if nothing else had run on their cores.
                "ratio_in_cpu_time": round(undisturbed[2] / undisturbed[1], 2),
                "rows_in_both_shares": len(set(first) & set(second)),
                "shares_are_the_whole": sorted(first + second) == sorted(whole),
                "cores": len(os.sched_getaffinity(0)),
            }
        )
    )


def start(data: Path, index: int, count: int) -> "subprocess.Popen[str]":
    """A process that loads its share when it is told to."""
    command = [sys.executable, __file__, "--share", str(data), str(index), str(count)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer(process: "subprocess.Popen[str]") -> str:
    """The next line it says."""
    assert process.stdout is not None
    return process.stdout.readline()


def samples_per_second(side: "list[subprocess.Popen[str]]", seconds: float) -> tuple[float, float]:
    """Of all processes of a side at the same time: by the clock, and by the time that each of them computed."""
    for process in side:
        assert process.stdin is not None
        process.stdin.write(f"{seconds}\n")
        process.stdin.flush()
    speeds = [json.loads(answer(process)) for process in side]
    return sum(by_clock for by_clock, _ in speeds), sum(by_cpu for _, by_cpu in speeds)


def open_source(data: Path) -> RecordedSource:
    """The dataset, ready to be drawn from."""
    dataset = open_dataset(data)
    cache = FrameCacheConfig(*MODEL.image_resolution)
    trajectories = load_trajectories(dataset, ROBOT, MODEL, frame_cache=cache, progress=False)
    io = PolicyIO(ROBOT, MODEL, dataset_norm_stats(dataset, ROBOT, HORIZON), Tokenizer.for_model(MODEL))
    source = RecordedSource(trajectories, ChunkIndexSampler(trajectories, seed=0), io)
    source.rows = []
    return source


def serve(data: Path, index: int, count: int) -> None:
    """Say which rows come first, then load for as many seconds as is asked, and answer with the speed."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index]})  # before JAX starts its threads
    source = open_source(data)
    shares: Any = ChunkSampler(
        [source], batch_size=SHARE * count, shape=ChunkShape(HORIZON), process_index=index, process_count=count
    )
    with Loader(shares, prefetch=0) as batches:
        # Of one epoch, in which no row comes twice; as many rows for one process as for two.
        for _ in range(source.indices.size // (2 * SHARE) * 2 // count):
            next(batches)
        print(json.dumps(source.rows), flush=True)
        while line := sys.stdin.readline().strip():
            begin, cpu, samples = time.perf_counter(), time.process_time(), 0
            while time.perf_counter() - begin < float(line):
                samples += len(np.asarray(jax.block_until_ready(next(batches)).rewards))
            seconds = time.perf_counter() - begin, time.process_time() - cpu
            print(json.dumps([samples / spent for spent in seconds]), flush=True)


if __name__ == "__main__":
    main()
