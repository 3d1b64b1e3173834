"""What LeRobot's formats v2.1 and v3.0 keep under `meta/` beside info.json, one episode added at a time."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

from pirl.data.lerobot.columns import to_numpy
from pirl.data.lerobot.episode_stats import QUANTILES, STATISTICS, Stats, combine, quantiles
from pirl.data.lerobot.episode_table import CAMERAS, Features, parquet_bytes
from pirl.data.lerobot.layout import DEFAULT_PATHS
from pirl.errors import DataError
from pirl.files import end_with, write_file


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
        end_with(path, places[index], line)
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
