"""CPU time of one training sample: pirl's loader, its frame cache built, against LeRobot's own dataset.

One dataset (two AV1 cameras of 480×640), one run, the same content of a sample on both sides: an action chunk with its
rewards and ends, and the observation (two cameras, state) before and after it. pirl's sample is also resized to 224,
normalized and tokenized. Where no LeRobot is installed (`make bench-loader` makes an environment with it), the other
side is LeRobot's access pattern: open, seek, decode the frames that are needed.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pirl.data import (
    ChunkIndexSampler,
    ChunkSampler,
    ChunkShape,
    Dataset,
    DatasetSource,
    DatasetWriter,
    FrameCacheConfig,
    Loader,
    PolicyIO,
    Robot,
    Trajectories,
    dataset_norm_stats,
    load_trajectories,
    open_dataset,
)
from pirl.models import Tokenizer, get_model_config

HERE = Path(__file__).resolve().parent
CAMERAS = {"base_0_rgb": "observation.images.high", "left_wrist_0_rgb": "observation.images.wrist"}
ROBOT = Robot("bench", CAMERAS, ("observation.state",), ("action",), state_dim=14, action_dim=14)
# The tiny tokenizer and model inputs, with pictures of the released models' size.
MODEL = dataclasses.replace(get_model_config("tiny"), image_resolution=(224, 224), action_dim=32)
LEROBOT_PYTHON = HERE.parent / ".venv-lerobot" / "bin" / "python"


def main() -> None:
    """Run both sides and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=12, help="episodes of 150 frames (default: 12)")
    parser.add_argument("--horizon", type=int, default=20, help="steps in an action chunk (default: 20)")
    parser.add_argument("--lerobot", type=Path, default=LEROBOT_PYTHON, help="interpreter that has LeRobot 0.4")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["PIRL_CACHE"] = f"{directory}/cache"
        write(Path(directory) / "data", options.episodes)
        dataset = open_dataset(Path(directory) / "data")
        start = time.process_time()
        cache = FrameCacheConfig(*MODEL.image_resolution)
        trajectories = load_trajectories(dataset, ROBOT, MODEL, frame_cache=cache, progress=False)
        build_seconds = time.process_time() - start
        io = PolicyIO(ROBOT, MODEL, dataset_norm_stats(dataset, ROBOT, options.horizon), Tokenizer.for_model(MODEL))
        pirl_ms = sample_milliseconds(trajectories, io, options.horizon)
        resident = resident_memory(trajectories, io, options.horizon)
        other, lerobot_ms = lerobot_milliseconds(dataset, options.lerobot, options.horizon)
        frames = len(dataset) * len(CAMERAS)
        print(
            json.dumps(
                {
                    "name": "loader",
                    "compared": f"CPU time per sample: {other} over pirl's loader with its frame cache built",
                    "ratio": round(lerobot_ms / pirl_ms, 1),
                    "target": 100,
                    "cpu_ms_per_sample": {"pirl": round(pirl_ms, 4), other: round(lerobot_ms, 2)},
                    "cache_frames_per_cpu_second": round(frames / build_seconds, 1),
                    "cache_paid_for_after_samples": round(1000 * build_seconds / (lerobot_ms - pirl_ms)),
                    "samples_in_dataset": len(dataset),
                    "resident_memory": resident,
                }
            )
        )


def write(root: Path, episodes: int, length: int = 150) -> None:
    """Pictures with some structure that moves: neither flat nor noise."""
    features: dict[str, dict[str, Any]] = {
        "observation.state": {"dtype": "float32", "shape": (14,)},
        "action": {"dtype": "float32", "shape": (14,)},
        "next.reward": {"dtype": "float32", "shape": (1,)},
        "next.done": {"dtype": "bool", "shape": (1,)},
        **{name: {"dtype": "video", "shape": (480, 640, 3)} for name in CAMERAS.values()},
    }
    random = np.random.default_rng(0)
    y, x = np.mgrid[0:480, 0:640].astype(np.float32)
    texture = random.integers(0, 25, (480, 640, 3), np.uint8)
    with DatasetWriter(root, fps=30, features=features, robot_type="bench", codec="libsvtav1") as writer:
        for episode in range(episodes):
            time_axis = np.arange(length)
            done = time_axis == length - 1
            columns: dict[str, np.ndarray] = {
                "observation.state": random.standard_normal((length, 14)).astype(np.float32),
                "action": random.standard_normal((length, 14)).astype(np.float32),
                "next.reward": (done * (episode % 2)).astype(np.float32),
                "next.done": done,
            }
            for number, camera in enumerate(CAMERAS.values()):
                phases = [0.01 * x + 0.02 * (number + 1) * y + 0.1 * step + episode for step in time_axis]
                waves = [(100 + 100 * np.sin(phase)).astype(np.uint8) for phase in phases]
                columns[camera] = np.stack([wave[..., None] + texture for wave in waves])
            writer.write_episode(columns, task="fold the towel")


