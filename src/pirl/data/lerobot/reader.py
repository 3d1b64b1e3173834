"""A LeRobot dataset, read-only: rows by episode and frame, columns as arrays, camera frames in order."""

import logging
import math
import os
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int64, UInt8

from pirl.data.labels import DROPPED_FILE, read_dropped
from pirl.data.lerobot.columns import (
    CellReader,
    ColumnError,
    ParquetDamageError,
    open_picture,
    read_table,
    to_numpy,
)
from pirl.data.lerobot.format import (
    DEFAULT_COLUMNS,
    Info,
    Listing,
    fill,
    find_files,
    glob_pattern,
    read_info,
    read_listing,
    resolve_inside,
)
from pirl.data.lerobot.video import Segment, decode_frames, find_segments
from pirl.data.problems import BrokenDatasetError, Problem, format_episodes
from pirl.errors import DataError
from pirl.files import is_elsewhere


def is_hub_id(name: str) -> bool:
    """Whether datasets on the hub are named so: NAME/DATASET."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) is not None


def lerobot_home() -> Path:
    """Where LeRobot keeps datasets, by the variables that it and the hub library go by."""
    if own := os.environ.get("HF_LEROBOT_HOME"):
        return Path(os.path.expanduser(own))
    if hub := os.environ.get("HF_HOME"):
        return Path(os.path.expanduser(hub)) / "lerobot"
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "huggingface" / "lerobot"


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
    home = lerobot_home() / name
    # LeRobot may have fetched the metadata alone.
    if (home / "meta").is_dir() and (home / "data").is_dir():
        return home, name
    try:
        import huggingface_hub
    except ImportError as error:
        raise DataError(
            f"there is no directory {name}. If it is a dataset on the Hugging Face hub: pip install 'pirl[hub]', "
            "or download it and give its directory."
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(name, repo_type="dataset")), name
    except Exception as error:  # the hub library raises errors of many families: network, authentication, names
        raise DataError(
            f"there is no directory {name}, and it cannot be fetched from the hub: {str(error).splitlines()[0]}"
        ) from error


_ABSENT = np.iinfo(np.int64).min  # stands for the numbers of a column that a file does not have
_MOST_UNLISTED = 1_000_000  # rows that a file may have beyond those listed, as after a recorder was stopped


@dataclass(frozen=True)
class Rows:
    """Which row of which file is frame k of episode e.

    `order` maps a row (by episode, then frame) to its place in all files laid end to end, in the order of `files`.
    """

    files: Sequence[str]
    file_starts: Int64[np.ndarray, " files_plus_one"]
    order: Int64[np.ndarray, " rows"]
    episode_ids: Int64[np.ndarray, " episodes"]
    starts: Int64[np.ndarray, " episodes_plus_one"]
    tasks: Sequence[str]
    task_of_row: Int64[np.ndarray, " rows"]
    column_types: Mapping[str, Sequence[pa.DataType | None]]  # in each file; None where it does not have the column
    problems: Sequence[Problem]

    @property
    def column_names(self) -> tuple[str, ...]:
        """Columns that any file has."""
        return tuple(self.column_types)

    def select(self, episodes: Sequence[int]) -> "Rows":
        """The rows of these episodes (by position, in ascending order) alone, and the files that hold them."""
        spans = [np.arange(self.starts[episode], self.starts[episode + 1]) for episode in episodes]
        rows = np.concatenate([np.empty(0, np.int64), *spans])
        lengths = np.array([len(span) for span in spans], np.int64)
        files, file_of_row = np.unique(
            np.searchsorted(self.file_starts, self.order[rows], side="right") - 1, return_inverse=True
        )
        file_starts = np.concatenate([[0], np.cumsum(np.diff(self.file_starts)[files])]).astype(np.int64)
        types = {name: [kinds[file] for file in files] for name, kinds in self.column_types.items()}
        return replace(
            self,
            files=[self.files[file] for file in files],
            file_starts=file_starts,
            order=self.order[rows] - self.file_starts[files][file_of_row] + file_starts[:-1][file_of_row],
            episode_ids=self.episode_ids[list(episodes)],
            starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            task_of_row=self.task_of_row[rows],
            column_types={name: kinds for name, kinds in types.items() if any(kind is not None for kind in kinds)},
        )

    @cached_property
    def _places_in_use(self) -> Int64[np.ndarray, " rows"]:
        return np.sort(self.order)

    @cached_property
    def _positions(self) -> Int64[np.ndarray, " rows"]:
        """The row that each place in use belongs to."""
        return np.argsort(self.order)

    @cached_property
    def ranks(self) -> Int64[np.ndarray, " rows"]:
        """`order` among the rows in use alone, for arrays that leave the others out."""
        return np.searchsorted(self._places_in_use, self.order)

    def rows_in_use(self, file: int) -> Int64[np.ndarray, " rows"]:
        """Rows of a file that belong to an episode; those of an unfinished one do not."""
        first, last = np.searchsorted(self._places_in_use, self.file_starts[file : file + 2])
        return self._places_in_use[first:last] - self.file_starts[file]

    def places(self, episode: int) -> list[tuple[int, Int64[np.ndarray, " rows"]]]:
        """Files that hold an episode and its rows in each, in the order of its frames."""
        places = self.order[self.starts[episode] : self.starts[episode + 1]]
        files = np.searchsorted(self.file_starts, places, side="right") - 1
        cuts = np.flatnonzero(np.diff(files)) + 1
        return [
            (int(numbers[0]), rows - self.file_starts[numbers[0]])
            for numbers, rows in zip(np.split(files, cuts), np.split(places, cuts), strict=True)
            if len(rows)
        ]

    def frames_in(
        self, file: int, rows: Int64[np.ndarray, " rows"]
    ) -> list[tuple[int, Int64[np.ndarray, " some_rows"]]]:
        """Of some rows (in use) of a file: the episodes that they belong to, by number, and which frames they are."""
        places = np.searchsorted(self._places_in_use, self.file_starts[file] + rows)
        positions = np.sort(self._positions[places])
        return [
            (int(self.episode_ids[episode]), mine - self.starts[episode])
            for episode, mine in by_episode(self.starts, positions)
        ]


def read_rows(root: Path, info: Info, listing: Listing) -> Rows:
    """Read the columns that place rows, of every file. Metadata is compared with them, never believed."""
    problems: list[Problem] = []
    files = _data_files(root, info, listing, problems)
    most_rows = sum(listed.length or 0 for listed in listing.episodes.values()) + _MOST_UNLISTED
    kept, sizes, schemas = [], [], []
    damaged: dict[str, str] = {}
    columns: dict[str, list[np.ndarray]] = {"episode_index": [], "frame_index": [], "task_index": []}
    for relative, episode in files:
        try:
            table, schema = read_table(resolve_inside(root, relative, links=True), list(columns), most_rows)
            found = {name: _whole_numbers(table, name) for name in columns if name in table.column_names and len(table)}
            if len(table) and episode is None and "episode_index" not in found:
                raise ParquetDamageError("has no column episode_index, so its rows cannot be placed")
        except (ParquetDamageError, ColumnError, ValueError) as error:
            if episode is None:
                damaged[relative] = str(error)
            else:
                problems.append(Problem(str(error), file=relative, episode=episode))
            continue
        numbers = found.get("episode_index", np.empty(0, np.int64))
        if episode is not None:
            if len(others := numbers[numbers != episode]):
                what = "holds rows of another episode"
                problems.append(Problem(what, "problem", episode, relative, "episode_index", str(others[0])))
                continue
            numbers = np.full(len(table), episode, np.int64)
        kept.append(relative)
        sizes.append(len(table))
        schemas.append(schema)
        columns["episode_index"].append(numbers)
        for name in ("frame_index", "task_index"):
            columns[name].append(found.get(name, np.full(len(table), _ABSENT, np.int64)))
    stacked = {name: np.concatenate([np.empty(0, np.int64), *parts]) for name, parts in columns.items()}
    order = np.lexsort((stacked["frame_index"], stacked["episode_index"]))
    order = order[~_is_unfinished(stacked["episode_index"][order], info, listing, problems)]
    episode_ids, counts = np.unique(stacked["episode_index"][order], return_counts=True)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    types = _column_types(kept, schemas, problems)
    _check_frames(stacked["frame_index"][order], episode_ids, starts, problems)
    _attribute_damage(info, listing, damaged, set(episode_ids.tolist()), problems)
    _compare_with_listing(info, listing, episode_ids, counts, problems)
    for name in DEFAULT_COLUMNS:
        if name not in types and kept:
            problems.append(Problem("is missing; rebuilt from what is there", severity="note", column=name))
    file_starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    files_of_episodes = [kept[file] for file in np.searchsorted(file_starts, order[starts[:-1]], side="right") - 1]
    _compare_files(info, listing, dict(zip(episode_ids.tolist(), files_of_episodes, strict=True)), problems)
    tasks, task_of_row = _tasks(listing, stacked["task_index"][order], episode_ids, starts, problems)
    return Rows(kept, file_starts, order.astype(np.int64), episode_ids, starts, tasks, task_of_row, types, problems)


def _attribute_damage(
    info: Info, listing: Listing, damaged: Mapping[str, str], found: set[int], problems: list[Problem]
) -> None:
    """Whose rows are lost with files of v3 that cannot be read: of listed episodes without rows, those listed there."""
    claims: dict[str, list[int]] = {relative: [] for relative in damaged}
    for number in sorted(set(listing.episodes) - found) if damaged else ():
        place = listing.episodes[number].data_file
        file = fill(info.data_path, chunk=place[0], file=place[1]) if place else ""
        claims[file if file in damaged else next(iter(damaged))].append(number)
    for relative, message in damaged.items():
        problems += [Problem(message, file=relative, episode=number) for number in claims[relative]]
        if not claims[relative]:
            severity: Literal["problem", "note"] = "note" if found else "problem"
            problems.append(Problem(f"{message}; no listed episode is in it", severity, file=relative))


def by_episode(
    starts: Int64[np.ndarray, " episodes_plus_one"], rows: Int64[np.ndarray, " rows"]
) -> Iterator[tuple[int, Int64[np.ndarray, " some_rows"]]]:
    """Rows, in ascending order, grouped by the position of their episode."""
    episodes, first = np.unique(np.searchsorted(starts, rows, side="right") - 1, return_index=True)
    return zip(episodes.tolist(), np.split(rows, first[1:]), strict=False)  # of no rows, a split is one group


def _whole_numbers(table: pa.Table, name: str) -> Int64[np.ndarray, " rows"]:
    values = to_numpy(table[name], (1,))
    if values.dtype.kind == "f":
        wrong = ~(np.abs(values) < 2**53) | (values % 1 != 0)
    else:
        wrong = np.full(len(values), values.dtype.kind not in "iu")
    if np.any(wrong):
        row = int(np.argmax(wrong))
        raise ColumnError(f"{name} should hold whole numbers; row {row} is {values[row]!s:.40}")
    return values.astype(np.int64)


def _column_types(
    files: Sequence[str], schemas: Sequence[pa.Schema], problems: list[Problem]
) -> dict[str, list[pa.DataType | None]]:
    """Columns that are in any file, and the types they have in each."""
    types: dict[str, list[pa.DataType | None]] = {}
    by_file = [dict(zip(schema.names, schema.types, strict=True)) for schema in schemas]
    for name in dict.fromkeys(name for kinds in by_file for name in kinds):
        types[name] = [kinds.get(name) for kinds in by_file]
        for file, kind in zip(files, types[name], strict=True):
            if kind is None:
                problems.append(Problem("is not in this file, though it is in others", "note", file=file, column=name))
    return types


def _data_files(root: Path, info: Info, listing: Listing, problems: list[Problem]) -> list[tuple[str, int | None]]:
    """Data files, and for v2 the one episode that each holds."""
    present = set(find_files(root, glob_pattern(info.data_path)))
    if info.is_v3:
        if not present:
            problems.append(Problem(f"no data file matches {info.data_path}"))
        return [(relative, None) for relative in sorted(present)]
    expected = {
        fill(info.data_path, chunk=index // info.chunks_size, file=index): index for index in sorted(listing.episodes)
    }
    for relative, index in expected.items():
        if relative not in present:
            problems.append(Problem("is missing", file=relative, episode=index))
    strays = sorted(present - set(expected))
    counted = range(min(info.total_episodes or 0, 1_000_000) if strays else 0)
    unlisted = {fill(info.data_path, chunk=index // info.chunks_size, file=index): index for index in counted}
    for stray in strays:
        if stray in unlisted:
            message = "is not listed in meta/episodes.jsonl, though total_episodes counts it"
            problems.append(Problem(message, file=stray, episode=unlisted[stray]))
        else:
            problems.append(Problem("belongs to no listed episode; left out", severity="note", file=stray))
    return [(relative, index) for relative, index in expected.items() if relative in present]


def _is_unfinished(
    episodes: Int64[np.ndarray, " rows"], info: Info, listing: Listing, problems: list[Problem]
) -> Bool[np.ndarray, " rows"]:
    """Rows of episodes past the last one that a recorder counted: it was stopped before it could list them."""
    counted = info.total_episodes if info.total_episodes is not None else 2**40
    beyond = [index for index in np.unique(episodes).tolist() if index >= counted and index not in listing.episodes]
    for index in beyond:
        problems.append(Problem("was not finished when the recording stopped; left out", "note", index))
    return np.isin(episodes, beyond)


def _check_frames(
    frame_index: np.ndarray, episode_ids: np.ndarray, starts: np.ndarray, problems: list[Problem]
) -> None:
    """Frames must count 0, 1, 2, … (where they are numbered at all)."""
    expected = np.arange(len(frame_index)) - np.repeat(starts[:-1], np.diff(starts))
    wrong = np.flatnonzero((frame_index != expected) & (frame_index != _ABSENT))
    for episode, rows in by_episode(starts, wrong):
        row = rows[0]
        problems.append(
            Problem(
                f"frames should count 0, 1, 2, …; {expected[row]} is missing or there twice",
                episode=int(episode_ids[episode]),
                column="frame_index",
                value=str(frame_index[row]),
            )
        )


def _compare_with_listing(
    info: Info, listing: Listing, episode_ids: np.ndarray, counts: np.ndarray, problems: list[Problem]
) -> None:
    found = dict(zip(episode_ids.tolist(), counts.tolist(), strict=True))
    complained = {problem.episode for problem in problems if problem.severity == "problem"}
    for index, listed in sorted(listing.episodes.items()):
        if index not in found and index not in complained:
            problems.append(Problem("is listed but has no frames in the data", episode=index))
        elif index in found and listed.length is not None and listed.length != found[index]:
            problems.append(
                Problem(f"is listed with {listed.length} frames, the data has {found[index]}", episode=index)
            )
    for index in sorted(set(found) - set(listing.episodes)):
        problems.append(Problem("is in the data but not listed under meta/", episode=index))
    if not found and not any(problem.severity == "problem" for problem in [*problems, *listing.problems]):
        problems.append(Problem("the dataset has no episodes"))
    for key, claimed, actual in (
        ("total_episodes", info.total_episodes, len(found)),
        ("total_frames", info.total_frames, int(counts.sum())),
    ):
        if claimed is not None and claimed != actual:
            problems.append(
                Problem(f"{key} is {claimed}, the data has {actual}", severity="note", file="meta/info.json")
            )


def _compare_files(info: Info, listing: Listing, files: dict[int, str], problems: list[Problem]) -> None:
    """v3 lists the data file of every episode, and LeRobot's own converter gets some of them wrong."""
    wrong = []
    for episode, file in files.items():
        listed = listing.episodes.get(episode)
        if info.is_v3 and listed and listed.data_file:
            claimed = fill(info.data_path, chunk=listed.data_file[0], file=listed.data_file[1])
            wrong += [(episode, file, claimed)] if claimed != file else []
    if wrong:
        episode, file, claimed = wrong[0]
        more = f" (and so for {len(wrong) - 1} more episodes)" if len(wrong) > 1 else ""
        problems.append(
            Problem(
                f"data/file_index says that its rows are in {claimed}; they are read from where they are{more}",
                severity="note",
                episode=episode,
                file=file,
            )
        )


