"""ACRLPD: actor-critic learning on action chunks, from prior data and then online.

A critic ensemble values chunks of H actions in the policy's own features. Its targets look H steps ahead, where the
best of N chunks of the policy is taken (chosen by the critic, valued by its slow copy). The policy learns by flow
matching on what the critic finds good, and on the successes in the data. An update encodes each observation once: flow
loss, samples and critics all work on that.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, Int, Key, PRNGKeyArray

from pirl.agents.base import Metrics, draw_noise
from pirl.agents.learning import (
    FlowDraw,
    LearnedPolicy,
    Parameters,
    accumulate_gradients,
    action_error,
    draw_flow,
    move_average,
    policy_counts,
)
from pirl.agents.optimisers import OptimiserConfig
from pirl.data.chunks import ChunkBatch
from pirl.errors import ConfigError
from pirl.models.critic import CriticConfig, CriticParameters, count_parameters, create_critics, value_chunks
from pirl.models.observation import Observation, preprocess
from pirl.models.pi0 import Pi0, Prefix
from pirl.models.types import Array

# What is not computed by an update that moves the critic alone.
_ACTOR_METRICS = (
    *("actor/loss", "bc/loss", "actor/ess", "actor/clip_fraction", "actor/temperature", "actor/action_mse"),
    *("actor/advantage_p10", "actor/advantage_p50", "actor/advantage_p90"),
    *("grad_norm/policy", "param_norm/policy", "lr/policy"),
)


@dataclass(frozen=True)
class TemperatureConfig:
    """How sharply advantages weigh chunks: exp(advantage / β)."""

    beta: float = 0.1
    """The temperature β, or where it begins if it adapts."""
    adaptive: bool = False
    """Move β so that the effective sample size of the weights stays at target_ess."""
    target_ess: float = 0.5
    """Effective share of the batch that is wanted."""
    learning_rate: float = 0.01
    """Step size of log β."""
    max_weight: float = 100.0
    """Weights are clipped here."""


@dataclass(frozen=True)
class ACRLPDConfig:
    """The learner and all its numbers."""

    horizon_length: int = 10
    """Steps in the chunk that the critic values (H); at most the policy's own."""
    discount: float = 0.99
    """Discount per step (γ)."""
    num_action_samples: int = 4
    """Chunks drawn from the policy for a target, a baseline, and when acting (N)."""
    num_acting_samples: int | None = None
    """Chunks to choose from when acting, if not as many."""
    denoising_steps: int = 10
    """Euler steps of the flow for each of them."""
    aggregate: Literal["min", "mean", "subset_min"] = "mean"
    """How the ensemble speaks with one voice; subset_min is the smaller of a random pair."""
    actor_mode: Literal["awr", "best_of_n", "bc"] = "awr"
    """Learn from chunks in the data weighted by advantage, from one's own best of N, or from all chunks alike."""
    temperature: TemperatureConfig = field(default_factory=TemperatureConfig)
    """Of the weights in actor_mode awr."""
    critic_weight: float = 1.0
    """Weight of the critic's loss."""
    actor_weight: float = 1.0
    """Weight of the actor's loss."""
    bc_loss_weight: float = 0.0
    """Weight of plain flow matching beside it."""
    bc_on: Literal["successes", "all"] = "successes"
    """Which episodes that is done on."""
    huber_delta: float = 1.0
    """Temporal-difference errors beyond this count linearly."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The ensemble."""
    critic_trains_encoder: bool = False
    """Let the critic's gradients reach the policy's encoder."""
    policy_optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    """How the policy learns."""
    critic_optimiser: OptimiserConfig = field(
        default_factory=lambda: OptimiserConfig(
            peak_lr=3e-4, schedule="constant", warmup_steps=0, b2=0.999, weight_decay=0.0
        )
    )
    """How the critics learn."""
    critic_warmup_steps: int = 0
    """Updates in which only the critics learn, before the policy moves."""
    actor_every: int = 1
    """The policy moves in every so-many-th update."""
    target_update_rate: float = 0.005
    """Share of the critics that enters their slow copy in each update (τ)."""
    policy_ema_decay: float | None = 0.99
    """Decay of the running average of the policy, which is what acts and is exported."""
    critic_ema_decay: float = 0.99
    """Decay of the running average of the critics, which chooses when acting."""
    freeze: tuple[str, ...] = ()
    """Parts of the policy that do not learn: vision, language, or regular expressions on parameter paths."""
    augment: bool = True
    """Augment pictures as OpenPI does: crop, rotate, colours."""
    accumulation_steps: int = 1
    """Parts into which a batch is cut, to go through memory one after the other."""

    def __post_init__(self) -> None:
        for name, known in (
            ("aggregate", ("min", "mean", "subset_min")),
            ("actor_mode", ("awr", "best_of_n", "bc")),
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
        if self.huber_delta <= 0:
            raise ConfigError(f"huber_delta should be positive; it is {self.huber_delta}.")
        temperature = self.temperature
        if min(temperature.beta, temperature.max_weight, temperature.learning_rate) <= 0:
            raise ConfigError(
                f"beta, max_weight and learning_rate of the temperature should be positive: {temperature}."
            )
        if not 0 < temperature.target_ess < 1:
            raise ConfigError(f"temperature.target_ess should be between 0 and 1; it is {temperature.target_ess}.")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Draw:
    """What chance adds to a batch: for the flow loss, and the noise from which N chunks are drawn now and later."""

    flow: FlowDraw
    next_observations: Observation
    noise: Float[Array, "b n horizon action_dim"]
    next_noise: Float[Array, "b n horizon action_dim"]


@dataclass(frozen=True)
class _Totals:
    """Over how much each loss is averaged: of a whole batch, also where only a part of it is looked at."""

    chunks: Array
    steps: Array
    cloned_steps: Array

    def divided(self, parts: int) -> "_Totals":
        return _Totals(self.chunks / parts, self.steps / parts, self.cloned_steps / parts)


@dataclass(frozen=True)
class Encoded:
    """A batch with its observations encoded, once; what the losses share."""

    batch: ChunkBatch
    draw: _Draw
    totals: _Totals
    policy: Pi0  # carries gradients where parameters were given
    prefix: Prefix
    next_prefix: Prefix
    pair: Int[Array, " 2"]  # the critics of subset_min in this update
    dropout_rng: PRNGKeyArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ACRLPDAgent:
    """Policy and critics on their way."""

    step: Any  # int32; where the tree holds shapes or layouts in the place of arrays, one of these
    learned: LearnedPolicy
    critic: CriticParameters
    target_critic: CriticParameters
    average_critic: CriticParameters
    critic_moments: Any
    log_beta: Any
    log_beta_moments: Any
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
        real = real_action_dim or model.action_dim
        seen = model.language.width + model.action_dim
        critic = create_critics(config.critic, seen, config.horizon_length * real, rng)
        log_beta = jnp.log(jnp.float32(config.temperature.beta))
        return cls(
            step=jnp.zeros((), jnp.int32),
            learned=LearnedPolicy.create(policy, config.policy_optimiser, config.policy_ema_decay, config.freeze),
            critic=critic,
            target_critic=jax.tree.map(jnp.copy, critic),
            average_critic=jax.tree.map(jnp.copy, critic),
            critic_moments=config.critic_optimiser.make().init(critic),
            log_beta=log_beta,
            log_beta_moments=optax.adam(config.temperature.learning_rate).init(log_beta),
            config=config,
            real_action_dim=real,
        )

    # --- the losses: gradients flow where parameters are given ---------------------------------------------------

    def compute_critic_loss(
        self,
        batch: ChunkBatch,
        rng: PRNGKeyArray,
        critic: CriticParameters | None = None,
        *,
        encoded: Encoded | None = None,
    ) -> tuple[Float[Array, ""], Metrics]:
        """Huber loss of every critic against the target, over the chunks that have one."""
        encoded = encoded or self.encode(batch, rng)
        config, batch = self.config, encoded.batch
        target = jax.lax.stop_gradient(self.compute_target(encoded))
        prefix = encoded.prefix if config.critic_trains_encoder else jax.lax.stop_gradient(encoded.prefix)
        values = self._values(
            self.critic if critic is None else critic, prefix, batch.actions[:, None], encoded.dropout_rng
        )[..., 0]
        usable = batch.sequence_mask
        errors = jnp.where(usable, optax.huber_loss(values, target[None], delta=config.huber_delta), 0.0)
        loss = jnp.sum(errors) / jnp.maximum(encoded.totals.chunks, 1e-6)

        def mean(x: Array) -> Array:
            return jnp.sum(jnp.where(usable, x, 0.0)) / jnp.maximum(encoded.totals.chunks, 1e-6)

        return loss, {
            "critic/loss": loss,
            "critic/q_mean": mean(jnp.mean(values, axis=0)),
            "critic/q_min": jnp.min(values),
            "critic/q_max": jnp.max(values),
            "critic/q_spread": mean(jnp.std(values, axis=0)),
            "critic/td_error": mean(jnp.mean(jnp.abs(values - target), axis=0)),
            "critic/target": mean(target),
            "data/valid_chunks": jnp.mean(usable),
        }

    def compute_target(self, encoded: Encoded) -> Float[Array, " b"]:
        """Rewards of the chunk, then the best of N chunks: chosen by the critics, valued by their slow copies."""
        config, batch = self.config, encoded.batch
        discounts = config.discount ** jnp.arange(config.horizon_length, dtype=jnp.float32)
        rewards = jnp.sum(discounts * batch.rewards, axis=1)
        chunks = self._sample(encoded.policy, encoded.next_prefix, encoded.draw.next_noise)
        best = self._best(self.critic, encoded.next_prefix, chunks, encoded.pair)
        values = self._aggregate(self._values(self.target_critic, encoded.next_prefix, best[:, None]), encoded.pair)
        later = config.discount**config.horizon_length * values[:, 0]
        return rewards + jnp.where(batch.next_terminal, 0.0, later)

    def compute_actor_loss(
        self,
        batch: ChunkBatch,
        rng: PRNGKeyArray,
        parameters: Parameters | None = None,
        *,
        encoded: Encoded | None = None,
    ) -> tuple[Float[Array, ""], Metrics]:
        """Flow matching towards what the critics find good, as `actor_mode` says."""
        encoded = encoded or self.encode(batch, rng, parameters)
        config, batch, totals = self.config, encoded.batch, encoded.totals
        if config.actor_mode == "bc":
            loss = jnp.sum(self._flow_loss(encoded, batch.actions, batch.valid)) / jnp.maximum(totals.steps, 1.0)
            return loss, {"actor/loss": loss}
        prefix = jax.lax.stop_gradient(encoded.prefix)
        chunks = self._sample(encoded.policy, prefix, encoded.draw.noise)
        metrics = {"actor/action_mse": action_error(chunks[:, 0], batch, self.real_action_dim)}
        if config.actor_mode == "best_of_n":
            best = self._best(self.critic, prefix, chunks, encoded.pair)
            # All steps count: a chunk that was sampled has no end of an episode in it.
            loss = jnp.mean(self._flow_loss(encoded, best, jnp.ones_like(batch.valid)))
            return loss, metrics | {"actor/loss": loss}
        candidates = jnp.concatenate([batch.actions[:, None], chunks], axis=1)
        values = self._aggregate(self._values(self.critic, prefix, candidates), encoded.pair)
        advantages = jax.lax.stop_gradient(values[:, 0] - jnp.mean(values[:, 1:], axis=1))
        beta, most = jnp.exp(self.log_beta), config.temperature.max_weight
        # Clipped before the exponential as well: its overflow would turn 0 · ∞ into NaN.
        weights = jnp.exp(jnp.minimum(advantages / beta, jnp.log(most)))
        errors = self._flow_loss(encoded, batch.actions, batch.valid)
        loss = jnp.sum(weights[:, None] * errors) / jnp.maximum(totals.steps, 1.0)
        p10, p50, p90 = jnp.quantile(advantages, jnp.array([0.1, 0.5, 0.9]))
        return loss, metrics | {
            "actor/loss": loss,
            "actor/advantage_p10": p10,
            "actor/advantage_p50": p50,
            "actor/advantage_p90": p90,
            # Before clipping: only so it rises with β, and an adaptive β finds its way from either side.
            "actor/ess": effective_sample_size(jnp.exp((advantages - jnp.max(advantages)) / beta)),
            "actor/clip_fraction": jnp.mean(advantages / beta >= jnp.log(most)),
            "actor/temperature": beta,
        }

    def compute_bc_loss(
        self,
        batch: ChunkBatch,
        rng: PRNGKeyArray,
        parameters: Parameters | None = None,
        *,
        encoded: Encoded | None = None,
    ) -> tuple[Float[Array, ""], Metrics]:
        """Plain flow matching on chunks of the data, by default on those of successful episodes."""
        encoded = encoded or self.encode(batch, rng, parameters)
        batch = encoded.batch
        errors = self._flow_loss(encoded, batch.actions, batch.valid)
        loss = jnp.sum(errors * self._cloned(batch)[:, None]) / jnp.maximum(encoded.totals.cloned_steps, 1e-6)
        return loss, {"bc/loss": loss}

    def compute_loss(
        self,
        batch: ChunkBatch,
        rng: PRNGKeyArray,
        parameters: Parameters | None = None,
        critic: CriticParameters | None = None,
        *,
        encoded: Encoded | None = None,
    ) -> tuple[Float[Array, ""], Metrics]:
        """The weighted sum of the three."""
        encoded = encoded or self.encode(batch, rng, parameters)
        config = self.config
        critic_loss, critic_metrics = self.compute_critic_loss(batch, rng, critic, encoded=encoded)
        actor_loss, actor_metrics = self.compute_actor_loss(batch, rng, encoded=encoded)
        bc_loss: Any = 0.0
        bc_metrics: Metrics = {}
        if config.bc_loss_weight:
            bc_loss, bc_metrics = self.compute_bc_loss(batch, rng, encoded=encoded)
        loss = config.critic_weight * critic_loss + config.actor_weight * actor_loss + config.bc_loss_weight * bc_loss
        return loss, {"loss": loss, **critic_metrics, **actor_metrics, **bc_metrics}

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
        draw, totals = self._draw(batch, rng), self._totals(batch).divided(parts)

        def loss(parameters: tuple[Parameters | None, CriticParameters], data: Any) -> tuple[Float[Array, ""], Metrics]:
            policy, critic = parameters
            part, chance = data
            encoded = self._encode(part, chance, totals, rng, policy)
            if policy is None:
                value, metrics = self.compute_critic_loss(batch, rng, critic, encoded=encoded)
                return config.critic_weight * value, metrics | {"loss": config.critic_weight * value}
            return self.compute_loss(batch, rng, policy, critic, encoded=encoded)

        learning = (self.learned.trainable if actor_moves else None, self.critic)
        (policy_gradients, critic_gradients), metrics = accumulate_gradients(loss, learning, (batch, draw), parts)
        optimiser, rate = config.critic_optimiser.make(), config.critic_optimiser.learning_rate()
        changes, critic_moments = optimiser.update(critic_gradients, self.critic_moments, self.critic)
        critic: CriticParameters = optax.apply_updates(self.critic, changes)
        agent = replace(
            self,
            step=self.step + 1,
            critic=critic,
            target_critic=move_average(self.target_critic, critic, 1 - config.target_update_rate),
            average_critic=move_average(self.average_critic, critic, config.critic_ema_decay),
            critic_moments=critic_moments,
        )
        metrics |= {
            "grad_norm/critic": optax.tree.norm(critic_gradients),
            "param_norm/critic": optax.tree.norm(critic),
            "lr/critic": jnp.asarray(rate(self.step), jnp.float32),
        }
        if actor_moves:
            learned, norms = self.learned.apply(policy_gradients)
            agent, metrics = replace(agent, learned=learned), metrics | norms
            if config.temperature.adaptive and config.actor_mode == "awr":
                agent = agent._move_temperature(metrics["actor/ess"])
        absent = {name: jnp.float32(jnp.nan) for name in _ACTOR_METRICS}
        return agent, absent | {"actor/moves": jnp.float32(actor_moves)} | metrics

    def _move_temperature(self, ess: Float[Array, ""]) -> "ACRLPDAgent":
        """Towards more even weights if too few samples count, towards sharper ones if too many do."""
        settings = self.config.temperature
        changes, moments = optax.adam(settings.learning_rate).update(ess - settings.target_ess, self.log_beta_moments)
        return replace(self, log_beta=jnp.clip(self.log_beta + changes, -10.0, 10.0), log_beta_moments=moments)

    def validate(self, batch: ChunkBatch, rng: PRNGKeyArray) -> Metrics:
        """All losses, of the policy that would be exported, without augmentation or dropout."""
        certain = replace(self.config, augment=False, critic=replace(self.config.critic, dropout=0.0))
        plain = replace(self, config=certain)
        encoded = plain.encode(batch, rng, self.learned.average)
        _, metrics = plain.compute_loss(batch, rng, encoded=encoded)
        return metrics | plain.compute_bc_loss(batch, rng, encoded=encoded)[1]

    # --- acting --------------------------------------------------------------------------------------------------

    def act(self, observation: Observation, rng: Key[Array, "*b"]) -> Float[Array, "b horizon action_dim"]:
        """The best of N chunks of the averaged policy in the eyes of the averaged critics."""
        policy, model = self.policy(), self.learned.model
        count = self.config.num_acting_samples or self.config.num_action_samples
        noise = draw_noise(rng, observation.state.shape[0], (count, model.action_horizon, model.action_dim))
        prefix = policy.encode(observation)
        chunks = self._sample(policy, prefix, noise)
        return chunks[:, 0] if count == 1 else self._best(self.average_critic, prefix, chunks, None)

    def value(
        self, observation: Observation, actions: Float[Array, "b horizon action_dim"]
    ) -> Float[Array, "critics b"]:
        """What each of the averaged critics thinks of given chunks."""
        return self._values(self.average_critic, self.policy().encode(observation), actions[:, None])[..., 0]

    def policy(self) -> Pi0:
        """The averaged policy."""
        return self.learned.averaged()

    def parameter_counts(self) -> dict[str, int]:
        """How many parameters of the policy learn and how many do not, and how many the critics have."""
        return policy_counts(self.learned) | {"critic": count_parameters(self.critic)}

    # --- what they are made of -----------------------------------------------------------------------------------

    def encode(self, batch: ChunkBatch, rng: PRNGKeyArray, parameters: Parameters | None = None) -> Encoded:
        """Both observations of every sample, encoded once; gradients flow into the present one."""
        return self._encode(batch, self._draw(batch, rng), self._totals(batch), rng, parameters)

    def _encode(
        self, batch: ChunkBatch, draw: _Draw, totals: _Totals, rng: PRNGKeyArray, parameters: Parameters | None
    ) -> Encoded:
        policy = self.learned.build(parameters)
        still = jax.lax.stop_gradient(policy)
        pair_rng, dropout_rng = jax.random.split(jax.random.fold_in(rng, 3))
        return Encoded(
            batch=batch,
            draw=draw,
            totals=totals,
            policy=policy,
            prefix=policy.encode(draw.flow.observations),
            next_prefix=still.encode(draw.next_observations),
            pair=jax.random.permutation(pair_rng, self.config.critic.num_critics)[:2],
            dropout_rng=dropout_rng,
        )

    def _draw(self, batch: ChunkBatch, rng: PRNGKeyArray) -> _Draw:
        config, model, count = self.config, self.learned.model, batch.actions.shape[0]
        samples = config.num_action_samples
        later_rng, noise_rng = jax.random.split(jax.random.fold_in(rng, 4))
        noise = draw_noise(noise_rng, count, (2 * samples, model.action_horizon, model.action_dim))
        return _Draw(
            flow=draw_flow(batch, model, rng, config.augment),
            next_observations=preprocess(batch.next_observations, model, later_rng if config.augment else None),
            noise=noise[:, :samples],
            next_noise=noise[:, samples:],
        )

    def _totals(self, batch: ChunkBatch) -> _Totals:
        return _Totals(
            chunks=jnp.sum(batch.sequence_mask, dtype=jnp.float32),
            steps=jnp.sum(batch.valid, dtype=jnp.float32),
            cloned_steps=jnp.sum(batch.valid * self._cloned(batch)[:, None], dtype=jnp.float32),
        )

    def _cloned(self, batch: ChunkBatch) -> Array:
        return batch.success if self.config.bc_on == "successes" else jnp.ones_like(batch.success)

    def _flow_loss(self, encoded: Encoded, actions: Array, valid: Array) -> Float[Array, "b horizon"]:
        flow = encoded.draw.flow
        return encoded.policy.flow_loss(
            encoded.prefix,
            actions,
            noise=flow.noise,
            time=flow.time,
            valid=valid,
            real_action_dim=self.real_action_dim,
        )

    def _sample(self, policy: Pi0, prefix: Prefix, noise: Array) -> Float[Array, "b n horizon action_dim"]:
        return jax.lax.stop_gradient(policy).sample(prefix, noise=noise, num_steps=self.config.denoising_steps)

    def _values(
        self, critic: CriticParameters, prefix: Prefix, chunks: Array, dropout_rng: PRNGKeyArray | None = None
    ) -> Float[Array, "critics b n"]:
        """What the critics think of the first H steps of n chunks per observation."""
        steps = chunks[:, :, : self.config.horizon_length, : self.real_action_dim]
        return value_chunks(
            critic, prefix.features, prefix.state, steps, dropout=self.config.critic.dropout, rng=dropout_rng
        )

    def _aggregate(self, values: Float[Array, "critics *b"], pair: Int[Array, " 2"] | None) -> Float[Array, "*b"]:
        """One value from the ensemble. Without a pair, subset_min is the mean over all."""
        if self.config.aggregate == "min":
            return jnp.min(values, axis=0)
        if self.config.aggregate == "mean" or pair is None:
            return jnp.mean(values, axis=0)
        return jnp.min(values[pair], axis=0)

    def _best(
        self, critic: CriticParameters, prefix: Prefix, chunks: Array, pair: Int[Array, " 2"] | None
    ) -> Float[Array, "b horizon action_dim"]:
        """The chunk of the highest value for each observation."""
        best = jnp.argmax(self._aggregate(self._values(critic, prefix, chunks), pair), axis=1)
        return jnp.take_along_axis(chunks, best[:, None, None, None], axis=1)[:, 0]


def effective_sample_size(weights: Float[Array, " b"]) -> Float[Array, ""]:
    """The share of samples that would say as much if they counted alike: (Σ w)² / (b · Σ w²)."""
    return jnp.square(jnp.sum(weights)) / jnp.maximum(weights.shape[0] * jnp.sum(jnp.square(weights)), 1e-12)