def sampler(trajectories: Trajectories, io: PolicyIO, horizon: int, pool: int | None, batch_size: int) -> ChunkSampler:
    """pirl's batches."""
    stream = ChunkIndexSampler(trajectories, seed=0, episodes_per_memory_pool=pool)
    source = DatasetSource(trajectories, stream, io)
    return ChunkSampler([source], batch_size=batch_size, shape=ChunkShape(horizon))


def sample_milliseconds(trajectories: Trajectories, io: PolicyIO, horizon: int, batch_size: int = 64) -> float:
    """CPU time of a sample on the device, all threads together; the files are in the page cache, as in training."""
    rounds = []
    with Loader(sampler(trajectories, io, horizon, None, batch_size), prefetch=0) as batches:
        for _ in range(len(trajectories.rewards) // batch_size):
            next(batches)
        for _ in range(5):
            start = time.process_time()
            for _ in range(10):
                jax.block_until_ready(next(batches))
            rounds.append(1000 * (time.process_time() - start) / (10 * batch_size))
    return float(np.median(rounds))


def resident_memory(trajectories: Trajectories, io: PolicyIO, horizon: int, pool: int = 2) -> dict[str, float]:
    """What sampling an epoch adds to the memory of the process, with memory pools and without, in MiB."""
    page = os.sysconf("SC_PAGE_SIZE")

    def now() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page / 2**20

    def peak(size: int | None) -> float:
        for frames in trajectories.frames.values():
            frames.release()  # type: ignore[attr-defined]
        batches = sampler(trajectories, io, horizon, size, 16)
        before = highest = now()
        for _ in range(len(trajectories.rewards) // 16):
            next(batches)
            highest = max(highest, now())
        return round(highest - before, 1)

    bytes_per_frame = np.prod(MODEL.image_resolution) * 3 * len(CAMERAS) / 2**20
    per_episode = float(np.mean(trajectories.ends - trajectories.starts)) * bytes_per_frame
    return {
        "cache_mib": round(len(trajectories.rewards) * bytes_per_frame, 1),
        f"pool_of_{pool}_episodes_mib": round(pool * per_episode, 1),
        "added_with_pools_mib": peak(pool),
        "added_without_mib": peak(None),
    }


def lerobot_milliseconds(dataset: Dataset, python: Path, horizon: int) -> tuple[str, float]:
    """The faster of LeRobot's video backends, or its access pattern."""
    if python.exists():
        command = [str(python), str(HERE / "loader_lerobot.py"), str(dataset.root), "--horizon", str(horizon)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        results = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        fastest = min(results, key=lambda result: result["cpu_ms_per_sample"])
        print("\n".join(json.dumps(result) for result in results), file=sys.stderr)
        return f"LeRobot 0.4.4 ({fastest['backend']})", fastest["cpu_ms_per_sample"]
    random = np.random.default_rng(0)

    def sample() -> None:
        episode = int(random.integers(len(dataset.episode_ids)))
        length = int(dataset.lengths[episode])
        first = int(random.integers(length))
        for camera in CAMERAS.values():
            for frame in (first, min(first + horizon, length - 1)):
                decode_one(dataset, camera, episode, frame)

    return "LeRobot's access pattern (no LeRobot here)", measured(sample, 40)


def decode_one(dataset: Dataset, camera: str, episode: int, frame: int) -> np.ndarray:
    """Open, seek, decode one frame."""
    from pirl.data.lerobot.video import decode_frames

    segment = dataset.segments(camera)[0][episode]
    assert segment is not None
    return next(iter(decode_frames(segment.video, segment.frames[frame : frame + 1])))


def measured(run: Callable[[], None], count: int) -> float:
    """CPU time of one call in milliseconds."""
    start = time.process_time()
    for _ in range(count):
        run()
    return 1000 * (time.process_time() - start) / count


if __name__ == "__main__":
    main()
