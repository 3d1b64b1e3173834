"""Writes LeRobot datasets, formats v2.1 and v3.0; a killed writer leaves every episode it had finished."""

import contextlib
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
from jaxtyping import Shaped, UInt8
from PIL import Image

from pirl.data.lerobot.columns import to_numpy
from pirl.data.lerobot.format import DEFAULT_COLUMNS, DEFAULT_PATHS, INFO_FILE
from pirl.data.lerobot.video import CODEC_NAMES, SMALLEST_SIDE, Codec, encode_video
from pirl.data.norm_stats import rank
from pirl.errors import DataError
from pirl.files import replace_tail, write_file

Stats = dict[str, np.ndarray]
"""The statistics of one feature by name. A column's have its width [n], a camera's have shape [3, 1, 1]."""

QUANTILES = {"q01": 1, "q10": 10, "q50": 50, "q90": 90, "q99": 99}
"""Quantiles by name, in percent. That of n values is the smallest value v for which that many of them are <= v."""

STATISTICS = ("min", "max", "mean", "std", "count", *QUANTILES)

# LeRobot looks at T^0.75 frames of an episode (all of the first hundred), and thins images to about 150 pixels a side.
_FRAMES_AT_LEAST, _FRAMES_AT_MOST = 100, 10_000
_THIN_FROM, _THIN_TO = 300, 150


def column_stats(values: Shaped[np.ndarray, "T n"]) -> Stats:
    """Statistics over the frames of an episode; `min` and `max` stay booleans or integers where the feature is."""
    kept = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64}[values.dtype.kind]
    numbers = values.astype(np.float64)
    return {
        "min": values.min(axis=0).astype(kept),
        "max": values.max(axis=0).astype(kept),
        "mean": numbers.mean(axis=0),
        "std": numbers.std(axis=0),
        "count": np.array([len(values)]),
        **quantiles(numbers),
    }


def quantiles(values: Shaped[np.ndarray, "T n"]) -> Stats:
    """The quantiles of each component."""
    ordered = np.sort(values, axis=0)
    return {name: ordered[rank(percent, len(values)) - 1].astype(np.float64) for name, percent in QUANTILES.items()}


def image_stats(frames: UInt8[np.ndarray, "T H W 3"]) -> Stats:
    """Statistics of each colour in [0, 1] over the pixels of a sample of frames; `count` is the number of frames."""
    count = max(min(len(frames), _FRAMES_AT_LEAST), min(int(len(frames) ** 0.75), _FRAMES_AT_MOST))
    side = max(frames.shape[1:3])
    step = 1 if side < _THIN_FROM else side // _THIN_TO
    pixels = frames[np.round(np.linspace(0, len(frames) - 1, count)).astype(int), ::step, ::step]
    colours = [_level_stats(np.bincount(pixels[..., colour].ravel(), minlength=256)) for colour in range(3)]
    stats = {name: np.array([colour[name] for colour in colours]).reshape(3, 1, 1) for name in colours[0]}
    return {**stats, "count": np.array([count])}


def _level_stats(histogram: Shaped[np.ndarray, "256"]) -> dict[str, float]:
    """Statistics of one colour from how often each of its 256 levels occurs: exact, and without a float per pixel."""
    levels = np.arange(256) / 255
    seen = levels[histogram > 0]
    mean = np.average(levels, weights=histogram)
    std = np.sqrt(np.average((levels - mean) ** 2, weights=histogram))
    reached = np.cumsum(histogram)
    marks = {name: levels[np.searchsorted(reached, rank(p, int(reached[-1])))] for name, p in QUANTILES.items()}
    return {"min": seen[0], "max": seen[-1], "mean": mean, "std": std, **marks}


