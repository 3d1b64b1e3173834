"""Checks of a dataset before training: which episodes are usable, what is wrong with the others, and what there is."""

import itertools
import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from pirl.data.labels import LABEL_FILE, read_labels
from pirl.data.lerobot.format import DEFAULT_COLUMNS
from pirl.data.lerobot.parquet import DepthImageError, is_numeric
from pirl.data.lerobot.reader import Dataset, scan_dataset
from pirl.data.lerobot.video import MISSING, UNLISTED
from pirl.data.norm_stats import compute_norm_stats, degenerate_dimensions
from pirl.data.outcomes import END_COLUMNS, REWARD_COLUMN, SUCCESS_COLUMNS, OutcomeConfig, try_outcomes
from pirl.data.prepare import robot_problems
from pirl.data.problems import BrokenDatasetError, Problem, format_episodes, format_problems
from pirl.data.robots import Robot
from pirl.errors import ConfigError, DataError

logger = logging.getLogger(__name__)
BadEpisodes = Literal["refuse", "skip"]
# Beyond it the square of a number leaves float32, in which policies compute. Nothing that robots measure comes near.
LARGEST = np.sqrt(np.float64(np.finfo(np.float32).max))
# Share of the episodes that may be skipped: where more are bad, it is not the episodes.
_MAX_SKIPPED = 0.5
_STATES_AND_ACTIONS = ("observation.state", "state", "action", "actions")
_NUMBERS = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)")
_OUTCOMES = (REWARD_COLUMN, *SUCCESS_COLUMNS, *itertools.chain.from_iterable(END_COLUMNS.values()))


# --- which episodes are usable ---------------------------------------------------------------------------------------


def scan_episodes(source: str | os.PathLike[str], episodes: Collection[int] | None = None) -> Dataset:
    """Open a dataset, or these episodes of it, whatever is wrong with them; there must be some data."""
    dataset = scan_dataset(source)
    known = {*dataset.episode_ids.tolist(), *(problem.episode for problem in dataset.problems)}
    if absent := sorted(set(episodes or ()) - known):
        numbers = format_episodes(dataset.episode_ids.tolist())
        raise ConfigError(f"{dataset.name} has no episode {absent[0]}; its episodes are {numbers:.200}.")
    if episodes is not None:
        dataset = dataset.select(episodes)
    if not len(dataset):
        raise BrokenDatasetError(dataset.name, _of_severity(dataset.problems, "problem"))
    return dataset


def split_episodes(
    dataset: Dataset, columns: Sequence[str], cameras: Sequence[str], outcomes: OutcomeConfig
) -> tuple[Dataset, list[Problem]]:
    """The usable episodes for these columns and cameras, and the problems of the others; one of no episode blocks all."""
    found: list[Problem] = []
    while True:
        problems = list(dict.fromkeys(_find_problems(dataset, columns, cameras, outcomes)))
        bad = {problem.episode for problem in problems if problem.episode is not None}
        found += [problem for problem in problems if problem.episode is not None or not bad]
        if not bad:
            return dataset, found
        # Problems of the whole dataset may be due to these episodes: check again without them.
        dataset = dataset.select(set(dataset.episode_ids.tolist()) - bad)


def leave_out(usable: Dataset, problems: Sequence[Problem], bad_episodes: BadEpisodes) -> Dataset:
    """What is `usable` without the episodes that have problems, if those may be skipped; else raises."""
    if not problems:
        return usable
    if any(problem.episode is None for problem in problems):
        raise BrokenDatasetError(usable.name, problems, "cannot be trained on")
    bad = {problem.episode for problem in problems if problem.episode is not None}
    usable = usable.select(set(usable.episode_ids.tolist()) - bad)
    total = len(bad) + len(usable.episode_ids)
    if bad_episodes == "refuse" or len(bad) > _MAX_SKIPPED * total:
        what = f"has {len(bad)} episode{'' if len(bad) == 1 else 's'} that cannot be trained on"
        raise BrokenDatasetError(usable.name, problems, what, skip_advice(usable, bad))
    lines = "\n".join(f"  {line}" for line in format_problems(problems))
    logger.warning("%s: %d of %d episodes are skipped:\n%s", usable.name, len(bad), total, lines)
    return usable


