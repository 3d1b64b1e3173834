"""RIPT: learning from the difference between one's own attempts, without a critic.

The policy tries each context (a task and an initial state) several times. An attempt's advantage is its reward minus the
mean of the others': what the context gives to everybody drops out, and a context that is always solved, or never, has
nothing to say. The policy then learns by flow matching on the chunks of its own episodes, weighted by advantage
(`signed`, `positive`, `exp`), or with the sign of the advantage in the prompt, to be asked for when acting (`guidance`).
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Key, PRNGKeyArray

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
    mean_square,
    policy_counts,
)
from pirl.agents.optimisers import OptimiserConfig
from pirl.data.chunks import ChunkBatch
from pirl.errors import ConfigError
from pirl.models.observation import GuidedObservation, Observation
from pirl.models.pi0 import Pi0, Solver
from pirl.models.types import Array

# Tokens, and which of them are real.
PromptTokens = tuple[Int[Array, "b tokens"], Bool[Array, "b tokens"]]


@dataclass(frozen=True)
class RIPTConfig:
    """RIPT: critic-free RL with leave-one-out advantages over rollouts from the same initial state."""

    weighting: Literal["signed", "positive", "exp", "guidance"] = "positive"
    """How advantages weight chunks: signed also pushes away from failures; positive uses only rollouts better than the
    others; exp weights all by exp(advantage / beta); guidance puts the sign of the advantage in the prompt."""
    normalise_advantages: bool = True
    """Divide advantages by their standard deviation over the episodes of an iteration."""
    negative_weight: float = 0.25
    """Weight of a failure relative to a success: 0.25 repels (signed) or teaches (guidance) a quarter as much."""
    negative_clip: float = 1.0
    """signed: negative advantages are clipped to minus this."""
    negative_loss_limit: float = 1.0
    """signed: a chunk whose flow loss exceeds this is pushed no further, so the loss is bounded below."""
    beta: float = 1.0
    """exp: temperature of the weights."""
    max_weight: float = 20.0
    """exp: largest weight; larger ones are clipped."""
    cond_dropout: float = 0.2
    """guidance: fraction of chunks trained without the indicator in the prompt."""
    guidance_weight: float = 2.0
    """guidance: weight of the indicator when acting; 0 ignores it, 1 follows it, above 1 extrapolates."""
    practice_guidance: float = 1.0
    """guidance: the same weight in rollouts; 0 in the first iteration, where the policy does not know the indicator."""
    num_epochs: int = 2
    """Passes over the chunks of an iteration."""
    chunks: Literal["decisions", "all"] = "decisions"
    """Chunks of a rollout to train on: those that start where the policy planned, or all. The others start with actions
    decided some steps earlier; a policy that trains on them reacts later with every iteration."""
    batch_by: Literal["chunks", "groups"] = "chunks"
    """What batches are drawn from: all chunks of the iteration, or those of a few contexts at a time."""
    bc_loss_weight: float = 0.0
    """Weight of plain flow matching on demonstrations, to prevent forgetting (0: no dataset is needed)."""
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
    practice_solver: Solver = "midpoint"
    """ODE solver of the flow in rollouts, with the same number of evaluations. Euler, which deployed policies use,
    samples a narrower distribution than the policy's; training on such samples would narrow it every iteration."""
    accumulation_steps: int = 1
    """Gradient accumulation: parts of a batch that are processed one after the other."""

    def __post_init__(self) -> None:
        check_flow_learner(self)
        for name, known in (
            ("weighting", ("signed", "positive", "exp", "guidance")),
            ("chunks", ("decisions", "all")),
            ("practice_solver", ("euler", "midpoint")),
            ("batch_by", ("chunks", "groups")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} should be one of {', '.join(known)}; it is {getattr(self, name)!r}.")
        for name in ("negative_weight", "negative_clip", "guidance_weight", "practice_guidance", "bc_loss_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} should be a number of at least 0; it is {getattr(self, name)}.")
        for name in ("beta", "max_weight", "negative_loss_limit"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} should be a positive number; it is {getattr(self, name)}.")
        if not 0 <= self.cond_dropout <= 1:
            raise ConfigError(f"cond_dropout is a probability, from 0 to 1; it is {self.cond_dropout}.")
        if self.practice_solver == "midpoint" and self.denoising_steps % 2:
            raise ConfigError(f"denoising_steps = {self.denoising_steps} should be even for the midpoint method.")
        if self.num_epochs < 1:
            raise ConfigError(f"num_epochs should be at least 1; it is {self.num_epochs}.")

    @property
    def acting_guidance(self) -> float:
        """Weight of the indicator in the prompt when acting; 0 for a policy that knows none."""
        return self.guidance_weight if self.weighting == "guidance" else 0.0


# --- advantages ------------------------------------------------------------------------------------------------------


def leave_one_out(rewards: Float[np.ndarray, " attempts"]) -> Float[np.ndarray, " attempts"]:
    """By how much each attempt is better than the mean of the others; 0 for one that is alone."""
    count = len(rewards)
    if count < 2:
        return np.zeros_like(rewards)
    # Seen from the first one, equal rewards are exactly 0, and so are their advantages.
    above = rewards - rewards[0]
    return (count * above - np.sum(above)) / (count - 1)


def scale_advantages(config: RIPTConfig, advantages: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """The advantages of all episodes of an iteration, in units of their deviation if that is asked for.

    They sum to 0 in every group, so that the deviation is the root of their mean square.
    """
    largest = np.max(np.abs(advantages), initial=0.0)
    if not config.normalise_advantages or largest == 0:
        return advantages
    # At most 1 before they are squared: nothing overflows, nor vanishes.
    scaled = advantages / largest
    return scaled / np.sqrt(np.mean(np.square(scaled)))


def carries_signal(config: RIPTConfig, advantages: Float[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Which episodes have something to teach: with `positive`, only those that were better than the others."""
    return advantages > 0 if config.weighting == "positive" else np.ones(advantages.shape, bool)


def weigh(config: RIPTConfig, advantages: Float[Array, " b"]) -> Float[Array, " b"]:
    """How much the flow loss of each chunk counts; a negative weight repels."""
    if config.weighting == "signed":
        repelled = config.negative_weight * jnp.maximum(advantages, -config.negative_clip)
        return jnp.where(advantages < 0, repelled, advantages)
    if config.weighting == "positive":
        return jnp.maximum(advantages, 0.0)
    if config.weighting == "exp":
        # Clipped before the exponential, whose overflow would turn 0 · ∞ into NaN.
        return jnp.exp(jnp.minimum(advantages / config.beta, math.log(config.max_weight)))
    # Learned from all alike, there would be more failures in what the policy repeats than successes.
    return jnp.where(advantages > 0, 1.0, config.negative_weight)


# --- the learner -----------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RolloutBatch:
    """Chunks of the policy's own episodes, and what they are worth.

    chunks                  with the plain prompts
    advantages              of the episode that each is from
    included                False: fills the batch and teaches nothing, whatever it holds
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
class _Drawn:
    """A batch with what chance adds to it; every array has a row per chunk, or per demonstration."""

    chunks: ChunkBatch
    draw: FlowDraw
    presence: Float[Array, " b"]  # 0 for what is not included; the others make up for it, so that means stay means
    weights: Float[Array, " b"]  # the same, times what the advantage is worth
    demonstrations: tuple[ChunkBatch, FlowDraw] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RIPTAgent:
    """The policy on its way."""

    step: Any  # int32; where the tree holds shapes or layouts in the place of arrays, one of these
    learned: LearnedPolicy
    config: RIPTConfig = field(metadata={"static": True})
    real_action_dim: int = field(metadata={"static": True})

    @classmethod
    def create(
        cls, config: RIPTConfig, policy: Pi0, rng: PRNGKeyArray | None = None, *, real_action_dim: int | None = None
    ) -> "RIPTAgent":
        """Begin with a policy; `real_action_dim` of its action dimensions are the robot's."""
        if config.weighting == "guidance" and not policy.config.max_token_len:
            raise ConfigError("guidance speaks through the prompt, and the model has none (max_token_len = 0).")
        return cls(
            step=jnp.zeros((), jnp.int32),
            learned=LearnedPolicy.create(policy, config.optimiser, config.ema_decay, config.freeze),
            config=config,
            real_action_dim=real_action_dim or policy.config.action_dim,
        )

    # --- the losses: gradients flow where parameters are given ---------------------------------------------------

    def compute_loss(
        self, batch: RolloutBatch, rng: PRNGKeyArray, parameters: Parameters | None = None
    ) -> tuple[Float[Array, ""], Metrics]:
        """Flow matching weighted by advantage, and on demonstrations where they have a weight."""
        return self._loss(parameters, self._draw(batch, rng), self._counts(batch))

    def compute_bc_loss(
        self, batch: ChunkBatch, rng: PRNGKeyArray, parameters: Parameters | None = None
    ) -> tuple[Float[Array, ""], Metrics]:
        """Plain flow matching on any chunks, under their plain prompts."""
        draw = draw_flow(batch, self.learned.model, rng, self.config.augment)
        return self._bc_loss(parameters, (batch, draw), count_steps(batch, self.config.loss_over))

    def _loss(
        self, parameters: Parameters | None, drawn: _Drawn, counts: list[Array]
    ) -> tuple[Float[Array, ""], Metrics]:
        config, weights, count = self.config, drawn.weights, jnp.maximum(counts[0], 1.0)
        errors = flow_errors(self.learned.build(parameters), drawn.chunks, drawn.draw)
        plain, limited = self._average(errors, drawn.chunks), jnp.zeros(weights.shape, bool)
        if config.weighting == "signed":
            most = config.negative_loss_limit * jnp.sum(self._counted(drawn.chunks), axis=1)
            limited = (weights < 0) & (jnp.sum(plain, axis=1) > most)
            # A constant in their place has no gradient; and no chunk adds more to the loss than one at the limit.
            errors = jnp.where(limited[:, None, None], config.negative_loss_limit, errors)
        # Weighted before they are averaged: gradients are then divided as in behaviour cloning, and by constants.
        loss = jnp.sum(self._average(weights[:, None, None] * errors, drawn.chunks)) / count
        metrics = {
            "actor/loss": loss,
            "actor/flow_loss": jnp.sum(drawn.presence[:, None] * plain) / count,
            "actor/limited": jnp.mean(limited),
            "data/valid_chunks": jnp.mean(drawn.presence > 0),
        }
        if drawn.demonstrations is not None:
            bc_loss, bc_metrics = self._bc_loss(parameters, drawn.demonstrations, counts[1])
            loss, metrics = loss + config.bc_loss_weight * bc_loss, metrics | bc_metrics
        return loss, metrics | {"loss": loss}

    def _bc_loss(
        self, parameters: Parameters | None, data: tuple[ChunkBatch, FlowDraw], count: Array
    ) -> tuple[Float[Array, ""], Metrics]:
        errors = flow_errors(self.learned.build(parameters), *data)
        loss = jnp.sum(self._average(errors, data[0])) / jnp.maximum(count, 1.0)
        return loss, {"loss": loss, "bc/loss": loss}

    # --- what they are made of -----------------------------------------------------------------------------------

    def _counts(self, batch: RolloutBatch) -> list[Float[Array, ""]]:
        """Over how many steps the loss is averaged, and that of demonstrations if there are any."""
        parts = (batch.chunks, batch.demonstrations)
        return [count_steps(part, self.config.loss_over) for part in parts if part is not None]

    def _average(self, errors: Array, chunks: ChunkBatch) -> Float[Array, "b horizon"]:
        return average_errors(errors, chunks, self.config.loss_over, self.real_action_dim)

    def _counted(self, chunks: ChunkBatch) -> Bool[Array, "b horizon"]:
        """Which steps these are."""
        return jnp.ones_like(chunks.valid) if self.config.loss_over == "all" else chunks.valid

    def _draw(self, batch: RolloutBatch, rng: PRNGKeyArray) -> _Drawn:
        """Draw for the whole batch, from the keys of behaviour cloning, and further ones for what that does not have."""
        config, model, included = self.config, self.learned.model, batch.included
        prompt_rng, bc_prompt_rng, bc_rng = jax.random.split(jax.random.fold_in(rng, 3), 3)
        chunks = replace(
            batch.chunks,
            # Not only their weight is 0: NaN times 0 would still be NaN.
            actions=_blank(batch.chunks.actions, included),
            observations=_blank(self._indicated(batch.chunks, batch.prompts, prompt_rng), included),
        )
        demonstrations = None
        if config.bc_loss_weight:
            if batch.demonstrations is None:
                raise ConfigError(f"bc_loss_weight = {config.bc_loss_weight} needs demonstrations in every batch.")
            asked = self._indicated(batch.demonstrations, batch.demonstration_prompts, bc_prompt_rng)
            shown = replace(batch.demonstrations, observations=asked)
            demonstrations = (shown, draw_flow(shown, model, bc_rng, config.augment))
        # Losses are divided by the steps of all chunks, as in behaviour cloning; this ratio makes it those of the
        # included, and is exactly 1 if all are: dividing by another expression of one number may round differently.
        present = jnp.sum(self._counted(chunks) & included[:, None], dtype=jnp.float32)
        presence = jnp.where(included, count_steps(chunks, config.loss_over) / jnp.maximum(present, 1.0), 0.0)
        return _Drawn(
            chunks=chunks,
            draw=draw_flow(chunks, model, rng, config.augment),
            presence=presence,
            weights=weigh(config, _blank(batch.advantages, included)) * presence,
            demonstrations=demonstrations,
        )

    def _indicated(self, chunks: ChunkBatch, prompts: PromptTokens | None, rng: PRNGKeyArray) -> Observation:
        """Observations under the prompts with the indicator, but for some that keep the plain one (guidance)."""
        seen = chunks.observations
        if self.config.weighting != "guidance":
            return seen
        if prompts is None:
            raise ConfigError("guidance needs prompts with the indicator for every chunk and demonstration.")
        left_out = jax.random.bernoulli(rng, self.config.cond_dropout, (seen.state.shape[0], 1))
        plain = (seen.tokenized_prompt, seen.tokenized_prompt_mask)
        return seen.with_prompt(*jax.tree.map(lambda as_is, asked: jnp.where(left_out, as_is, asked), plain, prompts))

    # --- the update ----------------------------------------------------------------------------------------------

    def update(self, batch: RolloutBatch, rng: PRNGKeyArray) -> tuple["RIPTAgent", Metrics]:
        """One step of gradient descent."""
        parts = self.config.accumulation_steps
        drawn, counts = self._draw(batch, rng), [count / parts for count in self._counts(batch)]
        gradients, metrics = accumulate_gradients(
            lambda parameters, part: self._loss(parameters, part, counts), self.learned.trainable, drawn, parts
        )
        learned, norms = self.learned.apply(gradients)
        return replace(self, step=self.step + 1, learned=learned), metrics | norms

    def validate(self, batch: ChunkBatch, rng: PRNGKeyArray) -> Metrics:
        """Plain flow loss, and how far a sampled chunk is from the recorded one, of the policy that would be exported."""
        draw = draw_flow(batch, self.learned.model, rng, augment=False)
        _, metrics = self._bc_loss(self.learned.average, (batch, draw), count_steps(batch, self.config.loss_over))
        chunks = self.act(batch.observations, rng)
        return metrics | {"actor/action_mse": action_error(chunks, batch, self.real_action_dim)}

    # --- acting, and how far the policy has come -------------------------------------------------------------------

    def act(
        self, observation: Observation | GuidedObservation, rng: Key[Array, "*b"]
    ) -> Float[Array, "b horizon action_dim"]:
        """A chunk of the averaged policy for each observation, as it will be deployed; guided where they are."""
        return act_by(self.policy(), observation, rng, self.config.denoising_steps, self.config.guidance_weight)

    def practise(
        self, observation: Observation | GuidedObservation, rng: Key[Array, "*b"]
    ) -> Float[Array, "b horizon action_dim"]:
        """The same to learn from, drawn as widely as the policy is: what is drawn narrower would make it so."""
        steps, weight = self.config.denoising_steps, self.config.practice_guidance
        return act_by(self.policy(), observation, rng, steps, weight, self.config.practice_solver)

    def velocities(self, batch: ChunkBatch, rng: PRNGKeyArray) -> Float[Array, "b horizon action_dim"]:
        """The flow of the averaged policy at noise and times drawn for the batch."""
        policy, draw = self.policy(), draw_flow(batch, self.learned.model, rng, augment=False)
        time = draw.time[:, None, None]
        x_t = time * draw.noise + (1 - time) * batch.actions
        return policy.velocity(policy.encode(draw.observations), x_t[:, None], draw.time)[:, 0]

    def drift(
        self, before: Float[Array, "b horizon action_dim"], batch: ChunkBatch, rng: PRNGKeyArray
    ) -> Float[Array, ""]:
        """Mean squared distance from the `velocities` of an earlier policy, given the same batch and key.

        Like a divergence of the two policies: it is 0 where they do the same, and grows as their flows part.
        """
        return mean_square(self.velocities(batch, rng) - before, batch.valid, self.real_action_dim)

    def policy(self) -> Pi0:
        """The averaged policy."""
        return self.learned.averaged()

    def parameter_counts(self) -> dict[str, int]:
        """How many parameters learn, and how many do not."""
        return policy_counts(self.learned)


def _blank(tree: Any, included: Bool[Array, " b"]) -> Any:
    """Zeros in the rows that are not included; masks stay as they are, since a policy must see something."""

    def blank(x: Array) -> Array:
        return x if x.dtype == bool else jnp.where(included.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros_like(x))

    return jax.tree.map(blank, tree)
