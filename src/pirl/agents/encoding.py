"""A batch as ACRLPD's losses take it: with its random inputs, and both observations encoded once."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Key, PRNGKeyArray

from pirl.agents import common
from pirl.agents.common import FlowInputs
from pirl.data.chunks import ChunkBatch
from pirl.models.config import Pi0Config
from pirl.models.observation import Observation, preprocess
from pirl.models.pi0 import Pi0, Prefix
from pirl.models.types import Array

# Numbers of usable chunks, real steps and cloned steps, which losses are divided by.
Normalizers = dict[str, Float[Array, ""]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """The random inputs of an update, drawn for the whole batch so that splitting it changes nothing."""

    flow: FlowInputs
    next_observations: Observation
    noise: Float[Array, "b n horizon action_dim"]  # of chunks sampled now
    next_noise: Float[Array, "b m horizon action_dim"]  # of chunks sampled H steps later
    keys: Key[Array, " b"]  # for dropout


def draw_inputs(
    batch: ChunkBatch, model: Pi0Config, samples: int, next_samples: int, rng: PRNGKeyArray, *, augment: bool
) -> Inputs:
    """The random inputs of an update that samples so many chunks per observation, now and H steps later."""
    assert batch.next_observations is not None
    next_rng, noise_rng = jax.random.split(jax.random.fold_in(rng, 4))
    shape = (samples + next_samples, model.action_horizon, model.action_dim)
    noise = common.draw_noise(noise_rng, batch.actions.shape[0], shape)
    return Inputs(
        flow=common.draw_flow_inputs(batch, model, rng, augment),
        next_observations=preprocess(batch.next_observations, model, next_rng if augment else None),
        noise=noise[:, :samples],
        next_noise=noise[:, samples:],
        keys=jax.random.split(jax.random.fold_in(rng, 5), batch.actions.shape[0]),
    )


def count_terms(batch: ChunkBatch, cloned: Bool[Array, " b"]) -> Normalizers:
    """What the losses of a batch are divided by."""
    return {
        "chunks": jnp.sum(batch.sequence_mask, dtype=jnp.float32),
        "steps": jnp.sum(batch.valid, dtype=jnp.float32),
        "cloned_steps": jnp.sum(batch.valid * cloned[:, None], dtype=jnp.float32),
    }


@dataclass(frozen=True)
class Encoded:
    """A batch with its prefixes: what the losses share."""

    batch: ChunkBatch
    inputs: Inputs
    normalizers: Normalizers
    policy: Pi0  # carries gradients where parameters were given
    prefix: Prefix  # the policy's
    critic_prefix: Prefix  # the critics'; the same unless their encoder is another
    next_prefix: Prefix  # the critics', H steps later
    pair: Int[Array, " 2"]  # critics of subset_min
    critic_dropout: bool

    def flow_losses(
        self, actions: Float[Array, "b chunk action_dim"], valid: Bool[Array, "b chunk"], real_action_dim: int
    ) -> Float[Array, "b chunk"]:
        """The flow loss of each step; 0 where it is not valid."""
        flow = self.inputs.flow
        return self.policy.flow_loss(
            self.prefix, actions, noise=flow.noise, time=flow.time, valid=valid, real_action_dim=real_action_dim
        )


def encode_batch(
    batch: ChunkBatch,
    inputs: Inputs,
    normalizers: Normalizers,
    policy: Pi0,
    critic_encoder: Pi0,
    num_critics: int,
    rng: PRNGKeyArray,
    *,
    critic_dropout: bool,
) -> Encoded:
    """Encode both observations; gradients flow into the policy's prefix of the present one only."""
    prefix, fixed = policy.encode(inputs.flow.observations), jax.lax.stop_gradient(critic_encoder)
    return Encoded(
        batch=batch,
        inputs=inputs,
        normalizers=normalizers,
        policy=policy,
        prefix=prefix,
        critic_prefix=prefix if critic_encoder is policy else fixed.encode(inputs.flow.observations),
        next_prefix=fixed.encode(inputs.next_observations),
        pair=jax.random.permutation(jax.random.fold_in(rng, 3), num_critics)[:2],
        critic_dropout=critic_dropout,
    )
