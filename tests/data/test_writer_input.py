"""Features and episodes that cannot be written are refused before anything is."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pirl.data.lerobot.writer import LONGEST_EPISODE, DatasetWriter
from pirl.errors import DataError
from written import (
    HEIGHT,
    WIDTH,
    assert_same_episode,
    episode,
    features,
    files_of,
    read_episodes,
)


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
        ("x", {"dtype": "video", "shape": (64, 65, 3)}, "must be even, got 64 × 65"),
        ("x", {"dtype": "video", "shape": (62, 64, 3)}, "at least 64 × 64, got 62 × 64"),
    ],
)
def test_a_feature_that_cannot_be_stored_is_refused(
    tmp_path: Path, name: str, feature: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(DataError, match=f"feature {name!r}: .*{complaint}"):
        DatasetWriter(tmp_path / "new", fps=10, features={name: feature}, codec="libsvtav1")
    assert not (tmp_path / "new").exists()


def test_frames_the_encoder_refuses_are_reported(tmp_path: Path) -> None:
    writer = DatasetWriter(
        tmp_path, fps=10, features={"camera": {"dtype": "video", "shape": (64, 20_000, 3)}}, codec="libsvtav1"
    )
    with pytest.raises(DataError, match="libsvtav1 cannot encode frames of 64 × 20000"):
        writer.write_episode({"camera": np.zeros((1, 64, 20_000, 3), np.uint8)}, task="")
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
