"""Reading: what LeRobot itself returned, and every dialect of the format, comes back value by value."""

import json
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pirl.data.lerobot.format import Feature, glob_pattern
from pirl.data.lerobot.parquet import ColumnError, to_numpy
from pirl.data.lerobot.reader import open_dataset
from pirl.data.outcomes import OutcomeConfig
from pirl.data.validate import check_dataset
from pirl.errors import DataError
from sample_datasets import VALID, build, edit_data, edit_episodes, edit_info, read_bars

GOLDEN = Path(__file__).resolve().parents[2].parent / "shared" / "golden_data"
RECORDED = sorted(path.parent.name for path in GOLDEN.glob("*/expected.npz"))
needs_golden_data = pytest.mark.skipif(not RECORDED, reason="the recordings are not beside the project")


@needs_golden_data
@pytest.mark.parametrize("name", RECORDED or ["none"])
def test_real_datasets_read_back_as_lerobot_returned_them_and_have_no_problems(name):
    expected = np.load(GOLDEN / name / "expected.npz")
    about = json.loads(str(expected["info_json"]))
    dataset = open_dataset(GOLDEN / name)
    columns = {key.removeprefix("column/"): expected[key] for key in expected if key.startswith("column/")}
    for column, values in dataset.columns(list(columns)).items():
        np.testing.assert_array_equal(values, columns[column], err_msg=column)
        assert values.dtype == columns[column].dtype
    assert list(dataset.cameras) == about["cameras"]
    texts = {int(index): text for index, text in about["tasks"].items()}
    spoken = [dataset.rows.tasks[task] for task in dataset.rows.task_of_row]
    assert spoken == [texts[index] for index in columns["task_index"].tolist()]
    for camera in dataset.cameras:
        frames = np.concatenate([np.stack(list(dataset.decode(camera, e))) for e in range(len(dataset.episode_ids))])
        for row in about["plain_indices"]:
            np.testing.assert_array_equal(frames[row].transpose(2, 0, 1), expected[f"frame/{row}/{camera}"])
        for row in about["chunk_indices"]:
            if f"chunk/{row}/{camera}" in expected:
                end = int(dataset.starts[np.searchsorted(dataset.starts, row, side="right")])
                rows = [row, min(row + about["chunk_horizon"], end - 1)]
                np.testing.assert_array_equal(frames[rows].transpose(0, 3, 1, 2), expected[f"chunk/{row}/{camera}"])
    _, found = check_dataset(GOLDEN / name, decode=True)
    # LeRobot's converter attributes the first episode of each later data file to the file before.
    notes = ["data/file_index says"] if name == "v30_converted_video" else []
    assert [entry.message[: len("data/file_index says")] for entry in found] == notes


@pytest.mark.parametrize("part", [0, 1])
def test_every_dialect_reads_back_as_it_was_written_and_has_no_problems(part, tmp_path, subtests):
    for dialect, builder in list(VALID.items())[part::2]:
        with subtests.test(dialect):
            built = builder(tmp_path / dialect)
            dataset = open_dataset(built.root)
            assert dataset.lengths.tolist() == [len(episode) for episode in built.episodes]
            names = [built.state_key, built.action_key]
            columns = dataset.columns(names)
            for number, episode in enumerate(built.episodes):
                rows = slice(dataset.starts[number], dataset.starts[number + 1])
                for column, truth in zip(names, (episode.state, episode.action), strict=True):
                    np.testing.assert_array_equal(columns[column][rows], truth)
                assert [dataset.rows.tasks[task] for task in dataset.rows.task_of_row[rows]] == list(episode.tasks)
                for camera in built.cameras:
                    seen = [read_bars(frame) for frame in dataset.decode(camera, number)]
                    assert seen == [read_bars(frame) for frame in episode.frames[camera]]
            _, found = check_dataset(built.root, OutcomeConfig(unlabeled="success"), decode=True)
            assert [str(entry) for entry in found if entry.severity == "problem"] == []
    with pytest.raises(DataError, match=f"a directory of .*, such as {tmp_path}"):
        open_dataset(tmp_path / ("v2.0_image" if part else "v2.0_video"))


def test_episodes_removed_from_the_lists_leave_gaps_in_the_video(tmp_path):
    built = build(tmp_path / "data", version="v3.0", video_splits=((), ()))
    edit_data(built, lambda table: table.filter(pc.not_equal(table["episode_index"], 1)))
    edit_episodes(built, lambda rows: [row for row in rows if row["episode_index"] != 1])
    dataset, found = check_dataset(built.root)
    assert [entry for entry in found if entry.severity == "problem"] == []
    assert any("from_timestamp" in entry.message for entry in found)
    for camera in built.cameras:
        seen = [read_bars(frame)[1:] for position in (0, 1) for frame in dataset.decode(camera, position)]
        assert seen == [*((0, frame) for frame in range(7)), *((2, frame) for frame in range(9))]