def skip_advice(usable: Dataset, bad: Collection[int]) -> str:
    rest = usable.episode_ids.tolist()
    if not rest:
        return "No episode is left to train on."
    chosen = f"--data.selection.episodes {format_episodes(rest)}"
    others = f"the other {len(rest)} episode{'' if len(rest) == 1 else 's'}"
    if len(bad) > _MAX_SKIPPED * (len(bad) + len(rest)):
        return f"More than half of the episodes would be skipped. To train on {others}: {chosen}"
    return f"To train on {others}: --data.bad-episodes skip, or {chosen}"


def _find_problems(
    dataset: Dataset, columns: Sequence[str], cameras: Sequence[str], outcomes: OutcomeConfig
) -> Iterator[Problem]:
    yield from _of_severity(dataset.problems, "problem")
    if not len(dataset):
        return
    found, problems = try_outcomes(dataset, outcomes)
    yield from problems
    yield from _check_numbers(dataset, columns, dataset.starts[1:] if found is None else found.ends)
    for camera in cameras:
        yield from _check_frames(dataset, camera)


def _check_numbers(dataset: Dataset, names: Sequence[str], ends: np.ndarray) -> Iterator[Problem]:
    """Episodes in which columns cannot be read as numbers that a policy can compute with, up to their `ends`."""
    numeric = []
    for name in names:
        types = dataset.rows.column_types.get(name, ())
        wrong = {file: kind for file, kind in enumerate(types) if kind is not None and not is_numeric(kind)}
        for file, kind in wrong.items():
            yield from dataset.problems_of_file(file, "should hold numbers", name, f"{kind!s:.60}")
        if types and not wrong:
            numeric.append(name)
    columns, problems = dataset.try_columns(numeric)
    yield from problems
    used = np.arange(len(dataset)) < np.repeat(ends, dataset.lengths)
    for name, values in columns.items():
        if values.dtype.kind != "f":
            continue
        flat = values.reshape(len(values), -1)
        finite = np.isfinite(flat)
        too_large = finite & (np.abs(flat) > LARGEST)
        message = "is no measurement, and its square is beyond float32"
        for wrong, said in ((~finite, "is not finite"), (too_large, message)):
            rows = np.flatnonzero(wrong.any(axis=1) & used)
            first = flat[np.arange(len(flat)), wrong.argmax(axis=1)] if len(rows) else None
            yield from dataset.problems_at(rows, said, name, first)


def _check_frames(dataset: Dataset, camera: str) -> Iterator[Problem]:
    """Episodes whose frames of a camera cannot be found; damage inside the files shows when they are decoded."""
    if camera in dataset.rows.column_types:
        for file, kind in enumerate(dataset.rows.column_types[camera]):
            if kind is None:
                yield from dataset.problems_of_file(file, "is not in this file, though it is in others", camera)
        return
    segments, problems = dataset.segments(camera)
    if dataset.info.features[camera].dtype == "image" and not any(segments):
        yield Problem("this camera is declared in info.json, but its images are not in the data", column=camera)
    else:
        yield from _of_severity(problems, "problem")


def _of_severity(problems: Sequence[Problem], severity: str) -> list[Problem]:
    return [problem for problem in problems if problem.severity == severity]


def _pixels(size: tuple[int, int] | None) -> str:
    return f"{size[0]}×{size[1]}" if size else ""


# --- everything there is to report -----------------------------------------------------------------------------------


