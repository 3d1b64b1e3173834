"""Damaged datasets: how each is made, and what a complaint about it should name."""

import dataclasses
import functools
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sample_datasets.build import (
    CAMERAS,
    TASKS,
    Builder,
    Built,
    Variant,
    _encoded,
    draw_bars,
    edit_column,
    edit_episodes,
    edit_info,
    edit_table,
    info_of,
    set_episode,
    write_jsonl,
    write_video,
)
from sample_datasets.odd import made

BROKEN: dict[str, tuple[Builder, tuple[str, ...]]] = {}
V21, V30, BOTH = ("v2.1",), ("v3.0",), ("v2.1", "v3.0")
# Where episode 1 lies, its video being that of the first camera.
FILES = {
    "v2.1": {"data": "episode_000001.parquet", "video": "episode_000001.mp4", "meta": "episodes.jsonl"},
    "v3.0": {"data": "file-000.parquet", "video": "file-001.mp4", "meta": "meta/episodes"},
}
NAN = float("nan")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"


def damage(
    name: str, variant: Callable[[Built], object], *expected: str, versions: Sequence[str] = BOTH, **options: Any
) -> None:
    """List damage; the texts are what a complaint must contain: "a|b" asks for either, <data> etc. stand for `FILES`."""

    def changed(built: Built) -> Built | None:
        result = variant(built)
        return result if isinstance(result, Built) else None

    for version in versions:
        texts = [
            functools.reduce(lambda t, f: t.replace(f"<{f}>", FILES[version][f]), FILES[version], t) for t in expected
        ]
        full = name + ("_v30" if version == "v3.0" else "")
        assert full not in BROKEN, full
        BROKEN[full] = made(changed, **{"cameras": "none", "version": version} | options), tuple(texts)


def broken(*expected: str, **options: Any) -> Callable[[Variant], Variant]:
    """List a function's damage under its name."""

    def register(variant: Variant) -> Variant:
        damage(variant.__name__, variant, *expected, **options)
        return variant

    return register


def replaced(position: int, value: Any) -> Callable[[list[Any]], list[Any]]:
    """A change of one element of a list; a function changes what is there."""

    def change(values: list[Any]) -> list[Any]:
        new = value(values[position]) if callable(value) else value
        return [*values[:position], new, *values[position + 1 :]]

    return change


def data_of(built: Built) -> Path:
    return built.episodes[1].data_file


def video_of(built: Built) -> Path:
    return built.episodes[1].video_files[CAMERAS[0]]


def outside(built: Built) -> Path:
    """A directory beside the dataset."""
    path = built.root.parent / "outside"
    path.mkdir(exist_ok=True)
    return path


# --- rows -------------------------------------------------------------------------------------------------------------


def column_damage(
    name: str,
    column: str,
    change: Callable[[list[Any]], list[Any]],
    kind: pa.DataType | None = None,
    where: str = "episode 1",
    versions: Sequence[str] = BOTH,
) -> None:
    """List wrong values in one column of episode 1: a complaint names the column and the episode."""
    damage(name, lambda built: edit_column(built, column, change, kind), column, where, versions=versions)


