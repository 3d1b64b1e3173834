"""The π₀ / π₀.₅ policy: `encode` an observation, take the `flow_loss`, `sample` action chunks; its parameters by path."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, PRNGKeyArray

from pirl.errors import ObservationError
from pirl.models.config import Pi0Config
from pirl.models.gemma import KVCache, Transformer, attention_mask
from pirl.models.observation import GuidedObservation, Observation, preprocess
from pirl.models.siglip import VisionTower
from pirl.models.types import Array

Solver = Literal["euler", "midpoint"]
_Model = TypeVar("_Model", bound=nnx.Module)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prefix:
    """An encoded observation, for the flow loss, the sampler and critics."""

    cache: KVCache
    # Which cached tokens are real (a camera may be absent, a prompt short).
    mask: Bool[Array, "b s"]
    # The outputs of the prefix, averaged over its real tokens.
    features: Float[Array, "b width"]
    # π₀ feeds the state to the action expert; it rides along.
    state: Float[Array, "b action_dim"]


class PaliGemma(nnx.Module):
    """The two networks of the policy, under the names they have in OpenPI's checkpoints."""

    def __init__(self, config: Pi0Config, rngs: nnx.Rngs):
        dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
        self.llm = Transformer(
            (config.language, config.action_expert),
            config.vocab_size,
            adarms=config.pi05,
            dtype=dtype,
            param_dtype=param_dtype,
            remat=config.remat,
            rngs=rngs,
        )
        if config.cameras:
            self.img = VisionTower(
                config.vision,
                tokens=config.tokens_per_image,
                out_width=config.language.width,
                dtype=dtype,
                param_dtype=param_dtype,
                remat=config.remat,
                rngs=rngs,
            )


