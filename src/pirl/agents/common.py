"""What the learners share: the agent protocol, train states of policy and critics, the flow loss, accumulation."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Bool, Float, Int, Key, PRNGKeyArray

from pirl.agents.config import Aggregate, LossOver, OptimizerConfig
from pirl.agents.optimizer import make_optimizer, optimizer_step
from pirl.data.chunks import ChunkBatch
from pirl.errors import ConfigError
from pirl.models.config import Pi0Config
from pirl.models.critic import CriticParameters
from pirl.models.observation import GuidedObservation, Observation, preprocess
from pirl.models.pi0 import (
    Pi0,
    Solver,
    abstract_model,
    count_parameters,
    get_parameters,
    sample_actions,
    sample_time,
    set_parameters,
    step_losses,
)
from pirl.models.types import Array

# Scalars; NaN where an update did not compute one.
Metrics = dict[str, Any]
# A loss and its metrics.
Loss = tuple[Float[Array, ""], Metrics]
# Parameters by '/'-joined path.
Params = dict[str, Any]
Chunk = Float[Array, "b horizon action_dim"]
# Names for `freeze`; anything else is a regular expression. The action expert's layers carry the suffix _1.
FREEZABLE = {"vision": r"PaliGemma/img/.*", "language": r"PaliGemma/llm/(?!.*_1(/|$)).*"}


@runtime_checkable
class Agent(Protocol):
    """A learner: a pytree whose arrays are its state, and pure functions of it."""

    @property
    def config(self) -> Any:
        """Hyper-parameters."""

    @property
    def step(self) -> Any:
        """Number of updates made."""

    def update(self, batch: Any, rng: PRNGKeyArray) -> tuple[Any, Metrics]:
        """The learner after one update on a batch."""

    def validate(self, batch: ChunkBatch, rng: PRNGKeyArray) -> Metrics:
        """The losses of the exported policy on a held-out batch."""

    def act(self, observation: Any, rng: Key[Array, "*b"]) -> Chunk:
        """A normalized chunk per observation; `rng` is one key, or one per observation."""

    def policy(self) -> Pi0:
        """The policy to export: with EMA parameters if there are any."""

    def parameter_counts(self) -> dict[str, int]:
        """Number of parameters of each part."""


def draw_noise(rng: Key[Array, "*b"], batch: int, shape: tuple[int, ...]) -> Float[Array, "b *shape"]:
    """Normal noise for each sample from a key of its own, given one key or one per sample."""
    keys = rng if rng.ndim else jax.random.split(rng, batch)
    return jax.vmap(lambda key: jax.random.normal(key, shape))(keys)


def nan_if_empty(count: Float[Array, ""], value: Float[Array, ""]) -> Float[Array, ""]:
    """A metric over `count` samples, NaN if there are none: NaN enters no mean."""
    return jnp.where(count > 0, value, jnp.nan)


# --- train states -----------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PolicyState:
    """Train state of the policy: trainable, frozen and EMA parameters, and the optimizer's state."""

    params: Params
    frozen_params: Params
    ema_params: Params | None
    opt_state: Any
    model: Pi0Config = field(metadata={"static": True})
    optimizer: OptimizerConfig = field(metadata={"static": True})
    ema_decay: float | None = field(metadata={"static": True})

    @classmethod
    def create(
        cls, policy: Pi0, optimizer: OptimizerConfig, ema_decay: float | None, freeze: tuple[str, ...] = ()
    ) -> "PolicyState":
        """Start from a policy. Frozen parameters are stored in bfloat16, as in OpenPI."""
        model, parameters = policy.config, get_parameters(policy)
        check_freeze(freeze, list(parameters))
        is_frozen = {path: model.is_frozen(path) or matches_any(path, freeze) for path in parameters}
        if all(is_frozen.values()):
            raise ConfigError(f"freeze = {freeze} leaves no parameter of the policy to train.")
        # Copies, since the policy's buffers may be donated and the state's must not be shared.
        params = {path: jnp.copy(leaf) for path, leaf in parameters.items() if not is_frozen[path]}
        return cls(
            params=params,
            frozen_params={
                path: jnp.copy(leaf.astype(jnp.bfloat16)) for path, leaf in parameters.items() if is_frozen[path]
            },
            ema_params=None if ema_decay is None else jax.tree.map(jnp.copy, params),
            opt_state=make_optimizer(optimizer).init(params),
            model=model,
            optimizer=optimizer,
            ema_decay=ema_decay,
        )

    def build(self, params: Params | None = None) -> Pi0:
        """The policy with the current parameters, or with others in place of the trainable ones."""
        params = self.params if params is None else params
        return set_parameters(_abstract_policy(self.model), {**self.frozen_params, **params})

    def ema_policy(self) -> Pi0:
        """The policy that acts and is exported."""
        return self.build(self.ema_params)

    def apply_gradients(self, grads: Params) -> tuple["PolicyState", Metrics]:
        """One optimizer step, and one of the EMA."""
        params, opt_state, lr = optimizer_step(self.optimizer, grads, self.opt_state, self.params)
        metrics = {
            "grad_norm/policy": optax.tree.norm(grads),
            "param_norm/policy": optax.tree.norm(
                {path: leaf for path, leaf in {**self.frozen_params, **params}.items() if _is_kernel(path, leaf)}
            ),
            "lr/policy": lr,
        }
        ema_params = None if self.ema_params is None else update_ema(self.ema_params, params, self.ema_decay)
        return replace(self, params=params, ema_params=ema_params, opt_state=opt_state), metrics

    def parameter_counts(self) -> dict[str, int]:
        """Number of parameters, and of trainable ones."""
        return {
            "policy": count_parameters([self.params, self.frozen_params]),
            "policy_trainable": count_parameters(self.params),
        }


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CriticState:
    """Train state of the critic ensemble: the target parameters give targets, the EMA parameters act."""

    params: CriticParameters
    target_params: CriticParameters
    ema_params: CriticParameters
    opt_state: Any
    optimizer: OptimizerConfig = field(metadata={"static": True})
    target_update_rate: float = field(metadata={"static": True})
    ema_decay: float = field(metadata={"static": True})

    @classmethod
    def create(
        cls, params: CriticParameters, optimizer: OptimizerConfig, target_update_rate: float, ema_decay: float
    ) -> "CriticState":
        """Start from fresh critics; the three sets share no buffers, since they are donated."""
        return cls(
            params=params,
            target_params=jax.tree.map(jnp.copy, params),
            ema_params=jax.tree.map(jnp.copy, params),
            opt_state=make_optimizer(optimizer).init(params),
            optimizer=optimizer,
            target_update_rate=target_update_rate,
            ema_decay=ema_decay,
        )

    def apply_gradients(self, grads: CriticParameters) -> tuple["CriticState", Metrics]:
        """One step of the optimizer, the target parameters and the EMA."""
        params, opt_state, lr = optimizer_step(self.optimizer, grads, self.opt_state, self.params)
        metrics = {
            "grad_norm/critic": optax.tree.norm(grads),
            "param_norm/critic": optax.tree.norm(params),
            "lr/critic": lr,
        }
        state = replace(
            self,
            params=params,
            target_params=update_ema(self.target_params, params, 1 - self.target_update_rate),
            ema_params=update_ema(self.ema_params, params, self.ema_decay),
            opt_state=opt_state,
        )
        return state, metrics


