"""OpenPI's `norm_stats.json`: the statistics a policy's states and actions are normalised with."""

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
        """How many dimensions they are of: those that OpenPI pads with have mean and deviation 0."""
        varying = np.flatnonzero((self.mean != 0) | (self.std != 0))
        return int(varying[-1]) + 1 if len(varying) else len(self.mean)

    def width_in(self, model_width: int) -> int:
        """The robot's width, as far as they tell it. Only what is as wide as the model can have been padded for it."""
        return self.unpadded_width if len(self.mean) >= model_width else len(self.mean)

    def to_json(self) -> dict[str, list[float] | None]:
        """As it stands in the file."""
        fields = {"mean": self.mean, "std": self.std, "q01": self.q01, "q99": self.q99}
        return {
            name: None if value is None else np.asarray(value, np.float64).tolist() for name, value in fields.items()
        }


def read_norm_stats(file: Path) -> dict[str, NormStats]:
    """Read the file; anything odd in it is named."""

    def vector(name: str, key: str, value: Any) -> np.ndarray:
        # By type, because True counts as an int; compared, because an integer may be too large to be made a float.
        if not isinstance(value, list) or not all(type(number) in (int, float) for number in value):
            raise CheckpointError(f"{file}: {name}.{key} is not a list of numbers; it is {value!r:.80}.")
        if not all(abs(number) <= sys.float_info.max for number in value):
            raise CheckpointError(f"{file}: {name}.{key} should be a list of finite numbers; it is {value!r:.80}.")
        return np.array(value, np.float64)

    try:
        if file.exists() and not file.is_file():
            raise CheckpointError(f"{file} is not a regular file: put a copy of the statistics there.")
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}.") from error
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}.") from error
    entries = content.get("norm_stats") if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file} has no 'norm_stats' object: it is not an OpenPI statistics file.")
    stats = {}
    for name, fields in entries.items():
        if not isinstance(fields, dict) or fields.get("mean") is None or fields.get("std") is None:
            raise CheckpointError(f"{file}: {name!r} needs at least 'mean' and 'std'.")
        arrays = {
            key: vector(name, key, fields[key]) for key in ("mean", "std", "q01", "q99") if fields.get(key) is not None
        }
        if len({len(array) for array in arrays.values()}) != 1:
            raise CheckpointError(f"{file}: the lists of {name!r} have different lengths.")
        if np.any(arrays["std"] < 0):
            raise CheckpointError(f"{file}: {name}.std should be zero or more; it is {fields['std']!r:.80}.")
        if {"q01", "q99"} <= set(arrays) and np.any(arrays["q01"] > arrays["q99"]):
            raise CheckpointError(f"{file}: {name}.q01 is above {name}.q99; compute them anew (pirl data stats).")
        stats[name] = NormStats(**arrays)
    return stats


def write_norm_stats(file: Path, stats: Mapping[str, NormStats]) -> None:
    """Write the file as OpenPI lays it out."""
    write_file(file, json.dumps({"norm_stats": {name: entry.to_json() for name, entry in stats.items()}}, indent=2))
