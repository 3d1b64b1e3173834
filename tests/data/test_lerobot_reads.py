"""What pirl writes is read by LeRobot itself, of both formats' vintages, in environments of their own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pirl.data.lerobot.metadata import Metadata, MetadataV30
from pirl.data.lerobot.writer import DatasetWriter

PROJECT = Path(__file__).resolve().parents[2]
BENCHMARKS = PROJECT / "benchmarks"
sys.path.append(str(PROJECT / "scripts"))
from make_lerobot_env import LEROBOT, make  # noqa: E402

BACKENDS = ("pyav", "torchcodec")

# Reads everything: each frame alone, each with its neighbours, one episode alone, the statistics.
READER = """
import json, sys
import numpy as np
from loader_lerobot import import_lerobot

root, backend, deltas, out = sys.argv[1:]
lerobot, read = import_lerobot(), {}
queries = {"frame": {}, "chunk": {"delta_timestamps": json.loads(deltas)}, "third": {"episodes": [2]}}
for query, options in queries.items():
    dataset = lerobot.LeRobotDataset("pirl/written", root=root, video_backend=backend, **options)
    frames = [dataset[index] for index in range(len(dataset))]
    read |= {f"{query}/{key}": np.stack([np.asarray(frame[key]) for frame in frames]) for key in frames[0]}
for feature, stats in dataset.meta.stats.items():
    read |= {f"stats/{feature}/{name}": np.asarray(value) for name, value in stats.items()}
np.savez(out, **read)
"""

FPS = 30
LENGTHS = (9, 1, 12, 5, 7)
TASKS = ("pick up the red cube and place it in the bowl", "öffne die Schublade")
BLOCK = 16  # pixels; blocks of one colour survive the codec
COLUMNS = {
    "observation.state": ("float32", 7),
    "action": ("float32", 6),
    "next.reward": ("float32", 1),
    "next.done": ("bool", 1),
    "next.success": ("bool", 1),
    "complementary_info.is_intervention": ("bool", 1),
    "segment": ("uint8", 2),
    "gripper": ("float64", 1),
}
TOP, WRIST = "observation.images.top", "observation.images.wrist"
CAMERAS = {  # how each camera is stored, and the codec
    "av1": ({TOP: "video", WRIST: "video"}, "libsvtav1"),
    "h264 beside images": ({TOP: "video", WRIST: "image"}, "h264"),
    "images": ({TOP: "image", WRIST: "image"}, "libsvtav1"),
}
CHUNK, ENDS = range(-1, 4), (0, 4)  # steps from the current one; episodes are shorter than some and longer than others
DELTAS = dict.fromkeys(("action", "next.reward", "next.done"), CHUNK) | dict.fromkeys(
    ("observation.state", TOP, WRIST), ENDS
)


@pytest.fixture(params=LEROBOT)
def lerobot(request, tmp_path):
    """A format's version, and the interpreter of a new environment with the LeRobot that reads it."""
    environment = tmp_path / "venv"
    try:
        python = make(request.param, environment)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"pip cannot install LeRobot here: {(error.stderr or str(error)).strip().splitlines()[-1]}")
    yield request.param, python
    shutil.rmtree(environment)  # pytest would keep it, and it is large


@pytest.mark.slow
def test_lerobot_gives_back_what_was_written(lerobot, tmp_path, monkeypatch, subtests):
    version, python = lerobot
    # So that five episodes fill several directories and, in v3.0, several files of episodes.
    monkeypatch.setattr(Metadata, "chunk_size", 2)
    monkeypatch.setattr(MetadataV30, "episodes_per_file", 2)
    truth = truth_of_all_frames()
    deltas = json.dumps({key: [step / FPS for step in steps] for key, steps in DELTAS.items()})
    for number, (name, (storage, codec)) in enumerate(CAMERAS.items()):
        root = tmp_path / f"dataset{number}"
        write_dataset(root, version, storage, codec, truth)
        for backend in BACKENDS if "video" in storage.values() else ("pyav",):
            with subtests.test(cameras=name, backend=backend):
                if backend == "torchcodec" and run(python, "-c", "import torchcodec.decoders").returncode:
                    pytest.skip("torchcodec finds no FFmpeg on this system that it could use")
                out = tmp_path / "read.npz"
                run(python, "-W", "ignore", "-c", READER, root, backend, deltas, out).check_returncode()
                with np.load(out) as file:
                    check_frames(file, truth, storage)
                    check_chunks(file, truth, storage)
                    check_statistics(file, truth)
    with subtests.test("the benchmark's script measures LeRobot"):
        script = [BENCHMARKS / "loader_lerobot.py", tmp_path / "dataset0", "--samples", "2", "--horizon", "4"]
        result = run(python, *script)
        measured = [json.loads(line) for line in result.stdout.splitlines()]
        assert measured[-1]["backend"] == "pyav", result.stderr
        assert all(line["samples"] == 2 and line["cpu_ms_per_sample"] > 0 for line in measured)


def run(*command: Any) -> subprocess.CompletedProcess[str]:
    """Run a program of LeRobot's environment; what it reports is shown when a test fails."""
    home = Path(command[0]).parents[1] / "huggingface"
    settings = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(BENCHMARKS)}
    result = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    print(result.stderr, file=sys.stderr)
    return result


