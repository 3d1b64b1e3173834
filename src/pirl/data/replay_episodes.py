"""Episodes of a replay buffer as they are held: columns in memory, pictures in memory or in files."""

import contextlib
import io
import math
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int64, UInt8

from pirl.data.policy_io import PolicyIO
from pirl.data.robots import Robot
from pirl.errors import DataError
from pirl.files import write_file
from pirl.files import writing as writing_into

# Columns, pictures of one camera, and columns that a kill left half written.
_FILE_NAME = re.compile(r"\.?episode-(\d{9})\.(npz|.+\.frames|npz\.partial-.+)")
COLUMNS = ("states", "actions", "rewards", "terminal", "success", "prompt", "size")


@dataclass(frozen=True)
class Episode:
    """One episode in the robot's own units. `terminal`: the task truly ended with its last step, time did not run out."""

    images: Mapping[str, UInt8[np.ndarray, "steps _ _ 3"]]
    states: Float[np.ndarray, "steps state_dim"]
    actions: Float[np.ndarray, "steps action_dim"]
    rewards: Float32[np.ndarray, " steps"]
    terminal: bool
    success: bool | None
    prompt: str

    def __len__(self) -> int:
        return len(self.rewards)


@dataclass(frozen=True)
class StoredEpisode:
    """An episode as it is held: its columns, and its pictures as arrays or in files."""

    serial: int
    columns: Mapping[str, Any]
    images: Mapping[str, UInt8[np.ndarray, "steps h w 3"] | Path]
    file: Path | None = None

    def __len__(self) -> int:
        return len(self.columns["rewards"])

    @classmethod
    def of(cls, serial: int, episode: Episode, images: Mapping[str, np.ndarray]) -> "StoredEpisode":
        """A copy of an episode, under the number it came as."""
        columns = {name: np.array(getattr(episode, name), np.float32) for name in ("states", "actions", "rewards")}
        told = {
            "terminal": episode.terminal,
            "success": -1 if episode.success is None else int(episode.success),
            "prompt": episode.prompt,
            "size": next((image.shape[1:3] for image in images.values()), (0, 0)),
        }
        return cls(serial, columns | {name: np.array(value) for name, value in told.items()}, images)

    def write(self, directory: Path, in_memory: bool) -> "StoredEpisode":
        """Pictures first, then the columns in one step: an episode is there when its columns are."""
        file = directory / f"episode-{self.serial:09d}.npz"
        places = _picture_files(file, self.images)
        content = io.BytesIO()
        np.savez(content, **self.columns)
        if file.exists():
            raise DataError(
                f"{file} was written by somebody else: only one process may add to a replay buffer's directory."
            )
        with writing(directory):
            for slot, place in places.items():
                np.asarray(self.images[slot]).tofile(place)
            write_file(file, content.getvalue())
        return StoredEpisode(self.serial, self.columns, self.images if in_memory else places, file)

    @classmethod
    def read(cls, file: Path, policy_io: PolicyIO, in_memory: bool) -> "StoredEpisode":
        """What `write` left in a file; the pictures stay there unless they are wanted in memory."""
        robot, resolution = policy_io.robot, policy_io.config.image_resolution
        try:
            with np.load(file, allow_pickle=False) as content:
                columns = {name: content[name] for name in COLUMNS}
            size = tuple(columns["size"].tolist())
            if robot.cameras and size != resolution:
                raise ValueError(f"its pictures have the size {size}, the model's have {resolution}")
            shape = (len(columns["rewards"]), *size, 3)
            images: dict[str, Any] = _picture_files(file, robot.cameras)
            if any(place.stat().st_size != math.prod(shape) for place in images.values()):
                raise ValueError("a file of pictures has the wrong size")
            if in_memory:
                images = {slot: np.fromfile(place, np.uint8).reshape(shape) for slot, place in images.items()}
            check_widths(columns["states"], columns["actions"], robot)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{file} cannot be used as an episode of this replay buffer: {error}. Remove it, or choose another "
                "directory."
            ) from error
        return cls(serial_of(file), columns, images, file)


@dataclass(frozen=True)
class StoredFrames:
    """The pictures of one camera across the episodes held."""

    slot: str
    episodes: Sequence[StoredEpisode]
    starts: Int64[np.ndarray, " episodes"]
    size: tuple[int, int]

    def gather(self, rows: Int64[np.ndarray, " n"]) -> UInt8[np.ndarray, "n h w 3"]:
        """Copies of the pictures at these rows."""
        numbers = np.searchsorted(self.starts, rows, side="right") - 1
        frames = (rows - self.starts[numbers]).tolist()
        out = np.empty((len(rows), *self.size, 3), np.uint8)
        for picture, number, frame in zip(out, numbers.tolist(), frames, strict=True):
            images = self.episodes[number].images[self.slot]
            picture[:] = _read_picture(images, frame, picture.shape) if isinstance(images, Path) else images[frame]
        return out


def _read_picture(file: Path, frame: int, shape: tuple[int, ...]) -> UInt8[np.ndarray, "h w 3"]:
    size = math.prod(shape)
    try:
        return np.fromfile(file, np.uint8, size, offset=frame * size).reshape(shape)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} was removed or cut off while it was in use: {error}.") from error


def check_widths(states: np.ndarray, actions: np.ndarray, robot: Robot, other: "StoredEpisode | None" = None) -> None:
    """Raise if states or actions are not as wide as the robot says, or else as those of another episode."""
    for name, array, width in (("states", states, robot.state_dim), ("actions", actions, robot.action_dim)):
        found = array.shape[1]
        expected = width or (found if other is None else other.columns[name].shape[1])
        if found != expected:
            raise DataError(f"the {name} of the episode have {found} dimensions, robot {robot.name!r} has {expected}")


def writing(directory: Path) -> contextlib.AbstractContextManager[None]:
    """Around whatever writes into the buffer's directory."""
    return writing_into("the replay buffer", directory, "Make room, or choose another directory.")


def episode_files(directory: Path) -> dict[int, Path]:
    """The columns of every episode that is there, by serial number, the oldest first."""
    return {
        serial_of(file): file for file in sorted(directory.glob("episode-*.npz")) if _FILE_NAME.fullmatch(file.name)
    }


def _picture_files(file: Path, slots: Iterable[str]) -> dict[str, Path]:
    """Where the pictures of each camera are, beside an episode's columns."""
    return {slot: file.with_name(f"{file.stem}.{slot}.frames") for slot in slots}


def serial_of(file: Path) -> int:
    """The number an episode came as."""
    return int(file.name.split(".")[0].removeprefix("episode-"))


def delete_episode(file: Path) -> None:
    """Remove an episode's columns and pictures."""
    for place in [file, *file.parent.glob(f"{file.stem}.*.frames")]:
        place.unlink(missing_ok=True)


def sweep(directory: Path, end: int) -> None:
    """Remove what kills left of episodes before `end`, whose names will not be used again."""
    for file in list(directory.iterdir()):
        name = _FILE_NAME.fullmatch(file.name)
        if name and int(name[1]) < end and not (directory / f"episode-{name[1]}.npz").exists():
            file.unlink(missing_ok=True)
