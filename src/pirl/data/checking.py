"""Everything that can be found wrong with a dataset before training on it, all of it at once."""

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pirl.data.lerobot.columns import DepthPictureError, ParquetDamageError, is_numeric, open_picture, read_all_cells
from pirl.data.lerobot.dataset import Dataset, scan_dataset
from pirl.data.lerobot.layout import DEFAULT_COLUMNS, resolve_inside
from pirl.data.lerobot.rows import by_episode
from pirl.data.lerobot.video import VideoIndex, codec_name
from pirl.data.outcomes import OutcomeConfig, try_outcomes
from pirl.data.problems import BrokenDatasetError, Problem
from pirl.data.statistics import degenerate_dimensions, frame_stats
from pirl.errors import DataError

STATE_COLUMNS = ("observation.state", "state")
ACTION_COLUMNS = ("action", "actions")
# Beyond it the square of a number leaves float32, in which policies compute. Nothing that robots measure comes near.
LARGEST = np.sqrt(np.float64(np.finfo(np.float32).max))
_NUMBERS = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)")


def check_dataset(
    source: str | os.PathLike[str],
    outcomes: OutcomeConfig | None = None,
    *,
    decode: bool = False,
) -> tuple[Dataset | None, list[Problem]]:
    """All problems and notes. Of every episode's video only the first frame is decoded, unless asked for more."""
    try:
        dataset = scan_dataset(source)
    except BrokenDatasetError as error:
        return None, error.problems
    problems = list(dataset.problems)
    if len(dataset):
        problems += _check_features(dataset)
        problems += _check_columns(dataset)
        problems += _check_time(dataset)
        for camera in dataset.cameras:
            problems += _check_camera(dataset, camera, decode)
        problems += _check_outcomes(dataset, outcomes or OutcomeConfig())
        problems += _check_statistics(dataset)
    return dataset, list(dict.fromkeys(problems))


def _check_features(dataset: Dataset) -> Iterator[Problem]:
    for name, feature in dataset.info.features.items():
        if not feature.is_camera and name not in dataset.column_names and name not in DEFAULT_COLUMNS:
            yield Problem("is declared in info.json but not in the data", column=name)
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


def _check_columns(dataset: Dataset) -> Iterator[Problem]:
    """Columns that somebody asks for: declared ones and those of every robot. Others may hold what they like."""
    numeric = []
    for name in dataset.column_names:
        dtype = dataset.info.features[name].dtype if name in dataset.info.features else "string"
        types = zip(dataset.rows.files, dataset.rows.column_types[name], strict=True)
        wrong = [(file, kind) for file, kind in types if not is_numeric(kind)]
        used = name in (*DEFAULT_COLUMNS, *STATE_COLUMNS, *ACTION_COLUMNS)
        if not wrong and (used or dtype != "string"):
            numeric.append(name)
        elif wrong and (used or _NUMBERS.fullmatch(dtype)):
            yield Problem("should hold numbers", "problem", None, wrong[0][0], name, f"{wrong[0][1]!s:.60}")
    columns, problems = dataset.try_columns(numeric)
    yield from problems
    for name, values in columns.items():
        declared = dataset.info.features.get(name)
        if declared is not None and declared.dtype != values.dtype.name and declared.dtype not in ("image", "video"):
            yield Problem(f"is declared as {declared.dtype}", severity="note", column=name, value=values.dtype.name)
        if values.dtype.kind != "f":
            continue
        finite = np.isfinite(values)
        yield from _check_values(dataset, name, values, ~finite, "is not finite")
        too_large = finite & (np.abs(values) > LARGEST)
        yield from _check_values(
            dataset, name, values, too_large, "is no measurement, and its square is beyond float32"
        )


def _check_values(
    dataset: Dataset, name: str, values: np.ndarray, wrong: np.ndarray, message: str
) -> Iterator[Problem]:
    """The first wrong value of each episode, and where it is."""
    wrong = wrong.reshape(len(values), -1)
    for episode, rows in by_episode(dataset.starts, np.flatnonzero(wrong.any(axis=1))):
        row, dimension = int(rows[0]), int(np.argmax(wrong[rows[0]]))
        frame = f"frame {row - dataset.starts[episode]}" + (f", dimension {dimension}" if values.ndim > 1 else "")
        more = f" (and {len(rows) - 1} more frames)" if len(rows) > 1 else ""
        yield Problem(
            f"{frame} {message}{more}",
            episode=int(dataset.episode_ids[episode]),
            file=_file_of(dataset, row),
            column=name,
            value=str(values[row].ravel()[dimension]),
        )


def _check_time(dataset: Dataset) -> Iterator[Problem]:
    columns, _ = dataset.try_columns(["timestamp"] if "timestamp" in dataset.column_names else [])
    if "timestamp" not in columns or columns["timestamp"].ndim != 1 or columns["timestamp"].dtype.kind not in "iuf":
        return
    time = columns["timestamp"].astype(np.float64)
    inside = np.ones(len(time), bool)
    inside[dataset.starts[:-1]] = False
    for episode, rows in by_episode(dataset.starts, np.flatnonzero(inside & (np.diff(time, prepend=-np.inf) <= 0))):
        frame = int(rows[0] - dataset.starts[episode])
        value = f"{time[rows[0]]:.6g} s after {time[rows[0] - 1]:.6g} s"
        number = int(dataset.episode_ids[episode])
        yield Problem(f"time does not increase at frame {frame}", "problem", number, None, "timestamp", value)
    frames = np.arange(len(time)) - np.repeat(dataset.starts[:-1], dataset.lengths)
    off = np.abs(time - frames / dataset.info.fps)
    if off.max() > 0.5 / dataset.info.fps:
        yield Problem(
            f"is off the frame rate of {dataset.info.fps:g} by up to {off.max():.3g} s; pictures are matched by counting",
            severity="note",
            column="timestamp",
        )


