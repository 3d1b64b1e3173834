"""What every learner does with a policy: hold its parameters, move them by gradients, average them, weigh flow losses."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Bool, Float, Key, PRNGKeyArray

from pirl.agents.base import Metrics, draw_noise
from pirl.agents.optimisers import OptimiserConfig
from pirl.data.chunks import ChunkBatch
from pirl.errors import ConfigError
from pirl.models.config import Pi0Config
from pirl.models.critic import count_parameters
from pirl.models.observation import GuidedObservation, Observation, preprocess
from pirl.models.parameters import get_parameters, set_parameters
from pirl.models.pi0 import Pi0, Solver, abstract_model, plan_chunks, sample_time, step_losses
from pirl.models.types import Array

Parameters = dict[str, Any]
# What a flow loss averages: every action dimension and step, padding too, as OpenPI does; or real ones only.
LossOver = Literal["all", "real"]

# What can be frozen by name; anything else is a regular expression on '/'-joined parameter paths.
FREEZABLE = {
    "vision": r"PaliGemma/img/.*",
    # The layers of the action expert carry the suffix _1.
    "language": r"PaliGemma/llm/(?!.*_1(/|$)).*",
}


@functools.lru_cache(maxsize=8)
def _shapes(model: Pi0Config) -> Pi0:
    return abstract_model(model)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LearnedPolicy:
    """A policy on its way: the parameters that learn and those that do not, their running average, the optimiser."""

    trainable: Parameters
    frozen: Parameters
    average: Parameters | None
    moments: Any
    model: Pi0Config = field(metadata={"static": True})
    optimiser: OptimiserConfig = field(metadata={"static": True})
    ema_decay: float | None = field(metadata={"static": True})

    @classmethod
    def create(
        cls, policy: Pi0, optimiser: OptimiserConfig, ema_decay: float | None, freeze: tuple[str, ...] = ()
    ) -> "LearnedPolicy":
        """Begin with a policy. Frozen parameters are kept in bfloat16, as OpenPI keeps them."""
        model, parameters = policy.config, get_parameters(policy)
        check_freeze(freeze, list(parameters))
        is_frozen = {path: model.is_frozen(path) or matches_any(path, freeze) for path in parameters}
        if all(is_frozen.values()):
            raise ConfigError(f"freeze = {freeze} leaves no parameter of the policy to learn.")
        # Copies: what a caller hands in may be donated, and the average must not share buffers with the parameters.
        trainable = {path: jnp.copy(leaf) for path, leaf in parameters.items() if not is_frozen[path]}
        return cls(
            trainable=trainable,
            frozen={path: jnp.copy(leaf.astype(jnp.bfloat16)) for path, leaf in parameters.items() if is_frozen[path]},
            average=None if ema_decay is None else jax.tree.map(jnp.copy, trainable),
            moments=optimiser.make().init(trainable),
            model=model,
            optimiser=optimiser,
            ema_decay=ema_decay,
        )

    def build(self, trainable: Parameters | None = None) -> Pi0:
        """The policy with the current parameters, or with others in the place of those that learn."""
        trainable = self.trainable if trainable is None else trainable
        return set_parameters(_shapes(self.model), {**self.frozen, **trainable})

    def averaged(self) -> Pi0:
        """The policy with the averaged parameters: the one that acts and is exported."""
        return self.build(self.average)

    def apply(self, gradients: Parameters) -> tuple["LearnedPolicy", Metrics]:
        """One step of the optimiser and of the average."""
        trainable, moments, rate = self.optimiser.step(gradients, self.moments, self.trainable)
        average = None if self.average is None else move_average(self.average, trainable, self.ema_decay)
        metrics = {
            "grad_norm/policy": optax.tree.norm(gradients),
            "param_norm/policy": optax.tree.norm(
                {path: leaf for path, leaf in {**self.frozen, **trainable}.items() if _is_kernel(path, leaf)}
            ),
            "lr/policy": rate,
        }
        return replace(self, trainable=trainable, average=average, moments=moments), metrics


def check_freeze(freeze: tuple[str, ...], paths: list[str]) -> None:
    """Raise where an entry of `freeze` is no regular expression, or matches nothing: most likely a slip of the pen."""
    for pattern in freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"freeze = {pattern!r} is not a regular expression: {error}.") from error
        if pattern not in FREEZABLE and not any(matches_any(path, (pattern,)) for path in paths):
            raise ConfigError(
                f"freeze = {pattern!r} matches no parameter of the policy. Give {' or '.join(FREEZABLE)}, or a regular "
                f"expression on whole paths such as {paths[0]}."
            )


def matches_any(path: str, freeze: tuple[str, ...]) -> bool:
    """Whether a parameter is among those named, or matched, by `freeze`."""
    return any(re.fullmatch(FREEZABLE.get(pattern, pattern), path) for pattern in freeze)


def move_average(average: Parameters, new: Parameters, decay: float | None) -> Parameters:
    """decay · average + (1 − decay) · new."""
    assert decay is not None
    return jax.tree.map(lambda old, latest: decay * old + (1 - decay) * latest, average, new)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FlowDraw:
    """A batch with what chance adds to it before the flow loss: augmented pictures, noise, flow times."""

    observations: Observation
    noise: Float[Array, "b horizon action_dim"]
    time: Float[Array, " b"]


def draw_flow(batch: ChunkBatch, model: Pi0Config, rng: PRNGKeyArray, augment: bool) -> FlowDraw:
    """Draw for the whole batch at once, from the same keys as OpenPI, so that cutting it up later changes nothing."""
    augmentation_rng, noise_rng, time_rng = jax.random.split(rng, 3)
    return FlowDraw(
        observations=preprocess(batch.observations, model, augmentation_rng if augment else None),
        noise=jax.random.normal(noise_rng, batch.actions.shape),
        time=sample_time(time_rng, batch.actions.shape[0]),
    )


def flow_errors(policy: Pi0, batch: ChunkBatch, draw: FlowDraw) -> Float[Array, "b horizon action_dim"]:
    """Squared errors of the flow, per step and dimension."""
    return policy.flow_errors(policy.encode(draw.observations), batch.actions, noise=draw.noise, time=draw.time)


def average_errors(
    errors: Float[Array, "b horizon action_dim"], batch: ChunkBatch, over: LossOver, real_action_dim: int
) -> Float[Array, "b horizon"]:
    """What each step adds to the loss; 0 where it does not count."""
    return step_losses(errors) if over == "all" else step_losses(errors, batch.valid, real_action_dim)


def count_steps(batch: ChunkBatch, over: LossOver) -> Float[Array, ""]:
    """Over how many steps the loss of a batch is averaged."""
    return jnp.float32(batch.valid.size) if over == "all" else jnp.sum(batch.valid, dtype=jnp.float32)


def accumulate_gradients(
    loss: Callable[[Any, Any], tuple[Float[Array, ""], Metrics]], parameters: Any, data: Any, parts: int
) -> tuple[Any, Metrics]:
    """Gradients and metrics of a loss over a batch, cut into `parts` that are gone through one after the other.

    The loss of a part is on the scale of the whole batch, so that the mean over parts is the loss of the batch. So are
    metrics that are single numbers; those with one for every sample are put together again.
    """
    gradient = jax.grad(loss, has_aux=True)
    if parts == 1:
        return gradient(parameters, data)
    leaves, structure = jax.tree.flatten(data)
    # Every part takes its samples from all over the batch: cut in a row, each part would lie on some of the devices.
    cut = [x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1) for x in leaves]

    def measure(part: list[Array]) -> tuple[tuple[Any, Metrics], Metrics]:
        gradients, metrics = gradient(parameters, jax.tree.unflatten(structure, part))
        samples = {name: metric for name, metric in metrics.items() if jnp.ndim(metric)}
        return (gradients, {name: metric for name, metric in metrics.items() if name not in samples}), samples

    def add(total: Any, part: list[Array]) -> tuple[Any, Metrics]:
        means, samples = measure(part)
        return jax.tree.map(jnp.add, total, means), samples

    shapes, _ = jax.eval_shape(measure, [x[0] for x in cut])
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    total, samples = jax.lax.scan(add, zeros, cut)
    gradients, metrics = jax.tree.map(lambda x: x / parts, total)
    return gradients, metrics | {name: x.swapaxes(0, 1).reshape(-1) for name, x in samples.items()}


def act_by(
    policy: Pi0,
    observation: Observation | GuidedObservation,
    rng: Key[Array, "*b"],
    num_steps: int,
    guidance: float = 1.0,
    solver: Solver = "euler",
) -> Float[Array, "b horizon action_dim"]:
    """A chunk of a policy for each observation, with one key or one each."""
    plain = observation.plain if isinstance(observation, GuidedObservation) else observation
    noise = draw_noise(rng, plain.state.shape[0], (policy.config.action_horizon, policy.config.action_dim))
    return plan_chunks(policy, observation, noise, num_steps, guidance, solver)


def check_flow_learner(config: Any) -> None:
    """Raise where what learners by flow matching have in common cannot be."""
    if config.ema_decay is not None and not 0 <= config.ema_decay < 1:
        raise ConfigError(f"ema_decay should be in [0, 1), or none; it is {config.ema_decay}.")
    if config.loss_over not in ("all", "real"):
        raise ConfigError(f"loss_over should be all or real; it is {config.loss_over!r}.")
    if config.denoising_steps < 1 or config.accumulation_steps < 1:
        raise ConfigError(f"denoising_steps and accumulation_steps should be at least 1: {config}.")


def policy_counts(learned: LearnedPolicy) -> dict[str, int]:
    """How many parameters of a policy learn, and how many do not."""
    return {
        "policy": count_parameters([learned.trainable, learned.frozen]),
        "policy_trainable": count_parameters(learned.trainable),
    }


def action_error(
    chunks: Float[Array, "b horizon action_dim"],
    batch: ChunkBatch,
    real_action_dim: int,
    count: Float[Array, ""] | None = None,
) -> Float[Array, ""]:
    """Mean squared distance of chunks from the recorded ones, over real dimensions and steps: `count`, if given."""
    return mean_square(chunks - batch.actions, batch.valid, real_action_dim, count)


def mean_square(
    values: Float[Array, "b horizon action_dim"],
    valid: Bool[Array, "b horizon"],
    real_action_dim: int,
    count: Float[Array, ""] | None = None,
) -> Float[Array, ""]:
    """Mean over real dimensions and steps; `count` says how many these are where only a part of them is given."""
    squares = jnp.mean(jnp.square(values)[..., :real_action_dim], axis=-1)
    count = jnp.sum(valid, dtype=jnp.float32) if count is None else count
    return jnp.sum(jnp.where(valid, squares, 0.0)) / jnp.maximum(count, 1.0)


def _is_kernel(path: str, leaf: Any) -> bool:
    """Whether OpenPI counts a parameter in its norm."""
    return leaf.ndim > 1 and path.split("/")[-1] not in ("bias", "scale", "pos_embedding", "input_embedding")
