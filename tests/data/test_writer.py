"""What DatasetWriter writes, read back without pirl and compared with what LeRobot itself wrote."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pirl.data.lerobot.metadata import QUANTILES, Metadata, MetadataV30, quantiles
from pirl.data.lerobot.writer import LONGEST_EPISODE, DatasetWriter
from pirl.errors import DataError
from written import (
    DEFAULTS,
    GOLDEN,
    HEIGHT,
    WIDTH,
    assert_same_episode,
    code,
    declaration,
    episode,
    features,
    files_of,
    golden_episodes,
    info_of,
    json_lines,
    listed,
    needs_golden,
    read_episodes,
    read_rows,
    spelled,
)


@pytest.mark.parametrize(("version", "camera"), [("v2.1", "h264"), ("v3.0", "libsvtav1"), ("v3.0", "image")])
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


@given(data=st.data())
@settings(max_examples=20)
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
        for key, percent in QUANTILES.items():
            true = quantiles(values)[key]
            np.testing.assert_array_equal(after[name][key], true)
            if percent != 50:
                assert np.all((np.array(before[name][key]) - true) * (percent - 50) >= 0), (name, key)


def test_files_roll_over_into_new_files_and_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetadataV30, "episodes_per_file", 3)
    monkeypatch.setattr(Metadata, "chunk_size", 2)
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


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Writes a recorded dataset anew, once; returns where ours is, and where LeRobot's."""

    @functools.cache
    def rewrite(name: str) -> tuple[Path, Path]:
        root, golden = tmp_path_factory.mktemp(name), GOLDEN / name
        texts = listed(golden)[1]
        with DatasetWriter(root, **declaration(golden)) as writer:
            for columns in golden_episodes(name):
                tasks = [texts[number] for number in columns["task_index"]]
                writer.write_episode({key: columns[key] for key in columns if key not in DEFAULTS}, task=tasks)
        return root, golden

    return rewrite


@needs_golden
@pytest.mark.parametrize("name", ["v21_video", "v21_image", "v30_video", "v30_image"])
def test_a_recorded_dataset_written_anew_equals_lerobots(
    rewritten: Callable[[str], tuple[Path, Path]], name: str
) -> None:
    ours_root, golden = rewritten(name)
    assert info_of(ours_root) == info_of(golden)
    ours, theirs = read_rows(ours_root / "data"), read_rows(golden / "data")
    assert ours.schema == theirs.schema
    plain = [field for field in ours.column_names if "images" not in field]
    assert ours.select(plain) == theirs.select(plain)
    schemas = [pq.read_schema(next((root / "data/chunk-000").iterdir())) for root in (ours_root, golden)]
    described = [json.loads(schema.metadata[b"huggingface"])["info"] for schema in schemas]
    # Releases of `datasets` from 4 on write "List", which older ones do not know.
    assert described[0] == json.loads(json.dumps(described[1]).replace('"List"', '"Sequence"'))
    relative = [{str(file.relative_to(root)) for file in root.rglob("*.*")} for root in (ours_root, golden)]
    if name.startswith("v21"):
        assert relative[0] == relative[1] - {"expected.npz"}
        check_v21_metadata(ours_root, golden)
    else:
        check_v30_metadata(ours_root, golden)


def check_v21_metadata(ours_root: Path, golden: Path) -> None:
    for file in ("meta/episodes.jsonl", "meta/tasks.jsonl"):
        assert json_lines(ours_root / file) == json_lines(golden / file)
    ours, theirs = (json_lines(root / "meta/episodes_stats.jsonl") for root in (ours_root, golden))
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


def check_v30_metadata(ours_root: Path, golden: Path) -> None:
    ours, theirs = (pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet") for root in (ours_root, golden))
    assert ours.schema == theirs.schema
    for column in ours.column_names:
        if column.endswith(("index", "length", "tasks")) and not column.startswith(("data/", "videos/", "stats/")):
            assert ours[column] == theirs[column], column
        elif column.endswith(("/min", "/max", "/count", "/mean")):
            values = [np.array(table[column].to_pylist(), float) for table in (ours, theirs)]
            np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-7, err_msg=column)
    mine, other = (json.loads((root / "meta/stats.json").read_text()) for root in (ours_root, golden))
    assert mine.keys() == other.keys()
    for feature, stats in other.items():
        assert mine[feature].keys() == stats.keys()
        for key, value in stats.items():
            assert np.shape(mine[feature][key]) == np.shape(value), (feature, key)


@needs_golden
def test_tasks_are_a_pandas_index_as_in_lerobot(rewritten: Callable[[str], tuple[Path, Path]]) -> None:
    ours_root, _ = rewritten("v30_image")
    ours, theirs = (pq.read_table(root / "meta/tasks.parquet") for root in (ours_root, GOLDEN / "v30head_video"))
    assert ours == theirs
    described = [json.loads(table.schema.metadata[b"pandas"]) for table in (ours, theirs)]
    for pandas in described:
        del pandas["creator"], pandas["pandas_version"]
    assert described[0] == described[1]


