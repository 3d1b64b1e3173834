"""Behaviour cloning: plain flow matching on the data, as OpenPI trains; the baseline of every table."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Float, Key, PRNGKeyArray

from pirl.agents.base import Metrics
from pirl.agents.learning import (
    FlowDraw,
    LearnedPolicy,
    LossOver,
    Parameters,
    accumulate_gradients,
    act_by,
    action_error,
    average_errors,
    check_flow_learner,
    count_steps,
    draw_flow,
    flow_errors,
    policy_counts,
)
from pirl.agents.optimisers import OptimiserConfig
from pirl.data.chunks import ChunkBatch
from pirl.models.observation import Observation
from pirl.models.pi0 import Pi0
from pirl.models.types import Array


@dataclass(frozen=True)
class BCConfig:
    """Behaviour cloning. The defaults are OpenPI's."""

    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    """Optimiser of the policy."""
    ema_decay: float | None = 0.99
    """Decay of the policy's EMA, which acts and is exported (none: the latest parameters do)."""
    freeze: tuple[str, ...] = ()
    """Frozen parts: vision, language, or regular expressions on parameter paths. LoRA freezes the base weights itself."""
    augment: bool = True
    """Augment images as OpenPI does: crop, rotate, colour jitter."""
    loss_over: LossOver = "all"
    """What the flow loss averages over: all action dimensions and steps, padding included, as in OpenPI; or real ones."""
    denoising_steps: int = 10
    """Euler steps of the flow when acting."""
    accumulation_steps: int = 1
    """Gradient accumulation: parts of a batch that are processed one after the other."""
    acting_guidance: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        check_flow_learner(self)


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
        return self._loss(parameters, (batch, draw), count_steps(batch, self.config.loss_over))

    compute_bc_loss = compute_loss

    def _loss(
        self, parameters: Parameters | None, data: tuple[ChunkBatch, FlowDraw], count: Array
    ) -> tuple[Float[Array, ""], Metrics]:
        errors = flow_errors(self.learned.build(parameters), *data)
        losses = average_errors(errors, data[0], self.config.loss_over, self.real_action_dim)
        loss = jnp.sum(losses) / jnp.maximum(count, 1.0)
        return loss, {"loss": loss, "bc/loss": loss}

    def update(self, batch: ChunkBatch, rng: PRNGKeyArray) -> tuple["BCAgent", Metrics]:
        """One step of gradient descent."""
        parts = self.config.accumulation_steps
        draw = draw_flow(batch, self.learned.model, rng, self.config.augment)
        count = count_steps(batch, self.config.loss_over) / parts
        gradients, metrics = accumulate_gradients(
            lambda parameters, data: self._loss(parameters, data, count), self.learned.trainable, (batch, draw), parts
        )
        learned, norms = self.learned.apply(gradients)
        return replace(self, step=self.step + 1, learned=learned), metrics | norms

    def validate(self, batch: ChunkBatch, rng: PRNGKeyArray) -> Metrics:
        """The loss, and how far a sampled chunk is from the recorded one, of the policy that would be exported."""
        draw = draw_flow(batch, self.learned.model, rng, augment=False)
        _, metrics = self._loss(self.learned.average, (batch, draw), count_steps(batch, self.config.loss_over))
        chunks = self.act(batch.observations, rng)
        return metrics | {"actor/action_mse": action_error(chunks, batch, self.real_action_dim)}

    def act(self, observation: Observation, rng: Key[Array, "*b"]) -> Float[Array, "b horizon action_dim"]:
        """A chunk of the averaged policy for each observation."""
        return act_by(self.policy(), observation, rng, self.config.denoising_steps)

    def policy(self) -> Pi0:
        """The averaged policy."""
        return self.learned.averaged()

    def parameter_counts(self) -> dict[str, int]:
        """How many parameters learn, and how many do not."""
        return policy_counts(self.learned)
