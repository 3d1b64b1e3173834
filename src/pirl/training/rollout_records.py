"""What a RIPT run keeps of its rollouts: a dataset of all attempts, videos of some, and a probe of the policy's drift."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from pirl.agents.ript import RIPTAgent, RolloutBatch
from pirl.data import ChunkBatch, DatasetWriter
from pirl.data.lerobot.format import INFO_FILE
from pirl.envs.base import EnvDescription
from pirl.envs.collect import DatasetFormat, dataset_features, episode_columns
from pirl.envs.rollout import Rollout
from pirl.envs.video import Video, write_videos
from pirl.errors import CheckpointError, ConfigError, DataError
from pirl.files import write_file
from pirl.models.types import Array
from pirl.training.setup import Setup

_VELOCITIES = "velocities"


class RolloutDataset:
    """All finished attempts of a run, in the order in which they ended, with their outcomes."""

    def __init__(self, root: Path, description: EnvDescription) -> None:
        self._root, self._description, self._format = root, description, DatasetFormat()
        self._features = dataset_features(description, self._format)
        self._writer: DatasetWriter | None = None
        # Episodes of this run so far, and those in the dataset: more, after a resume.
        self.episodes = 0
        self._written = self._count()

    def add(self, rollout: Rollout) -> None:
        """Write an attempt, unless it is there already."""
        self.episodes += 1
        if self.episodes <= self._written:
            return
        if self._writer is None:
            self._writer = DatasetWriter(
                self._root,
                fps=self._description.fps,
                features=self._features,
                robot_type=self._description.robot.name,
                version=self._format.version,
                codec=self._format.codec,
                resume=self._root.exists(),
            )
        self._writer.write_episode(episode_columns(rollout, self._description), task=rollout.prompt)
        self._written += 1

    def close(self) -> None:
        """Compute its statistics; without, the dataset is whole, but they are bounds only."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def go_on_after(self, episodes: int | None) -> None:
        """Go on after so many episodes: later ones come again, and are not written twice. None: append all."""
        self.close()
        self._written = self._count()
        self.episodes = self._written if episodes is None else episodes

    def _count(self) -> int:
        info = self._root / INFO_FILE
        if not info.exists():
            return 0
        try:
            return int(json.loads(info.read_text(encoding="utf-8"))["total_episodes"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{info} is damaged ({error!r}), so the rollouts cannot be added to: move {self._root} away, or go on "
                "without (--rollout.save-dataset false)."
            ) from error


class Films:
    """A few successes and as many failures of an iteration, side by side."""

    def __init__(self, directory: Path, description: EnvDescription, most: int = 4) -> None:
        self._directory, self._description, self._most = directory, description, most
        self._camera = next(iter(description.robot.cameras.values()), None)
        if self._camera is None:
            raise ConfigError(
                f"rollout.videos_every asks for films, and {description.name} shows no pictures as it is configured: "
                "--rollout.videos-every 0."
            )
        self._films: dict[bool, list[Video]] = {True: [], False: []}

    def add(self, rollout: Rollout) -> None:
        """Take the first ones of each outcome."""
        assert self._camera is not None
        if len(self._films[rollout.success]) < self._most:
            self._films[rollout.success].append(Video(rollout.observations[self._camera], rollout.success))

    def write(self, name: str) -> None:
        """Write the film of what was taken since the last one: successes above, failures below."""
        films = [*self._films[True], *self._films[False]]
        self._films = {True: [], False: []}
        if films:
            self._directory.mkdir(exist_ok=True)
            write_videos(self._directory / f"{name}.mp4", films, self._description.fps, columns=self._most)


class DriftProbe:
    """How far the policy has moved from where it began: a batch and the start policy's flow there, in a file."""

    def __init__(self, file: Path, setup: Setup) -> None:
        self._file, self._setup = file, setup
        self._probe: tuple[Any, Any] | None = None

    def take(self, agent: Any, batch: RolloutBatch) -> None:
        """Write the flow of the policy on this batch, unless there is one already."""
        if self._file.exists():
            return
        velocities = np.asarray(_velocities(agent, self._place(batch.chunks)))
        leaves = {f"{number:02d}": np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(batch.chunks))}
        content = io.BytesIO()
        np.savez(content, **leaves, **{_VELOCITIES: velocities})  # type: ignore[arg-type]
        write_file(self._file, content.getvalue())

    def measure(self, agent: Any, like: RolloutBatch) -> float:
        """The drift since; `like` is any batch of this run."""
        if self._probe is None:
            self._probe = self._read(like.chunks)
        return float(_drift(agent, *self._probe))

    def _read(self, like: ChunkBatch) -> tuple[Any, Any]:
        try:
            with np.load(self._file, allow_pickle=False) as content:
                arrays = {name: content[name] for name in content.files}
            velocities = arrays.pop(_VELOCITIES)
            leaves = [arrays[name] for name in sorted(arrays)]
            if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in jax.tree.leaves(like)]:
                raise ValueError("it is not from a run like this one")
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"{self._file} holds what the drift of the policy is measured by, and cannot be read: {error}. Put it "
                "back from a copy; or delete it, and drift is measured from the policy as it is now."
            ) from error
        return self._place(jax.tree.unflatten(jax.tree.structure(like), leaves)), jax.device_put(velocities)

    def _place(self, batch: ChunkBatch) -> ChunkBatch:
        sharding = self._setup.batch_sharding()
        return jax.device_put(batch) if sharding is None else jax.device_put(batch, sharding)


def _key() -> jax.Array:
    """The same noise and times in every measurement."""
    return jax.random.key(0)


@jax.jit
def _velocities(agent: RIPTAgent, batch: ChunkBatch) -> Float[Array, "b horizon action_dim"]:
    return agent.velocities(batch, _key())


@jax.jit
def _drift(agent: RIPTAgent, batch: ChunkBatch, before: Float[Array, "b horizon action_dim"]) -> Float[Array, ""]:
    return agent.drift(before, batch, _key())
