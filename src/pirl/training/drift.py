"""How far a policy has moved from where it began, measured on observations from its first rollouts."""

import io
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from pirl.agents.ript import RIPTAgent, RolloutBatch
from pirl.data import ChunkBatch
from pirl.errors import CheckpointError
from pirl.files import write_file
from pirl.models.types import Array
from pirl.training.setup import Setup

_VELOCITIES = "velocities"


class DriftProbe:
    """A batch, and the flow of the start policy there, in a file: so that no second copy of the policy is needed."""

    def __init__(self, file: Path, setup: Setup) -> None:
        self._file, self._setup = file, setup
        self._probe: tuple[Any, Any] | None = None

    def take(self, agent: Any, batch: RolloutBatch) -> None:
        """Remember the policy as it is on this batch, unless one was remembered before."""
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
            # Earlier versions did not know what humans chose, and the first kept the next observations, too.
            earlier = replace(like, human=None)
            for version in (earlier, replace(earlier, next_observations=like.observations)):
                if len(leaves) == len(jax.tree.leaves(version)):
                    like = version
            if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in jax.tree.leaves(like)]:
                raise ValueError("it is not from a run like this one")
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise CheckpointError(
                f"{self._file} holds what the drift of the policy is measured by, and cannot be read: {error}. Put it "
                "back from a copy; or delete it, and drift is measured from the policy as it is now."
            ) from error
        batch: ChunkBatch = jax.tree.unflatten(jax.tree.structure(like), leaves)
        return self._place(replace(batch, next_observations=None)), jax.device_put(velocities)

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
