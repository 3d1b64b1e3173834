"""A dataset whose writer is killed, fails, or finds something else in its place."""

import json
import os
import shutil
import signal
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
    listed,
    read_episodes,
)


def continue_and_die(root: str, version: Any) -> None:
    """Continue copies of a dataset: the k-th is killed when its k-th file is about to appear, the last lives."""
    for step in range(100):
        copy = shutil.copytree(root, f"{root}-{step:02d}")
        if (child := os.fork()) == 0:
            writer = DatasetWriter(copy, fps=10, features=features("video"), version=version, codec="h264", resume=True)
            calls, replace = iter(range(100)), os.replace

            def dying(*paths: Any, step: int = step, calls: Any = calls, replace: Any = replace) -> None:
                if next(calls) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                replace(*paths)

            os.replace = dying
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
    program = f"import test_writer_resume; test_writer_resume.continue_and_die({str(start.root)!r}, {version!r})"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, check=True)
    _, *killed, whole = sorted(tmp_path.iterdir(), key=str)
    assert len(killed) == 7, "two videos, tasks, statistics, data, the episode's entry, and info.json"
    assert len(read_episodes(whole)) == 3
    for root in killed:
        assert any(".partial-" in file.name for file in root.rglob("*")), "killed while a file was written"
        assert len(list(root.glob("data/*/*.parquet"))) >= len(listed(root)[0]), "what is listed is there"
        for index, columns in enumerate(read_episodes(root)):
            np.testing.assert_array_equal(columns["action"], episode(index)["action"])
        writer = DatasetWriter(root, **options, resume=True)
        assert (writer.num_episodes, writer.num_frames) == (index + 1, 4 * (index + 1)) == (2, 8)
        assert files_of(root) == files_of(start.root), "nothing is left of the third episode"
        assert writer.write_episode(episode(2), task="task 2") == 2
        assert files_of(root) == files_of(whole)


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
