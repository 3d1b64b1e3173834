"""Everything that can be found wrong with a dataset before training on it, all of it at once."""

import io
import os
from collections.abc import Iterator, Sequence

import numpy as np
import PIL.Image

from pirl.data.lerobot.columns import ParquetDamageError, read_cells
from pirl.data.lerobot.dataset import Dataset, scan_dataset
from pirl.data.lerobot.layout import DEFAULT_COLUMNS, resolve_inside
from pirl.data.lerobot.video import VideoIndex, codec_name
from pirl.data.outcomes import OutcomeConfig, try_outcomes
from pirl.data.problems import BrokenDatasetError, Problem
from pirl.data.statistics import compute_norm_stats, degenerate_dimensions
from pirl.errors import DataError

STATE_COLUMNS = ("observation.state", "state")
ACTION_COLUMNS = ("action", "actions")


def check_dataset(
    source: str | os.PathLike[str],
    outcomes: OutcomeConfig | None = None,
    *,
    decode: bool = False,
) -> tuple[Dataset | None, list[Problem]]:
    """All problems and notes. Videos are counted but not decoded, unless asked for."""
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


def _numeric_columns(dataset: Dataset) -> tuple[dict[str, np.ndarray], list[Problem]]:
    columns, problems = dataset.try_columns(dataset.column_names)
    return {name: values for name, values in columns.items() if values.dtype.kind in "biuf"}, problems


def _check_columns(dataset: Dataset) -> Iterator[Problem]:
    columns, problems = _numeric_columns(dataset)
    yield from problems
    for name, values in columns.items():
        declared = dataset.info.features.get(name)
        if declared is not None and declared.dtype != values.dtype.name and declared.dtype not in ("image", "video"):
            yield Problem(f"is declared as {declared.dtype}", severity="note", column=name, value=values.dtype.name)
        if values.dtype.kind != "f":
            continue
        rows = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
        for episode, bad in _by_episode(dataset, rows):
            frame = int(bad[0] - dataset.starts[episode])
            first = values[bad[0]]
            dimension = "" if first.ndim == 0 else f", dimension {int(np.flatnonzero(~np.isfinite(first.ravel()))[0])}"
            value = str(np.ravel(first)[np.flatnonzero(~np.isfinite(np.ravel(first)))[0]])
            more = f" (and {len(bad) - 1} more frames)" if len(bad) > 1 else ""
            number = int(dataset.episode_ids[episode])
            yield Problem(f"frame {frame}{dimension} is not finite{more}", "problem", number, None, name, value)


def _check_time(dataset: Dataset) -> Iterator[Problem]:
    columns, _ = dataset.try_columns(["timestamp"] if "timestamp" in dataset.column_names else [])
    if "timestamp" not in columns or columns["timestamp"].ndim != 1:
        return
    time = columns["timestamp"].astype(np.float64)
    inside = np.ones(len(time), bool)
    inside[dataset.starts[:-1]] = False
    for episode, rows in _by_episode(dataset, np.flatnonzero(inside & (np.diff(time, prepend=-np.inf) <= 0))):
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
    if camera in dataset.rows.column_names:
        yield from _check_pictures(dataset, camera)
    elif dataset.info.features[camera].dtype == "image":
        yield Problem("this camera is declared in info.json, but its pictures are not in the data", column=camera)
        return
    else:
        segments, problems = dataset.segments(camera)
        if all(segment is None for segment in segments) and not any(
            "frames" in problem.message for problem in problems
        ):
            yield Problem("this camera is declared in info.json, but none of its videos can be read", column=camera)
        yield from problems
        videos = {segment.video.path: segment.video for segment in segments if segment is not None}
        yield from _check_declared(dataset, camera, list(videos.values()))
    if decode:
        for episode, number in enumerate(dataset.episode_ids.tolist()):
            try:
                for _ in dataset.decode(camera, episode):
                    pass
            except BrokenDatasetError:
                continue  # said already
            except DataError as error:
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
    for video in videos:
        if wanted and video.size != wanted:
            file, value = video.path.relative_to(dataset.root).as_posix(), f"{video.size[0]}×{video.size[1]}"
            yield Problem(f"info.json says {wanted[0]}×{wanted[1]} pixels", "note", None, file, camera, value)


def _check_pictures(dataset: Dataset, camera: str) -> Iterator[Problem]:
    """Every picture in the parquet files: is it one, and is it whole?"""
    wanted = dataset.info.features[camera].image_size
    for episode, number in enumerate(dataset.episode_ids.tolist()):
        frame = 0
        for file, rows in dataset.rows.places(episode):
            relative = dataset.rows.files[file]
            try:
                cells = read_cells(resolve_inside(dataset.root, relative), camera, rows)
            except (ParquetDamageError, ValueError) as error:
                yield Problem(str(error), episode=number, file=relative, column=camera)
                continue
            for cell in cells:
                content = cell.as_py()
                content = content.get("bytes") if isinstance(content, dict) else content
                try:
                    if not isinstance(content, bytes):
                        raise ValueError("there is none")
                    with PIL.Image.open(io.BytesIO(content)) as image:
                        width, height = image.size
                        image.verify()
                    if wanted and (height, width) != wanted:
                        message = f"info.json says {wanted[0]}×{wanted[1]} pixels, frame {frame} has another size"
                        yield Problem(message, "note", number, relative, camera, f"{height}×{width}")
                except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
                    message = f"the picture of frame {frame} cannot be read: {error}"
                    yield Problem(message, episode=number, file=relative, column=camera)
                frame += 1


def _check_outcomes(dataset: Dataset, config: OutcomeConfig) -> list[Problem]:
    try:
        found, problems = try_outcomes(dataset, config)
    except DataError as error:
        return [Problem(str(error))]
    return problems + (list(found.notes) if found else [])


def _check_statistics(dataset: Dataset) -> Iterator[Problem]:
    """Dimensions of state and action whose range is degenerate."""
    columns, _ = _numeric_columns(dataset)
    for name in (*STATE_COLUMNS, *ACTION_COLUMNS):
        values = columns.get(name)
        if values is None or values.ndim != 2 or not np.isfinite(values).all():
            continue
        feature = dataset.info.features.get(name)
        names = feature.names if feature is not None and isinstance(feature.names, list) else None
        stats = compute_norm_stats(values.astype(np.float64), values.astype(np.float64), dataset.starts, 1)
        given = {name: names} if names and len(names) == values.shape[1] else None
        for sentence in degenerate_dimensions({name: stats["state"]}, given):
            yield Problem(sentence, column=name)


def _by_episode(dataset: Dataset, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Rows grouped by the position of their episode."""
    episodes = np.searchsorted(dataset.starts, rows, side="right") - 1
    for episode in np.unique(episodes):
        yield int(episode), rows[episodes == episode]
