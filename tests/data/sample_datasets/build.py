"""Small sound LeRobot datasets made by hand, that remember what a reader should find in them; nothing here uses pirl."""

import dataclasses
import functools
import io
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
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
    """An image that says who it is: three rows of eight 4-pixel cells, lowest bit first, on a ramp of color.

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
            row["stats/index/min"] = [0]  # statistics are left out but for what shows that nobody reads them
        write_table(root / "meta/episodes/chunk-000/file-000.parquet", table_of(rows))
        write_tasks(root, tasks)
    else:
        write_jsonl(root / "meta/episodes.jsonl", rows)
        write_jsonl(root / "meta/tasks.jsonl", [{"task_index": i, "task": task} for i, task in enumerate(tasks)])
    write_json(root / ("meta/episodes_stats.jsonl" if version == "v2.1" else "meta/stats.json"), {})
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
