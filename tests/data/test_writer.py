"""What DatasetWriter writes, read back without pirl and compared with what LeRobot itself wrote."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import pirl.files
from pirl.data.metadata_writer import MetadataV30, MetadataWriter
from pirl.data.writer import LONGEST_EPISODE, DatasetWriter
from pirl.errors import DataError

GOLDEN = Path(__file__).resolve().parents[2].parent / "shared" / "golden_data"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="LeRobot's datasets (../shared/golden_data) are not here")
every_version = pytest.mark.parametrize("version", ["v2.1", "v3.0"])
DEFAULTS = ("timestamp", "frame_index", "episode_index", "index", "task_index")
HEIGHT, WIDTH = 16, 96  # twelve bars of 8 pixels


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
    assert tasks.pop("task_index") == list(range(len(tasks) and len(next(iter(tasks.values())))))
    return [row for file in files for row in pq.read_table(file).to_pylist()], next(iter(tasks.values()))


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


@pytest.mark.parametrize("camera", ["image", "libsvtav1", "h264"])
@every_version
def test_everything_reads_back_as_written(tmp_path: Path, version: Any, camera: str) -> None:
    lengths, texts = (50, 1, 7), ["pick", "place é", ["pick"] * 3 + ["wait\n"] * 4]
    declared = features("image" if camera == "image" else "video")
    codec: Any = "libsvtav1" if camera == "image" else camera
    with DatasetWriter(tmp_path, fps=15, features=declared, version=version, codec=codec, robot_type="aloha") as writer:
        for index, length in enumerate(lengths):
            assert writer.write_episode(episode(index, length), task=texts[index]) == index
    read = read_episodes(tmp_path)
    assert len(read) == 3
    row = 0
    for index, (columns, length, task) in enumerate(zip(read, lengths, texts, strict=True)):
        written = episode(index, length)
        cameras = {name: written.pop(name) for name in list(written) if "images" in name}
        assert_same_episode(columns, written)
        for number, (name, frames) in enumerate(cameras.items()):
            np.testing.assert_array_equal(spelled(columns[name]), code(number, index, np.arange(length)))
            error = np.abs(columns[name].astype(int) - frames)
            assert error.max() == 0 if camera == "image" else error.mean() < 8  # of 255, at hard edges everywhere
        assert columns["task"] == ([task] * length if isinstance(task, str) else task)
        np.testing.assert_array_equal(columns["timestamp"], np.float32(np.arange(length) / 15))
        np.testing.assert_array_equal(columns["frame_index"], np.arange(length))
        np.testing.assert_array_equal(columns["episode_index"], index)
        np.testing.assert_array_equal(columns["index"], row + np.arange(length))
        row += length
    assert listed(tmp_path)[1] == ["pick", "place é", "wait\n"]
    info = info_of(tmp_path)
    assert [info[f"total_{name}"] for name in ("episodes", "frames", "tasks")] == [3, 58, 3]


@pytest.mark.parametrize("fps", [1, 7, 15, 30, 50, 60])
@pytest.mark.parametrize("codec", ["libsvtav1", "h264"])
def test_frames_of_a_video_lie_exactly_at_their_timestamps(tmp_path: Path, codec: Any, fps: int) -> None:
    declared = {"camera": {"dtype": "video", "shape": (HEIGHT, WIDTH, 3)}}
    frames = episode(0, 40)["observation.images.top"]
    writer = DatasetWriter(tmp_path, fps=fps, features=declared, codec=codec)
    writer.write_episode({"camera": frames}, task="")
    (read,) = read_episodes(tmp_path)  # checks the times
    np.testing.assert_array_equal(spelled(read["camera"]), code(0, 0, np.arange(40)))
    (row,), _ = listed(tmp_path)
    assert (row["videos/camera/from_timestamp"], row["videos/camera/to_timestamp"]) == (0, 40 / fps)


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_any_declared_columns_of_any_length_read_back(tmp_path_factory: Any, data: st.DataObject) -> None:
    dtypes = ["bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64"]
    names = st.text(st.characters(exclude_characters="/\\\0", codec="utf-8"), min_size=1, max_size=8)
    names = names.filter(lambda name: ".." not in name and name not in DEFAULTS)
    columns = data.draw(
        st.dictionaries(names, st.tuples(st.sampled_from(dtypes), st.integers(1, 4)), min_size=1, max_size=5)
    )
    declared: dict[str, Any] = {name: {"dtype": dtype, "shape": (width,)} for name, (dtype, width) in columns.items()}
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    version, fps = data.draw(st.sampled_from(["v2.1", "v3.0"])), data.draw(st.integers(1, 200))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    root = tmp_path_factory.mktemp("dataset")
    written = []
    for length in lengths:  # every episode by another writer
        with DatasetWriter(root, fps=fps, features=declared, version=version, resume=True) as writer:
            values = {
                name: np.frombuffer(rng.bytes(length * width * 8), "i8").reshape(length, width).astype(np.int16)
                for name, (_, width) in columns.items()
            }
            written.append({name: cells.astype(columns[name][0]) for name, cells in values.items()})
            writer.write_episode(written[-1], task=f"task {length % 3}")
    read = read_episodes(root)
    for episode_read, episode_written in zip(read, written, strict=True):
        squeezed = {name: cells[:, 0] if cells.shape[1] == 1 else cells for name, cells in episode_written.items()}
        assert_same_episode(episode_read, squeezed)
    rows = np.concatenate([columns["index"] for columns in read])
    np.testing.assert_array_equal(rows, np.arange(sum(lengths)))


# Against LeRobot's own files.


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


def read_rows(directory: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(f).replace_schema_metadata() for f in sorted(directory.glob("*/*.parquet"))])


def rewrite(name: str, root: Path) -> tuple[dict[str, Any], Path]:
    """Write a recorded dataset anew."""
    info = info_of(GOLDEN / name)
    tasks = listed(GOLDEN / name)[1]
    declared = {key: feature for key, feature in info["features"].items() if key not in DEFAULTS}
    with DatasetWriter(
        root, fps=info["fps"], features=declared, robot_type=info["robot_type"], version=info["codebase_version"]
    ) as writer:
        for columns in golden_episodes(name):
            given = {key: value for key, value in columns.items() if key in declared}
            writer.write_episode(given, task=[tasks[number] for number in columns["task_index"]])
    return info, GOLDEN / name


@needs_golden
@pytest.mark.parametrize("name", ["v21_video", "v21_image", "v30_video", "v30_image"])
def test_a_recorded_dataset_written_anew_equals_lerobots(tmp_path: Path, name: str) -> None:
    info, golden = rewrite(name, tmp_path)
    assert info_of(tmp_path) == info
    ours, theirs = read_rows(tmp_path / "data"), read_rows(golden / "data")
    assert ours.schema == theirs.schema
    plain = [field for field in ours.column_names if "images" not in field]
    assert ours.select(plain) == theirs.select(plain)
    schemas = [pq.read_schema(next((root / "data/chunk-000").iterdir())) for root in (tmp_path, golden)]
    described = [json.loads(schema.metadata[b"huggingface"])["info"] for schema in schemas]
    # Releases of `datasets` from 4 on write "List", which older ones do not know.
    assert described[0] == json.loads(json.dumps(described[1]).replace('"List"', '"Sequence"'))
    relative = [{str(file.relative_to(root)) for file in root.rglob("*.*")} for root in (tmp_path, golden)]
    if name.startswith("v21"):
        assert relative[0] == relative[1] - {"expected.npz"}


@needs_golden
@pytest.mark.parametrize("name", ["v21_video", "v21_image"])
def test_v21_metadata_equal_lerobots(tmp_path: Path, name: str) -> None:
    _, golden = rewrite(name, tmp_path)
    for file in ("meta/episodes.jsonl", "meta/tasks.jsonl"):
        assert json_lines(tmp_path / file) == json_lines(golden / file)
    ours, theirs = (json_lines(root / "meta/episodes_stats.jsonl") for root in (tmp_path, golden))
    assert [line["episode_index"] for line in ours] == [line["episode_index"] for line in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["stats"].keys() == other["stats"].keys()
        for feature, stats in other["stats"].items():
            assert mine["stats"][feature].keys() == stats.keys()
            assert mine["stats"][feature]["count"] == stats["count"]
            for key, value in stats.items():
                found = np.array(mine["stats"][feature][key])
                assert found.shape == np.shape(value)
                assert found.dtype == np.array(value).dtype
                np.testing.assert_allclose(found.astype(float), np.array(value, float), rtol=2e-5, atol=1e-7)


@needs_golden
@pytest.mark.parametrize("name", ["v30_video", "v30_image"])
def test_v30_metadata_equal_lerobots(tmp_path: Path, name: str) -> None:
    _, golden = rewrite(name, tmp_path)
    ours, theirs = (pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet") for root in (tmp_path, golden))
    assert ours.schema == theirs.schema
    for column in ours.column_names:
        if column.endswith(("index", "length", "tasks")) and not column.startswith(("data/", "videos/", "stats/")):
            assert ours[column] == theirs[column], column
        elif column.endswith(("/min", "/max", "/count", "/mean")):
            values = [np.array(table[column].to_pylist(), float) for table in (ours, theirs)]
            np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-7, err_msg=column)
    mine, other = (json.loads((root / "meta/stats.json").read_text()) for root in (tmp_path, golden))
    assert mine.keys() == other.keys()
    for feature, stats in other.items():
        assert mine[feature].keys() == stats.keys()
        for key, value in stats.items():
            assert np.shape(mine[feature][key]) == np.shape(value), (feature, key)


@needs_golden
def test_tasks_are_a_pandas_index_as_in_lerobot(tmp_path: Path) -> None:
    rewrite("v30_image", tmp_path)
    ours, theirs = (pq.read_table(root / "meta/tasks.parquet") for root in (tmp_path, GOLDEN / "v30head_video"))
    assert ours == theirs
    described = [json.loads(table.schema.metadata[b"pandas"]) for table in (ours, theirs)]
    for pandas in described:
        del pandas["creator"], pandas["pandas_version"]
    assert described[0] == described[1]


# Statistics of the whole.


def test_stats_json_is_exact_when_closed_and_encloses_before(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path, fps=10, features=features())
    for index, length in enumerate((30, 3, 11)):
        writer.write_episode(episode(index, length), task="")
    read = read_episodes(tmp_path)
    before = json.loads((tmp_path / "meta/stats.json").read_text())
    writer.close()
    after = json.loads((tmp_path / "meta/stats.json").read_text())
    for name in ("observation.state", "action", "next.reward", "next.done", "segment_id", *DEFAULTS):
        values = np.concatenate([columns[name].reshape(len(columns[name]), -1) for columns in read]).astype(float)
        for stats in (before[name], after[name]):
            np.testing.assert_allclose(stats["mean"], values.mean(axis=0), atol=1e-12)
            np.testing.assert_allclose(stats["std"], values.std(axis=0), atol=1e-12)
            np.testing.assert_array_equal(stats["min"], values.min(axis=0))
            np.testing.assert_array_equal(stats["max"], values.max(axis=0))
            assert stats["count"] == [44]
        for key, level in {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}.items():
            true = np.quantile(values, level, axis=0)
            np.testing.assert_allclose(after[name][key], true, atol=1e-12)
            if level != 0.5:
                assert np.all((np.array(before[name][key]) - true) * (level - 0.5) >= 0), (name, key)


# Killed, resumed, refused.


def write_and_die(root: str, version: Any, camera: str) -> None:
    """Write datasets whose third episode is killed before its k-th file appears, for every k, and one that is whole."""
    survived = False
    for step in range(100):
        if survived:
            return
        if (child := os.fork()) == 0:
            start = DatasetWriter(
                Path(root, str(step)), fps=10, features=features(camera), version=version, codec="h264"
            )
            for index in range(2):
                start.write_episode(episode(index), task=f"task {index}")
            calls, replace = iter(range(100)), os.replace

            def dying(*paths: Any, step: int = step, calls: Any = calls, replace: Any = replace) -> None:
                if next(calls) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                replace(*paths)

            pirl.files.os.replace = dying  # type: ignore[attr-defined]
            start.write_episode(episode(2), task="task 2")
            os._exit(0)
        survived = os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("camera", ["image", "video"])
@every_version
def test_a_writer_killed_at_any_moment_leaves_a_dataset_that_continues(
    tmp_path: Path, version: str, camera: str
) -> None:
    program = f"import test_writer; test_writer.write_and_die({str(tmp_path)!r}, {version!r}, {camera!r})"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, check=True)
    *killed, whole = sorted(tmp_path.iterdir(), key=lambda root: int(root.name))
    assert len(killed) == 5 + 2 * (camera == "video")
    assert len(read_episodes(whole)) == 3
    for root in killed:
        read = read_episodes(root)
        assert len(read) == 2, "an episode counts only when info.json says so"
        assert any(".partial-" in file.name for file in root.rglob("*")), "the test should kill while a file is written"
        writer = DatasetWriter(root, fps=10, features=features(camera), version=version, codec="h264", resume=True)
        assert (writer.num_episodes, writer.num_frames) == (2, 8)
        assert files_of(root).keys() < files_of(whole).keys()
        assert len(listed(root)[0]) == len(listed(root)[1]) == 2, "resuming drops what the killed episode left"
        assert writer.write_episode(episode(2), task="task 2") == 2
        again, once = files_of(root), files_of(whole)
        again.pop("meta/stats.json"), once.pop("meta/stats.json", None)  # sums in another order
        assert again == once


def files_of(root: Path) -> dict[str, bytes]:
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


@every_version
def test_a_failed_write_leaves_the_dataset_and_the_writer_as_they_were(
    tmp_path: Path, version: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = DatasetWriter(tmp_path, fps=10, features=features(), version=version)
    writer.write_episode(episode(0), task="a")
    before = files_of(tmp_path)
    replace, failures = os.replace, 0
    for step in range(100):
        calls = iter(range(1000))

        def failing(*paths: Any, step: int = step, calls: Any = calls) -> None:
            if next(calls) == step:
                raise KeyboardInterrupt
            replace(*paths)

        monkeypatch.setattr(os, "replace", failing)
        try:
            writer.write_episode(episode(1), task="b")
            break
        except KeyboardInterrupt:
            failures += 1
            assert files_of(tmp_path) == before
            assert writer.num_episodes == 1
    assert failures == 5
    monkeypatch.undo()
    writer.write_episode(episode(2), task="c")
    for index, columns in enumerate(read_episodes(tmp_path)):
        assert_same_episode(columns, episode(index))
        assert columns["task"] == ["abc"[index]] * 4


def test_files_roll_over_into_new_files_and_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetadataV30, "episodes_per_file", 3)
    monkeypatch.setattr(MetadataWriter, "chunk_size", 2)
    declared = {"x": {"dtype": "int64", "shape": (1,)}}
    for count in (5, 6, 1):  # 6 and 12 end a file of episodes
        writer = DatasetWriter(tmp_path, fps=10, features=declared, resume=True)
        for _ in range(count):
            writer.write_episode({"x": np.full(2, writer.num_episodes)}, task="")
    assert [list(columns["x"]) for columns in read_episodes(tmp_path)] == [[index, index] for index in range(12)]
    rows = listed(tmp_path)[0]
    assert [row["episode_index"] for row in rows] == list(range(12))
    for row in rows:
        place = "meta/episodes/chunk-{meta/episodes/chunk_index:03d}/file-{meta/episodes/file_index:03d}.parquet"
        file = pq.read_table(tmp_path / place.format(**row))
        assert row["episode_index"] in file["episode_index"].to_pylist()
    assert {len(list(directory.iterdir())) for directory in (tmp_path / "data").iterdir()} == {2}


@needs_golden
def test_lerobots_own_v21_recording_can_be_continued(tmp_path: Path) -> None:
    info, golden = rewrite("v21_image", tmp_path / "ours")
    for name, content in files_of(golden).items():
        if not name.endswith("npz"):
            (tmp_path / "theirs" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "theirs" / name).write_bytes(content)
    declared = {key: feature for key, feature in info["features"].items() if key not in DEFAULTS}
    options: dict[str, Any] = {"fps": 30, "robot_type": "aloha", "version": "v2.1", "resume": True}
    columns = {key: value for key, value in golden_episodes("v21_image")[1].items() if key in declared}
    for root in (tmp_path / "ours", tmp_path / "theirs"):
        assert DatasetWriter(root, features=declared, **options).write_episode(columns, task="another") == 5
    ours, theirs = (read_episodes(tmp_path / name) for name in ("ours", "theirs"))
    for one, other in zip(ours, theirs, strict=True):
        assert_same_episode(one, {key: value for key, value in other.items() if key != "task"})
        assert one["task"] == other["task"]


@needs_golden
def test_lerobots_own_v30_recording_is_not_continued(tmp_path: Path) -> None:
    info = info_of(GOLDEN / "v30_image")
    for name, content in files_of(GOLDEN / "v30_image").items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    declared = {key: feature for key, feature in info["features"].items() if key not in DEFAULTS}
    with pytest.raises(DataError, match="one data file each"):
        DatasetWriter(tmp_path, fps=30, robot_type="aloha", features=declared, resume=True)
    assert files_of(tmp_path) == files_of(GOLDEN / "v30_image")


def damage_info(root: Path) -> None:
    (root / "meta/info.json").write_text("{")


def forget_episodes(root: Path) -> None:
    info = info_of(root)
    info["total_episodes"] = 1
    (root / "meta/info.json").write_text(json.dumps(info))


def lose_metadata(root: Path) -> None:
    for file in [*root.glob("meta/*.jsonl"), *root.glob("meta/tasks.parquet")]:
        file.unlink()


@pytest.mark.parametrize(
    ("change", "options", "complaint"),
    [
        (None, {"resume": False}, "not empty"),
        (None, {"fps": 20}, "fps is 10 there, and 20 here"),
        (None, {"robot_type": "so101"}, "robot_type is None there, and 'so101' here"),
        (None, {"features": features() | {"action": {"dtype": "float32", "shape": (4,)}}}, "action / shape"),
        (None, {"features": features() | {"extra": {"dtype": "bool", "shape": (1,)}}}, "extra"),
        (damage_info, {}, "cannot be read"),
        (lambda root: (root / "meta/info.json").unlink(), {}, "no dataset to continue"),
        (forget_episodes, {}, "has 1 episodes, yet .* is there"),
        (lose_metadata, {}, "tasks|lines"),
    ],
)
@every_version
def test_a_directory_that_cannot_be_continued_is_refused_and_not_touched(
    tmp_path: Path, version: str, change: Callable[[Path], None] | None, options: dict[str, Any], complaint: str
) -> None:
    declared: dict[str, Any] = {"fps": 10, "features": features(), "version": version, "resume": True}
    writer = DatasetWriter(tmp_path, **declared)
    for index in range(3):
        writer.write_episode(episode(index), task="")
    if change:
        change(tmp_path)
    before = files_of(tmp_path)
    with pytest.raises(DataError, match=complaint):
        DatasetWriter(tmp_path, **declared | options)
    assert files_of(tmp_path) == before


def test_another_version_is_refused(tmp_path: Path) -> None:
    DatasetWriter(tmp_path, fps=10, features=features(), version="v2.1")
    with pytest.raises(DataError, match="codebase_version is 'v2.1' there"):
        DatasetWriter(tmp_path, fps=10, features=features(), version="v3.0", resume=True)


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    for resume in (False, True):
        with pytest.raises(DataError, match="not empty|no dataset to continue"):
            DatasetWriter(tmp_path, fps=10, features=features(), resume=resume)


def test_the_second_of_two_writers_is_stopped(tmp_path: Path) -> None:
    first = DatasetWriter(tmp_path, fps=10, features=features())
    second = DatasetWriter(tmp_path, fps=10, features=features(), resume=True)
    first.write_episode(episode(0), task="")
    with pytest.raises(DataError, match="only one writer"):
        second.write_episode(episode(1), task="")
    assert_same_episode(read_episodes(tmp_path)[0], episode(0))


# Bad input.


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"action": None}, "no column for 'action'"),
        ({"velocity": np.zeros(4)}, "unknown columns 'velocity'"),
        ({"action": np.zeros((4, 2), np.float32)}, r"'action': expected the shape \('T', 3\), got \(4, 2\)"),
        ({"action": np.zeros(4, np.float32)}, r"'action': expected the shape \('T', 3\), got \(4,\)"),
        ({"action": np.zeros((5, 3), np.float32)}, "lengths are .*'action': 5"),
        ({"action": np.array([[0, 1, 2]] * 3 + [[0, np.nan, 0]])}, "'action': .*got nan at frame 3, component 1"),
        ({"action": np.full((4, 3), 1e39)}, "'action': expected finite numbers, got 1e\\+39"),
        ({"action": np.full((4, 3), 2**24 + 1)}, "'action': expected numbers that fit float32, got 16777217"),
        ({"action": np.full((4, 3), "a")}, "'action': expected float32, got <U1"),
        ({"next.done": np.zeros(4, np.float32)}, "'next.done': expected bool, got float32"),
        ({"next.done": np.zeros(4, np.int64)}, "'next.done': expected bool, got int64"),
        ({"segment_id": np.array([0, 1, 2, 256])}, "'segment_id': .*fit uint8, got 256 at frame 3"),
        ({"segment_id": np.array([0, 1, 2, -1])}, "'segment_id': .*fit uint8, got -1"),
        ({"segment_id": np.zeros(4)}, "'segment_id': expected uint8, got float64"),
        ({"observation.images.top": np.zeros((4, HEIGHT, WIDTH, 3), np.float32)}, "top': expected frames of uint8"),
        ({"observation.images.top": np.zeros((4, 3, HEIGHT, WIDTH), np.uint8)}, "top': expected the shape"),
    ],
)
def test_an_episode_that_does_not_fit_is_named_and_nothing_is_written(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    writer = DatasetWriter(tmp_path, fps=10, features=features())
    writer.write_episode(episode(0), task="")
    before = files_of(tmp_path)
    columns = {name: values for name, values in (episode(1) | changes).items() if values is not None}
    with pytest.raises(DataError, match=f"episode 1.*{complaint}"):
        writer.write_episode(columns, task="")
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("task", [["a"] * 3, [], ["a"] * 5])
def test_tasks_must_match_the_frames(tmp_path: Path, task: list[str]) -> None:
    writer = DatasetWriter(tmp_path, fps=10, features=features())
    with pytest.raises(DataError, match=f"one for each of the 4 frames, got {len(task)}"):
        writer.write_episode(episode(0), task=task)


def test_an_episode_needs_frames(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no frames"):
        DatasetWriter(tmp_path, fps=10, features=features()).write_episode(episode(0, 0), task="")


def test_floats_are_rounded_and_small_integers_kept(tmp_path: Path) -> None:
    declared = {"x": {"dtype": "float32", "shape": (2,)}, "n": {"dtype": "int64", "shape": (1,)}}
    values = np.random.default_rng(0).normal(size=(5, 2))
    DatasetWriter(tmp_path, fps=10, features=declared).write_episode(
        {"x": values, "n": np.arange(5, dtype="u1")}, task=""
    )
    assert_same_episode(read_episodes(tmp_path)[0], {"x": values.astype(np.float32), "n": np.arange(5)})


@pytest.mark.parametrize(
    ("name", "feature", "complaint"),
    [
        ("a/b", {"dtype": "float32", "shape": (1,)}, "must not contain /"),
        ("..", {"dtype": "float32", "shape": (1,)}, "must not contain"),
        ("", {"dtype": "float32", "shape": (1,)}, "must not contain"),
        ("timestamp", {"dtype": "float32", "shape": (1,)}, "leave it out"),
        ("x", {"dtype": "complex64", "shape": (1,)}, "dtype should be one of .* got 'complex64'"),
        ("x", {"shape": (1,)}, "dtype should be"),
        ("x", {"dtype": "float32"}, "shape of float32 should be"),
        ("x", {"dtype": "float32", "shape": (2, 2)}, r"should be \(width,\), got \(2, 2\)"),
        ("x", {"dtype": "float32", "shape": (0,)}, "shape"),
        ("x", {"dtype": "image", "shape": (3, 16, 16)}, r"should be \(height, width, 3\), got \(3, 16, 16\)"),
        ("x", {"dtype": "video", "shape": (16, 17, 3)}, "must be even, got 16 × 17"),
    ],
)
def test_a_feature_that_cannot_be_stored_is_refused(
    tmp_path: Path, name: str, feature: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(DataError, match=f"feature {name!r}: .*{complaint}"):
        DatasetWriter(tmp_path / "new", fps=10, features={name: feature})
    assert not (tmp_path / "new").exists()


def test_frames_too_small_for_the_encoder_are_reported(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path, fps=10, features={"camera": {"dtype": "video", "shape": (2, 2, 3)}})
    with pytest.raises(DataError, match="libsvtav1 cannot encode frames of 2 × 2"):
        writer.write_episode({"camera": np.zeros((3, 2, 2, 3), np.uint8)}, task="")
    assert list(files_of(tmp_path)) == ["meta/info.json"]


@pytest.mark.parametrize("fps", [1, 15, 30, 60, 144])
def test_timestamps_stay_within_lerobots_tolerance_up_to_the_longest_episode(tmp_path: Path, fps: int) -> None:
    longest = LONGEST_EPISODE * fps
    writer = DatasetWriter(tmp_path, fps=fps, features={"x": {"dtype": "bool", "shape": (1,)}})
    writer.write_episode({"x": np.zeros(longest, bool)}, task="")
    times = read_episodes(tmp_path)[0]["timestamp"]
    assert np.abs(np.diff(times) - 1 / fps).max() <= 1e-4
    assert np.abs(times - np.arange(longest) / fps).max() <= 1e-4
    with pytest.raises(DataError, match="split the episode"):
        writer.write_episode({"x": np.zeros(longest + 1, bool)}, task="")