def _tasks(
    listing: Listing, task_index: np.ndarray, episode_ids: np.ndarray, starts: np.ndarray, problems: list[Problem]
) -> tuple[list[str], Int64[np.ndarray, " rows"]]:
    """Task strings, and which one each row has: by its task_index, or else the first its episode is listed with."""
    positions = {text: position for position, text in enumerate(dict.fromkeys(listing.tasks.values()))}
    numbers, inverse = np.unique(task_index, return_inverse=True)
    texts = [listing.tasks.get(number) for number in numbers.tolist()]
    task_of_row = np.array([-1 if text is None else positions[text] for text in texts], np.int64)[inverse]
    for episode, index in enumerate(episode_ids.tolist()):
        rows = slice(starts[episode], starts[episode + 1])
        unknown = task_of_row[rows] == -1
        if not np.any(unknown):
            continue
        named = task_index[rows][unknown][0]
        listed = listing.episodes.get(index)
        if named != _ABSENT:
            problems.append(
                Problem("refers to no task of meta/tasks", episode=index, column="task_index", value=str(named))
            )
        text = listed.tasks[0] if listed and listed.tasks else ""
        task_of_row[rows] = np.where(unknown, positions.setdefault(text, len(positions)), task_of_row[rows])
    return list(positions), task_of_row