def check_freeze(freeze: tuple[str, ...], paths: list[str]) -> None:
    """Raise if an entry of `freeze` is not a regular expression, or matches no parameter."""
    for pattern in freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"freeze = {pattern!r} is not a regular expression: {error}.") from error
        if pattern not in FREEZABLE and not any(matches_any(path, (pattern,)) for path in paths):
            raise ConfigError(
                f"freeze = {pattern!r} matches no parameter of the policy: give {' or '.join(FREEZABLE)}, or a regular "
                f"expression for whole paths such as {paths[0]}."
            )


def matches_any(path: str, freeze: tuple[str, ...]) -> bool:
    """Whether an entry of `freeze` names or matches a parameter."""
    return any(re.fullmatch(FREEZABLE.get(pattern, pattern), path) for pattern in freeze)


def encoder_trains(params: Params) -> bool:
    """Whether parameters of vision or language are among these."""
    return any(matches_any(path, ("vision", "language")) for path in params)


def update_ema(ema: Params, new: Params, decay: float | None) -> Params:
    """decay · ema + (1 − decay) · new."""
    assert decay is not None
    return jax.tree.map(lambda old, latest: decay * old + (1 - decay) * latest, ema, new)


@functools.lru_cache(maxsize=8)
def _abstract_policy(model: Pi0Config) -> Pi0:
    return abstract_model(model)


def _is_kernel(path: str, leaf: Any) -> bool:
    """Whether OpenPI counts a parameter in its parameter norm."""
    return leaf.ndim > 1 and path.split("/")[-1] not in ("bias", "scale", "pos_embedding", "input_embedding")


