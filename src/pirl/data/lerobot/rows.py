"""The rows of a LeRobot dataset, put in order by what their own columns say."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int64

from pirl.data.lerobot.columns import ColumnError, ParquetDamageError, read_table, to_numpy
from pirl.data.lerobot.layout import DEFAULT_COLUMNS, Info, fill, find_files, glob_pattern, resolve_inside
from pirl.data.lerobot.metadata import Listing
from pirl.data.problems import Problem

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
