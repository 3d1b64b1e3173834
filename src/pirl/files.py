"""Files and directories that appear whole or not at all, and paths as people write them."""

import contextlib
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from pirl.errors import DataError, UserError


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


@contextlib.contextmanager
def writing(what: str, directory: Path, advice: str) -> Iterator[None]:
    """Turn an OSError into a sentence: what could not be written, where, and what to do about it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{what} cannot be written in {directory}: {error.strerror or error}. {advice}") from error
