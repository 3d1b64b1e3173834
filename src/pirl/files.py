"""Files that appear whole or not at all, and where pirl keeps what it can compute again."""

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
    """The path with `~` or `~name` at its beginning replaced by that home; the home of nobody is an error."""
    try:
        expanded = os.path.expanduser(os.fspath(path))
    except ValueError as error:  # a NUL, which no name has
        raise UserError(f"{os.fspath(path)!r} is no path: {error}.") from error
    home = expanded.split("/", 1)[0]
    if home == "~":
        raise UserError(f"{path}: where your home directory is, is not known. Set HOME, or give the whole path.")
    if home.startswith("~"):
        raise UserError(f"{path} is in the home of nobody: there is no user {home[1:]!r}. Give the whole path.")
    return Path(expanded)


def is_elsewhere(path: str | os.PathLike[str]) -> bool:
    """Whether it is an address such as gs://bucket/runs (of whose slashes a Path keeps one), and no path."""
    return re.match(r"\w{2,}:/", os.fspath(path)) is not None


def write_file(path: Path, content: bytes | str, *, lasting: bool = False) -> None:
    """Write a file in one step: whoever looks sees the old content or the new, never a part.

    `lasting`: so it is if the power fails, too. This takes a moment, in which the disk has to write it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        if lasting:
            _sync(partial)
        os.replace(partial, path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # a full disk names no file, others the partial one
        raise
    finally:
        partial.unlink(missing_ok=True)


def end_with(path: Path, place: int, content: bytes) -> None:
    """Let a file go on with this content from a place on, in a single write: all of it, or an error and none."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        if os.fstat(file).st_size > place:
            os.ftruncate(file, place)
        try:
            if os.pwrite(file, content, place) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except BaseException as error:
            os.ftruncate(file, place)
            if isinstance(error, OSError):
                error.filename = str(path)
            raise
    finally:
        os.close(file)


@contextlib.contextmanager
def writing(what: str, directory: Path, advice: str) -> Iterator[None]:
    """Say what could not be written, where, and what to do about it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{what} cannot be written in {directory}: {error.strerror or error}. {advice}") from error


def put_in_place(partial: Path, directory: Path) -> None:
    """Give a complete directory its name, in one rename; one that is there already is put aside meanwhile."""
    try:
        if directory.exists():
            directory.rename(_aside(directory))
        partial.rename(directory)
        _sync(directory.parent)
    finally:
        put_back(directory)


def put_back(directory: Path) -> None:
    """Put back what was put aside for another that never came; what another has taken the place of is removed."""
    if _aside(directory).exists() and not directory.exists():
        _aside(directory).rename(directory)
    shutil.rmtree(_aside(directory), ignore_errors=True)


def _sync(path: Path) -> None:
    """Let a file, or the names in a directory, outlive a power failure, where file systems can be asked to."""
    with contextlib.suppress(OSError):
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _aside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.replaced")


def remove_directory(directory: Path, patience_s: float = 10.0) -> None:
    """Remove a directory that background threads of an interrupted save may still be writing into."""
    give_up = time.monotonic() + patience_s
    while directory.exists() and time.monotonic() < give_up:
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.01)


def cache_directory() -> Path:
    """Where caches live: `PIRL_CACHE`, or `pirl` in the user's cache directory. It can be deleted at any time."""
    if chosen := os.environ.get("PIRL_CACHE"):
        return expand_home(chosen).resolve()
    return expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "pirl"
