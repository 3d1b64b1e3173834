"""One camera's frames on disk: recognized by content, written episode by episode, gathered by row.

A directory holds `frames.bin`: the frames one after another, as they are or encoded; `index.bin`: the offset and size of
each; and `about.json`, which lists the episodes that are written, and says at the end that all are. Damaged files are
replaced, not overwritten, so that readers keep what they have opened.
"""

import contextlib
import fcntl
import hashlib
import io
import itertools
import json
import logging
import math
import mmap
import os
import re
import threading
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int, Int64, UInt8
from PIL import Image

from pirl.data.lerobot.reader import Dataset
from pirl.errors import DataError
from pirl.files import cache_directory, write_file, writing

logger = logging.getLogger(__name__)

Compression = Literal["none", "png", "jpeg"]
FRAMES_FILE, INDEX_FILE, ABOUT_FILE, LOCK_FILE = "frames.bin", "index.bin", "about.json", "lock"
FORMAT_VERSION = 3
# JPEG without color subsampling. PNG by run lengths: as small as its default and more than twice as fast.
_ENCODERS: dict[str, dict[str, Any]] = {
    "png": {"compress_type": zlib.Z_RLE},
    "jpeg": {"quality": 95, "subsampling": 0},
}
_BATCH = 64  # frames that are written together
_THREADED_FRAMES = 8  # fewer than this are decoded sooner than threads are woken
# A file written in the same tick of the file system's clock as it was read may change without showing it.
_SETTLED_NANOSECONDS = 2 * 10**9


@dataclass(frozen=True)
class FrameCacheConfig:
    """How frames are kept: their size, and whether to save disk ("png" is lossless, "jpeg" nearly so) or time."""

    height: int
    width: int
    compression: Compression = "none"
    directory: Path | None = None  # by default in pirl's cache directory
    workers: int | None = None  # threads that decode; by default one for each core


