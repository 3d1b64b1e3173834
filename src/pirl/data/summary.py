"""What is in a dataset, in numbers: for `pirl data info` and for reports."""

from typing import Any

import numpy as np

from pirl.data.lerobot.columns import DepthPictureError
from pirl.data.lerobot.dataset import Dataset
from pirl.data.lerobot.video import VideoIndex
from pirl.data.outcomes import OutcomeConfig, try_outcomes
from pirl.errors import DataError


def summarize(dataset: Dataset, config: OutcomeConfig) -> dict[str, Any]:
    """JSON-ready. `outcomes` is None where the data does not tell how its episodes ended; `outcome_problem` says why."""
    found, problems = try_outcomes(dataset, config)
    outcomes = None
    if found is not None:
        known = found.success >= 0
        returns = np.add.reduceat(found.rewards, dataset.starts[:-1])
        outcomes = {
            "known": int(known.sum()),
            "success": int((found.success == 1).sum()),
            "rate": float((found.success == 1).sum() / max(known.sum(), 1)),
            "timeouts": int((~found.terminals[found.ends - 1]).sum()),
            "returns": _histogram(returns),
        }
    first_rows = dataset.starts[:-1]
    task_of_episode = dataset.rows.task_of_row[first_rows]
    return {
        "name": dataset.name,
        "version": dataset.info.version,
        "fps": dataset.info.fps,
        "robot_type": dataset.info.robot_type,
        "episodes": len(dataset.episode_ids),
        "frames": len(dataset),
        "tasks": [
            {"task": text, "episodes": int((task_of_episode == index).sum())}
            for index, text in enumerate(dataset.rows.tasks)
        ],
        "lengths": _histogram(dataset.lengths),
        "outcomes": outcomes,
        "outcome_problem": str(problems[0]) if problems else None,
        "cameras": [_camera(dataset, name) for name in dataset.cameras],
        "columns": [
            {"name": name, "dtype": dataset.info.features[name].dtype, "shape": list(dataset.info.features[name].shape)}
            for name in dataset.column_names
            if name in dataset.info.features
        ],
    }


def _camera(dataset: Dataset, name: str) -> dict[str, Any]:
    """Size and storage, by its first picture."""
    storage = "pictures in parquet"
    try:
        height, width, _ = next(iter(dataset.decode(name, 0))).shape
    except DataError as error:
        if not isinstance(error.__cause__, DepthPictureError):
            raise
        (height, width), storage = error.__cause__.size, "depths in parquet, which no policy sees"
    if name not in dataset.rows.column_names:
        videos: list[VideoIndex] = [segment.video for segment in dataset.segments(name)[0] if segment is not None]
        storage = f"video ({videos[0].codec})"
    return {"name": name, "height": height, "width": width, "storage": storage}


def _histogram(values: np.ndarray, bins: int = 10) -> dict[str, Any]:
    # In float64: neighbouring float32 numbers leave no room for bins.
    counts, edges = np.histogram(values.astype(np.float64), bins=min(bins, len(np.unique(values))))
    return {
        "min": float(values.min()),
        "max": float(values.max()),
        "mean": float(values.mean()),
        "counts": counts.tolist(),
        "edges": edges.tolist(),
    }
