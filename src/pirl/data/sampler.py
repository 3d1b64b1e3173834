"""Which chunks come next: a pure function of seed and step, so that a few bytes resume it exactly, on any host."""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float, Int64

from pirl.data.chunks import ChunkBatch, ChunkShape, Trajectories, gather_chunks
from pirl.data.policy_io import PolicyIO
from pirl.errors import ConfigError, DataError


class ChunkIndexSampler:
    """An endless order of start indices: epoch after epoch, and within an epoch memory pool after memory pool.

    Every epoch assigns the episodes to pools anew and shuffles the rows inside each pool, so that only one pool's frames
    are in use at a time. Rows of equal weight come once per epoch; otherwise they are drawn in proportion to their
    weight, as many per epoch. Rows of weight 0 are never drawn.
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
        if seed < 0:
            raise ConfigError(f"a seed cannot be negative; it is {seed}.")
        weights = np.ones(len(trajectories.rewards)) if weights is None else np.asarray(weights, np.float64)
        if len(weights) != len(trajectories.rewards):
            raise ConfigError(f"{len(weights)} sampling weights do not fit {len(trajectories.rewards)} rows.")
        if not np.all(np.isfinite(weights)) or np.any(weights < 0):
            raise ConfigError("sampling weights should be finite and not negative.")
        self.seed = seed
        self._weights = weights = weights / max(weights.max(initial=0.0), 1e-300)  # sums of them must stay finite
        rows = [np.arange(s, e) for s, e in zip(trajectories.starts, trajectories.ends, strict=True)]
        self._rows = [kept for episode in rows if len(kept := episode[weights[episode] > 0])]
        self.size = sum(map(len, self._rows))
        if not self.size:
            raise DataError("no frames are left to sample from: the filters and weights exclude every episode.")
        self._uniform = len(np.unique(weights[np.concatenate(self._rows)])) == 1
        self._pool_size = min(episodes_per_memory_pool or len(self._rows), len(self._rows))
        self._orders: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()

    @cached_property
    def identity(self) -> list[int]:
        """What determines the order: seed, number of rows, episodes in a pool, and a digest of rows and weights."""
        digest = hashlib.blake2b(digest_size=6)  # a number of that size is exact in any JSON
        rows = np.concatenate(self._rows)
        for array in (np.array([len(episode) for episode in self._rows]), rows):
            digest.update(array.astype("<i8").tobytes())
        if not self._uniform:
            # In float32: another machine may round the last bit otherwise.
            digest.update(self._weights[rows].astype("<f4").tobytes())
        return [self.seed, self.size, self._pool_size, int.from_bytes(digest.digest(), "big")]

    def take(self, position: int, count: int) -> Int64[np.ndarray, " count"]:
        """Start indices number position, …, position + count - 1."""
        parts = [np.empty(0, np.int64)]
        while count > 0:
            epoch, offset = divmod(position, self.size)
            part = self._epoch(epoch)[0][offset : offset + count]
            parts.append(part)
            position, count = position + len(part), count - len(part)
        return np.concatenate(parts)

    def pool_at(self, position: int) -> tuple[int, int]:
        epoch, offset = divmod(position, self.size)
        return epoch, int(np.searchsorted(self._epoch(epoch)[1], offset, side="right"))

    def _epoch(self, epoch: int) -> tuple[Int64[np.ndarray, " size"], Int64[np.ndarray, " pools"]]:
        """The rows of an epoch in order, and where each pool ends. The two last used are kept."""
        if epoch not in self._orders:
            rng = np.random.default_rng([self.seed, epoch])
            episodes = [self._rows[episode] for episode in rng.permutation(len(self._rows))]
            pools = [
                np.concatenate(episodes[i : i + self._pool_size]) for i in range(0, len(episodes), self._pool_size)
            ]
            order = [rng.permutation(pool) for pool in pools] if self._uniform else self._by_weight(rng, pools)
            self._orders[epoch] = np.concatenate(order), np.cumsum([len(pool) for pool in order])
            if len(self._orders) > 2:
                self._orders.popitem(last=False)
        self._orders.move_to_end(epoch)
        return self._orders[epoch]

    def _by_weight(self, rng: np.random.Generator, pools: list[np.ndarray]) -> list[np.ndarray]:
        """As many rows as there are, shared out to the pools by weight and drawn by weight inside each."""
        totals = np.cumsum([self._weights[pool].sum() for pool in pools])
        counts = np.diff(np.round(totals / totals[-1] * self.size).astype(int), prepend=0)
        order = []
        for pool, count in zip(pools, counts, strict=True):
            cumulative = np.cumsum(self._weights[pool])
            drawn = np.searchsorted(cumulative, rng.random(count) * cumulative[-1], side="right")
            order.append(pool[np.minimum(drawn, len(pool) - 1)])
        return order


@runtime_checkable
class Source(Protocol):
    def gather(self, position: int, count: int, shape: ChunkShape) -> ChunkBatch:
        """The samples number position, …, position + count - 1 of this source."""
        ...

    def identity(self) -> list[int]:
        """Numbers that differ where the samples would come in another order."""
        ...


class DatasetSource:
    """Chunks of a fixed dataset, in the order of its start indices."""

    def __init__(self, trajectories: Trajectories, indices: ChunkIndexSampler, policy_io: PolicyIO):
        self.trajectories, self.indices, self.policy_io = trajectories, indices, policy_io
        used = [trajectories.prompts[prompt] for prompt in np.unique(trajectories.prompt_of_row).tolist()]
        policy_io.check_prompts(used, trajectories.states.shape[1])
        self._pool: tuple[int, int] | None = None

    def gather(self, position: int, count: int, shape: ChunkShape) -> ChunkBatch:
        """The next samples; releases the frames of a memory pool that is used up."""
        pool = self.indices.pool_at(position)
        if self._pool not in (None, pool):
            for frames in self.trajectories.frames.values():
                if hasattr(frames, "release"):
                    frames.release()
        self._pool = pool
        return gather_chunks(self.trajectories, self.indices.take(position, count), shape, self.policy_io)

    def identity(self) -> list[int]:
        return self.indices.identity


class ChunkSampler:
    """Batches from one or several sources mixed by ratio; the batch of a step depends on nothing but the step.

    With several processes each gets a share of the global batch in which all sources have their part, and the shares
    together hold the same samples whatever their number.
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
        # 0.3 means three tenths, not the nearest binary number.
        self._ratios = [Fraction(ratio / sum(ratios)).limit_denominator(1_000_000) for ratio in ratios]
        if any(exact == 0 < ratio for exact, ratio in zip(self._ratios, ratios, strict=True)):
            raise ConfigError(f"a ratio below a millionth of the others would never be drawn; got {ratios}.")
        self._sources, self._shape = list(sources), shape
        self.batch_size = batch_size
        self._process_index, self._local_size = process_index, batch_size // process_count
        self.step = 0

    def batch(self, step: int) -> ChunkBatch:
        """This process's share of the batch of a step."""
        first = step * self.batch_size + self._process_index * self._local_size
        before, after = self._positions(first), self._positions(first + self._local_size)
        parts = [
            source.gather(position, end - position, self._shape)
            for source, position, end in zip(self._sources, before, after, strict=True)
            if end > position
        ]
        return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    def _positions(self, samples: int) -> list[int]:
        """How many of so many samples have come from each source.

        Each source takes its part of what those before it left, rounded down: no count ever goes down, and together
        they are exactly all samples.
        """
        positions, left = [], sum(self._ratios)
        for ratio in self._ratios:
            positions.append(int(samples * ratio / left) if left else 0)
            samples, left = samples - positions[-1], left - ratio
        return positions

    def __next__(self) -> ChunkBatch:
        batch = self.batch(self.step)
        self.step += 1
        return batch

    def state(self) -> dict[str, Any]:
        return {"step": self.step, **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        for key, now in self._identity().items():
            if state.get(key) != now:
                raise ConfigError(
                    f"the sampler was saved with {key} = {state.get(key)} and cannot continue with {now}: its samples "
                    "would come in another order."
                )
        self.step = int(state["step"])

    def _identity(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "sources": [
                [ratio.numerator, ratio.denominator, *source.identity()]
                for ratio, source in zip(self._ratios, self._sources, strict=True)
            ],
        }


class Loader:
    """An endless iterator over a sampler's batches, on device and sharded; `prefetch=0` prepares them on demand.

    A batch prepared ahead does not see what is added to a replay buffer meanwhile: with one, use `prefetch=0` where a
    run has to repeat exactly. `state()` belongs to the batch that comes next, whatever has been prepared ahead of it.
    """

    def __init__(self, sampler: ChunkSampler, *, sharding: jax.sharding.Sharding | None = None, prefetch: int = 2):
        self._sampler, self._sharding, self._prefetch = sampler, sharding, prefetch
        self._next_step = sampler.step
        self._closed = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="pirl-loader")
        self._ahead: deque[Future[ChunkBatch]] = deque()
        self._prepare_ahead()

    def __iter__(self) -> Iterator[ChunkBatch]:
        return self

    def __next__(self) -> ChunkBatch:
        if self._closed:
            raise StopIteration
        try:
            batch = self._ahead.popleft().result() if self._ahead else self._prepare(self._next_step)
        except BaseException:
            self.close()
            raise
        self._next_step += 1
        self._prepare_ahead()
        return batch

    def state(self) -> dict[str, Any]:
        return {**self._sampler.state(), "step": self._next_step}

    def close(self) -> None:
        self._closed = True
        self._worker.shutdown(cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare_ahead(self) -> None:
        while len(self._ahead) < self._prefetch:
            self._ahead.append(self._worker.submit(self._prepare, self._next_step + len(self._ahead)))

    def _prepare(self, step: int) -> ChunkBatch:
        batch = self._sampler.batch(step)
        if self._sharding is None:
            return jax.device_put(batch)  # without a copy where the device is the host's memory
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(self._sharding, x), batch)