def combine(stats: Mapping[str, Shaped[np.ndarray, "episodes ..."]]) -> Stats:
    """One feature's statistics over several episodes, from those of each stacked along a leading axis.

    Everything is exact but the quantiles, which those of the parts cannot tell: they lie between the lowest and the
    highest of any episode. Taken are the lowest of the low ones, the highest of the high ones, so that the range between
    them holds no less than it promises, and the average of the medians.
    """
    count = stats["count"].sum(axis=0)
    weights = (stats["count"] / count).reshape(-1, *[1] * (stats["mean"].ndim - 1))
    mean = (weights * stats["mean"]).sum(axis=0)
    combined = {
        "min": stats["min"].min(axis=0),
        "max": stats["max"].max(axis=0),
        "mean": mean,
        "std": np.sqrt((weights * (stats["std"] ** 2 + (stats["mean"] - mean) ** 2)).sum(axis=0)),
        "count": count,
    }
    for name, percent in QUANTILES.items():
        if percent == 50:
            combined[name] = (weights * stats[name]).sum(axis=0)
        else:
            combined[name] = stats[name].min(axis=0) if percent < 50 else stats[name].max(axis=0)
    return combined


Features = dict[str, dict[str, Any]]
"""Features by name, as info.json has them: `dtype`, `shape`, `names`, and for videos `info`."""

CAMERAS = ("image", "video")
# For each kind of column, the kinds of array that may be given for it.
_ACCEPTED = {"b": "b", "i": "iu", "u": "iu", "f": "fiu"}
_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")


def declare_features(features: Mapping[str, Mapping[str, Any]], *, fps: int, codec: Codec) -> Features:
    """The caller's features, checked, and those every dataset has; only `dtype`, `shape` and `names` are read."""
    declared: Features = {}
    for name, feature in features.items():
        if not name or any(part in name for part in ("/", "\\", "..", "\0")):
            raise DataError(f"feature {name!r}: a name becomes part of file names and must not contain / or ..")
        if name in DEFAULT_COLUMNS:
            raise DataError(f"feature {name!r}: the writer adds this one itself; leave it out")
        dtype, shape = feature.get("dtype"), tuple(feature.get("shape", ()))
        if dtype not in (*_DTYPES, *CAMERAS):
            raise DataError(
                f"feature {name!r}: dtype should be one of {', '.join((*_DTYPES, *CAMERAS))}, got {dtype!r}"
            )
        wanted = "(height, width, 3)" if dtype in CAMERAS else "(width,)"
        if len(shape) != (3 if dtype in CAMERAS else 1) or min(shape) < 1 or (dtype in CAMERAS and shape[2] != 3):
            raise DataError(f"feature {name!r}: the shape of {dtype} should be {wanted}, got {shape}")
        if dtype == "video" and (shape[0] % 2 or shape[1] % 2):
            raise DataError(
                f"feature {name!r}: video keeps colour for 2 × 2 pixels, so height and width must be even, got "
                f"{shape[0]} × {shape[1]}; crop or resize the frames, or store them with dtype 'image'"
            )
        if dtype == "video" and min(shape[:2]) < (side := SMALLEST_SIDE[codec]):
            raise DataError(
                f"feature {name!r}: {codec} needs frames of at least {side} × {side}, got {shape[0]} × {shape[1]}; "
                "enlarge them, choose codec 'h264', or store them with dtype 'image'"
            )
        names = feature.get("names")
        if dtype in CAMERAS:
            names = names or ["height", "width", "channels"]  # LeRobot's policies look here for the order of the axes
        declared[name] = {"dtype": dtype, "shape": list(shape), "names": names}
        if dtype == "video":
            declared[name]["info"] = _video_info(shape, fps, codec)
    for name in DEFAULT_COLUMNS:
        declared[name] = {"dtype": "float32" if name == "timestamp" else "int64", "shape": [1], "names": None}
    return json.loads(json.dumps(declared))  # as it will be read back: tuples become lists


