"""Writes LeRobot datasets, formats v2.1 and v3.0; a killed writer leaves every episode it had finished."""

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from PIL import Image

from pirl.data.labels import read_labels, write_labels
from pirl.data.lerobot.format import CAMERA_DTYPES, DEFAULT_COLUMNS, INFO_FILE
from pirl.data.lerobot.metadata import (
    EpisodeRecord,
    Features,
    MetadataV21,
    MetadataV30,
    column_stats,
    image_stats,
    parquet_bytes,
)
from pirl.data.lerobot.reader import Dataset
from pirl.data.lerobot.video import CODEC_NAMES, SMALLEST_SIDE, Codec, encode_video
from pirl.errors import DataError
from pirl.files import write_file

# Timestamps are float32, and LeRobot refuses frames that are 1e-4 s off: beyond this many seconds rounding alone does it.
LONGEST_EPISODE = 1024

# For each kind of column, the kinds of array that may be given for it.
_ACCEPTED = {"b": "b", "i": "iu", "u": "iu", "f": "fiu"}
_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64", *CAMERA_DTYPES)
_PARTIAL = ".*.partial-*"  # what pirl.files leaves of a file when the process is killed while it writes


class DatasetWriter:
    """Adds episodes to a LeRobot dataset; the directory is at all times a dataset of the episodes finished so far.

    Every episode has its own data file, and its own video file per camera. They are complete before the metadata name
    them, and info.json, which counts the episodes, comes last: an episode it does not count does not exist, and the
    next one replaces whatever is left of it. With `resume`, a writer continues the dataset it finds, if it was declared
    alike. One gap cannot be closed: LeRobot's own v2.1 loader takes every file under data/ as an episode, so it stumbles
    over a writer killed in the instant between the renaming of the data file and the line in episodes.jsonl, or within
    the writing of that line; resuming repairs it.

        with DatasetWriter("data/pick", fps=30, features={
            "observation.images.top": {"dtype": "video", "shape": (224, 224, 3)},
            "observation.state": {"dtype": "float32", "shape": (7,)},
            "action": {"dtype": "float32", "shape": (7,)},
            "next.reward": {"dtype": "float32", "shape": (1,)},
        }) as writer:
            writer.write_episode({"observation.images.top": frames, ...}, task="pick up the cube")
    """

    def __init__(
        self,
        root: Path | str,
        *,
        fps: int,
        features: Mapping[str, Mapping[str, Any]],
        robot_type: str | None = None,
        version: Literal["v2.1", "v3.0"] = "v3.0",
        codec: Codec = "h264",
        resume: bool = False,
    ) -> None:
        if not isinstance(fps, int) or fps < 1:
            raise DataError(f"fps should be a whole number of frames per second, got {fps!r}")
        self.root, self.fps, self.codec, self.robot_type = Path(root), fps, codec, robot_type
        self.features = _declare_features(features, fps, codec)
        declared = (self.root, self.features, fps)
        self._metadata: MetadataV21 | MetadataV30
        self._metadata = MetadataV21(*declared) if version == "v2.1" else MetadataV30(*declared)
        self._tasks: list[str] = []
        self.num_episodes = self.num_frames = 0
        for name in ("meta", "data", "videos"):
            if not (self.root / name).resolve().is_relative_to(self.root.resolve()):
                raise DataError(f"{self.root / name} is a link out of the dataset: files there are read, never written")
        if not self.root.is_file() and all(file.is_dir() or file.match(_PARTIAL) for file in self.root.rglob("*")):
            self._write_info()
        elif resume:
            self._roll_back()
        else:
            raise DataError(
                f"{self.root} is not empty: choose another directory, or pass resume=True to continue the dataset in it"
            )

    def write_episode(self, columns: Mapping[str, np.ndarray], *, task: str | Sequence[str]) -> int:
        """Add an episode, given every feature as [T, *shape] and one task, or one per frame; returns its index.

        Cameras are uint8 [T, H, W, 3]; features of shape (1,) may be given as [T]. Floats of any precision are rounded
        to the declared one. Nothing is written unless everything fits.
        """
        index = self.num_episodes
        columns = _check_columns(columns, self.features, index)
        length = len(next(iter(columns.values())))
        if length > LONGEST_EPISODE * self.fps:
            raise DataError(
                f"episode {index}: {length} frames at {self.fps} fps last longer than {LONGEST_EPISODE} s, too long for "
                "LeRobot's timestamps (float32, checked to 1e-4 s); split the episode"
            )
        frame_tasks = [task] * length if isinstance(task, str) else list(task)
        if len(frame_tasks) != length or not all(isinstance(text, str) for text in frame_tasks):
            raise DataError(
                f"episode {index}: expected a task (a string), or one for each of the {length} frames, got "
                f"{len(frame_tasks)}: {frame_tasks!r:.80}"
            )
        tasks = list(dict.fromkeys([*self._tasks, *frame_tasks]))
        numbers = {text: number for number, text in enumerate(tasks)}
        frame_index = np.arange(length)
        defaults: dict[str, np.ndarray] = {
            "timestamp": (frame_index / self.fps).astype(np.float32),
            "frame_index": frame_index,
            "episode_index": np.full_like(frame_index, index),
            "index": self.num_frames + frame_index,
            "task_index": np.array([numbers[text] for text in frame_tasks]),
        }
        columns |= {name: values[:, None] for name, values in defaults.items()}
        is_camera = {name: feature["dtype"] in CAMERA_DTYPES for name, feature in self.features.items()}
        stats = {name: image_stats(v) if is_camera[name] else column_stats(v) for name, v in columns.items()}
        episode = EpisodeRecord(index, self.num_frames, length, list(dict.fromkeys(frame_tasks)), stats)
        videos = {name: encode_video(columns[name], fps=self.fps, codec=self.codec) for name in self._metadata.videos}
        data = _episode_parquet(columns, self.features)
        if (found := self._read_info().get("total_episodes")) != index:  # they would overwrite each other's episodes
            raise DataError(
                f"{self.root} now has {found} episodes, and this writer left {index}: only one writer at a time may add "
                "to a dataset; resume from what is there now"
            )
        try:
            self._commit(episode, tasks, data, videos)
        except OSError as error:
            with contextlib.suppress(DataError, OSError):  # on a full disk this may fail as well; resuming does it then
                self._roll_back()
            raise DataError(
                f"episode {index} cannot be written to {self.root}: {error.strerror or error}. The episodes before it "
                "are safe; make room, and resume."
            ) from error
        except BaseException:  # also when interrupted from the keyboard: the writer may be used again
            self._roll_back()
            raise
        return index

    def close(self) -> None:
        """Replace the bounds on quantiles in stats.json (v3.0) by exact ones. The writer holds nothing open."""
        self._metadata.finish([self._path(self._metadata.data_path, index) for index in range(self.num_episodes)])

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _commit(self, episode: EpisodeRecord, tasks: list[str], data: bytes, videos: Mapping[str, bytes]) -> None:
        """Write everything about an episode, in the order that keeps the directory readable throughout."""
        for name, content in videos.items():
            write_file(self._path(self._metadata.video_path, episode.index, name), content)
        if tasks != self._tasks:
            self._metadata.save_tasks(tasks)
        self._metadata.save_stats(episode)
        write_file(self._path(self._metadata.data_path, episode.index), data)
        self._metadata.save_episode(episode)
        self.num_episodes, self.num_frames, self._tasks = episode.index + 1, self.num_frames + episode.length, tasks
        self._write_info()

    def _path(self, template: str, episode: int, video: str = "") -> Path:
        chunk, file = divmod(episode, self._metadata.chunk_size)
        v21 = {"episode_chunk": chunk, "episode_index": episode}
        v30 = {"chunk_index": chunk, "file_index": file}
        return self.root / template.format(video_key=video, **v21, **v30)

    def _info(self) -> dict[str, Any]:
        return {
            "codebase_version": self._metadata.version,
            "robot_type": self.robot_type,
            "total_episodes": self.num_episodes,
            "total_frames": self.num_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": self._metadata.chunk_size,
            **self._metadata.format_info(self.num_episodes),
            "fps": self.fps,
            "splits": {"train": f"0:{self.num_episodes}"},
            "data_path": self._metadata.data_path,
            "video_path": self._metadata.video_path if self._metadata.videos else None,
            "features": self.features,
        }

    def _write_info(self) -> None:
        write_file(self.root / INFO_FILE, json.dumps(self._info(), indent=4))

    def _read_info(self) -> dict[str, Any]:
        file = self.root / INFO_FILE
        try:
            info = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.root} holds no dataset to continue: {file} cannot be read: {error}") from error
        if not isinstance(info, dict):
            raise DataError(f"{file} should hold an object, got {info!r:.80}")
        return info

    def _roll_back(self) -> None:
        """Return to the last finished episode, as info.json tells, and remove what is left of the one after it."""
        found = self._read_info()
        for key, declared in self._info().items():
            if not key.startswith("total_") and key != "splits" and found.get(key) != declared:
                name, there = key, found.get(key)
                if isinstance(there, dict) and isinstance(declared, dict):
                    name = next(name for name in {**there, **declared} if there.get(name) != declared.get(name))
                    there, declared = there.get(name), declared.get(name)
                raise DataError(f"{self.root} cannot be continued: {name} is {there!r} there, and {declared!r} here")
        try:
            episodes, frames, tasks = (int(found[f"total_{name}"]) for name in ("episodes", "frames", "tasks"))
            if (stray := self._path(self._metadata.data_path, episodes + 1)).exists():
                raise DataError(
                    f"{self.root} cannot be continued: {INFO_FILE} has {episodes} episodes, yet {stray} is there"
                )
            self._tasks = self._metadata.restore(episodes, tasks)
        except DataError:
            raise
        except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
            raise DataError(f"{self.root} cannot be continued, its metadata are damaged: {error!r}") from error
        self.num_episodes, self.num_frames = episodes, frames
        for video in self._metadata.videos:
            self._path(self._metadata.video_path, episodes, video).unlink(missing_ok=True)
        self._path(self._metadata.data_path, episodes).unlink(missing_ok=True)
        for partial in self.root.rglob(_PARTIAL):
            partial.unlink()


