"""BC: plain flow matching on the data, as OpenPI trains; the baseline of every table."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Key, PRNGKeyArray

from pirl.agents import common
from pirl.agents.common import Chunk, FlowInputs, Loss, Metrics, Params, PolicyState
from pirl.agents.config import BCConfig
from pirl.data.chunks import ChunkBatch
from pirl.models.observation import Observation
from pirl.models.pi0 import Pi0
from pirl.models.types import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BCAgent:
    """Train state of behavior cloning."""

    step: Any  # int32
    actor: PolicyState
    config: BCConfig = field(metadata={"static": True})
    real_action_dim: int = field(metadata={"static": True})

    @classmethod
    def create(
        cls, config: BCConfig, policy: Pi0, rng: PRNGKeyArray | None = None, *, real_action_dim: int | None = None
    ) -> "BCAgent":
        """Start from a policy; `real_action_dim` of its action dimensions are the robot's."""
        return cls(
            step=jnp.zeros((), jnp.int32),
            actor=PolicyState.create(policy, config.optimizer, config.ema_decay, config.freeze),
            config=config,
            real_action_dim=real_action_dim or policy.config.action_dim,
        )

    def compute_loss(self, batch: ChunkBatch, rng: PRNGKeyArray, params: Params | None = None) -> Loss:
        """The flow-matching loss; gradients flow where parameters are given."""
        inputs = common.draw_flow_inputs(batch, self.actor.model, rng, self.config.augment)
        return self.bc_loss(params, (batch, inputs), common.count_steps(batch, self.config.loss_over))

    compute_bc_loss = compute_loss

    def bc_loss(self, params: Params | None, data: tuple[ChunkBatch, FlowInputs], count: Array) -> Loss:
        """The flow-matching loss of a batch or a part of one, divided by `count` steps."""
        errors = common.flow_errors(self.actor.build(params), *data)
        losses = common.average_errors(errors, data[0], self.config.loss_over, self.real_action_dim)
        loss = jnp.sum(losses) / jnp.maximum(count, 1.0)
        return loss, {"loss": loss, "bc/loss": loss}

    def update(self, batch: ChunkBatch, rng: PRNGKeyArray) -> tuple["BCAgent", Metrics]:
        """One gradient step."""
        parts = self.config.accumulation_steps
        inputs = common.draw_flow_inputs(batch, self.actor.model, rng, self.config.augment)
        count = common.count_steps(batch, self.config.loss_over) / parts
        grads, metrics = common.accumulate_gradients(
            lambda params, data: self.bc_loss(params, data, count), self.actor.params, (batch, inputs), parts
        )
        actor, norms = self.actor.apply_gradients(grads)
        return replace(self, step=self.step + 1, actor=actor), metrics | norms

    def validate(self, batch: ChunkBatch, rng: PRNGKeyArray) -> Metrics:
        """The loss of the exported policy, and the distance of a sampled chunk from the recorded one."""
        inputs = common.draw_flow_inputs(batch, self.actor.model, rng, augment=False)
        count = common.count_steps(batch, self.config.loss_over)
        _, metrics = self.bc_loss(self.actor.ema_params, (batch, inputs), count)
        distance = self.act(batch.observations, rng) - batch.actions
        return metrics | {"actor/action_mse": common.masked_mse(distance, batch.valid, self.real_action_dim)}

    def act(self, observation: Observation, rng: Key[Array, "*b"]) -> Chunk:
        """One chunk of the EMA policy per observation."""
        return common.act_with(self.policy(), observation, rng, self.config.denoising_steps)

    def policy(self) -> Pi0:
        """The policy to export."""
        return self.actor.ema_policy()

    def parameter_counts(self) -> dict[str, int]:
        """Number of parameters, and of trainable ones."""
        return self.actor.parameter_counts()