@needs_golden
def test_lerobots_own_v21_recording_can_be_continued(
    tmp_path: Path, rewritten: Callable[[str], tuple[Path, Path]]
) -> None:
    ours, golden = rewritten("v21_image")
    columns = {key: values for key, values in golden_episodes("v21_image")[1].items() if key not in DEFAULTS}
    continued = []
    for root in (ours, golden):
        copy = shutil.copytree(root, tmp_path / root.parent.name)
        writer = DatasetWriter(copy, **declaration(golden), resume=True)
        assert writer.write_episode(columns, task="another") == 5
        continued.append(read_episodes(copy))
    for one, other in zip(*continued, strict=True):
        assert one.pop("task") == other.pop("task")
        assert_same_episode(one, other)


@needs_golden
def test_lerobots_own_v30_recording_is_not_continued(tmp_path: Path) -> None:
    copy = shutil.copytree(GOLDEN / "v30_image", tmp_path / "copy")
    with pytest.raises(DataError, match="one data file each"):
        DatasetWriter(copy, **declaration(copy), resume=True)
    assert files_of(copy) == files_of(GOLDEN / "v30_image")


# --- what is refused --------------------------------------------------------------------------------------------------


def test_an_episode_that_does_not_fit_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path, fps=10, features=features())
    writer.write_episode(episode(0), task="")
    before = files_of(tmp_path)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"action": None}, "expected the columns .*'action'"),
        ({"velocity": np.zeros(4)}, "expected the columns .* got .*'velocity'"),
        ({"action": np.zeros((4, 2), np.float32)}, r"'action': expected the shape \('T', 3\), got \(4, 2\)"),
        ({"action": np.zeros((5, 3), np.float32)}, "lengths are .*'action': 5"),
        ({"action": np.array([[0, 1, 2]] * 3 + [[0, np.nan, 0]])}, "'action': .*got nan at frame 3"),
        ({"action": np.full((4, 3), 1e39)}, "'action': expected finite numbers that fit float32, got 1e\\+39"),
        ({"action": np.full((4, 3), 2**24 + 1)}, "'action': expected .* fit float32, got 16777217"),
        ({"action": np.full((4, 3), "a")}, "'action': expected float32, got <U1"),
        ({"next.done": np.zeros(4, np.int64)}, "'next.done': expected bool, got int64"),
        ({"segment_id": np.array([0, 1, 2, 256])}, "'segment_id': .*fit uint8, got 256 at frame 3"),
        ({"segment_id": np.zeros(4)}, "'segment_id': expected uint8, got float64"),
        ({"observation.images.top": np.zeros((4, HEIGHT, WIDTH, 3), np.float32)}, "top': expected uint8"),
    ]
    for changes, complaint in wrong:
        columns = {name: values for name, values in (episode(1) | changes).items() if values is not None}
        with pytest.raises(DataError, match=f"episode 1.*{complaint}"):
            writer.write_episode(columns, task="")
    for task in (["a"] * 3, [], ["a"] * 5):
        with pytest.raises(DataError, match=f"one for each of the 4 frames, got {len(task)}"):
            writer.write_episode(episode(1), task=task)
    with pytest.raises(DataError, match="every column needs a row"):
        writer.write_episode(episode(1, 0), task="")
    assert files_of(tmp_path) == before


def test_a_feature_that_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    for name, feature, complaint in [
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
        ("x", {"dtype": "video", "shape": (64, 65, 3)}, "even and at least 64, got 64 × 65"),
        ("x", {"dtype": "video", "shape": (62, 64, 3)}, "at least 64, got 62 × 64"),
    ]:
        with pytest.raises(DataError, match=f"feature {name!r}: .*{complaint}"):
            DatasetWriter(tmp_path / "new", fps=10, features={name: feature}, codec="libsvtav1")
        assert not (tmp_path / "new").exists()


def test_timestamps_stay_within_lerobots_tolerance_up_to_the_longest_episode(tmp_path: Path) -> None:
    for fps in (1, 30, 144):
        longest = LONGEST_EPISODE * fps
        writer = DatasetWriter(tmp_path / str(fps), fps=fps, features={"x": {"dtype": "bool", "shape": (1,)}})
        writer.write_episode({"x": np.zeros(longest, bool)}, task="")
        times = read_episodes(writer.root)[0]["timestamp"]
        assert np.abs(np.diff(times) - 1 / fps).max() <= 1e-4
        assert np.abs(times - np.arange(longest) / fps).max() <= 1e-4
        with pytest.raises(DataError, match="split the episode"):
            writer.write_episode({"x": np.zeros(longest + 1, bool)}, task="")


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_full_disk_is_named_and_the_episodes_before_are_safe(tmp_path: Path, version: Any, monkeypatch: Any) -> None:
    declared = {"x": {"dtype": "float32", "shape": (1,)}}
    writer = DatasetWriter(tmp_path, fps=10, features=declared, version=version)
    writer.write_episode({"x": np.ones(4)}, task="")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pirl.data.lerobot.writer.write_file", full)
        patch.setattr("pirl.data.lerobot.metadata.write_file", full)
        with pytest.raises(DataError, match="episode 1 cannot be written.*No space left"):
            writer.write_episode({"x": np.ones(4)}, task="")
    with DatasetWriter(tmp_path, fps=10, features=declared, version=version, resume=True) as resumed:
        assert resumed.write_episode({"x": np.ones(4)}, task="") == 1
