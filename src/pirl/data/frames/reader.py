"""The frames of one camera, gathered by row from a memory-mapped array or from PNG and JPEG images."""

import contextlib
import io
import math
import mmap
import os
import weakref
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Int, Int64, UInt8
from PIL import Image

from pirl.errors import DataError

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
