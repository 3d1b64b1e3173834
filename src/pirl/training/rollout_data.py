"""The data of RIPT's iterations: advantages, batches, a dataset of all attempts, and a probe of the policy's drift."""

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Float32, Int64

from pirl.agents.config import RIPTConfig
from pirl.agents.ript import RIPTAgent, RolloutBatch, has_signal, leave_one_out, scale_advantages
from pirl.data import ChunkBatch, ChunkShape, DatasetWriter, PolicyIO
from pirl.data.chunks import Trajectories, gather_chunks
from pirl.data.lerobot.format import INFO_FILE
from pirl.data.policy_io import Tokens
from pirl.data.transforms import indicate
from pirl.envs.base import EnvDescription
from pirl.envs.collect import DatasetFormat, dataset_features, episode_columns
from pirl.envs.rollout import Rollout
from pirl.errors import CheckpointError, DataError
from pirl.files import write_file
from pirl.models.types import Array
from pirl.training.setup import Setup


@dataclass(frozen=True)
class BatchTable:
    """The batches of an iteration as rows of its attempts. Rows that are not included only fill the batch."""

    rows: Int64[np.ndarray, "batches size"]
    included: Bool[np.ndarray, "batches size"]


def group_advantages(config: RIPTConfig, rewards: Sequence[Sequence[float]]) -> Float32[np.ndarray, " attempts"]:
    """The scaled advantage of every attempt, given rewards by group."""
    return scale_advantages(config, np.concatenate([leave_one_out(np.array(group, np.float32)) for group in rewards]))


def arrange_batches(
    config: RIPTConfig,
    lengths: Int64[np.ndarray, " attempts"],
    advantages: Float32[np.ndarray, " attempts"],
    sizes: Sequence[int],
    *,
    batch_size: int,
    attempts: int,
    execute_steps: int,
    seed: Sequence[int],
) -> BatchTable:
    """All chunks with a learning signal, in `num_epochs` random orders.

    By chunks, each comes once in an epoch. By groups, a batch has every attempt of its groups equally often: a round
    takes a chunk of each, and there are as many rounds as the longest attempt has chunks, in which shorter ones repeat.
    `sizes` are the numbers of attempts in each group, at most `attempts`; with chunks = decisions, a chunk starts every
    `execute_steps`.
    """
    rng = np.random.default_rng(list(seed))
    step = execute_steps if config.chunks == "decisions" else 1
    starts = np.cumsum(lengths) - lengths
    rows = [start + np.arange(0, length, step) for start, length in zip(starts, lengths, strict=True)]
    if config.batch_by == "groups":
        epochs = [_by_groups(rng, rows, sizes, attempts) for _ in range(config.num_epochs)]
    else:
        signal = has_signal(config, advantages)
        chosen = np.concatenate([part for part, is_used in zip(rows, signal, strict=True) if is_used])
        epochs = [rng.permutation(chosen) for _ in range(config.num_epochs)]
    # -1 fills the last batch of every epoch, and the columns of lost attempts.
    filled = [np.pad(epoch, (0, -len(epoch) % batch_size), constant_values=-1) for epoch in epochs]
    table = np.concatenate(filled).reshape(-1, batch_size)
    return BatchTable(np.maximum(table, 0), table >= 0)


