"""Everything that can be found wrong with a dataset before training on it, all of it at once."""

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pirl.data.labels import LABEL_FILE, read_labels
from pirl.data.lerobot.columns import DepthPictureError, ParquetDamageError, is_numeric, open_picture, read_all_cells
from pirl.data.lerobot.format import DEFAULT_COLUMNS, resolve_inside
from pirl.data.lerobot.reader import Dataset, by_episode
from pirl.data.lerobot.video import MISSING, UNLISTED, VideoIndex, codec_name
from pirl.data.norm_stats import degenerate_dimensions, frame_stats
from pirl.data.outcomes import END_COLUMNS, REWARD_COLUMN, SUCCESS_COLUMNS, OutcomeConfig, try_outcomes
from pirl.data.problems import BrokenDatasetError, Problem
from pirl.data.robots import Robot
from pirl.data.validate import LARGEST, camera_problems, column_problems, of_file, scan_episodes, split_episodes
from pirl.errors import DataError

STATE_COLUMNS = ("observation.state", "state")
ACTION_COLUMNS = ("action", "actions")
_NUMBERS = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)")
_OUTCOMES = (REWARD_COLUMN, *SUCCESS_COLUMNS, *itertools.chain.from_iterable(END_COLUMNS.values()))


def check_dataset(
    source: str | os.PathLike[str],
    outcomes: OutcomeConfig | None = None,
    *,
    robot: Robot | None = None,
    episodes: Collection[int] | None = None,
    decode: bool = False,
) -> tuple[Dataset | None, list[Problem]]:
    """The episodes that can be trained on, and all that there is to say about the dataset.

    A problem keeps an episode (or the dataset, where it names none) from training with this robot; without one, with a
    robot that uses all numbers and all cameras. Everything else is a note. Of every episode's video only the first frame
    is decoded, unless asked for more.
    """
    config = outcomes or OutcomeConfig()
    try:
        dataset = scan_episodes(source, episodes)
        if robot is not None and (missing := list(_check_robot(dataset, robot))):
            raise BrokenDatasetError(dataset.name, missing)
        columns = _all_numbers(dataset) if robot is None else (*robot.state, *robot.actions)
        cameras = _all_cameras(dataset) if robot is None else tuple(robot.cameras.values())
        usable, problems = split_episodes(dataset, columns, cameras, config)
    except BrokenDatasetError as error:
        return None, error.problems
    except DataError as error:  # such as labels that cannot be read
        return None, [Problem(str(error))]
    notes = [problem for problem in dataset.problems if problem.severity == "note"]
    for camera in dataset.cameras:
        found = list(_check_camera(dataset, camera, decode, robot is not None and camera in cameras))
        problems += [problem for problem in found if problem.severity == "problem" and camera in cameras]
        if camera not in cameras and any(problem.severity == "problem" for problem in found):
            notes.append(Problem(_cannot_see(dataset, camera, found, robot), "note", column=camera))
        notes += [problem for problem in found if problem.severity == "note"]
    notes += _check_features(dataset)
    notes += _check_columns(dataset, columns)
    notes += _check_time(dataset)
    usable = usable.select(set(usable.episode_ids.tolist()) - {problem.episode for problem in problems})
    if len(usable):
        notes += _check_outcomes(usable, config)
        notes += _check_statistics(usable, (*STATE_COLUMNS, *ACTION_COLUMNS) if robot is None else columns)
    return usable, list(dict.fromkeys([*problems, *notes]))


def _check_robot(dataset: Dataset, robot: Robot) -> Iterator[Problem]:
    """What a robot needs that nothing in the dataset is called, or that has another width."""
    for names, width in ((robot.state, robot.state_dim), (robot.actions, robot.action_dim)):
        for name in (name for name in names if name not in dataset.column_names):
            has = ", ".join(dataset.column_names)
            yield Problem(f"is not in the data, and robot {robot.name} needs it; the columns are {has}", column=name)
        declared = [dataset.info.features[name].shape for name in names if name in dataset.info.features]
        found = sum(map(math.prod, declared))
        if width is not None and len(declared) == len(names) and found != width:
            yield Problem(f"has {found} dimensions, robot {robot.name} has {width}", column=" + ".join(names))
    for name in (name for name in robot.cameras.values() if name not in dataset.cameras):
        has = ", ".join(dataset.cameras) or "none"
        yield Problem(f"is no camera of the dataset, and robot {robot.name} needs it; it has {has}", column=name)


