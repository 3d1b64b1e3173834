"""Episodes to write, LeRobot's recordings of others, and a reader that shares no code with pirl."""

import contextlib
import functools
import io
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

GOLDEN = Path(__file__).resolve().parents[2].parent / "shared" / "golden_data"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="LeRobot's datasets (../shared/golden_data) are not here")
every_version = pytest.mark.parametrize("version", ["v2.1", "v3.0"])
DEFAULTS = ("timestamp", "frame_index", "episode_index", "index", "task_index")
HEIGHT, WIDTH = 64, 96  # twelve bars of 8 pixels


def features(camera: str = "image") -> dict[str, dict[str, Any]]:
    return {
        "observation.images.top": {"dtype": camera, "shape": (HEIGHT, WIDTH, 3)},
        "observation.images.wrist": {"dtype": camera, "shape": (HEIGHT, WIDTH, 3)},
        "observation.state": {"dtype": "float32", "shape": (7,), "names": [f"joint_{i}" for i in range(7)]},
        "action": {"dtype": "float32", "shape": (3,)},
        "next.reward": {"dtype": "float32", "shape": (1,)},
        "next.done": {"dtype": "bool", "shape": (1,)},
        "segment_id": {"dtype": "uint8", "shape": (1,)},
    }


def episode(index: int, length: int = 4) -> dict[str, np.ndarray]:
    """Random numbers, and frames whose bars spell the camera, the episode and the frame in binary."""
    rng = np.random.default_rng(index)
    columns: dict[str, np.ndarray] = {
        "observation.state": rng.normal(size=(length, 7)).astype(np.float32),
        "action": rng.normal(size=(length, 3)).astype(np.float32),
        "next.reward": rng.normal(size=length).astype(np.float32),
        "next.done": np.arange(length) == length - 1,
        "segment_id": rng.integers(0, 256, length).astype(np.uint8),
    }
    for camera, name in enumerate(("top", "wrist")):
        bits = (code(camera, index, np.arange(length))[:, None] >> np.arange(12)) & 1
        frames = np.zeros((length, HEIGHT, WIDTH, 3), np.uint8)
        columns[f"observation.images.{name}"] = frames + np.repeat(bits * 255, 8, axis=1)[:, None, :, None].astype("u1")
    return columns


def code(camera: int, index: int, frame: np.ndarray) -> np.ndarray:
    return camera + 2 * index + 32 * frame


def spelled(frames: np.ndarray) -> np.ndarray:
    bars = frames.reshape(len(frames), HEIGHT, 12, 8, 3)[:, :, :, 2:6].mean(axis=(1, 3, 4)) > 127
    return bars @ (1 << np.arange(12))


def info_of(root: Path) -> dict[str, Any]:
    return json.loads((root / "meta/info.json").read_text())


def json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def listed(root: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Episodes and tasks."""
    if info_of(root)["codebase_version"] == "v2.1":
        tasks = [line["task"] for line in json_lines(root / "meta/tasks.jsonl")]
        return json_lines(root / "meta/episodes.jsonl"), tasks
    files = sorted(root.glob("meta/episodes/*/*.parquet"))
    tasks = pq.read_table(root / "meta/tasks.parquet").to_pydict()
    numbers = tasks.pop("task_index")
    (texts,) = tasks.values()
    assert numbers == list(range(len(texts)))
    return [row for file in files for row in pq.read_table(file).to_pylist()], texts


def read_episodes(root: Path) -> list[dict[str, Any]]:
    """The episodes that info.json counts: columns, frames (of videos, checked to lie at k/fps), and frames' tasks."""
    info, (rows, texts), episodes = info_of(root), listed(root), []
    for row in rows[: info["total_episodes"]]:
        index = row["episode_index"]
        v21 = {"episode_chunk": index // info["chunks_size"], "episode_index": index}

        def path(kind: str, key: str, row: dict[str, Any] = row, v21: dict[str, Any] = v21, **names: str) -> Path:
            v30 = {part: row.get(f"{key}/{part}") for part in ("chunk_index", "file_index")}
            return root / info[f"{kind}_path"].format(**v21, **v30, **names)

        table = pq.read_table(path("data", "data"))
        columns: dict[str, Any] = {}
        for name, feature in info["features"].items():
            if feature["dtype"] == "video":
                columns[name] = read_video(path("video", f"videos/{name}", video_key=name), info["fps"])
            elif feature["dtype"] == "image":
                cells = table[name].to_pylist()
                columns[name] = np.stack([np.asarray(Image.open(io.BytesIO(cell["bytes"]))) for cell in cells])
            else:
                columns[name] = np.array(table[name].to_pylist(), feature["dtype"])
        columns["task"] = [texts[number] for number in columns["task_index"]]
        assert list(dict.fromkeys(columns["task"])) == row["tasks"]
        assert {len(values) for values in columns.values()} == {row["length"]}
        episodes.append(columns)
    return episodes


def read_video(file: Path, fps: int) -> np.ndarray:
    with av.open(str(file), "r") as container:
        stream = container.streams.video[0]
        assert stream.pix_fmt == "yuv420p"
        frames = list(container.decode(stream))
    assert [frame.pts * frame.time_base for frame in frames] == [Fraction(k, fps) for k in range(len(frames))]
    return np.stack([frame.to_ndarray(format="rgb24") for frame in frames])


def assert_same_episode(read: dict[str, Any], written: dict[str, np.ndarray]) -> None:
    for name, values in written.items():
        np.testing.assert_array_equal(read[name], values, err_msg=name)
        assert read[name].dtype == values.dtype, name


def files_of(root: Path) -> dict[str, bytes]:
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


@contextlib.contextmanager
def stopped_at(step: int, stop: Callable[[], None], *, half: bool = False) -> Iterator[None]:
    """Stop as a file is about to appear, or a line about to be added, for the `step`-th time; with half a line added."""
    calls, functions = itertools.count(), {name: getattr(os, name) for name in ("replace", "pwrite")}

    def stopping(name: str, *arguments: Any) -> Any:
        if next(calls) == step:
            if half and name == "pwrite":
                file, content, place = arguments
                functions[name](file, content[: len(content) // 2], place)
            stop()
        return functions[name](*arguments)

    for name in functions:
        setattr(os, name, functools.partial(stopping, name))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(os, name, function)


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def read_rows(directory: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(f).replace_schema_metadata() for f in sorted(directory.glob("*/*.parquet"))])


def golden_episodes(name: str) -> list[dict[str, np.ndarray]]:
    """A recorded dataset's episodes, its frames losslessly: the recordings with images and with videos hold the same."""
    columns = dict(np.load(GOLDEN / name / "expected.npz"))
    columns = {key.removeprefix("column/"): value for key, value in columns.items() if key.startswith("column/")}
    images = read_rows(GOLDEN / name.replace("video", "image") / "data")
    for camera in ("observation.images.cam_high", "observation.images.cam_left_wrist"):
        cells = images[camera].to_pylist()
        columns[camera] = np.stack([np.asarray(Image.open(io.BytesIO(cell["bytes"]))) for cell in cells])
    count = columns["episode_index"].max() + 1
    return [{key: value[columns["episode_index"] == index] for key, value in columns.items()} for index in range(count)]


def declaration(root: Path) -> dict[str, Any]:
    """What to tell a writer to get a dataset like this."""
    info = info_of(root)
    declared = {key: feature for key, feature in info["features"].items() if key not in DEFAULTS}
    return {
        "fps": info["fps"],
        "features": declared,
        "robot_type": info["robot_type"],
        "version": info["codebase_version"],
        "codec": "libsvtav1",  # as LeRobot's
    }
