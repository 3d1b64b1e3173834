"""A replay buffer of whole episodes, with the same batch contract as a dataset; on disk it survives a restart."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pirl.data.chunks import ChunkBatch, ChunkShape, Trajectories, cut_chunks
from pirl.data.images import resize_with_pad
from pirl.data.policy_io import PolicyIO
from pirl.data.replay_episodes import (
    COLUMNS,
    Episode,
    StoredEpisode,
    StoredFrames,
    check_widths,
    delete_episode,
    episode_files,
    serial_of,
    sweep,
    writing,
)
from pirl.errors import ConfigError, DataError


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
        directory: Path | str | None = None,
        in_memory: bool = True,
    ):
        if capacity < 1:
            raise ConfigError(f"the replay buffer needs room for at least one frame; its capacity is {capacity}.")
        if directory is None and not in_memory:
            raise ConfigError("a replay buffer that is not kept in memory needs a directory.")
        if seed < 0:
            raise ConfigError(f"a seed cannot be negative; it is {seed}.")
        directory = None if directory is None else Path(directory)
        self._capacity, self._io, self._seed = capacity, policy_io, seed
        self._directory, self._in_memory = directory, in_memory
        self._episodes: list[StoredEpisode] = []
        self._retired: list[Path] = []
        self._next_serial = 0
        self._states: list[dict[str, int]] = []
        self._trajectories: Trajectories | None = None
        self._lock = threading.RLock()
        if directory is not None:
            with writing(directory):
                directory.mkdir(parents=True, exist_ok=True)
                files = episode_files(directory)
                self._next_serial = max(files, default=-1) + 1
                sweep(directory, self._next_serial)
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
            stored = StoredEpisode.of(self._next_serial, episode, images)
            if self._directory is not None:
                stored = stored.write(self._directory, self._in_memory)
            while self._episodes and len(self) + len(episode) > self._capacity:
                if (file := self._episodes.pop(0).file) is not None:
                    self._retired.append(file)
            self._episodes.append(stored)
            self._next_serial += 1
            self._trajectories = None
            self._forget()

    def clear(self) -> None:
        """Let all episodes make room."""
        with self._lock:
            self._retired += [stored.file for stored in self._episodes if stored.file is not None]
            self._episodes, self._trajectories = [], None
            self._forget()

    def cut(self, position: int, count: int, shape: ChunkShape) -> ChunkBatch:
        """Samples drawn from all frames alike; the same for the same position and content."""
        with self._lock:
            if not self._episodes:
                raise DataError("the replay buffer is empty: collect an episode before learning from it.")
            # Each sample has a block of the generator to itself, so it does not matter how a batch is split among hosts.
            draws = np.random.Philox(key=self._seed).advance(position).random_raw(4 * count)[::4]
            return cut_chunks(self.trajectories, (draws % len(self)).astype(np.int64), shape, self._io)

    @property
    def trajectories(self) -> Trajectories:
        """The episodes that are held, the oldest first; there must be one at least."""
        if self._trajectories is None:
            held = self._episodes
            columns = {name: [stored.columns[name] for stored in held] for name in COLUMNS}
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
                frames={slot: StoredFrames(slot, held, ends - lengths, size) for slot in self._io.robot.cameras},
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
            self._forget()
            return dict(self._states[-1])

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a state: episodes that came later are removed, those that had made room return."""
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
            before = [file for serial, file in files.items() if serial < state["oldest"]]
            with writing(self._directory):
                for serial, file in files.items():
                    if serial >= state["next"]:
                        delete_episode(file)
            # What made room before may belong to the state before this one, which is still there.
            self._retired = before + self._retired
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
            raise DataError(f"the episode has no pictures of {', '.join(missing)}.")
        pictures = (episode.images[slot] for slot in robot.cameras)
        if any(len(array) != length for array in (episode.states, episode.actions, *pictures)):
            raise DataError("the pictures, states, actions and rewards of an episode must be equally many.")
        if episode.states.ndim != 2 or episode.actions.ndim != 2:
            raise DataError("the states and actions of an episode are arrays of [steps, dimensions].")
        for name in ("states", "actions", "rewards"):
            if not np.all(np.isfinite(getattr(episode, name))):
                raise DataError(f"the {name} of an episode must be finite.")
        check_widths(episode.states, episode.actions, robot, next(iter(self._episodes), None))

    def _hold(self, files: Sequence[Path]) -> None:
        """Hold the newest of these episodes that there is room for; the others have made room."""
        known = {stored.file: stored for stored in self._episodes}
        held: list[StoredEpisode] = []
        frames = 0
        for file in reversed(files):
            stored = known.get(file) or StoredEpisode.read(file, self._io, self._in_memory)
            frames += len(stored)
            if frames > self._capacity:
                break
            held.insert(0, stored)
        self._episodes, self._retired, self._trajectories = held, list(files[: len(files) - len(held)]), None

    def _forget(self) -> None:
        """Delete what made room and no state needs any more."""
        oldest = min((state["oldest"] for state in self._states), default=self._next_serial)
        for file in self._retired:
            if serial_of(file) < oldest:
                delete_episode(file)
        self._retired = [file for file in self._retired if serial_of(file) >= oldest]