def copy_dataset(dataset: Dataset, root: Path) -> list[str]:
    """Write the episodes of a dataset as one of its own, with videos encoded anew; returns what was left out.

    That is text, columns of several axes, and cameras that cannot be decoded.
    """
    rows = dataset.try_columns([name for name in dataset.column_names if name not in DEFAULT_COLUMNS])[0]
    rows = {name: values for name, values in rows.items() if values.dtype.kind in "biuf" and values.ndim < 3}
    rows = {name: values.astype("float32") if values.dtype == "float16" else values for name, values in rows.items()}
    features: dict[str, dict[str, Any]] = {
        name: {"dtype": values.dtype.name, "shape": values.shape[1:] or (1,)} for name, values in rows.items()
    }
    for name in dataset.cameras:
        with contextlib.suppress(DataError):
            shape = next(dataset.decode(name, 0)).shape
            kind = "image" if name in dataset.rows.column_types or shape[0] % 2 or shape[1] % 2 else "video"
            features[name] = {"dtype": kind, "shape": shape}
    for name in features.keys() & dataset.info.features.keys() - {*dataset.cameras}:
        features[name]["names"] = dataset.info.features[name].names
    fps = int(dataset.info.fps) if dataset.info.fps.is_integer() else dataset.info.fps
    labels, kept = read_labels(dataset.root), {}
    with DatasetWriter(root, fps=fps, features=features, robot_type=dataset.info.robot_type) as writer:  # type: ignore[arg-type]
        for episode, number in enumerate(dataset.episode_ids.tolist()):
            span = slice(dataset.starts[episode], dataset.starts[episode + 1])
            columns = {name: values[span] for name, values in rows.items()}
            columns |= {name: np.stack(list(dataset.decode(name, episode))) for name in features if name not in rows}
            tasks = [dataset.rows.tasks[task] for task in dataset.rows.task_of_row[span]]
            index = writer.write_episode(columns, task=tasks)
            if number in labels:
                kept[index] = replace(labels[number], episode=index)
    if kept:
        write_labels(root, kept)
    return sorted({*dataset.column_names, *dataset.cameras} - {*features, *DEFAULT_COLUMNS})