STATE, FLOATS = "observation.state", pa.list_(pa.float32())
WHERE = "episode 1|<data>"  # what is found by type rather than by value may be told of the file
column_damage("nan_in_state", STATE, replaced(3, replaced(2, NAN)))
column_damage("infinite_action", "action", replaced(0, replaced(1, -np.inf)), versions=V30)
column_damage("null_state", STATE, replaced(2, None), where=WHERE)
column_damage("null_in_action", "action", replaced(2, replaced(0, None)), where=WHERE, versions=V21)
column_damage("narrow_row", STATE, replaced(2, lambda row: row[:3]), FLOATS)
# A state has three numbers and the next has five, so that the total hides it.
column_damage("hidden_widths", STATE, lambda rows: [*rows[:2], rows[2][:3], [*rows[3], 0.0], *rows[4:]], FLOATS)
column_damage("nan_reward", "next.reward", replaced(1, NAN), versions=V30)
column_damage("done_too_early", "next.done", replaced(2, True), versions=V21)
column_damage("time_goes_back", "timestamp", replaced(3, 0.05), versions=V30)
column_damage("nan_timestamp", "timestamp", replaced(3, NAN), versions=V21)
column_damage("frame_index_gap", "frame_index", lambda rows: [0, 1, 3, 4, 5])
column_damage("frame_index_twice", "frame_index", replaced(2, 1), versions=V30)
damage("task_without_name", lambda built: edit_column(built, "task_index", replaced(1, 7)), "task", "7")
damage(
    "wrong_episode_in_file",
    lambda built: edit_column(built, "episode_index", lambda v: [2] * len(v)),
    WHERE,
    versions=V21,
)


@broken("action", "2")
def constant_action_dimension(built: Built) -> Built:
    for episode in range(len(built.episodes)):
        edit_column(built, "action", lambda rows: [[*row[:2], 0.5] for row in rows], episode=episode)
    constant = [np.pad(e.action[:, :2], ((0, 0), (0, 1)), constant_values=0.5) for e in built.episodes]
    episodes = [dataclasses.replace(e, action=a) for e, a in zip(built.episodes, constant, strict=True)]
    return dataclasses.replace(built, episodes=tuple(episodes))


def new_column(built: Built, name: str, values: Callable[[pa.Table], pa.Array]) -> None:
    edit_table(data_of(built), lambda t: t.set_column(t.column_names.index(name), name, values(t)))


@broken("action", WHERE)
def narrow_column(built: Built) -> None:
    kind = pa.list_(pa.float32(), 2)
    new_column(built, "action", lambda table: pa.array([row[:2] for row in table["action"].to_pylist()], kind))


@broken("<data>|episode 1")
def episode_without_data(built: Built) -> None:
    without_rows(built) if built.version == "v3.0" else data_of(built).unlink()


def without_rows(built: Built) -> None:
    edit_table(data_of(built), lambda table: table.filter(pc.field("episode_index") != 1))


damage("state_of_strings", lambda b: new_column(b, STATE, lambda t: pa.array(["up"] * t.num_rows)), STATE, WHERE)
damage(
    "no_reward_column",
    lambda b: edit_table(data_of(b), lambda t: t.drop_columns(["next.reward"])),
    "next.reward",
    WHERE,
)
VELOCITY = {"dtype": "float32", "shape": [4], "names": None}
damage(
    "feature_without_column",
    lambda built: edit_info(built, ["features", "observation.velocity"], VELOCITY),
    "observation.velocity",
)
damage("episode_of_length_zero", lambda b: (set_episode(b, "length", 0), without_rows(b)), "episode 1")
damage("episode_without_metadata", lambda b: edit_episodes(b, lambda rows: [rows[0], *rows[2:]]), "episode 1")


# --- files ------------------------------------------------------------------------------------------------------------


def file_damage(name: str, change: Callable[[Path], object], instead: str = "", versions: Sequence[str] = BOTH) -> None:
    """List a damaged parquet file and a damaged video: a complaint names the file, or what is said instead."""
    damage(f"{name}_parquet", lambda built: change(data_of(built)), f"<data>{instead}", versions=versions)
    options: dict[str, Any] = {"cameras": "video", "versions": versions}
    damage(f"{name}_video", lambda built: change(video_of(built)), f"<video>{instead}", **options)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garble(path: Path) -> None:
    """The index of the file is sound, what it points at is overwritten."""
    content = path.read_bytes()
    if path.suffix == ".mp4":
        start, stop = content.index(b"mdat") + 4, len(content)
    else:
        start, stop = 4, len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    path.write_bytes(content[:start] + b"\xff" * (stop - start) + content[stop:])


