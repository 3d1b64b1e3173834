"""What is in a dataset, in numbers: for `pirl data info` and for reports."""

from typing import Any

import numpy as np

from pirl.data.corrections import find_interventions, read_interventions
from pirl.data.lerobot.columns import DepthPictureError
from pirl.data.lerobot.reader import Dataset
from pirl.data.outcomes import OutcomeConfig, try_outcomes
from pirl.data.problems import Problem, format_episodes, format_problems
from pirl.errors import DataError


def summarize(dataset: Dataset, config: OutcomeConfig) -> dict[str, Any]:
    """JSON-ready. `outcomes` is None where the data does not tell how its episodes ended; `outcome_problem` says why.

    `problems` are what could not be read; the rest is told all the same.
    """
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
    task_of_episode = dataset.rows.task_of_row[dataset.starts[:-1]]
    human, unread = read_interventions(dataset)
    unread += [problem for problem in dataset.problems if problem.severity == "problem"]
    cameras = [_camera(dataset, name, unread) for name in dataset.cameras]
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
        "interventions": None
        if human is None
        else {
            "column": find_interventions(dataset),
            "frames": int(human.sum()),
            "episodes": int(np.add.reduceat(human, dataset.starts[:-1]).astype(bool).sum()),
        },
        "cameras": cameras,
        "problems": format_problems(dict.fromkeys(unread)),
        "columns": [
            {"name": name, "dtype": dataset.info.features[name].dtype, "shape": list(dataset.info.features[name].shape)}
            for name in dataset.column_names
            if name in dataset.info.features
        ],
    }


def _camera(dataset: Dataset, name: str, unread: list[Problem]) -> dict[str, Any]:
    """Size and storage, by the first picture that can be read; what cannot is added to `unread`."""
    storage, missing = "pictures in parquet", set[int]()
    size = dataset.info.features[name].image_size or (0, 0)
    if name not in dataset.rows.column_names:
        segments, problems = dataset.segments(name)
        unread += [problem for problem in problems if problem.severity == "problem"]
        missing = {
            number for number, segment in zip(dataset.episode_ids.tolist(), segments, strict=True) if segment is None
        }
        codecs = {segment.video.codec for segment in segments if segment is not None}
        storage = f"video ({', '.join(sorted(codecs))})" if codecs else "no video that can be read"
        if codecs and missing:
            storage += f", not for episode{'s' if len(missing) > 1 else ''} {format_episodes(missing)}"
    there = [e for e, number in enumerate(dataset.episode_ids.tolist()) if number not in missing]
    try:
        if there:
            size = next(iter(dataset.decode(name, there[0]))).shape[:2]
    except DataError as error:
        if isinstance(error.__cause__, DepthPictureError):
            size, storage = error.__cause__.size, "depths in parquet, which no policy sees"
        else:
            unread.append(Problem(str(error), episode=int(dataset.episode_ids[there[0]]), column=name))
    return {"name": name, "height": size[0], "width": size[1], "storage": storage}


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