def check_dataset(
    source: str | os.PathLike[str],
    outcomes: OutcomeConfig | None = None,
    *,
    robot: Robot | None = None,
    episodes: Collection[int] | None = None,
    decode: bool = False,
) -> tuple[Dataset | None, list[Problem]]:
    """The episodes that can be trained on, and the results of all checks.

    A problem keeps an episode (or the dataset, where it names none) from training with this robot; without one, with a
    robot that uses all numbers and all cameras. Everything else is a note. Of every episode only the first frame of each
    camera is decoded, unless asked for more.
    """
    config = outcomes or OutcomeConfig()
    try:
        dataset = scan_episodes(source, episodes)
        if robot is not None and (missing := list(robot_problems(dataset, robot))):
            raise BrokenDatasetError(dataset.name, missing)
        columns = _all_numbers(dataset) if robot is None else (*robot.state, *robot.actions)
        cameras = _all_cameras(dataset) if robot is None else tuple(robot.cameras.values())
        usable, problems = split_episodes(dataset, columns, cameras, config)
    except BrokenDatasetError as error:
        return None, error.problems
    except DataError as error:  # such as labels that cannot be read
        return None, [Problem(str(error))]
    notes = _of_severity(dataset.problems, "note")
    for camera in dataset.cameras:
        found = list(_check_camera(dataset, camera, decode, robot is not None and camera in cameras))
        wrong = _of_severity(found, "problem")
        if camera in cameras:
            problems += wrong
        elif wrong:
            bad = len({problem.episode for problem in wrong} - {None}) or len(dataset.episode_ids)
            advice = "leave it out of the robot's cameras" if robot is None else f"robot {robot.name} does not use it"
            message = f"{bad} of {len(dataset.episode_ids)} episodes of this camera cannot be read; {advice}"
            notes.append(Problem(message, "note", column=camera))
        notes += _of_severity(found, "note")
    notes += _check_features(dataset)
    notes += _check_columns(dataset, columns)
    notes += _check_time(dataset)
    usable = usable.select(set(usable.episode_ids.tolist()) - {problem.episode for problem in problems})
    if len(usable):
        notes += _check_outcomes(usable, config)
        notes += _check_ranges(usable, _STATES_AND_ACTIONS if robot is None else columns)
    return usable, list(dict.fromkeys([*problems, *notes]))


def _all_numbers(dataset: Dataset) -> tuple[str, ...]:
    """Columns that some robot may use: declared as numbers, or called like a state or an action."""
    declared = {name for name, feature in dataset.info.features.items() if _NUMBERS.fullmatch(feature.dtype)}
    wanted = (declared | {*_STATES_AND_ACTIONS}) - {*DEFAULT_COLUMNS, *_OUTCOMES}
    return tuple(name for name in dataset.column_names if name in wanted)


def _all_cameras(dataset: Dataset) -> tuple[str, ...]:
    """Cameras of which any file is there; where there is none at all, all of them."""

    def has_files(camera: str) -> bool:
        if camera in dataset.rows.column_types:
            return True
        segments, problems = dataset.segments(camera)
        return any(segments) or any(problem.message not in (MISSING, UNLISTED) for problem in problems)

    return tuple(filter(has_files, dataset.cameras)) or dataset.cameras


def _check_features(dataset: Dataset) -> Iterator[Problem]:
    for name, feature in dataset.info.features.items():
        if not feature.is_camera and name not in dataset.column_names and name not in DEFAULT_COLUMNS:
            yield Problem("is declared in info.json but not in the data", "note", column=name)
        if feature.is_camera and feature.image_size is None:
            shape = str(list(feature.shape))
            yield Problem("a camera should be declared as height, width, channels", "note", None, None, name, shape)


def _check_columns(dataset: Dataset, used: Sequence[str]) -> Iterator[Problem]:
    """What is odd about columns, and what is wrong with declared ones that are not `used`."""
    others = [
        name
        for name, feature in dataset.info.features.items()
        if name not in (*used, *_OUTCOMES, *dataset.cameras) and _NUMBERS.fullmatch(feature.dtype)
    ]
    for problem in _check_numbers(dataset, others, dataset.starts[1:]):
        yield replace(problem, severity="note", message=f"{problem.message}; the column is not used")
    types = {name: dataset.rows.column_types.get(name, ()) for name in (*used, *others)}
    numeric = [name for name, kinds in types.items() if kinds and all(kind and is_numeric(kind) for kind in kinds)]
    for name, values in dataset.try_columns(numeric)[0].items():
        declared = dataset.info.features.get(name)
        if declared is not None and declared.dtype != values.dtype.name:
            yield Problem(f"is declared as {declared.dtype}", "note", column=name, value=values.dtype.name)


