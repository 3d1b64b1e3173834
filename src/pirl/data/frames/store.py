"""How one camera's frames lie on disk: written episode by episode, resumable after a kill, gathered by row.

A store is a directory. `frames.bin` holds the frames: as one array [N, height, width, 3], or encoded as PNG or JPEG one
after another, and then `index.bin` holds offset and size of each. `finished.txt` lists the episodes that are written,
`about.json` describes the store and says at the end that it is complete. Damaged files are replaced, not written over, so
that whoever has them open keeps what was opened.
"""

import contextlib
import functools
import io
import json
import math
import os
import threading
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Int64, UInt8
from PIL import Image

from pirl.data.frames.reader import EncodedFrames, Frames, PlainFrames
from pirl.errors import DataError
from pirl.files import write_file
from pirl.files import writing as writing_into

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