def _all_numbers(dataset: Dataset) -> tuple[str, ...]:
    """Columns that some robot may use: declared as numbers, or called like a state or an action."""
    declared = {name for name, feature in dataset.info.features.items() if _NUMBERS.fullmatch(feature.dtype)}
    usual = {*STATE_COLUMNS, *ACTION_COLUMNS}
    return tuple(
        name for name in dataset.column_names if name in declared | usual and name not in (*DEFAULT_COLUMNS, *_OUTCOMES)
    )


def _all_cameras(dataset: Dataset) -> tuple[str, ...]:
    """Cameras of which any file is there; where there is none at all, all of them."""

    def is_there(camera: str) -> bool:
        if camera in dataset.rows.column_names:
            return True
        segments, problems = dataset.segments(camera)
        return any(segments) or any(problem.message not in (MISSING, UNLISTED) for problem in problems)

    return tuple(filter(is_there, dataset.cameras)) or dataset.cameras


def _cannot_see(dataset: Dataset, camera: str, found: Sequence[Problem], robot: Robot | None) -> str:
    """What is said of a camera that is not judged."""
    whose = f"robot {robot.name} does not use it" if robot is not None else "leave it out of the robot's cameras"
    episodes = {problem.episode for problem in found if problem.severity == "problem" and problem.episode is not None}
    if not episodes or len(episodes) == len(dataset.episode_ids):
        return f"nothing of this camera can be read; {whose}"
    return f"{len(episodes)} of {len(dataset.episode_ids)} episodes of this camera cannot be read; {whose}"


def _check_features(dataset: Dataset) -> Iterator[Problem]:
    for name, feature in dataset.info.features.items():
        if not feature.is_camera and name not in dataset.column_names and name not in DEFAULT_COLUMNS:
            yield Problem("is declared in info.json but not in the data", "note", column=name)
        if feature.is_camera and feature.image_size is None:
            shape = str(list(feature.shape))
            yield Problem("a camera should be declared as height, width, channels", "note", None, None, name, shape)
    undeclared = [name for name in DEFAULT_COLUMNS if name not in dataset.info.features]
    if undeclared:
        yield Problem(f"does not declare {', '.join(undeclared)}", severity="note", file="meta/info.json")
    lists = {"v2.0": "meta/stats.json", "v2.1": "meta/episodes_stats.jsonl"}
    needed = lists.get(dataset.info.version)
    if needed and not (dataset.root / needed).is_file():
        yield Problem("is missing: pirl does not need it, LeRobot does", severity="note", file=needed)


def _check_columns(dataset: Dataset, used: Sequence[str]) -> Iterator[Problem]:
    """What is odd about columns, and what is wrong with declared ones that are not `used`."""
    others = [
        name
        for name, feature in dataset.info.features.items()
        if name not in (*used, *_OUTCOMES, *dataset.cameras) and _NUMBERS.fullmatch(feature.dtype)
    ]
    for problem in column_problems(dataset, others, dataset.starts[1:]):
        yield replace(problem, severity="note", message=f"{problem.message}; the column is not used")
    types = {name: dataset.rows.column_types.get(name, ()) for name in (*used, *others)}
    numeric = [name for name, kinds in types.items() if kinds and all(kind and is_numeric(kind) for kind in kinds)]
    for name, values in dataset.try_columns(numeric)[0].items():
        declared = dataset.info.features.get(name)
        if declared is not None and declared.dtype != values.dtype.name:
            yield Problem(f"is declared as {declared.dtype}", severity="note", column=name, value=values.dtype.name)


