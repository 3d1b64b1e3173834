"""What LeRobot's formats v2.1 and v3.0 keep under `meta/` beside info.json, written one episode at a time."""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
from jaxtyping import Shaped, UInt8

from pirl.data.lerobot.format import CAMERA_DTYPES, DEFAULT_PATHS
from pirl.data.lerobot.parquet import to_numpy
from pirl.data.norm_stats import rank
from pirl.errors import DataError
from pirl.files import replace_tail, write_file

Features = dict[str, dict[str, Any]]
"""Features by name, as info.json has them: `dtype`, `shape`, `names`, and for videos `info`."""

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
    ordered = np.sort(values, axis=0)
    return {name: ordered[rank(percent, len(values)) - 1].astype(np.float64) for name, percent in QUANTILES.items()}


def image_stats(frames: UInt8[np.ndarray, "T H W 3"]) -> Stats:
    """Statistics of each color in [0, 1] over the pixels of a sample of frames; `count` is the number of frames."""
    count = max(min(len(frames), _FRAMES_AT_LEAST), min(int(len(frames) ** 0.75), _FRAMES_AT_MOST))
    side = max(frames.shape[1:3])
    step = 1 if side < _THIN_FROM else side // _THIN_TO
    pixels = frames[np.round(np.linspace(0, len(frames) - 1, count)).astype(int), ::step, ::step]
    colors = [_level_stats(np.bincount(pixels[..., color].ravel(), minlength=256)) for color in range(3)]
    stats = {name: np.array([color[name] for color in colors]).reshape(3, 1, 1) for name in colors[0]}
    return {**stats, "count": np.array([count])}


def _level_stats(histogram: Shaped[np.ndarray, "256"]) -> dict[str, float]:
    """Statistics of one color from how often each of its 256 levels occurs: exact, and without a float per pixel."""
    levels = np.arange(256) / 255
    seen = levels[histogram > 0]
    mean = np.average(levels, weights=histogram)
    std = np.sqrt(np.average((levels - mean) ** 2, weights=histogram))
    reached = np.cumsum(histogram)
    marks = {name: levels[np.searchsorted(reached, rank(p, int(reached[-1])))] for name, p in QUANTILES.items()}
    return {"min": seen[0], "max": seen[-1], "mean": mean, "std": std, **marks}


