"""Oddities of real datasets that a reader must see through, and the list of all that is `VALID`."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from sample_datasets.build import (
    DEFAULT_FEATURES,
    V2_PATHS,
    Builder,
    Built,
    Variant,
    _encoded,
    build,
    edit_column,
    edit_data,
    edit_episodes,
    edit_info,
    edit_table,
    info_of,
    set_episode,
    write_json,
    write_jsonl,
    write_table,
    write_tasks,
)

# Oddities that real datasets have and a reader must see through.


def templates_by_chunk_index(built: Built) -> None:
    """v2.1 whose video_path says {chunk_index} for {episode_chunk}: read it; mention video_path if anything."""
    edit_info(built, ["video_path"], V2_PATHS["video_path"].replace("episode_chunk", "chunk_index"))


def float64_columns(built: Built) -> None:
    """State, action and timestamp are doubles, as info.json says: the same values."""
    for key in (built.state_key, built.action_key, "timestamp"):
        if key in info_of(built)["features"]:
            edit_info(built, ["features", key, "dtype"], "float64")

    def change(table: pa.Table) -> pa.Table:
        for key in (built.state_key, built.action_key):
            number, width = table.column_names.index(key), table.schema.field(key).type.list_size
            table = table.set_column(number, key, table[key].cast(pa.list_(pa.float64(), width)))
        number = table.column_names.index("timestamp")
        return table.set_column(number, "timestamp", table["timestamp"].cast(pa.float64()))

    edit_data(built, change)


def no_index_columns(built: Built) -> None:
    """The parquet files have no `index` and no `task_index`: count the rows; the task is the episode's own."""
    edit_data(built, lambda table: table.drop_columns(["index", "task_index"]))


def no_default_features(built: Built) -> None:
    """info.json does not mention timestamp, frame_index, episode_index, index and task_index: they go without saying."""
    for name in DEFAULT_FEATURES:
        edit_info(built, ["features", name], ...)


def channel_first(built: Built) -> None:
    """Cameras are declared (3, H, W), with names that say so; the pixels lie as always."""
    for key in built.cameras:
        height, width, _ = info_of(built)["features"][key]["shape"]
        edit_info(built, ["features", key, "shape"], [3, height, width])
        edit_info(built, ["features", key, "names"], ["channels", "height", "width"])


def channel_first_unnamed(built: Built) -> None:
    """Cameras are declared (3, H, W) without names: the axis of size 3 tells."""
    channel_first(built)
    for key in built.cameras:
        edit_info(built, ["features", key, "names"], None)


def stray_parquet(built: Built) -> None:
    """A parquet file of an episode beyond total_episodes lies about: ignore it, and say so at most."""
    path, beyond = built.episodes[0].data_file, len(built.episodes)
    stray = path.with_name(f"episode_{beyond:06d}.parquet")
    shutil.copy(path, stray)
    episode_index = pa.array(np.full(len(built.episodes[0]), beyond))
    edit_table(
        stray, lambda table: table.set_column(table.column_names.index("episode_index"), "episode_index", episode_index)
    )


def no_statistics(built: Built) -> None:
    """meta/episodes_stats.jsonl (v2.1) or meta/stats.json is absent: nobody needs it."""
    for name in ("episodes_stats.jsonl", "stats.json"):
        (built.root / "meta" / name).unlink(missing_ok=True)


def wall_clock(built: Built) -> None:
    """Timestamps are those of the wall clock, frames away from the video's: the k-th row has the k-th frame."""
    random = np.random.default_rng(7)
    for episode, truth in enumerate(built.episodes):
        times = 0.3 + np.cumsum(random.uniform(0.5, 3, len(truth))) / built.fps
        edit_column(built, "timestamp", lambda _, times=times: times.tolist(), episode=episode)  # type: ignore[misc]


def moved(built: Built, old: Path, new: Path) -> Built:
    """Rename a directory, and know it."""
    new.parent.mkdir(exist_ok=True)
    old.rename(new)

    def path(before: Path) -> Path:
        return new / before.relative_to(old) if before.is_relative_to(old) else before

    episodes = (
        dataclasses.replace(
            episode,
            data_file=path(episode.data_file),
            video_files={key: path(file) for key, file in episode.video_files.items()},
        )
        for episode in built.episodes
    )
    return dataclasses.replace(built, root=path(built.root), episodes=tuple(episodes))