def _check_time(dataset: Dataset) -> Iterator[Problem]:
    columns, _ = dataset.try_columns(["timestamp"] if "timestamp" in dataset.column_names else [])
    if "timestamp" not in columns or columns["timestamp"].ndim != 1 or columns["timestamp"].dtype.kind not in "iuf":
        return
    time = columns["timestamp"].astype(np.float64)
    inside = np.ones(len(time), bool)
    inside[dataset.starts[:-1]] = False
    for episode, rows in by_episode(dataset.starts, np.flatnonzero(inside & ~(np.diff(time, prepend=-np.inf) > 0))):
        frame = int(rows[0] - dataset.starts[episode])
        value = f"{time[rows[0]]:.6g} s after {time[rows[0] - 1]:.6g} s"
        number = int(dataset.episode_ids[episode])
        message = f"time does not increase at frame {frame}; frames are in the order of frame_index"
        yield Problem(message, "note", number, None, "timestamp", value)
    frames = np.arange(len(time)) - np.repeat(dataset.starts[:-1], dataset.lengths)
    off = np.abs(time - frames / dataset.info.fps)
    if off.max() > 0.5 / dataset.info.fps:
        yield Problem(
            f"is off the frame rate of {dataset.info.fps:g} by up to {off.max():.3g} s; pictures are matched by counting",
            severity="note",
            column="timestamp",
        )


def _check_camera(dataset: Dataset, camera: str, decode: bool, is_asked_for: bool) -> Iterator[Problem]:
    in_parquet, declared = camera in dataset.rows.column_names, dataset.info.features[camera].dtype
    if in_parquet:
        if declared == "video":
            yield Problem(
                "info.json says video; its pictures are in the data and read from there", "note", column=camera
            )
        yield from _check_pictures(dataset, camera, is_asked_for)
    else:
        segments, problems = dataset.segments(camera)
        yield from camera_problems(dataset, camera)
        yield from (problem for problem in problems if problem.severity == "note")
        videos = {segment.video.path: segment.video for segment in segments if segment is not None}
        if declared == "image" and videos:
            yield Problem("info.json says image; its frames are in videos and read from there", "note", column=camera)
        yield from _check_declared(dataset, camera, list(videos.values()))
    if decode or not in_parquet:
        for episode, number in enumerate(dataset.episode_ids.tolist()):
            try:
                for _ in itertools.islice(dataset.decode(camera, episode), None if decode else 1):
                    pass
            except BrokenDatasetError:
                continue  # said already
            except DataError as error:
                if isinstance(error.__cause__, DepthPictureError):
                    break  # likewise
                yield Problem(str(error), episode=number, column=camera)


def _check_declared(dataset: Dataset, camera: str, videos: Sequence[VideoIndex]) -> Iterator[Problem]:
    feature = dataset.info.features[camera]
    codecs = {video.codec for video in videos}
    if feature.codec and codecs and codecs != {codec_name(feature.codec)}:
        yield Problem(
            f"info.json says the codec is {feature.codec}",
            severity="note",
            column=camera,
            value=", ".join(sorted(codecs)),
        )
    wanted = feature.image_size
    for size in dict.fromkeys(video.size for video in videos if video.size != wanted) if wanted else ():
        files = [video.path.relative_to(dataset.root).as_posix() for video in videos if video.size == size]
        more = f"; so in {len(files) - 1} more files" if len(files) > 1 else ""
        yield Problem(f"info.json says {_times(wanted)} pixels{more}", "note", None, files[0], camera, _times(size))


def _check_pictures(dataset: Dataset, camera: str, is_asked_for: bool) -> Iterator[Problem]:
    """Every picture in the parquet files: is it one, and is it whole?"""
    rows, wanted = dataset.rows, dataset.info.features[camera].image_size
    counts: Counter[tuple[int, int]] = Counter()
    first_of: dict[tuple[int, int], tuple[int, int, str]] = {}
    wrong: dict[int, list[tuple[int, str, DataError]]] = {}
    for file, relative in enumerate(rows.files):
        try:
            cells = read_all_cells(resolve_inside(dataset.root, relative, links=True), camera)
            mine = rows.rows_of_file[file]
            row_of_cell = dict(zip(rows.row_in_file[mine].tolist(), mine.tolist(), strict=True))
            for row, cell in ((row_of_cell.get(place), cell) for place, cell in enumerate(cells)):
                if row is None:  # of an unfinished episode
                    continue
                episode = int(np.searchsorted(dataset.starts, row, side="right")) - 1
                number, frame = int(dataset.episode_ids[episode]), row - int(dataset.starts[episode])
                try:
                    size = _check_picture(cell)
                except DataError as error:
                    wrong.setdefault(number, []).append((frame, relative, error))
                else:
                    counts[size] += 1
                    first_of.setdefault(size, (number, frame, relative))
        except (ParquetDamageError, ValueError) as error:
            yield from of_file(dataset, file, str(error), camera)
    yield from _wrong_pictures(dataset, camera, wrong, is_asked_for)
    for size in counts if wanted else ():
        if size == wanted:
            continue
        number, frame, relative = first_of[size]
        count = f"{counts[size]} pictures have" if counts[size] > 1 else "one picture has"
        message = f"info.json says {_times(wanted)} pixels, {count} another size: frame {frame} is the first"
        yield Problem(message, "note", number, relative, camera, _times(size))


