"""What is in a file, as a digest of all its bytes, computed once for as long as the file is not touched."""

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pirl.errors import DataError
from pirl.files import write_file

logger = logging.getLogger(__name__)
# A file written in the same tick of the file system's clock as it was read may change without showing it.
_SETTLED_NANOSECONDS = 2 * 10**9
# Size, time of modification, time of change, inode.
State = tuple[int, int, int, int]


def file_digests(files: Sequence[Path], memory: Path) -> list[str]:
    """SHA-256 of each file. `memory` is a file of known digests; a damaged or unwritable one costs only time."""
    known = _read_memory(memory)
    names = [str(file.absolute()) for file in files]
    states = {name: _state(file) for name, file in zip(names, files, strict=True)}
    unknown = [name for name, state in states.items() if name not in known or known[name][0] != state]
    if unknown:
        logger.info("reading %d files to recognise them by their content; this is done once", len(unknown))
        settled = time.time_ns() - _SETTLED_NANOSECONDS
        with ThreadPoolExecutor() as pool:
            digests = dict(zip(unknown, pool.map(_digest, map(Path, unknown)), strict=True))
        known = {name: entry for name, entry in known.items() if Path(name).exists()}
        known |= {name: (states[name], digest) for name, digest in digests.items()}
        _write_memory(memory, {name: entry for name, entry in known.items() if _last_change(entry[0]) < settled})
    return [known[name][1] for name in names]


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}.") from error


def _state(file: Path) -> State:
    """Changes whenever the file is written, replaced or renamed."""
    try:
        status = file.stat()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}.") from error
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _last_change(state: State) -> int:
    return max(state[1], state[2])


def _read_memory(memory: Path) -> dict[str, tuple[State, str]]:
    try:
        entries = json.loads(memory.read_bytes())
        return {
            name: ((int(size), int(modified), int(changed), int(inode)), str(digest))
            for name, ((size, modified, changed, inode), digest) in entries.items()
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write_memory(memory: Path, entries: dict[str, tuple[State, str]]) -> None:
    try:
        write_file(memory, json.dumps(entries, indent=0))
    except OSError as error:
        logger.debug("digests are not remembered in %s: %s", memory, error)
