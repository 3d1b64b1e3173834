"""The rows of a LeRobot dataset, put in order by what their own columns say; metadata are compared with them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from jaxtyping import Int64

from pirl.data.lerobot.format import (
    DEFAULT_COLUMNS,
    INFO_FILE,
    Info,
    Listing,
    ParquetDamageError,
    fill,
    find_files,
    glob_pattern,
    resolve_inside,
)
from pirl.data.lerobot.parquet import ColumnError, read_table, to_numpy
from pirl.data.problems import Problem

_KEYS = ("episode_index", "frame_index", "task_index")
_ABSENT = np.iinfo(np.int64).min  # stands for the numbers of a column that a file does not have
_MOST_UNLISTED = 1_000_000  # rows that a file may have beyond those listed, as after a recorder was stopped


@dataclass(frozen=True)
class Rows:
    """Which row of which file is frame k of episode e; rows are in the order of episode and frame."""

    files: Sequence[str]
    file_sizes: Sequence[int]  # in rows, also those of no episode
    file_of_row: Int64[np.ndarray, " rows"]
    row_in_file: Int64[np.ndarray, " rows"]
    episode_ids: Int64[np.ndarray, " episodes"]
    starts: Int64[np.ndarray, " episodes_plus_one"]
    tasks: Sequence[str]
    task_of_row: Int64[np.ndarray, " rows"]
    column_types: Mapping[str, Sequence[pa.DataType | None]]  # in each file; None where it does not have the column
    problems: Sequence[Problem]

    @cached_property
    def rows_of_file(self) -> Sequence[Int64[np.ndarray, " some_rows"]]:
        counts = np.bincount(self.file_of_row, minlength=len(self.files))
        return np.split(np.argsort(self.file_of_row, kind="stable"), np.cumsum(counts)[:-1])

    def episodes_of_file(self, file: int) -> list[int]:
        return [int(self.episode_ids[episode]) for episode, _ in by_episode(self.starts, self.rows_of_file[file])]

    def parts(self, episode: int) -> list[tuple[int, Int64[np.ndarray, " some_rows"]]]:
        """Files that hold an episode and its rows in each, in the order of its frames."""
        span = slice(self.starts[episode], self.starts[episode + 1])
        files, rows = self.file_of_row[span], self.row_in_file[span]
        cuts = np.flatnonzero(np.diff(files)) + 1
        parts = zip(np.split(files, cuts), np.split(rows, cuts), strict=True)
        return [(int(file[0]), some_rows) for file, some_rows in parts if len(file)]

    def select(self, episodes: Sequence[int]) -> "Rows":
        """The rows of these episodes (by position, in ascending order) alone, and the files that hold them."""
        lengths = np.diff(self.starts)
        rows = np.isin(np.repeat(np.arange(len(lengths)), lengths), episodes)
        files, file_of_row = np.unique(self.file_of_row[rows], return_inverse=True)
        types = {name: [kinds[file] for file in files] for name, kinds in self.column_types.items()}
        return replace(
            self,
            files=[self.files[file] for file in files],
            file_sizes=[self.file_sizes[file] for file in files],
            file_of_row=file_of_row,
            row_in_file=self.row_in_file[rows],
            episode_ids=self.episode_ids[list(episodes)],
            starts=_starts(lengths[list(episodes)]),
            task_of_row=self.task_of_row[rows],
            column_types={name: kinds for name, kinds in types.items() if any(kind is not None for kind in kinds)},
        )


def by_episode(
    starts: Int64[np.ndarray, " episodes_plus_one"], rows: Int64[np.ndarray, " rows"]
) -> Iterator[tuple[int, Int64[np.ndarray, " some_rows"]]]:
    """Rows, in ascending order, grouped by the position of their episode."""
    episodes, first = np.unique(np.searchsorted(starts, rows, side="right") - 1, return_index=True)
    return zip(episodes.tolist(), np.split(rows, first[1:]), strict=False)  # of no rows, a split is one group


def _starts(lengths: np.ndarray) -> Int64[np.ndarray, " episodes_plus_one"]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def read_rows(root: Path, info: Info, listing: Listing) -> Rows:
    """Read the columns that place rows, of every file."""
    problems: list[Problem] = []
    most_rows = sum(listed.length or 0 for listed in listing.episodes.values()) + _MOST_UNLISTED
    files: list[str] = []
    schemas: list[pa.Schema] = []
    keys: list[np.ndarray] = []
    damaged: dict[str, str] = {}
    for relative, episode in _data_files(root, info, listing, problems):
        try:
            table, schema = read_table(resolve_inside(root, relative, links=True), _KEYS, most_rows)
            numbers = _row_keys(table, episode)
        except ValueError as error:  # a DataError is one
            if episode is None:
                damaged[relative] = str(error)
            else:
                problems.append(Problem(str(error), file=relative, episode=episode))
            continue
        if episode is not None:
            if len(others := numbers[0][(numbers[0] != episode) & (numbers[0] != _ABSENT)]):
                message = "holds rows of another episode"
                problems.append(Problem(message, "problem", episode, relative, "episode_index", str(others[0])))
                continue
            numbers[0] = episode
        files.append(relative)
        schemas.append(schema)
        keys.append(numbers)
    sizes = [numbers.shape[1] for numbers in keys]
    file_of_row = np.repeat(np.arange(len(files)), sizes)
    row_in_file = np.arange(sum(sizes)) - np.repeat(_starts(np.array(sizes, np.int64))[:-1], sizes)
    episode_index, frame_index, task_index = np.concatenate([np.empty((3, 0), np.int64), *keys], axis=1)
    # Episodes past the last one that a recorder counted: it was stopped before it could list them.
    counted = info.total_episodes if info.total_episodes is not None else 2**40
    unfinished = [e for e in np.unique(episode_index).tolist() if e >= counted and e not in listing.episodes]
    problems += [Problem("was not finished when the recording stopped; left out", "note", e) for e in unfinished]
    order = np.lexsort((frame_index, episode_index))
    order = order[~np.isin(episode_index[order], unfinished)]
    episode_ids, counts = np.unique(episode_index[order], return_counts=True)
    starts = _starts(counts)
    types = _column_types(files, schemas, problems)
    problems += _check_frames(frame_index[order], episode_ids, starts)
    problems += _attribute_damage(info, listing, damaged, set(episode_ids.tolist()))
    lengths = dict(zip(episode_ids.tolist(), counts.tolist(), strict=True))
    problems += _compare_with_listing(info, listing, lengths, problems)
    for name in DEFAULT_COLUMNS:
        if name not in types and files:
            problems.append(Problem("is missing; rebuilt from what is there", severity="note", column=name))
    first_files = [files[file] for file in file_of_row[order][starts[:-1]]]
    problems += _compare_files(info, listing, dict(zip(episode_ids.tolist(), first_files, strict=True)))
    tasks, task_of_row = _tasks(listing, task_index[order], episode_ids, starts, problems)
    return Rows(
        *(
            files,
            sizes,
            file_of_row[order],
            row_in_file[order],
            episode_ids,
            starts,
            tasks,
            task_of_row,
            types,
            problems,
        )
    )


def _row_keys(table: pa.Table, episode: int | None) -> Int64[np.ndarray, "3 rows"]:
    """Numbers of episode, frame and task of each row, as far as a file has them."""
    if len(table) and episode is None and "episode_index" not in table.column_names:
        raise ParquetDamageError("has no column episode_index, so its rows cannot be placed")
    keys = np.full((3, len(table)), _ABSENT, np.int64)
    for number, name in enumerate(_KEYS):
        if name not in table.column_names or not len(table):
            continue
        values = to_numpy(table[name], (1,))
        if values.dtype.kind == "f":
            wrong = ~(np.abs(values) < 2**53) | (values % 1 != 0)
        else:
            wrong = np.full(len(values), values.dtype.kind not in "iu")
        if np.any(wrong):
            row = int(np.argmax(wrong))
            raise ColumnError(f"{name} should hold whole numbers; row {row} is {values[row]!s:.40}")
        keys[number] = values
    return keys


def _data_files(root: Path, info: Info, listing: Listing, problems: list[Problem]) -> list[tuple[str, int | None]]:
    """Data files, and for v2 the one episode that each holds."""
    present = set(find_files(root, glob_pattern(info.data_path)))
    if info.is_v3:
        if not present:
            problems.append(Problem(f"no data file matches {info.data_path}"))
        return [(relative, None) for relative in sorted(present)]

    def file_of(episode: int) -> str:
        return fill(info.data_path, chunk=episode // info.chunks_size, file=episode)

    expected = {file_of(episode): episode for episode in sorted(listing.episodes)}
    for relative, episode in expected.items():
        if relative not in present:
            problems.append(Problem("is missing", file=relative, episode=episode))
    if strays := sorted(present - set(expected)):
        unlisted = {file_of(episode): episode for episode in range(min(info.total_episodes or 0, 1_000_000))}
        for stray in strays:
            if stray in unlisted:
                message = "is not listed in meta/episodes.jsonl, though total_episodes counts it"
                problems.append(Problem(message, file=stray, episode=unlisted[stray]))
            else:
                problems.append(Problem("belongs to no listed episode; left out", severity="note", file=stray))
    return [(relative, episode) for relative, episode in expected.items() if relative in present]


def _column_types(
    files: Sequence[str], schemas: Sequence[pa.Schema], problems: list[Problem]
) -> dict[str, list[pa.DataType | None]]:
    by_file = [dict(zip(schema.names, schema.types, strict=True)) for schema in schemas]
    names = dict.fromkeys(name for kinds in by_file for name in kinds)
    for name in names:
        for file, kinds in zip(files, by_file, strict=True):
            if name not in kinds:
                problems.append(Problem("is not in this file, though it is in others", "note", file=file, column=name))
    return {name: [kinds.get(name) for kinds in by_file] for name in names}


def _check_frames(frame_index: np.ndarray, episode_ids: np.ndarray, starts: np.ndarray) -> Iterator[Problem]:
    """Frames must count 0, 1, 2, … (where they are numbered at all), or on from another number."""
    first = np.maximum(frame_index[starts[:-1]], 0)
    for number in episode_ids[first > 0].tolist():
        yield Problem("frames do not count from 0; their order is what counts", "note", number, column="frame_index")
    expected = np.arange(len(frame_index)) - np.repeat(starts[:-1] - first, np.diff(starts))
    wrong = np.flatnonzero((frame_index != expected) & (frame_index != _ABSENT))
    for episode, rows in by_episode(starts, wrong):
        message = f"frames should count by one; {expected[rows[0]]} is missing or there twice"
        value = str(frame_index[rows[0]])
        yield Problem(message, episode=int(episode_ids[episode]), column="frame_index", value=value)


def _attribute_damage(info: Info, listing: Listing, damaged: Mapping[str, str], found: set[int]) -> Iterator[Problem]:
    """Attribute unreadable files of v3 to the episodes without rows that are listed there."""
    claims: dict[str, list[int]] = {relative: [] for relative in damaged}
    for number in sorted(set(listing.episodes) - found) if damaged else ():
        file = _listed_file(info, listing, number)
        claims[file if file in claims else next(iter(damaged))].append(number)
    for relative, message in damaged.items():
        yield from (Problem(message, file=relative, episode=number) for number in claims[relative])
        if not claims[relative]:
            message = f"{message}; no listed episode is in it"
            yield Problem(message, "note" if found else "problem", file=relative)


def _listed_file(info: Info, listing: Listing, episode: int) -> str | None:
    listed = listing.episodes.get(episode)
    return fill(info.data_path, *listed.data_file) if info.is_v3 and listed and listed.data_file else None


def _compare_with_listing(
    info: Info, listing: Listing, found: Mapping[int, int], problems: Sequence[Problem]
) -> Iterator[Problem]:
    """Differences between the frames that were found of each episode and what meta/ lists."""
    blocking = [problem for problem in problems if problem.severity == "problem"]
    named = {problem.episode for problem in blocking}
    absent = [index for index in sorted(listing.episodes) if index not in found and index not in named]
    lost = [index for index in absent if listing.episodes[index].length != 0]
    yield from (Problem("is listed but has no frames in the data", episode=index) for index in lost)
    yield from (Problem("is empty; left out", "note", index) for index in absent if index not in lost)
    for index, count in found.items():
        if index not in listing.episodes:
            yield Problem("is in the data but not listed under meta/", episode=index)
        elif (claimed := listing.episodes[index].length) not in (None, count):
            yield Problem(f"is listed with {claimed} frames, the data has {count}", episode=index)
    if not (found or blocking or lost or any(problem.severity == "problem" for problem in listing.problems)):
        yield Problem("the dataset has no episodes")
    frames = sum(found.values())
    for key, claimed, actual in (
        ("total_episodes", info.total_episodes, len(found)),
        ("total_frames", info.total_frames, frames),
    ):
        if claimed not in (None, actual):
            yield Problem(f"{key} is {claimed}, the data has {actual}", severity="note", file=INFO_FILE)


def _compare_files(info: Info, listing: Listing, files: Mapping[int, str]) -> Iterator[Problem]:
    """v3 lists the data file of every episode, and LeRobot's own converter gets some of them wrong."""
    wrong = [episode for episode, file in files.items() if _listed_file(info, listing, episode) not in (None, file)]
    for episode in wrong[:1]:
        more = f" (and so for {len(wrong) - 1} more episodes)" if len(wrong) > 1 else ""
        claimed = _listed_file(info, listing, episode)
        message = f"data/file_index says that its rows are in {claimed}; they are read from where they are{more}"
        yield Problem(message, "note", episode, files[episode])


def _tasks(
    listing: Listing, task_index: np.ndarray, episode_ids: np.ndarray, starts: np.ndarray, problems: list[Problem]
) -> tuple[list[str], Int64[np.ndarray, " rows"]]:
    """Task strings, and which one each row has: by its task_index, or else the first its episode is listed with."""
    positions = {text: position for position, text in enumerate(dict.fromkeys(listing.tasks.values()))}
    numbers, inverse = np.unique(task_index, return_inverse=True)
    texts = [listing.tasks.get(number) for number in numbers.tolist()]
    task_of_row = np.array([-1 if text is None else positions[text] for text in texts], np.int64)[inverse]
    for episode, rows in by_episode(starts, np.flatnonzero(task_of_row == -1)):
        index = int(episode_ids[episode])
        if (named := task_index[rows[0]]) != _ABSENT:
            severity: Literal["problem", "note"] = "problem" if listing.tasks else "note"
            message = "refers to no task of meta/tasks"
            problems.append(Problem(message, severity, index, column="task_index", value=str(named)))
        listed = listing.episodes.get(index)
        text = listed.tasks[0] if listed and listed.tasks else ""
        task_of_row[rows] = positions.setdefault(text, len(positions))
    return list(positions), task_of_row
