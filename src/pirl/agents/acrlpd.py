"""ACRLPD: actor-critic learning on action chunks, from prior data and then online.

A critic ensemble estimates the value of chunks of H actions, reading the policy's own prefix. Its targets bootstrap H
steps ahead, from an upper expectile of the values of chunks in the data, or from the best of N sampled chunks. The
policy learns by flow matching, weighted by advantage, towards chunks that the critics prefer: those in the data (awr), or
the best of these and of N that the policy proposed at the start (distill); or it learns all chunks in the data with the
sign of their advantage in the prompt, and is asked for good ones (condition). An update encodes each observation once;
the flow losses, the samples and the critics share the result. Only condition encodes a second time, under the prompt
with the indicator, which critics must not see.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Key, PRNGKeyArray

from pirl.agents.base import Metrics, draw_noise, unless_empty
from pirl.agents.critics import Aggregate, LearnedCritics, aggregate_values
from pirl.agents.diagnostics import outcome_auc, pair_auc, pair_chunks, shuffle_images
from pirl.agents.encoding import Draw, Encoded, Totals, draw_for, encode_batch
from pirl.agents.learning import (
    LearnedPolicy,
    Parameters,
    accumulate_gradients,
    action_error,
    matches_any,
    policy_counts,
)
from pirl.agents.optimisers import OptimiserConfig
from pirl.agents.temperature import Temperature, TemperatureConfig
from pirl.data.chunks import ChunkBatch
from pirl.errors import ConfigError
from pirl.models.config import Pi0Config
from pirl.models.critic import CriticConfig, CriticEnsemble, CriticParameters, count_parameters
from pirl.models.observation import GuidedObservation, Observation
from pirl.models.pi0 import Pi0, Prefix
from pirl.models.types import Array

# What is not computed by an update that moves the critic alone.
_ACTOR_METRICS = (
    *("actor/loss", "bc/loss", "actor/ess", "actor/clip_fraction", "actor/temperature"),
    *("actor/advantage_p10", "actor/advantage_p50", "actor/advantage_p90", "actor/chosen_value", "actor/data_chosen"),
    *("critic/sample_spread", "critic/state_spread", "actor/positive", "actor/threshold"),
    *("grad_norm/policy", "param_norm/policy", "lr/policy"),
)


@dataclass(frozen=True)
class ACRLPDConfig:
    """ACRLPD: action-chunked RL with prior data, an actor-critic method."""

    horizon_length: int = 10
    """Steps of a chunk that the critics value (H); at most the length of the policy's chunk."""
    discount: float = 0.99
    """Discount per step (γ)."""
    num_action_samples: int = 4
    """Chunks to sample from the policy for a target, for the baseline, and when acting (N)."""
    num_acting_samples: int | None = None
    """Chunks to sample when acting (none: num_action_samples)."""
    denoising_steps: int = 10
    """Euler steps of the flow for each sampled chunk."""
    aggregate: Aggregate = "mean"
    """How the values of the ensemble are combined; subset_min is the minimum of a random pair, lower_bound the mean minus
    pessimism times the standard deviation."""
    pessimism: float = 0.5
    """How far below the mean the lower bound is, in standard deviations of the ensemble."""
    target: Literal["best_of_n", "expectile"] = "best_of_n"
    """What critics expect after a chunk: the value of the best of N sampled chunks, or an upper expectile over the chunks
    in the data, which needs no samples and never asks about chunks that nobody has tried."""
    expectile: float = 0.8
    """The expectile: 0.5 is the mean over the data, 1 the best in it."""
    actor_mode: Literal["awr", "distill", "condition", "bc"] = "awr"
    """Train the policy on chunks in the data weighted by advantage (awr); in each state on the best of that chunk and N
    samples of the start policy, weighted too (distill, with vision and language frozen); on all chunks, with the sign of
    the advantage in the prompt (condition); or on all chunks equally (bc)."""
    positive_fraction: float = 0.4
    """condition: share of the chunks whose advantage counts as positive; the threshold follows the critics."""
    cond_dropout: float = 0.3
    """condition: fraction of chunks trained without the indicator in the prompt."""
    guidance_weight: float = 1.0
    """condition: weight of the indicator when acting; 0 ignores it, 1 follows it (a prompt is all that takes), above 1
    extrapolates."""
    temperature: TemperatureConfig = field(default_factory=TemperatureConfig)
    """Temperature of the weights in actor_mode awr and distill; small against the spread of the advantages."""
    critic_weight: float = 1.0
    """Weight of the critic loss."""
    actor_weight: float = 1.0
    """Weight of the actor loss."""
    bc_loss_weight: float = 0.0
    """Weight of an additional plain flow-matching loss."""
    bc_on: Literal["successes", "all"] = "successes"
    """Chunks that the additional flow-matching loss uses: those of successful episodes and those that a human chose
    throughout (corrections), or all."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic ensemble."""
    critic_trains_encoder: bool = False
    """Let gradients of the critic loss train the policy's encoder."""
    policy_optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    """Optimiser of the policy."""
    critic_optimiser: OptimiserConfig = field(
        default_factory=lambda: OptimiserConfig(
            peak_lr=3e-4, schedule="constant", warmup_steps=0, b2=0.999, weight_decay=0.0
        )
    )
    """Optimiser of the critics."""
    critic_warmup_steps: int = 0
    """Updates that train only the critics, before the policy starts to train."""
    actor_every: int = 1
    """Train the policy in every N-th update only."""
    target_update_rate: float = 0.005
    """Rate at which the target critics follow the critics (τ)."""
    policy_ema_decay: float | None = 0.99
    """Decay of the policy's EMA, which acts and is exported (none: the latest parameters do)."""
    critic_ema_decay: float = 0.99
    """Decay of the critics' EMA, which chooses among samples when acting."""
    freeze: tuple[str, ...] = ()
    """Frozen parts of the policy: vision, language, or regular expressions on parameter paths."""
    augment: bool = True
    """Augment images as OpenPI does: crop, rotate, colour jitter."""
    accumulation_steps: int = 1
    """Gradient accumulation: parts of a batch that are processed one after the other."""

    def policy_updates(self, updates: int) -> int:
        """How many of a run's first updates train the policy as well."""
        return max(0, updates - self.critic_warmup_steps) // self.actor_every

    def __post_init__(self) -> None:
        for name, known in (
            ("aggregate", ("min", "mean", "subset_min", "lower_bound")),
            ("target", ("best_of_n", "expectile")),
            ("actor_mode", ("awr", "distill", "condition", "bc")),
            ("bc_on", ("successes", "all")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} should be one of {', '.join(known)}; it is {getattr(self, name)!r}.")
        for name in ("horizon_length", "num_action_samples", "denoising_steps", "actor_every", "accumulation_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} should be at least 1; it is {getattr(self, name)}.")
        if self.num_acting_samples is not None and self.num_acting_samples < 1:
            raise ConfigError(f"num_acting_samples should be at least 1; it is {self.num_acting_samples}.")
        if not 0 <= self.discount <= 1 or not 0 < self.target_update_rate <= 1:
            raise ConfigError(
                f"discount = {self.discount} should be in [0, 1] and target_update_rate = {self.target_update_rate} "
                "in (0, 1]."
            )
        if not 0 <= self.critic_ema_decay < 1 or not 0 <= (self.policy_ema_decay or 0) < 1:
            raise ConfigError("policy_ema_decay and critic_ema_decay should be in [0, 1).")
        if self.aggregate == "subset_min" and self.critic.num_critics < 2:
            raise ConfigError("subset_min takes the smaller of two critics: critic.num_critics should be at least 2.")
        if min(self.critic_weight, self.actor_weight, self.bc_loss_weight, self.critic_warmup_steps) < 0:
            raise ConfigError("weights of losses and critic_warmup_steps should not be negative.")
        for name in ("expectile", "positive_fraction"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"{name} should be between 0 and 1; it is {getattr(self, name)}.")
        if min(self.pessimism, self.guidance_weight) < 0 or not 0 <= self.cond_dropout < 1:
            raise ConfigError("pessimism and guidance_weight should not be negative, and cond_dropout in [0, 1).")

    @property
    def acting_guidance(self) -> float:
        """Weight of the indicator in the prompt when acting; 0 for a policy that knows none."""
        return self.guidance_weight if self.actor_mode == "condition" else 0.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ACRLPDAgent:
    """Policy and critics on their way."""

    step: Any  # int32; where the tree holds shapes or layouts in the place of arrays, one of these
    learned: LearnedPolicy
    critics: LearnedCritics
    start_params: Parameters | None  # with actor_mode distill: those of the policy that proposes
    temperature: Temperature
    threshold: Any  # float32, with actor_mode condition: the advantage above which a chunk counts as good; else None
    config: ACRLPDConfig = field(metadata={"static": True})
    real_action_dim: int = field(metadata={"static": True})

    @classmethod
    def create(
        cls, config: ACRLPDConfig, policy: Pi0, rng: PRNGKeyArray, *, real_action_dim: int | None = None
    ) -> "ACRLPDAgent":
        """Begin with a policy and fresh critics; `real_action_dim` of its action dimensions are the robot's."""
        model = policy.config
        if config.horizon_length > model.action_horizon:
            raise ConfigError(
                f"horizon_length = {config.horizon_length} is more than the policy plans: {model.action_horizon} steps."
            )
        if config.actor_mode == "condition" and not model.max_token_len:
            raise ConfigError("actor_mode = condition needs a prompt, but model.max_token_len = 0.")
        learned = LearnedPolicy.create(policy, config.policy_optimiser, config.policy_ema_decay, config.freeze)
        sight_learns = any(matches_any(path, ("vision", "language")) for path in learned.trainable)
        if config.actor_mode == "distill" and sight_learns:
            raise ConfigError(
                "actor_mode = distill samples from the start policy, which reads only what its own vision and language "
                "see: freeze them (--agent.freeze vision,language), or take actor_mode = awr."
            )
        real = real_action_dim or model.action_dim
        critics = _ensemble(config, model, real).create(rng)
        return cls(
            step=jnp.zeros((), jnp.int32),
            learned=learned,
            critics=LearnedCritics.create(
                critics, config.critic_optimiser, config.target_update_rate, config.critic_ema_decay
            ),
            start_params=jax.tree.map(jnp.copy, learned.trainable) if config.actor_mode == "distill" else None,
            temperature=Temperature.create(config.temperature),
            threshold=jnp.zeros(()) if config.actor_mode == "condition" else None,
            config=config,
            real_action_dim=real,
        )

    @property
    def ensemble(self) -> CriticEnsemble:
        """The critics as functions of their parameters."""
        return _ensemble(self.config, self.learned.model, self.real_action_dim)

    # --- the losses ----------------------------------------------------------------------------------------------

    def _target(self, seen: Encoded) -> Float[Array, " b"]:
        """Rewards of the chunk, then what the target critics expect after it."""
        config, batch = self.config, seen.batch
        discounts = config.discount ** jnp.arange(config.horizon_length, dtype=jnp.float32)
        rewards = jnp.sum(discounts * batch.rewards, axis=1)
        if config.target == "expectile":
            values = self._aggregate(self.ensemble.v_values(self.critics.target, seen.next_prefix), seen.pair)
        else:  # the best of N chunks: chosen by the critics, valued by their slow copies
            chunks = self._sample(seen.policy, seen.next_prefix, seen.draw.next_noise)
            best = self._best(self.critics.latest, seen.next_prefix, chunks, seen.pair)
            values = self._values(self.critics.target, seen.next_prefix, best[:, None], seen.pair)[:, 0]
        return rewards + jnp.where(batch.next_terminal, 0.0, config.discount**config.horizon_length * values)

    def _critic_loss(self, seen: Encoded, critics: CriticParameters) -> tuple[Float[Array, ""], Metrics]:
        """The loss of every critic against the target, over the chunks that have one; with expectile, that of V too."""
        config, batch, usable = self.config, seen.batch, seen.batch.sequence_mask
        target = jax.lax.stop_gradient(self._target(seen))
        prefix = seen.prefix if config.critic_trains_encoder else jax.lax.stop_gradient(seen.prefix)
        dropout = seen.draw.dropout if seen.drops_units else None
        logits = self.ensemble.q(critics, prefix, batch.actions[:, None], dropout)[:, :, 0]
        values = config.critic.values(logits)

        def total(x: Array) -> Array:
            return jnp.sum(jnp.where(usable, x, 0.0)) / jnp.maximum(seen.totals.chunks, 1e-6)

        def mean(x: Array) -> Array:
            return unless_empty(seen.totals.chunks, total(x))

        loss = total(config.critic.losses(logits, target[None]))
        if config.target == "expectile":
            loss = loss + total(self._expectile_losses(critics, prefix, batch.actions, seen.pair))
        return loss, {
            "critic/loss": unless_empty(seen.totals.chunks, loss),
            "critic/q_mean": mean(jnp.mean(values, axis=0)),
            "critic/q_min": jnp.min(values, axis=0),
            "critic/q_max": jnp.max(values, axis=0),
            "critic/q_spread": mean(jnp.std(values, axis=0)),
            "critic/td_error": mean(jnp.mean(jnp.abs(values - target), axis=0)),
            "critic/target": mean(target),
            "data/valid_chunks": jnp.mean(usable),
        }

    def _expectile_losses(
        self, critics: CriticParameters, prefix: Prefix, actions: Array, pair: Int[Array, " 2"] | None
    ) -> Float[Array, "critics b"]:
        """Losses of V against the target critics' Q of the chunk in the data, which count more where Q is above V."""
        config = self.config
        q = jax.lax.stop_gradient(self._values(self.critics.target, prefix, actions[:, None], pair)[:, 0])
        logits = self.ensemble.v(critics, prefix)
        above = jax.lax.stop_gradient(q > config.critic.values(logits))
        return jnp.where(above, config.expectile, 1 - config.expectile) * config.critic.losses(logits, q[None])

    def _actor_loss(self, seen: Encoded, shown: Float[Array, "b chunk"]) -> tuple[Float[Array, ""], Metrics]:
        """Flow matching towards what the critics find good, as `actor_mode` says; `shown` are the losses on the data."""
        config, batch, steps = self.config, seen.batch, jnp.maximum(seen.totals.steps, 1.0)
        if config.actor_mode == "bc":
            loss = jnp.sum(shown) / steps
            return loss, {"actor/loss": loss}
        if config.actor_mode == "condition":
            return self._conditioned_loss(seen)
        if config.actor_mode == "awr":
            found, baseline = self._advantages(seen, batch.actions[:, None])
            advantages = found[:, 0]
            loss = jnp.sum(self.temperature.weigh(advantages)[:, None] * shown) / steps
            return loss, {"actor/loss": loss, "actor/advantage": advantages, "critic/state_value": baseline}
        assert self.start_params is not None
        prefix = jax.lax.stop_gradient(seen.prefix)
        proposals = self._sample(self.learned.build(self.start_params), prefix, seen.draw.noise)
        candidates = jnp.concatenate([batch.actions[:, None], proposals], axis=1)
        advantages, baseline = self._advantages(seen, candidates)
        # A chunk that the end of its episode cuts short does not compete: its tail is padding.
        whole = jnp.all(batch.valid, axis=1, keepdims=True)
        advantages = jnp.concatenate([jnp.where(whole, advantages[:, :1], -jnp.inf), advantages[:, 1:]], axis=1)
        best, most = jnp.argmax(advantages, axis=1), jnp.max(advantages, axis=1)
        # All steps count: none of the chosen chunks has the end of an episode in it.
        losses = seen.flow_losses(_take(candidates, best), jnp.ones_like(batch.valid), self.real_action_dim)
        loss = jnp.mean(self.temperature.weigh(most)[:, None] * losses)
        return loss, {
            "actor/loss": loss,
            "actor/advantage": most,
            "actor/chosen_value": jnp.mean(most + baseline),
            "actor/data_chosen": jnp.mean(best == 0),
            "critic/sample_spread": jnp.mean(jnp.std(advantages[:, 1:], axis=1)),
            "critic/state_value": baseline,
        }

    def _advantages(
        self, seen: Encoded, chunks: Float[Array, "b n horizon action_dim"]
    ) -> tuple[Float[Array, "b n"], Float[Array, " b"]]:
        """By how much chunks are better than V or, where there is none, than samples of the policy; and what they are
        compared with."""
        # Not the EMA critics: where the encoder learns, they have yet to learn what it has become, and misread it.
        prefix, critics = jax.lax.stop_gradient(seen.prefix), self.critics.latest
        values = self._values(critics, prefix, chunks, seen.pair)
        if self.config.target == "expectile":
            baseline = self._aggregate(self.ensemble.v_values(critics, prefix), seen.pair)
        else:
            samples = self._sample(seen.policy, prefix, seen.draw.noise)
            baseline = jnp.mean(self._values(critics, prefix, samples, seen.pair), axis=1)
        return jax.lax.stop_gradient(values - baseline[:, None]), jax.lax.stop_gradient(baseline)

    def _conditioned_loss(self, seen: Encoded) -> tuple[Float[Array, ""], Metrics]:
        """Flow matching on the data under prompts that say which chunks are good; some keep the plain one."""
        batch, draw = seen.batch, seen.draw
        found, baseline = self._advantages(seen, batch.actions[:, None])
        advantages = found[:, 0]
        positive, plain = advantages > self.threshold, draw.flow.observations
        if batch.human is not None:
            positive = positive | batch.human  # corrections are good, whatever the critics say so far
        as_is: Any = (plain.tokenized_prompt, plain.tokenized_prompt_mask)
        left_out = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, 1), self.config.cond_dropout))(
            draw.dropout
        )
        tokens, mask = jax.tree.map(
            lambda kept, both: jnp.where(left_out[:, None], kept, jnp.where(positive[:, None], both[:, 1], both[:, 0])),
            as_is,
            batch.indicated,
        )
        under = replace(seen, prefix=seen.policy.encode(plain.with_prompt(tokens, mask)))
        loss = jnp.sum(self._shown_losses(under)) / jnp.maximum(seen.totals.steps, 1.0)
        return loss, {
            "actor/loss": loss,
            "actor/advantage": advantages,
            "actor/positive": jnp.mean(positive),
            "critic/state_value": baseline,
        }

    def _bc_loss(self, seen: Encoded, shown: Float[Array, "b chunk"]) -> tuple[Float[Array, ""], Metrics]:
        """Plain flow matching on chunks of the data, by default on those of successful episodes."""
        steps = seen.totals.cloned_steps
        loss = jnp.sum(shown * self._cloned(seen.batch)[:, None]) / jnp.maximum(steps, 1e-6)
        return loss, {"bc/loss": unless_empty(steps, loss)}

    def _shown_losses(self, seen: Encoded) -> Float[Array, "b chunk"]:
        """What each step of the chunks in the data adds to the flow loss."""
        return seen.flow_losses(seen.batch.actions, seen.batch.valid, self.real_action_dim)

    def _loss(self, seen: Encoded, critics: CriticParameters) -> tuple[Float[Array, ""], Metrics]:
        """The weighted sum of the three."""
        config = self.config
        critic_loss, critic_metrics = self._critic_loss(seen, critics)
        # Once, for both; conditioned, the policy learns under other prompts.
        plain = config.actor_mode != "condition" or config.bc_loss_weight
        shown = self._shown_losses(seen) if plain else jnp.zeros_like(seen.batch.valid, jnp.float32)
        actor_loss, actor_metrics = self._actor_loss(seen, shown)
        bc_loss, bc_metrics = self._bc_loss(seen, shown) if config.bc_loss_weight else (0.0, {})
        loss = config.critic_weight * critic_loss + config.actor_weight * actor_loss + config.bc_loss_weight * bc_loss
        return loss, {"loss": loss, **critic_metrics, **actor_metrics, **bc_metrics}

    def _summarise(self, metrics: Metrics) -> Metrics:
        """What is known of every sample, said of the whole batch: a part of it may be too small to say."""
        summary = dict(metrics)
        if "critic/q_min" in metrics:
            summary |= {
                "critic/q_min": jnp.min(metrics["critic/q_min"]),
                "critic/q_max": jnp.max(metrics["critic/q_max"]),
            }
        if "actor/advantage" in metrics:
            advantages = summary.pop("actor/advantage")
            p10, p50, p90 = jnp.quantile(advantages, jnp.array([0.1, 0.5, 0.9]))
            summary |= {"actor/advantage_p10": p10, "actor/advantage_p50": p50, "actor/advantage_p90": p90}
            summary["critic/state_spread"] = jnp.std(summary.pop("critic/state_value"))
            if self.config.actor_mode in ("awr", "distill"):
                summary |= self.temperature.describe(advantages)
            if self.config.actor_mode == "condition":
                summary["actor/threshold"] = jnp.quantile(advantages, 1 - self.config.positive_fraction)
        return summary

    # --- the update ----------------------------------------------------------------------------------------------

    def update(self, batch: ChunkBatch, rng: PRNGKeyArray) -> tuple["ACRLPDAgent", Metrics]:
        """One step of the critics, and of the policy if it is its turn."""
        config = self.config
        if not config.critic_warmup_steps and config.actor_every == 1:
            return self._update(True, batch, rng)
        since = self.step - config.critic_warmup_steps
        moves = (since >= 0) & ((since + 1) % config.actor_every == 0)
        return jax.lax.cond(
            moves, functools.partial(self._update, True), functools.partial(self._update, False), batch, rng
        )

    def _update(self, actor_moves: bool, batch: ChunkBatch, rng: PRNGKeyArray) -> tuple["ACRLPDAgent", Metrics]:
        config, parts = self.config, self.config.accumulation_steps
        draw, totals = self._draw(batch, rng, config.augment), self._totals(batch).divided(parts)

        def loss(parameters: Any, data: Any) -> tuple[Float[Array, ""], Metrics]:
            (policy, critics), (part, chance) = parameters, data
            seen = self._encode(part, chance, totals, rng, policy)
            if policy is not None:
                return self._loss(seen, critics)
            value, metrics = self._critic_loss(seen, critics)
            return config.critic_weight * value, metrics | {"loss": config.critic_weight * value}

        policy = self.learned.trainable if actor_moves else None
        gradients, metrics = accumulate_gradients(loss, (policy, self.critics.latest), (batch, draw), parts)
        policy_gradients, critic_gradients = gradients
        metrics = self._summarise(metrics)
        critics, critic_norms = self.critics.apply(critic_gradients)
        agent, metrics = replace(self, step=self.step + 1, critics=critics), metrics | critic_norms
        if actor_moves:
            learned, policy_norms = self.learned.apply(policy_gradients)
            agent, metrics = replace(agent, learned=learned), metrics | policy_norms
            if config.actor_mode == "condition":
                agent = replace(agent, threshold=0.95 * self.threshold + 0.05 * metrics["actor/threshold"])
            if config.temperature.adaptive and config.actor_mode in ("awr", "distill"):
                agent = replace(agent, temperature=self.temperature.move(metrics["actor/ess"]))
        absent = {name: jnp.float32(jnp.nan) for name in _ACTOR_METRICS}
        return agent, absent | {"actor/moves": jnp.float32(actor_moves)} | metrics

    def validate(self, batch: ChunkBatch, rng: PRNGKeyArray) -> Metrics:
        """All losses of the policy that would be exported, without augmentation or dropout; and what the critics know."""
        draw = self._draw(batch, rng, augment=False)
        seen = self._encode(batch, draw, self._totals(batch), rng, self.learned.average, dropout=False)
        metrics = self._summarise(self._loss(seen, self.critics.latest)[1])
        if "bc/loss" not in metrics:
            metrics |= self._bc_loss(seen, self._shown_losses(seen))[1]
        chunks = self._sample(seen.policy, seen.prefix, draw.noise)
        metrics["actor/action_mse"] = self._action_error(chunks, seen)
        if "critic/sample_spread" not in metrics:
            values = self._values(self.critics.latest, seen.prefix, chunks, seen.pair)
            metrics["critic/sample_spread"] = jnp.mean(jnp.std(values, axis=1))
        return metrics | self._knowledge(seen)

    def _knowledge(self, seen: Encoded) -> Metrics:
        """Whether the averaged critics, which act, know which chunk belongs to an observation, and which succeed."""
        chunks, counted = pair_chunks(seen.batch, self.config.horizon_length)
        values = self._values(self.critics.average, seen.prefix, chunks, None)
        metrics = {
            "critic/pair_auc": pair_auc(values, counted),
            "critic/outcome_auc": outcome_auc(values[:, 0], seen.batch.success),
        }
        if self.learned.model.cameras:
            prefix = seen.policy.encode(shuffle_images(seen.draw.flow.observations))
            shuffled = self._values(self.critics.average, prefix, chunks, None)
            metrics["critic/pair_auc_shuffled"] = pair_auc(shuffled, counted)
        return metrics

    # --- acting --------------------------------------------------------------------------------------------------

    def act(
        self, observation: Observation | GuidedObservation, rng: Key[Array, "*b"]
    ) -> Float[Array, "b horizon action_dim"]:
        """The best of N chunks of the averaged policy in the eyes of the averaged critics; guided where they are."""
        policy, model, guide = self.policy(), self.learned.model, None
        if isinstance(observation, GuidedObservation):
            guide = policy.encode(replace(observation.indicated, images=observation.plain.images))
            observation = observation.plain
        count = self.config.num_acting_samples or self.config.num_action_samples
        noise = draw_noise(rng, observation.state.shape[0], (count, model.action_horizon, model.action_dim))
        prefix = policy.encode(observation)
        chunks = policy.sample(
            prefix,
            noise=noise,
            num_steps=self.config.denoising_steps,
            guide=guide,
            guidance=self.config.guidance_weight,
        )
        return chunks[:, 0] if count == 1 else self._best(self.critics.average, prefix, chunks, None)

    def value(
        self, observation: Observation, actions: Float[Array, "b horizon action_dim"]
    ) -> Float[Array, "critics b"]:
        """What each of the averaged critics thinks of given chunks."""
        prefix = self.policy().encode(observation)
        return self.ensemble.q_values(self.critics.average, prefix, actions[:, None])[..., 0]

    def policy(self) -> Pi0:
        """The averaged policy."""
        return self.learned.averaged()

    def parameter_counts(self) -> dict[str, int]:
        """How many parameters of the policy learn and how many do not, and how many the critics have."""
        return policy_counts(self.learned) | {"critic": count_parameters(self.critics.latest)}

    # --- each loss by itself: gradients flow where parameters are given --------------------------------------------

    def compute_critic_loss(
        self, batch: ChunkBatch, rng: PRNGKeyArray, critics: CriticParameters | None = None
    ) -> tuple[Float[Array, ""], Metrics]:
        """The loss of every critic against the target, over the chunks that have one."""
        loss, metrics = self._critic_loss(self.encode(batch, rng), self.critics.latest if critics is None else critics)
        return loss, self._summarise(metrics)

    def compute_target(self, batch: ChunkBatch, rng: PRNGKeyArray) -> Float[Array, " b"]:
        """What the critics learn: rewards of the chunk, then what the target critics expect after it."""
        return self._target(self.encode(batch, rng))

    def compute_actor_loss(
        self, batch: ChunkBatch, rng: PRNGKeyArray, parameters: Parameters | None = None
    ) -> tuple[Float[Array, ""], Metrics]:
        """Flow matching towards what the critics find good, as `actor_mode` says."""
        seen = self.encode(batch, rng, parameters)
        loss, metrics = self._actor_loss(seen, self._shown_losses(seen))
        return loss, self._summarise(metrics)

    def compute_bc_loss(
        self, batch: ChunkBatch, rng: PRNGKeyArray, parameters: Parameters | None = None
    ) -> tuple[Float[Array, ""], Metrics]:
        """Plain flow matching on chunks of the data, by default on those of successful episodes."""
        seen = self.encode(batch, rng, parameters)
        return self._bc_loss(seen, self._shown_losses(seen))

    def compute_loss(
        self,
        batch: ChunkBatch,
        rng: PRNGKeyArray,
        parameters: Parameters | None = None,
        critics: CriticParameters | None = None,
    ) -> tuple[Float[Array, ""], Metrics]:
        """The weighted sum of the three."""
        seen = self.encode(batch, rng, parameters)
        loss, metrics = self._loss(seen, self.critics.latest if critics is None else critics)
        return loss, self._summarise(metrics)

    def encode(self, batch: ChunkBatch, rng: PRNGKeyArray, parameters: Parameters | None = None) -> Encoded:
        """Both observations of every sample, encoded once; gradients flow into the present one."""
        return self._encode(batch, self._draw(batch, rng, self.config.augment), self._totals(batch), rng, parameters)

    # --- what they are made of -----------------------------------------------------------------------------------

    def _encode(
        self,
        batch: ChunkBatch,
        draw: Draw,
        totals: Totals,
        rng: PRNGKeyArray,
        parameters: Parameters | None,
        *,
        dropout: bool = True,
    ) -> Encoded:
        policy, count = self.learned.build(parameters), self.config.critic.num_critics
        return encode_batch(batch, draw, totals, policy, count, rng, dropout=dropout)

    def _draw(self, batch: ChunkBatch, rng: PRNGKeyArray, augment: bool) -> Draw:
        config = self.config
        later = config.num_action_samples if config.target == "best_of_n" else 0
        return draw_for(batch, self.learned.model, config.num_action_samples, later, rng, augment=augment)

    def _totals(self, batch: ChunkBatch) -> Totals:
        return Totals.of(batch, self._cloned(batch))

    def _cloned(self, batch: ChunkBatch) -> Bool[Array, " b"]:
        if self.config.bc_on == "all":
            return jnp.ones_like(batch.success)
        return batch.success if batch.human is None else batch.success | batch.human

    def _action_error(self, chunks: Float[Array, "b n horizon action_dim"], seen: Encoded) -> Float[Array, ""]:
        return action_error(chunks[:, 0], seen.batch, self.real_action_dim, seen.totals.steps)

    def _sample(self, policy: Pi0, prefix: Prefix, noise: Array) -> Float[Array, "b n horizon action_dim"]:
        return jax.lax.stop_gradient(policy).sample(prefix, noise=noise, num_steps=self.config.denoising_steps)

    def _values(
        self, critics: CriticParameters, prefix: Prefix, chunks: Array, pair: Int[Array, " 2"] | None
    ) -> Float[Array, "b n"]:
        """What the ensemble as a whole thinks of the first H steps of n chunks per observation."""
        return self._aggregate(self.ensemble.q_values(critics, prefix, chunks), pair)

    def _aggregate(self, values: Float[Array, "critics *b"], pair: Int[Array, " 2"] | None) -> Float[Array, "*b"]:
        return aggregate_values(values, self.config.aggregate, pair, self.config.pessimism)

    def _best(
        self, critics: CriticParameters, prefix: Prefix, chunks: Array, pair: Int[Array, " 2"] | None
    ) -> Float[Array, "b horizon action_dim"]:
        """The chunk of the highest value for each observation."""
        return _take(chunks, jnp.argmax(self._values(critics, prefix, chunks, pair), axis=1))


def _ensemble(config: ACRLPDConfig, model: Pi0Config, action_dim: int) -> CriticEnsemble:
    return CriticEnsemble(config.critic, model, config.horizon_length, action_dim, has_v=config.target == "expectile")


def _take(
    chunks: Float[Array, "b n horizon action_dim"], which: Int[Array, " b"]
) -> Float[Array, "b horizon action_dim"]:
    """One of the chunks of each observation."""
    return jnp.take_along_axis(chunks, which[:, None, None, None], axis=1)[:, 0]