def become_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def link(path: Path, target: Path) -> None:
    """Move a file or directory away and leave a symbolic link to it."""
    path.rename(target)
    path.symlink_to(target)


file_damage("missing", Path.unlink, "|episode 1")
file_damage("truncated", cut)
file_damage("garbled", garble)
file_damage("pointer_for", lambda path: path.write_bytes(POINTER))
file_damage("empty", lambda path: path.write_bytes(b""), versions=V21)
file_damage("directory_for", become_directory)
file_damage("circular", link_to_itself)
damage("no_data", lambda built: shutil.rmtree(built.root / "data"), "data")
damage("no_videos", lambda built: shutil.rmtree(built.root / "videos"), "video", cameras="video")
# Links are followed for data and videos, which are often kept on another disk.
damage("linked_parquet", lambda built: link(data_of(built), outside(built) / "a.parquet"), "<data>")
damage("linked_video", lambda built: link(video_of(built), outside(built) / "a.mp4"), "<video>", cameras="video")
damage("linked_chunk", lambda built: link(data_of(built).parent, outside(built) / "a"), "<data>", versions=V21)
damage("linked_meta", lambda built: link(built.root / "meta", outside(built) / "meta"), "meta")


def frames_damage(name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """List a sound video of wrong frames: a complaint names the camera and the episode, or the file."""

    def variant(built: Built) -> None:
        members = [episode for episode in built.episodes if episode.video_files[CAMERAS[0]] == video_of(built)]
        frames = np.concatenate([episode.frames[CAMERAS[0]] for episode in members])
        write_video(video_of(built), change(frames), built.fps, built.codec)

    damage(name, variant, "cam_high|<video>", "episode|<video>", cameras="video")


frames_damage("short_video", lambda frames: frames[:-2])
frames_damage("long_video", lambda frames: frames[[*range(len(frames)), 0, 0]])
frames_damage("other_size", lambda frames: frames.repeat(2, 1).repeat(2, 2))


@broken("<video>", cameras="video", versions=V21)
def sound_for_video(built: Built) -> None:
    with av.open(str(video_of(built)), "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


def image_damage(name: str, change: Callable[[dict[str, Any]], dict[str, Any] | None], version: str) -> None:
    """List the damage of one stored image: a complaint names the camera and the episode."""
    variant = functools.partial(edit_column, column=CAMERAS[0], change=replaced(2, change))
    damage(name, variant, "cam_high", "episode 1", cameras="image", versions=(version,))


def enormous(png: bytes) -> bytes:
    """The same PNG with a header that promises 60000 × 60000 pixels."""
    header = b"IHDR" + struct.pack(">II", 60000, 60000) + png[24:29]
    return png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:]


image_damage("truncated_png", lambda image: image | {"bytes": image["bytes"][:60]}, "v2.1")
image_damage("text_for_png", lambda image: image | {"bytes": b"not an image"}, "v3.0")
image_damage("empty_png", lambda image: image | {"bytes": b""}, "v2.1")
image_damage("null_image", lambda image: None, "v3.0")
image_damage("enormous_png", lambda image: image | {"bytes": enormous(image["bytes"])}, "v2.1")
image_damage("other_image_size", lambda _: _encoded(draw_bars(0, 1, 2, (16, 32))), "v3.0")


@broken("cam_high", "episode 1", cameras="image", versions=V21)
def image_elsewhere(built: Built) -> None:
    """An image has no bytes but the path of an image outside the dataset, which is not to be followed."""
    image = outside(built) / "secret.png"
    image.write_bytes(_encoded(draw_bars(0, 1, 2, (32, 48)))["bytes"])
    edit_column(built, CAMERAS[0], replaced(2, {"bytes": None, "path": str(image)}))


def ghost_camera(built: Built) -> None:
    edit_info(built, ["features", "observation.images.ghost"], info_of(built)["features"][CAMERAS[0]])


damage("ghost_video_camera", ghost_camera, "images.ghost", cameras="video")
damage("ghost_image_camera", ghost_camera, "images.ghost", cameras="image", versions=V30)


# --- the lists of episodes and tasks ----------------------------------------------------------------------------------


def episode_damage(name: str, key: str, value: Any, *expected: str, **options: Any) -> None:
    """List one wrong field in the metadata of episode 1."""
    damage(name, functools.partial(set_episode, key=key, value=value), *expected, **options)


PLACE = f"videos/{CAMERAS[0]}"
V3_VIDEO: dict[str, Any] = {"versions": V30, "cameras": "video"}
SHARED = ("cam_high|<video>", "episode 1|<video>")
episode_damage("wrong_length", "length", 6, "episode 1")
episode_damage("negative_length", "length", -5, "length", "-5")
episode_damage("length_in_words", "length", "five", "length", versions=V21)
episode_damage("no_length", "length", ..., "length", versions=V30)
episode_damage("negative_episode", "episode_index", -1, "episode_index|episode -1")
episode_damage("camera_without_place", f"{PLACE}/file_index", ..., "cam_high", **V3_VIDEO)
episode_damage("video_in_no_file", f"{PLACE}/file_index", 123456, "file-123456.mp4|episode 1", **V3_VIDEO)
episode_damage("negative_file_index", f"{PLACE}/file_index", -1, "file_index|<video>|episode 1", **V3_VIDEO)
episode_damage("nan_from_timestamp", f"{PLACE}/from_timestamp", NAN, "from_timestamp", "episode 1", **V3_VIDEO)
episode_damage("negative_from_timestamp", f"{PLACE}/from_timestamp", -3.0, "from_timestamp", "episode 1", **V3_VIDEO)
episode_damage("far_from_timestamp", f"{PLACE}/from_timestamp", 1e9, *SHARED, **V3_VIDEO)
# Episode 2 follows in the same file, so this claims frames that are episode 2's.
episode_damage("overlapping_videos", f"{PLACE}/from_timestamp", 0.3, *SHARED, **V3_VIDEO)
damage("episode_twice", lambda built: edit_episodes(built, lambda r: [*r[:2], r[1], *r[2:]]), "<meta>|episode 1")
damage("list_for_line", lambda b: edit_episodes(b, replaced(1, list)), "episodes.jsonl", "2", versions=V21)


@broken("episodes.jsonl", "2", versions=V21)
def broken_line(built: Built) -> None:
    path = built.root / "meta/episodes.jsonl"
    lines = path.read_text().split("\n")
    path.write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]))