def combine(stats: Mapping[str, Shaped[np.ndarray, "episodes ..."]]) -> Stats:
    """One feature's statistics over several episodes, from those of each stacked along a leading axis.

    Everything is exact but the quantiles, which those of the parts cannot tell. Taken are the lowest of the low ones, the
    highest of the high ones, so that the range between them holds no less than it promises, and the average median.
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


def parquet_bytes(table: pa.Table) -> bytes:
    """A table as a parquet file of one row group, compressed as LeRobot does."""
    file = io.BytesIO()
    pq.write_table(table, file, compression="snappy", row_group_size=max(table.num_rows, 1))
    return file.getvalue()


@dataclass(frozen=True)
class EpisodeRecord:
    index: int
    first_row: int
    length: int
    tasks: Sequence[str]
    stats: dict[str, Stats]


class Metadata:
    """The files of `meta/` but info.json. `restore` returns to the episodes that info.json counts."""

    version: ClassVar[str]
    data_path: ClassVar[str]
    video_path: ClassVar[str]
    chunk_size = 1000  # files in a directory

    def __init__(self, root: Path, features: Features, fps: int) -> None:
        self.root, self.features, self.fps = root, features, fps
        self.videos = [name for name, feature in features.items() if feature["dtype"] == "video"]


class MetadataV21(Metadata):
    """Three files of JSON lines, of which two get a line for every episode, in a single write.

    Files written anew for each episode would appear whole even if a kill comes within this write, but cost time with the
    square of the episodes. Should half a line ever be left, info.json does not count it, and resuming removes it.
    """

    version = "v2.1"
    data_path, video_path = DEFAULT_PATHS["v2"]

    def __init__(self, root: Path, features: Features, fps: int) -> None:
        super().__init__(root, features, fps)
        self._ends = {"episodes": 0, "episodes_stats": 0}  # in bytes: where the lines of the next episode begin

    def format_info(self, episodes: int) -> dict[str, Any]:
        """The part of info.json that only this format has."""
        return {"total_videos": episodes * len(self.videos), "total_chunks": -(-episodes // self.chunk_size)}

    def restore(self, episodes: int, tasks: int) -> list[str]:
        """Keep the lines of that many episodes and tasks; return the tasks."""
        counts = {"episodes": episodes, "episodes_stats": episodes, "tasks": tasks}
        kept = {name: self._read_lines(name, count) for name, count in counts.items()}
        texts = [json.loads(line)["task"] for line in kept["tasks"]]
        for name, lines in kept.items():
            self._write_lines(name, lines)
        self._ends = {name: self._path(name).stat().st_size for name in self._ends}
        return texts

    def save_tasks(self, tasks: Sequence[str]) -> None:
        """Write tasks.jsonl; their order gives tasks their numbers."""
        self._write_lines("tasks", [json.dumps({"task_index": i, "task": task}) for i, task in enumerate(tasks)])

    def save_stats(self, episode: EpisodeRecord) -> None:
        """Add a line to episodes_stats.jsonl. LeRobot combines them when it loads the dataset; there are no quantiles."""
        stats = {
            feature: {name: value.tolist() for name, value in stats.items() if name not in QUANTILES}
            for feature, stats in episode.stats.items()
        }
        self._add_line("episodes_stats", {"episode_index": episode.index, "stats": stats})

    def save_episode(self, episode: EpisodeRecord) -> None:
        """Add a line to episodes.jsonl, after which the episode is complete."""
        line = {"episode_index": episode.index, "tasks": list(episode.tasks), "length": episode.length}
        self._add_line("episodes", line)
        self._ends = {name: self._path(name).stat().st_size for name in self._ends}

    def finish(self, data_files: Sequence[Path]) -> None:
        """Nothing: there are no quantiles."""

    def _path(self, name: str) -> Path:
        return self.root / f"meta/{name}.jsonl"

    def _read_lines(self, name: str, count: int) -> list[str]:
        path = self._path(name)
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line] if path.exists() else []
        if len(lines) < count:
            raise DataError(f"{path}: expected at least {count} lines, as meta/info.json says, got {len(lines)}")
        return lines[:count]

    def _write_lines(self, name: str, lines: Iterable[str]) -> None:
        write_file(self._path(name), "".join(f"{line}\n" for line in lines))

    def _add_line(self, name: str, content: dict[str, Any]) -> None:
        path = self._path(name)
        if (path.stat().st_size if path.exists() else 0) < self._ends[name]:
            raise DataError(f"{path} has lost lines: put back what it was, or begin another dataset")
        replace_tail(path, self._ends[name], f"{json.dumps(content)}\n".encode())


class MetadataV30(Metadata):
    """Parquet tables of tasks and episodes, and stats.json of the whole dataset."""

    version = "v3.0"
    data_path, video_path = DEFAULT_PATHS["v3"]
    episodes_per_file = 100  # a file of episodes is rewritten for each one added to it, so it must not grow without end

    def __init__(self, root: Path, features: Features, fps: int) -> None:
        super().__init__(root, features, fps)
        self._rows: list[dict[str, Any]] = []  # of the last file of episodes
        self._stats: dict[str, Stats] = {}

    def format_info(self, episodes: int) -> dict[str, Any]:
        """Sizes at which LeRobot, should it add to this dataset, begins a new file."""
        return {"data_files_size_in_mb": 100, "video_files_size_in_mb": 200}

    def restore(self, episodes: int, tasks: int) -> list[str]:
        """Read that many episodes back, combine their statistics anew, and return the tasks."""
        self._rows, self._stats = [], {}
        for first in range(0, episodes, self.episodes_per_file):
            self._rows = self._read_rows(first, min(episodes - first, self.episodes_per_file))
            for row in self._rows:
                self._add_stats(
                    {name: {key: np.array(row[f"stats/{name}/{key}"]) for key in STATISTICS} for name in self.features}
                )
        texts = pq.read_table(self.root / "meta/tasks.parquet")["task"].to_pylist()[:tasks] if tasks else []
        if episodes % self.episodes_per_file == 0:
            self._rows = []
            self._episodes_file(episodes).unlink(missing_ok=True)
        else:
            self._write_rows(episodes)
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
        self._add_stats(episode.stats)
        self._write_stats(self._stats)

    def save_episode(self, episode: EpisodeRecord) -> None:
        """Add a row to the last file of meta/episodes, or begin the next; the columns are in LeRobot's order."""
        place = {"chunk_index": episode.index // self.chunk_size, "file_index": episode.index % self.chunk_size}
        file = episode.index // self.episodes_per_file
        row: dict[str, Any] = {
            "episode_index": episode.index,
            "tasks": list(episode.tasks),
            "length": episode.length,
            **{f"data/{key}": value for key, value in place.items()},
            "dataset_from_index": episode.first_row,
            "dataset_to_index": episode.first_row + episode.length,
        }
        for video in self.videos:
            times = {"from_timestamp": 0.0, "to_timestamp": episode.length / self.fps}
            row |= {f"videos/{video}/{key}": value for key, value in {**place, **times}.items()}
        for feature in self.features:
            row |= {f"stats/{feature}/{name}": episode.stats[feature][name].tolist() for name in STATISTICS}
        row["meta/episodes/chunk_index"], row["meta/episodes/file_index"] = divmod(file, self.chunk_size)
        self._rows = [*self._rows[: episode.index % self.episodes_per_file], row]
        self._write_rows(episode.index)

    def finish(self, data_files: Sequence[Path]) -> None:
        """Put the exact quantiles of all columns into stats.json; those of images stay bounds."""
        if not data_files:
            return
        shapes = {name: (f["shape"][0],) for name, f in self.features.items() if f["dtype"] not in CAMERA_DTYPES}
        data = pyarrow.dataset.dataset([str(file) for file in data_files], format="parquet")
        table = data.to_table(columns=list(shapes))
        exact = {name: quantiles(to_numpy(table[name], shape).reshape(-1, *shape)) for name, shape in shapes.items()}
        self._write_stats({name: {**stats, **exact.get(name, {})} for name, stats in self._stats.items()})

    def _episodes_file(self, episode: int) -> Path:
        chunk, file = divmod(episode // self.episodes_per_file, self.chunk_size)
        return self.root / f"meta/episodes/chunk-{chunk:03d}/file-{file:03d}.parquet"

    def _write_rows(self, episode: int) -> None:
        write_file(self._episodes_file(episode), parquet_bytes(pa.Table.from_pylist(self._rows)))

    def _read_rows(self, first: int, count: int) -> list[dict[str, Any]]:
        path = self._episodes_file(first)
        try:
            rows = pq.read_table(path).slice(0, count).to_pylist()
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DataError(f"{path}: this file of episodes was not written here and cannot be continued") from error
        keys = ("episode_index", "data/chunk_index", "data/file_index")
        wanted = [(episode, *divmod(episode, self.chunk_size)) for episode in range(first, first + count)]
        if [tuple(row.get(key) for key in keys) for row in rows] != wanted:
            raise DataError(f"{path}: expected the episodes {first} to {first + count - 1}, with one data file each")
        return rows

    def _add_stats(self, more: dict[str, Stats]) -> None:
        """Combine what is known with one more episode: in the order of episodes, since sums round by their order."""
        for name, stats in more.items():
            parts = [self._stats[name], stats] if name in self._stats else [stats]
            self._stats[name] = combine({key: np.stack([part[key] for part in parts]) for key in stats})

    def _write_stats(self, stats: dict[str, Stats]) -> None:
        content = {name: {key: value.tolist() for key, value in entry.items()} for name, entry in stats.items()}
        write_file(self.root / "meta/stats.json", json.dumps(content, indent=4))
