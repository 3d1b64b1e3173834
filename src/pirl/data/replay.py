"""A replay buffer of whole episodes, with the same batch contract as a dataset; on disk it survives a restart."""

import contextlib
import io
import math
import re
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int64, UInt8

from pirl.data.chunks import ChunkBatch, ChunkShape, Trajectories, cut_chunks
from pirl.data.images import resize_with_pad
from pirl.data.policy_io import PolicyIO
from pirl.data.robots import Robot
from pirl.errors import ConfigError, DataError
from pirl.files import write_file

# Columns, pictures of one camera, and columns that a kill left half written.
_FILE_NAME = re.compile(r"\.?episode-(\d{9})\.(npz|.+\.frames|npz\.partial-.+)")
_COLUMNS = ("states", "actions", "rewards", "terminal", "success", "prompt", "size")


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


class ReplayBuffer:
    """The newest episodes, at most `capacity` frames of them. The oldest make room for new ones.

    With a `directory`, to be used by one process at a time, every episode is written there as it comes, and read back at
    the next start; `in_memory=False` leaves its pictures there. Episodes that made room stay on disk as long as one of
    the two last states handed out by `state()` needs them, and after a restart until an episode is added, so that a run
    can go back to its last checkpoint.
    """

    def __init__(
        self,
        capacity: int,
        policy_io: PolicyIO,
        *,
        seed: int = 0,
        directory: Path | None = None,
        in_memory: bool = True,
    ):
        if capacity < 1:
            raise ConfigError(f"the replay buffer needs room for at least one frame; its capacity is {capacity}.")
        if directory is None and not in_memory:
            raise ConfigError("a replay buffer that is not kept in memory needs a directory.")
        self._capacity, self._io, self._seed = capacity, policy_io, seed
        self._directory, self._in_memory = directory, in_memory
        self._episodes: list[_Stored] = []
        self._retired: list[Path] = []
        self._next_serial = 0
        self._states: list[dict[str, int]] = []
        self._trajectories: Trajectories | None = None
        self._lock = threading.RLock()
        if directory is not None:
            with _writing(directory):
                directory.mkdir(parents=True, exist_ok=True)
                files = _episode_files(directory)
                self._next_serial = max(files, default=-1) + 1
                _sweep(directory, self._next_serial)
            self._hold(list(files.values()))

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._episodes))

    @property
    def num_episodes(self) -> int:
        """Episodes held."""
        return len(self._episodes)

    def add(self, episode: Episode) -> None:
        """Take in a copy of an episode."""
        self._check(episode)
        height, width = self._io.config.image_resolution
        images = {
            slot: np.array(resize_with_pad(episode.images[slot], height, width)) for slot in self._io.robot.cameras
        }
        with self._lock:
            stored = _Stored.of(self._next_serial, episode, images)
            if self._directory is not None:
                stored = stored.write(self._directory, self._in_memory)
            while self._episodes and len(self) + len(episode) > self._capacity:
                if (file := self._episodes.pop(0).file) is not None:
                    self._retired.append(file)
            self._episodes.append(stored)
            self._next_serial += 1
            self._trajectories = None
            self._forget()

    def cut(self, step: int, position: int, count: int, share: slice, shape: ChunkShape) -> ChunkBatch:
        """Samples drawn from all frames alike; the same for the same step and content."""
        with self._lock:
            if not self._episodes:
                raise DataError("the replay buffer is empty: collect an episode before learning from it.")
            anchors = np.random.default_rng([self._seed, step]).integers(len(self), size=count)[share]
            return cut_chunks(self._all(), anchors, shape, self._io)

    def state(self) -> dict[str, int]:
        """What is held now, for a checkpoint; `restore` on the same directory brings it back."""
        with self._lock:
            oldest = self._episodes[0].serial if self._episodes else self._next_serial
            state = {"oldest": oldest, "next": self._next_serial, "episodes": self.num_episodes}
            self._states = [*self._states[-1:], state]
            self._forget()
            return dict(self._states[-1])

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a state: episodes that came later are removed, those that had made room return."""
        if self._directory is None:
            raise DataError("a replay buffer that is only in memory cannot be restored: give it a directory.")
        with self._lock:
            files = _episode_files(self._directory)
            wanted = {serial: file for serial, file in files.items() if state["oldest"] <= serial < state["next"]}
            if len(wanted) != state["episodes"]:
                raise DataError(
                    f"the replay buffer in {self._directory} has {len(wanted)} of the {state['episodes']} episodes of "
                    "the state to go back to: it was used by a later run, or files were removed."
                )
            self._hold(list(wanted.values()))
            with _writing(self._directory):
                for serial in files.keys() - wanted.keys():
                    _delete(files[serial])
            self._next_serial, self._states = state["next"], [dict(state)]

    def _check(self, episode: Episode) -> None:
        """Raise if an episode is not sound, or does not fit this buffer."""
        length, robot = len(episode), self._io.robot
        if not length:
            raise DataError("the episode has no frames.")
        if length > self._capacity:
            raise DataError(f"an episode of {length} frames does not fit a replay buffer of {self._capacity}.")
        if missing := sorted(set(robot.cameras) - set(episode.images)):
            raise DataError(f"the episode has no pictures of {', '.join(missing)}.")
        pictures = (episode.images[slot] for slot in robot.cameras)
        if any(len(array) != length for array in (episode.states, episode.actions, *pictures)):
            raise DataError("the pictures, states, actions and rewards of an episode must be equally many.")
        for name in ("states", "actions", "rewards"):
            if not np.all(np.isfinite(getattr(episode, name))):
                raise DataError(f"the {name} of an episode must be finite.")
        _check_widths(episode.states, episode.actions, robot, next(iter(self._episodes), None))

    def _hold(self, files: Sequence[Path]) -> None:
        """Hold the newest of these episodes that there is room for; the others have made room."""
        held: list[_Stored] = []
        frames = 0
        for file in reversed(files):
            stored = _Stored.read(file, self._io, self._in_memory)
            frames += len(stored)
            if frames > self._capacity:
                break
            held.insert(0, stored)
        self._episodes, self._retired, self._trajectories = held, list(files[: len(files) - len(held)]), None

    def _forget(self) -> None:
        """Delete what made room and no state needs any more."""
        oldest = min((state["oldest"] for state in self._states), default=self._next_serial)
        for file in self._retired:
            if _serial(file) < oldest:
                _delete(file)
        self._retired = [file for file in self._retired if _serial(file) >= oldest]

    def _all(self) -> Trajectories:
        if self._trajectories is None:
            held = self._episodes
            columns = {name: [stored.columns[name] for stored in held] for name in _COLUMNS}
            lengths = np.array([len(stored) for stored in held])
            ends = np.cumsum(lengths)
            terminals = np.zeros(ends[-1], bool)
            terminals[ends - 1] = columns["terminal"]
            prompts = list(dict.fromkeys(map(str, columns["prompt"])))
            size = self._io.config.image_resolution
            self._trajectories = Trajectories(
                states=np.concatenate(columns["states"]),
                actions=np.concatenate(columns["actions"]),
                rewards=np.concatenate(columns["rewards"]),
                terminals=terminals,
                starts=ends - lengths,
                ends=ends,
                success=np.array(columns["success"], np.int8),
                prompts=prompts,
                prompt_of_row=np.repeat([prompts.index(str(prompt)) for prompt in columns["prompt"]], lengths),
                frames={slot: _Frames(slot, held, ends - lengths, size) for slot in self._io.robot.cameras},
            )
        return self._trajectories


@dataclass(frozen=True)
class _Stored:
    """An episode as it is held: its columns, and its pictures as arrays or in files."""

    serial: int
    columns: Mapping[str, Any]
    images: Mapping[str, UInt8[np.ndarray, "steps h w 3"] | Path]
    file: Path | None = None

    def __len__(self) -> int:
        return len(self.columns["rewards"])

    @classmethod
    def of(cls, serial: int, episode: Episode, images: Mapping[str, np.ndarray]) -> "_Stored":
        columns = {name: np.array(getattr(episode, name), np.float32) for name in ("states", "actions", "rewards")}
        told = {
            "terminal": episode.terminal,
            "success": -1 if episode.success is None else int(episode.success),
            "prompt": episode.prompt,
            "size": next((image.shape[1:3] for image in images.values()), (0, 0)),
        }
        return cls(serial, columns | {name: np.array(value) for name, value in told.items()}, images)

    def write(self, directory: Path, in_memory: bool) -> "_Stored":
        """Pictures first, then the columns in one step: an episode is there when its columns are."""
        file = directory / f"episode-{self.serial:09d}.npz"
        places = _picture_files(file, self.images)
        content = io.BytesIO()
        np.savez(content, **self.columns)
        with _writing(directory):
            for slot, place in places.items():
                np.asarray(self.images[slot]).tofile(place)
            write_file(file, content.getvalue())
        return _Stored(self.serial, self.columns, self.images if in_memory else places, file)

    @classmethod
    def read(cls, file: Path, policy_io: PolicyIO, in_memory: bool) -> "_Stored":
        robot, resolution = policy_io.robot, policy_io.config.image_resolution
        try:
            with np.load(file, allow_pickle=False) as content:
                columns = {name: content[name] for name in _COLUMNS}
            size = tuple(columns["size"].tolist())
            if robot.cameras and size != resolution:
                raise ValueError(f"its pictures have the size {size}, the model's have {resolution}")
            shape = (len(columns["rewards"]), *size, 3)
            images: dict[str, Any] = _picture_files(file, robot.cameras)
            if any(place.stat().st_size != math.prod(shape) for place in images.values()):
                raise ValueError("a file of pictures has the wrong size")
            if in_memory:
                images = {slot: np.fromfile(place, np.uint8).reshape(shape) for slot, place in images.items()}
            _check_widths(columns["states"], columns["actions"], robot)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{file} cannot be used as an episode of this replay buffer: {error}. Remove it, or choose another "
                "directory."
            ) from error
        return cls(_serial(file), columns, images, file)


@dataclass(frozen=True)
class _Frames:
    """The pictures of one camera across the episodes held."""

    slot: str
    episodes: Sequence[_Stored]
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


def _check_widths(states: np.ndarray, actions: np.ndarray, robot: Robot, other: "_Stored | None" = None) -> None:
    """Raise if states or actions are not as wide as the robot says, or else as those of another episode."""
    for name, array, width in (("states", states, robot.state_dim), ("actions", actions, robot.action_dim)):
        found = array.shape[1]
        expected = width or (found if other is None else other.columns[name].shape[1])
        if found != expected:
            raise DataError(f"the {name} of the episode have {found} dimensions, robot {robot.name!r} has {expected}")


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Say which directory could not be written."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the replay buffer cannot be written in {directory}: {error.strerror or error}. Make room, or choose "
            "another directory."
        ) from error


def _episode_files(directory: Path) -> dict[int, Path]:
    """The columns of every episode that is there, by serial number, the oldest first."""
    return {_serial(file): file for file in sorted(directory.glob("episode-*.npz")) if _FILE_NAME.fullmatch(file.name)}


def _picture_files(file: Path, slots: Iterable[str]) -> dict[str, Path]:
    """Where the pictures of each camera are, beside an episode's columns."""
    return {slot: file.with_name(f"{file.stem}.{slot}.frames") for slot in slots}


def _serial(file: Path) -> int:
    return int(file.name.split(".")[0].removeprefix("episode-"))


def _delete(file: Path) -> None:
    for place in [file, *file.parent.glob(f"{file.stem}.*.frames")]:
        place.unlink(missing_ok=True)


def _sweep(directory: Path, end: int) -> None:
    """Remove what kills left of episodes before `end`, whose names will not be used again."""
    for file in list(directory.iterdir()):
        name = _FILE_NAME.fullmatch(file.name)
        if name and int(name[1]) < end and not (directory / f"episode-{name[1]}.npz").exists():
            file.unlink(missing_ok=True)