def _declare_features(features: Mapping[str, Mapping[str, Any]], fps: int, codec: Codec) -> Features:
    """The caller's features, checked, and those every dataset has; only `dtype`, `shape` and `names` are read."""
    declared: Features = {}
    for name, feature in features.items():
        dtype, shape, names = feature.get("dtype"), tuple(feature.get("shape", ())), feature.get("names")
        if complaint := _feature_complaint(name, dtype, shape, codec):
            raise DataError(f"feature {name!r}: {complaint}")
        if dtype in CAMERA_DTYPES:
            names = names or ["height", "width", "channels"]  # LeRobot's policies look here for the order of the axes
        declared[name] = {"dtype": dtype, "shape": shape, "names": names}
        if dtype == "video":
            declared[name]["info"] = {
                "video.height": shape[0],
                "video.width": shape[1],
                "video.codec": CODEC_NAMES[codec],
                "video.pix_fmt": "yuv420p",
                "video.is_depth_map": False,
                "video.fps": fps,
                "video.channels": 3,
                "has_audio": False,
            }
    for name in DEFAULT_COLUMNS:
        declared[name] = {"dtype": "float32" if name == "timestamp" else "int64", "shape": [1], "names": None}
    return json.loads(json.dumps(declared))  # as it will be read back: tuples become lists


