"""The LeRobot format on disk: `meta/info.json`, its path templates, and the lists of episodes and tasks."""

import glob
import json
import os
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeGuard

import pyarrow as pa
import pyarrow.parquet as pq

from pirl.data.problems import BrokenDatasetError, Problem
from pirl.errors import DataError

INFO_FILE = "meta/info.json"
VERSIONS = ("v2.0", "v2.1", "v3.0")
# Added to every dataset by LeRobot; where they are absent they are rebuilt from what is there.
DEFAULT_COLUMNS = ("timestamp", "frame_index", "episode_index", "index", "task_index")
# Where LeRobot puts data and videos.
DEFAULT_PATHS = {
    "v2": (
        "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    ),
    "v3": (
        "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    ),
}
CAMERA_DTYPES = ("image", "video")
_TEMPLATE_FIELDS = {"episode_chunk", "episode_index", "chunk_index", "file_index", "video_key"}
_MOST_AXES, _LARGEST_AXIS = 5, 100_000


@dataclass(frozen=True)
class Feature:
    """One column, or one camera, as info.json declares it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    names: Any = None

    @property
    def is_camera(self) -> bool:
        return self.dtype in CAMERA_DTYPES

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Declared height and width, whichever order the axes have; the files decide."""
        if not self.is_camera or len(self.shape) != 3:
            return None
        names = [str(name)[:1].lower() for name in self.names] if isinstance(self.names, list) else []
        if len(names) == 3 and names.count("h") == names.count("w") == 1:
            return self.shape[names.index("h")], self.shape[names.index("w")]
        channels_first = self.shape[0] <= 4 < self.shape[2]
        return self.shape[1:] if channels_first else self.shape[:2]


@dataclass(frozen=True)
class Info:
    """What info.json says. Counts in it are claims, to be compared with the files."""

    version: str
    fps: float
    features: Mapping[str, Feature]
    data_path: str
    video_path: str
    chunks_size: int
    robot_type: str | None
    total_episodes: int | None
    total_frames: int | None

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(name for name, feature in self.features.items() if feature.is_camera)

    @property
    def is_v3(self) -> bool:
        return self.version == "v3.0"


def read_info(root: Path) -> Info:
    """Read and check info.json; everything wrong with it is reported together."""
    content = _read_info_file(root)
    problems: list[Problem] = []

    def checked(key: str, is_valid: bool, wanted: str, otherwise: Any) -> Any:
        if is_valid:
            return content.get(key)
        problems.append(Problem(f"{key} should be {wanted}", file=INFO_FILE, value=f"{content.get(key)!r:.80}"))
        return otherwise

    remedy = "older data: convert it with LeRobot's own tools first"
    is_known = content.get("codebase_version") in VERSIONS
    version = checked("codebase_version", is_known, f"one of {', '.join(VERSIONS)} ({remedy})", "v2.1")
    fps = content.get("fps")
    is_rate = isinstance(fps, int | float) and not isinstance(fps, bool) and 0 < fps <= 100_000
    fps = checked("fps", is_rate, "a positive number of frames per second", 1.0)
    counts = {}
    for key, least in (("total_episodes", 0), ("total_frames", 0), ("chunks_size", 1)):
        value = content.get(key)
        counts[key] = checked(key, value is None or (is_count(value) and value >= least), "a count", None)
    declared = content.get("features")
    is_object = isinstance(declared, dict) and bool(declared)
    declared = checked("features", is_object, "an object that names the columns and cameras", {})
    features: dict[str, Feature] = {}
    for name, entry in declared.items():
        if (feature := _read_feature(name, entry)) is not None:
            features[name] = feature
        else:
            message = f"feature {name!r:.80} should be an object with dtype and shape, and its name without / or .."
            problems.append(Problem(message, file=INFO_FILE, value=f"{entry!r:.80}"))
    videos = [name for name, feature in features.items() if feature.dtype == "video"]
    paths = {}
    for key, default in zip(("data_path", "video_path"), DEFAULT_PATHS[version[:2]], strict=True):
        paths[key] = template = content.get(key) or default
        complaint = _check_template(template)
        if complaint is None and key == "video_path" and "{video_key}" not in template and len(videos) > 1:
            complaint = f"gives {' and '.join(videos)} the same file"
        if complaint:
            problems.append(Problem(f"{key} {complaint}", file=INFO_FILE, value=f"{template!r:.120}"))
    if problems:
        raise BrokenDatasetError(str(root), problems)
    robot_type = content.get("robot_type")
    return Info(
        version=version,
        fps=float(fps),
        features=features,
        **paths,
        chunks_size=counts["chunks_size"] or 1000,
        robot_type=robot_type if isinstance(robot_type, str) else None,
        total_episodes=counts["total_episodes"],
        total_frames=counts["total_frames"],
    )


def _read_info_file(root: Path) -> dict[str, Any]:
    file = root / INFO_FILE
    if not root.is_dir():
        raise BrokenDatasetError(str(root), [Problem(f"{root} is not a directory")])
    if not file.is_file():
        inside = [path.parents[1].name for path in sorted(root.glob(f"*/{INFO_FILE}"))]
        several = f", but a directory of {len(inside)}, such as {root / inside[0]}" if inside else ""
        problem = Problem(f"is missing: this is not a LeRobot dataset{several}", file=INFO_FILE)
        raise BrokenDatasetError(str(root), [problem])
    try:
        resolve_inside(root, INFO_FILE)
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it should hold an object")
    except (OSError, ValueError, RecursionError) as error:
        message = pointer_advice(file) or f"cannot be read: {error}"
        raise BrokenDatasetError(str(root), [Problem(message, file=INFO_FILE)]) from error
    return content


def is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40


def _read_feature(name: str, entry: Any) -> Feature | None:
    if not isinstance(entry, dict) or not name or any(part in name for part in ("/", "\\", "..", "\0")):
        return None
    dtype, shape = entry.get("dtype"), entry.get("shape", [1])
    if not isinstance(dtype, str) or not isinstance(shape, list) or len(shape) > _MOST_AXES:
        return None
    if not all(is_count(size) and size <= _LARGEST_AXIS for size in shape):
        return None
    return Feature(name, dtype, tuple(shape), entry.get("names"))


def _check_template(template: Any) -> str | None:
    """Why a path template is refused, or None."""
    if not isinstance(template, str) or not template or len(template) > 500:
        return "should be a path template"
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        return f"is not a path template: {error}"
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if name not in _TEMPLATE_FIELDS:
            return f"has a field {{{name}}}; known are {', '.join(sorted(_TEMPLATE_FIELDS))}"
        if conversion or not re.fullmatch(r"(0?\d?d?)?", spec or "") or (name == "video_key" and spec):
            return f"has a format {{{name}:{spec}}} that is not a plain number format"
    literal = "".join(text for text, *_ in parts)
    if template.startswith(("/", "\\", "~")) or ".." in Path(template).parts or "\0" in literal:
        return "leaves the dataset directory"
    if template.endswith(("/", "/.")) or not Path(template).name:
        return "names no file"
    return None


def fill(template: str, chunk: int, file: int, camera: str = "") -> str:
    """A path from a (checked) template. v2 counts files by episode; hand-made data mixes the names of both versions."""
    numbers = {"episode_chunk": chunk, "chunk_index": chunk, "episode_index": file, "file_index": file}
    return template.format(video_key=camera, **numbers)


def glob_pattern(template: str) -> str:
    """A glob that finds every file a template can name."""
    parts = string.Formatter().parse(template)
    return "".join(glob.escape(text) + ("*" if field is not None else "") for text, field, *_ in parts)


def find_files(root: Path, pattern: str) -> list[str]:
    """Files below root by a glob, in order; without the hidden ones that a Mac leaves beside every file it copies."""
    return sorted(path.relative_to(root).as_posix() for path in root.glob(pattern) if not path.name.startswith("."))


def resolve_inside(root: Path, relative: str, *, links: bool = False) -> Path:
    """The file below root, present or not; ValueError if a link leads out of it, or if what is there is no file.

    With `links`, for data and videos, which are often kept on another disk, links may lead out; such files are read,
    never written. (The hub's cache links to the blobs beside it. Opening a pipe or a device could wait for ever.)
    """
    path = root / relative
    try:
        home, target = root.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"is a link that leads nowhere: {error}") from error
    blobs = home.parent.parent / "blobs"
    inside = target.is_relative_to(home) or (home.parent.name == "snapshots" and target.is_relative_to(blobs))
    if not inside and not links:
        raise ValueError("is a link that leaves the dataset directory: only links in data/ and videos/ are followed")
    if os.path.exists(target) and not os.path.isfile(target):
        raise ValueError("is not a regular file")
    return path


def pointer_advice(path: Path) -> str | None:
    """How to fetch a file whose place is held by a pointer of Git LFS or git-annex; None for other files."""
    try:
        if path.is_symlink() and not path.exists():
            start = os.fsencode(os.readlink(path))
        elif path.is_file():
            with path.open("rb") as file:
                start = file.read(200)
        else:  # a pipe would be waited for
            return None
    except (OSError, ValueError):
        return None
    if start.startswith(b"version https://git-lfs.github.com/spec/"):
        return "is a Git LFS pointer, its content was not fetched: run git lfs pull in the dataset's directory"
    if b"annex/objects/" in start and b"\0" not in start:
        return "is a git-annex pointer, its content was not fetched: run git annex get . in the dataset's directory"
    return None


def first_line(error: BaseException) -> str:
    """What an error says; Arrow's messages go on with its own stack, FFmpeg's begin with a number."""
    return getattr(error, "strerror", None) or next(iter(str(error).splitlines()), type(error).__name__)


class ParquetDamageError(DataError):
    """A file that is no readable parquet."""


def unique_names(schema: pa.Schema) -> list[str]:
    """The names of a file's columns, each of which must be there once."""
    names: list[str] = schema.names
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ParquetDamageError(f"has the column {twice[0]} twice")
    return names


@dataclass(frozen=True)
class VideoPosition:
    """Where v3 metadata say an episode's frames begin: file numbers, and seconds inside that file."""

    chunk: int
    file: int
    start_s: float


@dataclass(frozen=True)
class ListedEpisode:
    """One episode as listed; `data_file` numbers v3's chunk and file, `extra` keeps keys LeRobot does not know."""

    index: int
    length: int | None
    tasks: tuple[str, ...]
    videos: dict[str, VideoPosition] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    data_file: tuple[int, int] | None = None


@dataclass
class Listing:
    """The episodes and tasks that `meta/` lists: claims, to be compared with the data; and what is wrong with them."""

    episodes: dict[int, ListedEpisode] = field(default_factory=dict)
    tasks: dict[int, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def read_listing(root: Path, info: Info) -> Listing:
    listing = Listing()
    file = "meta/tasks.parquet" if info.is_v3 else "meta/tasks.jsonl"
    for row in _read_list(root, file, listing.problems):
        # In v3 the string was the index of a pandas frame: its column is called `task` or `__index_level_0__`.
        names = [*(name for name in ("task", "__index_level_0__") if name in row), *row]
        index, text = row.get("task_index"), next((row[name] for name in names if name != "task_index"), None)
        if is_count(index) and isinstance(text, str) and index not in listing.tasks:
            listing.tasks[index] = text
        else:
            value = f"{index!r}: {text!r:.60}"
            listing.problems.append(
                Problem("a task needs a task_index of its own and a string", file=file, value=value)
            )
    # Episodes may list their tasks themselves, or the robot have a default prompt.
    listing.problems = [replace(p, severity="note") if p.message == "is missing" else p for p in listing.problems]
    files = find_files(root, "meta/episodes/*/*.parquet") if info.is_v3 else ["meta/episodes.jsonl"]
    if not files:
        listing.problems.append(Problem("holds no parquet file that lists the episodes", file="meta/episodes"))
    for file in files:
        for row in _read_list(root, file, listing.problems):
            _add_episode(row, file, info, listing)
    return listing


def _add_episode(row: dict[str, Any], file: str, info: Info, listing: Listing) -> None:
    index, length, tasks = row.get("episode_index"), row.get("length"), row.get("tasks")
    if not is_count(index) or index in listing.episodes:
        said = "is listed twice" if is_count(index) else "has no valid episode_index"
        listing.problems.append(Problem(f"an episode {said}", file=file, value=f"{index!r:.60}"))
        return
    if not is_count(length):
        severity: Literal["problem", "note"] = "note" if length is None else "problem"
        listing.problems.append(Problem("length is not a count", severity, index, file, value=f"{length!r:.60}"))
        length = None
    videos = {}
    for camera in info.cameras:
        keys = [f"videos/{camera}/{key}" for key in ("chunk_index", "file_index", "from_timestamp")]
        chunk, number, start = (row.get(key) for key in keys)
        sound = [is_count(chunk), is_count(number), isinstance(start, int | float) and 0 <= start < 1e9]
        if all(sound):
            videos[camera] = VideoPosition(chunk, number, float(start))  # type: ignore[arg-type]
        elif (chunk, number, start) != (None, None, None):
            wrong = keys[sound.index(False)]
            value = f"{row.get(wrong)!r:.60}"
            listing.problems.append(Problem("does not place the video", "problem", index, file, wrong, value))
    data_file = row.get("data/chunk_index"), row.get("data/file_index")
    known = ("episode_index", "length", "tasks", "dataset_from_index", "dataset_to_index")
    listing.episodes[index] = ListedEpisode(
        index,
        length,
        tasks=tuple(task for task in tasks if isinstance(task, str)) if isinstance(tasks, list) else (),
        videos=videos,
        extra={key: value for key, value in row.items() if key not in known and "/" not in key},
        data_file=data_file if all(map(is_count, data_file)) else None,  # type: ignore[arg-type]
    )


def _read_list(root: Path, relative: str, problems: list[Problem]) -> list[dict[str, Any]]:
    """The rows of a parquet file or the objects of JSON lines, as far as they can be read."""
    rows = []
    try:
        path = resolve_inside(root, relative)
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                # Statistics are skipped: their element types vary from writer to writer, and pirl computes its own.
                names = [name for name in unique_names(file.schema_arrow) if not name.startswith("stats/")]
                return file.read(names).to_pylist()
        # Not splitlines: it would also split at characters that a task may contain.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError, pa.ArrowException) as error:
        message = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {first_line(error)}"
        problems.append(Problem(pointer_advice(root / relative) or message, file=relative))
        return []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
            rows.append(row)
        except (ValueError, RecursionError) as error:
            if advice := pointer_advice(root / relative):
                problems.append(Problem(advice, file=relative))
                break
            problems.append(Problem(f"line {number} is broken: {error}", file=relative, value=f"{line!r:.60}"))
    return rows