def _check_time(dataset: Dataset) -> Iterator[Problem]:
    time = dataset.try_columns([name for name in ("timestamp",) if name in dataset.column_names])[0].get("timestamp")
    if time is None or time.ndim != 1 or time.dtype.kind not in "iuf":
        return
    time = time.astype(np.float64)
    increases = np.diff(time, prepend=-np.inf) > 0
    increases[dataset.starts[:-1]] = True
    message = "is not later than the frame before; frames are in the order of frame_index"
    yield from dataset.problems_at(np.flatnonzero(~increases), message, "timestamp", time, "note")
    frames, fps = np.arange(len(time)) - np.repeat(dataset.starts[:-1], dataset.lengths), dataset.info.fps
    if (off := np.abs(time - frames / fps).max()) > 0.5 / fps:
        message = f"is off the frame rate of {fps:g} by up to {off:.3g} s"
        yield Problem(message, "note", column="timestamp")


def _check_camera(dataset: Dataset, camera: str, decode: bool, is_wanted: bool) -> Iterator[Problem]:
    """Whether the first frame of every episode (or every frame) is there, and what info.json says otherwise."""
    declared, kind = dataset.info.features[camera], "image"
    if camera not in dataset.rows.column_types:
        segments, problems = dataset.segments(camera)
        yield from _check_frames(dataset, camera)
        yield from _of_severity(problems, "note")
        kind = "video" if any(segments) else declared.dtype
    if kind != declared.dtype:
        place = "in the data" if kind == "image" else "in videos"
        yield Problem(f"info.json says {declared.dtype}; its frames are {place}", "note", column=camera)
    first_of_size: dict[tuple[int, int], int] = {}
    damaged: list[Problem] = []
    are_depths = True
    for episode, number in enumerate(dataset.episode_ids.tolist()):
        done = 0
        try:
            for frame in itertools.islice(dataset.decode(camera, episode), None if decode else 1):
                first_of_size.setdefault(frame.shape[:2], number)
                done += 1
        except BrokenDatasetError:
            continue  # already reported
        except DataError as error:
            are_depths = are_depths and isinstance(error.__cause__, DepthImageError)
            said = f"frame {done}: the image cannot be decoded: {error.__cause__}" if kind == "image" else str(error)
            damaged.append(Problem(said, episode=number, column=camera))
    if damaged and are_depths and not first_of_size:
        message = "its images are depths, not colors: a policy cannot look through it"
        damaged = [Problem(message, "problem" if is_wanted else "note", column=camera)]
    yield from damaged
    for size, number in first_of_size.items():
        if declared.image_size not in (None, size):
            message = f"info.json says {_pixels(declared.image_size)} pixels"
            yield Problem(message, "note", number, None, camera, _pixels(size))


def _check_outcomes(dataset: Dataset, config: OutcomeConfig) -> Iterator[Problem]:
    found, _ = try_outcomes(dataset, config)
    yield from found.notes if found else ()
    if found and config.reward != "raw" and not found.success.any():
        message = "none of the episodes succeeded, so there is no reward to learn from; if some did: pirl data label"
        yield Problem(message, "note")
    for number in sorted(set(read_labels(dataset.root)) - {*dataset.whole.episode_ids, *dataset.listing.episodes}):
        yield Problem("is labeled but not in the data", "note", number, LABEL_FILE)


def _check_ranges(dataset: Dataset, names: Sequence[str]) -> Iterator[Problem]:
    for name, values in dataset.try_columns([name for name in names if name in dataset.column_names])[0].items():
        if values.dtype.kind not in "biuf" or values.ndim != 2 or not (np.abs(values) <= LARGEST).all():
            continue
        if not values.shape[1]:
            yield Problem("has no dimensions", column=name, value=str(values.shape))
            continue
        feature = dataset.info.features.get(name)
        titles = _flat_names(feature.names) if feature is not None else []
        stats = {name: compute_norm_stats(values, values, dataset.starts, 1)["state"]}
        for sentence in degenerate_dimensions(stats, {name: titles} if len(titles) == values.shape[1] else None):
            yield Problem(sentence, "note", column=name)


def _flat_names(names: Any) -> list[str]:
    """Names of dimensions, however they are nested: [...], {"motors": [...]}, {"x": 0, "y": 1}."""
    if isinstance(names, dict):
        names = list(names.values()) if all(isinstance(value, list) for value in names.values()) else list(names)
    if not isinstance(names, list):
        return [str(names)] if names is not None else []
    return [flat for name in names for flat in _flat_names(name)]
