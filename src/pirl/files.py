"""Files and directories that appear whole or not at all, and paths as people write them."""

import concurrent.futures
import contextlib
import errno
import json
import math
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pirl.errors import DataError, UserError, in_one_line


class DamageError(Exception):
    """Why what was written cannot be read."""


def expand_home(path: str | os.PathLike[str]) -> Path:
    """The path with `~` or `~name` at its beginning replaced; an unknown home is an error."""
    try:
        expanded = os.path.expanduser(os.fspath(path))
    except ValueError as error:  # a NUL, which no name has
        raise UserError(f"{os.fspath(path)!r} is no path: {error}.") from error
    home = expanded.split("/", 1)[0]
    if home == "~":
        raise UserError(f"{path}: your home directory is not known. Set HOME, or give the whole path.")
    if home.startswith("~"):
        raise UserError(f"{path} is in the home of nobody: there is no user {home[1:]!r}. Give the whole path.")
    return Path(expanded)


def is_elsewhere(path: str | os.PathLike[str]) -> bool:
    """Whether it is an address such as gs://bucket/runs (of whose slashes a Path keeps one), and no path."""
    return re.match(r"\w{2,}:/", os.fspath(path)) is not None


def cache_directory() -> Path:
    """Where caches live: `PIRL_CACHE`, or `pirl` in the user's cache directory. It can be deleted at any time."""
    if chosen := os.environ.get("PIRL_CACHE"):
        return expand_home(chosen).resolve()
    return expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "pirl"


def write_file(path: Path, content: bytes | str, *, fsync: bool = False) -> None:
    """Write a file in one step: a reader sees the old content or the new, with `fsync` after a power failure, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        if fsync:
            _fsync(partial)
        os.replace(partial, path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # a full disk names no file, others the partial one
        raise
    finally:
        partial.unlink(missing_ok=True)


def replace_tail(path: Path, offset: int, content: bytes) -> None:
    """Replace what follows an offset of a file in a single write: all of it, or an error and none."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        if os.fstat(file).st_size > offset:
            os.ftruncate(file, offset)
        try:
            if os.pwrite(file, content, offset) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except BaseException as error:
            os.ftruncate(file, offset)
            if isinstance(error, OSError):
                error.filename = str(path)
            raise
    finally:
        os.close(file)


def atomic_replace(partial: Path, directory: Path) -> None:
    """Rename a complete directory to its final name; an existing one is moved aside until that is done."""
    try:
        if directory.exists():
            directory.rename(_aside(directory))
        partial.rename(directory)
        _fsync(directory.parent)
    finally:
        restore_replaced(directory)


def restore_replaced(directory: Path) -> None:
    """Move back a directory whose replacement never came (the process died); delete it where it came."""
    if _aside(directory).exists() and not directory.exists():
        _aside(directory).rename(directory)
    shutil.rmtree(_aside(directory), ignore_errors=True)


def _aside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.replaced")


def _fsync(path: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems refuse it
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def remove_directory(directory: Path, patience_s: float = 10.0) -> None:
    """Remove a directory that background threads of an interrupted save may still be writing into."""
    give_up = time.monotonic() + patience_s
    while directory.exists() and time.monotonic() < give_up:
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.01)


def write_record(file: Path, record: Mapping[str, Any]) -> None:
    """Write a record beside files, with the sizes and checksums of all of them; all survives a power failure then."""
    directory = file.parent
    files = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
    sizes = [path.stat().st_size for path in files.values()]
    whole = {**record, "files": dict(zip(files, zip(sizes, _checksums(files.values()), strict=True), strict=True))}
    file.write_text(json.dumps({**whole, "checksum": zlib.crc32(json.dumps(whole).encode())}), encoding="utf-8")
    for path in (directory, *directory.rglob("*")):
        _fsync(path)


def read_record(file: Path) -> dict[str, Any]:
    """The record in a file; raises a DamageError if it is not as it was written."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        checksum = record.pop("checksum")
    except (OSError, ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise DamageError(f"{file.name} cannot be read ({in_one_line(error)})") from error
    if checksum != zlib.crc32(json.dumps(record).encode()):
        raise DamageError(f"{file.name} does not hold what was written")
    return dict(record)


def check_files(directory: Path, record: Mapping[str, Any], *, contents_up_to: float = math.inf) -> None:
    """Raise a DamageError if a file is missing, of another size, or (those up to so many bytes) changed."""
    for name, (size, _) in record["files"].items():
        file = directory / name
        if not file.is_file():
            raise DamageError(f"{name} is missing")
        if (found := file.stat().st_size) != size:
            raise DamageError(f"{name} has {found} bytes instead of {size}")
    known = {name: checksum for name, (size, checksum) in record["files"].items() if size <= contents_up_to}
    try:
        checksums = _checksums(directory / name for name in known)
    except OSError as error:
        raise DamageError(f"it cannot be read ({in_one_line(error)})") from error
    for name, seen in zip(known, checksums, strict=True):
        if seen != known[name]:
            raise DamageError(f"{name} does not hold what was written")


def _checksums(files: Iterable[Path]) -> list[int]:
    """Of each file, several at a time: states are large, and this lets other threads go on."""

    def checksum(file: Path) -> int:
        value = 0
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                value = zlib.crc32(block, value)
        return value

    with concurrent.futures.ThreadPoolExecutor() as threads:
        return list(threads.map(checksum, files))


@contextlib.contextmanager
def writing(what: str, directory: Path, advice: str) -> Iterator[None]:
    """Turn an OSError into a sentence: what could not be written, where, and what to do about it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{what} cannot be written in {directory}: {error.strerror or error}. {advice}") from error
