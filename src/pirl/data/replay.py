"""A replay buffer of whole episodes, with the same batch contract as a dataset; on disk it survives a restart."""

import contextlib
import io
import math
import re
import threading
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int64, UInt8

from pirl.data.chunks import ChunkBatch, ChunkShape, Trajectories, gather_chunks
from pirl.data.policy_io import PolicyIO
from pirl.data.robots import Robot
from pirl.data.transforms import resize_with_pad
from pirl.errors import ConfigError, DataError
from pirl.files import write_file, writing

# Columns, images of one camera, and columns that a kill left half written.
_FILE_NAME = re.compile(r"\.?episode-(\d{9})\.(npz|.+\.frames|npz\.partial-.+)")
_COLUMNS = ("states", "actions", "rewards", "terminal", "success", "prompt")


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
    """The newest episodes, at most `capacity` frames of them. The oldest are evicted for new ones.

    With a `directory`, to be used by one process at a time, every episode is written there as it comes, and read back at
    the next start; `in_memory=False` leaves its images there. Evicted episodes stay on disk as long as one of the two
    last states returned by `state()` needs them, and after a restart until an episode is added, so that a run can go
    back to its last checkpoint.
    """

    def __init__(
        self,
        capacity: int,
        policy_io: PolicyIO,
        *,
        seed: int = 0,
        directory: Path | str | None = None,
        in_memory: bool = True,
    ):
        if capacity < 1:
            raise ConfigError(f"the replay buffer needs room for at least one frame; its capacity is {capacity}.")
        if directory is None and not in_memory:
            raise ConfigError("a replay buffer that is not kept in memory needs a directory.")
        if seed < 0:
            raise ConfigError(f"a seed cannot be negative; it is {seed}.")
        self._capacity, self._io, self._seed = capacity, policy_io, seed
        self._directory, self._in_memory = None if directory is None else Path(directory), in_memory
        self._episodes: list[_Stored] = []
        self._evicted: list[Path] = []
        self._next_serial = 0
        self._states: list[dict[str, int]] = []
        self._trajectories: Trajectories | None = None
        self._lock = threading.RLock()
        if self._directory is not None:
            with _writing(self._directory):
                self._directory.mkdir(parents=True, exist_ok=True)
                files = episode_files(self._directory)
                self._next_serial = max(files, default=-1) + 1
                _remove_fragments(self._directory, self._next_serial)
            self._hold(list(files.values()))

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._episodes))

    @property
    def num_episodes(self) -> int:
        return len(self._episodes)

    def add(self, episode: Episode) -> None:
        """Store a copy of an episode."""
        self._check(episode)
        size = self._io.config.image_resolution
        images = {slot: np.array(resize_with_pad(episode.images[slot], *size)) for slot in self._io.robot.cameras}
        with self._lock:
            stored = _Stored(self._next_serial, _columns(episode), images)
            if self._directory is not None:
                stored = stored.write(self._directory, self._in_memory)
            while self._episodes and len(self) + len(episode) > self._capacity:
                if (file := self._episodes.pop(0).file) is not None:
                    self._evicted.append(file)
            self._episodes.append(stored)
            self._next_serial += 1
            self._trajectories = None
            self._delete_unneeded()

    def clear(self) -> None:
        with self._lock:
            self._evicted += [stored.file for stored in self._episodes if stored.file is not None]
            self._episodes, self._trajectories = [], None
            self._delete_unneeded()

    def gather(self, position: int, count: int, shape: ChunkShape) -> ChunkBatch:
        """Samples drawn uniformly from all frames; the same for the same position and content."""
        with self._lock:
            if not self._episodes:
                raise DataError("the replay buffer is empty: collect an episode before learning from it.")
            # Each sample has a block of the generator to itself, so it does not matter how a batch is split among hosts.
            draws = np.random.Philox(key=self._seed).advance(position).random_raw(4 * count)[::4]
            return gather_chunks(self.trajectories, (draws % len(self)).astype(np.int64), shape, self._io)

    @property
    def trajectories(self) -> Trajectories:
        """The episodes that are held, the oldest first; there must be at least one."""
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
                frames={slot: _StoredFrames(slot, held, ends - lengths, size) for slot in self._io.robot.cameras},
            )
        return self._trajectories

    def identity(self) -> list[int]:
        """What must not change between a save and a resume; the content may."""
        return [self._seed]

    def held(self) -> dict[str, int]:
        """What is held now, as a state that is not promised to be kept."""
        with self._lock:
            oldest = self._episodes[0].serial if self._episodes else self._next_serial
            return {"oldest": oldest, "next": self._next_serial, "episodes": self.num_episodes}

    def state(self) -> dict[str, int]:
        """What is held now, for a checkpoint; `restore` on the same directory brings it back."""
        with self._lock:
            self._states = [*self._states[-1:], self.held()]
            self._delete_unneeded()
            return dict(self._states[-1])

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a state: later episodes are deleted, those evicted since then return."""
        if self._directory is None:
            raise DataError("a replay buffer that is only in memory cannot be restored: give it a directory.")
        with self._lock:
            files = episode_files(self._directory)
            wanted = {serial: file for serial, file in files.items() if state["oldest"] <= serial < state["next"]}
            if len(wanted) != state["episodes"]:
                raise DataError(
                    f"the replay buffer in {self._directory} has {len(wanted)} of the {state['episodes']} episodes of "
                    "the state to go back to: it was used by a later run, or files were removed."
                )
            self._hold(list(wanted.values()))
            with _writing(self._directory):
                for serial, file in files.items():
                    if serial >= state["next"]:
                        _delete(file)
            # What was evicted earlier may belong to the state before this one, which can still be restored.
            self._evicted = [file for serial, file in files.items() if serial < state["oldest"]] + self._evicted
            older = {**state, "oldest": min(files, default=state["oldest"])}
            self._next_serial, self._states = state["next"], [older, dict(state)]

    def _check(self, episode: Episode) -> None:
        """Raise if an episode is not sound, or does not fit this buffer."""
        length, robot = len(episode), self._io.robot
        if not length:
            raise DataError("the episode has no frames.")
        if length > self._capacity:
            raise DataError(f"an episode of {length} frames does not fit a replay buffer of {self._capacity}.")
        if missing := sorted(set(robot.cameras) - set(episode.images)):
            raise DataError(f"the episode has no images of {', '.join(missing)}.")
        images = (episode.images[slot] for slot in robot.cameras)
        if any(len(array) != length for array in (episode.states, episode.actions, *images)):
            raise DataError("the images, states, actions and rewards of an episode must be equally many.")
        for name in ("states", "actions", "rewards"):
            if not np.all(np.isfinite(getattr(episode, name))):
                raise DataError(f"the {name} of an episode must be finite.")
        _check_widths(episode.states, episode.actions, robot, next(iter(self._episodes), None))

    def _hold(self, files: Sequence[Path]) -> None:
        """Hold the newest of these episodes that there is room for; the others are evicted."""
        known = {stored.file: stored for stored in self._episodes}
        held: list[_Stored] = []
        frames = 0
        for file in reversed(files):
            stored = known.get(file) or _Stored.read(file, self._io, self._in_memory)
            frames += len(stored)
            if frames > self._capacity:
                break
            held.insert(0, stored)
        self._episodes, self._evicted, self._trajectories = held, list(files[: len(files) - len(held)]), None

    def _delete_unneeded(self) -> None:
        """Delete evicted episodes that no state needs any more."""
        oldest = min((state["oldest"] for state in self._states), default=self._next_serial)
        for file in self._evicted:
            if _serial(file) < oldest:
                _delete(file)
        self._evicted = [file for file in self._evicted if _serial(file) >= oldest]


# --- stored episodes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """An episode under its serial number: its columns, and its images as arrays or in files."""

    serial: int
    columns: Mapping[str, Any]
    images: Mapping[str, UInt8[np.ndarray, "steps h w 3"] | Path]
    file: Path | None = None

    def __len__(self) -> int:
        return len(self.columns["rewards"])

    def write(self, directory: Path, in_memory: bool) -> "_Stored":
        """Images first, then the columns in one step: an episode exists when its columns do."""
        file = directory / f"episode-{self.serial:09d}.npz"
        paths = _image_files(file, self.images)
        content = io.BytesIO()
        np.savez(content, **self.columns)
        if file.exists():
            raise DataError(f"{file} was written by another process: only one may add to a replay buffer's directory.")
        with _writing(directory):
            for slot, path in paths.items():
                np.asarray(self.images[slot]).tofile(path)
            write_file(file, content.getvalue())
        return _Stored(self.serial, self.columns, self.images if in_memory else paths, file)

    @classmethod
    def read(cls, file: Path, policy_io: PolicyIO, in_memory: bool) -> "_Stored":
        """What `write` left in a file; the images stay there unless they are wanted in memory."""
        robot, (height, width) = policy_io.robot, policy_io.config.image_resolution
        try:
            with np.load(file, allow_pickle=False) as content:
                columns = {name: content[name] for name in _COLUMNS}
            shape = (len(columns["rewards"]), height, width, 3)
            images: dict[str, Any] = _image_files(file, robot.cameras)
            for path in images.values():
                if path.stat().st_size != math.prod(shape):
                    raise ValueError(f"{path.name} does not hold {shape[0]} images of {height}×{width} pixels")
            if in_memory:
                images = {slot: np.fromfile(path, np.uint8).reshape(shape) for slot, path in images.items()}
            _check_widths(columns["states"], columns["actions"], robot)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{file} cannot be used as an episode of this replay buffer: {error}. Remove it, or choose another "
                "directory."
            ) from error
        return cls(_serial(file), columns, images, file)


@dataclass(frozen=True)
class _StoredFrames:
    """The images of one camera across the episodes held."""

    slot: str
    episodes: Sequence[_Stored]
    starts: Int64[np.ndarray, " episodes"]
    size: tuple[int, int]

    def gather(self, rows: Int64[np.ndarray, " n"]) -> UInt8[np.ndarray, "n h w 3"]:
        numbers = np.searchsorted(self.starts, rows, side="right") - 1
        frames = (rows - self.starts[numbers]).tolist()
        out = np.empty((len(rows), *self.size, 3), np.uint8)
        for image, number, frame in zip(out, numbers.tolist(), frames, strict=True):
            stored = self.episodes[number].images[self.slot]
            image[:] = _read_image(stored, frame, image.shape) if isinstance(stored, Path) else stored[frame]
        return out


def _read_image(file: Path, frame: int, shape: tuple[int, ...]) -> UInt8[np.ndarray, "h w 3"]:
    size = math.prod(shape)
    try:
        return np.fromfile(file, np.uint8, size, offset=frame * size).reshape(shape)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} was removed or truncated while it was in use: {error}.") from error


def _columns(episode: Episode) -> dict[str, np.ndarray]:
    return {
        **{name: np.array(getattr(episode, name), np.float32) for name in ("states", "actions", "rewards")},
        "terminal": np.array(episode.terminal),
        "success": np.array(-1 if episode.success is None else int(episode.success)),
        "prompt": np.array(episode.prompt),
    }


def _check_widths(states: np.ndarray, actions: np.ndarray, robot: Robot, other: _Stored | None = None) -> None:
    """Raise if states or actions are not as wide as the robot says, or else as those of another episode."""
    for name, array, width in (("states", states, robot.state_dim), ("actions", actions, robot.action_dim)):
        if width is None and other is not None:
            width = other.columns[name].shape[1]
        if width not in (None, array.shape[1]):
            raise DataError(
                f"the {name} of the episode have {array.shape[1]} dimensions, robot {robot.name!r} has {width}"
            )


def _writing(directory: Path) -> contextlib.AbstractContextManager[None]:
    return writing("the replay buffer", directory, "Make room, or choose another directory.")


def episode_files(directory: Path) -> dict[int, Path]:
    """The columns of every stored episode, by serial number, the oldest first."""
    return {_serial(file): file for file in sorted(directory.glob("episode-*.npz")) if _FILE_NAME.fullmatch(file.name)}


def _image_files(file: Path, slots: Iterable[str]) -> dict[str, Path]:
    return {slot: file.with_name(f"{file.stem}.{slot}.frames") for slot in slots}


def _serial(file: Path) -> int:
    return int(file.name.split(".")[0].removeprefix("episode-"))


def _delete(file: Path) -> None:
    for path in [file, *file.parent.glob(f"{file.stem}.*.frames")]:
        path.unlink(missing_ok=True)


def _remove_fragments(directory: Path, end: int) -> None:
    """Remove what kills left of episodes before `end`, whose names will not be used again."""
    for file in list(directory.iterdir()):
        name = _FILE_NAME.fullmatch(file.name)
        if name and int(name[1]) < end and not (directory / f"episode-{name[1]}.npz").exists():
            file.unlink(missing_ok=True)
