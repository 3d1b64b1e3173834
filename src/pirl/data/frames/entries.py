"""The entries of the frame cache, one directory for each camera and content: named, locked, listed and deleted."""

import contextlib
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pirl.data.frames.store import ABOUT_FILE, FRAMES_FILE, read_about, writing
from pirl.errors import DataError
from pirl.files import cache_directory

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
