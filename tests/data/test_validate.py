"""Checking: sound data passes, and every kind of damage is named by file, episode, column or value."""

import io
import os
import shutil

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pirl.data.lerobot.reader import open_dataset
from pirl.data.outcomes import OutcomeConfig
from pirl.data.prepare import summarize
from pirl.data.validate import check_dataset
from pirl.errors import DataError
from sample_datasets import (
    BROKEN,
    build,
    edit_column,
    edit_data,
    edit_info,
    set_episode,
)
from sample_datasets.build import write_video


def snapshot(directory):
    return {
        os.path.join(parent, name): os.stat(os.path.join(parent, name), follow_symlinks=False).st_mtime_ns
        for parent, directories, names in os.walk(directory)
        for name in [*directories, *names]
    }


# Reported, but no reason not to train: the files themselves are read, and they are sound.
NOTES = (
    "total_episodes_too", "total_frames_other", "dtype_unknown", "dtype_object", "camera_shape_flat", "camera_shape_four",
    "other_size", "other_image_size", "long_video", "time_goes_back", "nan_timestamp", "constant_action_dimension",
    "feature_without_column", "ghost_", "no_tasks", "episode_of_length_zero", "no_length",
)  # fmt: skip
# Links that are followed: nothing is reported.
FOLLOWED = ("linked_parquet", "linked_video", "linked_chunk")


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_damage_is_named(version, tmp_path):
    """Every damage of the catalogue, by the file, episode, column or value that it is expected to be reported with."""
    missing = {}
    for name, (builder, expected) in BROKEN.items():
        if name.endswith("_v30") != (version == "v3.0"):
            continue
        place = tmp_path / name
        built = builder(place / "data")
        before = snapshot(place)
        _, found = check_dataset(built.root, decode=True)
        severities = ("problem", "note") if name.startswith(NOTES) else ("problem",)
        problems = "\n".join(str(entry) for entry in found if entry.severity in severities).lower()
        if name.startswith(FOLLOWED):
            missing[name] = [str(entry) for entry in found]
        else:  # alternatives are separated by |
            missing[name] = [text for text in expected if not any(each in problems for each in text.lower().split("|"))]
        assert snapshot(place) == before
    assert {name: texts for name, texts in missing.items() if texts} == {}
    assert len(missing) > 30


def check(built, severity="problem"):
    _, found = check_dataset(built.root, OutcomeConfig(unlabeled="success"))
    return [str(entry) for entry in found if entry.severity == severity]


def replace(built, column, values):
    """Set a column of every file; `values` makes it from the table."""
    edit_data(built, lambda table: table.set_column(table.column_names.index(column), column, pa.array(values(table))))


@pytest.mark.parametrize(
    ("column", "value", "expected", "version"),
    [
        ("task_index", -1, "refers to no task", "v2.1"),
        ("task_index", 2**60, "refers to no task", "v3.0"),
        ("episode_index", float("nan"), "whole numbers", "v3.0"),
        ("frame_index", 0.5, "whole numbers", "v2.1"),
        ("task_index", "first", "whole numbers", "v3.0"),
    ],
)
def test_numbers_that_cannot_be_are_problems(version, column, value, expected, tmp_path):
    built = build(tmp_path / "data", version=version, cameras="none")
    replace(built, column, lambda table: [value] * len(table))
    replace(built, "action", lambda table: [[np.nan, 0.0, 0.0]] * len(table))
    problems = check(built)
    assert any(column in problem and expected in problem for problem in problems), problems
    if expected != "whole numbers":  # with which no row could be placed
        assert any("action" in problem and "not finite" in problem for problem in problems)


