"""Which chunks come next: a pure function of seed and step, so that a few bytes resume it exactly, on any host."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float, Int64

from pirl.data.chunks import ChunkBatch, ChunkShape, Trajectories, cut_chunks
from pirl.data.policy_io import PolicyIO
from pirl.errors import ConfigError, DataError


class AnchorStream:
    """An endless order of anchor rows: epoch after epoch, and within an epoch memory pool after memory pool.

    An epoch deals the episodes out to pools anew and shuffles the rows inside each pool, so that only one pool's frames
    are in use at a time. Rows of equal weight come once per epoch; otherwise they are drawn in proportion to their
    weight, as many per epoch. Rows of weight 0 never come.
    """

    def __init__(
        self,
        trajectories: Trajectories,
        *,
        seed: int,
        weights: Float[np.ndarray, " rows"] | None = None,
        episodes_per_memory_pool: int | None = None,
    ):
        if episodes_per_memory_pool is not None and episodes_per_memory_pool < 1:
            raise ConfigError(f"episodes_per_memory_pool should be at least 1; it is {episodes_per_memory_pool}.")
        weights = np.ones(len(trajectories.rewards)) if weights is None else np.asarray(weights, np.float64)
        if not np.all(np.isfinite(weights)) or np.any(weights < 0):
            raise ConfigError("sampling weights should be finite and not negative.")
        self._seed = seed
        self._weights = weights
        rows = [np.arange(s, e) for s, e in zip(trajectories.starts, trajectories.ends, strict=True)]
        self._rows = [kept for episode in rows if len(kept := episode[weights[episode] > 0])]
        self.size = sum(map(len, self._rows))
        if not self.size:
            raise DataError("no frames are left to sample from: the filters and weights exclude every episode.")
        self._uniform = len(np.unique(weights[np.concatenate(self._rows)])) == 1
        self._pool_size = episodes_per_memory_pool or len(self._rows)
        self._orders: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    def take(self, position: int, count: int) -> Int64[np.ndarray, " count"]:
        """Anchors number position, …, position + count - 1 of the stream."""
        parts = []
        while count > 0:
            epoch, offset = divmod(position, self.size)
            part = self._epoch(epoch)[0][offset : offset + count]
            parts.append(part)
            position, count = position + len(part), count - len(part)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def pool_at(self, position: int) -> tuple[int, int]:
        """Epoch and memory pool of a position."""
        epoch, offset = divmod(position, self.size)
        return epoch, int(np.searchsorted(self._epoch(epoch)[1], offset, side="right"))

    def _epoch(self, epoch: int) -> tuple[Int64[np.ndarray, " size"], Int64[np.ndarray, " pools"]]:
        """The anchors of an epoch in order, and where each pool ends. The two last used are kept."""
        if epoch not in self._orders:
            rng = np.random.default_rng([self._seed, epoch])
            dealt = [self._rows[episode] for episode in rng.permutation(len(self._rows))]
            pools = [np.concatenate(dealt[i : i + self._pool_size]) for i in range(0, len(dealt), self._pool_size)]
            order = [rng.permutation(pool) for pool in pools] if self._uniform else self._draw(rng, pools)
            self._orders[epoch] = np.concatenate(order), np.cumsum([len(pool) for pool in order])
            if len(self._orders) > 2:
                self._orders.popitem(last=False)
        self._orders.move_to_end(epoch)
        return self._orders[epoch]

    def _draw(self, rng: np.random.Generator, pools: list[np.ndarray]) -> list[np.ndarray]:
        """As many rows as there are, shared out to the pools by weight and drawn by weight inside each."""
        totals = np.cumsum([self._weights[pool].sum() for pool in pools])
        counts = np.diff(np.round(totals / totals[-1] * self.size).astype(int), prepend=0)
        order = []
        for pool, count in zip(pools, counts, strict=True):
            cumulative = np.cumsum(self._weights[pool])
            places = np.searchsorted(cumulative, rng.random(count) * cumulative[-1], side="right")
            order.append(pool[np.minimum(places, len(pool) - 1)])
        return order


@runtime_checkable
class Source(Protocol):
    """Something to draw chunks from."""

    def cut(self, step: int, position: int, count: int, share: slice, shape: ChunkShape) -> ChunkBatch:
        """The share of the `count` samples that this source gives to a step, after `position` samples in all."""
        ...


@dataclass(frozen=True)
class DatasetSource:
    """Chunks of a fixed dataset, in the order of its stream."""

    trajectories: Trajectories
    stream: AnchorStream
    policy_io: PolicyIO

    def cut(self, step: int, position: int, count: int, share: slice, shape: ChunkShape) -> ChunkBatch:
        """The next samples of the stream."""
        anchors = self.stream.take(position, count)[share]
        batch = cut_chunks(self.trajectories, anchors, shape, self.policy_io)
        if count and self.stream.pool_at(position) != self.stream.pool_at(position + count):
            # The pool is used up: let go of its pages.
            for frames in self.trajectories.frames.values():
                release = getattr(frames, "release", None)
                if release is not None:
                    release()
        return batch


class ChunkSampler:
    """Batches from one or several sources mixed by ratio; the batch of a step depends on nothing but the step.

    With several processes each gets its own share of the global batch, and all shares together are the same batch
    whatever their number.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        batch_size: int,
        shape: ChunkShape,
        ratios: Sequence[float] | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ):
        ratios = [1.0] * len(sources) if ratios is None else list(ratios)
        if not sources or len(ratios) != len(sources) or min(ratios) < 0 or not 0 < sum(ratios) < float("inf"):
            raise ConfigError(f"{len(sources)} sources need as many ratios, not negative and not all 0; got {ratios}.")
        if batch_size < 1 or batch_size % process_count:
            raise ConfigError(
                f"the batch size should be a multiple of the number of processes ({process_count}); it is {batch_size}."
            )
        exact = [Fraction(ratio).limit_denominator(1_000_000) for ratio in ratios]
        total = sum(exact)
        self._bounds = [sum(exact[:i], Fraction(0)) / total for i in range(len(exact) + 1)]
        self._sources, self._shape = list(sources), shape
        self.batch_size = batch_size
        local = batch_size // process_count
        self._mine = range(process_index * local, (process_index + 1) * local)
        self.step = 0

    def batch(self, step: int) -> ChunkBatch:
        """This process's share of the batch of a step."""
        parts, offset = [], 0
        for source, low, high in zip(self._sources, self._bounds, self._bounds[1:], strict=False):
            position, after = (
                int(when * self.batch_size * high) - int(when * self.batch_size * low) for when in (step, step + 1)
            )
            count = after - position
            share = slice(max(self._mine.start - offset, 0), max(min(self._mine.stop - offset, count), 0))
            if share.start < share.stop:
                parts.append(source.cut(step, position, count, share, self._shape))
            offset += count
        return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    def __next__(self) -> ChunkBatch:
        batch = self.batch(self.step)
        self.step += 1
        return batch

    def state(self) -> dict[str, int]:
        """All that is needed to go on from here."""
        return {"step": self.step, "batch_size": self.batch_size}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        if state["batch_size"] != self.batch_size:
            raise ConfigError(
                f"the sampler was saved with a batch size of {state['batch_size']} and cannot go on with "
                f"{self.batch_size}: its samples would come in another order."
            )
        self.step = int(state["step"])
