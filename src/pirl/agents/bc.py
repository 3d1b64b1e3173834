"""Behaviour cloning: plain flow matching on the data, as OpenPI trains; the baseline of every table."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Float, Key, PRNGKeyArray

from pirl.agents.base import Metrics, draw_noise
from pirl.agents.learning import FlowDraw, LearnedPolicy, Parameters, accumulate_gradients, draw_flow
from pirl.agents.optimisers import OptimiserConfig
from pirl.data.chunks import ChunkBatch
from pirl.errors import ConfigError
from pirl.models.critic import count_parameters
from pirl.models.observation import Observation
from pirl.models.pi0 import Pi0
from pirl.models.types import Array


@dataclass(frozen=True)
class BCConfig:
    """Behaviour cloning. The defaults are OpenPI's."""

    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    """How the policy learns."""
    ema_decay: float | None = 0.99
    """Decay of the running average of the parameters, which is what acts and is exported; none exports the latest."""
    freeze: tuple[str, ...] = ()
    """Parts that do not learn: vision, language, or regular expressions on parameter paths. LoRA freezes by itself."""
    augment: bool = True
    """Augment pictures as OpenPI does: crop, rotate, colours."""
    loss_over: Literal["all", "real"] = "all"
    """What the flow loss averages: every action dimension and step, padding too, as OpenPI does; or real ones only."""
    denoising_steps: int = 10
    """Euler steps of the flow when acting."""
    accumulation_steps: int = 1
    """Parts into which a batch is cut, to go through memory one after the other."""

    def __post_init__(self) -> None:
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ConfigError(f"ema_decay should be in [0, 1), or none; it is {self.ema_decay}.")
        if self.loss_over not in ("all", "real"):
            raise ConfigError(f"loss_over should be all or real; it is {self.loss_over!r}.")
        if self.denoising_steps < 1 or self.accumulation_steps < 1:
            raise ConfigError(f"denoising_steps and accumulation_steps should be at least 1: {self}.")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BCAgent:
    """The policy being cloned."""

    step: Any  # int32; where the tree holds shapes or layouts in the place of arrays, one of these
    learned: LearnedPolicy
    config: BCConfig = field(metadata={"static": True})
    real_action_dim: int = field(metadata={"static": True})

    @classmethod
    def create(
        cls, config: BCConfig, policy: Pi0, rng: PRNGKeyArray | None = None, *, real_action_dim: int | None = None
    ) -> "BCAgent":
        """Begin with a policy; `real_action_dim` of its action dimensions are the robot's."""
        return cls(
            step=jnp.zeros((), jnp.int32),
            learned=LearnedPolicy.create(policy, config.optimiser, config.ema_decay, config.freeze),
            config=config,
            real_action_dim=real_action_dim or policy.config.action_dim,
        )

    def compute_loss(
        self, batch: ChunkBatch, rng: PRNGKeyArray, parameters: Parameters | None = None
    ) -> tuple[Float[Array, ""], Metrics]:
        """The flow-matching loss; gradients flow where parameters are given."""
        draw = draw_flow(batch, self.learned.model, rng, self.config.augment)
        return self._loss(parameters, (batch, draw), self._count(batch))

    compute_bc_loss = compute_loss

    def _count(self, batch: ChunkBatch) -> Float[Array, ""]:
        """Over how many steps the loss is averaged."""
        everything = self.config.loss_over == "all"
        return jnp.float32(batch.valid.size) if everything else jnp.sum(batch.valid, dtype=jnp.float32)

    def _loss(
        self, parameters: Parameters | None, data: tuple[ChunkBatch, FlowDraw], count: Array
    ) -> tuple[Float[Array, ""], Metrics]:
        batch, draw = data
        policy, everything = self.learned.build(parameters), self.config.loss_over == "all"
        errors = policy.flow_loss(
            policy.encode(draw.observations),
            batch.actions,
            noise=draw.noise,
            time=draw.time,
            valid=None if everything else batch.valid,
            real_action_dim=None if everything else self.real_action_dim,
        )
        loss = jnp.sum(errors) / jnp.maximum(count, 1.0)
        return loss, {"loss": loss, "bc/loss": loss}

    def update(self, batch: ChunkBatch, rng: PRNGKeyArray) -> tuple["BCAgent", Metrics]:
        """One step of gradient descent."""
        parts = self.config.accumulation_steps
        draw, count = draw_flow(batch, self.learned.model, rng, self.config.augment), self._count(batch) / parts
        gradients, metrics = accumulate_gradients(
            lambda parameters, data: self._loss(parameters, data, count), self.learned.trainable, (batch, draw), parts
        )
        learned, norms = self.learned.apply(gradients)
        return replace(self, step=self.step + 1, learned=learned), metrics | norms

    def validate(self, batch: ChunkBatch, rng: PRNGKeyArray) -> Metrics:
        """The loss, and how far a sampled chunk is from the recorded one, of the policy that would be exported."""
        draw = draw_flow(batch, self.learned.model, rng, augment=False)
        _, metrics = self._loss(self.learned.average, (batch, draw), self._count(batch))
        chunks = self.act(batch.observations, rng)
        return metrics | {"actor/action_mse": action_error(chunks, batch, self.real_action_dim)}

    def act(self, observation: Observation, rng: Key[Array, "*b"]) -> Float[Array, "b horizon action_dim"]:
        """A chunk of the averaged policy for each observation."""
        policy = self.policy()
        shape = (1, policy.config.action_horizon, policy.config.action_dim)
        noise = draw_noise(rng, observation.state.shape[0], shape)
        return policy.sample(policy.encode(observation), num_steps=self.config.denoising_steps, noise=noise)[:, 0]

    def policy(self) -> Pi0:
        """The averaged policy."""
        return self.learned.averaged()

    def parameter_counts(self) -> dict[str, int]:
        """How many parameters learn, and how many do not."""
        return policy_counts(self.learned)


def policy_counts(learned: LearnedPolicy) -> dict[str, int]:
    """How many parameters of a policy learn, and how many do not."""
    return {
        "policy": count_parameters([learned.trainable, learned.frozen]),
        "policy_trainable": count_parameters(learned.trainable),
    }


def action_error(
    chunks: Float[Array, "b horizon action_dim"], batch: ChunkBatch, real_action_dim: int
) -> Float[Array, ""]:
    """Mean squared distance of chunks from the recorded ones, over real dimensions and steps."""
    errors = jnp.mean(jnp.square(chunks - batch.actions)[..., :real_action_dim], axis=-1)
    return jnp.sum(jnp.where(batch.valid, errors, 0.0)) / jnp.maximum(jnp.sum(batch.valid), 1)
