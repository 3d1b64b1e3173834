"""ACRLPD: off-policy actor-critic on action chunks, from prior data and then online.

A critic ensemble values chunks of H actions, reading the policy's prefix. Its targets bootstrap H steps ahead, from an
upper expectile of the values of chunks in the data (V), or from the best of N sampled chunks. The policy learns by flow
matching: on chunks of the data weighted by advantage (awr), on the best of the data chunk and N samples of the start
policy (distill), on all chunks with the sign of their advantage in the prompt (condition), or on all chunks (bc). Each
observation is encoded once; `condition` encodes also under the indicated prompt, `distill` also with the start policy.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Bool, Float, Int, Key, PRNGKeyArray

from pirl.agents import common, diagnostics
from pirl.agents.common import Chunk, CriticState, FlowInputs, Loss, Metrics, Params, PolicyState
from pirl.agents.config import ACRLPDConfig
from pirl.agents.diagnostics import summarize
from pirl.data.chunks import ChunkBatch
from pirl.errors import ConfigError
from pirl.models.critic import CriticEnsemble, CriticParameters, critic_losses, critic_values
from pirl.models.observation import GuidedObservation, Observation, preprocess
from pirl.models.pi0 import Pi0, Prefix, count_parameters
from pirl.models.types import Array

Chunks = Float[Array, "b n horizon action_dim"]
Pair = Int[Array, " 2"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Inputs:
    """The random inputs of an update, drawn for the whole batch: splitting it changes nothing."""

    flow: FlowInputs
    next_observations: Observation
    noise: Chunks  # of chunks sampled now
    next_noise: Float[Array, "b m horizon action_dim"]  # of chunks sampled H steps later
    keys: Key[Array, " b"]  # for dropout


@dataclass(frozen=True)
class Encoded:
    """A batch with its prefixes: what the losses share."""

    batch: ChunkBatch
    inputs: Inputs
    normalizers: dict[str, Array]  # numbers of usable chunks, real steps and cloned steps
    policy: Pi0  # carries gradients where parameters were given
    prefix: Prefix  # the policy's
    critic_prefix: Prefix  # the critics'; the same unless their encoder is another
    next_prefix: Prefix  # the critics', H steps later
    pair: Pair  # critics of subset_min
    dropout: bool
    real_action_dim: int

    def flow_loss(
        self, actions: Float[Array, "b chunk action_dim"], valid: Bool[Array, "b chunk"]
    ) -> Float[Array, "b chunk"]:
        """The flow loss of each step; 0 where it is not valid."""
        noise, time = self.inputs.flow.noise, self.inputs.flow.time
        return self.policy.flow_loss(
            self.prefix, actions, noise=noise, time=time, valid=valid, real_action_dim=self.real_action_dim
        )

    @functools.cached_property
    def data_loss(self) -> Float[Array, "b chunk"]:
        """The flow loss of each step of the chunks in the data, which actor and BC loss weight differently."""
        return self.flow_loss(self.batch.actions, self.batch.valid)


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
    ensemble: CriticEnsemble = field(metadata={"static": True})
    real_action_dim: int = field(metadata={"static": True})

    @classmethod
    def create(
        cls, config: ACRLPDConfig, policy: Pi0, rng: PRNGKeyArray, *, real_action_dim: int | None = None
    ) -> "ACRLPDAgent":
        """Start from a policy and fresh critics; `real_action_dim` of its action dimensions are the robot's."""
        model = policy.config
        if config.horizon_length > model.action_horizon:
            raise ConfigError(f"agent.horizon_length = {config.horizon_length} exceeds {model.action_horizon = }.")
        if config.actor_mode == "condition" and not model.max_token_len:
            raise ConfigError("agent.actor_mode = condition needs a prompt, but model.max_token_len = 0.")
        actor = PolicyState.create(policy, config.policy_optimizer, config.policy_ema_decay, config.freeze)
        if config.actor_mode == "distill" and config.target == "best_of_n" and common.encoder_trains(actor.params):
            raise ConfigError(
                "agent.actor_mode = distill reads the start policy's encoder, agent.target = best_of_n the policy's own, "
                "which trains: take --agent.target expectile, or --agent.freeze vision,language."
            )
        real, has_v = real_action_dim or model.action_dim, config.target == "expectile"
        ensemble = CriticEnsemble(config.critic, model, config.horizon_length, real, has_v)
        rates = (config.target_update_rate, config.critic_ema_decay)
        log_beta = jnp.log(jnp.float32(config.temperature.beta))
        # Stored in the dtype that the model computes in: exact, and half the memory in bfloat16.
        start = jax.tree.map(lambda leaf: jnp.array(leaf, model.dtype), actor.params)
        return cls(
            step=jnp.zeros((), jnp.int32),
            actor=actor,
            critic=CriticState.create(ensemble.create(rng), config.critic_optimizer, *rates),
            start_params=start if config.actor_mode == "distill" else None,
            log_beta=log_beta,
            beta_opt_state=optax.adam(config.temperature.learning_rate).init(log_beta),
            threshold=jnp.zeros(()) if config.actor_mode == "condition" else None,
            config=config,
            ensemble=ensemble,
            real_action_dim=real,
        )

    # --- losses: `enc` is an encoded batch ------------------------------------------------------------------------

    def target(self, enc: Encoded) -> Float[Array, " b"]:
        """Discounted rewards of the chunk plus the discounted value after it, at least the return of the data."""
        config, batch = self.config, enc.batch
        discounts = config.discount ** jnp.arange(config.horizon_length, dtype=jnp.float32)
        rewards = jnp.sum(discounts * batch.rewards, axis=1)
        if config.target == "expectile":
            values = self._aggregate(self.ensemble.v_values(self.critic.target_params, enc.next_prefix), enc.pair)
        else:  # double Q: chosen by the critics, valued by the target critics
            chunks = self._sample(enc.policy, enc.next_prefix, enc.inputs.next_noise)
            best = self._best(self.critic.params, enc.next_prefix, chunks, enc.pair)
            values = self._values(self.critic.target_params, enc.next_prefix, best[:, None], enc.pair)[:, 0]
        target = rewards + jnp.where(batch.next_terminal, 0.0, config.discount**config.horizon_length * values)
        returns = batch.returns if config.mc_lower_bound else None  # −∞ where not known
        return target if returns is None else jnp.maximum(target, returns)

    def critic_loss(self, enc: Encoded, params: CriticParameters) -> Loss:
        """Regression of every critic on the target, over usable chunks; with expectile also that of V on the target Q."""
        config, batch, usable = self.config, enc.batch, enc.batch.sequence_mask
        target, count = jax.lax.stop_gradient(self.target(enc)), enc.normalizers["chunks"]
        prefix = enc.critic_prefix if config.critic_trains_encoder else jax.lax.stop_gradient(enc.critic_prefix)
        keys = enc.inputs.keys if enc.dropout else None
        logits = self.ensemble.q(params, prefix, batch.actions[:, None], keys)[:, :, 0]
        values = critic_values(config.critic, logits)

        def total(x: Array) -> Array:
            return jnp.sum(jnp.where(usable, x, 0.0)) / jnp.maximum(count, 1e-6)

        loss = total(critic_losses(config.critic, logits, target[None]))
        if config.target == "expectile":
            q = self._values(self.critic.target_params, prefix, batch.actions[:, None], enc.pair)[:, 0]
            q, v_logits = jax.lax.stop_gradient(q), self.ensemble.v(params, prefix)
            is_above = jax.lax.stop_gradient(q > critic_values(config.critic, v_logits))
            weights = jnp.where(is_above, config.expectile, 1 - config.expectile)
            loss = loss + total(weights * critic_losses(config.critic, v_logits, q[None]))
        return loss, diagnostics.critic_metrics(loss, values, target, usable, count)

    def actor_loss(self, enc: Encoded) -> Loss:
        """Flow matching towards what the critics prefer."""
        mode, steps = self.config.actor_mode, jnp.maximum(enc.normalizers["steps"], 1.0)
        if mode == "distill":
            return self._distill_loss(enc)
        if mode == "bc":
            loss = jnp.sum(enc.data_loss) / steps
            return loss, {"actor/loss": loss}
        values, baseline = self.advantages(enc, enc.batch.actions[:, None])
        advantages, metrics = values[:, 0], {}
        if mode == "awr":
            loss = jnp.sum(self.advantage_weights(advantages)[:, None] * enc.data_loss) / steps
        else:  # condition
            positive = advantages > self.threshold
            if enc.batch.human is not None:
                positive = positive | enc.batch.human  # corrections are good whatever the critics say
            indicated = replace(enc, prefix=enc.policy.encode(self._indicated(enc, positive)))
            loss = jnp.sum(indicated.data_loss) / steps
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
        chosen = jnp.take_along_axis(candidates, best[:, None, None, None], axis=1)[:, 0]
        # All steps count, since no chosen chunk is cut short.
        losses = enc.flow_loss(chosen, jnp.ones_like(batch.valid))
        loss = jnp.mean(self.advantage_weights(advantage)[:, None] * losses)
        return loss, {
            "actor/loss": loss,
            "actor/advantage": advantage,
            "actor/chosen_value": jnp.mean(advantage + baseline),
            "actor/data_chosen": jnp.mean(best == 0),
            "critic/sample_spread": jnp.mean(jnp.std(advantages[:, 1:], axis=1)),
            "critic/state_value": baseline,
        }

    def bc_loss(self, enc: Encoded) -> Loss:
        """Plain flow matching on chunks of the data, by default on those of successful episodes."""
        steps = enc.normalizers["cloned_steps"]
        loss = jnp.sum(enc.data_loss * self._is_cloned(enc.batch)[:, None]) / jnp.maximum(steps, 1e-6)
        return loss, {"bc/loss": common.nan_if_empty(steps, loss)}

    def loss(self, enc: Encoded, critic_params: CriticParameters) -> Loss:
        """The weighted sum of critic, actor and BC loss."""
        config = self.config
        critic_loss, metrics = self.critic_loss(enc, critic_params)
        actor_loss, actor_metrics = self.actor_loss(enc)
        bc_loss, bc_metrics = self.bc_loss(enc) if config.bc_loss_weight else (0.0, {})
        loss = config.critic_weight * critic_loss + config.actor_weight * actor_loss + config.bc_loss_weight * bc_loss
        return loss, {"loss": loss, **metrics, **actor_metrics, **bc_metrics}

    def advantages(self, enc: Encoded, chunks: Chunks) -> tuple[Float[Array, "b n"], Float[Array, " b"]]:
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

    # --- the losses by themselves: gradients flow where parameters are given --------------------------------------

    def compute_critic_loss(self, batch: ChunkBatch, rng: PRNGKeyArray, params: CriticParameters | None = None) -> Loss:
        """The critic loss of a batch."""
        return self._summarize(self.critic_loss(self.encode(batch, rng), params or self.critic.params))

    def compute_actor_loss(self, batch: ChunkBatch, rng: PRNGKeyArray, params: Params | None = None) -> Loss:
        """The actor loss of a batch."""
        return self._summarize(self.actor_loss(self.encode(batch, rng, params)))

    def compute_bc_loss(self, batch: ChunkBatch, rng: PRNGKeyArray, params: Params | None = None) -> Loss:
        """The BC loss of a batch."""
        return self.bc_loss(self.encode(batch, rng, params))

    def compute_loss(self, batch: ChunkBatch, rng: PRNGKeyArray, params: Params | None = None) -> Loss:
        """The whole loss of a batch."""
        return self._summarize(self.loss(self.encode(batch, rng, params), self.critic.params))

    # --- update, validate, act -----------------------------------------------------------------------------------

    def update(self, batch: ChunkBatch, rng: PRNGKeyArray) -> tuple["ACRLPDAgent", Metrics]:
        """One step of the critics, and of the policy if it is due."""
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
        inputs = self._draw(batch, rng, config.augment)
        normalizers = {name: value / parts for name, value in self._normalizers(batch).items()}

        def loss(params: Any, data: Any) -> Loss:
            policy_params, critic_params = params
            enc = self._encode(data[0], data[1], normalizers, rng, policy_params)
            if actor_moves:
                return self.loss(enc, critic_params)
            value, metrics = self.critic_loss(enc, critic_params)
            return config.critic_weight * value, metrics | {"loss": config.critic_weight * value}

        params = (self.actor.params if actor_moves else None, self.critic.params)
        (policy_grads, critic_grads), metrics = common.accumulate_gradients(loss, params, (batch, inputs), parts)
        metrics = summarize(metrics, config, self.log_beta)
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
        return agent, diagnostics.NO_ACTOR_METRICS | {"actor/moves": jnp.float32(actor_moves)} | metrics

    def validate(self, batch: ChunkBatch, rng: PRNGKeyArray) -> Metrics:
        """All losses of the exported policy without augmentation or dropout, and what the critics know."""
        enc = self.encode(batch, rng, self.actor.ema_params, training=False)
        metrics = summarize(self.loss(enc, self.critic.params)[1], self.config, self.log_beta)
        if "bc/loss" not in metrics:
            metrics |= self.bc_loss(enc)[1]
        samples = self._sample(enc.policy, enc.prefix, enc.inputs.noise)
        distance = samples[:, 0] - batch.actions
        metrics["actor/action_mse"] = common.masked_mse(distance, batch.valid, self.real_action_dim)
        if "critic/sample_spread" not in metrics:
            values = self._values(self.critic.params, enc.critic_prefix, samples, enc.pair)
            metrics["critic/sample_spread"] = jnp.mean(jnp.std(values, axis=1))
        shuffled = None
        if self.actor.model.cameras:
            observations = diagnostics.shuffle_images(enc.inputs.flow.observations)
            shuffled = self._critic_encoder(enc.policy).encode(observations)

        def value(prefix: Prefix, chunks: Chunks) -> Float[Array, "b n"]:
            return self._values(self.critic.ema_params, prefix, chunks, None)

        return metrics | diagnostics.compare_chunks(
            value, batch, self.config.horizon_length, enc.critic_prefix, shuffled
        )

    def act(self, observation: Observation | GuidedObservation, rng: Key[Array, "*b"]) -> Chunk:
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

    def value(self, observation: Observation, actions: Chunk) -> Float[Array, "critics b"]:
        """The value of given chunks by each of the EMA critics."""
        prefix = self._critic_encoder(self.policy()).encode(observation)
        return self.ensemble.q_values(self.critic.ema_params, prefix, actions[:, None])[..., 0]

    def policy(self) -> Pi0:
        """The policy to export."""
        return self.actor.ema_policy()

    def parameter_counts(self) -> dict[str, int]:
        """Number of parameters, of trainable ones, and of the critics."""
        return self.actor.parameter_counts() | {"critic": count_parameters(self.critic.params)}

    # --- encoding ------------------------------------------------------------------------------------------------

    def encode(
        self, batch: ChunkBatch, rng: PRNGKeyArray, params: Params | None = None, *, training: bool = True
    ) -> Encoded:
        """A batch with its random inputs and prefixes; augmentation and dropout are for training."""
        inputs = self._draw(batch, rng, training and self.config.augment)
        return self._encode(batch, inputs, self._normalizers(batch), rng, params, training)

    def _draw(self, batch: ChunkBatch, rng: PRNGKeyArray, augment: bool) -> Inputs:
        assert batch.next_observations is not None
        model, size, samples = self.actor.model, batch.actions.shape[0], self.config.num_action_samples
        next_samples = samples if self.config.target == "best_of_n" else 0
        next_rng, noise_rng = jax.random.split(jax.random.fold_in(rng, 4))
        noise = common.draw_noise(noise_rng, size, (samples + next_samples, model.action_horizon, model.action_dim))
        return Inputs(
            flow=common.draw_flow_inputs(batch, model, rng, augment),
            next_observations=preprocess(batch.next_observations, model, next_rng if augment else None),
            noise=noise[:, :samples],
            next_noise=noise[:, samples:],
            keys=jax.random.split(jax.random.fold_in(rng, 5), size),
        )

    def _normalizers(self, batch: ChunkBatch) -> dict[str, Float[Array, ""]]:
        return {
            "chunks": jnp.sum(batch.sequence_mask, dtype=jnp.float32),
            "steps": jnp.sum(batch.valid, dtype=jnp.float32),
            "cloned_steps": jnp.sum(batch.valid * self._is_cloned(batch)[:, None], dtype=jnp.float32),
        }

    def _encode(
        self, batch: ChunkBatch, inputs: Inputs, normalizers: Metrics, rng: Any, params: Any, dropout: bool = True
    ) -> Encoded:
        """Encode both observations; gradients flow into the policy's prefix of the present one only."""
        policy = self.actor.build(params)
        encoder = self._critic_encoder(policy)
        prefix, fixed = policy.encode(inputs.flow.observations), jax.lax.stop_gradient(encoder)
        return Encoded(
            batch=batch,
            inputs=inputs,
            normalizers=normalizers,
            policy=policy,
            prefix=prefix,
            critic_prefix=prefix if encoder is policy else fixed.encode(inputs.flow.observations),
            next_prefix=fixed.encode(inputs.next_observations),
            pair=jax.random.permutation(jax.random.fold_in(rng, 3), self.config.critic.num_critics)[:2],
            dropout=dropout,
            real_action_dim=self.real_action_dim,
        )

    def _critic_encoder(self, policy: Pi0) -> Pi0:
        """With distill critics and proposals read the start policy's prefix, if the policy's own encoder trains."""
        if self.start_params is None or not common.encoder_trains(self.actor.params):
            return policy
        return self.actor.build(self.start_params)

    # --- helpers -------------------------------------------------------------------------------------------------

    def _summarize(self, loss: Loss) -> Loss:
        return loss[0], summarize(loss[1], self.config, self.log_beta)

    def _is_cloned(self, batch: ChunkBatch) -> Bool[Array, " b"]:
        if self.config.bc_on == "all":
            return jnp.ones_like(batch.success)
        return batch.success if batch.human is None else batch.success | batch.human

    def _indicated(self, enc: Encoded, positive: Bool[Array, " b"]) -> Observation:
        """Observations with the indicator in the prompt, except for a fraction `cond_dropout`."""
        observations, rate = enc.inputs.flow.observations, self.config.cond_dropout
        dropped = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, 1), rate))(enc.inputs.keys)
        plain: Any = (observations.tokenized_prompt, observations.tokenized_prompt_mask)

        def choose(kept: Array, both: Array) -> Array:
            return jnp.where(dropped[:, None], kept, jnp.where(positive[:, None], both[:, 1], both[:, 0]))

        return observations.with_prompt(*jax.tree.map(choose, plain, enc.batch.indicated))

    def _sample(self, policy: Pi0, prefix: Prefix, noise: Array) -> Chunks:
        return jax.lax.stop_gradient(policy).sample(prefix, noise=noise, num_steps=self.config.denoising_steps)

    def _values(
        self, params: CriticParameters, prefix: Prefix, chunks: Chunks, pair: Pair | None
    ) -> Float[Array, "b n"]:
        """Aggregated values of the first H steps of n chunks per observation."""
        return self._aggregate(self.ensemble.q_values(params, prefix, chunks), pair)

    def _aggregate(self, values: Float[Array, "critics *b"], pair: Pair | None) -> Float[Array, "*b"]:
        return common.aggregate_values(values, self.config.aggregate, self.config.pessimism, pair)

    def _best(self, params: CriticParameters, prefix: Prefix, chunks: Chunks, pair: Pair | None) -> Chunk:
        """The chunk of the highest value for each observation."""
        best = jnp.argmax(self._values(params, prefix, chunks, pair), axis=1)
        return jnp.take_along_axis(chunks, best[:, None, None, None], axis=1)[:, 0]
