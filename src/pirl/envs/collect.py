"""Collects LeRobot datasets: episodes in the order of their starts, and a log from which a killed run resumes."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pirl.data import DatasetWriter
from pirl.data.lerobot.format import INFO_FILE
from pirl.data.lerobot.video import Codec
from pirl.envs.base import EnvDescription, Policy, Start
from pirl.envs.evaluation import EpisodeResult, versions
from pirl.envs.experts import ExpertConfig
from pirl.envs.pool import EnvPool
from pirl.envs.rollout import Rollout, roll_out
from pirl.errors import ConfigError, DataError
from pirl.files import write_file, writing

LOG_FILE = "meta/pirl_collect.json"
_OUTCOMES = {"next.reward": "float32", "next.done": "bool", "next.success": "bool", "next.truncated": "bool"}


@dataclass(frozen=True)
class DatasetFormat:
    version: Literal["v2.1", "v3.0"] = "v3.0"
    storage: Literal["video", "image"] = "video"
    codec: Codec = "h264"


@dataclass(frozen=True)
class CollectionLog:
    """What was collected so far: the settings that decide it, and each episode, written or lost, by start."""

    settings: Mapping[str, Any]
    episodes: tuple[EpisodeResult, ...] = ()
    complete: bool = False

    @property
    def written(self) -> int:
        return sum(episode.lost is None for episode in self.episodes)

    @property
    def frames(self) -> int:
        """Environment steps that are in the dataset."""
        return sum(episode.length for episode in self.episodes if episode.lost is None)

    @classmethod
    def read(cls, root: Path) -> "CollectionLog":
        """The log of a dataset, without an episode that a kill kept from being written."""
        try:
            content = json.loads((root / LOG_FILE).read_text(encoding="utf-8"))
            episodes = [EpisodeResult(**entry) for entry in content["episodes"]]
            counted = int(json.loads((root / INFO_FILE).read_text(encoding="utf-8"))["total_episodes"])
            log = cls(content["settings"], tuple(episodes), content["complete"])
            while log.written > counted:
                log = replace(log, episodes=log.episodes[:-1])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{root} cannot be resumed: its {LOG_FILE} or {INFO_FILE} is damaged: {error!r}."
            ) from error
        if log.written < counted:
            raise DataError(
                f"{root} cannot be resumed: it has {counted} episodes, but {LOG_FILE} knows of {log.written} only. "
                "Something else has added to it; choose another directory."
            )
        return log


def open_log(root: Path, settings: Mapping[str, Any], *, resume: bool) -> CollectionLog:
    """The log to continue. Refuses a directory with something else in it, or with episodes made by other settings."""
    settings = json.loads(json.dumps(settings))  # as it will be read back
    if not resume:
        if root.exists() and not root.is_dir():
            raise DataError(f"{root} is a file: choose a directory for the dataset.")
        if root.exists() and any(root.iterdir()):
            raise DataError(f"{root} is not empty: choose another directory, or --resume to continue what is in it.")
        return CollectionLog(settings)
    if not (root / LOG_FILE).exists():
        # A run that was killed at once has left a dataset without episodes, or nothing.
        if any(root.glob("data/*/*.parquet")):
            raise DataError(f"{root} has episodes but no {LOG_FILE}: `pirl collect` did not make it.")
        return CollectionLog(settings)
    log = CollectionLog.read(root)
    if differences := list(_differences(log.settings, settings)):
        raise DataError(
            f"{root} was collected with other settings: {'; '.join(differences)}. Choose another directory."
        )
    return log


def collect_dataset(
    pool: EnvPool,
    actor: Policy | ExpertConfig,
    starts: Sequence[Start],
    root: Path,
    *,
    execute_steps: int,
    settings: Mapping[str, Any],
    dataset_format: DatasetFormat | None = None,
    env_steps: int | None = None,
    resume: bool = False,
    on_episode: Callable[[EpisodeResult], None] | None = None,
) -> CollectionLog:
    """Write the episodes from all starts, or until there are `env_steps`, as a LeRobot dataset.

    `settings` decide the content; they are kept, and a run that resumes must have the same. With more starts or steps
    it adds to what is there. Lost episodes are in the log, but not in the dataset.
    """
    dataset_format = dataset_format or DatasetFormat()
    features = dataset_features(pool.description, dataset_format)
    log = open_log(root, settings, resume=resume)
    with DatasetWriter(
        root,
        fps=pool.description.fps,
        features=features,
        robot_type=pool.description.robot.name,
        version=dataset_format.version,
        codec=dataset_format.codec,
        resume=resume,
    ) as writer:
        done, frames, log_writer = len(log.episodes), log.frames, _LogWriter(root, log)
        enough = math.inf if env_steps is None else env_steps
        starts = starts[done:] if frames < enough else ()
        for rollout in _in_order(roll_out(pool, actor, starts, execute_steps=execute_steps, keep_images=True)):
            result = EpisodeResult.of(rollout, index=done + rollout.index)
            # Before the episode itself: counting the episodes shows an entry too many; one too few would be lost.
            log_writer.add(result)
            if result.lost is None:
                writer.write_episode(episode_columns(rollout, pool.description), task=rollout.prompt)
                frames += result.length
            if on_episode is not None:
                on_episode(result)
            if frames >= enough:
                break  # episodes under way are dropped: the dataset does not depend on which was faster
    return log_writer.write(complete=True)


def dataset_features(description: EnvDescription, dataset_format: DatasetFormat) -> dict[str, dict[str, Any]]:
    robot = description.robot
    for name, columns in (("state", robot.state), ("actions", robot.actions)):
        if len(columns) != 1:
            raise ConfigError(
                f"robot {robot.name!r} has several columns for its {name} ({', '.join(columns)}); an environment has "
                "them in one, so nothing can be collected for it."
            )
    assert robot.action_dim is not None
    cameras = robot.cameras.values()
    return {
        **{name: {"dtype": dataset_format.storage, "shape": description.shapes[name]} for name in cameras},
        robot.state[0]: {"dtype": "float32", "shape": description.shapes[robot.state[0]]},
        robot.actions[0]: {"dtype": "float32", "shape": (robot.action_dim,)},
        **{name: {"dtype": dtype, "shape": (1,)} for name, dtype in _OUTCOMES.items()},
    }


def episode_columns(rollout: Rollout, description: EnvDescription) -> dict[str, np.ndarray]:
    """The columns of a finished episode in a dataset. How it ended is marked at its last frame."""
    robot = description.robot
    last = np.arange(len(rollout)) == len(rollout) - 1
    return {
        **{name: rollout.observations[name] for name in (*robot.cameras.values(), robot.state[0])},
        robot.actions[0]: rollout.actions,
        "next.reward": rollout.rewards,
        "next.done": last & (rollout.terminated or rollout.truncated),
        "next.success": last & rollout.success,
        # An episode that ended in its very last step did end.
        "next.truncated": last & (rollout.truncated and not rollout.terminated),
    }


class _LogWriter:
    def __init__(self, root: Path, log: CollectionLog) -> None:
        self._root, self._settings, self._episodes = root, log.settings, list(log.episodes)
        self._entries = [json.dumps(asdict(episode)) for episode in log.episodes]

    def add(self, episode: EpisodeResult) -> None:
        self._episodes.append(episode)
        self._entries.append(json.dumps(asdict(episode)))
        self.write(complete=False)

    def write(self, *, complete: bool) -> CollectionLog:
        head = json.dumps({"settings": self._settings, "versions": versions(), "complete": complete}, indent=1)
        entries = ",\n  ".join(self._entries)
        with writing("the log of the collection", self._root, "Make room, and resume."):
            write_file(self._root / LOG_FILE, f'{head[:-2]},\n "episodes": [\n  {entries}\n ]\n}}\n')
        return CollectionLog(self._settings, tuple(self._episodes), complete)


def _in_order(rollouts: Iterator[Rollout]) -> Iterator[Rollout]:
    """Rollouts by their index; those that finish early wait."""
    waiting: dict[int, Rollout] = {}
    following = 0
    for rollout in rollouts:
        waiting[rollout.index] = rollout
        while following in waiting:
            yield waiting.pop(following)
            following += 1


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in {**there, **here}:
        old, new = there.get(name), here.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name} is {json.dumps(old)} there, and {json.dumps(new)} here"
