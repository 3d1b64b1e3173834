"""The critic ensemble: K networks that value an action chunk in the policy's own view of an observation."""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Key, PRNGKeyArray

from pirl.errors import ConfigError
from pirl.models.types import Array

# One critic's parameters, or with a leading axis those of an ensemble.
CriticParameters = dict[str, Any]


@dataclass(frozen=True)
class CriticConfig:
    """Architecture of the critics."""

    num_critics: int = 2
    """Critics in the ensemble."""
    hidden_dims: tuple[int, ...] = (512, 512, 512, 512)
    """Widths of the hidden layers."""
    layer_norm: bool = True
    """Apply LayerNorm to each hidden layer before its activation."""
    dropout: float = 0.0
    """Dropout rate of the hidden layers in training."""

    def __post_init__(self) -> None:
        if self.num_critics < 1 or not self.hidden_dims or min(self.hidden_dims) < 1:
            raise ConfigError(f"an ensemble needs at least one critic with at least one hidden layer: {self}.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout should be in [0, 1); it is {self.dropout}.")


# Two critics of 20 M parameters each on π₀'s 2,048 features, and ten small ones.
LARGE_CRITICS = CriticConfig(num_critics=2, hidden_dims=(2240,) * 4)
TEN_CRITICS = CriticConfig(num_critics=10, hidden_dims=(512,) * 4)


def create_critics(config: CriticConfig, observation_dim: int, action_dim: int, rng: PRNGKeyArray) -> CriticParameters:
    """An ensemble with fresh parameters, every critic with its own."""
    return jax.vmap(lambda key: _create_critic(config, observation_dim, action_dim, key))(
        jax.random.split(rng, config.num_critics)
    )


def _create_critic(config: CriticConfig, observation_dim: int, action_dim: int, rng: PRNGKeyArray) -> CriticParameters:
    initialise = jax.nn.initializers.lecun_normal()
    widths = (observation_dim + action_dim, *config.hidden_dims, 1)
    layers = {}
    for number, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
        layer = {
            "kernel": initialise(jax.random.fold_in(rng, number), (fan_in, fan_out)),
            "bias": jnp.zeros(fan_out),
        }
        if config.layer_norm and number < len(config.hidden_dims):
            layer |= {"norm_scale": jnp.ones(fan_out), "norm_bias": jnp.zeros(fan_out)}
        layers[f"layer_{number}"] = layer
    return layers


def value_chunks(
    parameters: CriticParameters,
    features: Float[Array, "b width"],
    state: Float[Array, "b state_dim"],
    actions: Float[Array, "b n horizon action_dim"],
    *,
    dropout: float = 0.0,
    keys: Key[Array, " b"] | None = None,
) -> Float[Array, "critics b n"]:
    """What every critic thinks of n chunks per observation. Units are dropped only if there is a key for each of them."""
    # Features come on whatever scale the language model has; actions and state are normalised already.
    observation = jnp.concatenate([_normalise(features.astype(jnp.float32)), state], axis=-1)
    chunks = actions.reshape(*actions.shape[:2], -1)
    if keys is None or dropout == 0.0:
        return jax.vmap(lambda critic: _value(critic, observation, chunks, 0.0, None))(parameters)
    count = jax.tree.leaves(parameters)[0].shape[0]
    own_keys = jax.vmap(lambda key: jax.random.split(key, count), out_axes=1)(keys)
    return jax.vmap(lambda critic, keys: _value(critic, observation, chunks, dropout, keys))(parameters, own_keys)


def _value(
    critic: CriticParameters,
    observation: Float[Array, "b d"],
    chunks: Float[Array, "b n a"],
    dropout: float,
    keys: Key[Array, " b"] | None,
) -> Float[Array, "b n"]:
    first, *others = [critic[f"layer_{number}"] for number in range(len(critic))]
    # The first layer sees observation and chunk side by side; the observation's part is the same for all n chunks.
    seen, done = jnp.split(first["kernel"], [observation.shape[-1]])
    hidden = (observation @ seen)[:, None] + chunks @ done + first["bias"]
    for number, (layer, following) in enumerate(zip([first, *others[:-1]], others, strict=True)):
        if "norm_scale" in layer:
            hidden = _normalise(hidden) * layer["norm_scale"] + layer["norm_bias"]
        hidden = jax.nn.gelu(hidden)
        if keys is not None:
            keep = jax.vmap(functools.partial(_keep, number, dropout, hidden.shape[1:]))(keys)
            hidden = jnp.where(keep, hidden / (1 - dropout), 0.0)
        hidden = hidden @ following["kernel"] + following["bias"]
    return hidden[..., 0]


def _keep(layer: int, dropout: float, shape: tuple[int, ...], key: PRNGKeyArray) -> Bool[Array, "n units"]:
    return jax.random.bernoulli(jax.random.fold_in(key, layer), 1 - dropout, shape)


def _normalise(x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + 1e-6)


def count_parameters(parameters: Any) -> int:
    """Numbers in a tree of arrays (or of their shapes)."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(parameters))