@broken("<meta>")
def no_episode_list(built: Built) -> None:
    """As after a recorder was killed."""
    path = built.root / "meta/episodes"
    path.with_suffix(".jsonl").unlink() if built.version == "v2.1" else shutil.rmtree(path)


@broken("episode|no data")
def no_episodes(built: Built) -> None:
    edit_episodes(built, lambda rows: [])
    shutil.rmtree(built.root / "data")
    (built.root / "data").mkdir()
    for key in ("total_episodes", "total_frames"):
        edit_info(built, [key], 0)


def tasks_file(built: Built) -> Path:
    return built.root / ("meta/tasks.jsonl" if built.version == "v2.1" else "meta/tasks.parquet")


def tasks_twice(built: Built) -> None:
    write_jsonl(tasks_file(built), [{"task_index": 0, "task": task} for task in TASKS])


def nameless_tasks(built: Built) -> None:
    edit_table(tasks_file(built), lambda table: table.drop_columns(["__index_level_0__"]))


EPISODES_FILE = "meta/episodes/chunk-000/file-000.parquet"
damage("truncated_episode_list", lambda built: cut(built.root / EPISODES_FILE), "file-000.parquet", versions=V30)
damage("no_tasks", lambda built: tasks_file(built).unlink(), "meta/tasks|tasks.")
damage("text_for_tasks", lambda built: tasks_file(built).write_text("pick up\n"), "tasks.")
damage("task_twice", tasks_twice, "tasks.jsonl", versions=V21)
damage("nameless_tasks", nameless_tasks, "tasks.parquet", versions=V30)


