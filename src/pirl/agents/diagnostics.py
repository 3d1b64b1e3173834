"""What critics know: which chunk belongs to an observation, and whether an episode will succeed."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from pirl.agents.base import unless_empty
from pirl.data.chunks import ChunkBatch
from pirl.models.observation import Observation
from pirl.models.types import Array

# Chunks of other samples that each recorded chunk is compared with.
_OTHERS = 8


def compute_auc(
    better: Float[Array, "*#b"], worse: Float[Array, "*#b"], counted: Bool[Array, "*#b"]
) -> Float[Array, ""]:
    """How often the better one of a pair has the higher value, over the pairs that count; ties are half."""
    wins = jnp.where(better > worse, 1.0, jnp.where(better == worse, 0.5, 0.0))
    count = jnp.sum(counted, dtype=jnp.float32)
    return unless_empty(count, jnp.sum(wins * counted) / jnp.maximum(count, 1.0))


def pair_chunks(
    batch: ChunkBatch, horizon: int
) -> tuple[Float[Array, "b n chunk action_dim"], Bool[Array, "b others"]]:
    """Each sample's own chunk first, then those of n - 1 others, and which of these comparisons count.

    They do in successes, where both chunks have all steps that critics see. The chunk of the next sample, whose images
    `shuffle_images` shows, is never among the others.
    """
    whole = jnp.all(batch.valid[:, :horizon], axis=1)
    places = range(max(1, min(len(batch.success) - 1, _OTHERS + 1)))
    chunks, are_whole = (jnp.stack([jnp.roll(x, at, axis=0) for at in places], axis=1) for x in (batch.actions, whole))
    return chunks, (batch.success & whole)[:, None] & are_whole[:, 1:]


def pair_auc(values: Float[Array, "b n"], counted: Bool[Array, "b others"]) -> Float[Array, ""]:
    """How often an observation's own chunk, the first, is valued above another's; 0.5 is chance."""
    return compute_auc(values[:, :1], values[:, 1:], counted)


def outcome_auc(values: Float[Array, " b"], success: Bool[Array, " b"]) -> Float[Array, ""]:
    """How often a sample of a success is valued above one of a failure."""
    return compute_auc(values[:, None], values[None], success[:, None] & ~success[None])


def shuffle_images(observation: Observation) -> Observation:
    """Show each sample the images of the next; state and prompt stay."""
    seen = (observation.images, observation.image_masks)
    images, masks = jax.tree.map(lambda x: jnp.roll(x, -1, axis=0), seen)
    return replace(observation, images=images, image_masks=masks)
