"""Labels of episodes by hand: success, reward and time-outs, in a file beside the data, which is never changed."""

import csv
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pirl.data.lerobot.format import resolve_inside
from pirl.data.problems import format_episodes
from pirl.errors import DataError
from pirl.files import write_file
from pirl.text import convert

LABEL_FILE = "meta/pirl_labels.jsonl"
DROPPED_FILE = "meta/pirl_dropped.txt"
_YES = {"1", "1.0", "true", "yes", "y", "success", "successful", "succeeded"}
_NO = {"0", "0.0", "false", "no", "n", "failure", "fail", "failed"}
_WANTED = {
    "episode": "an episode number",
    "success": "true or false",
    "reward": "a finite number",
    "truncated": "true or false",
    "length": "a number of frames",
}


@dataclass(frozen=True)
class Label:
    """The outcome of one episode. `length` guards against labels of a dataset that was recorded anew since."""

    episode: int
    success: bool | None = None
    reward: float | None = None
    truncated: bool | None = None
    length: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


def read_labels(root: Path) -> dict[int, Label]:
    """The labels of a dataset, by episode number; none if there is no file."""
    try:
        path = resolve_inside(root, LABEL_FILE)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, ValueError) as error:
        raise DataError(f"{root / LABEL_FILE} cannot be read: {error}.") from error
    labels = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            label = _parse(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{root / LABEL_FILE}, line {number}: {error}. Mend it, or label the episode again."
            ) from error
        labels[label.episode] = label
    return labels


def write_labels(root: Path, labels: Mapping[int, Label]) -> Path:
    return _write(root, LABEL_FILE, "".join(json.dumps(labels[e].to_json()) + "\n" for e in sorted(labels)))


def read_dropped(root: Path) -> set[int]:
    """Numbers of the episodes that were taken out of the dataset (`pirl data drop`)."""
    try:
        path = resolve_inside(root, DROPPED_FILE)
        return set(parse_episodes(path.read_text(encoding="utf-8"))) if path.exists() else set()
    except (OSError, ValueError) as error:
        raise DataError(f"{root / DROPPED_FILE} cannot be read: {error}. Mend it, or delete it.") from error


def write_dropped(root: Path, episodes: Collection[int]) -> None:
    """Write which episodes are left out; without any, the file is deleted."""
    if episodes:
        _write(root, DROPPED_FILE, f"{format_episodes(episodes)}\n")
    else:
        _write(root, DROPPED_FILE, None)


def _write(root: Path, name: str, content: str | None) -> Path:
    path = root / name
    try:
        resolve_inside(root, name)
        if content is None:
            path.unlink(missing_ok=True)
        else:
            write_file(path, content)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be written: {error}.") from error
    return path


def read_csv(file: Path) -> dict[int, Label]:
    """Labels from a table with the columns episode, and success, reward or truncated (any of them)."""
    try:
        if file.exists() and not file.is_file():
            raise DataError(f"{file} is not a regular file: save the table as one.")
        with file.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream)
            header = [name.strip() for name in next(filter(None, reader), [])]
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read as CSV: {error}.") from error
    names = ["episode" if name.lower() == "episode_index" else name.lower() for name in header]
    unknown = set(names) - {"episode", "success", "reward", "truncated"}
    if "episode" not in names or unknown or not 2 <= len(names) == len(set(names)):
        raise DataError(
            f"{file}: the columns should be episode and any of success, reward, truncated, each once; they are "
            f"{', '.join(header) or 'none'}."
        )
    labels: dict[int, Label] = {}
    for number, row in rows:
        if not any(row):
            continue
        try:
            if len(row) > len(names):
                raise ValueError(f"there are more cells than columns: {', '.join(row)}")
            label = _parse({name: text for name, text in zip(names, row, strict=False) if text}, texts=True)
            if label.episode in labels:
                raise ValueError(f"episode {label.episode} is there twice")
        except ValueError as error:
            raise DataError(f"{file}, line {number}: {error}.") from error
        labels[label.episode] = label
    return labels


def parse_episodes(text: str, largest: int | None = None) -> list[int]:
    """Episode numbers, none above `largest`, from a list of numbers and ranges such as `0,3,7-12`."""
    try:
        episodes: list[int] = list(convert(text, tuple[int, ...], texts=True))
    except ValueError:
        episodes = [-1]
    if min(episodes, default=0) < 0:
        raise DataError(f"{text!r:.80} is not a list of episode numbers and ranges, such as 0,3,7-12.")
    if largest is not None and (last := max(episodes, default=0)) > largest:
        raise DataError(f"there is no episode {last}; the last one is {largest}.")
    return episodes


def merge_labels(old: Mapping[int, Label], new: Iterable[Label]) -> dict[int, Label]:
    """New labels over old ones; fields that a new label does not set stay, if the episode's length is the same."""
    merged = dict(old)
    for label in new:
        before = merged.get(label.episode, label)
        if None not in (before.length, label.length) and before.length != label.length:
            before = label
        merged[label.episode] = Label(**{**before.to_json(), **label.to_json()})
    return merged


def yes_or_no(text: str) -> bool | None:
    """A word for success or failure as a bool; None for any other word."""
    word = text.strip().lower()
    return word in _YES if word in _YES | _NO else None


def _parse(entry: Any, *, texts: bool = False) -> Label:
    """A label from an object, or from the `texts` of a table."""
    if not isinstance(entry, dict):
        raise ValueError("a label is an object")
    if unknown := set(entry) - set(_WANTED):
        raise ValueError(f"unknown keys {sorted(unknown)}")
    hints = get_type_hints(Label)
    fields: dict[str, Any] = {}
    for key, value in entry.items():
        try:
            if texts and key in ("success", "truncated"):
                fields[key] = convert(yes_or_no(value), bool, texts=False)
            elif value is not None:
                fields[key] = convert(value, hints[key], texts=texts)
                least = {"episode": 0, "length": 1}.get(key, -math.inf)
                if not (math.isfinite(fields[key]) and fields[key] >= least):
                    raise ValueError
        except ValueError:
            raise ValueError(f"{key} should be {_WANTED[key]}; it is {value!r:.60}") from None
    if "episode" not in fields:
        raise ValueError("episode is missing")
    if not fields.keys() & {"success", "reward", "truncated"}:
        raise ValueError(f"the label of episode {fields['episode']} says nothing")
    return Label(**fields)