logger = logging.getLogger(__name__)
_MOST_UNDECLARED = 10_000  # values per frame of a column that info.json does not declare


class Dataset:
    """One dataset. Rows are in the order of episode and frame; an episode is named by its position, 0 … E-1.

    `whole` are the rows of all its episodes, where `rows` are only those of some.
    """

    def __init__(self, root: Path, name: str, info: Info, listing: Listing, rows: Rows, whole: Rows | None = None):
        self.root, self.name, self.info, self.listing, self.rows = root, name, info, listing, rows
        self.whole = rows if whole is None else whole
        self.problems = [*listing.problems, *rows.problems]
        self._columns: dict[str, np.ndarray] = {}
        self._segments: dict[str, tuple[list[Segment | None], list[Problem]]] = {}
        self._cells = CellReader()
        self._lock = threading.Lock()

    def select(self, numbers: Collection[int]) -> "Dataset":
        """The same dataset with the episodes of these numbers alone, and of its problems those that concern them."""
        chosen = set(numbers)
        kept = [episode for episode, number in enumerate(self.episode_ids.tolist()) if number in chosen]
        if len(kept) == len(self.episode_ids) and all(p.episode is None or p.episode in chosen for p in self.problems):
            return self
        part = Dataset(self.root, self.name, self.info, self.listing, self.rows.select(kept), self.whole)
        part.problems = _concerning(self.problems, chosen)
        rows = np.isin(np.repeat(self.episode_ids, self.lengths), part.episode_ids)
        part._columns = {name: values[rows] for name, values in self._columns.items()}
        part._segments = {
            camera: ([segments[episode] for episode in kept], _concerning(problems, chosen))
            for camera, (segments, problems) in self._segments.items()
        }
        return part

    # --- what is in it -----------------------------------------------------------------------------------------------

    @property
    def episode_ids(self) -> Int64[np.ndarray, " episodes"]:
        """LeRobot's number of each episode."""
        return self.rows.episode_ids

    @property
    def starts(self) -> Int64[np.ndarray, " episodes_plus_one"]:
        """First row of each episode, and the number of rows."""
        return self.rows.starts

    @property
    def lengths(self) -> Int64[np.ndarray, " episodes"]:
        """Frames per episode."""
        return np.diff(self.rows.starts)

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the cameras."""
        return self.info.cameras

    def __len__(self) -> int:
        return int(self.rows.starts[-1])

    @property
    def column_names(self) -> tuple[str, ...]:
        """Columns that any of the files has, cameras left out."""
        return tuple(name for name in self.rows.column_names if name not in self.info.cameras)

    # --- columns -----------------------------------------------------------------------------------------------------

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
        problems: list[Problem] = []
        for name in names:
            if is_beside(name) and name not in self._columns:
                problems += self._read_beside(name)
        missing = [name for name in names if name not in self._columns and not is_beside(name)]
        parts: dict[str, list[np.ndarray]] = {name: [] for name in missing}
        if missing:
            with ThreadPoolExecutor() as pool:
                results = pool.map(lambda file: self._read_file(file, missing), range(len(self.rows.files)))
                for arrays, complaints in results:
                    problems += complaints
                    for name, array in arrays.items():
                        parts[name].append(array)
        for name, pieces in parts.items():
            if len(pieces) < len(self.rows.files):
                continue
            pieces = [piece for piece in pieces if len(piece)] or pieces[:1]
            shapes = {piece.shape[1:] for piece in pieces}
            if len(shapes) == 1:
                self._columns[name] = np.concatenate(pieces)[self.rows.ranks]
            else:
                problems.append(Problem("changes its width between files", column=name, value=f"{sorted(shapes)}"))
        return {name: self._columns[name] for name in names if name in self._columns}, problems

    def _read_file(self, number: int, names: Sequence[str]) -> tuple[dict[str, np.ndarray], list[Problem]]:
        relative, used = self.rows.files[number], self.rows.rows_in_use(number)
        shapes = {name: self.info.features[name].shape if name in self.info.features else None for name in names}
        widest = max(_MOST_UNDECLARED if shape is None else math.prod(shape) for shape in shapes.values())
        arrays: dict[str, np.ndarray] = {}
        problems: list[Problem] = []

        def complain(message: str, column: str | None = None, error: ColumnError | None = None) -> None:
            wrong = None if error is None else error.rows
            for episode, frames in self.rows.frames_in(number, used if wrong is None else used[wrong]):
                more = f" (and {len(frames) - 1} more frames)" if len(frames) > 1 else ""
                said = message if wrong is None else f"frame {frames[0]} {message}{more}"
                problems.append(Problem(said, "problem", episode, relative, column, error.value if error else None))

        try:
            rows = int(np.diff(self.rows.file_starts)[number])
            table, _ = read_table(resolve_inside(self.root, relative, links=True), names, 4 * rows * (widest + 1))
        except (ParquetDamageError, ValueError) as error:
            complain(str(error))
            return {}, problems
        for name in names:
            if name not in table.column_names:
                complain("is not in this file, though it is in others", name)
                continue
            try:
                column = table[name] if len(used) == len(table) else table[name].take(pa.array(used))
                arrays[name] = to_numpy(column, shapes[name])
            except ColumnError as error:
                complain(str(error), name, error)
        return arrays, problems

    def _read_beside(self, name: str) -> list[Problem]:
        """Read a column of a table under meta/, such as the rewards that others have computed."""
        file, _, column = name.partition(":")
        keys = ["episode_index", "frame_index"]
        try:
            table, _ = read_table(resolve_inside(self.root, file), [*keys, column], 4 * len(self.whole.order))
            if absent := [key for key in (*keys, column) if key not in table.column_names]:
                raise ValueError(f"has no column {', '.join(absent)}")
            episodes, frames, values = (to_numpy(table[key], (1,)) for key in (*keys, column))
            there = pa.array(episodes.astype(np.int64) * 2**32 + frames.astype(np.int64))
        except (ParquetDamageError, ColumnError, ValueError) as error:
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

    # --- pictures ----------------------------------------------------------------------------------------------------

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
            yield from decode_frames(segment.video, segment.first, int(self.lengths[episode]))
        except DataError as error:
            raise DataError(f"{self.name}: camera {camera}, episode {number}: {error}") from error

    def source_files(self, camera: str) -> list[Path]:
        """The files that the frames of a camera come from."""
        if self._in_parquet(camera):
            return [self.root / relative for relative in self.rows.files]
        segments, problems = self.segments(camera)
        if problem_list := [problem for problem in problems if problem.severity == "problem"]:
            raise BrokenDatasetError(self.name, problem_list)
        return sorted({segment.video.path for segment in segments if segment is not None})

    def places(self, camera: str) -> list[tuple[int, ...]]:
        """Where in these files each episode lies: file and first frame, or file and rows."""
        if self._in_parquet(camera):
            episodes = range(len(self.episode_ids))
            return [(file, *rows.tolist()) for episode in episodes for file, rows in self.rows.places(episode)]
        numbers = {path: number for number, path in enumerate(self.source_files(camera))}
        found = [segment for segment in self.segments(camera)[0] if segment is not None]
        return [(numbers[segment.video.path], segment.first) for segment in found]

    def segments(self, camera: str) -> tuple[list[Segment | None], list[Problem]]:
        """Where each episode's frames are in the video files, and what is wrong there."""
        with self._lock:
            if camera not in self._segments:
                chosen = set(self.episode_ids.tolist())
                found, problems = find_segments(
                    self.root, self.info, self.listing, self.whole.episode_ids, self.whole.starts, chosen, camera
                )
                segments = [found.get(number) for number in self.episode_ids.tolist()]
                self._segments[camera] = segments, _concerning(problems, chosen)
            return self._segments[camera]

    def _in_parquet(self, camera: str) -> bool:
        # The files decide: a camera declared as video may have been left as pictures, and the other way round.
        return camera in self.rows.column_names

    def _decode_images(self, camera: str, episode: int) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
        number, frame = int(self.episode_ids[episode]), 0
        for file, rows in self.rows.places(episode):
            relative = self.rows.files[file]
            try:
                cells = self._cells.read(resolve_inside(self.root, relative, links=True), camera, rows)
            except (ParquetDamageError, ValueError) as error:
                raise DataError(f"{self.name}: {relative} {error}.") from error
            for cell in cells:
                try:
                    with open_picture(cell.as_py()) as image:
                        picture = np.asarray(image.convert("RGB"))
                except DataError as error:
                    where = f"{self.name}: {relative}, camera {camera}, episode {number}, frame {frame}"
                    raise DataError(f"{where}: the picture cannot be decoded: {error}.") from error
                yield picture
                frame += 1


def is_beside(name: str) -> bool:
    """Whether a column is one of a table beside the data: meta/FILE.parquet:COLUMN."""
    return name.startswith("meta/") and ".parquet:" in name


def scan_dataset(source: str | os.PathLike[str]) -> Dataset:
    """Open a dataset whatever is wrong with it, so that all of it can be told (in `problems`); see `open_dataset`."""
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