def _by_groups(
    rng: np.random.Generator, rows: Sequence[Int64[np.ndarray, " _"]], sizes: Sequence[int], attempts: int
) -> Int64[np.ndarray, " rows"]:
    rounds, first = [], 0
    for size in sizes:
        members = rows[first : first + size]
        count = max(map(len, members))
        table = np.full((count, attempts), -1)
        for column, member in enumerate(members):
            orders = [rng.permutation(member) for _ in range(-(-count // len(member)))]
            table[:, column] = np.concatenate(orders)[:count]
        rounds.append(table)
        first += size
    every = np.concatenate(rounds)
    return every[rng.permutation(len(every))].reshape(-1)


@dataclass(frozen=True)
class Rows:
    """Start indices of chunks in episodes."""

    trajectories: Trajectories
    rows: Int64[np.ndarray, " b"]

    def gather(self, shape: ChunkShape, policy_io: PolicyIO) -> ChunkBatch:
        return gather_chunks(self.trajectories, self.rows, shape, policy_io)

    def prompts(self, positive: Bool[np.ndarray, " b"], policy_io: PolicyIO) -> Tokens:
        """Their prompts with the indicator of good or bad actions."""
        data, rows = self.trajectories, self.rows
        pairs = zip(data.prompts_of(rows), positive.tolist(), strict=True)
        return policy_io.prompt_tokens([indicate(prompt, good) for prompt, good in pairs], data.states[rows])


def make_batch(
    config: RIPTConfig,
    attempts: Rows,
    advantages: Float32[np.ndarray, " attempts"],
    included: Bool[np.ndarray, " b"],
    shape: ChunkShape,
    policy_io: PolicyIO,
    demonstrations: Rows | None = None,
) -> RolloutBatch:
    """The batch of some rows; under guidance with prompts that indicate whether their attempt was good."""
    row_advantages = advantages[attempts.trajectories.episode_of(attempts.rows)]
    prompts = demonstration_prompts = None
    if config.weighting == "guidance":
        prompts = attempts.prompts(row_advantages > 0, policy_io)
        if demonstrations is not None:
            demonstration_prompts = demonstrations.prompts(np.ones(len(demonstrations.rows), bool), policy_io)
    arrays: dict[str, Any] = dict(
        chunks=attempts.gather(shape, policy_io),
        advantages=row_advantages,
        included=included,
        prompts=prompts,
        demonstrations=None if demonstrations is None else demonstrations.gather(shape, policy_io),
        demonstration_prompts=demonstration_prompts,
    )
    return RolloutBatch(**arrays)


class RolloutDataset:
    """All finished attempts of a run, in the order in which they ended, with their outcomes."""

    def __init__(self, root: Path, description: EnvDescription) -> None:
        self._root, self._description = root, description
        self._writer: DatasetWriter | None = None
        # Episodes of this run so far, and those in the dataset: more, after a resume.
        self.episodes, self._written = 0, self._count()

    def add(self, rollout: Rollout) -> None:
        """Write an attempt, unless it is there already."""
        self.episodes += 1
        if self.episodes <= self._written:
            return
        if self._writer is None:
            form = DatasetFormat()
            self._writer = DatasetWriter(
                self._root,
                fps=self._description.fps,
                features=dataset_features(self._description, form),
                robot_type=self._description.robot.name,
                version=form.version,
                codec=form.codec,
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


class DriftProbe:
    """How far the policy has moved from where it began: a batch and the start policy's flow there, in a file."""

    def __init__(self, file: Path, setup: Setup) -> None:
        self._file, self._setup = file, setup
        self._probe: tuple[Any, Any] | None = None

    def take(self, agent: Any, batch: RolloutBatch) -> None:
        """Write the flow of the policy on this batch, unless there is one already."""
        if self._file.exists():
            return
        leaves = {f"{number:02d}": np.asarray(leaf) for number, leaf in enumerate(jax.tree.leaves(batch.chunks))}
        leaves["velocities"] = np.asarray(_velocities(agent, self._place(batch.chunks)))
        content = io.BytesIO()
        np.savez(content, **leaves)  # type: ignore[arg-type]
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
            velocities = arrays.pop("velocities")
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
        return jax.device_put(batch, self._setup.batch_sharding())


# The same noise and times in every measurement.


@jax.jit
def _velocities(agent: RIPTAgent, batch: ChunkBatch) -> Float[Array, "b horizon action_dim"]:
    return agent.velocities(batch, jax.random.key(0))


@jax.jit
def _drift(agent: RIPTAgent, batch: ChunkBatch, before: Float[Array, "b horizon action_dim"]) -> Float[Array, ""]:
    return agent.drift(before, batch, jax.random.key(0))
