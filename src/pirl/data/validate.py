"""Which episodes of a dataset can be trained on, and what to do about the others."""

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

import numpy as np

from pirl.data.lerobot.columns import is_numeric
from pirl.data.lerobot.reader import Dataset, by_episode, scan_dataset
from pirl.data.outcomes import OutcomeConfig, try_outcomes
from pirl.data.problems import BrokenDatasetError, Problem, format_episodes, format_problems
from pirl.data.robots import Robot
from pirl.errors import ConfigError

logger = logging.getLogger(__name__)
BadEpisodes = Literal["refuse", "skip"]
# Beyond it the square of a number leaves float32, in which policies compute. Nothing that robots measure comes near.
LARGEST = np.sqrt(np.float64(np.finfo(np.float32).max))
# Share of the episodes that may be skipped: where more are bad, it is not the episodes.
MOST_SKIPPED = 0.5


def scan_episodes(source: str | os.PathLike[str], episodes: Collection[int] | None = None) -> Dataset:
    """Open a dataset, or these episodes of it, whatever is wrong with them; something has to be there."""
    dataset = scan_dataset(source)
    known = {*dataset.episode_ids.tolist(), *(problem.episode for problem in dataset.problems)}
    if absent := sorted(set(episodes or ()) - known):
        numbers = format_episodes(dataset.episode_ids.tolist())
        raise ConfigError(f"{dataset.name} has no episode {absent[0]}; its episodes are {numbers:.200}.")
    if episodes is not None:
        dataset = dataset.select(episodes)
    if not len(dataset):
        raise BrokenDatasetError(dataset.name, [p for p in dataset.problems if p.severity == "problem"])
    return dataset


def usable_episodes(
    dataset: Dataset, robot: Robot, outcomes: OutcomeConfig, bad_episodes: BadEpisodes = "refuse"
) -> Dataset:
    """The episodes that this robot can be trained on; the others are refused, or skipped with a warning."""
    columns, cameras = (*robot.state, *robot.actions), tuple(robot.cameras.values())
    usable, problems = split_episodes(dataset, columns, cameras, outcomes)
    for note in dataset.problems:
        logger.info("%s: %s", dataset.name, note)
    return leave_out(usable, problems, bad_episodes)


def leave_out(usable: Dataset, problems: Sequence[Problem], bad_episodes: BadEpisodes) -> Dataset:
    """What is `usable` without the episodes that have problems, if those may be skipped; else raises."""
    if not problems:
        return usable
    if any(problem.episode is None for problem in problems):
        raise BrokenDatasetError(usable.name, problems, "cannot be trained on")
    bad = {problem.episode for problem in problems if problem.episode is not None}
    usable = usable.select(set(usable.episode_ids.tolist()) - bad)
    total = len(bad) + len(usable.episode_ids)
    if bad_episodes == "refuse" or len(bad) > MOST_SKIPPED * total:
        what = f"has {_count(bad)} that cannot be trained on"
        raise BrokenDatasetError(usable.name, problems, what, skip_advice(usable, bad))
    lines = "\n".join(f"  {line}" for line in format_problems(problems))
    logger.warning("%s: %d of %d episodes are skipped:\n%s", usable.name, len(bad), total, lines)
    return usable


def split_episodes(
    dataset: Dataset, columns: Sequence[str], cameras: Sequence[str], outcomes: OutcomeConfig
) -> tuple[Dataset, list[Problem]]:
    """The episodes that can be trained on, with these columns and cameras, and what is wrong with the others.

    A problem of no episode blocks all.
    """
    found: list[Problem] = []
    while True:
        problems = list(dict.fromkeys(_find_problems(dataset, columns, cameras, outcomes)))
        bad = {problem.episode for problem in problems if problem.episode is not None}
        found += [problem for problem in problems if problem.episode is not None or not bad]
        if not bad:
            return dataset, found
        # What concerns the whole dataset may be due to these episodes: look again without them.
        dataset = dataset.select(set(dataset.episode_ids.tolist()) - bad)