def video_directory(built: Built) -> Built:
    """The videos lie in video/ although video_path says videos/: find them, and say so."""
    return moved(built, built.root / "videos", built.root / "video")


def wrong_codec_named(built: Built) -> None:
    """info.json names another codec and another size than the video files have: believe the files."""
    for key in built.cameras:
        edit_info(built, ["features", key, "info"], {"video.codec": "h264", "video.height": 480, "video.width": 640})


def plain_lists(built: Built) -> None:
    """Vectors are list<float>, of any length for all the schema knows."""

    def change(table: pa.Table) -> pa.Table:
        for number, field in enumerate(table.schema):
            if pa.types.is_fixed_size_list(field.type):
                table = table.set_column(number, field.name, table[field.name].cast(pa.list_(field.type.value_type)))
        return table

    edit_data(built, change)


def converted(built: Built) -> None:
    """What the converter of 0.4.4 leaves: list<float>, an fps per feature, and the first episode of every later data
    file attributed to the file before. Find rows by episode_index, not by data/file_index."""
    plain_lists(built)
    for name in info_of(built)["features"]:
        edit_info(built, ["features", name, "fps"], built.fps)

    def change(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        files = [row["data/file_index"] for row in rows]
        return [row | {"data/file_index": before} for row, before in zip(rows, [0, *files], strict=False)]

    edit_episodes(built, change)


def drifting_from_timestamp(built: Built) -> None:
    """from_timestamp is up to 0.4 frames off, as sums of float durations get: round to the frame."""
    wrong = 0.4 / built.fps

    def change(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for number, row in enumerate(rows):
            for key in built.cameras:
                if row[f"videos/{key}/from_timestamp"] > 0:
                    row[f"videos/{key}/from_timestamp"] += wrong * (-1) ** number
                    row[f"videos/{key}/to_timestamp"] += wrong * (-1) ** number
        return rows

    edit_episodes(built, change)


def tasks_in(column: str, kind: pa.DataType) -> Variant:
    """tasks.parquet keeps the task strings in a column of another name or type: the one that is not task_index."""

    def variant(built: Built) -> None:
        table = pq.read_table(built.root / "meta/tasks.parquet")
        write_tasks(built.root, table["__index_level_0__"].to_pylist(), column, kind)

    return variant


def tasks_with_more_columns(built: Built) -> None:
    """tasks.parquet says more about the tasks, in columns before their strings: those are still the frame's index."""

    def change(table: pa.Table) -> pa.Table:
        return table.add_column(0, "category", pa.array(["manipulation"] * table.num_rows))

    edit_table(built.root / "meta/tasks.parquet", change)


def tasks_out_of_order(built: Built) -> None:
    """The rows of the task list are not in the order of task_index: look the task up by its number."""
    if built.version == "v3.0":
        edit_table(built.root / "meta/tasks.parquet", lambda table: table.take(list(range(table.num_rows))[::-1]))
    else:
        path = built.root / "meta/tasks.jsonl"
        write_jsonl(path, [json.loads(line) for line in path.read_text().split("\n") if line][::-1])


def resumed(built: Built) -> None:
    """Recording was resumed, so meta/episodes has one file per session, the later sessions' files in a later chunk."""
    first = built.root / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(first)
    for number in range(table.num_rows):
        path = built.root / f"meta/episodes/chunk-{number // 2:03d}/file-{number % 2:03d}.parquet"
        write_table(path, table.slice(number, 1))


def later_keys(built: Built) -> None:
    """Keys and files that later versions may add, and their order of keys: ignore what is unknown."""
    info = dict(reversed(info_of(built).items())) | {"tools": [{"type": "function"}], "future": {"a": [1, None]}}
    write_json(built.root / "meta/info.json", info)
    write_table(built.root / "meta/subtasks.parquet", pa.table({"subtask": ["reach", "grasp"]}))
    set_episode(built, "outcome", "good")
    (built.root / "README.md").write_text("# A dataset\n")
    (built.root / "images").mkdir()


def extra_columns(built: Built) -> None:
    """Columns nobody asked for: a matrix, a string, an undeclared integer."""
    edit_info(built, ["features", "observation.tactile"], {"dtype": "float32", "shape": [2, 3], "names": None})
    edit_info(built, ["features", "observation.note"], {"dtype": "string", "shape": [1], "names": None})

    def change(table: pa.Table) -> pa.Table:
        matrices = np.zeros((table.num_rows, 2, 3), np.float32).tolist()
        table = table.append_column("observation.tactile", pa.array(matrices, pa.list_(pa.list_(pa.float32()))))
        table = table.append_column("observation.note", pa.array(["fine"] * table.num_rows))
        return table.append_column("undeclared", pa.array(np.arange(table.num_rows, dtype=np.int32)))

    edit_data(built, change)


def rows_out_of_order(built: Built) -> None:
    """Two rows of each file are exchanged with all that is in them: frame_index tells where they belong."""

    def change(table: pa.Table) -> pa.Table:
        order = np.arange(table.num_rows)
        order[[1, 2]] = 2, 1
        return table.take(order)

    edit_data(built, change)


def rows_removed(kept: slice) -> Variant:
    """Rows of a robot that stood still were removed, and videos left as they are: `timestamp` names the frames."""

    def variant(built: Built) -> Built:
        def change(table: pa.Table) -> pa.Table:
            episodes = table["episode_index"].to_numpy()
            parts = [table.filter(episodes == episode) for episode in np.unique(episodes)]
            parts = [part.take(np.arange(len(part))[kept]) for part in parts]
            counted = np.concatenate([np.arange(len(part)) for part in parts])
            table = pa.concat_tables(parts).drop_columns("index")
            return table.set_column(table.column_names.index("frame_index"), "frame_index", pa.array(counted))

        edit_data(built, change)
        edit_episodes(built, lambda rows: [row | {"length": len(np.arange(row["length"])[kept])} for row in rows])
        parts = ("state", "action", "tasks")
        return dataclasses.replace(
            built,
            episodes=tuple(
                dataclasses.replace(
                    episode,
                    **{part: getattr(episode, part)[kept] for part in parts},
                    frames={key: frames[kept] for key, frames in episode.frames.items()},
                )
                for episode in built.episodes
            ),
        )

    return variant


def frames_counted_on(built: Built) -> None:
    """frame_index does not start anew with every episode: its order within the episode is what counts."""
    edit_data(built, lambda t: t.set_column(t.column_names.index("frame_index"), "frame_index", t["index"]))


def tasks_of_episodes_alone(built: Built) -> None:
    """There is no list of tasks, but every episode lists its own."""
    next((built.root / "meta").glob("tasks.*")).unlink()


def empty_episode(built: Built) -> Built:
    """Episode 1 has no frames, and says so."""
    edit_table(built.episodes[1].data_file, lambda table: table.slice(0, 0))
    set_episode(built, "length", 0)
    return dataclasses.replace(built, episodes=(built.episodes[0], *built.episodes[2:]))


def blank_lines(built: Built) -> None:
    """Lines of the .jsonl files end in CRLF, and empty ones follow: no line is missing."""
    for path in (built.root / "meta").glob("*.jsonl"):
        path.write_text(path.read_text().replace("\n", "\r\n") + "\r\n\n", newline="")


def images_as(file_format: str, mode: str) -> Variant:
    """Images are stored as JPEG, in grey or with an (opaque) alpha channel: a reader gives RGB."""

    def variant(built: Built) -> Built:
        seen = {}
        for number, episode in enumerate(built.episodes):
            for key, frames in episode.frames.items():
                stored = [_encoded(frame, file_format, mode) for frame in frames]
                edit_column(built, key, lambda _, stored=stored: stored, episode=number)  # type: ignore[misc]
                seen[number, key] = np.array([Image.fromarray(frame).convert(mode).convert("RGB") for frame in frames])
        episodes = [
            dataclasses.replace(episode, frames={key: seen[number, key] for key in built.cameras})
            for number, episode in enumerate(built.episodes)
        ]
        return dataclasses.replace(built, episodes=tuple(episodes))

    return variant


def hub_snapshot(built: Built) -> Built:
    """A snapshot in the Hub's cache, where recent LeRobot downloads to: every file a link into ../../blobs."""
    built = moved(built, built.root, built.root.parent / "snapshots" / ("0123456789" * 4))
    blobs = built.root.parent.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(path for path in built.root.rglob("*") if path.is_file())):
        blob = blobs / f"{number:040x}"
        path.rename(blob)
        path.symlink_to(Path(*[".."] * (len(path.relative_to(built.root).parts) + 1), "blobs", blob.name))
    return built


def copied_by_a_mac(built: Built) -> None:
    """Beside every file lies a hidden one with its name and what only a Mac knows about it: none of our business."""
    for path in [path for path in built.root.rglob("*") if path.is_file()]:
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X")


def made(*variants: Variant, **options: Any) -> Builder:
    """A builder of a dataset with these options, changed by these variants in turn."""

    def builder(root: Path) -> Built:
        built = build(root / "dataset", **options)
        for variant in variants:
            built = variant(built) or built
        return built

    return builder


CLOTH = (
    templates_by_chunk_index,
    float64_columns,
    wall_clock,
    no_default_features,
    channel_first,
    stray_parquet,
    no_statistics,
    no_index_columns,
)
# Some of these characters end a line for str.splitlines, but not in JSON lines.
UNICODE = ("把红色方块放进碗里 🥣", 'say "öffne"\u2028the\x85 drawer\\n \u202eright to left\u202c')

VALID: dict[str, Builder] = {
    **{
        f"{version}_{cameras}": made(version=version, cameras=cameras)
        for version in ("v2.0", "v2.1", "v3.0")
        for cameras in ("video", "image", "none")
    },
    "av1": made(codec="libsvtav1", size=(64, 64)),
    "h264_b_frames": made(codec="h264", gop=12),
    "h264_b_frames_v30": made(version="v3.0", codec="h264", gop=12),
    "mpeg4_large_gop_v30": made(version="v3.0", gop=50),
    "thirty_frames_per_second": made(version="v3.0", fps=30, lengths=(11, 7, 13)),
    "fps_as_float": made(lambda built: edit_info(built, ["fps"], 10.0), cameras="none"),
    "one_frame_episodes": made(version="v3.0", lengths=(1, 3, 1)),
    "unicode_tasks": made(tasks=UNICODE, cameras="none"),
    "tasks_out_of_order": made(tasks_out_of_order, cameras="none"),
    "tasks_out_of_order_v30": made(tasks_out_of_order, version="v3.0", tasks=UNICODE, cameras="none"),
    "task_switches": made(switch_task=True, cameras="none"),
    "small_chunks": made(chunks_size=2),
    "small_chunks_v30": made(version="v3.0", chunks_size=1),
    "single_files": made(version="v3.0", data_split=(), video_splits=((), ())),
    "independent_files": made(
        version="v3.0", lengths=(7, 5, 9, 4, 6), data_split=(3, 1), video_splits=((1, 3), (2, 1)), chunks_size=2
    ),
    "resumed": made(resumed, version="v3.0"),
    "converted": made(converted, version="v3.0"),
    "drifting_from_timestamp": made(drifting_from_timestamp, version="v3.0", lengths=(7, 5, 9, 4, 6)),
    "tasks_column_task": made(tasks_in("task", pa.large_string()), version="v3.0", cameras="none"),
    "tasks_with_more_columns": made(tasks_with_more_columns, version="v3.0", cameras="none"),
    "later_keys": made(later_keys, version="v3.0"),
    "extra_columns": made(extra_columns, cameras="none"),
    "rows_out_of_order": made(rows_out_of_order),
    "rows_removed": made(rows_removed(slice(2, None))),
    "rows_removed_v30": made(rows_removed(slice(None, None, 2)), version="v3.0"),
    "frames_counted_on": made(frames_counted_on, cameras="none"),
    "tasks_of_episodes_alone": made(tasks_of_episodes_alone, cameras="none"),
    "empty_episode": made(empty_episode),
    "blank_lines": made(blank_lines, cameras="none"),
    "image_jpeg": made(images_as("JPEG", "RGB"), cameras="image"),
    "image_grey": made(images_as("PNG", "L"), cameras="image"),
    "image_rgba": made(images_as("PNG", "RGBA"), cameras="image"),
    "copied_by_a_mac": made(copied_by_a_mac, version="v3.0"),
    "hub_snapshot": made(hub_snapshot, version="v3.0"),
    "cloth": made(*CLOTH, gop=12, chunks_size=2, rewards="none"),
    "channel_first_unnamed": made(channel_first_unnamed),
    "open_50": made(
        *(video_directory, wrong_codec_named, plain_lists),
        **{"version": "v3.0", "rewards": "none", "data_split": (1, 1), "video_splits": ((1, 1),) * 2},
        **{"camera_keys": ("image", "wrist_image"), "state_key": "state", "action_key": "actions"},
    ),
    "video_directory": made(video_directory),
}
