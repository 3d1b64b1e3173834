"""The episodes and tasks a LeRobot dataset lists under `meta/`: claims, to be compared with the data itself."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pirl.data.lerobot.columns import unique_names
from pirl.data.lerobot.layout import Info, find_files, first_line, pointer_advice, resolve_inside
from pirl.data.problems import Problem


@dataclass(frozen=True)
class VideoPlace:
    """Where v3 metadata says an episode's frames begin: file numbers, and seconds inside that file."""

    chunk: int
    file: int
    start_s: float


@dataclass(frozen=True)
class ListedEpisode:
    """One episode as listed; `data_file` numbers v3's chunk and file, `extra` keeps keys LeRobot does not know."""

    index: int
    length: int | None
    tasks: tuple[str, ...]
    videos: dict[str, VideoPlace] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    data_file: tuple[int, int] | None = None


@dataclass
class Listing:
    """Everything listed, and what was wrong with the lists."""

    episodes: dict[int, ListedEpisode] = field(default_factory=dict)
    tasks: dict[int, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_listing(root: Path, info: Info) -> Listing:
    """Read meta/ of any version."""
    listing = Listing()
    _read_tasks(root, info, listing)
    rows = _v3_rows(root, listing) if info.is_v3 else _jsonl(root, "meta/episodes.jsonl", listing)
    for file, row in rows:
        index: Any = row.get("episode_index")
        length, tasks = row.get("length"), row.get("tasks")
        if not _is_count(index) or index in listing.episodes:
            said = "is listed twice" if _is_count(index) else "has no valid episode_index"
            listing.problems.append(Problem(f"an episode {said}", file=file, value=f"{index!r:.60}"))
            continue
        if not _is_count(length):
            listing.problems.append(Problem("length is not a count", episode=index, file=file, value=f"{length!r:.60}"))
            length = None
        texts = tuple(task for task in tasks if isinstance(task, str)) if isinstance(tasks, list) else ()
        videos = _video_places(row, info, index, file, listing)
        known = ("episode_index", "length", "tasks", "dataset_from_index", "dataset_to_index")
        extra = {key: value for key, value in row.items() if key not in known and "/" not in key}
        chunk, number = row.get("data/chunk_index"), row.get("data/file_index")
        data_file: Any = (chunk, number) if _is_count(chunk) and _is_count(number) else None
        listing.episodes[index] = ListedEpisode(index, length, texts, videos, extra, data_file)
    return listing


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40


def _video_places(row: dict[str, Any], info: Info, episode: int, file: str, listing: Listing) -> dict[str, VideoPlace]:
    places = {}
    for camera in info.cameras:
        keys = [f"videos/{camera}/{key}" for key in ("chunk_index", "file_index", "from_timestamp")]
        chunk, number, start = (row.get(key) for key in keys)
        if chunk is None and number is None and start is None:
            continue
        sound = [_is_count(chunk), _is_count(number), isinstance(start, int | float) and 0 <= start < 1e9]
        if all(sound):
            places[camera] = VideoPlace(chunk, number, float(start))  # type: ignore[arg-type]
            continue
        wrong = keys[sound.index(False)]
        value = f"{row.get(wrong)!r:.60}"
        listing.problems.append(Problem("does not place the video", "problem", episode, file, wrong, value))
    return places


def _read_tasks(root: Path, info: Info, listing: Listing) -> None:
    if info.is_v3:
        table = _read_table(root, "meta/tasks.parquet", listing)
        if table is None:
            return
        # The string was the index of a pandas frame: its column is called `task` or `__index_level_0__`.
        texts = [name for name in table.column_names if name != "task_index"]
        if "task_index" not in table.column_names or not texts:
            listing.problems.append(Problem("has no task_index or no task strings", file="meta/tasks.parquet"))
            return
        name = next((usual for usual in ("task", "__index_level_0__") if usual in texts), texts[0])
        pairs = list(zip(table["task_index"].to_pylist(), table[name].to_pylist(), strict=True))
        file = "meta/tasks.parquet"
    else:
        file = "meta/tasks.jsonl"
        pairs = [(row.get("task_index"), row.get("task")) for _, row in _jsonl(root, file, listing)]
    for index, text in pairs:
        if _is_count(index) and isinstance(text, str) and index not in listing.tasks:
            listing.tasks[index] = text
        else:
            listing.problems.append(
                Problem("a task needs an index of its own and a string", file=file, value=f"{index!r}: {text!r:.60}")
            )


def _jsonl(root: Path, relative: str, listing: Listing) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        # Not splitlines: it would also split at characters that a task may contain.
        lines = resolve_inside(root, relative).read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        listing.problems.append(Problem(pointer_advice(root / relative) or "is missing", file=relative))
        return
    except (OSError, ValueError) as error:
        listing.problems.append(Problem(f"cannot be read: {error}", file=relative))
        return
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            if advice := pointer_advice(root / relative):
                listing.problems.append(Problem(advice, file=relative))
                return
            listing.problems.append(Problem(f"line {number} is broken: {error}", file=relative, value=f"{line!r:.60}"))
            continue
        yield relative, row


def _v3_rows(root: Path, listing: Listing) -> Iterator[tuple[str, dict[str, Any]]]:
    files = find_files(root, "meta/episodes/*/*.parquet")
    if not files:
        listing.problems.append(Problem("holds no parquet file that lists the episodes", file="meta/episodes"))
    for relative in files:
        # Statistics are skipped: their element types vary from writer to writer, and they are recomputed anyway.
        table = _read_table(root, relative, listing, skip="stats/")
        if table is not None:
            yield from ((relative, row) for row in table.to_pylist())


def _read_table(root: Path, relative: str, listing: Listing, skip: str | None = None) -> pa.Table | None:
    try:
        with pq.ParquetFile(resolve_inside(root, relative)) as file:
            names = unique_names(file.schema_arrow)
            return file.read([name for name in names if skip is None or not name.startswith(skip)])
    except FileNotFoundError:
        listing.problems.append(Problem(pointer_advice(root / relative) or "is missing", file=relative))
    except (OSError, ValueError, pa.ArrowException) as error:
        message = pointer_advice(root / relative) or f"cannot be read: {first_line(error)}"
        listing.problems.append(Problem(message, file=relative))
    return None
