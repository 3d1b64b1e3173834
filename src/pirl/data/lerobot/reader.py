"""A LeRobot dataset, read-only: columns as arrays by episode and frame, camera frames in order."""

import logging
import math
import os
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int64, UInt8

from pirl.data.labels import DROPPED_FILE, read_dropped
from pirl.data.lerobot.format import Info, Listing, read_info, read_listing, resolve_inside
from pirl.data.lerobot.parquet import CellReader, ColumnError, decode_image, read_table, to_numpy
from pirl.data.lerobot.rows import Rows, by_episode, read_rows
from pirl.data.lerobot.video import Segment, decode_frames, find_segments
from pirl.data.problems import BrokenDatasetError, Problem, format_episodes
from pirl.errors import DataError
from pirl.files import is_elsewhere

logger = logging.getLogger(__name__)
_MOST_UNDECLARED = 10_000  # values per frame of a column that info.json does not declare


def is_hub_id(name: str) -> bool:
    """Whether datasets on the hub are named so: NAME/DATASET."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) is not None


def locate(source: str | os.PathLike[str]) -> tuple[Path, str]:
    """The directory of a dataset given as a path or as a hub id, and the name to call it by."""
    name = os.fspath(source)
    if is_elsewhere(name):
        raise DataError(
            f"{name} is not on this machine: copy it and give its directory, or name a dataset on the Hugging Face hub "
            "as NAME/DATASET."
        )
    path = Path(os.path.expanduser(name))
    if path.exists() or not is_hub_id(name):
        return path, name
    # Where LeRobot keeps datasets, by the variables that it and the hub library go by.
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    hub = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    home = Path(os.path.expanduser(os.environ.get("HF_LEROBOT_HOME") or os.path.join(hub, "lerobot"))) / name
    if (home / "meta").is_dir() and (home / "data").is_dir():  # LeRobot may have fetched the metadata alone
        return home, name
    try:
        import huggingface_hub

        return Path(huggingface_hub.snapshot_download(name, repo_type="dataset")), name
    except ImportError as error:
        raise DataError(
            f"there is no directory {name}. If it is a dataset on the Hugging Face hub: pip install 'pirl[hub]', "
            "or download it and give its directory."
        ) from error
    except Exception as error:  # the hub library raises errors of many families: network, authentication, names
        raise DataError(
            f"there is no directory {name}, and it cannot be fetched from the hub: {str(error).splitlines()[0]}"
        ) from error


class Dataset:
    """One dataset. Rows are in the order of episode and frame; an episode is named by its position, 0 … E-1.

    `whole` are the rows of all its episodes, where `rows` are only those of some.
    """

    def __init__(self, root: Path, name: str, info: Info, listing: Listing, rows: Rows, whole: Rows | None = None):
        self.root, self.name, self.info, self.listing, self.rows = root, name, info, listing, rows
        self.whole = rows if whole is None else whole
        self.problems = [*listing.problems, *rows.problems]
        self._columns: dict[str, np.ndarray] = {}
        self._segments: dict[str, tuple[dict[int, Segment], list[Problem]]] = {}
        self._cells = CellReader()
        self._lock = threading.Lock()

    def select(self, numbers: Collection[int]) -> "Dataset":
        """The same dataset with the episodes of these numbers alone, and of its problems those that concern them."""
        chosen = set(numbers)
        kept = [episode for episode, number in enumerate(self.episode_ids.tolist()) if number in chosen]
        part = Dataset(self.root, self.name, self.info, self.listing, self.rows.select(kept), self.whole)
        part.problems = _concerning(self.problems, chosen)
        rows = np.isin(np.repeat(self.episode_ids, self.lengths), part.episode_ids)
        part._columns = {name: values[rows] for name, values in self._columns.items()}
        part._segments = dict(self._segments)
        return part

    @property
    def episode_ids(self) -> Int64[np.ndarray, " episodes"]:
        return self.rows.episode_ids

    @property
    def starts(self) -> Int64[np.ndarray, " episodes_plus_one"]:
        """First row of each episode, and the number of rows."""
        return self.rows.starts

    @property
    def lengths(self) -> Int64[np.ndarray, " episodes"]:
        return np.diff(self.rows.starts)

    @property
    def cameras(self) -> tuple[str, ...]:
        return self.info.cameras

    def __len__(self) -> int:
        return int(self.rows.starts[-1])

    @property
    def column_names(self) -> tuple[str, ...]:
        """Columns that any of the files has, cameras left out."""
        return tuple(name for name in self.rows.column_types if name not in self.info.cameras)

    def columns(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Columns as arrays of [rows] or [rows, *shape], in the dtype of the file."""
        columns, problems = self.try_columns(names)
        if problems:
            raise BrokenDatasetError(self.name, problems)
        return columns

    def try_columns(self, names: Sequence[str]) -> tuple[dict[str, np.ndarray], list[Problem]]:
        """The columns that can be read, and what is wrong with the others.

        One of a table beside the data, by episode_index and frame_index, is called meta/FILE.parquet:COLUMN.
        """
        missing = [name for name in names if name not in self._columns and not is_beside(name)]
        files = range(len(self.rows.files)) if missing else ()
        with ThreadPoolExecutor() as pool:
            read = list(pool.map(lambda file: self._read_file(file, missing), files))
        problems = [problem for _, complaints in read for problem in complaints]
        for name in missing:
            pieces = [arrays[name] for arrays, _ in read if name in arrays]
            if len(pieces) < len(self.rows.files):
                continue
            pieces = [piece for piece in pieces if len(piece)] or pieces[:1]
            shapes = {piece.shape[1:] for piece in pieces}
            if len(shapes) == 1:
                values = np.concatenate(pieces)
                self._columns[name] = np.empty_like(values)
                self._columns[name][np.concatenate(self.rows.rows_of_file)] = values
            else:
                problems.append(Problem("changes its width between files", column=name, value=f"{sorted(shapes)}"))
        for name in names:
            if is_beside(name) and name not in self._columns:
                problems += self._read_beside(name)
        return {name: self._columns[name] for name in names if name in self._columns}, problems

    def _read_file(self, file: int, names: Sequence[str]) -> tuple[dict[str, np.ndarray], list[Problem]]:
        relative, rows = self.rows.files[file], self.rows.rows_of_file[file]
        shapes = {name: self.info.features[name].shape if name in self.info.features else None for name in names}
        widest = max(_MOST_UNDECLARED if shape is None else math.prod(shape) for shape in shapes.values())
        arrays: dict[str, np.ndarray] = {}
        problems: list[Problem] = []

        try:
            most_values = 4 * self.rows.file_sizes[file] * (widest + 1)
            table, _ = read_table(resolve_inside(self.root, relative, links=True), names, most_values)
        except ValueError as error:  # a DataError is one
            return {}, self.problems_of_file(file, str(error))
        used = self.rows.row_in_file[rows]
        for name in names:
            if name not in table.column_names:
                problems += self.problems_of_file(file, "is not in this file, though it is in others", name)
                continue
            try:
                column = table[name]
                if not np.array_equal(used, np.arange(len(column))):
                    column = column.take(pa.array(used))
                arrays[name] = to_numpy(column, shapes[name])
            except ColumnError as error:
                if error.rows is None:
                    problems += self.problems_of_file(file, str(error), name, error.value)
                else:
                    problems += self.problems_at(rows[error.rows], str(error), name, error.value)
        return arrays, problems

    def problems_of_file(
        self, file: int, message: str, column: str | None = None, value: str | None = None
    ) -> list[Problem]:
        """A problem of every episode that a data file holds."""
        relative, numbers = self.rows.files[file], self.rows.episodes_of_file(file)
        return [Problem(message, "problem", number, relative, column, value) for number in numbers]

    def problems_at(
        self,
        rows: Int64[np.ndarray, " rows"],
        message: str,
        column: str,
        found: np.ndarray | str | None,
        severity: Literal["problem", "note"] = "problem",
    ) -> list[Problem]:
        """A problem of every episode that these rows are of, at the first of them; `found` is what is there, by row."""
        problems = []
        for episode, mine in by_episode(self.starts, rows):
            first, more = int(mine[0]), f" (and {len(mine) - 1} more frames)" if len(mine) > 1 else ""
            said = f"frame {first - self.starts[episode]} {message}{more}"
            file, number = self.rows.files[self.rows.file_of_row[first]], int(self.episode_ids[episode])
            value = str(found[first]) if isinstance(found, np.ndarray) else found
            problems.append(Problem(said, severity, number, file, column, value))
        return problems

    def _read_beside(self, name: str) -> list[Problem]:
        """Read a column of a table under meta/, such as the rewards that others have computed."""
        file, _, column = name.partition(":")
        keys = ["episode_index", "frame_index"]
        try:
            table, _ = read_table(resolve_inside(self.root, file), [*keys, column], 4 * len(self.whole.file_of_row))
            if absent := [key for key in (*keys, column) if key not in table.column_names]:
                raise ValueError(f"has no column {', '.join(absent)}")
            episodes, frames, values = (to_numpy(table[key], (1,)) for key in (*keys, column))
            there = pa.array(episodes.astype(np.int64) * 2**32 + frames.astype(np.int64))
        except ValueError as error:
            return [Problem(str(error), file=file, column=column)]
        frame = np.arange(len(self)) - np.repeat(self.starts[:-1], self.lengths)
        found = pc.index_in(pa.array(np.repeat(self.episode_ids, self.lengths) * 2**32 + frame), there)
        if lacking := [
            Problem("has no values of this episode", "problem", int(self.episode_ids[episode]), file, column)
            for episode, _ in by_episode(self.starts, np.flatnonzero(np.asarray(found.is_null())))
        ]:
            return lacking
        self._columns[name] = values[found.to_numpy()]
        return []

    def decode(self, camera: str, episode: int) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
        """The frames of one episode in order, RGB, in the size they were recorded."""
        if camera not in self.info.cameras:
            raise DataError(f"{self.name} has no camera {camera!r}; it has {', '.join(self.cameras) or 'none'}.")
        if self._in_parquet(camera):
            yield from self._decode_images(camera, episode)
            return
        segments, problems = self.segments(camera)
        segment, number = segments[episode], int(self.episode_ids[episode])
        if segment is None:
            mine = [problem for problem in problems if problem.episode in (number, None)]
            raise BrokenDatasetError(self.name, mine or problems)
        try:
            yield from decode_frames(segment.video, segment.frames)
        except DataError as error:
            raise DataError(f"{self.name}: camera {camera}, episode {number}: {error}") from error

    def source_files(self, camera: str) -> list[Path]:
        if self._in_parquet(camera):
            return [self.root / relative for relative in self.rows.files]
        segments, problems = self.segments(camera)
        if wrong := [problem for problem in problems if problem.severity == "problem"]:
            raise BrokenDatasetError(self.name, wrong)
        return sorted({segment.video.path for segment in segments if segment is not None})

    def offsets(self, camera: str) -> list[tuple[int, ...]]:
        """Where in these files each episode lies: file and first frame (all frames, if some are left out) or rows."""
        if self._in_parquet(camera):
            episodes = range(len(self.episode_ids))
            return [(file, *rows.tolist()) for episode in episodes for file, rows in self.rows.parts(episode)]
        numbers = {path: number for number, path in enumerate(self.source_files(camera))}
        found = [segment for segment in self.segments(camera)[0] if segment is not None]
        frames = (each.frames[:1] if isinstance(each.frames, range) else each.frames for each in found)
        return [(numbers[each.video.path], *some) for each, some in zip(found, frames, strict=True)]

    def segments(self, camera: str) -> tuple[list[Segment | None], list[Problem]]:
        """Where each episode's frames are in the video files, and what is wrong there."""
        numbers = self.episode_ids.tolist()
        with self._lock:
            if camera not in self._segments:
                lengths = dict(zip(self.whole.episode_ids.tolist(), np.diff(self.whole.starts).tolist(), strict=True))
                self._segments[camera] = find_segments(
                    self.root, self.info, self.listing, lengths, numbers, camera, self._times
                )
        found, problems = self._segments[camera]
        return [found.get(number) for number in numbers], _concerning(problems, set(numbers))

    def _times(self, number: int) -> np.ndarray | None:
        """The timestamps of an episode, by its number."""
        values = self.try_columns(["timestamp"])[0].get("timestamp") if "timestamp" in self.column_names else None
        if values is None or values.ndim != 1 or values.dtype.kind not in "iuf":
            return None
        episode = int(np.searchsorted(self.episode_ids, number))
        return values[self.starts[episode] : self.starts[episode + 1]].astype(np.float64)

    def _in_parquet(self, camera: str) -> bool:
        # The files decide: a camera declared as video may have been left as images, and the other way round.
        return camera in self.rows.column_types

    def _decode_images(self, camera: str, episode: int) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
        number, frame = int(self.episode_ids[episode]), 0
        for file, rows in self.rows.parts(episode):
            relative = self.rows.files[file]
            try:
                cells = self._cells.read(resolve_inside(self.root, relative, links=True), camera, rows)
            except ValueError as error:
                raise DataError(f"{self.name}: {relative} {error}.") from error
            for cell in cells:
                try:
                    pixels = decode_image(cell.as_py())
                except DataError as error:
                    where = f"{self.name}: {relative}, camera {camera}, episode {number}, frame {frame}"
                    raise DataError(f"{where}: the image cannot be decoded: {error}.") from error
                yield pixels
                frame += 1


