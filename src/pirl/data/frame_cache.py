"""Decode once: a dataset's camera frames, resized to what the policy sees, are kept in a cache on disk."""

import contextlib
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from pirl.data.frame_store import (
    ABOUT_FILE,
    FRAMES_FILE,
    CacheEntry,
    Compression,
    FrameCacheConfig,
    Frames,
    default_directory,
    locked,
    read_about,
    writing_cache,
)
from pirl.data.lerobot.reader import Dataset
from pirl.data.problems import BrokenDatasetError, Problem
from pirl.data.transforms import resize_with_pad
from pirl.errors import DataError
from pirl.processes import usable_cores
from pirl.text import format_size

logger = logging.getLogger(__name__)

# Of the plain size, as seen on robot cameras; only an estimate is possible before encoding.
_EXPECTED_RATIO: dict[Compression, float] = {"none": 1.0, "png": 0.6, "jpeg": 0.25}
_SECONDS_BETWEEN_LOG_LINES = 30.0
_ENTRY_NAME = re.compile(r"[A-Za-z0-9_-]*-[0-9a-f]{32}")


class FramesError(DataError): ...


def open_frames(
    source: Dataset,
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
    entries = [CacheEntry(source, camera, config) for camera in dict.fromkeys(camera_names)]
    frames: dict[str, Frames] = {}

    def open_complete() -> list[CacheEntry]:
        for entry in entries:
            if entry.camera not in frames and (opened := entry.open(config.workers or usable_cores())):
                frames[entry.camera] = opened
        return [entry for entry in entries if entry.camera not in frames]

    if missing := open_complete():
        with contextlib.ExitStack() as locks:
            # In the same order everywhere, so that no two processes wait for each other.
            for entry in sorted(missing, key=lambda entry: entry.directory):
                locks.enter_context(locked(entry.directory))
            if missing := open_complete():
                _build(source, missing, config, progress, find_all_damage)
                if open_complete():
                    raise DataError(f"the frame cache of {source.name} was deleted while it was built. Run again.")
    for entry in entries:
        # The time of last use. A cache that can only be read is used without leaving a trace.
        with contextlib.suppress(OSError):
            os.utime(entry.directory / ABOUT_FILE)
    return {entry.camera: frames[entry.camera] for entry in entries}


def _build(
    source: Dataset, entries: list[CacheEntry], config: FrameCacheConfig, progress: bool, find_all_damage: bool
) -> None:
    stop, damaged = threading.Event(), []
    with contextlib.ExitStack() as stack:
        for entry in entries:
            stack.enter_context(entry.writing())
        total = sum(entry.shape[0] for entry in entries)
        done = sum(int(source.lengths[episode]) for entry in entries for episode in entry.finished)
        announcement = _check_space(source.name, entries, config, total, done)
        if progress:
            print(announcement, file=sys.stderr)
        else:
            logger.info("%s", announcement)
        advance = stack.enter_context(_progress(source.name, total, done, progress))
        pool = stack.enter_context(ThreadPoolExecutor(config.workers or usable_cores(), "frame-cache"))
        try:
            futures = {
                pool.submit(entry.write, episode, _resized(source, entry, episode, stop, advance)): (entry, episode)
                for entry in entries
                for episode in sorted(set(range(len(source.lengths))) - entry.finished)
            }
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
        for entry in entries:
            if CacheEntry(source, entry.camera, config).directory != entry.directory:
                shutil.rmtree(entry.directory, ignore_errors=True)
                raise DataError(f"{source.name} changed while camera {entry.camera!r} was decoded. Run again.")
            entry.record(complete=True)


def _resized(
    source: Dataset, entry: CacheEntry, episode: int, stop: threading.Event, advance: Callable[[], None]
) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
    """The frames of one episode in the size of the cache; fails if they are not as many as the episode has."""
    expected, count = int(source.lengths[episode]), 0
    try:
        for frame in source.decode(entry.camera, episode):
            if stop.is_set():
                raise CancelledError
            if count < expected:
                yield resize_with_pad(frame, *entry.shape[1:3])
                advance()
            count += 1
    except DataError as error:
        raise FramesError(f"frame {count}: {error}") from error
    if count != expected:
        raise FramesError(f"expected {expected} frames, got {count}: the recording is damaged or its metadata is wrong")


def _check_space(name: str, entries: list[CacheEntry], config: FrameCacheConfig, total: int, done: int) -> str:
    frames, height, width, _ = entries[0].shape
    directory = entries[0].directory.parent
    free, frame_bytes = shutil.disk_usage(directory).free, height * width * 3 * _EXPECTED_RATIO[config.compression]
    about = "" if config.compression == "none" else "about "
    what = (
        f"frame cache for {name}: {len(entries)} cameras x {frames:,} frames at {height}x{width} = "
        f"{about}{format_size(total * frame_bytes)} in {directory} ({format_size(done * frame_bytes)} already written, "
        f"{format_size(free)} free)"
    )
    if (total - done) * frame_bytes > free:
        other = 'compression="jpeg" (about a quarter), ' if config.compression != "jpeg" else ""
        raise DataError(
            f"the disk is too small for the {what}. Use {other}a smaller size, or set PIRL_CACHE to a directory on "
            "another disk."
        )
    return what


@contextlib.contextmanager
def _progress(name: str, total: int, done: int, show: bool) -> Iterator[Callable[[], None]]:
    """What to call after each frame: moves a bar on a terminal, logs a line now and then elsewhere."""
    if show and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(f"decoding {name}", total=total, completed=done)
            yield lambda: bar.advance(task)
        return
    lock, begin, count = threading.Lock(), time.monotonic(), 0
    logged = begin

    def advance() -> None:
        nonlocal count, logged
        with lock:
            count, now = count + 1, time.monotonic()
            if show and now - logged >= _SECONDS_BETWEEN_LOG_LINES:
                logged, rate = now, count / (now - begin)
                left = (total - done - count) / rate
                logger.info("%s: %d of %d frames, %.0f frames/s, %.0f s left", name, done + count, total, rate, left)

    yield advance


@dataclass(frozen=True)
class CachedFrames:
    """One camera's entry in the cache, as it is listed."""

    directory: Path
    dataset: str
    camera: str
    compression: str
    frames: int
    height: int
    width: int
    complete: bool
    bytes_on_disk: int
    last_used: datetime


def list_frame_caches(directory: Path | None = None) -> list[CachedFrames]:
    """What is in the cache, used longest ago first."""
    directory, entries = directory or default_directory(), []
    for entry in directory.iterdir() if directory.is_dir() else ():
        # Entries may be deleted by others at any time.
        with contextlib.suppress(OSError):
            if _ENTRY_NAME.fullmatch(entry.name) and not entry.is_symlink() and (entry / FRAMES_FILE).exists():
                about = read_about(entry)
                used = (entry / ABOUT_FILE if about else entry).stat().st_mtime
                cached = CachedFrames(
                    directory=entry,
                    **{key: about.get(key, "unknown") for key in ("dataset", "camera", "compression")},
                    **{key: about.get(key, 0) for key in ("frames", "height", "width")},
                    complete=about.get("complete", False),
                    bytes_on_disk=sum(file.stat().st_blocks * 512 for file in entry.iterdir()),
                    last_used=datetime.fromtimestamp(used, UTC),
                )
                entries.append(cached)
    return sorted(entries, key=lambda entry: entry.last_used)


def delete_frame_cache(cache: CachedFrames) -> None:
    """Delete an entry. Readers that have it open keep it; one being built is refused."""
    if cache.directory.exists():
        with locked(cache.directory, wait=False), writing_cache(cache.directory):
            # First of all, so that what remains of an interrupted deletion is not taken for an entry.
            (cache.directory / ABOUT_FILE).unlink(missing_ok=True)
            shutil.rmtree(cache.directory)
