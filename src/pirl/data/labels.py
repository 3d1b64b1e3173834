"""What people say about episodes: success, reward and time-outs, in a sidecar file that leaves the data untouched."""

import csv
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pirl.data.layout import resolve_inside
from pirl.errors import DataError
from pirl.files import write_file

LABEL_FILE = "meta/pirl_labels.jsonl"
_YES, _NO = {"1", "true", "yes", "y", "success"}, {"0", "false", "no", "n", "failure", "fail"}


@dataclass(frozen=True)
class Label:
    """The outcome of one episode. `length` guards against labels of a dataset that was recorded anew since."""

    episode: int
    success: bool | None = None
    reward: float | None = None
    truncated: bool | None = None
    length: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Only what was said."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def read_labels(root: Path) -> dict[int, Label]:
    """The labels of a dataset, by episode number; none if there is no sidecar."""
    try:
        path = resolve_inside(root, LABEL_FILE)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, ValueError) as error:
        raise DataError(f"{LABEL_FILE} cannot be read: {error}.") from error
    labels = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            label = _parse(json.loads(line))
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{root / LABEL_FILE}, line {number}: {error}. Mend it, or label the episode again."
            ) from error
        labels[label.episode] = label
    return labels


def write_labels(root: Path, labels: Mapping[int, Label]) -> Path:
    """Write the sidecar, in the order of episodes."""
    path = root / LABEL_FILE
    resolve_inside(root, LABEL_FILE)
    write_file(path, "".join(json.dumps(labels[episode].to_json()) + "\n" for episode in sorted(labels)))
    return path


def read_csv(file: Path) -> dict[int, Label]:
    """Labels from a table with the columns episode, and success, reward or truncated (any of them)."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            header, rows = [name.strip() for name in reader.fieldnames or []], list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read as CSV: {error}.") from error
    renamed = ["episode" if name == "episode_index" else name for name in header]
    unknown = sorted(set(renamed) - {"episode", "success", "reward", "truncated"})
    if "episode" not in renamed or unknown or len(renamed) < 2:
        raise DataError(
            f"{file}: the columns should be episode and any of success, reward, truncated; they are {', '.join(header)}."
        )
    labels: dict[int, Label] = {}
    for number, row in enumerate(rows, start=2):
        values = {
            name: (row.get(original) or "").strip()
            for name, original in zip(renamed, reader.fieldnames or [], strict=True)
        }
        try:
            label = _parse({name: _from_text(name, text) for name, text in values.items() if text})
        except ValueError as error:
            raise DataError(f"{file}, line {number}: {error}.") from error
        if label.episode in labels:
            raise DataError(f"{file}, line {number}: episode {label.episode} is there twice.")
        labels[label.episode] = label
    return labels


def parse_episodes(text: str) -> list[int]:
    """Episode numbers from a list of numbers and ranges such as `0,3,7-12`."""
    episodes: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise DataError(f"{part!r} is neither an episode number nor a range such as 7-12.")
        episodes += range(int(first), int(last if dash else first) + 1)
    return episodes


def merge(old: Mapping[int, Label], new: Iterable[Label]) -> dict[int, Label]:
    """New labels over old ones; what a new label does not say stays."""
    merged = dict(old)
    for label in new:
        before = merged[label.episode].to_json() if label.episode in merged else {}
        merged[label.episode] = Label(**{**before, **label.to_json()})
    return merged


def _from_text(name: str, text: str) -> Any:
    if name == "episode":
        return int(text)
    if name == "reward":
        return float(text)
    if text.lower() in _YES | _NO:
        return text.lower() in _YES
    raise ValueError(f"{name} should be yes or no (1 or 0, true or false); it is {text!r}")


def _parse(entry: Any) -> Label:
    if not isinstance(entry, dict):
        raise ValueError("a label is an object")
    unknown = set(entry) - set(Label.__dataclass_fields__)
    if unknown:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    episode, reward = entry.get("episode"), entry.get("reward")
    if not isinstance(episode, int) or isinstance(episode, bool) or episode < 0:
        raise ValueError(f"episode should be an episode number; it is {episode!r}")
    for key in ("success", "truncated"):
        if entry.get(key) is not None and not isinstance(entry[key], bool):
            raise ValueError(f"{key} should be true or false; it is {entry[key]!r}")
    if reward is not None and (not isinstance(reward, int | float) or not math.isfinite(reward)):
        raise ValueError(f"reward should be a finite number; it is {reward!r}")
    if len(entry) - ("length" in entry) < 2:
        raise ValueError(f"the label of episode {episode} says nothing")
    return Label(**entry)
