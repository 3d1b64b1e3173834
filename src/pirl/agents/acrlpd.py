"""ACRLPD: off-policy actor-critic on action chunks, from prior data and then online.

A critic ensemble values chunks of H actions, reading the policy's prefix. Its targets bootstrap H steps ahead, from an
upper expectile of the values of chunks in the data (V), or from the best of N sampled chunks. The policy learns by flow
matching: on chunks of the data weighted by advantage (awr), on the best of the data chunk and N samples of the start
policy (distill), on all chunks with the sign of their advantage in the prompt (condition), or on all chunks (bc). The
prefix of an observation is computed once and shared by flow loss, samples and critics, except that `condition` also
encodes under the indicated prompt, and `distill` also with the start policy's encoder if the policy's own trains.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Bool, Float, Int, Key, PRNGKeyArray

from pirl.agents import common
from pirl.agents.common import CriticState, Loss, Metrics, Params, PolicyState, nan_if_empty
from pirl.agents.config import ACRLPDConfig
from pirl.agents.diagnostics import outcome_auc, pair_auc, pair_chunks, shuffle_images, summarize
from pirl.agents.encoding import Encoded, Inputs, Normalizers, count_terms, draw_inputs, encode_batch
from pirl.data.chunks import ChunkBatch
from pirl.errors import ConfigError
from pirl.models.config import Pi0Config
from pirl.models.critic import CriticEnsemble, CriticParameters, count_parameters
from pirl.models.observation import GuidedObservation, Observation
from pirl.models.pi0 import Pi0, Prefix
from pirl.models.types import Array

# Metrics that an update of the critics alone does not compute.
_ACTOR_METRICS = (
    *("actor/loss", "bc/loss", "actor/ess", "actor/clip_fraction", "actor/temperature"),
    *("actor/advantage_p10", "actor/advantage_p50", "actor/advantage_p90", "actor/chosen_value", "actor/data_chosen"),
    *("critic/sample_spread", "critic/state_spread", "actor/positive", "actor/threshold"),
    *("grad_norm/policy", "param_norm/policy", "lr/policy"),
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ACRLPDAgent:
    """Train state of ACRLPD."""

    step: Any  # int32
    actor: PolicyState
    critic: CriticState
    start_params: Params | None  # distill: parameters of the policy that proposes
    log_beta: Any
    beta_opt_state: Any
    threshold: Any  # condition: float32, the advantage above which a chunk counts as positive
    config: ACRLPDConfig = field(metadata={"static": True})
    real_action_dim: int = field(metadata={"static": True})

    @classmethod
    def create(
        cls, config: ACRLPDConfig, policy: Pi0, rng: PRNGKeyArray, *, real_action_dim: int | None = None
    ) -> "ACRLPDAgent":
        """Start from a policy and fresh critics; `real_action_dim` of its action dimensions are the robot's."""
        model = policy.config
        if config.horizon_length > model.action_horizon:
            raise ConfigError(
                f"agent.horizon_length = {config.horizon_length} exceeds the policy's chunk of {model.action_horizon} "
                "steps (model.action_horizon)."
            )
        if config.actor_mode == "condition" and not model.max_token_len:
            raise ConfigError("agent.actor_mode = condition needs a prompt, but model.max_token_len = 0.")
        actor = PolicyState.create(policy, config.policy_optimizer, config.policy_ema_decay, config.freeze)
        if config.actor_mode == "distill" and config.target == "best_of_n" and encoder_trains(actor.params):
            raise ConfigError(
                "with agent.actor_mode = distill critics read the start policy's encoder, and agent.target = best_of_n "
                "samples from the policy, whose own trains: take --agent.target expectile, or --agent.freeze "
                "vision,language."
            )
        real = real_action_dim or model.action_dim
        log_beta = jnp.log(jnp.float32(config.temperature.beta))
        # Stored in the dtype that the model computes in: exact, and half the memory in bfloat16.
        start = jax.tree.map(lambda leaf: jnp.array(leaf, model.dtype), actor.params)
        return cls(
            step=jnp.zeros((), jnp.int32),
            actor=actor,
            critic=CriticState.create(
                _ensemble(config, model, real).create(rng),
                config.critic_optimizer,
                config.target_update_rate,
                config.critic_ema_decay,
            ),
            start_params=start if config.actor_mode == "distill" else None,
            log_beta=log_beta,
            beta_opt_state=optax.adam(config.temperature.learning_rate).init(log_beta),
            threshold=jnp.zeros(()) if config.actor_mode == "condition" else None,
            config=config,
            real_action_dim=real,
        )

    # --- losses: `enc` is an encoded batch ------------------------------------------------------------------------

    def target(self, enc: Encoded) -> Float[Array, " b"]:
        """Discounted rewards of the chunk plus the discounted value after it."""
        config, batch = self.config, enc.batch
        discounts = config.discount ** jnp.arange(config.horizon_length, dtype=jnp.float32)
        rewards = jnp.sum(discounts * batch.rewards, axis=1)
        if config.target == "expectile":
            values = self._aggregate(self.ensemble.v_values(self.critic.target_params, enc.next_prefix), enc.pair)
        else:  # double Q: chosen by the critics, valued by the target critics
            chunks = self._sample(enc.policy, enc.next_prefix, enc.inputs.next_noise)
            best = self._best(self.critic.params, enc.next_prefix, chunks, enc.pair)
            values = self._values(self.critic.target_params, enc.next_prefix, best[:, None], enc.pair)[:, 0]
        return rewards + jnp.where(batch.next_terminal, 0.0, config.discount**config.horizon_length * values)

    def critic_loss(self, enc: Encoded, params: CriticParameters) -> Loss:
        """Regression of every critic on the target, over usable chunks; with expectile also that of V on the target Q."""
        config, batch, usable = self.config, enc.batch, enc.batch.sequence_mask
        target, count = jax.lax.stop_gradient(self.target(enc)), enc.normalizers["chunks"]
        prefix = enc.critic_prefix if config.critic_trains_encoder else jax.lax.stop_gradient(enc.critic_prefix)
        keys = enc.inputs.keys if enc.critic_dropout else None
        logits = self.ensemble.q(params, prefix, batch.actions[:, None], keys)[:, :, 0]
        values = config.critic.values(logits)

        def total(x: Array) -> Array:
            return jnp.sum(jnp.where(usable, x, 0.0)) / jnp.maximum(count, 1e-6)

        loss = total(config.critic.losses(logits, target[None]))
        if config.target == "expectile":
            q = self._values(self.critic.target_params, prefix, batch.actions[:, None], enc.pair)[:, 0]
            q, v_logits = jax.lax.stop_gradient(q), self.ensemble.v(params, prefix)
            is_above = jax.lax.stop_gradient(q > config.critic.values(v_logits))
            weights = jnp.where(is_above, config.expectile, 1 - config.expectile)
            loss = loss + total(weights * config.critic.losses(v_logits, q[None]))
        means = {
            "critic/loss": loss,
            "critic/q_mean": total(jnp.mean(values, axis=0)),
            "critic/q_spread": total(jnp.std(values, axis=0)),
            "critic/td_error": total(jnp.mean(jnp.abs(values - target), axis=0)),
            "critic/target": total(target),
        }
        return loss, {name: nan_if_empty(count, mean) for name, mean in means.items()} | {
            "critic/q_min": jnp.min(values, axis=0),
            "critic/q_max": jnp.max(values, axis=0),
            "data/valid_chunks": jnp.mean(usable),
        }

    def actor_loss(self, enc: Encoded, data_losses: Float[Array, "b chunk"]) -> Loss:
        """Flow matching towards what the critics prefer; `data_losses` are the flow losses on chunks of the data."""
        config, batch, steps = self.config, enc.batch, jnp.maximum(enc.normalizers["steps"], 1.0)
        if config.actor_mode == "bc":
            loss = jnp.sum(data_losses) / steps
            return loss, {"actor/loss": loss}
        if config.actor_mode == "distill":
            return self._distill_loss(enc)
        values, baseline = self.advantages(enc, batch.actions[:, None])
        advantages, metrics = values[:, 0], {}
        if config.actor_mode == "awr":
            loss = jnp.sum(self.advantage_weights(advantages)[:, None] * data_losses) / steps
        else:
            positive = advantages > self.threshold
            if batch.human is not None:
                positive = positive | batch.human  # corrections are good whatever the critics say
            indicated = replace(enc, prefix=enc.policy.encode(self._indicated(enc, positive)))
            loss = jnp.sum(self._data_losses(indicated)) / steps
            metrics = {"actor/positive": jnp.mean(positive)}
        return loss, {"actor/loss": loss, "actor/advantage": advantages, "critic/state_value": baseline, **metrics}

    def _distill_loss(self, enc: Encoded) -> Loss:
        batch, critic_prefix = enc.batch, jax.lax.stop_gradient(enc.critic_prefix)
        proposals = self._sample(self.actor.build(self.start_params), critic_prefix, enc.inputs.noise)
        candidates = jnp.concatenate([batch.actions[:, None], proposals], axis=1)
        advantages, baseline = self.advantages(enc, candidates)
        # A chunk that the end of its episode cuts short does not compete: its tail is padding.
        whole = jnp.all(batch.valid, axis=1, keepdims=True)
        advantages = jnp.concatenate([jnp.where(whole, advantages[:, :1], -jnp.inf), advantages[:, 1:]], axis=1)
        best, advantage = jnp.argmax(advantages, axis=1), jnp.max(advantages, axis=1)
        # All steps count, since no chosen chunk is cut short.
        losses = enc.flow_losses(_take(candidates, best), jnp.ones_like(batch.valid), self.real_action_dim)
        loss = jnp.mean(self.advantage_weights(advantage)[:, None] * losses)
        return loss, {
            "actor/loss": loss,
            "actor/advantage": advantage,
            "actor/chosen_value": jnp.mean(advantage + baseline),
            "actor/data_chosen": jnp.mean(best == 0),
            "critic/sample_spread": jnp.mean(jnp.std(advantages[:, 1:], axis=1)),
            "critic/state_value": baseline,
        }

    def bc_loss(self, enc: Encoded, data_losses: Float[Array, "b chunk"]) -> Loss:
        """Plain flow matching on chunks of the data, by default on those of successful episodes."""
        steps = enc.normalizers["cloned_steps"]
        loss = jnp.sum(data_losses * self._is_cloned(enc.batch)[:, None]) / jnp.maximum(steps, 1e-6)
        return loss, {"bc/loss": nan_if_empty(steps, loss)}

    def loss(self, enc: Encoded, critic_params: CriticParameters) -> Loss:
        """The weighted sum of critic, actor and BC loss."""
        config = self.config
        critic_loss, metrics = self.critic_loss(enc, critic_params)
        # Computed once for both; with condition the policy learns under other prompts.
        needs_data = config.actor_mode != "condition" or config.bc_loss_weight
        data_losses = self._data_losses(enc) if needs_data else jnp.zeros_like(enc.batch.valid, jnp.float32)
        actor_loss, actor_metrics = self.actor_loss(enc, data_losses)
        bc_loss, bc_metrics = self.bc_loss(enc, data_losses) if config.bc_loss_weight else (0.0, {})
        loss = config.critic_weight * critic_loss + config.actor_weight * actor_loss + config.bc_loss_weight * bc_loss
        return loss, {"loss": loss, **metrics, **actor_metrics, **bc_metrics}

    def advantages(
        self, enc: Encoded, chunks: Float[Array, "b n horizon action_dim"]
    ) -> tuple[Float[Array, "b n"], Float[Array, " b"]]:
        """Values of chunks minus V or, without one, minus the mean value of policy samples; and that baseline."""
        # Not the EMA critics: where the encoder trains, they lag behind what it has become.
        prefix, params = jax.lax.stop_gradient(enc.critic_prefix), self.critic.params
        values = self._values(params, prefix, chunks, enc.pair)
        if self.config.target == "expectile":
            baseline = self._aggregate(self.ensemble.v_values(params, prefix), enc.pair)
        else:
            samples = self._sample(enc.policy, jax.lax.stop_gradient(enc.prefix), enc.inputs.noise)
            baseline = jnp.mean(self._values(params, prefix, samples, enc.pair), axis=1)
        return jax.lax.stop_gradient(values - baseline[:, None]), jax.lax.stop_gradient(baseline)

    def advantage_weights(self, advantages: Float[Array, " b"]) -> Float[Array, " b"]:
        """min(exp(advantage / β), max_weight)."""
        # Clipped before the exponential, whose overflow would turn 0 · ∞ into NaN.
        limit = jnp.log(self.config.temperature.max_weight)
        return jnp.exp(jnp.minimum(advantages / jnp.exp(self.log_beta), limit))

    # --- update, validate, act -----------------------------------------------------------------------------------

    def update(self, batch: ChunkBatch, rng: PRNGKeyArray) -> tuple["ACRLPDAgent", Metrics]:
        """One step of the critics, and of the policy if it is due."""
        config = self.config
        if not config.critic_warmup_steps and config.actor_every == 1:
            return self._update(True, batch, rng)
        since = self.step - config.critic_warmup_steps
        moves = (since >= 0) & ((since + 1) % config.actor_every == 0)
        both, critics = (functools.partial(self._update, moved) for moved in (True, False))
        return jax.lax.cond(moves, both, critics, batch, rng)

    def _update(self, actor_moves: bool, batch: ChunkBatch, rng: PRNGKeyArray) -> tuple["ACRLPDAgent", Metrics]:
        config, parts = self.config, self.config.accumulation_steps
        inputs = self._draw(batch, rng, config.augment)
        normalizers = {name: value / parts for name, value in count_terms(batch, self._is_cloned(batch)).items()}

        def loss(params: Any, data: Any) -> Loss:
            policy_params, critic_params = params
            enc = self._encode(data[0], data[1], normalizers, rng, policy_params)
            if policy_params is not None:
                return self.loss(enc, critic_params)
            value, metrics = self.critic_loss(enc, critic_params)
            return config.critic_weight * value, metrics | {"loss": config.critic_weight * value}

        params = (self.actor.params if actor_moves else None, self.critic.params)
        (policy_grads, critic_grads), metrics = common.accumulate_gradients(loss, params, (batch, inputs), parts)
        metrics = summarize(metrics, self.config, self.log_beta)
        critic, norms = self.critic.apply_gradients(critic_grads)
        agent, metrics = replace(self, step=self.step + 1, critic=critic), metrics | norms
        if actor_moves:
            actor, norms = self.actor.apply_gradients(policy_grads)
            agent, metrics = replace(agent, actor=actor), metrics | norms
            if config.actor_mode == "condition":
                agent = replace(agent, threshold=0.95 * self.threshold + 0.05 * metrics["actor/threshold"])
            if config.temperature.adaptive and config.actor_mode in ("awr", "distill"):
                # Higher if too few samples count, lower if too many do.
                error = metrics["actor/ess"] - config.temperature.target_ess
                optimizer = optax.adam(config.temperature.learning_rate)
                change, opt_state = optimizer.update(error, self.beta_opt_state)
                log_beta = jnp.clip(self.log_beta + change, -10.0, 10.0)
                agent = replace(agent, log_beta=log_beta, beta_opt_state=opt_state)
        absent = {name: jnp.float32(jnp.nan) for name in _ACTOR_METRICS}
        return agent, absent | {"actor/moves": jnp.float32(actor_moves)} | metrics

    def validate(self, batch: ChunkBatch, rng: PRNGKeyArray) -> Metrics:
        """All losses of the exported policy without augmentation or dropout, and what the critics know."""
        inputs, normalizers = self._draw(batch, rng, augment=False), count_terms(batch, self._is_cloned(batch))
        enc = self._encode(batch, inputs, normalizers, rng, self.actor.ema_params, critic_dropout=False)
        metrics = summarize(self.loss(enc, self.critic.params)[1], self.config, self.log_beta)
        if "bc/loss" not in metrics:
            metrics |= self.bc_loss(enc, self._data_losses(enc))[1]
        samples = self._sample(enc.policy, enc.prefix, inputs.noise)
        metrics["actor/action_mse"] = common.masked_mse(
            samples[:, 0] - batch.actions, batch.valid, self.real_action_dim, normalizers["steps"]
        )
        if "critic/sample_spread" not in metrics:
            values = self._values(self.critic.params, enc.critic_prefix, samples, enc.pair)
            metrics["critic/sample_spread"] = jnp.mean(jnp.std(values, axis=1))
        chunks, counted = pair_chunks(batch, self.config.horizon_length)
        values = self._values(self.critic.ema_params, enc.critic_prefix, chunks, None)
        metrics["critic/pair_auc"] = pair_auc(values, counted)
        metrics["critic/outcome_auc"] = outcome_auc(values[:, 0], batch.success)
        if self.actor.model.cameras:
            prefix = self._critic_encoder(enc.policy).encode(shuffle_images(inputs.flow.observations))
            values = self._values(self.critic.ema_params, prefix, chunks, None)
            metrics["critic/pair_auc_shuffled"] = pair_auc(values, counted)
        return metrics

    def act(
        self, observation: Observation | GuidedObservation, rng: Key[Array, "*b"]
    ) -> Float[Array, "b horizon action_dim"]:
        """The best of N chunks of the EMA policy by the EMA critics, guided if the observations are."""
        policy, model, guide = self.policy(), self.actor.model, None
        if isinstance(observation, GuidedObservation):
            guide = policy.encode(replace(observation.indicated, images=observation.plain.images))
            observation = observation.plain
        count = self.config.num_acting_samples or self.config.num_action_samples
        shape = (count, model.action_horizon, model.action_dim)
        noise, prefix = common.draw_noise(rng, observation.state.shape[0], shape), policy.encode(observation)
        steps, guidance = self.config.denoising_steps, self.config.guidance_weight
        chunks = policy.sample(prefix, noise=noise, num_steps=steps, guide=guide, guidance=guidance)
        if count == 1:
            return chunks[:, 0]
        encoder = self._critic_encoder(policy)
        critic_prefix = prefix if encoder is policy else encoder.encode(observation)
        return self._best(self.critic.ema_params, critic_prefix, chunks, None)

    def value(
        self, observation: Observation, actions: Float[Array, "b horizon action_dim"]
    ) -> Float[Array, "critics b"]:
        """The value of given chunks by each of the EMA critics."""
        prefix = self._critic_encoder(self.policy()).encode(observation)
        return self.ensemble.q_values(self.critic.ema_params, prefix, actions[:, None])[..., 0]

    def policy(self) -> Pi0:
        """The policy to export."""
        return self.actor.ema_policy()

    def parameter_counts(self) -> dict[str, int]:
        """Number of parameters, of trainable ones, and of the critics."""
        return self.actor.parameter_counts() | {"critic": count_parameters(self.critic.params)}

    # --- the losses one by one: gradients flow where parameters are given -----------------------------------------

    def encode(self, batch: ChunkBatch, rng: PRNGKeyArray, params: Params | None = None) -> Encoded:
        """A batch with its random inputs and prefixes."""
        inputs = self._draw(batch, rng, self.config.augment)
        return self._encode(batch, inputs, count_terms(batch, self._is_cloned(batch)), rng, params)

    def compute_critic_loss(
        self, batch: ChunkBatch, rng: PRNGKeyArray, critic_params: CriticParameters | None = None
    ) -> Loss:
        """Regression of every critic on the target, over usable chunks."""
        params = self.critic.params if critic_params is None else critic_params
        loss, metrics = self.critic_loss(self.encode(batch, rng), params)
        return loss, summarize(metrics, self.config, self.log_beta)

    def compute_actor_loss(self, batch: ChunkBatch, rng: PRNGKeyArray, params: Params | None = None) -> Loss:
        """Flow matching towards what the critics prefer."""
        enc = self.encode(batch, rng, params)
        loss, metrics = self.actor_loss(enc, self._data_losses(enc))
        return loss, summarize(metrics, self.config, self.log_beta)

    def compute_bc_loss(self, batch: ChunkBatch, rng: PRNGKeyArray, params: Params | None = None) -> Loss:
        """Plain flow matching on chunks of the data, by default on those of successful episodes."""
        enc = self.encode(batch, rng, params)
        return self.bc_loss(enc, self._data_losses(enc))

    def compute_loss(
        self,
        batch: ChunkBatch,
        rng: PRNGKeyArray,
        params: Params | None = None,
        critic_params: CriticParameters | None = None,
    ) -> Loss:
        """The weighted sum of critic, actor and BC loss."""
        critic_params = self.critic.params if critic_params is None else critic_params
        loss, metrics = self.loss(self.encode(batch, rng, params), critic_params)
        return loss, summarize(metrics, self.config, self.log_beta)

    # --- helpers -------------------------------------------------------------------------------------------------

    @property
    def ensemble(self) -> CriticEnsemble:
        """The critics as functions of their parameters."""
        return _ensemble(self.config, self.actor.model, self.real_action_dim)

    def _draw(self, batch: ChunkBatch, rng: PRNGKeyArray, augment: bool) -> Inputs:
        samples = self.config.num_action_samples
        next_samples = samples if self.config.target == "best_of_n" else 0
        return draw_inputs(batch, self.actor.model, samples, next_samples, rng, augment=augment)

    def _is_cloned(self, batch: ChunkBatch) -> Bool[Array, " b"]:
        if self.config.bc_on == "all":
            return jnp.ones_like(batch.success)
        return batch.success if batch.human is None else batch.success | batch.human

    def _encode(
        self,
        batch: ChunkBatch,
        inputs: Inputs,
        normalizers: Normalizers,
        rng: PRNGKeyArray,
        params: Params | None,
        *,
        critic_dropout: bool = True,
    ) -> Encoded:
        policy, count = self.actor.build(params), self.config.critic.num_critics
        encoder = self._critic_encoder(policy)
        return encode_batch(batch, inputs, normalizers, policy, encoder, count, rng, critic_dropout=critic_dropout)

    def _critic_encoder(self, policy: Pi0) -> Pi0:
        """With distill critics and proposals read the start policy's prefix, if the policy's own encoder trains."""
        if self.start_params is None or not encoder_trains(self.actor.params):
            return policy
        return self.actor.build(self.start_params)

    def _data_losses(self, enc: Encoded) -> Float[Array, "b chunk"]:
        return enc.flow_losses(enc.batch.actions, enc.batch.valid, self.real_action_dim)

    def _indicated(self, enc: Encoded, positive: Bool[Array, " b"]) -> Observation:
        """Observations with the indicator in the prompt, except for a fraction `cond_dropout`."""
        observations, rate = enc.inputs.flow.observations, self.config.cond_dropout
        dropped = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, 1), rate))(enc.inputs.keys)
        plain: Any = (observations.tokenized_prompt, observations.tokenized_prompt_mask)

        def choose(kept: Array, both: Array) -> Array:
            return jnp.where(dropped[:, None], kept, jnp.where(positive[:, None], both[:, 1], both[:, 0]))

        return observations.with_prompt(*jax.tree.map(choose, plain, enc.batch.indicated))

    def _sample(self, policy: Pi0, prefix: Prefix, noise: Array) -> Float[Array, "b n horizon action_dim"]:
        return jax.lax.stop_gradient(policy).sample(prefix, noise=noise, num_steps=self.config.denoising_steps)

    def _values(
        self, params: CriticParameters, prefix: Prefix, chunks: Array, pair: Int[Array, " 2"] | None
    ) -> Float[Array, "b n"]:
        """Aggregated values of the first H steps of n chunks per observation."""
        return self._aggregate(self.ensemble.q_values(params, prefix, chunks), pair)

    def _aggregate(self, values: Float[Array, "critics *b"], pair: Int[Array, " 2"] | None) -> Float[Array, "*b"]:
        return common.aggregate_values(values, self.config.aggregate, self.config.pessimism, pair)

    def _best(
        self, params: CriticParameters, prefix: Prefix, chunks: Array, pair: Int[Array, " 2"] | None
    ) -> Float[Array, "b horizon action_dim"]:
        """The chunk of the highest value for each observation."""
        return _take(chunks, jnp.argmax(self._values(params, prefix, chunks, pair), axis=1))


def encoder_trains(params: Params) -> bool:
    """Whether parameters of vision or language are among these."""
    return any(common.matches_any(path, ("vision", "language")) for path in params)


def _ensemble(config: ACRLPDConfig, model: Pi0Config, action_dim: int) -> CriticEnsemble:
    return CriticEnsemble(config.critic, model, config.horizon_length, action_dim, has_v=config.target == "expectile")


def _take(
    chunks: Float[Array, "b n horizon action_dim"], which: Int[Array, " b"]
) -> Float[Array, "b horizon action_dim"]:
    return jnp.take_along_axis(chunks, which[:, None, None, None], axis=1)[:, 0]
