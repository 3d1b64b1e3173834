"""A replay buffer of whole episodes, with the same batch contract as a dataset; on disk it survives a restart."""

import io
import threading
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int64, UInt8

from pirl.data.chunks import ChunkBatch, ChunkShape, Trajectories, cut_chunks
from pirl.data.images import resize_with_pad
from pirl.data.policy_io import PolicyIO
from pirl.errors import ConfigError, DataError
from pirl.files import write_file


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

    With a `directory` every episode is written there as it comes, and read back at the next start; `in_memory=False`
    leaves its pictures there. Episodes that made room stay on disk as long as one of the two last states handed out by
    `state()` needs them, so that a run can go back to its last checkpoint.
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
        self._retired: list[_Stored] = []
        self._next_serial = 0
        self._states: list[dict[str, int]] = []
        self._trajectories: Trajectories | None = None
        self._lock = threading.RLock()
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            for file in sorted(directory.glob("episode-*.npz")):
                self._episodes.append(_Stored.read(file, policy_io.config.cameras, in_memory))
            self._next_serial = self._episodes[-1].serial + 1 if self._episodes else 0
            self._make_room(0)

    def __len__(self) -> int:
        return sum(len(stored.rewards) for stored in self._episodes)

    @property
    def num_episodes(self) -> int:
        """Episodes held."""
        return len(self._episodes)

    def add(self, episode: Episode) -> None:
        """Take in an episode."""
        length = len(episode)
        if not 0 < length <= self._capacity:
            raise DataError(f"an episode of {length} frames does not fit a replay buffer of {self._capacity}.")
        if missing := sorted(set(self._io.robot.cameras) - set(episode.images)):
            raise DataError(f"the episode has no pictures of {', '.join(missing)}.")
        pictures = (episode.images[slot] for slot in self._io.robot.cameras)
        if any(len(array) != length for array in (episode.states, episode.actions, *pictures)):
            raise DataError("the pictures, states, actions and rewards of an episode must be equally many.")
        if not all(np.all(np.isfinite(array)) for array in (episode.states, episode.actions, episode.rewards)):
            raise DataError("the states, actions and rewards of an episode must be finite.")
        height, width = self._io.config.image_resolution
        images = {slot: resize_with_pad(episode.images[slot], height, width) for slot in self._io.robot.cameras}
        with self._lock:
            stored = _Stored.of(self._next_serial, episode, images)
            if self._directory is not None:
                stored = stored.write(self._directory, self._in_memory)
            self._make_room(length)
            self._episodes.append(stored)
            self._next_serial += 1
            self._trajectories = None

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
            self._states = [*self._states[-1:], {"oldest": oldest, "next": self._next_serial}]
            self._forget()
            return dict(self._states[-1])

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a state: episodes that came later are removed, those that had made room return."""
        if self._directory is None:
            raise DataError("a replay buffer without a directory cannot be restored.")
        with self._lock:
            wanted = range(state["oldest"], state["next"])
            files = {_serial(file): file for file in sorted(self._directory.glob("episode-*.npz"))}
            if missing := [serial for serial in wanted if serial not in files]:
                raise DataError(
                    f"the replay buffer in {self._directory} lacks episode {missing[0]} of the state to go back to: "
                    "it was used by a later run, or files were removed."
                )
            for serial, file in files.items():
                if serial not in wanted:
                    _Stored.read(file, self._io.config.cameras, False).delete()
            self._episodes = [
                _Stored.read(files[serial], self._io.config.cameras, self._in_memory) for serial in wanted
            ]
            self._retired, self._next_serial, self._trajectories = [], state["next"], None
            self._states = [dict(state)]

    def _make_room(self, length: int) -> None:
        while self._episodes and len(self) + length > self._capacity:
            self._retired.append(self._episodes.pop(0))
        self._forget()

    def _forget(self) -> None:
        """Delete what no state needs any more."""
        oldest = min((state["oldest"] for state in self._states), default=self._next_serial)
        for stored in self._retired:
            if stored.serial < oldest:
                stored.delete()
        self._retired = [stored for stored in self._retired if stored.serial >= oldest]

    def _all(self) -> Trajectories:
        if self._trajectories is None:
            held = self._episodes
            lengths = np.array([len(stored.rewards) for stored in held])
            ends = np.cumsum(lengths)
            terminals = np.zeros(ends[-1], bool)
            terminals[ends - 1] = [stored.terminal for stored in held]
            prompts = list(dict.fromkeys(stored.prompt for stored in held))
            self._trajectories = Trajectories(
                states=np.concatenate([stored.states for stored in held]),
                actions=np.concatenate([stored.actions for stored in held]),
                rewards=np.concatenate([stored.rewards for stored in held]),
                terminals=terminals,
                starts=ends - lengths,
                ends=ends,
                success=np.array([stored.success for stored in held], np.int8),
                prompts=prompts,
                prompt_of_row=np.repeat([prompts.index(stored.prompt) for stored in held], lengths),
                frames={slot: _Frames(slot, held, ends - lengths) for slot in self._io.robot.cameras},
            )
        return self._trajectories


@dataclass(frozen=True)
class _Stored:
    """An episode as it is held: its pictures as arrays, or in files."""

    serial: int
    states: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminal: bool
    success: int
    prompt: str
    images: Mapping[str, UInt8[np.ndarray, "steps h w 3"] | Path]
    size: tuple[int, int]
    file: Path | None = None

    @classmethod
    def of(cls, serial: int, episode: Episode, images: Mapping[str, np.ndarray]) -> "_Stored":
        success = -1 if episode.success is None else int(episode.success)
        size = next((image.shape[1:3] for image in images.values()), (0, 0))
        return cls(
            serial,
            episode.states,
            episode.actions,
            episode.rewards,
            episode.terminal,
            success,
            episode.prompt,
            images,
            size,
        )

    def write(self, directory: Path, in_memory: bool) -> "_Stored":
        """Pictures first, then the columns in one step: an episode is there when its columns are."""
        file = directory / f"episode-{self.serial:09d}.npz"
        places = {slot: directory / f"{file.stem}.{slot}.frames" for slot in self.images}
        for slot, place in places.items():
            np.asarray(self.images[slot]).tofile(place)
        content = io.BytesIO()
        fields = ("states", "actions", "rewards", "terminal", "success", "prompt", "size")
        columns: dict[str, Any] = {name: np.asarray(getattr(self, name)) for name in fields}
        np.savez(content, **columns)
        write_file(file, content.getvalue())
        return _Stored(**{**self.__dict__, "images": self.images if in_memory else places, "file": file})

    @classmethod
    def read(cls, file: Path, cameras: Sequence[str], in_memory: bool) -> "_Stored":
        try:
            with np.load(file, allow_pickle=False) as content:
                columns = {name: content[name] for name in content.files}
            size = (int(columns["size"][0]), int(columns["size"][1]))
            shape = (len(columns["rewards"]), *size, 3)
            places = {slot: file.with_name(f"{file.stem}.{slot}.frames") for slot in cameras}
            images: dict[str, Any] = {slot: place for slot, place in places.items() if place.exists()}
            if any(place.stat().st_size != np.prod(shape) for place in images.values()):
                raise ValueError("a file of pictures has the wrong size")
            if in_memory:
                images = {slot: np.fromfile(place, np.uint8).reshape(shape) for slot, place in images.items()}
            return cls(
                _serial(file),
                columns["states"],
                columns["actions"],
                columns["rewards"],
                bool(columns["terminal"]),
                int(columns["success"]),
                str(columns["prompt"]),
                images,
                size,
                file,
            )
        except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{file} cannot be read as an episode of a replay buffer: {error}. Remove it.") from error

    def delete(self) -> None:
        if self.file is not None:
            for file in [self.file, *self.file.parent.glob(f"{self.file.stem}.*.frames")]:
                file.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Frames:
    """The pictures of one camera across the episodes held."""

    slot: str
    episodes: Sequence[_Stored]
    starts: Int64[np.ndarray, " episodes"]

    def gather(self, rows: Int64[np.ndarray, " n"]) -> UInt8[np.ndarray, "n h w 3"]:
        """Copies of the pictures at these rows."""
        numbers = np.searchsorted(self.starts, rows, side="right") - 1
        height, width = self.episodes[0].size
        out = np.empty((len(rows), height, width, 3), np.uint8)
        for place, (number, row) in enumerate(
            zip(numbers.tolist(), (rows - self.starts[numbers]).tolist(), strict=True)
        ):
            images = self.episodes[number].images[self.slot]
            if isinstance(images, Path):
                with images.open("rb", buffering=0) as file:
                    file.seek(row * out[place].nbytes)
                    file.readinto(out[place].data)
            else:
                out[place] = images[row]
        return out


def _serial(file: Path) -> int:
    return int(file.stem.removeprefix("episode-"))
