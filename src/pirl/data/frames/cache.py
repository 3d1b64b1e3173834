"""Decode once: a dataset's camera frames, resized to what the policy sees, kept on disk and recognised by content."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, get_args, runtime_checkable

import numpy as np
from jaxtyping import Int64, UInt8
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from pirl.data.frames.digests import file_digests
from pirl.data.frames.entries import entry_directory, frames_directory, locked
from pirl.data.frames.reader import Frames
from pirl.data.frames.store import (
    ABOUT_FILE,
    FORMAT_VERSION,
    Compression,
    StoreLayout,
    StoreWriter,
    open_store,
    recorded_episodes,
    writing,
)
from pirl.data.images import resize_with_pad
from pirl.data.problems import BrokenDatasetError, Problem
from pirl.errors import ConfigError, DataError
from pirl.processes import usable_cores
from pirl.words import size

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