def _feature_complaint(name: str, dtype: str | None, shape: tuple[int, ...], codec: Codec) -> str | None:
    if not name or any(part in name for part in ("/", "\\", "..", "\0")):
        return "a name becomes part of file names and must not contain / or .."
    if name in DEFAULT_COLUMNS:
        return "the writer adds this one itself; leave it out"
    if dtype not in _DTYPES:
        return f"dtype should be one of {', '.join(_DTYPES)}, got {dtype!r}"
    is_camera = dtype in CAMERA_DTYPES
    if len(shape) != (3 if is_camera else 1) or min(shape) < 1 or (is_camera and shape[2] != 3):
        wanted = "(height, width, 3)" if is_camera else "(width,)"
        return f"the shape of {dtype} should be {wanted}, got {shape}"
    if dtype == "video":
        height, width, _ = shape
        side = SMALLEST_SIDE[codec]
        if height % 2 or width % 2 or min(height, width) < side:
            return (
                f"{codec} needs height and width to be even and at least {side}, got {height} × {width}; resize the "
                "frames, or store them with dtype 'image'"
            )
    return None


def _check_columns(columns: Mapping[str, np.ndarray], features: Features, episode: int) -> dict[str, np.ndarray]:
    """The caller's columns as [T, *shape] of the declared dtype.

    Floats are rounded to the declared precision; everything else must fit exactly.
    """
    expected = [name for name in features if name not in DEFAULT_COLUMNS]
    if set(columns) != set(expected):
        raise DataError(f"episode {episode}: expected the columns {sorted(expected)}, got {sorted(columns)}")
    checked = {}
    for name in expected:
        try:
            checked[name] = _check_column(np.asarray(columns[name]), features[name])
        except DataError as error:
            raise DataError(f"episode {episode}, feature {name!r}: {error}") from None
    lengths = {name: len(column) for name, column in checked.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise DataError(f"episode {episode}: every column needs a row for every frame, but their lengths are {lengths}")
    return checked


def _check_column(values: np.ndarray, feature: dict[str, Any]) -> np.ndarray:
    shape = tuple(feature["shape"])
    is_camera = feature["dtype"] in CAMERA_DTYPES
    dtype = np.dtype("uint8" if is_camera else feature["dtype"])
    if shape == (1,) and values.ndim == 1:
        values = values[:, None]
    if values.shape[1:] != shape or not values.ndim:
        raise DataError(f"expected the shape {('T', *shape)}, got {values.shape}")
    if values.dtype == np.uint8 and is_camera:
        return values
    if is_camera or values.dtype.kind not in _ACCEPTED[dtype.kind]:
        raise DataError(f"expected {dtype}, got {values.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(dtype)
        fits = np.isfinite(cast) if values.dtype.kind == "f" else cast.astype(values.dtype) == values
    if not fits.all():
        frame = int(np.argwhere(~fits)[0][0])
        raise DataError(
            f"expected finite numbers that fit {dtype}, got {values[frame][~fits[frame]][0]} at frame {frame}"
        )
    return cast


def _episode_parquet(columns: Mapping[str, np.ndarray], features: Features) -> bytes:
    """The parquet file of an episode: one row group of all its columns but the videos.

    The description for Hugging Face's `datasets` says "Sequence", which every release understands; without it, older
    releases do not find the images.
    """
    arrays: dict[str, pa.Array] = {}
    described: dict[str, dict[str, Any]] = {}
    for name, feature in features.items():
        value, width = {"dtype": feature["dtype"], "_type": "Value"}, feature["shape"][0]
        if feature["dtype"] == "video":
            continue
        if feature["dtype"] == "image":
            paths = [f"frame-{index:06d}.png" for index in range(len(columns[name]))]
            with ThreadPoolExecutor() as pool:  # compressing leaves the interpreter to others
                files = pa.array(pool.map(_png, columns[name]), pa.binary())
            arrays[name] = pa.StructArray.from_arrays([files, pa.array(paths)], ["bytes", "path"])
            described[name] = {"_type": "Image"}
        else:
            flat = pa.array(np.ravel(columns[name]))
            arrays[name] = flat if width == 1 else pa.FixedSizeListArray.from_arrays(flat, width)
            described[name] = value if width == 1 else {"feature": value, "length": width, "_type": "Sequence"}
    description = {"huggingface": json.dumps({"info": {"features": described}})}
    return parquet_bytes(pa.table(arrays).replace_schema_metadata(description))


def _png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="png", compress_level=1)
    return file.getvalue()
