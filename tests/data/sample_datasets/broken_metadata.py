"""Damage to the metadata of episodes and tasks, and paths that leave the dataset."""

import functools
import shutil
from pathlib import Path
from typing import Any

from sample_datasets.broken_files import cut, file_damage, void
from sample_datasets.broken_rows import NAN, broken, damage, data_of, outside, replaced, video_of
from sample_datasets.build import (
    CAMERAS,
    TASKS,
    Built,
    edit_episodes,
    edit_info,
    edit_table,
    info_of,
    set_episode,
    write_jsonl,
)

# Damage to the metadata of episodes and tasks.


def episode_damage(name: str, key: str, value: Any, *expected: str, **options: Any) -> None:
    """List one wrong field in the metadata of episode 1."""
    variant = functools.partial(set_episode, key=key, value=value)
    damage(name, f"{key} of the episode is {value!r}.", lambda built: variant(built), *expected, **options)


PLACE = f"videos/{CAMERAS[0]}"
V3_VIDEO = {"versions": ["v3.0"], "cameras": "video"}
episode_damage("wrong_length", "length", 6, "episode 1")
episode_damage("negative_length", "length", -5, "length", "-5")
episode_damage("length_in_words", "length", "five", "length", versions=["v2.1"])
episode_damage("no_length", "length", ..., "length")
episode_damage("negative_episode", "episode_index", -1, "episode_index|episode -1")
episode_damage("camera_without_place", f"{PLACE}/file_index", ..., "cam_high", **V3_VIDEO)
episode_damage("video_in_no_file", f"{PLACE}/file_index", 123456, "file-123456.mp4|episode 1", **V3_VIDEO)
episode_damage("negative_file_index", f"{PLACE}/file_index", -1, "file_index|<video>|episode 1", **V3_VIDEO)
episode_damage("nan_from_timestamp", f"{PLACE}/from_timestamp", NAN, "from_timestamp", "episode 1", **V3_VIDEO)
episode_damage("negative_from_timestamp", f"{PLACE}/from_timestamp", -3.0, "from_timestamp", "episode 1", **V3_VIDEO)
episode_damage(
    "far_from_timestamp", f"{PLACE}/from_timestamp", 1e9, "cam_high|<video>", "episode 1|<video>", **V3_VIDEO
)
# Episode 2 follows in the same file, so this claims frames that are episode 2's.
episode_damage(
    "overlapping_videos", f"{PLACE}/from_timestamp", 0.3, "cam_high|<video>", "episode 1|<video>", **V3_VIDEO
)


@broken("<meta>|episode 1")
def episode_twice(built: Built) -> None:
    """The metadata list an episode twice: name it."""
    edit_episodes(built, lambda rows: [*rows[:2], rows[1], *rows[2:]])


@broken("episodes.jsonl", "2", versions=["v2.1"])
def broken_line(built: Built) -> None:
    """Line 2 of episodes.jsonl is cut off: name the file and the line."""
    path = built.root / "meta/episodes.jsonl"
    lines = path.read_text().split("\n")
    path.write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]))


@broken("episodes.jsonl", "2", versions=["v2.1"])
def list_for_line(built: Built) -> None:
    """Line 2 of episodes.jsonl is a list: name the file and the line."""
    edit_episodes(built, replaced(1, lambda row: list(row)))


@broken("<meta>")
def no_episode_list(built: Built) -> None:
    """The metadata of episodes are absent, as after a recorder was killed: name the file or directory."""
    path = built.root / "meta/episodes"
    path.with_suffix(".jsonl").unlink() if built.version == "v2.1" else shutil.rmtree(path)


@broken("file-000.parquet", versions=["v3.0"])
def truncated_episode_list(built: Built) -> None:
    """The parquet file of meta/episodes is cut off: name it."""
    cut(built.root / "meta/episodes/chunk-000/file-000.parquet")


@broken("episode|no data")
def no_episodes(built: Built) -> None:
    """The dataset has no episodes, and all its files agree on it: say so."""
    edit_episodes(built, lambda rows: [])
    shutil.rmtree(built.root / "data")
    (built.root / "data").mkdir()
    for key in ("total_episodes", "total_frames"):
        edit_info(built, [key], 0)


def tasks_file(built: Built) -> Path:
    return built.root / ("meta/tasks.jsonl" if built.version == "v2.1" else "meta/tasks.parquet")


damage("no_tasks", "The list of tasks is absent.", lambda built: tasks_file(built).unlink(), "meta/tasks|tasks.")
damage("text_for_tasks", "The list is text.", lambda built: void(tasks_file(built).write_text("pick up\n")), "tasks.")


@broken("tasks.jsonl", versions=["v2.1"])
def task_twice(built: Built) -> None:
    """Two tasks have the number 0: name the file."""
    write_jsonl(tasks_file(built), [{"task_index": 0, "task": task} for task in TASKS])


@broken("tasks.parquet", versions=["v3.0"])
def nameless_tasks(built: Built) -> None:
    """meta/tasks.parquet has numbers and no strings: name it."""
    edit_table(tasks_file(built), lambda table: table.drop_columns(["__index_level_0__"]))


# Paths that lead where no reader should go. What they lead to is sound, so that only refusal is right.


def escape(kind: str, name: str, prefix: str) -> None:
    """List a template that leaves the dataset: a complaint names its key in info.json."""

    def variant(built: Built) -> None:
        folder, key = {"data": "data", "video": "videos"}[kind], f"{kind}_path"
        (built.root / folder).rename(outside(built) / folder)
        edit_info(built, [key], prefix.format(outside=outside(built)) + info_of(built)[key])

    damage(f"{kind}_path_{name}", f"{kind}_path begins with {prefix}.", variant, f"{kind}_path", cameras="video")


def link(path: Path, target: Path) -> None:
    """Move a file or directory away and leave a symbolic link to it."""
    path.rename(target)
    path.symlink_to(target)


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


for kind in ("data", "video"):
    escape(kind, "climbs", "../outside/")
    escape(kind, "climbs_later", "meta/../../outside/")
    escape(kind, "absolute", "{outside}/")
file_damage("circular", "The file is a symbolic link to itself.", link_to_itself)
damage(
    "linked_parquet",
    "The file is a link out of the dataset.",
    lambda built: link(data_of(built), outside(built) / "a.parquet"),
    "<data>",
)
damage(
    "linked_video",
    "The file is a link out of the dataset.",
    lambda built: link(video_of(built), outside(built) / "a.mp4"),
    "<video>",
    cameras="video",
)
damage(
    "linked_chunk",
    "The directory is a link out of the dataset.",
    lambda built: link(data_of(built).parent, outside(built) / "a"),
    "<data>|chunk-000",
)
damage(
    "linked_meta",
    "meta/ is a link out of the dataset.",
    lambda built: link(built.root / "meta", outside(built) / "meta"),
    "meta",
)


@broken("../outside", cameras="video")
def climbing_camera(built: Built) -> None:
    """The name of a camera is ../../../outside, which video_path would follow: name the feature."""
    edit_info(built, ["features", "../../../outside"], info_of(built)["features"][CAMERAS[0]])