@pytest.mark.parametrize(
    ("column", "dtype", "value", "shown", "version"),
    [("observation.state", "float64", 1e300, "1e+300", "v2.1"), ("action", "float32", -3e38, "-3e+38", "v3.0")],
)
def test_a_number_that_nobody_measured_is_a_problem_with_its_place(version, column, dtype, value, shown, tmp_path):
    built = build(tmp_path / "data", version=version, cameras="none")

    def spoil(table):
        rows = np.array(table[column].to_pylist(), dtype)
        rows[(np.array(table["episode_index"]) == 1) & (np.array(table["frame_index"]) == 2), 1] = value
        return pa.array(list(rows), pa.list_(pa.from_numpy_dtype(rows.dtype)))

    replace(built, column, spoil)
    _, found = check_dataset(built.root)
    (problem,) = (entry for entry in found if entry.severity == "problem")
    assert (problem.episode, problem.column, problem.value) == (1, column, shown)
    assert problem.message == "frame 2 is no measurement, and its square is beyond float32"
    episodes = pq.read_table(built.root / problem.file)["episode_index"].to_pylist()
    assert 1 in episodes, "the file that is named is the one that holds it"


def test_a_state_without_dimensions_is_a_problem(tmp_path):
    built = build(tmp_path / "data", cameras="none")
    edit_data(
        built,
        lambda table: table.drop_columns(["observation.state"]).append_column(
            "observation.state", pa.array([[]] * len(table), pa.list_(pa.float32()))
        ),
    )
    edit_info(built, ["features", "observation.state", "shape"], [0])
    assert any("observation.state" in problem and "no dimensions" in problem for problem in check(built))


def test_a_column_that_is_there_twice_is_a_problem(tmp_path):
    built, column = build(tmp_path / "data", cameras="none"), "action"
    edit_data(built, lambda table: table.append_column(column, table[column]))
    assert any(f"has the column {column} twice" in problem for problem in check(built))


@pytest.mark.parametrize(("kind", "version"), [("data", "v2.1"), ("video", "v3.0")])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(kind, version, tmp_path):
    built = build(tmp_path / "data", version=version)
    episode = built.episodes[1]
    path = episode.data_file if kind == "data" else episode.video_files[built.cameras[0]]
    path.unlink()
    os.mkfifo(path)
    assert any(path.name in problem and "not a regular file" in problem for problem in check(built))


def test_columns_that_nobody_asks_for_may_hold_anything(tmp_path):
    built = build(tmp_path / "data", cameras="none")

    def change(table):
        numbers = range(len(table))
        columns = {
            "comment": pa.array([None] * len(table), pa.string()),
            "events": pa.array([[{"role": "user"}] * (number % 3) for number in numbers]),
            "words": pa.array([["a"] * (number % 3) for number in numbers]),
            "ragged": pa.array([[1.0] * (number % 3) for number in numbers]),
            "thumbnail": pa.array([{"bytes": b"abc", "path": None}] * len(table)),
        }
        for name, values in columns.items():
            table = table.append_column(name, values)
        return table

    edit_data(built, change)
    edit_info(built, ["features", "words"], {"dtype": "string", "shape": [1], "names": None})
    dataset, found = check_dataset(built.root, OutcomeConfig(unlabeled="success"))
    assert [str(entry) for entry in found] == []
    assert "thumbnail" not in dataset._columns


def encoded(image, file_format):
    buffer = io.BytesIO()
    image.save(buffer, file_format)
    return buffer.getvalue()


NOISE = np.random.default_rng(0).integers(0, 255, (32, 48, 3), np.uint8)
DEPTHS = encoded(PIL.Image.fromarray(np.full((32, 48), 1500, np.uint16)), "PNG")


