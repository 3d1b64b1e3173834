"""A batch as ACRLPD's losses see it: with what chance adds to it, and both its observations encoded, once."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Key, PRNGKeyArray

from pirl.agents.base import draw_noise
from pirl.agents.learning import FlowDraw, draw_flow
from pirl.data.chunks import ChunkBatch
from pirl.models.config import Pi0Config
from pirl.models.observation import Observation, preprocess
from pirl.models.pi0 import Pi0, Prefix
from pirl.models.types import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draw:
    """What chance adds to a batch: for the flow loss, the noise of N chunks now and later, and what critics drop."""

    flow: FlowDraw
    next_observations: Observation
    noise: Float[Array, "b n horizon action_dim"]
    next_noise: Float[Array, "b m horizon action_dim"]
    dropout: Key[Array, " b"]


def draw_for(
    batch: ChunkBatch, model: Pi0Config, num_samples: int, num_later: int, rng: PRNGKeyArray, *, augment: bool
) -> Draw:
    """Draw for the whole batch at once, so that cutting it up later changes nothing."""
    assert batch.next_observations is not None, "critics look further than the chunk"
    later_rng, noise_rng = jax.random.split(jax.random.fold_in(rng, 4))
    shape = (num_samples + num_later, model.action_horizon, model.action_dim)
    noise = draw_noise(noise_rng, batch.actions.shape[0], shape)
    return Draw(
        flow=draw_flow(batch, model, rng, augment),
        next_observations=preprocess(batch.next_observations, model, later_rng if augment else None),
        noise=noise[:, :num_samples],
        next_noise=noise[:, num_samples:],
        dropout=jax.random.split(jax.random.fold_in(rng, 5), batch.actions.shape[0]),
    )


@dataclass(frozen=True)
class Totals:
    """Over how much each loss is averaged: of a whole batch, also where only a part of it is looked at."""

    chunks: Float[Array, ""]
    steps: Float[Array, ""]
    cloned_steps: Float[Array, ""]

    @classmethod
    def of(cls, batch: ChunkBatch, cloned: Bool[Array, " b"]) -> "Totals":
        """Usable chunks, real steps, and those of the samples that are cloned."""
        return cls(
            chunks=jnp.sum(batch.sequence_mask, dtype=jnp.float32),
            steps=jnp.sum(batch.valid, dtype=jnp.float32),
            cloned_steps=jnp.sum(batch.valid * cloned[:, None], dtype=jnp.float32),
        )

    def divided(self, parts: int) -> "Totals":
        """For parts whose mean is to be that of the batch."""
        return Totals(self.chunks / parts, self.steps / parts, self.cloned_steps / parts)


@dataclass(frozen=True)
class Encoded:
    """What the losses share."""

    batch: ChunkBatch
    draw: Draw
    totals: Totals
    policy: Pi0  # carries gradients where parameters were given
    prefix: Prefix
    next_prefix: Prefix
    pair: Int[Array, " 2"]  # the critics of subset_min in this update
    drops_units: bool

    def flow_losses(
        self, actions: Float[Array, "b horizon action_dim"], valid: Bool[Array, "b horizon"], real_action_dim: int
    ) -> Float[Array, "b horizon"]:
        """What each step adds to the flow loss; 0 where it is not valid."""
        flow = self.draw.flow
        return self.policy.flow_loss(
            self.prefix, actions, noise=flow.noise, time=flow.time, valid=valid, real_action_dim=real_action_dim
        )


def encode_batch(
    batch: ChunkBatch, draw: Draw, totals: Totals, policy: Pi0, num_critics: int, rng: PRNGKeyArray, *, dropout: bool
) -> Encoded:
    """Both observations of every sample; gradients flow into the present one."""
    still = jax.lax.stop_gradient(policy)
    return Encoded(
        batch=batch,
        draw=draw,
        totals=totals,
        policy=policy,
        prefix=policy.encode(draw.flow.observations),
        next_prefix=still.encode(draw.next_observations),
        pair=jax.random.permutation(jax.random.fold_in(rng, 3), num_critics)[:2],
        drops_units=dropout,
    )
