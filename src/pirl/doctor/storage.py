"""The places where runs and caches go: is there space, and do files there do what pirl asks of them?"""

import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from pirl.doctor.findings import Finding
from pirl.files import cache_directory, expand_home
from pirl.words import size

# With less, the first checkpoint of a small run may already fail.
LEAST_SPACE = 2**30
_CONTENT = b"pirl" * 1024


def examine_storage(runs: Path) -> Iterator[Finding]:
    """Where runs go, where caches go, and what the cache holds."""
    elsewhere = (
        "Run pirl in a directory on a local or fully featured network file system, or choose one with --runs-dir."
    )
    yield examine_place("runs", expand_home(runs).absolute(), elsewhere)
    cache = cache_directory()
    yield examine_place("cache", cache, "Choose another directory with the environment variable PIRL_CACHE.")
    yield Finding("storage", "cached", "good", _contents(cache))


def examine_place(name: str, place: Path, elsewhere: str) -> Finding:
    """Whether files can be written, renamed, locked and memory-mapped where `place` is or will be."""
    existing = next(parent for parent in (place, *place.parents) if parent.exists())
    verb = "written"
    try:
        free = shutil.disk_usage(existing).free
        with tempfile.TemporaryDirectory(prefix=".pirl-doctor-", dir=existing) as directory:
            for verb, works in _TRIALS.items():
                if not works(Path(directory)):
                    detail = f"{place}: files can apparently be {verb}, but it has no effect"
                    return Finding("storage", name, "bad", detail, elsewhere, needed=True)
    except OSError as error:
        detail = f"{place}: files cannot be {verb}: {error.strerror or error}"
        return Finding("storage", name, "bad", detail, elsewhere, needed=True)
    detail = f"{place}: {size(free)} free"
    if free < LEAST_SPACE:
        return Finding("storage", name, "bad", detail, f"Make space. {elsewhere}")
    return Finding("storage", name, "good", f"{detail}; files can be {', '.join(_TRIALS)}", needed=True)


def _write(directory: Path) -> bool:
    (directory / "new").write_bytes(_CONTENT)
    (directory / "old").write_bytes(b"")
    return (directory / "new").read_bytes() == _CONTENT


def _rename(directory: Path) -> bool:
    os.replace(directory / "new", directory / "old")
    return (directory / "old").read_bytes() == _CONTENT and not (directory / "new").exists()


def _lock(directory: Path) -> bool:
    with (directory / "old").open() as first, (directory / "old").open() as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _map(directory: Path) -> bool:
    with (directory / "old").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
        return content[:] == _CONTENT


_TRIALS: dict[str, Callable[[Path], bool]] = {
    "written": _write,
    "renamed": _rename,
    "locked": _lock,
    "memory-mapped": _map,
}


def _contents(cache: Path) -> str:
    sizes = {entry.name: _size(entry) for entry in sorted(cache.iterdir())} if cache.is_dir() else {}
    if not sizes:
        return "empty"
    parts = ", ".join(f"{name} {size(count)}" for name, count in sizes.items())
    return f"{size(sum(sizes.values()))} in total: {parts}"


def _size(entry: Path) -> int:
    """Bytes on disk. Others may delete files meanwhile."""
    total = 0
    for directory, _, names in os.walk(entry) if entry.is_dir() else [(str(entry.parent), [], [entry.name])]:
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
            except OSError:
                continue
    return total