def _check_camera(dataset: Dataset, camera: str, decode: bool) -> Iterator[Problem]:
    in_parquet, declared = camera in dataset.rows.column_names, dataset.info.features[camera].dtype
    if in_parquet:
        if declared == "video":
            yield Problem(
                "info.json says video; its pictures are in the data and read from there", "note", column=camera
            )
        yield from _check_pictures(dataset, camera)
    else:
        segments, problems = dataset.segments(camera)
        found = any(segment is not None for segment in segments)
        if declared == "image":
            if not found:
                message = "this camera is declared in info.json, but its pictures are not in the data"
                yield Problem(message, column=camera)
                return
            yield Problem("info.json says image; its frames are in videos and read from there", "note", column=camera)
        elif not found and not any("frames" in problem.message for problem in problems):
            yield Problem("this camera is declared in info.json, but none of its videos can be read", column=camera)
        yield from problems
        videos = {segment.video.path: segment.video for segment in segments if segment is not None}
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


def _check_pictures(dataset: Dataset, camera: str) -> Iterator[Problem]:
    """Every picture in the parquet files: is it one, and is it whole?"""
    rows, wanted = dataset.rows, dataset.info.features[camera].image_size
    positions = np.full(rows.file_starts[-1], -1)
    positions[rows.order] = np.arange(len(rows.order))
    counts: Counter[tuple[int, int]] = Counter()
    first_of: dict[tuple[int, int], tuple[int, int, str]] = {}
    wrong: dict[int, list[tuple[int, str, DataError]]] = {}
    for file, relative in enumerate(rows.files):
        try:
            cells = read_all_cells(resolve_inside(dataset.root, relative), camera)
            mine = positions[rows.file_starts[file] : rows.file_starts[file + 1]]
            for position, cell in zip(mine.tolist(), cells, strict=False):
                if position < 0:
                    continue
                episode = int(np.searchsorted(dataset.starts, position, side="right")) - 1
                number, frame = int(dataset.episode_ids[episode]), position - int(dataset.starts[episode])
                try:
                    size = _check_picture(cell)
                except DataError as error:
                    wrong.setdefault(number, []).append((frame, relative, error))
                else:
                    counts[size] += 1
                    first_of.setdefault(size, (number, frame, relative))
        except (ParquetDamageError, ValueError) as error:
            yield Problem(str(error), file=relative, column=camera)
    yield from _wrong_pictures(dataset, camera, wrong)
    for size in counts if wanted else ():
        if size == wanted:
            continue
        number, frame, relative = first_of[size]
        count = f"{counts[size]} pictures have" if counts[size] > 1 else "one picture has"
        message = f"info.json says {_times(wanted)} pixels, {count} another size: frame {frame} is the first"
        yield Problem(message, "note", number, relative, camera, _times(size))


def _wrong_pictures(
    dataset: Dataset, camera: str, wrong: dict[int, list[tuple[int, str, DataError]]]
) -> Iterator[Problem]:
    """The first wrong picture of each episode. A camera of depths alone is none that a policy could be given."""
    errors = [error for entries in wrong.values() for *_, error in entries]
    if len(errors) == len(dataset) and all(isinstance(error, DepthPictureError) for error in errors):
        yield Problem("its pictures are depths, not colours: a policy cannot look through it", "note", column=camera)
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


def _check_outcomes(dataset: Dataset, config: OutcomeConfig) -> list[Problem]:
    try:
        found, problems = try_outcomes(dataset, config)
    except DataError as error:
        return [Problem(str(error))]
    notes = list(found.notes) if found else []
    if found and config.reward != "raw" and not found.success.any():
        # It may be true, or nobody has filled the column in.
        message = "none of the episodes succeeded, so there is no reward to learn from; if some did: pirl data label"
        notes.append(Problem(message, "note"))
    return problems + notes


def _check_statistics(dataset: Dataset) -> Iterator[Problem]:
    """Dimensions of state and action whose range is degenerate."""
    present = [name for name in (*STATE_COLUMNS, *ACTION_COLUMNS) if name in dataset.column_names]
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
            yield Problem(sentence, column=name)


def _flat_names(names: Any) -> list[str]:
    """Names of dimensions, however they are nested: [...], {"motors": [...]}, {"x": 0, "y": 1}."""
    if isinstance(names, dict):
        names = list(names.values()) if all(isinstance(value, list) for value in names.values()) else list(names)
    if not isinstance(names, list):
        return [str(names)] if names is not None else []
    return [flat for name in names for flat in _flat_names(name)]


def _file_of(dataset: Dataset, row: int) -> str:
    rows = dataset.rows
    return rows.files[int(np.searchsorted(rows.file_starts, rows.order[row], side="right")) - 1]