def truth_of_all_frames() -> dict[str, np.ndarray]:
    """Every column of every frame, [N, ...]; cameras show blocks of random colours, different in every frame."""
    random = np.random.default_rng(0)
    frames = sum(LENGTHS)
    truth: dict[str, np.ndarray] = {
        name: (random.random((frames, width)) * 200).astype(dtype).squeeze() for name, (dtype, width) in COLUMNS.items()
    }
    ends = np.cumsum(LENGTHS) - 1
    truth["next.done"] = np.isin(np.arange(frames), ends)
    truth["next.success"] = np.isin(np.arange(frames), ends[::2])
    truth["next.reward"] = truth["next.success"].astype(np.float32)
    truth["complementary_info.is_intervention"] = random.random(frames) < 0.5
    for camera in (TOP, WRIST):
        blocks = random.integers(0, 2, (frames, 4, 6, 3), dtype=np.uint8) * np.uint8(255)
        truth[camera] = blocks.repeat(BLOCK, axis=1).repeat(BLOCK, axis=2)
    truth["episode_index"] = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    truth["index"] = np.arange(frames)
    truth["frame_index"] = np.concatenate([np.arange(length) for length in LENGTHS])
    truth["timestamp"] = (truth["frame_index"] / FPS).astype(np.float32)
    # The task changes from episode to episode, and in the last one half-way.
    truth["task_index"] = truth["episode_index"] % 2
    truth["task_index"][-LENGTHS[-1] // 2 :] = 1
    truth["task"] = np.array(TASKS)[truth["task_index"]]
    return truth


def write_dataset(root: Path, version: Any, storage: dict[str, str], codec: Any, truth: dict[str, np.ndarray]) -> None:
    """Three episodes by one writer, which is closed, two by a second, which is not."""
    features: dict[str, dict[str, Any]] = {
        **{name: {"dtype": dtype, "shape": truth[name].shape[1:]} for name, dtype in storage.items()},
        **{name: {"dtype": dtype, "shape": (width,)} for name, (dtype, width) in COLUMNS.items()},
    }

    def write(dataset: DatasetWriter, episode: int) -> None:
        rows = truth["episode_index"] == episode
        tasks = truth["task"][rows].tolist()
        columns = {name: truth[name][rows] for name in features}
        dataset.write_episode(columns, task=tasks[0] if len(set(tasks)) == 1 else tasks)

    with DatasetWriter(root, fps=FPS, features=features, version=version, codec=codec) as first:
        for episode in range(3):
            write(first, episode)
    second = DatasetWriter(root, fps=FPS, features=features, version=version, codec=codec, resume=True)
    for episode in range(3, len(LENGTHS)):
        write(second, episode)


def check_frames(read: Any, truth: dict[str, np.ndarray], storage: dict[str, str]) -> None:
    """Each frame alone, in the whole dataset and where only the third episode was asked for."""
    for query, rows in (("frame", truth["index"]), ("third", truth["index"][truth["episode_index"] == 2])):
        assert {key.split("/", 1)[1] for key in read if key.startswith(query)} == set(truth)
        for name in truth:
            check(read[f"{query}/{name}"], truth[name][rows], storage.get(name), f"{query}/{name}")


def check_chunks(read: Any, truth: dict[str, np.ndarray], storage: dict[str, str]) -> None:
    """Steps outside the episode repeat its edge, and are marked."""
    ends = np.cumsum(LENGTHS)[truth["episode_index"], None]
    starts = ends - np.array(LENGTHS)[truth["episode_index"], None]
    for name, steps in DELTAS.items():
        rows = truth["index"][:, None] + np.array(steps)
        check(read[f"chunk/{name}"], truth[name][rows.clip(starts, ends - 1)], storage.get(name), f"chunk/{name}")
        np.testing.assert_array_equal(read[f"chunk/{name}_is_pad"], (rows < starts) | (rows >= ends), err_msg=name)


def check(read: np.ndarray, written: np.ndarray, storage: str | None, name: str) -> None:
    """Columns and images come back exactly; of videos the colour of each block does."""
    if storage is None:
        torch_dtype = {"f": np.float32, "i": np.int64, "u": np.int64}.get(written.dtype.kind, written.dtype)
        written = written.astype(torch_dtype)  # LeRobot makes tensors of Python's numbers, whatever the column's dtype
        assert read.dtype == written.dtype, name
        np.testing.assert_array_equal(read, written, err_msg=name)
        return
    assert read.dtype == np.float32, name
    pixels = np.moveaxis(np.round(read * 255).astype(int), -3, -1)
    if storage == "image":
        np.testing.assert_array_equal(pixels, written, err_msg=name)
        return
    middle = (..., slice(BLOCK // 2, None, BLOCK), slice(BLOCK // 2, None, BLOCK), slice(None))
    pixels, written = pixels[middle], written[middle]
    # The wrong frame, or channels in the wrong order, would turn blocks around; a mistaken range of brightness would
    # move all of them by 16 or more.
    np.testing.assert_array_equal(pixels > 127, written > 127, err_msg=name)
    assert np.abs(pixels - written.astype(int)).mean() < 8, name


def check_statistics(read: Any, truth: dict[str, np.ndarray]) -> None:
    """The statistics that LeRobot shows are those of the data; in episodes this short every pixel counts."""
    for name, values in truth.items():
        if name == "task":
            continue
        rows = values.reshape(-1, 3) / 255 if name in (TOP, WRIST) else values.reshape(len(values), -1)
        for statistic, function in {"min": np.min, "max": np.max, "mean": np.mean, "std": np.std}.items():
            found = read[f"stats/{name}/{statistic}"]
            expected = function(rows.astype(np.float64), axis=0).reshape(found.shape)
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9, err_msg=f"{name} {statistic}")
        assert read[f"stats/{name}/count"] == len(values)
        assert read[f"stats/{name}/mean"].shape == ((3, 1, 1) if name in (TOP, WRIST) else rows.shape[1:])
