"""The critic ensemble: K networks that value action chunks, reading the policy's prefix."""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from einops import rearrange
from flax import nnx
from jaxtyping import Float, Key, PRNGKeyArray

from pirl.models.config import CriticConfig, Pi0Config
from pirl.models.pi0 import Prefix, get_parameters, set_parameters
from pirl.models.types import Array

# Parameters of an ensemble by path, with a leading axis over its critics.
CriticParameters = dict[str, Any]


def critic_values(config: CriticConfig, logits: Float[Array, "*b outputs"]) -> Float[Array, "*b"]:
    """The values that network outputs stand for."""
    low, high = config.value_range
    if config.loss == "hl_gauss":
        return jax.nn.softmax(logits) @ _bin_centers(config)
    return logits[..., 0] if config.loss == "huber" else low + (high - low) * jax.nn.sigmoid(logits[..., 0])


def critic_losses(
    config: CriticConfig, logits: Float[Array, "*b outputs"], target: Float[Array, "*#b"]
) -> Float[Array, "*b"]:
    """The loss of network outputs against target values; bce and hl_gauss clip these to value_range."""
    if config.loss == "huber":
        return optax.huber_loss(logits[..., 0], jnp.broadcast_to(target, logits.shape[:-1]), delta=config.huber_delta)
    low, high = config.value_range
    target = jnp.clip(target, low, high)
    if config.loss == "bce":
        return optax.sigmoid_binary_cross_entropy(logits[..., 0], (target - low) / (high - low))
    return optax.softmax_cross_entropy(logits, bin_probabilities(config, target))


def bin_probabilities(config: CriticConfig, target: Float[Array, "*b"]) -> Float[Array, "*b bins"]:
    """A Gaussian around each target, with a deviation of 0.75 bins, integrated over the bins."""
    centers = _bin_centers(config)
    width = centers[1] - centers[0]
    edges = jnp.append(centers - width / 2, centers[-1] + width / 2)
    below = jax.scipy.stats.norm.cdf(edges, target[..., None], 0.75 * width)
    mass = jnp.diff(below, axis=-1)
    return mass / jnp.sum(mass, axis=-1, keepdims=True)


def _bin_centers(config: CriticConfig) -> Float[Array, " bins"]:
    return jnp.linspace(*config.value_range, config.num_bins)


def _normalize(x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + 1e-6)


class Readout(nnx.Module):
    """A few queries that attend to the prefix: to the keys and values of all its layers."""

    def __init__(self, config: CriticConfig, cached_width: int, state_dim: int, rngs: nnx.Rngs):
        self.heads, width = config.num_heads, config.query_width
        self.queries = nnx.Param(jax.random.normal(rngs.params(), (config.num_queries, width)))
        # What to look for may depend on where the robot is.
        self.state = nnx.Linear(state_dim, config.num_queries * width, rngs=rngs)
        self.key_value = nnx.Linear(cached_width, 2 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, prefix: Prefix) -> Float[Array, "b d"]:
        cached = jnp.concatenate([prefix.cache.keys, prefix.cache.values], axis=-1)
        cached = rearrange(cached, "layers b s heads dim -> b s (layers heads dim)").astype(jnp.float32)
        keys, values = jnp.split(self.key_value(_normalize(cached)), 2, axis=-1)
        queries = self.queries[...] + rearrange(self.state(prefix.state), "b (n d) -> b n d", n=len(self.queries[...]))
        queries, keys, values = (
            rearrange(x, "b n (heads dim) -> b n heads dim", heads=self.heads) for x in (queries, keys, values)
        )
        read = jax.nn.dot_product_attention(queries, keys, values, mask=prefix.mask[:, None, None])
        read = rearrange(read, "b n heads dim -> b n (heads dim)")
        return rearrange(_normalize(read + self.out(jax.nn.gelu(read))), "b n d -> b (n d)")


