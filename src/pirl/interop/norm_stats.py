"""OpenPI's `norm_stats.json`: the statistics a policy's states and actions are normalized with."""

import errno
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from pirl.errors import CheckpointError
from pirl.files import write_file

FILE_NAME = "norm_stats.json"


@dataclass(frozen=True, eq=False)
class NormStats:
    """Statistics of one quantity (`state` or `actions`), per dimension. Quantiles may be absent."""

    mean: Float64[np.ndarray, " dims"]
    std: Float64[np.ndarray, " dims"]
    q01: Float64[np.ndarray, " dims"] | None = None
    q99: Float64[np.ndarray, " dims"] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NormStats) and self.to_json() == other.to_json()

    @property
    def unpadded_width(self) -> int:
        """The number of dimensions without padding: OpenPI pads with mean and deviation 0."""
        varying = np.flatnonzero((self.mean != 0) | (self.std != 0))
        return int(varying[-1]) + 1 if len(varying) else len(self.mean)

    def width_in(self, model_width: int) -> int:
        """The robot's width; only what is as wide as the model can have been padded."""
        return self.unpadded_width if len(self.mean) >= model_width else len(self.mean)

    def to_json(self) -> dict[str, list[float] | None]:
        """The entry in the file."""
        fields = {"mean": self.mean, "std": self.std, "q01": self.q01, "q99": self.q99}
        return {name: None if value is None else np.asarray(value, float).tolist() for name, value in fields.items()}


def read_norm_stats(file: Path) -> dict[str, NormStats]:
    """Read and check the file."""
    try:
        if file.exists() and not file.is_file():  # opening a pipe would block
            raise OSError(errno.EINVAL, "it is not a regular file")
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}.") from error
    entries = content.get("norm_stats") if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file} has no 'norm_stats' object: it is not an OpenPI statistics file.")
    return {name: _read_entry(f"{file}: {name}", fields) for name, fields in entries.items()}


def _read_entry(name: str, fields: Any) -> NormStats:
    if not isinstance(fields, dict) or fields.get("mean") is None or fields.get("std") is None:
        raise CheckpointError(f"{name} needs at least 'mean' and 'std'.")
    arrays = {}
    for key in ("mean", "std", "q01", "q99"):
        if (value := fields.get(key)) is None:
            continue
        # By type, because True is an int; compared, because an integer may be too large for a float.
        if not isinstance(value, list) or not all(type(number) in (int, float) for number in value):
            raise CheckpointError(f"{name}.{key} is not a list of numbers; it is {value!r:.80}.")
        if not all(abs(number) <= sys.float_info.max for number in value):
            raise CheckpointError(f"{name}.{key} should be a list of finite numbers; it is {value!r:.80}.")
        arrays[key] = np.array(value, np.float64)
    if len({len(array) for array in arrays.values()}) != 1:
        raise CheckpointError(f"{name}: its lists have different lengths.")
    if np.any(arrays["std"] < 0):
        raise CheckpointError(f"{name}.std should be zero or more; it is {fields['std']!r:.80}.")
    if {"q01", "q99"} <= set(arrays) and np.any(arrays["q01"] > arrays["q99"]):
        raise CheckpointError(f"{name}.q01 is above q99; compute them anew (pirl data stats).")
    return NormStats(**arrays)


def write_norm_stats(file: Path, stats: Mapping[str, NormStats]) -> None:
    """Write the file as OpenPI lays it out."""
    write_file(file, json.dumps({"norm_stats": {name: entry.to_json() for name, entry in stats.items()}}, indent=2))