# --- info.json --------------------------------------------------------------------------------------------------------


def escape(kind: str, name: str, prefix: str, version: str) -> None:
    """List a template that leads out of the dataset, to sound files, so that only refusal is right."""

    def variant(built: Built) -> None:
        folder, key = {"data": "data", "video": "videos"}[kind], f"{kind}_path"
        (built.root / folder).rename(outside(built) / folder)
        edit_info(built, [key], prefix.format(outside=outside(built)) + info_of(built)[key])

    damage(f"{kind}_path_{name}", variant, f"{kind}_path", cameras="video", versions=(version,))


escape("data", "climbs", "../outside/", "v2.1")
escape("data", "climbs_later", "meta/../../outside/", "v3.0")
escape("video", "climbs", "../outside/", "v3.0")
escape("video", "absolute", "{outside}/", "v2.1")


@broken("../outside", cameras="video", versions=V21)
def climbing_camera(built: Built) -> None:
    edit_info(built, ["features", "../../../outside"], info_of(built)["features"][CAMERAS[0]])


def info_damage(path: Sequence[str], values: Mapping[str, Any], *expected: str, **options: Any) -> None:
    """List wrong entries of info.json by name: a complaint names the key."""
    for name, value in values.items():
        variant = functools.partial(edit_info, path=path, value=value)
        damage(f"{path[-1]}_{name}", variant, *(expected or [path[-1]]), **{"versions": V21, **options})


# A template that leaves out the episode or the camera finds the same file for all of them.
ONE_CAMERA = f"videos/chunk-000/{CAMERAS[0]}/episode_{{episode_index:06d}}.mp4"
info_damage(["data_path"], {"of_one_file": "data/chunk-000/episode_000000.parquet"}, "data_path|episode 1")
info_damage(["video_path"], {"of_one_camera": ONE_CAMERA}, "video_path|cam_left_wrist", cameras="video")
info_damage(["fps"], {"zero": 0, "string": "ten", "absent": ...})
info_damage(["codebase_version"], {"old": "v1.6", "absent": ...})
info_damage(["chunks_size"], {"zero": 0, "string": "many", "fraction": 1.5})
# These are for information, but a wrong one says that something is amiss.
info_damage(["total_episodes"], {"huge": 10**18, "string": "three", "too_many": 4, "too_few": 2}, versions=BOTH)
info_damage(["total_frames"], {"negative": -1, "other": 99})
info_damage(["features"], {"list": [], "empty": {}, "null": None, "absent": ...}, "feature|action")
info_damage(["features", "action"], {"null": None, "string": "float32", "empty": {}})
DTYPES = {"unknown": "flout32", "number": 32, "absent": ..., "object": "object"}
info_damage(["features", "action", "dtype"], DTYPES, "action")
SHAPES = {"null": None, "string": "3", "negative": [-3], "empty": [], "absent": ..., "other": [5], "huge": [10**12]}
info_damage(["features", "action", "shape"], SHAPES, "action")
for name, value in {"flat": [32], "null": None, "four": [1, 32, 48, 3]}.items():
    path = ["features", CAMERAS[0], "shape"]
    damage(f"camera_shape_{name}", functools.partial(edit_info, path=path, value=value), "cam_high", cameras="video")

for name, change in {
    "empty_directory": Path.mkdir,
    "file_for_dataset": lambda path: path.write_text("nothing to see"),
    "nothing_there": lambda path: None,
}.items():
    variant = lambda built, change=change: (shutil.rmtree(built.root), change(built.root))  # noqa: E731
    damage(name, variant, "dataset", versions=V21)