class MLP(nnx.Module):
    """Hidden layers on the projections of a view and, for Q, of an action chunk; and an output layer."""

    def __init__(self, config: CriticConfig, view_dim: int, action_dim: int, rngs: nnx.Rngs):
        first = config.hidden_dims[0]
        self.dropout = config.dropout
        # The view's part of the first layer is shared by all chunks of an observation.
        self.view = nnx.Linear(view_dim, first, rngs=rngs)
        self.actions = nnx.Linear(action_dim, first, use_bias=False, rngs=rngs) if action_dim else None
        self.hidden = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(config.hidden_dims)])
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for width in config.hidden_dims])
        self.out = nnx.Linear(config.hidden_dims[-1], config.outputs, rngs=rngs)

    def __call__(
        self,
        view: Float[Array, "b d"],
        actions: Float[Array, "b n a"] | None = None,
        dropout_keys: Key[Array, " b"] | None = None,
    ) -> Float[Array, "b n outputs"]:
        """Outputs for every chunk of every observation (n = 1 without chunks); dropout is on where keys are given."""
        x = self.view(view)[:, None]
        if self.actions is not None and actions is not None:
            x = x + self.actions(actions)
        for number, layer in enumerate((*self.hidden, self.out)):
            x = jax.nn.gelu(self.norms[number](x))
            if dropout_keys is not None and self.dropout:
                x = jax.vmap(functools.partial(self._drop, number))(dropout_keys, x)
            x = layer(x)
        return x

    def _drop(self, layer: int, key: PRNGKeyArray, x: Float[Array, "n units"]) -> Float[Array, "n units"]:
        keep = jax.random.bernoulli(jax.random.fold_in(key, layer), 1 - self.dropout, x.shape)
        return jnp.where(keep, x / (1 - self.dropout), 0.0)


class Critic(nnx.Module):
    """Q(s, chunk) of one critic and, if asked for, V(s); both share its view of the observation."""

    def __init__(self, config: CriticConfig, model: Pi0Config, chunk_dim: int, has_v: bool, rngs: nnx.Rngs):
        language = model.language
        cached = 2 * language.depth * language.num_kv_heads * language.head_dim
        has_prefix = bool(model.cameras or model.max_token_len)
        self.readout = Readout(config, cached, model.action_dim, rngs) if has_prefix else None
        view_dim = model.action_dim + (config.num_queries * config.query_width if has_prefix else 0)
        self.q = MLP(config, view_dim, chunk_dim, rngs)
        self.v = MLP(config, view_dim, 0, rngs) if has_v else None

    def view(self, prefix: Prefix) -> Float[Array, "b d"]:
        """What Q and V see of an observation: the state, and what the queries read."""
        return prefix.state if self.readout is None else jnp.concatenate([self.readout(prefix), prefix.state], axis=-1)


@dataclass(frozen=True)
class CriticEnsemble:
    """K critics for a policy, as functions of their stacked parameters."""

    config: CriticConfig
    model: Pi0Config
    horizon: int
    """Steps of a chunk that they see."""
    action_dim: int
    """Dimensions of an action that they see."""
    has_v: bool
    """Whether they also value observations alone."""

    def create(self, rng: PRNGKeyArray) -> CriticParameters:
        """Fresh parameters, different for every critic."""
        return jax.vmap(lambda key: get_parameters(self._critic(key)))(jax.random.split(rng, self.config.num_critics))

    def q(
        self,
        params: CriticParameters,
        prefix: Prefix,
        chunks: Float[Array, "b n horizon action_dim"],
        dropout_keys: Key[Array, " b"] | None = None,
    ) -> Float[Array, "critics b n outputs"]:
        """Outputs for n chunks per observation."""
        chunks = chunks[:, :, : self.horizon, : self.action_dim].reshape(*chunks.shape[:2], -1)

        def apply(params: CriticParameters, keys: Key[Array, " b"] | None) -> Array:
            critic = self._build(params)
            return critic.q(critic.view(prefix), chunks, keys)

        if dropout_keys is None:
            return jax.vmap(lambda params: apply(params, None))(params)
        keys = jax.vmap(lambda key: jax.random.split(key, self.config.num_critics), out_axes=1)(dropout_keys)
        return jax.vmap(apply)(params, keys)

    def v(self, params: CriticParameters, prefix: Prefix) -> Float[Array, "critics b outputs"]:
        """Outputs for the observations alone."""

        def apply(params: CriticParameters) -> Array:
            critic = self._build(params)
            assert critic.v is not None
            return critic.v(critic.view(prefix))[:, 0]

        return jax.vmap(apply)(params)

    def q_values(
        self, params: CriticParameters, prefix: Prefix, chunks: Float[Array, "b n horizon action_dim"]
    ) -> Float[Array, "critics b n"]:
        """The value of n chunks per observation, by every critic."""
        return critic_values(self.config, self.q(params, prefix, chunks))

    def v_values(self, params: CriticParameters, prefix: Prefix) -> Float[Array, "critics b"]:
        """The value of the observations, by every critic."""
        return critic_values(self.config, self.v(params, prefix))

    def _critic(self, rng: PRNGKeyArray) -> Critic:
        return Critic(self.config, self.model, self.horizon * self.action_dim, self.has_v, nnx.Rngs(rng))

    def _build(self, params: CriticParameters) -> Critic:
        return set_parameters(_abstract_critic(self), params)


@functools.lru_cache(maxsize=32)
def _abstract_critic(ensemble: CriticEnsemble) -> Critic:
    return nnx.eval_shape(lambda: ensemble._critic(jax.random.key(0)))