class Pi0(nnx.Module):
    """A flow-matching policy over action chunks.

    Time runs from 1 (noise) to 0 (actions). The parameter tree is OpenPI's, key for key.
    """

    def __init__(self, config: Pi0Config, rngs: nnx.Rngs):
        self.config = config
        self.PaliGemma = PaliGemma(config, rngs)
        width, param_dtype = config.action_expert.width, jnp.dtype(config.param_dtype)

        def linear(fan_in: int, fan_out: int) -> nnx.Linear:
            return nnx.Linear(fan_in, fan_out, param_dtype=param_dtype, rngs=rngs)

        self.action_in_proj = linear(config.action_dim, width)
        if config.pi05:
            self.time_mlp_in = linear(width, width)
            self.time_mlp_out = linear(width, width)
        else:
            self.state_proj = linear(config.action_dim, width)
            self.action_time_mlp_in = linear(2 * width, width)
            self.action_time_mlp_out = linear(width, width)
        self.action_out_proj = linear(width, config.action_dim)

    # --- encode, flow_loss, sample ------------------------------------------------------------------------------------

    def encode(self, observation: Observation, rng: PRNGKeyArray | None = None) -> Prefix:
        """Run vision and language once. With `rng` the images are augmented, as in training.

        OpenPI splits its loss key into three: augmentation, noise, time. `encode` takes the first and `flow_loss` the
        other two, so the same `rng` given to both reproduces its training loss.
        """
        augmentation_rng = None if rng is None else jax.random.split(rng, 3)[0]
        tokens, mask = self.embed_prefix(preprocess(observation, self.config, augmentation_rng))
        no_blocks = jnp.zeros(mask.shape[1:], bool)
        out, cache = self.PaliGemma.llm(0, tokens, jnp.cumsum(mask, axis=1) - 1, attention_mask(mask, no_blocks))
        weights = mask / jnp.maximum(1, jnp.sum(mask, axis=1, keepdims=True))
        features = jnp.einsum("bs,bsw->bw", weights.astype(jnp.float32), out.astype(jnp.float32))
        return Prefix(cache=cache, mask=mask, features=features, state=observation.state)

    def flow_loss(
        self,
        prefix: Prefix,
        actions: Float[Array, "b horizon action_dim"],
        rng: PRNGKeyArray | None = None,
        *,
        noise: Float[Array, "b horizon action_dim"] | None = None,
        time: Float[Array, " b"] | None = None,
        valid: Bool[Array, "b horizon"] | Float[Array, "b horizon"] | None = None,
        real_action_dim: int | None = None,
    ) -> Float[Array, "b horizon"]:
        """Squared error of the predicted flow, per step of the chunk; see `flow_errors` and `step_losses`."""
        return step_losses(self.flow_errors(prefix, actions, rng, noise=noise, time=time), valid, real_action_dim)

    def flow_errors(
        self,
        prefix: Prefix,
        actions: Float[Array, "b horizon action_dim"],
        rng: PRNGKeyArray | None = None,
        *,
        noise: Float[Array, "b horizon action_dim"] | None = None,
        time: Float[Array, " b"] | None = None,
    ) -> Float[Array, "b horizon action_dim"]:
        """Squared errors of the predicted flow per step and dimension; noise and time are drawn from `rng` or given."""
        self._check_chunks("actions", actions)
        if noise is None or time is None:
            if rng is None:
                raise ValueError("flow_loss needs an rng, or both noise and time.")
            _, noise_rng, time_rng = jax.random.split(rng, 3)
            noise = jax.random.normal(noise_rng, actions.shape) if noise is None else noise
            time = sample_time(time_rng, actions.shape[0]) if time is None else time
        t = time[:, None, None]
        x_t = t * noise + (1 - t) * actions
        return jnp.square(self.velocity(prefix, x_t[:, None], time)[:, 0] - (noise - actions))

    def sample(
        self,
        prefix: Prefix,
        rng: PRNGKeyArray | None = None,
        n: int = 1,
        num_steps: int = 10,
        *,
        noise: Float[Array, "b n horizon action_dim"] | None = None,
        guide: Prefix | None = None,
        guidance: float = 1.0,
        solver: Solver = "euler",
    ) -> Float[Array, "b n horizon action_dim"]:
        """Sample `n` chunks per observation by integrating the flow, which is evaluated `num_steps` times.

        Euler's method is OpenPI's. In ten steps it loses an eighth of the spread of what the policy has learned, and more
        where that is narrow; the midpoint method, at the same cost, hardly any.
        The starting noise is drawn from `rng` unless given. A `guide` is the same observation under another prompt: the
        flow is extrapolated from that of `prefix` to that of the guide, with weight `guidance`.
        """
        if noise is None:
            if rng is None:
                raise ValueError("sample needs an rng, or the starting noise.")
            shape = (prefix.mask.shape[0], n, self.config.action_horizon, self.config.action_dim)
            noise = jax.random.normal(rng, shape)
        self._check_chunks("noise", noise)
        length = num_steps if solver == "euler" else num_steps // 2
        step = -1.0 / length

        def flow(x_t: Array, time: Array) -> Array:
            times = jnp.broadcast_to(time, x_t.shape[:1])
            velocity = self.velocity(prefix, x_t, times)
            if guide is not None:
                velocity = velocity + guidance * (self.velocity(guide, x_t, times) - velocity)
            return velocity

        def move(state: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
            x_t, time = state
            velocity = flow(x_t, time)
            if solver == "midpoint":
                velocity = flow(x_t + step / 2 * velocity, time + step / 2)
            # Time is accumulated, not multiplied out: the embedding is sensitive enough to tell the difference.
            return (x_t + step * velocity, time + step), None

        (actions, _), _ = jax.lax.scan(move, (noise, jnp.float32(1.0)), length=length)
        return actions

    # --- tokens and flow -----------------------------------------------------------------------------------

    def embed_prefix(self, observation: Observation) -> tuple[Float[Array, "b s width"], Bool[Array, "b s"]]:
        """Tokens of the cameras, in the order of the config, then of the prompt; and which of them are real."""
        batch = observation.state.shape[0]
        # Empty beginnings let a policy without cameras, or without a prompt, take the same path.
        tokens = [jnp.zeros((batch, 0, self.config.language.width), jnp.dtype(self.config.dtype))]
        mask = [jnp.zeros((batch, 0), bool)]
        if self.config.cameras:
            images = jnp.stack([observation.images[name] for name in self.config.cameras], axis=1)
            image_tokens = self.PaliGemma.img(images.reshape(-1, *images.shape[2:]))
            image_masks = jnp.stack([observation.image_masks[name] for name in self.config.cameras], axis=1)
            tokens.append(image_tokens.reshape(batch, -1, image_tokens.shape[-1]))
            mask.append(jnp.repeat(image_masks, self.config.tokens_per_image, axis=1))
        if observation.tokenized_prompt is not None and observation.tokenized_prompt_mask is not None:
            tokens.append(self.PaliGemma.llm.embed(observation.tokenized_prompt))
            mask.append(observation.tokenized_prompt_mask)
        return jnp.concatenate(tokens, axis=1), jnp.concatenate(mask, axis=1)

    def embed_suffix(
        self, state: Float[Array, "b action_dim"], x_t: Float[Array, "b n horizon action_dim"], time: Float[Array, " b"]
    ) -> tuple[Float[Array, "b n l width"], Float[Array, "b width"] | None]:
        """Tokens of noisy chunks, and the vector that conditions the norms (π₀.₅)."""
        action_tokens = self.action_in_proj(x_t)
        time_embedding = embed_time(time, self.config.action_expert.width)
        if self.config.pi05:
            condition = nnx.swish(self.time_mlp_out(nnx.swish(self.time_mlp_in(time_embedding))))
            return action_tokens, condition
        time_tokens = jnp.broadcast_to(time_embedding[:, None, None], action_tokens.shape)
        mixed = nnx.swish(self.action_time_mlp_in(jnp.concatenate([action_tokens, time_tokens], axis=-1)))
        state_token = self.state_proj(state)[:, None, None]
        state_tokens = jnp.broadcast_to(state_token, (*mixed.shape[:2], 1, mixed.shape[-1]))
        return jnp.concatenate([state_tokens, self.action_time_mlp_out(mixed)], axis=2), None

    def velocity(
        self, prefix: Prefix, x_t: Float[Array, "b n horizon action_dim"], time: Float[Array, " b"]
    ) -> Float[Array, "b n horizon action_dim"]:
        """The flow at `x_t`, for n noisy chunks per observation against one shared prefix."""
        batch, n, horizon, _ = x_t.shape
        tokens, condition = self.embed_suffix(prefix.state, x_t, time)
        length = tokens.shape[2]
        # The state opens a block of its own (π₀), the actions open the next: the state does not see them.
        block_start = jnp.arange(length) <= length - horizon
        mask = attention_mask(jnp.ones((batch, length), bool), block_start)
        positions = jnp.sum(prefix.mask, axis=1, keepdims=True) + jnp.arange(length)
        out, _ = self.PaliGemma.llm(
            1,
            tokens.reshape(batch, n * length, -1),
            jnp.tile(positions, (1, n)),
            mask,
            condition=condition,
            cache=prefix.cache,
            cache_mask=prefix.mask,
        )
        return self.action_out_proj(out.reshape(batch, n, length, -1)[:, :, -horizon:])

    def _check_chunks(self, name: str, chunks: Array) -> None:
        wanted = (self.config.action_horizon, self.config.action_dim)
        if chunks.shape[-2:] != wanted:
            raise ObservationError(
                f"{name} of shape {chunks.shape} do not fit the model, whose chunks end in {wanted}: "
                "pad narrower actions with zeros, and cut chunks to action_horizon."
            )


def step_losses(
    errors: Float[Array, "b horizon action_dim"],
    valid: Bool[Array, "b horizon"] | Float[Array, "b horizon"] | None = None,
    real_action_dim: int | None = None,
) -> Float[Array, "b horizon"]:
    """Errors per step, averaged over all action dimensions or the first `real_action_dim`; 0 where not `valid`."""
    loss = jnp.mean(errors[..., :real_action_dim], axis=-1)
    # `where` besides the product: what lies past the end of an episode may be anything, NaN too.
    return loss if valid is None else jnp.where(valid, loss * valid, 0.0)


def sample_actions(
    policy: Pi0,
    observation: Observation | GuidedObservation,
    noise: Float[Array, "b horizon action_dim"],
    num_steps: int,
    guidance: float = 1.0,
    solver: Solver = "euler",
) -> Float[Array, "b horizon action_dim"]:
    """One chunk for each observation, from its own noise; two prompts are combined by the weight `guidance`."""
    guide = None
    if isinstance(observation, GuidedObservation):
        # They differ in the prompt only; the same images enter the compiled program once.
        plain, indicated = observation.plain, replace(observation.indicated, images=observation.plain.images)
        guide = None if guidance in (0, 1) else policy.encode(indicated)
        observation = indicated if guidance == 1 else plain
    prefix = policy.encode(observation)
    chunks = policy.sample(
        prefix, num_steps=num_steps, noise=noise[:, None], guide=guide, guidance=guidance, solver=solver
    )
    return chunks[:, 0]


def sample_time(rng: PRNGKeyArray, batch: int) -> Float[Array, " b"]:
    """Flow times in (0.001, 1], denser towards noise: 0.001 + 0.999 · Beta(1.5, 1)."""
    return jax.random.beta(rng, 1.5, 1, (batch,)) * 0.999 + 0.001


def embed_time(time: Float[Array, " b"], width: int) -> Float[Array, "b width"]:
    """Sines and cosines of the time, with periods spaced geometrically from 0.004 to 4."""
    fraction = jnp.linspace(0.0, 1.0, width // 2)
    period = 4e-3 * (4.0 / 4e-3) ** fraction
    # The shortest period turns 1 571 rad at t = 1: keep OpenPI's order of float32 operations.
    angle = time[:, None] * (1.0 / period * 2 * jnp.pi)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


@functools.partial(jax.jit, static_argnums=0)
def create_model(config: Pi0Config, rng: PRNGKeyArray) -> Pi0:
    """A policy with fresh parameters, made in one compiled step."""
    return Pi0(config, nnx.Rngs(rng))


def abstract_model(config: Pi0Config) -> Pi0:
    """The policy with shapes in place of arrays."""
    return nnx.eval_shape(lambda: Pi0(config, nnx.Rngs(0)))


# --- parameters as flat dictionaries: '/'-joined paths, as in OpenPI's checkpoints and freeze rules -------------------


def count_parameters(parameters: Any) -> int:
    """Number of elements in a tree of arrays (or of their shapes)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parameters))


def get_parameters(model: nnx.Module) -> dict[str, Any]:
    """Every parameter of a model by path; of an abstract model, its shapes and dtypes."""
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def set_parameters(model: _Model, parameters: Mapping[str, Any]) -> _Model:
    """A copy of the model with exactly these parameters."""
    graphdef, state = nnx.split(model)
    flat = nnx.to_flat_state(state)
    paths = ["/".join(map(str, path)) for path, _ in flat]
    if set(paths) != set(parameters):
        raise ValueError(f"parameters do not fit the model: {sorted(set(paths) ^ set(parameters))}")
    leaves = [(path, leaf.replace(parameters[name])) for name, (path, leaf) in zip(paths, flat, strict=True)]
    return nnx.merge(graphdef, nnx.from_flat_state(leaves))


@functools.lru_cache(maxsize=32)
def _expected_parameters(config: Pi0Config) -> dict[str, jax.ShapeDtypeStruct]:
    return get_parameters(abstract_model(config))


def expected_parameters(config: Pi0Config) -> dict[str, jax.ShapeDtypeStruct]:
    """The shape and dtype of every parameter of a configuration."""
    return dict(_expected_parameters(config))


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b": x} as {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree
