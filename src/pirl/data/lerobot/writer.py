"""Writes LeRobot datasets, formats v2.1 and v3.0, of which a killed writer leaves every episode it had finished."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from pirl.data.lerobot.episode_stats import column_stats, image_stats
from pirl.data.lerobot.episode_table import CAMERAS, check_columns, declare_features, episode_parquet
from pirl.data.lerobot.layout import INFO_FILE
from pirl.data.lerobot.metadata_writer import EpisodeRecord, MetadataV21, MetadataV30
from pirl.data.lerobot.video_writer import Codec, encode_video
from pirl.errors import DataError
from pirl.files import write_file

# Timestamps are float32, and LeRobot refuses frames that are 1e-4 s off: beyond this many seconds rounding alone does it.
LONGEST_EPISODE = 1024


class DatasetWriter:
    """Adds episodes to a LeRobot dataset; the directory is at all times a dataset of the episodes finished so far.

    Every episode has its own data file, and its own video file per camera. They are complete before the metadata name
    them, and info.json, which counts the episodes, comes last: an episode it does not count does not exist, and the
    next one replaces whatever is left of it. With `resume`, a writer continues the dataset it finds, if it was declared
    alike. One gap cannot be closed: LeRobot's own v2.1 loader takes every file under data/ as an episode, so it stumbles
    over a writer killed in the instant between the renaming of the data file and the line in episodes.jsonl, or within
    the writing of that line; resuming repairs it.

        with DatasetWriter("data/pick", fps=30, features={
            "observation.images.top": {"dtype": "video", "shape": (224, 224, 3)},
            "observation.state": {"dtype": "float32", "shape": (7,)},
            "action": {"dtype": "float32", "shape": (7,)},
            "next.reward": {"dtype": "float32", "shape": (1,)},
        }) as writer:
            writer.write_episode({"observation.images.top": frames, ...}, task="pick up the cube")
    """

    def __init__(
        self,
        root: Path | str,
        *,
        fps: int,
        features: Mapping[str, Mapping[str, Any]],
        robot_type: str | None = None,
        version: Literal["v2.1", "v3.0"] = "v3.0",
        codec: Codec = "h264",
        resume: bool = False,
    ) -> None:
        if not isinstance(fps, int) or fps < 1:
            raise DataError(f"fps should be a whole number of frames per second, got {fps!r}")
        self.root, self.fps, self.codec, self.robot_type = Path(root), fps, codec, robot_type
        self.features = declare_features(features, fps=fps, codec=codec)
        self._cameras = [name for name, feature in self.features.items() if feature["dtype"] in CAMERAS]
        self._metadata = {"v2.1": MetadataV21, "v3.0": MetadataV30}[version](self.root, self.features, fps)
        self._tasks: list[str] = []
        self.num_episodes = self.num_frames = 0
        home = self.root.resolve()
        for name in ("meta", "data", "videos"):
            if not (self.root / name).resolve().is_relative_to(home):
                raise DataError(f"{self.root / name} is a link out of the dataset: files there are read, never written")
        if not _holds_files(self.root):
            self._write_info()
        elif resume:
            self._roll_back()
        else:
            raise DataError(
                f"{self.root} is not empty: choose another directory, or pass resume=True to continue the dataset in it"
            )

    def write_episode(self, columns: Mapping[str, np.ndarray], *, task: str | Sequence[str]) -> int:
        """Add an episode, given every feature as [T, *shape] and one task, or one per frame; returns its index.

        Cameras are uint8 [T, H, W, 3]; features of shape (1,) may be given as [T]. Floats of any precision are rounded
        to the declared one. Nothing is written unless everything fits.
        """
        columns = check_columns(columns, self.features, self.num_episodes)
        length = len(next(iter(columns.values())))
        frame_tasks = [task] * length if isinstance(task, str) else list(task)
        self._check_tasks(frame_tasks, length)
        self._check_duration(length)
        tasks = list(dict.fromkeys([*self._tasks, *frame_tasks]))
        numbers = {text: number for number, text in enumerate(tasks)}
        columns |= self._default_columns([numbers[text] for text in frame_tasks])
        episode = EpisodeRecord(
            index=self.num_episodes,
            first_row=self.num_frames,
            length=length,
            tasks=list(dict.fromkeys(frame_tasks)),
            stats={name: image_stats(v) if name in self._cameras else column_stats(v) for name, v in columns.items()},
        )
        videos = {name: encode_video(columns[name], fps=self.fps, codec=self.codec) for name in self._metadata.videos}
        data = episode_parquet(columns, self.features)
        self._check_undisturbed()
        try:
            self._commit(episode, tasks, data, videos)
        except OSError as error:
            with contextlib.suppress(DataError, OSError):  # on a full disk this may fail as well; resuming does it then
                self._roll_back()
            raise DataError(
                f"episode {episode.index} cannot be written to {self.root}: {error.strerror or error}. The episodes "
                "before it are safe; make room, and resume."
            ) from error
        except BaseException:  # also when interrupted from the keyboard: the writer may be used again
            self._roll_back()
            raise
        return episode.index

    def close(self) -> None:
        """Replace the bounds on quantiles in stats.json (v3.0) by exact ones. The writer holds nothing open."""
        self._metadata.finish([self._path(self._metadata.data_path, index) for index in range(self.num_episodes)])

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_tasks(self, tasks: Sequence[str], length: int) -> None:
        if len(tasks) != length or not all(isinstance(text, str) for text in tasks):
            raise DataError(
                f"episode {self.num_episodes}: expected a task (a string), or one for each of the {length} frames, got "
                f"{len(tasks)}: {tasks!r:.80}"
            )

    def _check_duration(self, length: int) -> None:
        if length > LONGEST_EPISODE * self.fps:
            raise DataError(
                f"episode {self.num_episodes}: {length} frames at {self.fps} fps last longer than {LONGEST_EPISODE} s, "
                "too long for LeRobot's timestamps (float32, checked to 1e-4 s); split the episode"
            )

    def _default_columns(self, task_index: Sequence[int]) -> dict[str, np.ndarray]:
        """The columns that every dataset has."""
        frame_index = np.arange(len(task_index))
        columns: dict[str, np.ndarray] = {
            "timestamp": (frame_index / self.fps).astype(np.float32),
            "frame_index": frame_index,
            "episode_index": np.full_like(frame_index, self.num_episodes),
            "index": self.num_frames + frame_index,
            "task_index": np.array(task_index),
        }
        return {name: values[:, None] for name, values in columns.items()}

    def _commit(self, episode: EpisodeRecord, tasks: list[str], data: bytes, videos: Mapping[str, bytes]) -> None:
        """Write everything about an episode, in the order that keeps the directory readable throughout."""
        for name, content in videos.items():
            write_file(self._path(self._metadata.video_path, episode.index, name), content)
        if tasks != self._tasks:
            self._metadata.save_tasks(tasks)
        self._metadata.save_stats(episode)
        write_file(self._path(self._metadata.data_path, episode.index), data)
        self._metadata.save_episode(episode)
        self.num_episodes, self.num_frames, self._tasks = episode.index + 1, self.num_frames + episode.length, tasks
        self._write_info()

    def _path(self, template: str, episode: int, video: str = "") -> Path:
        chunk, file = divmod(episode, self._metadata.chunk_size)
        v21 = {"episode_chunk": chunk, "episode_index": episode}
        v30 = {"chunk_index": chunk, "file_index": file}
        return self.root / template.format(video_key=video, **v21, **v30)

    def _info(self) -> dict[str, Any]:
        return {
            "codebase_version": self._metadata.version,
            "robot_type": self.robot_type,
            "total_episodes": self.num_episodes,
            "total_frames": self.num_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": self._metadata.chunk_size,
            **self._metadata.format_info(self.num_episodes),
            "fps": self.fps,
            "splits": {"train": f"0:{self.num_episodes}"},
            "data_path": self._metadata.data_path,
            "video_path": self._metadata.video_path if self._metadata.videos else None,
            "features": self.features,
        }

    def _write_info(self) -> None:
        write_file(self.root / INFO_FILE, json.dumps(self._info(), indent=4))

    def _read_info(self) -> dict[str, Any]:
        file = self.root / INFO_FILE
        try:
            info = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.root} holds no dataset to continue: {file} cannot be read: {error}") from error
        if not isinstance(info, dict):
            raise DataError(f"{file} should hold an object, got {info!r:.80}")
        return info

    def _check_undisturbed(self) -> None:
        """Two writers on one directory would overwrite each other's episodes."""
        if (found := self._read_info().get("total_episodes")) != self.num_episodes:
            raise DataError(
                f"{self.root} now has {found} episodes, and this writer left {self.num_episodes}: only one writer at a "
                "time may add to a dataset; resume from what is there now"
            )

    def _roll_back(self) -> None:
        """Return to the last finished episode, as info.json tells, and remove what is left of the one after it."""
        found = self._read_info()
        counted = {key for key in self._info() if key.startswith("total_")} | {"splits"}
        for key, declared in self._info().items():
            if key not in counted and found.get(key) != declared:
                raise DataError(f"{self.root} cannot be continued: {_difference(key, found.get(key), declared)}")
        try:
            episodes, frames, tasks = (int(found[f"total_{name}"]) for name in ("episodes", "frames", "tasks"))
            if (stray := self._path(self._metadata.data_path, episodes + 1)).exists():
                raise DataError(
                    f"{self.root} cannot be continued: {INFO_FILE} has {episodes} episodes, yet {stray} is there"
                )
            self._tasks = self._metadata.restore(episodes, tasks)
        except DataError:
            raise
        except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
            raise DataError(f"{self.root} cannot be continued, its metadata are damaged: {error!r}") from error
        self.num_episodes, self.num_frames = episodes, frames
        for video in self._metadata.videos:
            self._path(self._metadata.video_path, episodes, video).unlink(missing_ok=True)
        self._path(self._metadata.data_path, episodes).unlink(missing_ok=True)
        for partial in self.root.rglob(_PARTIAL):
            partial.unlink()


_PARTIAL = ".*.partial-*"  # what pirl.files leaves of a file when the process is killed while it writes


def _holds_files(root: Path) -> bool:
    return root.is_file() or any(path.is_file() and not path.match(_PARTIAL) for path in root.rglob("*"))


def _difference(key: str, found: Any, declared: Any) -> str:
    """What differs between the dataset and the declaration, down to the feature and its field."""
    if isinstance(found, dict) and isinstance(declared, dict):
        for name in {**found, **declared}:
            if found.get(name) != declared.get(name):
                return _difference(f"{key} / {name}", found.get(name), declared.get(name))
    return f"{key} is {found!r} there, and {declared!r} here"
