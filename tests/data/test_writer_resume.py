"""A dataset whose writer is killed, fails, or finds something else in its place."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pirl.data.lerobot.writer import DatasetWriter
from pirl.errors import DataError
from written import (
    assert_same_episode,
    episode,
    every_version,
    features,
    files_of,
    info_of,
    kill_this_process,
    listed,
    read_episodes,
    stopped_at,
)


def continue_and_die(root: str, version: Any, half: bool) -> None:
    """Continue copies of a dataset: the k-th is killed when its k-th file or line is about to appear, the last lives."""
    for step in range(100):
        copy = shutil.copytree(root, f"{root}-{step:02d}")
        if (child := os.fork()) == 0:
            writer = DatasetWriter(copy, fps=10, features=features("video"), version=version, codec="h264", resume=True)
            with stopped_at(step, kill_this_process, half=half):
                writer.write_episode(episode(2), task="task 2")
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return


@every_version
def test_a_writer_killed_at_any_moment_leaves_a_dataset_that_continues(tmp_path: Path, version: Any) -> None:
    options: dict[str, Any] = {"fps": 10, "features": features("video"), "version": version, "codec": "h264"}
    start = DatasetWriter(tmp_path / "start", **options)
    for index in range(2):
        start.write_episode(episode(index), task=f"task {index}")
    program = f"import test_writer_resume as t; t.continue_and_die({str(start.root)!r}, {version!r}, half=False)"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, check=True)
    _, *killed, whole = sorted(tmp_path.iterdir(), key=str)
    assert len(killed) == 7, "two videos, tasks, statistics, data, the episode's entry, and info.json"
    assert len(read_episodes(whole)) == 3
    partial = [any(".partial-" in file.name for file in root.rglob("*")) for root in killed]
    assert partial.count(True) == (5 if version == "v2.1" else 7), "killed while a file was written, or before a line"
    for root in killed:
        assert len(list(root.glob("data/*/*.parquet"))) >= len(listed(root)[0]), "what is listed is there"
        for index, columns in enumerate(read_episodes(root)):
            np.testing.assert_array_equal(columns["action"], episode(index)["action"])
        writer = DatasetWriter(root, **options, resume=True)
        assert (writer.num_episodes, writer.num_frames) == (index + 1, 4 * (index + 1)) == (2, 8)
        assert files_of(root) == files_of(start.root), "nothing is left of the third episode"
        assert writer.write_episode(episode(2), task="task 2") == 2
        assert files_of(root) == files_of(whole)


def test_half_a_line_that_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"fps": 10, "features": features("video"), "version": "v2.1", "codec": "h264"}
    start = DatasetWriter(tmp_path / "start", **options)
    for index in range(2):
        start.write_episode(episode(index), task=f"task {index}")
    program = f"import test_writer_resume as t; t.continue_and_die({str(start.root)!r}, 'v2.1', half=True)"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, check=True)
    _, *killed, whole = sorted(tmp_path.iterdir(), key=str)
    torn = [root for root in killed if any(not file.read_text().endswith("\n") for file in root.glob("meta/*.jsonl"))]
    assert len(torn) == 2, "statistics, and the episode's entry"
    for root in torn:
        writer = DatasetWriter(root, **options, resume=True)
        assert files_of(root) == files_of(start.root)
        writer.write_episode(episode(2), task="task 2")
        assert files_of(root) == files_of(whole)


def interrupt() -> None:
    raise KeyboardInterrupt


@every_version
def test_a_failed_write_leaves_the_dataset_and_the_writer_as_they_were(tmp_path: Path, version: Any) -> None:
    writer = DatasetWriter(tmp_path, fps=10, features=features(), version=version)
    writer.write_episode(episode(0), task="a")
    before = files_of(tmp_path)
    failures = 0
    for step in range(100):
        try:
            with stopped_at(step, interrupt, half=True):
                writer.write_episode(episode(1), task="b")
            break
        except KeyboardInterrupt:
            failures += 1
            assert files_of(tmp_path) == before
            assert writer.num_episodes == 1
    assert failures == 5
    writer.write_episode(episode(2), task="c")
    for index, columns in enumerate(read_episodes(tmp_path)):
        assert_same_episode(columns, episode(index))
        assert columns["task"] == ["abc"[index]] * 4


def damage_info(root: Path) -> None:
    (root / "meta/info.json").write_text("{")


def forget_episodes(root: Path) -> None:
    info = info_of(root)
    info["total_episodes"] = 1
    (root / "meta/info.json").write_text(json.dumps(info))


def lose_metadata(root: Path) -> None:
    for file in [*root.glob("meta/*.jsonl"), *root.glob("meta/tasks.parquet")]:
        file.unlink()


CHANGES: list[tuple[Callable[[Path], object] | None, dict[str, Any], str]] = [
    (None, {"resume": False}, "not empty"),
    (None, {"fps": 20}, "fps is 10 there, and 20 here"),
    (None, {"robot_type": "so101"}, "robot_type is None there, and 'so101' here"),
    (None, {"features": features() | {"action": {"dtype": "float32", "shape": (4,)}}}, "action is"),
    (None, {"features": features() | {"extra": {"dtype": "bool", "shape": (1,)}}}, "extra"),
    (damage_info, {}, "cannot be read"),
    (lambda root: (root / "meta/info.json").unlink(), {}, "no dataset to continue"),
    (forget_episodes, {}, "has 1 episodes, yet .* is there"),
    (lose_metadata, {}, "tasks|lines"),
]


@every_version
def test_a_directory_that_cannot_be_continued_is_refused_and_not_touched(tmp_path: Path, version: Any) -> None:
    declared: dict[str, Any] = {"fps": 10, "features": features(), "version": version, "resume": True}
    writer = DatasetWriter(tmp_path / "whole", **declared)
    for index in range(3):
        writer.write_episode(episode(index), task="")
    other = "v3.0" if version == "v2.1" else "v2.1"
    for number, (change, options, complaint) in enumerate(
        [*CHANGES, (None, {"version": other}, f"codebase_version is '{version}' there")]
    ):
        root = shutil.copytree(writer.root, tmp_path / str(number))
        if change:
            change(root)
        before = files_of(root)
        with pytest.raises(DataError, match=complaint):
            DatasetWriter(root, **declared | options)
        assert files_of(root) == before


def test_lines_that_were_lost_meanwhile_are_not_filled_with_nothing(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path, fps=10, features=features(), version="v2.1")
    writer.write_episode(episode(0), task="")
    (tmp_path / "meta/episodes.jsonl").write_text("")
    with pytest.raises(DataError, match="episodes.jsonl: expected at least 1 lines"):
        writer.write_episode(episode(1), task="")
    assert (tmp_path / "meta/episodes.jsonl").read_bytes() == b""


def test_the_second_of_two_writers_is_stopped(tmp_path: Path) -> None:
    first = DatasetWriter(tmp_path, fps=10, features=features())
    second = DatasetWriter(tmp_path, fps=10, features=features(), resume=True)
    first.write_episode(episode(0), task="")
    with pytest.raises(DataError, match="only one writer"):
        second.write_episode(episode(1), task="")
    assert_same_episode(read_episodes(tmp_path)[0], episode(0))
