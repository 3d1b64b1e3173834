"""Batches to the device, prepared in the background while the last one is being learned from."""

import queue
import threading
from collections.abc import Iterator
from typing import Any

import jax

from pirl.data.chunks import ChunkBatch
from pirl.data.sampler import ChunkSampler


class Loader:
    """An endless iterator over a sampler's batches, on device and sharded; `prefetch=0` prepares them on demand.

    A batch prepared ahead does not see what is added to a replay buffer meanwhile: with one, use `prefetch=0` where a
    run has to repeat exactly. `state()` belongs to the batch that comes next, whatever has been prepared ahead of it.
    """

    def __init__(self, sampler: ChunkSampler, *, sharding: jax.sharding.Sharding | None = None, prefetch: int = 2):
        self._sampler, self._sharding = sampler, sharding
        self._next_step = sampler.step
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=max(prefetch, 1))
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if prefetch:
            self._thread = threading.Thread(target=self._work, name="pirl-loader", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[ChunkBatch]:
        return self

    def __next__(self) -> ChunkBatch:
        if self._stopped.is_set():
            raise StopIteration
        item = self._wait() if self._thread is not None else self._prepare(self._next_step)
        if isinstance(item, BaseException):
            self.close()
            raise item
        self._next_step += 1
        return item

    def _wait(self) -> Any:
        while True:
            try:
                return self._ready.get(timeout=1.0)
            except queue.Empty:
                if self._stopped.is_set():
                    raise StopIteration from None

    def state(self) -> dict[str, Any]:
        """The sampler's state as of the next batch."""
        return {**self._sampler.state(), "step": self._next_step}

    def close(self) -> None:
        """Stop the background thread."""
        self._stopped.set()
        while self._thread is not None and self._thread.is_alive():
            while not self._ready.empty():
                self._ready.get_nowait()
            self._thread.join(timeout=0.05)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self, step: int) -> ChunkBatch:
        batch = self._sampler.batch(step)
        if self._sharding is None:
            # Without a copy where the device is the host's memory: the arrays are fresh, and nobody else has them.
            return jax.device_put(batch)
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(self._sharding, x), batch)

    def _work(self) -> None:
        step = self._next_step
        while not self._stopped.is_set():
            try:
                item: Any = self._prepare(step)
            except BaseException as error:  # whatever it is, the consumer has to hear of it
                item = error
            while not self._stopped.is_set():
                try:
                    self._ready.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return
            step += 1