def aggregate_values(
    values: Float[Array, "critics *b"], how: Aggregate, pessimism: float, pair: Int[Array, " 2"] | None
) -> Float[Array, "*b"]:
    """One value from the ensemble; without a pair, subset_min is the mean over all."""
    if how == "min":
        return jnp.min(values, axis=0)
    if how == "lower_bound":
        return jnp.mean(values, axis=0) - pessimism * jnp.std(values, axis=0)
    if how == "mean" or pair is None:
        return jnp.mean(values, axis=0)
    return jnp.min(values[pair], axis=0)


# --- the flow loss ----------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FlowInputs:
    """The random inputs of the flow loss: augmented observations, noise and flow times."""

    observations: Observation
    noise: Chunk
    time: Float[Array, " b"]


def draw_flow_inputs(batch: ChunkBatch, model: Pi0Config, rng: PRNGKeyArray, augment: bool) -> FlowInputs:
    """Drawn for the whole batch, from the same keys as in OpenPI, so that splitting the batch changes nothing."""
    augmentation_rng, noise_rng, time_rng = jax.random.split(rng, 3)
    return FlowInputs(
        observations=preprocess(batch.observations, model, augmentation_rng if augment else None),
        noise=jax.random.normal(noise_rng, batch.actions.shape),
        time=sample_time(time_rng, batch.actions.shape[0]),
    )


def flow_errors(policy: Pi0, batch: ChunkBatch, inputs: FlowInputs) -> Chunk:
    """Squared errors of the flow per step and dimension."""
    prefix = policy.encode(inputs.observations)
    return policy.flow_errors(prefix, batch.actions, noise=inputs.noise, time=inputs.time)


def average_errors(errors: Chunk, batch: ChunkBatch, over: LossOver, real_action_dim: int) -> Float[Array, "b horizon"]:
    """The loss of each step; 0 where it does not count."""
    return step_losses(errors) if over == "all" else step_losses(errors, batch.valid, real_action_dim)


def count_steps(batch: ChunkBatch, over: LossOver) -> Float[Array, ""]:
    """Number of steps that the loss of a batch is averaged over."""
    return jnp.float32(batch.valid.size) if over == "all" else jnp.sum(batch.valid, dtype=jnp.float32)


def masked_mse(values: Chunk, valid: Bool[Array, "b horizon"], real_action_dim: int) -> Float[Array, ""]:
    """Mean square over real dimensions and valid steps."""
    squares = jnp.mean(jnp.square(values)[..., :real_action_dim], axis=-1)
    return jnp.sum(jnp.where(valid, squares, 0.0)) / jnp.maximum(jnp.sum(valid, dtype=jnp.float32), 1.0)


def act_with(
    policy: Pi0,
    observation: Observation | GuidedObservation,
    rng: Key[Array, "*b"],
    num_steps: int,
    guidance: float = 1.0,
    solver: Solver = "euler",
) -> Chunk:
    """One chunk of a policy per observation; `rng` is one key, or one per observation."""
    plain = observation.plain if isinstance(observation, GuidedObservation) else observation
    noise = draw_noise(rng, plain.state.shape[0], (policy.config.action_horizon, policy.config.action_dim))
    return sample_actions(policy, observation, noise, num_steps, guidance, solver)


def accumulate_gradients(loss: Callable[[Any, Any], Loss], params: Any, data: Any, parts: int) -> tuple[Any, Metrics]:
    """Gradients and metrics of a loss over a batch, computed in `parts` one after the other.

    The loss of a part has to be on the scale of the whole batch: their mean is the loss of the batch. Scalar metrics are
    averaged likewise; metrics with one value per sample are concatenated in the order of the batch.
    """
    grad = jax.grad(loss, has_aux=True)
    if parts == 1:
        return grad(params, data)
    leaves, structure = jax.tree.flatten(data)
    # Each part takes samples from all over the batch; a contiguous part would lie on some of the devices only.
    split = [x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1) for x in leaves]

    def measure(part: list[Array]) -> tuple[tuple[Any, Metrics], Metrics]:
        grads, metrics = grad(params, jax.tree.unflatten(structure, part))
        samples = {name: metric for name, metric in metrics.items() if jnp.ndim(metric)}
        return (grads, {name: metric for name, metric in metrics.items() if name not in samples}), samples

    def add(total: Any, part: list[Array]) -> tuple[Any, Metrics]:
        means, samples = measure(part)
        return jax.tree.map(jnp.add, total, means), samples

    shapes, _ = jax.eval_shape(measure, [x[0] for x in split])
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    total, samples = jax.lax.scan(add, zeros, split)
    grads, metrics = jax.tree.map(lambda x: x / parts, total)
    return grads, metrics | {name: x.swapaxes(0, 1).reshape(-1) for name, x in samples.items()}
