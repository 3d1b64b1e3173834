"""The batches of a RIPT iteration: advantages, the order of chunks, and the arrays of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int64

from pirl.agents.config import RIPTConfig
from pirl.agents.ript import RolloutBatch, has_signal, leave_one_out, scale_advantages
from pirl.data import ChunkBatch, ChunkShape, PolicyIO
from pirl.data.chunks import Trajectories, gather_chunks
from pirl.data.policy_io import Tokens
from pirl.data.transforms import indicate


@dataclass(frozen=True)
class BatchTable:
    """The batches of an iteration as rows of its attempts. Rows that are not included only fill the batch."""

    rows: Int64[np.ndarray, "batches size"]
    included: Bool[np.ndarray, "batches size"]

    def __len__(self) -> int:
        return len(self.rows)


def group_advantages(config: RIPTConfig, rewards: Sequence[Sequence[float]]) -> Float32[np.ndarray, " attempts"]:
    """The scaled advantage of every attempt, given rewards by group."""
    each = [leave_one_out(np.array(group, np.float32)) for group in rewards]
    return scale_advantages(config, np.concatenate(each))


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
        """The chunks."""
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