def _video_info(shape: tuple[int, ...], fps: int, codec: Codec) -> dict[str, Any]:
    return {
        "video.height": shape[0],
        "video.width": shape[1],
        "video.codec": CODEC_NAMES[codec],
        "video.pix_fmt": "yuv420p",
        "video.is_depth_map": False,
        "video.fps": fps,
        "video.channels": 3,
        "has_audio": False,
    }


def check_columns(columns: Mapping[str, np.ndarray], features: Features, episode: int) -> dict[str, np.ndarray]:
    """The caller's columns as [T, *shape] of the declared dtype.

    Floats are rounded to the declared precision; everything else must fit exactly.
    """
    expected = [name for name in features if name not in DEFAULT_COLUMNS]
    if missing := [name for name in expected if name not in columns]:
        raise DataError(f"episode {episode}: no column for {', '.join(map(repr, missing))}; given: {sorted(columns)}")
    if unknown := [name for name in columns if name not in expected]:
        raise DataError(f"episode {episode}: unknown columns {', '.join(map(repr, unknown))}; declared: {expected}")
    checked = {}
    for name in expected:
        try:
            checked[name] = _check_column(np.asarray(columns[name]), features[name])
        except DataError as error:
            raise DataError(f"episode {episode}, feature {name!r}: {error}") from None
    lengths = {name: len(column) for name, column in checked.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"episode {episode}: every column needs a row for every frame, but their lengths are {lengths}")
    if not lengths or not min(lengths.values()):
        raise DataError(f"episode {episode}: there are no frames")
    return checked


def _check_column(values: np.ndarray, feature: dict[str, Any]) -> np.ndarray:
    shape = tuple(feature["shape"])
    if shape == (1,) and values.ndim == 1:
        values = values[:, None]
    if values.shape[1:] != shape or not values.ndim:
        raise DataError(f"expected the shape {('T', *shape)}, got {values.shape}")
    if feature["dtype"] in CAMERAS:
        if values.dtype != np.uint8:
            raise DataError(f"expected frames of uint8 in [0, 255], got {values.dtype}")
        return values
    dtype = np.dtype(feature["dtype"])
    if values.dtype.kind not in _ACCEPTED[dtype.kind]:
        raise DataError(f"expected {dtype}, got {values.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(dtype)
        fits = np.isfinite(cast) if values.dtype.kind == "f" else cast.astype(values.dtype) == values
    if not fits.all():
        frame, component = np.argwhere(~fits)[0].tolist()
        wanted = "finite numbers" if values.dtype.kind == "f" else f"numbers that fit {dtype}"
        raise DataError(f"expected {wanted}, got {values[frame, component]} at frame {frame}, component {component}")
    return cast


def episode_parquet(columns: Mapping[str, np.ndarray], features: Features) -> bytes:
    """The parquet file of an episode: one row group of all its columns but the videos.

    The description for Hugging Face's `datasets` says "Sequence", which every release understands; without it, older
    releases do not find the images.
    """
    kept = {name: feature for name, feature in features.items() if feature["dtype"] != "video"}
    arrays = [_arrow_array(columns[name], feature) for name, feature in kept.items()]
    description = {"info": {"features": {name: _description(feature) for name, feature in kept.items()}}}
    table = pa.table(arrays, names=list(kept)).replace_schema_metadata({"huggingface": json.dumps(description)})
    return parquet_bytes(table)


def parquet_bytes(table: pa.Table) -> bytes:
    """A table as a parquet file of one row group, compressed as LeRobot does."""
    file = io.BytesIO()
    pq.write_table(table, file, compression="snappy", row_group_size=max(table.num_rows, 1))
    return file.getvalue()


def _arrow_array(values: np.ndarray, feature: dict[str, Any]) -> pa.Array:
    if feature["dtype"] == "image":
        paths = [f"frame-{index:06d}.png" for index in range(len(values))]
        with ThreadPoolExecutor() as pool:  # compressing leaves the interpreter to others
            files = pa.array(pool.map(_png, values), pa.binary())
        return pa.StructArray.from_arrays([files, pa.array(paths)], ["bytes", "path"])
    flat = pa.array(np.ravel(values))
    width = feature["shape"][0]
    return flat if width == 1 else pa.FixedSizeListArray.from_arrays(flat, width)


def _description(feature: dict[str, Any]) -> dict[str, Any]:
    if feature["dtype"] == "image":
        return {"_type": "Image"}
    value = {"dtype": feature["dtype"], "_type": "Value"}
    width = feature["shape"][0]
    return value if width == 1 else {"feature": value, "length": width, "_type": "Sequence"}


def _png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="png", compress_level=1)
    return file.getvalue()


