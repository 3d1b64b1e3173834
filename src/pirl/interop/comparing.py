"""Tell two checkpoints apart, or find what is wrong with one."""

from dataclasses import dataclass

import numpy as np

from pirl.interop.norm_stats import FILE_NAME
from pirl.interop.reading import DESCRIPTION_FILE, Checkpoint


@dataclass(frozen=True)
class Difference:
    """One way in which two checkpoints are not the same."""

    path: str
    what: str


def compare(first: Checkpoint, second: Checkpoint, *, rtol: float = 0.0, atol: float = 0.0) -> list[Difference]:
    """Every difference in keys, shapes, dtypes, values and statistics; one leaf of each is in memory at a time."""
    differences = []
    for path in sorted(set(first.leaves) | set(second.leaves)):
        if path not in second.leaves or path not in first.leaves:
            only = "first" if path in first.leaves else "second"
            differences.append(Difference(path, f"only in the {only}"))
            continue
        a, b = first.leaves[path], second.leaves[path]
        if a.shape != b.shape:
            differences.append(Difference(path, f"shape {a.shape} and {b.shape}"))
            continue
        if a.dtype != b.dtype and not (rtol or atol):
            differences.append(Difference(path, f"dtype {a.dtype} and {b.dtype}"))
        x, y = (np.asarray(checkpoint.read([path])[path]) for checkpoint in (first, second))
        unequal = _unequal(x, y, rtol, atol)
        if unequal.any():
            largest = np.max(np.abs(np.where(unequal, x.astype(np.float64) - y, 0)))
            differences.append(Difference(path, f"{unequal.sum()} of {x.size} values, by up to {largest:.3g}"))
    if first.config and second.config and first.config != second.config:
        fields = [key for key, value in first.config.to_dict().items() if value != second.config.to_dict()[key]]
        differences.append(Difference(DESCRIPTION_FILE, f"other model: {', '.join(fields)}"))
    ours, theirs = first.norm_stats(), second.norm_stats()
    for asset_id in sorted(set(ours) | set(theirs)):
        if ours.get(asset_id) != theirs.get(asset_id):
            differences.append(Difference(f"assets/{asset_id}/{FILE_NAME}", "other statistics, or only in one"))
    return differences


def _unequal(x: np.ndarray, y: np.ndarray, rtol: float, atol: float) -> np.ndarray:
    """Where two arrays differ; exactly, in their own dtypes, if no tolerance is given."""
    if rtol or atol:
        return ~np.isclose(x.astype(np.float64), y.astype(np.float64), rtol=rtol, atol=atol, equal_nan=True)
    return (x != y) & ~((x != x) & (y != y))  # NaN equals NaN here


def check_values(checkpoint: Checkpoint) -> list[Difference]:
    """Read every leaf of one checkpoint and report those with values that are not finite."""
    problems = []
    for path in checkpoint.leaves:
        array = np.asarray(checkpoint.read([path])[path]).astype(np.float32)
        if bad := int(np.sum(~np.isfinite(array))):
            problems.append(Difference(path, f"{bad} of {array.size} values are not finite"))
    return problems