def _wrong_pictures(
    dataset: Dataset, camera: str, wrong: dict[int, list[tuple[int, str, DataError]]], is_asked_for: bool
) -> Iterator[Problem]:
    """The first wrong picture of each episode. A camera of depths alone is none that a policy could be given."""
    errors = [error for entries in wrong.values() for *_, error in entries]
    if len(errors) == len(dataset) and all(isinstance(error, DepthPictureError) for error in errors):
        message = "its pictures are depths, not colours: a policy cannot look through it"
        yield Problem(message, "problem" if is_asked_for else "note", column=camera)
        return
    for number, entries in sorted(wrong.items()):
        frame, relative, error = min(entries, key=lambda entry: entry[0])
        more = f" (and {len(entries) - 1} more frames)" if len(entries) > 1 else ""
        message = f"the picture of frame {frame} cannot be read: {error}{more}"
        yield Problem(message, episode=number, file=relative, column=camera)


def _times(size: tuple[int, int] | None) -> str:
    return f"{size[0]}×{size[1]}" if size else ""


def _check_picture(cell: Any) -> tuple[int, int]:
    """Height and width of a picture that is whole."""
    with open_picture(cell) as image:
        if image.format == "PNG":
            image.verify()
        else:
            image.load()  # of other formats, nothing can be verified without
        return image.height, image.width


def _check_outcomes(dataset: Dataset, config: OutcomeConfig) -> Iterator[Problem]:
    found, _ = try_outcomes(dataset, config)
    yield from found.notes if found else ()
    if found and config.reward != "raw" and not found.success.any():
        # It may be true, or nobody has filled the column in.
        message = "none of the episodes succeeded, so there is no reward to learn from; if some did: pirl data label"
        yield Problem(message, "note")
    listed = {*dataset.whole.episode_ids.tolist(), *dataset.listing.episodes}
    for number in sorted(set(read_labels(dataset.root)) - listed):
        yield Problem("is labelled but not in the data", "note", number, LABEL_FILE)


def _check_statistics(dataset: Dataset, names: Sequence[str]) -> Iterator[Problem]:
    """Dimensions of state and action whose range is degenerate."""
    present = [name for name in names if name in dataset.column_names]
    for name, values in dataset.try_columns(present)[0].items():
        if values.dtype.kind not in "biuf" or values.ndim != 2 or not (np.abs(values) <= LARGEST).all():
            continue
        if not values.shape[1]:
            yield Problem("has no dimensions", column=name, value=str(values.shape))
            continue
        feature = dataset.info.features.get(name)
        names = _flat_names(feature.names) if feature is not None else []
        try:
            stats = frame_stats(name, values.astype(np.float64), dataset.starts)
        except DataError as error:
            yield Problem(str(error), column=name)
            continue
        for sentence in degenerate_dimensions({name: stats}, {name: names} if len(names) == values.shape[1] else None):
            yield Problem(sentence, "note", column=name)


def _flat_names(names: Any) -> list[str]:
    """Names of dimensions, however they are nested: [...], {"motors": [...]}, {"x": 0, "y": 1}."""
    if isinstance(names, dict):
        names = list(names.values()) if all(isinstance(value, list) for value in names.values()) else list(names)
    if not isinstance(names, list):
        return [str(names)] if names is not None else []
    return [flat for name in names for flat in _flat_names(name)]
