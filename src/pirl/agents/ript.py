"""RIPT: leave-one-out advantages over rollouts from the same initial state, without a critic.

The policy attempts each context (task and initial state) several times. The advantage of an attempt is its reward minus
the mean reward of the others, so a context that always or never succeeds teaches nothing. The policy learns by flow
matching on chunks of its own episodes weighted by advantage (`signed`, `positive`, `exp`), or with the sign of the
advantage in the prompt, which acting then asks for (`guidance`).
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Key, PRNGKeyArray

from pirl.agents import common
from pirl.agents.common import Chunk, FlowInputs, Loss, Metrics, Params, PolicyState
from pirl.agents.config import RIPTConfig
from pirl.data.chunks import ChunkBatch
from pirl.errors import ConfigError
from pirl.models.observation import GuidedObservation, Observation
from pirl.models.pi0 import Pi0
from pirl.models.types import Array

# Tokens and their mask.
PromptTokens = tuple[Int[Array, "b tokens"], Bool[Array, "b tokens"]]


# --- advantages ------------------------------------------------------------------------------------------------------


def leave_one_out(rewards: Float[np.ndarray, " attempts"]) -> Float[np.ndarray, " attempts"]:
    """Each attempt's reward minus the mean of the others; 0 for a single attempt."""
    count = len(rewards)
    if count < 2:
        return np.zeros_like(rewards)
    # Relative to the first, equal rewards are exactly 0, and so are their advantages.
    above = rewards - rewards[0]
    return (count * above - np.sum(above)) / (count - 1)