def test_a_camera_of_depths_beside_others_is_noted_once(tmp_path):
    built = build(tmp_path / "data", cameras="image")
    colors, depths = built.cameras
    replace(built, depths, lambda table: [{"bytes": DEPTHS, "path": "a"}] * len(table))
    (note,) = check_dataset(built.root, decode=True)[1]
    assert (note.severity, note.column) == ("note", depths)
    assert "depths, not colors" in str(note)
    dataset = open_dataset(built.root)
    with pytest.raises(DataError, match="not colors"):
        next(dataset.decode(depths, 0))
    shown = {camera["name"]: camera for camera in summarize(dataset, OutcomeConfig())["cameras"]}
    assert shown[colors]["storage"] == "images in parquet"
    assert shown[depths] == {"name": depths, "height": 32, "width": 48, "storage": shown[depths]["storage"]}
    assert "depths" in shown[depths]["storage"]


def test_a_depth_amid_colors_is_a_problem(tmp_path):
    built = build(tmp_path / "data", cameras="image")
    edit_column(built, built.cameras[0], lambda cells: [{"bytes": DEPTHS, "path": "a"}, *cells[1:]])
    (problem,) = check(built)
    assert "episode 1" in problem
    assert "frame 0" in problem
    assert "not colors" in problem


@pytest.mark.parametrize(("off", "severity"), [([0, 1, 0], "problem"), ([0, 0.4, 0.7], "note")])
def test_a_jump_of_start_times_is_a_problem_and_drift_a_note(off, severity, tmp_path):
    built = build(tmp_path / "data", version="v3.0", video_splits=((), ()))
    for episode, (start, frames) in enumerate(zip([0, 7, 12], off, strict=True)):
        set_episode(built, f"videos/{built.cameras[0]}/from_timestamp", (start + frames) / built.fps, episode)
    said = [entry for entry in check(built, severity) if "from_timestamp" in entry]
    assert len(said) == 1
    assert "counting frames gives" in said[0]


def test_a_gap_at_no_whole_frame_is_a_problem(tmp_path):
    built = build(tmp_path / "data", version="v3.0", video_splits=((), ()))
    camera = built.cameras[0]
    frames = np.concatenate([episode.frames[camera] for episode in built.episodes])
    write_video(built.episodes[0].video_files[camera], frames[[*range(len(frames)), 0, 0]], built.fps, built.codec)
    set_episode(built, f"videos/{camera}/from_timestamp", 1.26, 2)
    assert any("has 23 frames, its 3 episodes have 21" in problem for problem in check(built))


def test_degenerate_dimensions_are_named_however_names_are_nested(tmp_path):
    built = build(tmp_path / "data", cameras="none")
    edit_info(built, ["features", "action", "names"], {"motors": ["a", "b", "grip"]})
    replace(built, "action", lambda table: [[float(i), float(-i), 1.0] for i in range(len(table))])
    assert any("dimension 2 (grip)" in note for note in check(built, "note"))
    assert check(built) == [], "training gives it a safe scale"


@pytest.mark.parametrize(
    ("there", "declared", "version"),
    [("video", "image", "v2.1"), ("video", "image", "v3.0"), ("image", "video", "v3.0")],
)
def test_a_camera_that_is_declared_as_the_other_kind_is_a_note_as_long_as_it_can_be_read(
    tmp_path, version, there, declared
):
    built = build(tmp_path, version=version, cameras=there)
    for camera in built.cameras:
        edit_info(built, ["features", camera, "dtype"], declared)
    dataset, found = check_dataset(built.root, decode=True)
    assert [(entry.severity, entry.column) for entry in found] == [("note", camera) for camera in built.cameras]
    assert all(f"info.json says {declared}" in entry.message for entry in found)
    for camera in built.cameras:
        assert sum(1 for _ in dataset.decode(camera, 0)) == len(built.episodes[0])


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_camera_that_is_nowhere_is_a_problem(tmp_path, version):
    built = build(tmp_path, version=version, cameras="video")
    camera, *_ = built.cameras
    edit_info(built, ["features", camera, "dtype"], "image")
    shutil.rmtree(built.root / "videos")
    _, found = check_dataset(built.root)
    (problem,) = [entry for entry in found if entry.column == camera]
    assert problem.severity == "problem"
    assert "its images are not in the data" in problem.message
