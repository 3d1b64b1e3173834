"""Small LeRobot datasets made by hand, sound, odd or damaged, that remember what a reader should find in them.

Nothing here uses pirl, so that what pirl reads and writes is judged from outside. `VALID` and `BROKEN` list builders by
name; each takes an empty directory and puts the dataset (`Built.root`) and whatever lies around it there. Episode 1
is the one that damage hits.
"""

import copy
import dataclasses
import functools
import io
import itertools
import json
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from hypothesis import strategies as st
from jaxtyping import Bool, Float, UInt8
from PIL import Image

CAMERAS = ("observation.images.cam_high", "observation.images.cam_left_wrist")
TASKS = ("pick up the red cube", "open the drawer")
DEFAULT_FEATURES = ("timestamp", "frame_index", "episode_index", "index", "task_index")
CODECS = {"libsvtav1": "av1", "h264": "h264", "mpeg4": "mpeg4"}  # encoder: the name info.json has for it
ENCODERS = {"libsvtav1": {"preset": "12", "crf": "30"}, "h264": {"crf": "23"}, "mpeg4": {"qmax": "4"}}
CONVENTIONS = ("next", "hilserl", "success", "is_success", "dense", "recap", "none")
V2_PATHS = {
    "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
V3_PATHS = {
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}


@dataclasses.dataclass(frozen=True)
class Episode:
    """What was written of one episode; a column the dataset does not have is None."""

    state: Float[np.ndarray, "t s"]
    action: Float[np.ndarray, "t a"]
    reward: Float[np.ndarray, "t"] | None
    done: Bool[np.ndarray, "t"] | None
    success: Bool[np.ndarray, "t"] | None
    succeeded: bool  # the outcome, however the columns tell it; without any, demonstrations succeed
    tasks: tuple[str, ...]  # one per frame
    frames: dict[str, UInt8[np.ndarray, "t h w 3"]]  # by camera, before any codec
    data_file: Path
    video_files: dict[str, Path]

    def __len__(self) -> int:
        return len(self.state)


@dataclasses.dataclass(frozen=True)
class Built:
    """A dataset on disk and the truth about it."""

    root: Path
    version: str
    fps: int
    codec: str
    cameras: tuple[str, ...]
    state_key: str
    action_key: str
    episodes: tuple[Episode, ...]


Variant = Callable[[Built], Built | None]  # changes the files in place; returns the truth where that changes, too
Builder = Callable[[Path], Built]


def draw_bars(camera: int, episode: int, frame: int, size: tuple[int, int]) -> UInt8[np.ndarray, "h w 3"]:
    """An image that says who it is: three rows of eight 4-pixel cells, lowest bit first, on a ramp of colour.

    The camera counts from one, so that a black image is nobody's. Red grows rightwards and green downwards, so that a
    flip, a transposition or a swap of channels shows.
    """
    height, width = size
    image = np.full((height, width, 3), 90, np.uint8)
    image[..., 0] = np.linspace(40, 200, width)
    image[..., 1] = np.linspace(40, 200, height)[:, None]
    for row, number in enumerate((camera + 1, episode, frame)):
        bits = number >> np.arange(8) & 1
        image[4 * row : 4 * row + 4, :32] = np.repeat(np.where(bits, 235, 20), 4)[:, None]
    return image


def read_bars(image: UInt8[np.ndarray, "h w 3"]) -> tuple[int, int, int]:
    """The camera, episode and frame of an image that `draw_bars` drew and a codec may have blurred."""
    cells = image[:12, :32].astype(float).mean(-1).reshape(3, 4, 8, 4)[:, 1:3, :, 1:3].mean((1, 3))
    if ((cells > 90) & (cells < 165)).any():
        raise ValueError(f"some bars are neither dark nor light: {cells.round().tolist()}")
    camera, episode, frame = ((cells > 128) @ (1 << np.arange(8))).tolist()
    return camera - 1, episode, frame


def build(
    root: Path,
    *,
    version: str = "v2.1",
    lengths: Sequence[int] = (7, 5, 9),
    cameras: Literal["video", "image", "none"] = "video",
    codec: str = "mpeg4",
    gop: int = 2,
    size: tuple[int, int] = (32, 48),
    rewards: str = "next",
    tasks: Sequence[str] = TASKS,
    switch_task: bool = False,
    fps: int = 10,
    state_dim: int = 4,
    action_dim: int = 3,
    camera_keys: tuple[str, ...] = CAMERAS,
    state_key: str = "observation.state",
    action_key: str = "action",
    chunks_size: int = 1000,
    data_split: Sequence[int] = (2,),
    video_splits: Sequence[Sequence[int]] = ((1,), ()),
    seed: int = 0,
) -> Built:
    """A sound dataset of version v2.0, v2.1 or v3.0. Every second episode fails, if `rewards` can say so.

    `data_split` and, per camera, `video_splits` say how many episodes go into each file of a v3.0 dataset; the rest
    goes into one more. `switch_task` changes the task in the middle of each episode.
    """
    random = np.random.default_rng(seed)
    v3, keys = version == "v3.0", camera_keys if cameras != "none" else ()
    video_keys = keys if cameras == "video" else ()
    paths = V3_PATHS if v3 else V2_PATHS
    data_files = _groups(len(lengths), data_split if v3 else [1] * len(lengths))
    video_files = {
        key: _groups(len(lengths), split if v3 else [1] * len(lengths))
        for key, split in zip(video_keys, video_splits, strict=False)
    }

    episodes, columns = [], []
    for index, length in enumerate(lengths):
        succeeded = index % 2 == 0 or rewards == "none"
        outcome = _outcome(rewards, length, succeeded, random)
        task_indices = (index + (np.arange(length) >= length / 2) * switch_task) % len(tasks)
        episode = Episode(
            state=random.normal(size=(length, state_dim)).astype(np.float32),
            action=random.normal(size=(length, action_dim)).astype(np.float32),
            reward=outcome.get("next.reward"),
            done=outcome.get("next.done", outcome.get("done")),
            success=outcome.get("next.success", outcome.get("is_success")),
            succeeded=succeeded,
            tasks=tuple(tasks[task] for task in task_indices),
            frames={
                key: np.array([draw_bars(number, index, frame, size) for frame in range(length)])
                for number, key in enumerate(keys)
            },
            data_file=root / _path(paths["data_path"], _file_of(index, data_files), chunks_size),
            video_files={
                key: root / _path(paths["video_path"], _file_of(index, files), chunks_size, key)
                for key, files in video_files.items()
            },
        )
        episodes.append(episode)
        columns.append(
            {key: [_encoded(image) for image in episode.frames[key]] for key in keys if cameras == "image"}
            | {state_key: episode.state, action_key: episode.action}
            | outcome
            | {
                "timestamp": (np.arange(length) / fps).astype(np.float32),
                "frame_index": np.arange(length),
                "episode_index": np.full(length, index),
                "index": sum(lengths[:index]) + np.arange(length),
                "task_index": task_indices,
            }
        )

    for members in data_files:
        write_rows(episodes[members[0]].data_file, [columns[e] for e in members], "List" if v3 else "Sequence")
    for key, files in video_files.items():
        for members in files:
            frames = np.concatenate([episodes[e].frames[key] for e in members])
            write_video(episodes[members[0]].video_files[key], frames, fps, codec, gop)

    info: dict[str, Any] = {
        "codebase_version": version,
        "robot_type": "aloha",
        "total_episodes": len(lengths),
        "total_frames": sum(lengths),
        "total_tasks": len(tasks),
        **({} if v3 else {"total_videos": len(lengths) * len(video_keys), "total_chunks": 1}),
        "chunks_size": chunks_size,
        **({"data_files_size_in_mb": 100, "video_files_size_in_mb": 200} if v3 else {}),
        "fps": fps,
        "splits": {"train": f"0:{len(lengths)}"},
        "data_path": paths["data_path"],
        "video_path": paths["video_path"] if video_keys else None,
        "features": {key: _camera_feature(cameras, size, fps, codec, version) for key in keys},
    }
    for name, column in columns[0].items():
        if isinstance(column, np.ndarray):
            info["features"][name] = _feature(column, version)
    write_json(root / "meta/info.json", info)

    rows: list[dict[str, Any]] = [
        {"episode_index": index, "tasks": list(dict.fromkeys(episode.tasks)), "length": len(episode)}
        for index, episode in enumerate(episodes)
    ]
    statistics = [_statistics(values, episode.frames) for values, episode in zip(columns, episodes, strict=True)]
    if v3:
        for index, row in enumerate(rows):
            row |= _place("data", _file_of(index, data_files), chunks_size)
            row |= {"dataset_from_index": sum(lengths[:index]), "dataset_to_index": sum(lengths[: index + 1])}
            for key, files in video_files.items():
                number, prefix = _file_of(index, files), f"videos/{key}"
                start = sum((lengths[e] / fps for e in files[number] if e < index), 0.0)
                row |= _place(prefix, number, chunks_size)
                row |= {f"{prefix}/from_timestamp": start, f"{prefix}/to_timestamp": start + lengths[index] / fps}
            row |= _place("meta/episodes", 0, chunks_size)
            for key, kinds in statistics[index].items():
                row |= {f"stats/{key}/{kind}": value for kind, value in kinds.items()}
        write_table(root / "meta/episodes/chunk-000/file-000.parquet", table_of(rows))
        write_tasks(root, tasks)
    else:
        write_jsonl(root / "meta/episodes.jsonl", rows)
        write_jsonl(root / "meta/tasks.jsonl", [{"task_index": i, "task": task} for i, task in enumerate(tasks)])
    if version == "v2.1":
        lines = [{"episode_index": index, "stats": features} for index, features in enumerate(statistics)]
        write_jsonl(root / "meta/episodes_stats.jsonl", lines)
    else:
        vectors = {name: np.concatenate([c[name] for c in columns]) for name in columns[0] if name not in keys}
        pictures = {key: np.concatenate([episode.frames[key] for episode in episodes]) for key in keys}
        write_json(root / "meta/stats.json", _statistics(vectors, pictures))
    return Built(root, version, fps, codec, keys, state_key, action_key, tuple(episodes))


def _groups(episodes: int, sizes: Sequence[int]) -> list[range]:
    """Consecutive episodes of each file, the last of which takes the rest."""
    starts = [0, *np.cumsum(sizes, dtype=int).tolist(), episodes]
    return [group for start, stop in itertools.pairwise(starts) if (group := range(episodes)[start:stop])]


def _file_of(episode: int, files: Sequence[range]) -> int:
    return next(number for number, members in enumerate(files) if episode in members)


def _place(prefix: str, file: int, chunks_size: int) -> dict[str, int]:
    return {f"{prefix}/chunk_index": file // chunks_size, f"{prefix}/file_index": file % chunks_size}


def _path(template: str, file: int, chunks_size: int, key: str = "") -> str:
    place = {"chunk_index": file // chunks_size, "file_index": file % chunks_size}
    return template.format(**place, episode_chunk=file // chunks_size, episode_index=file, video_key=key)


def _outcome(convention: str, length: int, succeeded: bool, random: np.random.Generator) -> dict[str, np.ndarray]:
    """The columns in which recorders of one tradition tell how an episode went."""
    last = np.arange(length) == length - 1
    reward, flags = (last & succeeded).astype(np.float32), random.random(length) < 0.3
    standard = {"next.reward": reward, "next.done": last, "next.success": last & succeeded}
    match convention:
        case "next":
            return standard
        case "dense":
            return standard | {"next.reward": random.random(length).astype(np.float32)}
        case "recap":
            cost = np.where(last, 0.0 if succeeded else -20.0, -1.0).astype(np.float32)
            return {"next.reward": cost, "next.done": last}
        case "hilserl":
            penalty = np.where(flags, -0.02, 0.0).astype(np.float32)
            extra = {"complementary_info.discrete_penalty": penalty, "complementary_info.is_intervention": flags}
            return {"next.reward": reward, "next.done": last} | extra
        case "success":
            return {"next.success": last & succeeded, "intervention": flags}
        case "is_success":
            every = {"done": last, "is_success": np.full(length, succeeded)}
            return every | {"intervene_flag": flags, "segment_id": np.cumsum(flags).astype(np.uint8)}
        case "none":
            return {}
    raise ValueError(f"no convention {convention!r}; there are {CONVENTIONS}")


def _feature(values: np.ndarray, version: str) -> dict[str, Any]:
    names = [f"joint_{number}" for number in range(values.shape[1])] if values.ndim > 1 else None
    described: dict[str, Any] = {"dtype": str(values.dtype), "shape": list(values.shape[1:]) or [1], "names": names}
    return described | {"names": {"motors": names}} if names and version == "v2.0" else described


def _camera_feature(kind: str, size: tuple[int, int], fps: int, codec: str, version: str) -> dict[str, Any]:
    feature: dict[str, Any] = {"dtype": kind, "shape": [*size, 3], "names": ["height", "width", "channel"]}
    if kind == "video":
        described = {"video.height": size[0], "video.width": size[1], "video.codec": CODECS[codec]}
        described |= {"video.pix_fmt": "yuv420p", "video.is_depth_map": False, "video.fps": fps, "has_audio": False}
        feature["video_info" if version == "v2.0" else "info"] = described
    return feature


def _statistics(columns: Mapping[str, Any], frames: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """The statistics LeRobot keeps: lists of whatever type the column has, (3, 1, 1) of [0, 1] for pictures."""
    result = {}
    for key, values in {**columns, **frames}.items():
        if key in frames:
            kinds = {kind: getattr(values / 255, kind)((0, 1, 2)) for kind in ("min", "max", "mean", "std")}
            lists = {kind: value.reshape(3, 1, 1).tolist() for kind, value in kinds.items()}
        else:
            kinds = {kind: getattr(values, kind)(0) for kind in ("min", "max", "mean", "std")}
            lists = {kind: np.atleast_1d(value).tolist() for kind, value in kinds.items()}
        result[key] = lists | {"count": [len(values)]}
    return result


def _encoded(image: UInt8[np.ndarray, "h w 3"], file_format: str = "PNG", mode: str = "RGB") -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.fromarray(image).convert(mode).save(buffer, file_format)
    return {"bytes": buffer.getvalue(), "path": f"frame_{read_bars(image)[2]:06d}.{file_format.lower()}"}


# Writing and editing files.


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=4))


def write_jsonl(path: Path, rows: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), newline="")


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """A table that has every key of any row."""
    return pa.Table.from_struct_array(pa.array(rows or [{"episode_index": 0}])).slice(0, len(rows))


def write_table(path: Path, *tables: pa.Table) -> None:
    """One row group per table, as LeRobot writes one per episode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(path, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)


def write_rows(path: Path, episodes: Sequence[Mapping[str, Any]], list_name: str) -> None:
    """Columns of numpy arrays and encoded images, with the description that HF datasets look for."""

    def array(values: Any) -> pa.Array:
        if isinstance(values, list):
            return pa.array(values, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
        if values.ndim == 1:
            return pa.array(values)
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])

    def feature(values: Any) -> dict[str, Any]:
        if isinstance(values, list):
            return {"_type": "Image"}
        value = {"dtype": str(values.dtype), "_type": "Value"}
        return value if values.ndim == 1 else {"feature": value, "length": values.shape[1], "_type": list_name}

    features = {name: feature(values) for name, values in episodes[0].items()}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    tables = [pa.table({name: array(values) for name, values in columns.items()}) for columns in episodes]
    write_table(path, *(table.replace_schema_metadata(metadata) for table in tables))


def write_video(path: Path, frames: UInt8[np.ndarray, "t h w 3"], fps: int, codec: str, gop: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream: Any = container.add_stream(codec, rate=fps, options=ENCODERS[codec] | {"g": str(gop)})
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def write_tasks(
    root: Path, tasks: Sequence[str], column: str = "__index_level_0__", kind: pa.DataType | None = None
) -> None:
    table = pa.table({"task_index": np.arange(len(tasks)), column: pa.array(tasks, kind or pa.large_string())})
    write_table(root / "meta/tasks.parquet", table)


def info_of(built: Built) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((built.root / "meta/info.json").read_text())
    return content


def edit_info(built: Built, path: Sequence[str], value: Any) -> None:
    """Set one entry of info.json, or remove it where the value is `...`."""
    info = info_of(built)
    *parents, key = path
    parent = functools.reduce(lambda node, name: node[name], parents, info)
    if value is ...:
        del parent[key]
    else:
        parent[key] = value
    write_json(built.root / "meta/info.json", info)


def edit_table(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    write_table(path, change(pq.read_table(path)))


def edit_data(built: Built, change: Callable[[pa.Table], pa.Table]) -> None:
    """Change every data file, and drop the description for HF datasets, which hand-made data lack."""
    for path in {episode.data_file for episode in built.episodes}:
        edit_table(path, lambda table: change(table).replace_schema_metadata(None))


def edit_column(
    built: Built,
    column: str,
    change: Callable[[list[Any]], list[Any]],
    kind: pa.DataType | None = None,
    episode: int = 1,
) -> None:
    """Change the values of one column in one episode, and with `kind` the type of the column in that file."""

    def changed(table: pa.Table) -> pa.Table:
        values, rows = table[column].to_pylist(), np.flatnonzero(table["episode_index"].to_numpy() == episode)
        values[rows[0] : rows[-1] + 1] = change(values[rows[0] : rows[-1] + 1])
        number = table.column_names.index(column)
        return table.set_column(number, column, pa.array(values, kind or table.schema.field(column).type))

    edit_table(built.episodes[episode].data_file, changed)


def edit_episodes(built: Built, change: Callable[[list[dict[str, Any]]], list[Any]]) -> None:
    """Change the rows of the episode metadata, whichever format they are in."""
    if built.version == "v3.0":
        path = built.root / "meta/episodes/chunk-000/file-000.parquet"
        write_table(path, table_of(change(pq.read_table(path).to_pylist())))
    else:
        path = built.root / "meta/episodes.jsonl"
        write_jsonl(path, change([json.loads(line) for line in path.read_text().split("\n") if line]))


def set_episode(built: Built, key: str, value: Any, episode: int = 1) -> None:
    """Set one field of the metadata of one episode, or remove it from all where the value is `...`."""

    def change(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if value is ...:
            return [{name: field for name, field in row.items() if name != key} for row in rows]
        return [row | {key: value} if row["episode_index"] == episode else row for row in rows]

    edit_episodes(built, change)


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
OPEN_50 = {"camera_keys": ("image", "wrist_image"), "state_key": "state", "action_key": "actions", "data_split": (1, 1)}
# Some of these characters end a line for str.splitlines, but not in JSON lines.
UNICODE = ("把红色方块放进碗里 🥣", 'say "öffne"\u2028the\x85 drawer\\n \u202eright to left\u202c')

VALID: dict[str, Builder] = {
    **{
        f"{version}_{cameras}": made(version=version, cameras=cameras)
        for version in ("v2.0", "v2.1", "v3.0")
        for cameras in ("video", "image", "none")
    },
    **{f"rewards_{name}": made(rewards=name, cameras="none") for name in CONVENTIONS},
    "v2.1_av1": made(codec="libsvtav1", size=(64, 64)),
    "v2.1_h264": made(codec="h264"),
    "v2.1_h264_b_frames": made(codec="h264", gop=12),
    "v2.1_mpeg4_large_gop": made(gop=12),
    "v3.0_av1": made(version="v3.0", codec="libsvtav1", size=(64, 64)),
    "v3.0_h264_b_frames": made(version="v3.0", codec="h264", gop=12),
    "v3.0_mpeg4_large_gop": made(version="v3.0", gop=50),
    "square_size": made(size=(64, 64)),
    "thirty_frames_per_second": made(version="v3.0", fps=30, lengths=(11, 7, 13)),
    "fps_as_float": made(lambda built: edit_info(built, ["fps"], 10.0)),
    "one_episode": made(lengths=(4,)),
    "one_frame_episodes": made(version="v3.0", lengths=(1, 3, 1)),
    "unicode_tasks": made(tasks=UNICODE, cameras="none"),
    "unicode_tasks_v30": made(version="v3.0", tasks=UNICODE, cameras="none"),
    "tasks_out_of_order": made(tasks_out_of_order, cameras="none"),
    "tasks_out_of_order_v30": made(tasks_out_of_order, version="v3.0", cameras="none"),
    "task_switches": made(switch_task=True, cameras="none"),
    "task_switches_v30": made(version="v3.0", switch_task=True, cameras="none"),
    "small_chunks": made(chunks_size=2),
    "small_chunks_v30": made(version="v3.0", chunks_size=1),
    "file_per_episode": made(version="v3.0", data_split=(1, 1), video_splits=((1, 1), (1, 1))),
    "single_files": made(version="v3.0", data_split=(), video_splits=((), ())),
    "independent_files": made(
        version="v3.0", lengths=(7, 5, 9, 4, 6), data_split=(3, 1), video_splits=((1, 3), (2, 1)), chunks_size=2
    ),
    "resumed": made(resumed, version="v3.0"),
    "converted": made(converted, version="v3.0"),
    "drifting_from_timestamp": made(drifting_from_timestamp, version="v3.0", lengths=(7, 5, 9, 4, 6)),
    "tasks_column_task": made(tasks_in("task", pa.string()), version="v3.0", cameras="none"),
    "tasks_column_large_task": made(tasks_in("task", pa.large_string()), version="v3.0", cameras="none"),
    "tasks_column_index_string": made(tasks_in("__index_level_0__", pa.string()), version="v3.0", cameras="none"),
    "later_keys": made(later_keys, version="v3.0"),
    "extra_columns": made(extra_columns, cameras="none"),
    "rows_out_of_order": made(rows_out_of_order),
    "rows_out_of_order_v30": made(rows_out_of_order, version="v3.0"),
    "blank_lines": made(blank_lines, cameras="none"),
    "image_jpeg": made(images_as("JPEG", "RGB"), cameras="image"),
    "image_grey": made(images_as("PNG", "L"), cameras="image"),
    "image_rgba": made(images_as("PNG", "RGBA"), cameras="image"),
    "hub_snapshot": made(hub_snapshot, version="v3.0"),
    "cloth": made(*CLOTH, gop=12, chunks_size=2, rewards="none"),
    **{variant.__name__: made(variant, chunks_size=2) for variant in CLOTH},
    "channel_first_unnamed": made(channel_first_unnamed),
    "open_50": made(
        video_directory,
        wrong_codec_named,
        plain_lists,
        version="v3.0",
        rewards="none",
        video_splits=((1, 1),) * 2,
        **OPEN_50,
    ),
    "own_keys": made(version="v3.0", **OPEN_50),
    **{
        f"{variant.__name__}{suffix}": made(variant, version=version)
        for variant in (video_directory, wrong_codec_named, plain_lists)
        for suffix, version in (("", "v2.1"), ("_v30", "v3.0"))
    },
}


# Damage. A description says what is wrong and what a complaint should name; `broken` and the helpers below list it.

BROKEN: dict[str, tuple[Builder, tuple[str, ...]]] = {}
BOTH = ("v2.1", "v3.0")
# Where episode 1 lies, its video being that of the first camera.
FILES = {
    "v2.1": {"data": "episode_000001.parquet", "video": "episode_000001.mp4", "meta": "episodes.jsonl"},
    "v3.0": {"data": "file-000.parquet", "video": "file-001.mp4", "meta": "meta/episodes"},
}
NAN = float("nan")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"


def broken(*expected: str, versions: Sequence[str] = BOTH, **options: Any) -> Callable[[Variant], Variant]:
    """List a variant as damage; the texts are what a complaint must contain, <data> etc. standing for `FILES`."""

    def register(variant: Variant) -> Variant:
        for version in versions:
            name = variant.__name__ + ("_v30" if version == "v3.0" else "")
            texts = [
                functools.reduce(lambda t, f: t.replace(f"<{f}>", FILES[version][f]), FILES[version], text)
                for text in expected
            ]
            assert name not in BROKEN, name
            BROKEN[name] = made(variant, **{"cameras": "none", "version": version} | options), tuple(texts)
        return variant

    return register


def damage(name: str, description: str, variant: Variant, *expected: str, **options: Any) -> None:
    """List damage that one expression can do."""
    variant.__name__, variant.__doc__ = name, description
    broken(*expected, **options)(variant)


def unmentioned(message: str, expected: Sequence[str]) -> list[str]:
    """Which of the expected texts a complaint leaves out, whatever its case and line breaks.

    "a|b" asks for either. "episode 1" may also be said as "episode_000001", "Episodes: 1" or "episode_index 1".
    """
    said = " ".join(message.split()).lower()

    def found(text: str) -> bool:
        if number := re.fullmatch(r"episode (\d+)", text):
            return re.search(rf"episodes?(_index)?[\s_:=#\[]{{0,3}}0*{number[1]}(?!\d)", said) is not None
        return text.lower() in said

    return [text for text in expected if not any(found(either) for either in text.split("|"))]


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


# Damage to rows.


def column_damage(
    name: str,
    description: str,
    column: str,
    change: Callable[[list[Any]], list[Any]],
    kind: pa.DataType | None = None,
    where: str = "episode 1",
) -> None:
    """List wrong values in one column of episode 1: a complaint names the column and the episode."""
    damage(name, description, lambda built: edit_column(built, column, change, kind), column, where)


FLOATS = pa.list_(pa.float32())
STATE = "observation.state"
WHERE = "episode 1|<data>"  # what is found by type rather than by value may be told of the file
column_damage("nan_in_state", "A number of the state is NaN.", STATE, replaced(3, replaced(2, NAN)))
column_damage("infinite_action", "A number of the action is infinite.", "action", replaced(0, replaced(1, -np.inf)))
column_damage("null_state", "The state of a frame is null.", STATE, replaced(2, None), where=WHERE)
column_damage("null_in_action", "A number is null.", "action", replaced(2, replaced(0, None)), where=WHERE)
column_damage("narrow_row", "A state has three numbers, not four.", STATE, replaced(2, lambda row: row[:3]), FLOATS)
column_damage(
    "hidden_widths",
    "A state has three numbers and the next has five, so that the total hides it.",
    STATE,
    lambda rows: [*rows[:2], rows[2][:3], [*rows[3], 0.0], *rows[4:]],
    FLOATS,
)
column_damage("nan_reward", "A reward is NaN.", "next.reward", replaced(1, NAN))
column_damage("done_too_early", "next.done is true amid an episode: warn.", "next.done", replaced(2, True))
column_damage("time_goes_back", "A timestamp is earlier than the one before: warn.", "timestamp", replaced(3, 0.05))
column_damage("nan_timestamp", "A timestamp is NaN.", "timestamp", replaced(3, NAN))
column_damage("frame_index_gap", "Number 2 is left out.", "frame_index", lambda rows: [0, 1, 3, 4, 5])
column_damage("frame_index_twice", "Number 1 comes twice.", "frame_index", replaced(2, 1))


@broken("action", "2")
def constant_action_dimension(built: Built) -> Built:
    """The last dimension of the action never changes: warn, naming the column and the dimension."""
    for episode in range(len(built.episodes)):
        edit_column(built, "action", lambda rows: [[*row[:2], 0.5] for row in rows], episode=episode)
    constant = [np.pad(e.action[:, :2], ((0, 0), (0, 1)), constant_values=0.5) for e in built.episodes]
    episodes = [dataclasses.replace(e, action=a) for e, a in zip(built.episodes, constant, strict=True)]
    return dataclasses.replace(built, episodes=tuple(episodes))


def new_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)


@broken("action", WHERE)
def narrow_column(built: Built) -> None:
    """All actions of one file have two numbers where info.json promises three: name the column, and where."""

    def change(table: pa.Table) -> pa.Table:
        rows = [row[:2] for row in table["action"].to_pylist()]
        return new_column(table, "action", pa.array(rows, pa.list_(pa.float32(), 2)))

    edit_table(data_of(built), change)


@broken(STATE, WHERE)
def state_of_strings(built: Built) -> None:
    """The state in one file is text: name the column, and where."""
    edit_table(data_of(built), lambda table: new_column(table, STATE, pa.array(["up"] * table.num_rows)))


@broken("next.reward", WHERE)
def no_reward_column(built: Built) -> None:
    """One data file lacks the reward that info.json declares: name the column, and where."""
    edit_table(data_of(built), lambda table: table.drop_columns(["next.reward"]))


@broken("observation.velocity")
def feature_without_column(built: Built) -> None:
    """info.json declares a feature that no parquet file has: name it."""
    edit_info(built, ["features", "observation.velocity"], {"dtype": "float32", "shape": [4], "names": None})


def without_rows(built: Built) -> None:
    edit_table(data_of(built), lambda table: table.filter(pc.field("episode_index") != 1))


@broken("<data>|episode 1")
def episode_without_data(built: Built) -> None:
    """The metadata list an episode of which there are no rows: name it, or the file that should have it."""
    if built.version == "v3.0":
        without_rows(built)
    else:
        data_of(built).unlink()


@broken("episode 1")
def episode_of_length_zero(built: Built) -> None:
    """An episode has no rows, and the metadata say so: name it."""
    set_episode(built, "length", 0)
    without_rows(built)


@broken("episode 1")
def episode_without_metadata(built: Built) -> None:
    """There are rows of an episode that the metadata leave out: name it."""
    edit_episodes(built, lambda rows: [row for row in rows if row["episode_index"] != 1])


@broken("<data>|episode 1", versions=["v2.1"])
def wrong_episode_in_file(built: Built) -> None:
    """The file of episode 1 says that its rows are of episode 2: name the file."""
    edit_column(built, "episode_index", lambda values: [2] * len(values))


@broken("task", "7")
def task_without_name(built: Built) -> None:
    """A row's task_index is 7, and there is no such task: name the number."""
    edit_column(built, "task_index", replaced(1, 7))


# Damage to whole files.


def file_damage(name: str, description: str, change: Callable[[Path], object], instead: str = "") -> None:
    """List a damaged parquet file and a damaged video: a complaint names the file, or what is said instead."""
    damage(f"{name}_parquet", description, lambda built: void(change(data_of(built))), f"<data>{instead}")
    options = {"cameras": "video"}
    damage(f"{name}_video", description, lambda built: void(change(video_of(built))), f"<video>{instead}", **options)


def void(_: object) -> None:
    """Turns an expression's value into none, so that it is not taken for a new truth."""


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garble(path: Path) -> None:
    content = path.read_bytes()
    if path.suffix == ".mp4":
        start, stop = content.index(b"mdat") + 4, len(content)
    else:
        start, stop = 4, len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    path.write_bytes(content[:start] + b"\xff" * (stop - start) + content[stop:])


def become_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


file_damage("missing", "The file is absent.", Path.unlink, "|episode 1")
file_damage("truncated", "The second half of the file is gone.", cut)
file_damage("garbled", "The index of the file is sound, what it points at is overwritten.", garble)
file_damage("pointer_for", "The file is a pointer of Git LFS.", lambda path: path.write_bytes(POINTER))
file_damage("empty", "The file has no bytes.", lambda path: path.write_bytes(b""))
file_damage("directory_for", "In place of the file there is a directory.", become_directory)
damage("no_data", "There is no data/ at all: name it.", lambda built: shutil.rmtree(built.root / "data"), "data")
damage(
    "no_videos",
    "There is no videos/ at all.",
    lambda built: shutil.rmtree(built.root / "videos"),
    "video",
    cameras="video",
)


def frames_damage(name: str, description: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """List a sound video of wrong frames: a complaint names the camera and the episode, or the file."""

    def variant(built: Built) -> None:
        members = [episode for episode in built.episodes if episode.video_files[CAMERAS[0]] == video_of(built)]
        frames = np.concatenate([episode.frames[CAMERAS[0]] for episode in members])
        write_video(video_of(built), change(frames), built.fps, built.codec)

    damage(name, description, variant, "cam_high|<video>", "episode|<video>", cameras="video")


frames_damage("short_video", "The video has two frames too few.", lambda frames: frames[:-2])
frames_damage(
    "long_video", "The video has two frames too many: warn.", lambda frames: frames[[*range(len(frames)), 0, 0]]
)
frames_damage(
    "other_size", "Pictures twice as large as in other files.", lambda frames: frames.repeat(2, 1).repeat(2, 2)
)


@broken("<video>", cameras="video")
def sound_for_video(built: Built) -> None:
    """A video file has a sound track and no picture: name it."""
    with av.open(str(video_of(built)), "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


def image_damage(name: str, description: str, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """List the damage of one stored image: a complaint names the camera and the episode."""
    variant = functools.partial(edit_column, column=CAMERAS[0], change=replaced(2, change))
    damage(name, description, lambda built: variant(built), "cam_high", "episode 1", cameras="image")


def enormous(png: bytes) -> bytes:
    """The same PNG with a header that promises 60000 × 60000 pixels."""
    header = b"IHDR" + struct.pack(">II", 60000, 60000) + png[24:29]
    return png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:]


image_damage("truncated_png", "Half of a PNG is gone.", lambda image: image | {"bytes": image["bytes"][:60]})
image_damage("text_for_png", "The bytes of an image are text.", lambda image: image | {"bytes": b"not an image"})
image_damage("empty_png", "An image has no bytes.", lambda image: image | {"bytes": b""})
image_damage("null_image", "An image is null.", lambda image: None)
image_damage("enormous_png", "A PNG claims 3.6e9 pixels.", lambda image: image | {"bytes": enormous(image["bytes"])})
image_damage("other_image_size", "An image is smaller than others.", lambda _: _encoded(draw_bars(0, 1, 2, (16, 32))))


@broken("cam_high", "episode 1", cameras="image")
def image_elsewhere(built: Built) -> None:
    """An image has no bytes but the path of a picture outside the dataset: do not follow it; name camera and episode."""
    picture = outside(built) / "secret.png"
    picture.write_bytes(_encoded(draw_bars(0, 1, 2, (32, 48)))["bytes"])
    edit_column(built, CAMERAS[0], replaced(2, {"bytes": None, "path": str(picture)}))


def ghost_camera(built: Built) -> None:
    """info.json declares a camera of which there is neither video nor column: name it."""
    edit_info(built, ["features", "observation.images.ghost"], info_of(built)["features"][CAMERAS[0]])


for kind in ("video", "image"):
    description = f"info.json declares a camera of dtype {kind} that is nowhere."
    damage(f"ghost_{kind}_camera", description, lambda built: ghost_camera(built), "images.ghost", cameras=kind)


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


# Damage to info.json.


def info_damage(name: str, path: Sequence[str], value: Any, *expected: str, **options: Any) -> None:
    """List one wrong entry of info.json, in a v2.1 dataset if nothing else is said: a complaint names the key."""
    what = "absent" if value is ... else f"{value!r:.60}"
    variant = functools.partial(edit_info, path=path, value=value)
    options = {"versions": ["v2.1"]} | options
    damage(name, f"{' → '.join(path)} is {what}.", lambda built: variant(built), *expected, **options)


TRICKS = {
    "unknown_field": "{foo}",
    "unknown_wide_field": "{foo:03d}",
    "attribute": "{episode_index.__class__}",
    "item": "{video_key[0]}",
    "enormous_width": "{episode_index:>999999999}",
    "nested_field": "{episode_index:{chunk_index}}",
    "position": "{}",
    "number": "{0}",
    "open_brace": "{episode_index",
    "lone_brace": "episode}",
    "wrong_type": "{episode_index:s}",
    "conversion": "{episode_index!r:>99}",
    "null_byte": "\0",
    "endless_name": "a" * 5000,
}
value: Any
for kind, cameras in (("data", "none"), ("video", "video")):
    path = [f"{kind}_path"]
    for name, trick in TRICKS.items():
        info_damage(f"{kind}_path_{name}", path, f"{kind}s/{trick}.file", f"{kind}_path|.file", cameras=cameras)
    for name, value in {"a_number": 3, "a_list": ["data"], "an_object": {"a": 1}}.items():
        info_damage(f"{kind}_path_{name}", path, value, f"{kind}_path", cameras=cameras, versions=BOTH)
# A template that leaves out the episode or the camera finds the same file for all of them.
ONE_FILE = "data/chunk-000/episode_000000.parquet"
ONE_CAMERA = f"videos/chunk-000/{CAMERAS[0]}/episode_{{episode_index:06d}}.mp4"
info_damage("data_path_of_one_file", ["data_path"], ONE_FILE, "data_path|episode_000000|episode 1")
info_damage("video_path_of_one_camera", ["video_path"], ONE_CAMERA, "video_path|cam_left_wrist", cameras="video")

FPS = {"zero": 0, "negative": -10, "string": "ten", "nan": NAN, "infinite": np.inf, "true": True, "huge": 10**400}
for name, value in (FPS | {"null": None, "absent": ...}).items():
    info_damage(f"fps_{name}", ["fps"], value, "fps", versions=BOTH)
for name, value in {
    "old": "v1.6",
    "future": "v9.0",
    "words": "newest",
    "number": 3,
    "null": None,
    "absent": ...,
}.items():
    info_damage(f"version_{name}", ["codebase_version"], value, value if isinstance(value, str) else "version")
for name, value in {"zero": 0, "negative": -1, "string": "many", "fraction": 1.5}.items():
    info_damage(f"chunks_size_{name}", ["chunks_size"], value, "chunks_size")
# These are for information, but a wrong one says that something is amiss.
for name, value in {"huge": 10**18, "negative": -1, "string": "three", "too_many": 4, "too_few": 2}.items():
    info_damage(f"total_episodes_{name}", ["total_episodes"], value, "total_episodes", versions=BOTH)
for name, value in {"huge": 10**18, "negative": -1, "string": "many", "other": 99}.items():
    info_damage(f"total_frames_{name}", ["total_frames"], value, "total_frames", versions=BOTH)
for name, value in {"list": [], "string": "all", "empty": {}, "null": None, "absent": ...}.items():
    info_damage(f"features_{name}", ["features"], value, "feature|action", versions=BOTH)
ACTION = ["features", "action"]
for name, value in {"null": None, "list": [1], "string": "float32", "empty": {}}.items():
    info_damage(f"feature_{name}", ACTION, value, "action")
for name, value in {"unknown": "flout32", "number": 32, "null": None, "absent": ..., "object": "object"}.items():
    info_damage(f"dtype_{name}", [*ACTION, "dtype"], value, "action")
SHAPES = {"null": None, "string": "3", "negative": [-3], "empty": [], "words": ["three"], "absent": ..., "other": [5]}
for name, value in (SHAPES | {"huge": [10**12], "zero": [0]}).items():
    info_damage(f"shape_{name}", [*ACTION, "shape"], value, "action")
for name, value in {"flat": [32], "null": None, "string": "32x48", "four": [1, 32, 48, 3]}.items():
    info_damage(f"camera_shape_{name}", ["features", CAMERAS[0], "shape"], value, "cam_high", cameras="video")

INFO_TEXTS = {
    "empty": b"",
    "not_json": b"codebase_version: v2.1\n",
    "cut_off": b'{"codebase_version": "v2.1", "fps":',
    "list": b"[]",
    "number": b"3",
    "null": b"null",
    "binary": bytes(range(128, 256)),
    "nested_too_deeply": b"[" * 100_000,
    "number_too_long": b'{"codebase_version": "v2.1", "fps": ' + b"9" * 5000 + b"}",
}


def info_file_damage(name: str, description: str, change: Callable[[Path], object]) -> None:
    """List an info.json that is none: a complaint names it."""
    variant: Variant = lambda built: void(change(built.root / "meta/info.json"))  # noqa: E731
    damage(f"info_{name}", description, variant, "info.json", versions=["v2.1"])


for name, text in INFO_TEXTS.items():
    info_file_damage(name, f"info.json is {text[:40]!r}.", functools.partial(Path.write_bytes, data=text))
info_file_damage("missing", "info.json is absent.", Path.unlink)
info_file_damage("directory", "info.json is a directory.", become_directory)


def no_dataset(name: str, description: str, change: Callable[[Path], object]) -> None:
    """List a path where there is no dataset: a complaint names it."""

    def variant(built: Built) -> None:
        shutil.rmtree(built.root)
        change(built.root)

    damage(name, description, variant, "dataset", versions=["v2.1"])


no_dataset("empty_directory", "The directory is empty.", Path.mkdir)
no_dataset("file_for_dataset", "The path is that of a file.", lambda path: path.write_text("nothing to see"))
no_dataset("nothing_there", "The path does not exist.", lambda path: None)


# Random damage.

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 10**18, 10**400, 1e308]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["v2.1", "v3.0", "video", "image", "float32", "../..", "/etc", *V2_PATHS.values(), *TRICKS.values()]
    ),
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


def _entry(draw: st.DrawFn, node: Any) -> tuple[Any, Any]:
    """Some entry at some depth, the keys at the top being as likely as each other: its container and its key there."""
    key = draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
    inner = node[key]
    return _entry(draw, inner) if isinstance(inner, dict | list) and inner and draw(st.booleans()) else (node, key)


@st.composite
def fuzz_info(draw: st.DrawFn, info: Mapping[str, Any]) -> dict[str, Any]:
    """An info.json some entries of which, at any depth, are removed, replaced, renamed or of another type."""
    mutated = copy.deepcopy(dict(info))
    for _ in range(draw(st.integers(1, 3))):
        container, key = _entry(draw, mutated)
        value = container.pop(key)
        mutation = draw(st.sampled_from(["drop", "replace", "rename", "retype"]))
        if mutation == "replace":
            value = draw(JUNK)
        elif mutation == "retype":
            value = draw(st.sampled_from([str(value), [value], {"value": value}, bool(value)]))
        if mutation != "drop" and isinstance(container, dict):
            container[draw(st.text(max_size=8)) if mutation == "rename" else key] = value
        elif mutation != "drop":
            container.insert(key, value)
    return mutated