@dataclass(frozen=True)
class EpisodeRecord:
    """What the metadata says about an episode."""

    index: int
    first_row: int
    length: int
    tasks: Sequence[str]
    stats: dict[str, Stats]


class MetadataWriter(ABC):
    """The files of `meta/` but info.json. Each `save` may be repeated for an episode: the last one holds."""

    version: ClassVar[str]
    data_path: ClassVar[str]
    video_path: ClassVar[str]
    chunk_size = 1000
    """Files in a directory."""

    def __init__(self, root: Path, features: Features, fps: int) -> None:
        self.root, self.features, self.fps = root, features, fps
        self.videos = [name for name, feature in features.items() if feature["dtype"] == "video"]

    @abstractmethod
    def format_info(self, episodes: int) -> dict[str, Any]:
        """The part of info.json that only this format has."""

    @abstractmethod
    def restore(self, episodes: int, tasks: int) -> list[str]:
        """Go back to that many episodes and tasks, drop what is beyond them, and return the tasks."""

    @abstractmethod
    def save_tasks(self, tasks: Sequence[str]) -> None:
        """Write the tasks; their order gives them their numbers."""

    @abstractmethod
    def save_stats(self, episode: EpisodeRecord) -> None:
        """Add the statistics of the next episode, where they have a file of their own."""

    @abstractmethod
    def save_episode(self, episode: EpisodeRecord) -> None:
        """Add the next episode."""

    @abstractmethod
    def finish(self, data_files: Sequence[Path]) -> None:
        """Improve what can only be computed from all the data."""