def skip_advice(usable: Dataset, bad: Collection[int]) -> str:
    """The options that get the rest to train."""
    rest = usable.episode_ids.tolist()
    if not rest:
        return "No episode is left to train on."
    chosen = f"--data.selection.episodes {format_episodes(rest)}"
    if len(bad) > MOST_SKIPPED * (len(bad) + len(rest)):
        return f"More than half of the episodes would be skipped. To train on the other {_count(rest)}: {chosen}"
    return f"To train on the other {_count(rest)}: --data.bad-episodes skip, or {chosen}"


def _count(episodes: Collection[int]) -> str:
    return f"{len(episodes)} episode{'' if len(episodes) == 1 else 's'}"


def _find_problems(
    dataset: Dataset, columns: Sequence[str], cameras: Sequence[str], outcomes: OutcomeConfig
) -> Iterator[Problem]:
    yield from (problem for problem in dataset.problems if problem.severity == "problem")
    if not len(dataset):
        return
    found, problems = try_outcomes(dataset, outcomes)
    yield from problems
    yield from column_problems(dataset, columns, dataset.starts[1:] if found is None else found.ends)
    for camera in cameras:
        yield from camera_problems(dataset, camera)


def column_problems(dataset: Dataset, names: Sequence[str], ends: np.ndarray) -> Iterator[Problem]:
    """Episodes in which columns cannot be read as numbers that a policy can compute with, up to their `ends`."""
    numeric = []
    for name in names:
        types = dataset.rows.column_types.get(name, ())
        wrong = {file: kind for file, kind in enumerate(types) if kind is not None and not is_numeric(kind)}
        for file, kind in wrong.items():
            yield from of_file(dataset, file, "should hold numbers", name, f"{kind!s:.60}")
        if types and not wrong:
            numeric.append(name)
    columns, problems = dataset.try_columns(numeric)
    yield from problems
    used = np.zeros(len(dataset) + 1, np.int64)
    used[dataset.starts[:-1]] += 1
    np.subtract.at(used, ends, 1)
    inside = np.cumsum(used)[:-1] > 0
    for name, values in columns.items():
        if values.dtype.kind == "f":
            finite = np.isfinite(values)
            yield from _wrong_values(dataset, name, values, ~finite, inside, "is not finite")
            message = "is no measurement, and its square is beyond float32"
            yield from _wrong_values(dataset, name, values, finite & (np.abs(values) > LARGEST), inside, message)


def _wrong_values(
    dataset: Dataset, name: str, values: np.ndarray, wrong: np.ndarray, used: np.ndarray, message: str
) -> Iterator[Problem]:
    """The first wrong value of each episode, and where it is."""
    wrong = wrong.reshape(len(values), -1)
    for episode, rows in by_episode(dataset.starts, np.flatnonzero(wrong.any(axis=1) & used)):
        row, dimension = int(rows[0]), int(np.argmax(wrong[rows[0]]))
        frame = f"frame {row - dataset.starts[episode]}" + (f", dimension {dimension}" if values.ndim > 1 else "")
        more = f" (and {len(rows) - 1} more frames)" if len(rows) > 1 else ""
        yield Problem(
            f"{frame} {message}{more}",
            episode=int(dataset.episode_ids[episode]),
            file=dataset.rows.files[dataset.rows.file_of_row[row]],
            column=name,
            value=str(values[row].ravel()[dimension]),
        )


def camera_problems(dataset: Dataset, camera: str) -> Iterator[Problem]:
    """Episodes whose frames of a camera cannot be found; what is in the files shows when they are decoded."""
    if camera in dataset.rows.column_names:
        for file, kind in enumerate(dataset.rows.column_types[camera]):
            if kind is None:
                yield from of_file(dataset, file, "is not in this file, though it is in others", camera)
        return
    segments, problems = dataset.segments(camera)
    if dataset.info.features[camera].dtype == "image" and not any(segments):
        yield Problem("this camera is declared in info.json, but its pictures are not in the data", column=camera)
    else:
        yield from (problem for problem in problems if problem.severity == "problem")


def of_file(dataset: Dataset, file: int, message: str, column: str, value: str | None = None) -> Iterator[Problem]:
    """A problem of all episodes that a data file holds."""
    for episode in dataset.rows.episodes_of_file(file):
        yield Problem(message, "problem", episode, dataset.rows.files[file], column, value)
