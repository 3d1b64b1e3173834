"""What is written beside the arrays of a full state: what is no array, and what the whole has to consist of."""

import concurrent.futures
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from pirl.errors import CheckpointError, in_one_line

FILE_NAME = "state.json"
ARRAYS = "arrays"
_BLOCK = 1 << 20


class DamageError(Exception):
    """Why a saved state cannot be read."""


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """The leaves by the path that leads to them, in their order: learned/…."""
    entries = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in entries}
    assert len(named) == len(entries), "two leaves of the state have the same path"
    return named


def choose_steps(states: Path, saved: Sequence[int], step: int | None) -> list[int]:
    """Of the steps there are states of: the one that is wanted, or all, the newest first; an error if there is none."""
    if step is None and saved:
        return sorted(saved, reverse=True)
    if step is not None and step in saved:
        return [step]
    there = f"; it has {', '.join(map(str, saved))}" if saved else ""
    raise CheckpointError(f"{states} has no state{'' if step is None else f' of step {step}'}{there}.")


def make_record(leaves: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The record as it will be read again, taken now: what it was made from changes while it is being written."""
    try:
        return dict(json.loads(json.dumps({**facts, "leaves": _describe(leaves)})))
    except TypeError as error:
        raise CheckpointError(f"the host's state and the metadata cannot be written as JSON: {error}.") from error


def write_record(directory: Path, record: Mapping[str, Any]) -> None:
    """Write it, with the sizes and checksums of the files that are there: a missing, cut or changed one is noticed."""
    files = {str(file.relative_to(directory)): file for file in directory.rglob("*") if file.is_file()}
    sizes = {name: file.stat().st_size for name, file in files.items()}
    # TensorStore does not notice changed bytes in the arrays themselves.
    whole = {**record, "files": sizes, "checksums": dict(zip(files, _checksums(files.values()), strict=True))}
    with (directory / FILE_NAME).open("w", encoding="utf-8") as file:
        file.write(json.dumps({**whole, "checksum": _own_checksum(whole)}))
        file.flush()
        os.fsync(file.fileno())  # older states are deleted next, and the power may fail


def read_record(directory: Path) -> dict[str, Any]:
    """Read it, or raise a DamageError."""
    try:
        record = json.loads((directory / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamageError(f"{FILE_NAME} cannot be read ({in_one_line(error)})") from error
    if not isinstance(record, dict) or not all(isinstance(record.get(key), dict) for key in ("files", "leaves")):
        raise DamageError(f"{FILE_NAME} does not say which files and arrays there should be")
    # Earlier versions wrote no checksums.
    checksum = record.pop("checksum", None)
    if ("checksums" in record or checksum is not None) and checksum != _own_checksum(record):
        raise DamageError(f"{FILE_NAME} does not hold what was written")
    return record


def check_files(directory: Path, record: Mapping[str, Any], *, contents: bool = True) -> None:
    """Raise a DamageError if a file is missing, of another size, or (by its `contents`, all of them) changed."""
    for name, size in record["files"].items():
        file = directory / name
        try:
            found = file.stat().st_size if file.is_file() else None
        except OSError as error:  # a name too long, say
            raise DamageError(f"{name:.60} cannot be looked at ({in_one_line(error)})") from error
        if found is None:
            raise DamageError(f"{name} is missing")
        if found != size:
            raise DamageError(f"{name} has {found} bytes instead of {size}")
    if not contents:
        return
    expected = record.get("checksums", {})
    try:
        checksums = _checksums(directory / name for name in expected)
    except OSError as error:
        raise DamageError(f"it cannot be read ({in_one_line(error)})") from error
    for (name, checksum), seen in zip(expected.items(), checksums, strict=True):
        if seen != checksum:
            raise DamageError(f"{name} does not hold what was written")


def check_leaves(directory: Path, record: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    """Raise with every leaf that is missing, extra, or of another shape or dtype."""
    saved, wanted = record["leaves"], _describe(leaves)
    problems = [
        *(f"{name}: not in the checkpoint" for name in sorted(wanted.keys() - saved.keys())),
        *(f"{name}: only in the checkpoint" for name in sorted(saved.keys() - wanted.keys())),
        *(
            f"{name}: {_in_words(saved[name])} in the checkpoint, {_in_words(leaf)} in the run"
            for name, leaf in wanted.items()
            if name in saved and saved[name] != leaf
        ),
    ]
    if problems:
        listing = "".join(f"\n  {problem}" for problem in problems)
        raise CheckpointError(
            f"the checkpoint {directory} is not of this learner; {len(problems)} of its arrays differ:{listing}\n"
            "Give the configuration it was made with."
        )


def _in_words(leaf: Any) -> str:
    return f"{leaf[1]}{leaf[0]}" if isinstance(leaf, list) and len(leaf) == 2 else f"{leaf!r:.60}"


def _describe(leaves: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in leaves.items()}


def _checksums(files: Iterable[Path]) -> list[int]:
    """Of each file, several at a time: states are large, and this lets other threads go on."""
    with concurrent.futures.ThreadPoolExecutor() as threads:
        return list(threads.map(_checksum, files))


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as content:
        while block := content.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _own_checksum(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(record).encode())