class MetadataV21(MetadataWriter):
    """Three files of JSON lines, of which two get a line for every episode.

    A line is added in a single write. Files that are written anew for each, and appear whole, would be safe from a kill
    that comes within this write, of some kilobytes; but then a dataset would take time, and wear of the disk, with the
    square of its episodes. Should half a line ever be left, info.json does not count it, and resuming removes it.
    """

    version = "v2.1"
    data_path, video_path = DEFAULT_PATHS["v2"]

    def __init__(self, root: Path, features: Features, fps: int) -> None:
        super().__init__(root, features, fps)
        # Where the line of each episode begins, and the next one will.
        self._places = {"episodes": [0], "episodes_stats": [0]}

    def format_info(self, episodes: int) -> dict[str, Any]:
        """Counts of files and directories."""
        return {"total_videos": episodes * len(self.videos), "total_chunks": -(-episodes // self.chunk_size)}

    def restore(self, episodes: int, tasks: int) -> list[str]:
        """Keep that many lines of each file."""
        counts = {"episodes": episodes, "episodes_stats": episodes, "tasks": tasks}
        kept = {name: self._lines(name, count) for name, count in counts.items()}
        texts = [json.loads(line)["task"] for line in kept["tasks"]]
        for name, lines in kept.items():
            self._write_lines(name, lines)
        for name in self._places:
            self._places[name] = list(accumulate((len(line.encode()) + 1 for line in kept[name]), initial=0))
        return texts

    def save_tasks(self, tasks: Sequence[str]) -> None:
        """Write tasks.jsonl."""
        self._write_lines("tasks", [json.dumps({"task_index": i, "task": task}) for i, task in enumerate(tasks)])

    def save_stats(self, episode: EpisodeRecord) -> None:
        """Add a line to episodes_stats.jsonl. LeRobot combines them when it loads the dataset; there are no quantiles."""
        stats = {
            feature: {name: value.tolist() for name, value in stats.items() if name not in QUANTILES}
            for feature, stats in episode.stats.items()
        }
        self._add_line("episodes_stats", {"episode_index": episode.index, "stats": stats})

    def save_episode(self, episode: EpisodeRecord) -> None:
        """Add a line to episodes.jsonl."""
        line = {"episode_index": episode.index, "tasks": list(episode.tasks), "length": episode.length}
        self._add_line("episodes", line)

    def finish(self, data_files: Sequence[Path]) -> None:
        """Nothing: there are no quantiles."""

    def _lines(self, name: str, count: int) -> list[str]:
        path = self.root / f"meta/{name}.jsonl"
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line] if path.exists() else []
        if len(lines) < count:
            raise DataError(f"{path}: expected at least {count} lines, as meta/info.json says, got {len(lines)}")
        return lines[:count]

    def _write_lines(self, name: str, lines: Sequence[str]) -> None:
        write_file(self.root / f"meta/{name}.jsonl", "".join(f"{line}\n" for line in lines))

    def _add_line(self, name: str, content: dict[str, Any]) -> None:
        path, places, index = self.root / f"meta/{name}.jsonl", self._places[name], content["episode_index"]
        size = path.stat().st_size if path.exists() else 0
        if size < places[index]:
            raise DataError(f"{path} has lost lines: put back what it was, or begin another dataset")
        line = f"{json.dumps(content)}\n".encode()
        replace_tail(path, places[index], line)
        places[index + 1 :] = [places[index] + len(line)]


class MetadataV30(MetadataWriter):
    """Parquet tables of tasks and episodes, and stats.json of the whole dataset."""

    version = "v3.0"
    data_path, video_path = DEFAULT_PATHS["v3"]

    episodes_per_file = 100
    """A file of episodes is rewritten for each one added to it, so it must not grow without end."""

    def __init__(self, root: Path, features: Features, fps: int) -> None:
        super().__init__(root, features, fps)
        self._schema = _episode_schema(features)
        self._rows = self._schema.empty_table()
        self._stats: dict[str, Stats] = {}

    def format_info(self, episodes: int) -> dict[str, Any]:
        """Sizes at which LeRobot, should it add to this dataset, begins a new file."""
        return {"data_files_size_in_mb": 100, "video_files_size_in_mb": 200}

    def restore(self, episodes: int, tasks: int) -> list[str]:
        """Read the episodes back, and combine their statistics anew."""
        self._rows, self._stats = self._schema.empty_table(), {}
        for first in range(0, episodes, self.episodes_per_file):
            self._rows = self._read_rows(first, min(episodes - first, self.episodes_per_file))
            stats = {name: _stacked_stats(self._rows, name, f) for name, f in self.features.items()}
            # One by one, as they came: sums in another order would round differently.
            for row in range(len(self._rows)):
                self._add_stats({n: {k: v[row : row + 1] for k, v in entry.items()} for n, entry in stats.items()})
        texts = pq.read_table(self.root / "meta/tasks.parquet")["task"].to_pylist()[:tasks] if tasks else []
        if episodes % self.episodes_per_file == 0:
            self._rows = self._schema.empty_table()
            self._episodes_file(episodes).unlink(missing_ok=True)
        else:
            write_file(self._episodes_file(episodes), parquet_bytes(self._rows))
        self._write_stats(self._stats)
        self.save_tasks(texts)
        return texts

    def save_tasks(self, tasks: Sequence[str]) -> None:
        """Write tasks.parquet as pandas would write a frame whose index, `task`, holds the strings."""
        index_type = {"pandas_type": "unicode", "numpy_type": "object"}
        number_type = {"pandas_type": "int64", "numpy_type": "int64"}
        pandas = {
            "index_columns": ["task"],
            "column_indexes": [{"name": None, "field_name": None, **index_type, "metadata": {"encoding": "UTF-8"}}],
            "columns": [
                {"name": "task_index", "field_name": "task_index", **number_type, "metadata": None},
                {"name": "task", "field_name": "task", **index_type, "metadata": None},
            ],
            "attributes": {},
            "creator": {"library": "pyarrow", "version": pa.__version__},
            "pandas_version": "2.3.3",
        }
        table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})
        table = table.replace_schema_metadata({"pandas": json.dumps(pandas)})
        write_file(self.root / "meta/tasks.parquet", parquet_bytes(table))

    def save_stats(self, episode: EpisodeRecord) -> None:
        """Write stats.json with this episode in it."""
        self._add_stats({name: {k: v[None] for k, v in stats.items()} for name, stats in episode.stats.items()})
        self._write_stats(self._stats)

    def save_episode(self, episode: EpisodeRecord) -> None:
        """Add a row to the last file of meta/episodes, or begin the next."""
        place = {"chunk_index": episode.index // self.chunk_size, "file_index": episode.index % self.chunk_size}
        file = episode.index // self.episodes_per_file
        row = {
            "episode_index": episode.index,
            "tasks": list(episode.tasks),
            "length": episode.length,
            **{f"data/{key}": value for key, value in place.items()},
            "dataset_from_index": episode.first_row,
            "dataset_to_index": episode.first_row + episode.length,
            "meta/episodes/chunk_index": file // self.chunk_size,
            "meta/episodes/file_index": file % self.chunk_size,
        }
        for video in self.videos:
            times = {"from_timestamp": 0.0, "to_timestamp": episode.length / self.fps}
            row |= {f"videos/{video}/{key}": value for key, value in {**place, **times}.items()}
        for feature, stats in episode.stats.items():
            row |= {f"stats/{feature}/{name}": value.tolist() for name, value in stats.items()}
        earlier = self._rows.slice(0, episode.index % self.episodes_per_file)
        self._rows = pa.concat_tables([earlier, pa.Table.from_pylist([row], self._schema)]).combine_chunks()
        write_file(self._episodes_file(episode.index), parquet_bytes(self._rows))

    def finish(self, data_files: Sequence[Path]) -> None:
        """Put the exact quantiles of all columns into stats.json; those of images stay bounds."""
        if not data_files:
            return
        shapes = {name: (f["shape"][0],) for name, f in self.features.items() if f["dtype"] not in CAMERAS}
        data = pyarrow.dataset.dataset([str(file) for file in data_files], format="parquet")
        table = data.to_table(columns=list(shapes))
        exact = {name: quantiles(to_numpy(table[name], shape).reshape(-1, *shape)) for name, shape in shapes.items()}
        self._write_stats({name: {**stats, **exact.get(name, {})} for name, stats in self._stats.items()})

    def _episodes_file(self, episode: int) -> Path:
        file = episode // self.episodes_per_file
        return (
            self.root / f"meta/episodes/chunk-{file // self.chunk_size:03d}/file-{file % self.chunk_size:03d}.parquet"
        )

    def _read_rows(self, first: int, count: int) -> pa.Table:
        path = self._episodes_file(first)
        try:
            rows = pq.read_table(path).slice(0, count).cast(self._schema)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DataError(f"{path}: this file of episodes was not written here and cannot be continued") from error
        wanted = np.arange(first, first + count)
        files = to_numpy(rows["data/chunk_index"], (1,)) * self.chunk_size + to_numpy(rows["data/file_index"], (1,))
        if not np.array_equal(to_numpy(rows["episode_index"], (1,)), wanted) or not np.array_equal(files, wanted):
            raise DataError(f"{path}: expected the episodes {first} to {first + count - 1}, with one data file each")
        return rows

    def _add_stats(self, more: dict[str, Stats]) -> None:
        """Combine what is known with more episodes, whose statistics are stacked along a leading axis."""
        for name, stats in more.items():
            if known := self._stats.get(name):
                stats = {key: np.concatenate([known[key][None], value]) for key, value in stats.items()}
            self._stats[name] = combine(stats)

    def _write_stats(self, stats: dict[str, Stats]) -> None:
        content = {name: {key: value.tolist() for key, value in entry.items()} for name, entry in stats.items()}
        write_file(self.root / "meta/stats.json", json.dumps(content, indent=4))


def _stats_shape(feature: dict[str, Any], statistic: str) -> tuple[int, ...]:
    if statistic == "count":
        return (1,)
    return (3, 1, 1) if feature["dtype"] in CAMERAS else (feature["shape"][0],)


def _stacked_stats(rows: pa.Table, name: str, feature: dict[str, Any]) -> Stats:
    columns = {key: rows[f"stats/{name}/{key}"] for key in STATISTICS}
    return {key: to_numpy(column, None).reshape(-1, *_stats_shape(feature, key)) for key, column in columns.items()}


def _episode_schema(features: Features) -> pa.Schema:
    """The columns of meta/episodes, in LeRobot's order."""

    def fields() -> Iterator[tuple[str, pa.DataType]]:
        yield from {"episode_index": pa.int64(), "tasks": pa.list_(pa.string()), "length": pa.int64()}.items()
        for key in ("data/chunk_index", "data/file_index", "dataset_from_index", "dataset_to_index"):
            yield key, pa.int64()
        for name, feature in features.items():
            if feature["dtype"] == "video":
                yield from ((f"videos/{name}/{key}", pa.int64()) for key in ("chunk_index", "file_index"))
                yield from ((f"videos/{name}/{key}", pa.float64()) for key in ("from_timestamp", "to_timestamp"))
        for name, feature in features.items():
            yield from ((f"stats/{name}/{key}", _stats_type(feature, key)) for key in STATISTICS)
        yield from ((f"meta/episodes/{key}", pa.int64()) for key in ("chunk_index", "file_index"))

    return pa.schema(list(fields()))


def _stats_type(feature: dict[str, Any], statistic: str) -> pa.DataType:
    kind = "f" if feature["dtype"] in CAMERAS else np.dtype(feature["dtype"]).kind
    element = pa.float64()
    if statistic == "count" or (statistic in ("min", "max") and kind in "iu"):
        element = pa.int64()
    elif statistic in ("min", "max") and kind == "b":
        element = pa.bool_()
    for _ in _stats_shape(feature, statistic):
        element = pa.list_(element)
    return element


# Timestamps are float32, and LeRobot refuses frames that are 1e-4 s off: beyond this many seconds rounding alone does it.
LONGEST_EPISODE = 1024


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
        self.features = declare_features(features, fps=fps, codec=codec)
        self._cameras = [name for name, feature in self.features.items() if feature["dtype"] in CAMERAS]
        self._metadata = {"v2.1": MetadataV21, "v3.0": MetadataV30}[version](self.root, self.features, fps)
        self._tasks: list[str] = []
        self.num_episodes = self.num_frames = 0
        home = self.root.resolve()
        for name in ("meta", "data", "videos"):
            if not (self.root / name).resolve().is_relative_to(home):
                raise DataError(f"{self.root / name} is a link out of the dataset: files there are read, never written")
        if not _holds_files(self.root):
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
        columns = check_columns(columns, self.features, self.num_episodes)
        length = len(next(iter(columns.values())))
        frame_tasks = [task] * length if isinstance(task, str) else list(task)
        self._check_tasks(frame_tasks, length)
        self._check_duration(length)
        tasks = list(dict.fromkeys([*self._tasks, *frame_tasks]))
        numbers = {text: number for number, text in enumerate(tasks)}
        columns |= self._default_columns([numbers[text] for text in frame_tasks])
        episode = EpisodeRecord(
            index=self.num_episodes,
            first_row=self.num_frames,
            length=length,
            tasks=list(dict.fromkeys(frame_tasks)),
            stats={name: image_stats(v) if name in self._cameras else column_stats(v) for name, v in columns.items()},
        )
        videos = {name: encode_video(columns[name], fps=self.fps, codec=self.codec) for name in self._metadata.videos}
        data = episode_parquet(columns, self.features)
        self._check_undisturbed()
        try:
            self._commit(episode, tasks, data, videos)
        except OSError as error:
            with contextlib.suppress(DataError, OSError):  # on a full disk this may fail as well; resuming does it then
                self._roll_back()
            raise DataError(
                f"episode {episode.index} cannot be written to {self.root}: {error.strerror or error}. The episodes "
                "before it are safe; make room, and resume."
            ) from error
        except BaseException:  # also when interrupted from the keyboard: the writer may be used again
            self._roll_back()
            raise
        return episode.index

    def close(self) -> None:
        """Replace the bounds on quantiles in stats.json (v3.0) by exact ones. The writer holds nothing open."""
        self._metadata.finish([self._path(self._metadata.data_path, index) for index in range(self.num_episodes)])

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_tasks(self, tasks: Sequence[str], length: int) -> None:
        if len(tasks) != length or not all(isinstance(text, str) for text in tasks):
            raise DataError(
                f"episode {self.num_episodes}: expected a task (a string), or one for each of the {length} frames, got "
                f"{len(tasks)}: {tasks!r:.80}"
            )

    def _check_duration(self, length: int) -> None:
        if length > LONGEST_EPISODE * self.fps:
            raise DataError(
                f"episode {self.num_episodes}: {length} frames at {self.fps} fps last longer than {LONGEST_EPISODE} s, "
                "too long for LeRobot's timestamps (float32, checked to 1e-4 s); split the episode"
            )

    def _default_columns(self, task_index: Sequence[int]) -> dict[str, np.ndarray]:
        """The columns that every dataset has."""
        frame_index = np.arange(len(task_index))
        columns: dict[str, np.ndarray] = {
            "timestamp": (frame_index / self.fps).astype(np.float32),
            "frame_index": frame_index,
            "episode_index": np.full_like(frame_index, self.num_episodes),
            "index": self.num_frames + frame_index,
            "task_index": np.array(task_index),
        }
        return {name: values[:, None] for name, values in columns.items()}

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

    def _check_undisturbed(self) -> None:
        """Two writers on one directory would overwrite each other's episodes."""
        if (found := self._read_info().get("total_episodes")) != self.num_episodes:
            raise DataError(
                f"{self.root} now has {found} episodes, and this writer left {self.num_episodes}: only one writer at a "
                "time may add to a dataset; resume from what is there now"
            )

    def _roll_back(self) -> None:
        """Return to the last finished episode, as info.json tells, and remove what is left of the one after it."""
        found = self._read_info()
        counted = {key for key in self._info() if key.startswith("total_")} | {"splits"}
        for key, declared in self._info().items():
            if key not in counted and found.get(key) != declared:
                raise DataError(f"{self.root} cannot be continued: {_difference(key, found.get(key), declared)}")
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


_PARTIAL = ".*.partial-*"  # what pirl.files leaves of a file when the process is killed while it writes


def _holds_files(root: Path) -> bool:
    return root.is_file() or any(path.is_file() and not path.match(_PARTIAL) for path in root.rglob("*"))


def _difference(key: str, found: Any, declared: Any) -> str:
    """What differs between the dataset and the declaration, down to the feature and its field."""
    if isinstance(found, dict) and isinstance(declared, dict):
        for name in {**found, **declared}:
            if found.get(name) != declared.get(name):
                return _difference(f"{key} / {name}", found.get(name), declared.get(name))
    return f"{key} is {found!r} there, and {declared!r} here"