class Frames:
    """The frames of one camera, uint8 [N, height, width, 3], in mapped memory; rows count through all episodes."""

    def __init__(
        self, file: int, shape: tuple[int, int, int, int], index: Int64[np.ndarray, "n 2"], encoded: bool, workers: int
    ) -> None:
        self.shape = shape
        self._map = mmap.mmap(file, 0, prot=mmap.PROT_READ)
        self._index = index
        frame_bytes = math.prod(shape[1:])
        pixels = None if encoded else np.frombuffer(self._map, np.uint8, len(self._map) // frame_bytes * frame_bytes)
        self._pixels = None if pixels is None else pixels.reshape(-1, *shape[1:])
        self._pool = ThreadPoolExecutor(workers, "decode-frames") if encoded and workers > 1 else None

    def gather(self, rows: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n h w 3"]:
        """Copies of these rows, in this order."""
        out = _aligned_empty((len(rows), *self.shape[1:]))
        if not len(rows):
            return out
        lowest, highest = int(rows.min()), int(rows.max())
        if lowest < 0 or highest >= self.shape[0]:
            raise IndexError(f"rows go from {lowest} to {highest}; there are {self.shape[0]} frames.")
        if self._pixels is not None:
            # Rows not in memory are all asked for before the first is waited for; page faults come one by one.
            offsets, frame_bytes = self._index[rows, 0], math.prod(self.shape[1:])
            for begin in offsets.tolist():
                margin = begin % mmap.PAGESIZE
                self._map.madvise(mmap.MADV_WILLNEED, begin - margin, frame_bytes + margin)
            # Rows are known to be inside; any other mode would gather into a copy of `out` first.
            np.take(self._pixels, offsets // frame_bytes, axis=0, out=out, mode="clip")
        elif self._pool is None or len(rows) < _THREADED_FRAMES:
            for image, row in zip(out, rows.tolist(), strict=True):
                self._decode(image, row)
        else:
            list(self._pool.map(self._decode, out, rows.tolist()))
        return out

    def release(self) -> None:
        """Take the frames out of the resident memory; rows read again come back."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def _decode(self, out: UInt8[np.ndarray, "h w 3"], row: int) -> None:
        offset, length = self._index[row].tolist()
        try:
            with Image.open(io.BytesIO(self._map[offset : offset + length])) as image:
                out[:] = image
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(
                f"frame {row} in the frame cache is damaged ({error}). Delete the cache; it is built again when needed."
            ) from error


def _aligned_empty(shape: tuple[int, ...]) -> UInt8[np.ndarray, "..."]:
    """A uint8 buffer on a cache line: large ones from np.empty start 16 bytes into a page, where copies are slower."""
    memory = np.empty(math.prod(shape) + 63, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + math.prod(shape)].reshape(shape)


class CacheEntry:
    """One camera's directory in the cache; episodes may be written from several threads at once."""

    def __init__(self, source: Dataset, camera: str, config: FrameCacheConfig) -> None:
        self.camera, self.compression = camera, config.compression
        self.starts = np.concatenate([[0], np.cumsum(source.lengths)])
        self.shape = (int(self.starts[-1]), config.height, config.width, 3)
        if not self.shape[0]:
            raise DataError(f"{source.name} has no frames.")
        cache = config.directory or default_directory()
        # What the frames depend on. The camera takes part, because cameras kept as images share their files.
        content = {
            "format": FORMAT_VERSION,
            "camera": camera,
            "files": file_digests(source.source_files(camera), cache / "digests.json"),
            "offsets": [list(offset) for offset in source.offsets(camera)],
            "lengths": source.lengths.tolist(),
            "size": [config.height, config.width],
            "compression": config.compression,
        }
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
        # A camera's name comes from the dataset, so only harmless characters of it are used.
        self.directory = cache / f"{re.sub('[^A-Za-z0-9_-]', '_', camera)[:64]}-{key}"
        self.about = {
            "dataset": source.name,
            "camera": camera,
            "frames": self.shape[0],
            "height": config.height,
            "width": config.width,
            "compression": config.compression,
        }
        self.finished: set[int] = set()
        self._lock = threading.Lock()

    def open(self, workers: int) -> Frames | None:
        with contextlib.suppress(OSError), (self.directory / FRAMES_FILE).open("rb") as file:
            # Read after the frames are open: one being replaced has been declared unfinished before.
            complete = read_about(self.directory).get("complete") is True
            finished, index = self._recorded(os.fstat(file.fileno()).st_size)
            if complete and index is not None and len(finished) == len(self.starts) - 1:
                return Frames(file.fileno(), self.shape, index, self.compression != "none", workers)
        return None

    def _recorded(self, frames_size: int) -> tuple[set[int], Int64[np.ndarray, "n 2"] | None]:
        """The episodes that are written, none unless the files are as recorded; and the index of their frames."""
        finished = read_about(self.directory).get("finished")
        episodes = range(len(self.starts) - 1)
        if not isinstance(finished, list) or any(episode not in episodes for episode in finished):
            return set(), None
        try:
            index = np.fromfile(self.directory / INDEX_FILE, np.int64).reshape(self.shape[0], 2)
        except (OSError, ValueError):
            return set(), None
        written = index[self._rows_of(finished)]
        fits = (written[:, 0] >= 0) & (written[:, 1] > 0) & (written.sum(axis=1) <= frames_size)
        return (set(finished), index) if fits.all() else (set(), None)

    def _rows_of(self, episodes: Collection[int]) -> Bool[np.ndarray, " n"]:
        return np.isin(np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts)), list(episodes))

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        paths = self.directory / FRAMES_FILE, self.directory / INDEX_FILE
        with contextlib.ExitStack() as files:
            with writing_cache(self.directory):
                self.finished, index = self._recorded(paths[0].stat().st_size if paths[0].exists() else 0)
                if not self.finished:
                    # Declared unfinished before anything changes.
                    for path in (self.directory / ABOUT_FILE, *paths):
                        path.unlink(missing_ok=True)
                for path in paths:
                    path.touch()
                self._frames, self._index = (files.enter_context(path.open("r+b")).fileno() for path in paths)
                os.ftruncate(self._index, 16 * self.shape[0])
                # What comes after the frames of finished episodes was left by a kill.
                self._end = 0 if index is None else int(index[self._rows_of(self.finished)].sum(axis=1).max(initial=0))
                os.ftruncate(self._frames, self._end)
                self.record()
            yield

    def write(self, episode: int, frames: Iterator[UInt8[np.ndarray, "h w 3"]]) -> None:
        """Write one episode, and record it once its bytes are on the disk."""
        row = int(self.starts[episode])
        while batch := [self._encode(frame) for frame in itertools.islice(frames, _BATCH)]:
            sizes = np.array([len(encoded) for encoded in batch])
            with self._lock:
                offset, self._end = self._end, self._end + int(sizes.sum())
            self._write(self._frames, b"".join(batch), offset)
            index = np.stack([offset + np.cumsum(sizes) - sizes, sizes], axis=1)
            self._write(self._index, index.tobytes(), 16 * row)
            row += len(batch)
        with writing_cache(self.directory):
            os.fsync(self._frames)
            os.fsync(self._index)
        with self._lock:
            self.finished.add(episode)
            self.record()

    def record(self, *, complete: bool = False) -> None:
        """Write which episodes are finished, and whether that is all there is."""
        if not os.fstat(self._frames).st_nlink:  # and another process may have begun anew
            raise DataError(f"the frame cache in {self.directory} was deleted while it was built. Run again.")
        about = {**self.about, "complete": complete, "finished": sorted(self.finished)}
        with writing_cache(self.directory):
            write_file(self.directory / ABOUT_FILE, json.dumps(about))

    def _encode(self, frame: UInt8[np.ndarray, "h w 3"]) -> bytes:
        if self.compression == "none":
            return frame.tobytes()
        encoded = io.BytesIO()
        Image.fromarray(frame).save(encoded, self.compression, **_ENCODERS[self.compression])
        return encoded.getvalue()

    def _write(self, file: int, content: bytes, offset: int) -> None:
        view = memoryview(content)
        with writing_cache(self.directory):
            while view:  # the system may write less than it is given
                written = os.pwrite(file, view, offset)
                view, offset = view[written:], offset + written


def writing_cache(directory: Path) -> contextlib.AbstractContextManager[None]:
    return writing("the frame cache", directory, "Set PIRL_CACHE to a directory that can be written and has room.")


def read_about(directory: Path) -> dict[str, Any]:
    """The description of an entry; empty where it is absent or damaged."""
    try:
        about = json.loads((directory / ABOUT_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


@contextlib.contextmanager
def locked(directory: Path, *, wait: bool = True) -> Iterator[None]:
    """Be the only process that writes an entry. The system gives the lock up when a process ends, however it ends."""
    while True:
        with writing_cache(directory):
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
            # An entry deleted while we waited took its lock along: others do not see the one we hold.
            if os.fstat(file.fileno()).st_nlink:
                yield
                return


def file_digests(files: Sequence[Path], memory: Path) -> list[str]:
    """SHA-256 of each file. `memory` keeps them for as long as a file is not touched; damaged, it costs only time."""
    try:
        known: dict[str, Any] = dict(json.loads(memory.read_bytes()))
    except (OSError, ValueError, TypeError):
        known = {}
    try:
        states = {str(file.absolute()): _state(file) for file in files}
        current = {name: known[name][1] for name in states if name in known and known[name][:1] == [states[name]]}
        if unknown := [name for name in states if name not in current]:
            logger.info("reading %d files to recognize them by their content; this is done once", len(unknown))
            settled = time.time_ns() - _SETTLED_NANOSECONDS
            with ThreadPoolExecutor() as pool:
                current |= dict(zip(unknown, pool.map(_digest, unknown), strict=True))
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror or error}.") from error
    if unknown:
        known = {name: entry for name, entry in known.items() if Path(name).exists()}
        known |= {name: [states[name], current[name]] for name in unknown}
        # The times of modification and change must tell of the next change.
        lasting = {name: entry for name, entry in known.items() if max(entry[0][1:3]) < settled}
        with contextlib.suppress(OSError):
            write_file(memory, json.dumps(lasting, indent=0))
    return [current[str(file.absolute())] for file in files]


def _digest(file: str) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _state(file: Path) -> list[int]:
    """What changes whenever the file is written, replaced or renamed."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def default_directory() -> Path:
    return cache_directory() / "frames"