def is_beside(name: str) -> bool:
    """Whether a column is one of a table beside the data: meta/FILE.parquet:COLUMN."""
    return name.startswith("meta/") and ".parquet:" in name


def scan_dataset(source: str | os.PathLike[str]) -> Dataset:
    """Open a dataset whatever is wrong with it: `problems` lists it. See `open_dataset`."""
    root, name = locate(source)
    info = read_info(root)
    listing = read_listing(root, info)
    dataset = Dataset(root, name, info, listing, read_rows(root, info, listing))
    if dropped := read_dropped(root):
        known = {*dataset.episode_ids.tolist(), *(problem.episode for problem in dataset.problems)}
        dataset = dataset.select({number for number in known if number is not None} - dropped)
        message = f"leaves out the episodes {format_episodes(dropped)} (pirl data drop)"
        dataset.problems.append(Problem(message, "note", file=DROPPED_FILE))
    return dataset


def open_dataset(source: str | os.PathLike[str], episodes: Collection[int] | None = None) -> Dataset:
    """Open a LeRobot dataset (v2.0, v2.1, v3.0), or some of its episodes: a directory, or the hub id of one.

    The structure of the episodes that are opened must be sound.
    """
    dataset = scan_dataset(source)
    if episodes is not None:
        dataset = dataset.select(episodes)
    if problems := [problem for problem in dataset.problems if problem.severity == "problem"]:
        raise BrokenDatasetError(dataset.name, problems)
    for note in dataset.problems:
        logger.info("%s: %s", dataset.name, note)
    return dataset


def _concerning(problems: Sequence[Problem], episodes: set[int]) -> list[Problem]:
    return [problem for problem in problems if problem.episode is None or problem.episode in episodes]
