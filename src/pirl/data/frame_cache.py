"""Decode once: a dataset's camera frames, resized to what the policy sees, kept on disk and recognized by content."""

import contextlib
import fcntl
import functools
import hashlib
import io
import json
import logging
import math
import mmap
import os
import re
import shutil
import sys
import threading
import time
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
from jaxtyping import Int, Int64, UInt8
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from pirl.data.images import resize_with_pad
from pirl.data.problems import BrokenDatasetError, Problem
from pirl.errors import ConfigError, DataError
from pirl.files import cache_directory, write_file
from pirl.files import writing as writing_into
from pirl.processes import usable_cores
from pirl.words import size

# Fewer frames than this are decoded sooner than threads are woken.
_THREADED_FRAMES = 8


def _aligned_empty(shape: tuple[int, ...]) -> UInt8[np.ndarray, "..."]:
    """A uint8 buffer on a cache line: large ones from np.empty start 16 bytes into a page, where copies are slower."""
    size = math.prod(shape)
    memory = np.empty(size + 63, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].reshape(shape)


class Frames(ABC):
    """The frames of one camera, uint8 [N, height, width, 3]; rows count through all episodes."""

    def __init__(self, file: int, shape: tuple[int, int, int, int]):
        self.shape = shape
        self._file = file
        self._closing = weakref.finalize(self, os.close, file)

    def gather(self, rows: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n h w 3"]:
        """Copies of these rows, in this order."""
        out = _aligned_empty((len(rows), *self.shape[1:]))
        if not len(rows):
            return out
        lowest, highest = int(rows.min()), int(rows.max())
        if lowest < 0 or highest >= self.shape[0]:
            raise IndexError(f"rows go from {lowest} to {highest}; there are {self.shape[0]} frames.")
        self._fill(out, rows)
        return out

    def release(self) -> None:  # noqa: B027 (encoded frames hold no memory)
        """Take the frames out of the resident memory; rows read again come back."""

    def close(self) -> None:
        """Give up the file."""
        self._closing()
        self._file = -1

    @abstractmethod
    def _fill(self, out: UInt8[np.ndarray, "n h w 3"], rows: Int[np.ndarray, " n"]) -> None: ...


class PlainFrames(Frames):
    """Copied out of a memory map in one call, which gives up the interpreter's lock once rather than for each frame."""

    def __init__(self, file: int, shape: tuple[int, int, int, int]):
        super().__init__(file, shape)
        self._map = mmap.mmap(file, math.prod(shape), prot=mmap.PROT_READ)
        self._pixels = np.frombuffer(self._map, np.uint8).reshape(shape)

    def _fill(self, out: UInt8[np.ndarray, "n h w 3"], rows: Int[np.ndarray, " n"]) -> None:
        # Rows not in memory are all asked for before the first is waited for; left to page faults they come one by one.
        size = math.prod(self.shape[1:])
        begins = rows.astype(np.int64) * size
        for begin, margin in zip(begins.tolist(), (begins % mmap.PAGESIZE).tolist(), strict=True):
            self._map.madvise(mmap.MADV_WILLNEED, begin - margin, size + margin)
        # Rows are known to be inside; any other mode would gather into a copy of `out` first.
        np.take(self._pixels, rows, axis=0, out=out, mode="clip")

    def release(self) -> None:
        """Take the frames out of the resident memory; rows read again come back."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Give up the file and the map; a gather under way in another thread still finishes."""
        super().close()
        self._pixels = self._pixels[:0].copy()
        with contextlib.suppress(BufferError):
            self._map.close()


class EncodedFrames(Frames):
    """Read and decoded one by one, in threads where there are many."""

    def __init__(self, file: int, shape: tuple[int, int, int, int], index: Int64[np.ndarray, "n 2"], workers: int):
        super().__init__(file, shape)
        self._index = index
        self._pool = ThreadPoolExecutor(workers, "decode-frames") if workers > 1 else None

    def _fill(self, out: UInt8[np.ndarray, "n h w 3"], rows: Int[np.ndarray, " n"]) -> None:
        if self._pool is None or len(rows) < _THREADED_FRAMES:
            for image, row in zip(out, rows.tolist(), strict=True):
                self._decode(image, row)
        else:
            list(self._pool.map(self._decode, out, rows.tolist()))

    def _decode(self, out: UInt8[np.ndarray, "h w 3"], row: int) -> None:
        offset, size = self._index[row].tolist()
        try:
            with Image.open(io.BytesIO(os.pread(self._file, size, offset))) as image:
                out[:] = image
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(
                f"frame {row} in the frame cache is damaged ({error}). Delete the cache; it is built again when needed."
            ) from error

    def close(self) -> None:
        """Give up the file and the threads."""
        if self._pool is not None:
            self._pool.shutdown()
        super().close()


Compression = Literal["none", "png", "jpeg"]
FRAMES_FILE, INDEX_FILE, FINISHED_FILE, ABOUT_FILE = "frames.bin", "index.bin", "finished.txt", "about.json"
FORMAT_VERSION = 1
# JPEG without colour subsampling. PNG by run lengths: as small as its default and more than twice as fast.
_ENCODERS: dict[str, dict[str, Any]] = {
    "png": {"compress_type": zlib.Z_RLE},
    "jpeg": {"quality": 95, "subsampling": 0},
}
# Encoded frames of an episode are written in blocks of this size, to lie together without filling the memory.
_BLOCK_BYTES = 1 << 24
# Offset and size, int64.
_INDEX_ROW_BYTES = 16


@dataclass(frozen=True, eq=False)
class StoreLayout:
    """What a store holds: the frames of all episodes in order."""

    lengths: Int64[np.ndarray, " episodes"]
    height: int
    width: int
    compression: Compression

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of all frames together."""
        return (int(self.lengths.sum()), self.height, self.width, 3)

    @property
    def frame_bytes(self) -> int:
        """Of one frame, not compressed."""
        return self.height * self.width * 3

    @functools.cached_property
    def starts(self) -> Int64[np.ndarray, " episodes"]:
        """Row of each episode's first frame."""
        return np.cumsum(self.lengths) - self.lengths


def writing(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Around whatever writes into the cache."""
    return writing_into("the frame cache", directory, "Set PIRL_CACHE to a directory that can be written and has room.")


def open_store(directory: Path, layout: StoreLayout, workers: int) -> Frames | None:
    """The frames of a complete store; None where there is none, or it is unfinished or damaged."""
    with contextlib.ExitStack() as stack:
        try:
            file = os.open(directory / FRAMES_FILE, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, file)
            # Looked at after the frames are open: one being replaced has been declared unfinished before.
            about = read_about(directory)
            index = np.fromfile(directory / INDEX_FILE, np.int64) if layout.compression != "none" else None
        except OSError:
            return None
        size = os.fstat(file).st_size
        if about.get("complete") is not True:
            return None
        if index is None:
            if size != math.prod(layout.shape):
                return None
            stack.pop_all()
            return PlainFrames(file, layout.shape)
        if index.size != 2 * layout.shape[0] or not _fits(index := index.reshape(-1, 2), size):
            return None
        stack.pop_all()
        return EncodedFrames(file, layout.shape, index, workers)


def read_about(directory: Path) -> dict[str, Any]:
    """The description of a store; empty where it is absent or damaged."""
    try:
        about = json.loads((directory / ABOUT_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def recorded_episodes(directory: Path, layout: StoreLayout) -> set[int]:
    """The episodes that are written; none unless all files are as the record says."""
    try:
        lines = (directory / FINISHED_FILE).read_bytes().splitlines(keepends=True)
        size = (directory / FRAMES_FILE).stat().st_size
        numbers = {int(line.split()[0]) for line in lines if _is_record(line)}
        finished = {episode for episode in numbers if episode < len(layout.lengths)}
        if layout.compression == "none":
            return finished if size == math.prod(layout.shape) else set()
        index = np.fromfile(directory / INDEX_FILE, np.int64).reshape(layout.shape[0], 2)
    except (OSError, ValueError):
        return set()
    starts, ends = layout.starts, layout.starts + layout.lengths
    intact = all(_fits(index[starts[episode] : ends[episode]], size) for episode in finished)
    return finished if intact else set()


class StoreWriter:
    """Writes a store, or what is missing of one. Episodes may be written from several threads at once."""

    def __init__(self, directory: Path, layout: StoreLayout, about: dict[str, Any]):
        self.directory, self.layout, self._about = directory, layout, about
        self._lock = threading.Lock()
        with writing(directory), contextlib.ExitStack() as files:
            self._describe(complete=False)
            self.finished = recorded_episodes(directory, layout)
            if not self.finished:
                for name in (FINISHED_FILE, FRAMES_FILE, INDEX_FILE):
                    (directory / name).unlink(missing_ok=True)
            # Written anew, so that what a kill left of a last record cannot run into the next.
            write_file(directory / FINISHED_FILE, b"".join(map(_record, sorted(self.finished))))

            def open_file(name: str, flags: int = 0) -> int:
                file = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o666)
                files.callback(os.close, file)
                return file

            self._frames = open_file(FRAMES_FILE)
            self._journal = open_file(FINISHED_FILE, os.O_APPEND)
            self._index = open_file(INDEX_FILE) if layout.compression != "none" else None
            if self._index is None:
                os.ftruncate(self._frames, math.prod(layout.shape))
            else:
                os.ftruncate(self._index, layout.shape[0] * _INDEX_ROW_BYTES)
            self._end = os.fstat(self._frames).st_size
            self._files = files.pop_all()

    def write(self, episode: int, frames: Iterator[UInt8[np.ndarray, "h w 3"]]) -> None:
        """Write one episode, and record it once its bytes are on the disk."""
        start = int(self.layout.starts[episode])
        if self._index is None:
            for row, frame in enumerate(frames, start):
                self._write(self._frames, np.ascontiguousarray(frame).data, row * self.layout.frame_bytes)
        else:
            index = np.asarray(self._append(frames), np.int64)
            self._write(self._index, index.data, start * _INDEX_ROW_BYTES)
        with writing(self.directory):
            os.fsync(self._frames)
            if self._index is not None:
                os.fsync(self._index)
            with self._lock:
                os.write(self._journal, _record(episode))
                self.finished.add(episode)

    def complete(self) -> None:
        """Declare the store complete; every episode has been written."""
        with writing(self.directory):
            try:
                there = os.path.samestat(os.stat(self.directory / FRAMES_FILE), os.fstat(self._frames))
            except FileNotFoundError:
                there = False
            if not there:
                raise DataError(f"the frame cache in {self.directory} was deleted while it was built. Run again.")
            self._describe(complete=True)

    def close(self) -> None:
        """Close the files; what is recorded stays."""
        self._files.close()

    def _append(self, frames: Iterator[UInt8[np.ndarray, "h w 3"]]) -> list[tuple[int, int]]:
        """Write encoded frames behind all others; offset and size of each."""
        index: list[tuple[int, int]] = []
        for block in _blocks(_encode(frame, self.layout.compression) for frame in frames):
            content = b"".join(block)
            with self._lock:
                offset, self._end = self._end, self._end + len(content)
            self._write(self._frames, content, offset)
            for encoded in block:
                index.append((offset, len(encoded)))
                offset += len(encoded)
        return index

    def _describe(self, *, complete: bool) -> None:
        write_file(self.directory / ABOUT_FILE, json.dumps(self._about | {"complete": complete}, indent=1))

    def _write(self, file: int, content: bytes | memoryview, offset: int) -> None:
        view = memoryview(content).cast("B") if len(content) else memoryview(b"")
        with writing(self.directory):
            while view:
                written = os.pwrite(file, view, offset)
                view, offset = view[written:], offset + written


def _encode(frame: UInt8[np.ndarray, "h w 3"], compression: Compression) -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(frame).save(encoded, compression, **_ENCODERS[compression])
    return encoded.getvalue()


def _blocks(pieces: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Group pieces until a group is large enough to be written."""
    block: list[bytes] = []
    size = 0
    for piece in pieces:
        block.append(piece)
        size += len(piece)
        if size >= _BLOCK_BYTES:
            yield block
            block, size = [], 0
    yield block


def _fits(index: Int64[np.ndarray, "n 2"], size: int) -> bool:
    """Whether all frames lie inside a file of this size; what was never written has size 0."""
    return bool((index[:, 0] >= 0).all() and (index[:, 1] > 0).all() and (index.sum(axis=1) <= size).all())


def _record(episode: int) -> bytes:
    return b"%d %08x\n" % (episode, zlib.crc32(b"%d" % episode))


def _is_record(line: bytes) -> bool:
    """Whether a line was written whole."""
    episode = line.split(b" ")[0]
    return episode.isdigit() and line == _record(int(episode))


logger = logging.getLogger(__name__)
LOCK_FILE = "lock"
KEY_DIGITS = 32
_ENTRY_NAME = re.compile(rf"[A-Za-z0-9_-]*-[0-9a-f]{{{KEY_DIGITS}}}")


@dataclass(frozen=True)
class CachedFrames:
    """One camera's entry in the cache."""

    directory: Path
    dataset: str
    camera: str
    frames: int
    height: int
    width: int
    compression: str
    complete: bool
    bytes_on_disk: int
    last_used: datetime


def frames_directory(chosen: Path | None = None) -> Path:
    """Where frames are cached."""
    return chosen or cache_directory() / "frames"


def entry_directory(directory: Path, camera: str, key: str) -> Path:
    """Where an entry lies. A camera's name comes from the dataset, so only harmless characters of it are used."""
    return directory / f"{re.sub('[^A-Za-z0-9_-]', '_', camera)[:64]}-{key[:KEY_DIGITS]}"


@contextlib.contextmanager
def locked(directory: Path, *, wait: bool = True) -> Iterator[None]:
    """Be the only process that writes an entry. The system gives the lock up when a process ends, however it ends."""
    while True:
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            file = (directory / LOCK_FILE).open("wb")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise DataError(f"{directory} is being built by another process; stop that one first.") from None
                logger.warning("another process is building the frame cache in %s; waiting for it", directory)
                fcntl.flock(file, fcntl.LOCK_EX)
            if _still_there(file.fileno(), directory / LOCK_FILE):
                yield
                return


def _still_there(file: int, path: Path) -> bool:
    """An entry deleted while we waited took its lock along: others do not see the one we hold."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def list_frame_caches(directory: Path | None = None) -> list[CachedFrames]:
    """What is in the cache, used longest ago first."""
    directory = frames_directory(directory)
    entries = []
    for entry in directory.iterdir() if directory.is_dir() else ():
        # Entries may be deleted by others at any time.
        with contextlib.suppress(OSError):
            if _ENTRY_NAME.fullmatch(entry.name) and not entry.is_symlink() and (entry / FRAMES_FILE).exists():
                entries.append(_describe(entry))
    return sorted(entries, key=lambda entry: entry.last_used)


def delete_frame_cache(cache: CachedFrames) -> None:
    """Delete an entry. Readers that have it open keep it until they close; one being built is refused."""
    if not cache.directory.exists():
        return
    with locked(cache.directory, wait=False), writing(cache.directory):
        # First of all, so that what remains of an interrupted deletion is not taken for an entry.
        (cache.directory / ABOUT_FILE).unlink(missing_ok=True)
        shutil.rmtree(cache.directory)


def _describe(entry: Path) -> CachedFrames:
    about = read_about(entry)
    described = entry / ABOUT_FILE
    used = (described if described.exists() else entry).stat().st_mtime
    frames, height, width = (
        number if isinstance(number := about.get(key), int) else 0 for key in ("frames", "height", "width")
    )
    return CachedFrames(
        directory=entry,
        dataset=str(about.get("dataset", "unknown")),
        camera=str(about.get("camera", "unknown")),
        frames=frames,
        height=height,
        width=width,
        compression=str(about.get("compression", "unknown")),
        complete=about.get("complete") is True,
        bytes_on_disk=sum(file.stat().st_blocks * 512 for file in entry.iterdir()),
        last_used=datetime.fromtimestamp(used, UTC),
    )


logger = logging.getLogger(__name__)
# A file written in the same tick of the file system's clock as it was read may change without showing it.
_SETTLED_NANOSECONDS = 2 * 10**9
# Size, time of modification, time of change, inode.
State = tuple[int, int, int, int]


def file_digests(files: Sequence[Path], memory: Path) -> list[str]:
    """SHA-256 of each file. `memory` is a file of known digests; a damaged or unwritable one costs only time."""
    known = _read_memory(memory)
    names = [str(file.absolute()) for file in files]
    states = {name: _state(file) for name, file in zip(names, files, strict=True)}
    unknown = [name for name, state in states.items() if name not in known or known[name][0] != state]
    if unknown:
        logger.info("reading %d files to recognise them by their content; this is done once", len(unknown))
        settled = time.time_ns() - _SETTLED_NANOSECONDS
        with ThreadPoolExecutor() as pool:
            digests = dict(zip(unknown, pool.map(_digest, map(Path, unknown)), strict=True))
        known = {name: entry for name, entry in known.items() if Path(name).exists()}
        known |= {name: (states[name], digest) for name, digest in digests.items()}
        _write_memory(memory, {name: entry for name, entry in known.items() if _last_change(entry[0]) < settled})
    return [known[name][1] for name in names]


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}.") from error


def _state(file: Path) -> State:
    """Changes whenever the file is written, replaced or renamed."""
    try:
        status = file.stat()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}.") from error
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _last_change(state: State) -> int:
    return max(state[1], state[2])


def _read_memory(memory: Path) -> dict[str, tuple[State, str]]:
    try:
        entries = json.loads(memory.read_bytes())
        return {
            name: ((int(size), int(modified), int(changed), int(inode)), str(digest))
            for name, ((size, modified, changed, inode), digest) in entries.items()
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write_memory(memory: Path, entries: dict[str, tuple[State, str]]) -> None:
    try:
        write_file(memory, json.dumps(entries, indent=0))
    except OSError as error:
        logger.debug("digests are not remembered in %s: %s", memory, error)


logger = logging.getLogger(__name__)
DIGESTS_FILE = "digests.json"
# Of the plain size, as seen on robot cameras; only an estimate is possible before encoding.
_EXPECTED_RATIO: dict[Compression, float] = {"none": 1.0, "png": 0.6, "jpeg": 0.25}
_SECONDS_BETWEEN_LOG_LINES = 30.0


@runtime_checkable
class FrameSource(Protocol):
    """A whole dataset, seen as the frames of its cameras. Whoever trains on some episodes selects rows of the cache."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def lengths(self) -> Int64[np.ndarray, " episodes"]:
        """Frames per episode."""

    @property
    def episode_ids(self) -> Int64[np.ndarray, " episodes"]:
        """The number of each episode, for messages: it need not be its position."""

    def decode(self, camera: str, episode: int) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
        """The frames of one episode, named by its position 0 … E-1, in order; called from several threads."""

    def source_files(self, camera: str) -> Sequence[Path]:
        """The files that frames of this camera come from, in an order that moving the dataset keeps."""

    def places(self, camera: str) -> Sequence[tuple[int, ...]]:
        """Where in these files each episode lies, as numbers: read differently, the same files give other frames."""


@dataclass(frozen=True)
class FrameCacheConfig:
    """How frames are kept: their size, and whether to save disk ("png" is lossless, "jpeg" nearly so) or time."""

    height: int
    width: int
    compression: Compression = "none"
    # Where caches lie; by default in pirl's cache directory.
    directory: Path | None = None
    # Threads that decode; by default one for each processor.
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise ConfigError(f"frames of {self.height} x {self.width} pixels cannot be kept; give a positive size.")
        if self.compression not in get_args(Compression):
            raise ConfigError(f"compression {self.compression!r} is not known; use one of {get_args(Compression)}.")
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"workers is {self.workers}; at least one thread has to decode.")


@dataclass(frozen=True)
class _Entry:
    camera: str
    directory: Path
    layout: StoreLayout


def open_frames(
    source: FrameSource,
    camera_names: Sequence[str],
    config: FrameCacheConfig,
    *,
    progress: bool = True,
    find_all_damage: bool = False,
) -> dict[str, Frames]:
    """The frames of these cameras; what is not in the cache yet is decoded first, by one process for all.

    A build that is interrupted in any way is continued by the next call. The cache may be deleted at any time. Episodes
    that cannot be decoded raise a BrokenDatasetError: the first, or all of them once the others are decoded.
    """
    entries = [_entry(source, camera, config) for camera in dict.fromkeys(camera_names)]
    workers = config.workers or usable_cores()
    frames: dict[str, Frames] = {}

    def open_complete() -> list[_Entry]:
        """Open what is there, and tell what is not."""
        for entry in entries:
            if entry.camera not in frames and (opened := open_store(entry.directory, entry.layout, workers)):
                frames[entry.camera] = opened
        return [entry for entry in entries if entry.camera not in frames]

    if missing := open_complete():
        with contextlib.ExitStack() as locks:
            # In the same order everywhere, so that no two processes wait for each other.
            for entry in sorted(missing, key=lambda entry: entry.directory):
                locks.enter_context(locked(entry.directory))
            if missing := open_complete():
                _build(source, missing, config, workers, progress, find_all_damage)
                if open_complete():
                    raise DataError(f"the frame cache of {source.name} was deleted while it was built. Run again.")
    for entry in entries:
        # The time of last use. A cache that can only be read is used without leaving a trace.
        with contextlib.suppress(OSError):
            os.utime(entry.directory / ABOUT_FILE)
    return {entry.camera: frames[entry.camera] for entry in entries}


def _entry(source: FrameSource, camera: str, config: FrameCacheConfig) -> _Entry:
    layout = StoreLayout(source.lengths, config.height, config.width, config.compression)
    if not layout.shape[0]:
        raise DataError(f"{source.name} has no frames.")
    directory = frames_directory(config.directory)
    # The camera takes part: cameras kept as images share their files.
    content = {
        "format": FORMAT_VERSION,
        "camera": camera,
        "files": file_digests(source.source_files(camera), directory / DIGESTS_FILE),
        "places": [list(place) for place in source.places(camera)],
        "lengths": layout.lengths.tolist(),
        "size": [layout.height, layout.width],
        "compression": layout.compression,
    }
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return _Entry(camera, entry_directory(directory, camera, key), layout)


def _build(
    source: FrameSource,
    entries: list[_Entry],
    config: FrameCacheConfig,
    workers: int,
    progress: bool,
    find_all_damage: bool,
) -> None:
    """Write what is missing of these entries, and declare them complete."""
    total = sum(entry.layout.shape[0] for entry in entries)
    recorded = [recorded_episodes(entry.directory, entry.layout) for entry in entries]
    done = sum(int(source.lengths[episode]) for episodes in recorded for episode in episodes)
    announcement = _check_space(source.name, entries, config, total, done)
    if progress:
        print(announcement, file=sys.stderr)
    else:
        logger.info("%s", announcement)
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        writers = [StoreWriter(entry.directory, entry.layout, _about(source, entry)) for entry in entries]
        for writer in writers:
            stack.callback(writer.close)
        advance = stack.enter_context(_progress(source.name, total, done, progress))
        pool = stack.enter_context(ThreadPoolExecutor(workers, "frame-cache"))
        try:
            futures = {
                pool.submit(writer.write, episode, _resized(source, entry, episode, stop, advance)): (entry, episode)
                for entry, writer in zip(entries, writers, strict=True)
                for episode in range(len(entry.layout.lengths))
                if episode not in writer.finished
            }
            damaged = []
            for future in as_completed(futures):
                try:
                    future.result()
                except FramesError as error:
                    entry, episode = futures[future]
                    number = int(source.episode_ids[episode])
                    damaged.append(Problem(str(error), episode=number, column=entry.camera))
                    if not find_all_damage:
                        break
            if damaged:
                raise BrokenDatasetError(source.name, damaged, "has frames that cannot be decoded")
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
        for entry, writer in zip(entries, writers, strict=True):
            if _entry(source, entry.camera, config).directory != entry.directory:
                shutil.rmtree(entry.directory, ignore_errors=True)
                raise DataError(f"{source.name} changed while camera {entry.camera!r} was decoded. Run again.")
            writer.complete()


def _about(source: FrameSource, entry: _Entry) -> dict[str, str | int]:
    frames, height, width, _ = entry.layout.shape
    shape = {"frames": frames, "height": height, "width": width}
    return {"dataset": source.name, "camera": entry.camera, **shape, "compression": entry.layout.compression}


def _resized(
    source: FrameSource, entry: _Entry, episode: int, stop: threading.Event, advance: Callable[[], None]
) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
    """The frames of one episode in the size of the cache; fails if they are not as many as the episode has."""
    expected, count = int(entry.layout.lengths[episode]), 0
    frames = source.decode(entry.camera, episode)
    while True:
        try:
            frame = next(frames, None)
            if frame is None:
                break
            resized = resize_with_pad(frame, entry.layout.height, entry.layout.width) if count < expected else None
        except DataError as error:
            raise FramesError(f"frame {count}: {error}") from error
        if stop.is_set():
            raise CancelledError
        count += 1
        if resized is not None:
            yield resized
            advance()
    if count != expected:
        raise FramesError(f"expected {expected} frames, got {count}: the recording is damaged or its metadata is wrong")


class FramesError(DataError):
    """Frames of an episode that cannot be decoded."""


def _check_space(name: str, entries: list[_Entry], config: FrameCacheConfig, total: int, done: int) -> str:
    """What will be written, in words; refuses what cannot fit."""
    directory = frames_directory(config.directory)
    with writing(directory):
        free = shutil.disk_usage(directory).free
    frame_bytes = entries[0].layout.frame_bytes * _EXPECTED_RATIO[config.compression]
    what = (
        f"frame cache for {name}: {len(entries)} camera{'s' if len(entries) > 1 else ''} x "
        f"{entries[0].layout.shape[0]:,} frames at {config.height}x{config.width} = "
        f"{'' if config.compression == 'none' else 'about '}{size(total * frame_bytes)} in {directory} "
        f"({size(free)} free{f', {size(done * frame_bytes)} already written' if done else ''})"
    )
    if (total - done) * frame_bytes > free:
        other = 'compression="jpeg" (about a quarter), ' if config.compression != "jpeg" else ""
        raise DataError(
            f"the disk is too small for the {what}. Use {other}a smaller size, or set PIRL_CACHE to a directory on "
            "another disk."
        )
    return what


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:,.0f} frames/s")


@contextlib.contextmanager
def _progress(name: str, total: int, done: int, show: bool) -> Iterator[Callable[[], None]]:
    """What to call after each frame: moves a bar on a terminal, logs a line now and then elsewhere."""
    if show and sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(f"decoding {name}", total=total, completed=done)
            yield lambda: bar.advance(task)
        return
    lock, begin = threading.Lock(), time.monotonic()
    count, logged = 0, begin

    def advance() -> None:
        nonlocal count, logged
        with lock:
            count += 1
            now = time.monotonic()
            if show and now - logged >= _SECONDS_BETWEEN_LOG_LINES:
                logged, rate = now, count / (now - begin)
                left = (total - done - count) / rate
                logger.info("%s: %d of %d frames, %.0f frames/s, %.0f s left", name, done + count, total, rate, left)

    yield advance