def scale_advantages(config: RIPTConfig, advantages: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """The advantages of all episodes of an iteration, divided by their standard deviation if configured so."""
    largest = np.max(np.abs(advantages), initial=0.0)
    if not config.normalize_advantages or largest == 0:
        return advantages
    # They sum to 0 in every group, so the deviation is the root mean square. At most 1 before squaring: no overflow.
    scaled = advantages / largest
    return scaled / np.sqrt(np.mean(np.square(scaled)))


def has_signal(config: RIPTConfig, advantages: Float[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Which episodes to learn from: with `positive`, only those that were better than the others."""
    return advantages > 0 if config.weighting == "positive" else np.ones(advantages.shape, bool)


def advantage_weights(config: RIPTConfig, advantages: Float[Array, " b"]) -> Float[Array, " b"]:
    """Weight of each chunk's flow loss; a negative weight repels."""
    if config.weighting == "signed":
        repelled = config.negative_weight * jnp.maximum(advantages, -config.negative_clip)
        return jnp.where(advantages < 0, repelled, advantages)
    if config.weighting == "positive":
        return jnp.maximum(advantages, 0.0)
    if config.weighting == "exp":
        # Clipped before the exponential, whose overflow would turn 0 · ∞ into NaN.
        return jnp.exp(jnp.minimum(advantages / config.beta, math.log(config.max_weight)))
    # With equal weights there would be more failures than successes in what a guided policy repeats.
    return jnp.where(advantages > 0, 1.0, config.negative_weight)


# --- the learner -----------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RolloutBatch:
    """Chunks of the policy's own episodes with their advantages.

    chunks                  with the plain prompts
    advantages              of the episode that each chunk is from
    included                False: only fills the batch
    prompts                 guidance: with the indicator of the advantage's sign
    demonstrations          for bc_loss_weight, with the plain prompts
    demonstration_prompts   guidance: with the positive indicator
    """

    chunks: ChunkBatch
    advantages: Float[Array, " b"]
    included: Bool[Array, " b"]
    prompts: PromptTokens | None = None
    demonstrations: ChunkBatch | None = None
    demonstration_prompts: PromptTokens | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Inputs:
    """A batch with its random inputs; every array has one row per chunk, or per demonstration."""

    chunks: ChunkBatch
    flow: FlowInputs
    presence: Float[Array, " b"]  # 0 where not included, else such that means over the batch stay means
    weights: Float[Array, " b"]  # presence times the weight of the advantage
    demonstrations: tuple[ChunkBatch, FlowInputs] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RIPTAgent:
    """Train state of RIPT."""

    step: Any  # int32
    actor: PolicyState
    config: RIPTConfig = field(metadata={"static": True})
    real_action_dim: int = field(metadata={"static": True})

    @classmethod
    def create(
        cls, config: RIPTConfig, policy: Pi0, rng: PRNGKeyArray | None = None, *, real_action_dim: int | None = None
    ) -> "RIPTAgent":
        """Start from a policy; `real_action_dim` of its action dimensions are the robot's."""
        if config.weighting == "guidance" and not policy.config.max_token_len:
            raise ConfigError("agent.weighting = guidance needs a prompt, but model.max_token_len = 0.")
        return cls(
            step=jnp.zeros((), jnp.int32),
            actor=PolicyState.create(policy, config.optimizer, config.ema_decay, config.freeze),
            config=config,
            real_action_dim=real_action_dim or policy.config.action_dim,
        )

    def actor_loss(self, params: Params | None, inputs: _Inputs, count: Array) -> Loss:
        """Flow matching weighted by advantage, divided by `count` steps."""
        config, weights = self.config, inputs.weights
        errors = common.flow_errors(self.actor.build(params), inputs.chunks, inputs.flow)
        plain, limited = self._average(errors, inputs.chunks), jnp.zeros(weights.shape, bool)
        if config.weighting == "signed":
            limit = config.negative_loss_limit * jnp.sum(self._counted(inputs.chunks), axis=1)
            limited = (weights < 0) & (jnp.sum(plain, axis=1) > limit)
            # A constant has no gradient, and no chunk adds more to the loss than one at the limit.
            errors = jnp.where(limited[:, None, None], config.negative_loss_limit, errors)
        # Weighted before averaging, so that weights of 1 give BC bit for bit.
        loss = jnp.sum(self._average(weights[:, None, None] * errors, inputs.chunks)) / count
        return loss, {
            "actor/loss": loss,
            "actor/flow_loss": jnp.sum(inputs.presence[:, None] * plain) / count,
            "actor/limited": jnp.mean(limited),
            "data/valid_chunks": jnp.mean(inputs.presence > 0),
        }

    def bc_loss(self, params: Params | None, data: tuple[ChunkBatch, FlowInputs], count: Array) -> Loss:
        """Plain flow matching, divided by `count` steps."""
        errors = common.flow_errors(self.actor.build(params), *data)
        loss = jnp.sum(self._average(errors, data[0])) / jnp.maximum(count, 1.0)
        return loss, {"loss": loss, "bc/loss": loss}

    def compute_loss(self, batch: RolloutBatch, rng: PRNGKeyArray, params: Params | None = None) -> Loss:
        """Flow matching weighted by advantage, plus that on demonstrations; gradients flow where parameters are given."""
        return self._loss(params, self._draw(batch, rng), self._counts(batch))

    def compute_bc_loss(self, batch: ChunkBatch, rng: PRNGKeyArray, params: Params | None = None) -> Loss:
        """Plain flow matching on any chunks, with their plain prompts."""
        inputs = common.draw_flow_inputs(batch, self.actor.model, rng, self.config.augment)
        return self.bc_loss(params, (batch, inputs), common.count_steps(batch, self.config.loss_over))

    def update(self, batch: RolloutBatch, rng: PRNGKeyArray) -> tuple["RIPTAgent", Metrics]:
        """One gradient step."""
        parts = self.config.accumulation_steps
        inputs, counts = self._draw(batch, rng), [count / parts for count in self._counts(batch)]
        grads, metrics = common.accumulate_gradients(
            lambda params, part: self._loss(params, part, counts), self.actor.params, inputs, parts
        )
        actor, norms = self.actor.apply_gradients(grads)
        return replace(self, step=self.step + 1, actor=actor), metrics | norms

    def validate(self, batch: ChunkBatch, rng: PRNGKeyArray) -> Metrics:
        """Plain flow loss of the exported policy, and the distance of a sampled chunk from the recorded one."""
        inputs = common.draw_flow_inputs(batch, self.actor.model, rng, augment=False)
        count = common.count_steps(batch, self.config.loss_over)
        _, metrics = self.bc_loss(self.actor.ema_params, (batch, inputs), count)
        distance = self.act(batch.observations, rng) - batch.actions
        return metrics | {"actor/action_mse": common.masked_mse(distance, batch.valid, self.real_action_dim)}

    def act(self, observation: Observation | GuidedObservation, rng: Key[Array, "*b"]) -> Chunk:
        """One chunk of the EMA policy per observation, as deployed."""
        return common.act_with(
            self.policy(), observation, rng, self.config.denoising_steps, self.config.guidance_weight
        )

    def act_in_rollout(self, observation: Observation | GuidedObservation, rng: Key[Array, "*b"]) -> Chunk:
        """One chunk to learn from, sampled without narrowing the policy's distribution."""
        config = self.config
        steps, guidance, solver = config.denoising_steps, config.rollout_guidance, config.rollout_solver
        return common.act_with(self.policy(), observation, rng, steps, guidance, solver)

    def velocities(self, batch: ChunkBatch, rng: PRNGKeyArray) -> Chunk:
        """The flow of the EMA policy at noise and times drawn for the batch."""
        policy, inputs = self.policy(), common.draw_flow_inputs(batch, self.actor.model, rng, augment=False)
        time = inputs.time[:, None, None]
        x_t = time * inputs.noise + (1 - time) * batch.actions
        return policy.velocity(policy.encode(inputs.observations), x_t[:, None], inputs.time)[:, 0]

    def drift(self, before: Chunk, batch: ChunkBatch, rng: PRNGKeyArray) -> Float[Array, ""]:
        """Mean squared distance from the `velocities` of an earlier policy for the same batch and key."""
        return common.masked_mse(self.velocities(batch, rng) - before, batch.valid, self.real_action_dim)

    def policy(self) -> Pi0:
        """The policy to export."""
        return self.actor.ema_policy()

    def parameter_counts(self) -> dict[str, int]:
        """Number of parameters, and of trainable ones."""
        return self.actor.parameter_counts()

    # --- helpers -------------------------------------------------------------------------------------------------

    def _loss(self, params: Params | None, inputs: _Inputs, counts: list[Array]) -> Loss:
        loss, metrics = self.actor_loss(params, inputs, jnp.maximum(counts[0], 1.0))
        if inputs.demonstrations is not None:
            bc_loss, bc_metrics = self.bc_loss(params, inputs.demonstrations, counts[1])
            loss, metrics = loss + self.config.bc_loss_weight * bc_loss, metrics | bc_metrics
        return loss, metrics | {"loss": loss}

    def _counts(self, batch: RolloutBatch) -> list[Float[Array, ""]]:
        """Number of steps that the losses on chunks and demonstrations are averaged over."""
        parts = (batch.chunks, batch.demonstrations)
        return [common.count_steps(part, self.config.loss_over) for part in parts if part is not None]

    def _average(self, errors: Array, chunks: ChunkBatch) -> Float[Array, "b horizon"]:
        return common.average_errors(errors, chunks, self.config.loss_over, self.real_action_dim)

    def _counted(self, chunks: ChunkBatch) -> Bool[Array, "b horizon"]:
        return jnp.ones_like(chunks.valid) if self.config.loss_over == "all" else chunks.valid

    def _draw(self, batch: RolloutBatch, rng: PRNGKeyArray) -> _Inputs:
        """Drawn for the whole batch, from the keys of BC and further ones for what BC does not have."""
        config, model, included = self.config, self.actor.model, batch.included
        prompt_rng, bc_prompt_rng, bc_rng = jax.random.split(jax.random.fold_in(rng, 3), 3)
        chunks = replace(
            batch.chunks,
            # A weight of 0 is not enough: NaN times 0 is NaN.
            actions=_zero_excluded(batch.chunks.actions, included),
            observations=_zero_excluded(self._with_indicator(batch.chunks, batch.prompts, prompt_rng), included),
        )
        demonstrations = None
        if config.bc_loss_weight:
            if batch.demonstrations is None:
                raise ConfigError(f"bc_loss_weight = {config.bc_loss_weight} needs demonstrations in every batch.")
            observations = self._with_indicator(batch.demonstrations, batch.demonstration_prompts, bc_prompt_rng)
            shown = replace(batch.demonstrations, observations=observations)
            demonstrations = (shown, common.draw_flow_inputs(shown, model, bc_rng, config.augment))
        # Losses are divided by the steps of all chunks, as in BC. This ratio makes it the included ones, and is exactly 1
        # if all are included: dividing by another expression of the same number may round differently.
        present = jnp.sum(self._counted(chunks) & included[:, None], dtype=jnp.float32)
        ratio = common.count_steps(chunks, config.loss_over) / jnp.maximum(present, 1.0)
        presence = jnp.where(included, ratio, 0.0)
        return _Inputs(
            chunks=chunks,
            flow=common.draw_flow_inputs(chunks, model, rng, config.augment),
            presence=presence,
            weights=advantage_weights(config, _zero_excluded(batch.advantages, included)) * presence,
            demonstrations=demonstrations,
        )

    def _with_indicator(self, chunks: ChunkBatch, prompts: PromptTokens | None, rng: PRNGKeyArray) -> Observation:
        """guidance: observations with the indicator in the prompt, except for a fraction `cond_dropout`."""
        observations = chunks.observations
        if self.config.weighting != "guidance":
            return observations
        if prompts is None:
            raise ConfigError("guidance needs prompts with the indicator for every chunk and demonstration.")
        dropped = jax.random.bernoulli(rng, self.config.cond_dropout, (observations.state.shape[0], 1))
        plain = (observations.tokenized_prompt, observations.tokenized_prompt_mask)
        return observations.with_prompt(*jax.tree.map(lambda a, b: jnp.where(dropped, a, b), plain, prompts))


def _zero_excluded(tree: Any, included: Bool[Array, " b"]) -> Any:
    """Zeros in rows that are not included; masks stay as they are, since attention needs a real token."""

    def zero(x: Array) -> Array:
        return x if x.dtype == bool else jnp.where(included.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros_like(x))

    return jax.tree.map(zero, tree)