def test_a_row_group_of_many_episodes_is_read_once(tmp_path, monkeypatch):
    built = build(tmp_path / "data", version="v3.0", cameras="image", data_split=())
    file = built.episodes[0].data_file
    pq.write_table(pq.read_table(file), file)
    assert pq.ParquetFile(file).num_row_groups == 1
    reads, read = [], pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda *args, **options: reads.append(args) or read(*args, **options)
    )
    dataset = open_dataset(built.root)
    for episode in range(3):
        for camera in built.cameras:
            assert [read_bars(frame)[1] for frame in dataset.decode(camera, episode)] == [episode] * len(
                built.episodes[episode]
            )
    assert len(reads) == len(built.cameras)


def test_values_are_never_moved_between_axes():
    matrix = pa.chunked_array([pa.array([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]])])
    flat = pa.chunked_array([pa.array([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])])
    assert to_numpy(matrix, (2, 3)).tolist() == to_numpy(flat, (2, 3)).tolist() == [[[1, 2, 3], [4, 5, 6]]]
    with pytest.raises(ColumnError, match="3×2"):
        to_numpy(matrix, (3, 2))


def test_declared_height_and_width_are_found_in_any_order():
    for shape, names in [
        ((48, 64, 3), None),
        ((3, 48, 64), None),
        ((4, 48, 64), ["a", "b", "c"]),
        ((3, 48, 64), ["c", "h", "w"]),
        ((48, 64, 3), ["height", "width", "channels"]),
        ((64, 48, 3), ["width", "height", "channels"]),
        ((48, 64, 1), {"axes": ["height", "width"]}),
    ]:
        assert Feature("camera", "video", shape, names).image_size == (48, 64), (shape, names)


def test_a_template_is_taken_literally(tmp_path):
    built = build(tmp_path / "data", version="v3.0", cameras="none", data_split=())
    (built.root / "data").rename(built.root / "d[at]*a?")
    (built.root / "da").mkdir()
    edit_info(built, ["data_path"], "d[at]*a?/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet")
    assert len(open_dataset(built.root)) == sum(map(len, built.episodes))
    assert glob_pattern("a*/{file_index}") == "a[*]/*"


def test_cells_of_an_unfinished_episode_do_not_matter(tmp_path):
    built = build(tmp_path / "data", version="v3.0", cameras="none", data_split=())

    def change(table):
        stray = table.slice(0, 1).to_pylist()[0] | {"episode_index": 99, "observation.state": None}
        return pa.concat_tables([pa.Table.from_pylist([stray], schema=table.schema), table])

    edit_data(built, change)
    dataset = open_dataset(built.root)
    states = np.concatenate([episode.state for episode in built.episodes])
    np.testing.assert_array_equal(dataset.columns(["observation.state"])["observation.state"], states)


# --- where a dataset is: a directory, LeRobot's own folder, the hub


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for the hub library that knows one dataset."""
    built = build(tmp_path / "there", cameras="none")

    def snapshot_download(name, repo_type):
        if (name, repo_type) != ("me/pick", "dataset"):
            raise OSError(f"404: no dataset {name}\nand a long story")
        return str(built.root)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return built


def test_a_hub_id_is_fetched(hub):
    dataset = open_dataset("me/pick")
    assert dataset.name == "me/pick"
    assert len(dataset) == sum(len(episode) for episode in hub.episodes)


def test_what_is_on_disk_comes_before_the_hub(hub, tmp_path):
    build(tmp_path / "home" / "me" / "pick", cameras="none", lengths=(3,))
    assert len(open_dataset("me/pick")) == 3
    build(tmp_path / "me" / "pick", cameras="none", lengths=(2,))
    assert len(open_dataset("me/pick")) == 2


def test_lerobots_own_folder_is_where_lerobot_has_it(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for variables, folder in [
        ({"HF_LEROBOT_HOME": "own", "HF_HOME": "hub", "XDG_CACHE_HOME": "cache"}, "own"),
        ({"HF_HOME": "hub", "XDG_CACHE_HOME": "cache"}, "hub/lerobot"),
        ({"XDG_CACHE_HOME": "cache"}, "cache/huggingface/lerobot"),
        ({"HF_LEROBOT_HOME": "", "HF_HOME": "", "XDG_CACHE_HOME": ""}, ".cache/huggingface/lerobot"),
        ({"HF_HOME": "~/home"}, "home/lerobot"),
    ]:
        for name in ("HF_LEROBOT_HOME", "HF_HOME", "XDG_CACHE_HOME"):
            value = variables.get(name, "")
            monkeypatch.setenv(name, value if value[:1] in ("", "~") else str(tmp_path / value))
        built = build(tmp_path / folder / "me" / "pick", cameras="none", lengths=(3,))
        assert open_dataset("me/pick").root == built.root


def test_without_the_hub_library_it_says_what_to_install(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"pirl\[hub\]"):
        open_dataset("me/pick")


def test_a_dataset_elsewhere_is_to_be_copied_or_named_as_the_hub_does():
    for place in ("https://huggingface.co/datasets/me/pick", "gs://bucket/pick", "hf://datasets/me/pick"):
        with pytest.raises(DataError, match=f"{place} is not on this machine: copy it .* NAME/DATASET"):
            open_dataset(place)
