"""ACRLPD with actor_mode condition: the sign of the critics' advantage stands in the prompt."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learners import (
    KEY,
    REAL,
    STEPS,
    WIDTH,
    H,
    LinearPolicy,
    acrlpd,
    linear_policies,
    linear_policy,
    make_batch,
    update,
)

from critic_reference import q_logits, v_logits
from pirl.agents.acrlpd import ACRLPDAgent
from pirl.agents.config import ACRLPDConfig
from pirl.errors import ConfigError
from pirl.models import GuidedObservation, Observation
from pirl.models.critic import critic_values

PLAIN, NEGATIVE, POSITIVE = 1, 2, 3


class Listener(LinearPolicy):
    """A linear policy whose whole prefix depends on its prompt."""

    def encode(self, observation, rng=None):
        heard = 0.3 * jnp.sum(observation.tokenized_prompt * observation.tokenized_prompt_mask, axis=1, keepdims=True)
        prefix = super().encode(dataclasses.replace(observation, state=observation.state + heard))
        return dataclasses.replace(prefix, state=observation.state)


@pytest.fixture(autouse=True, scope="module")
def _listeners():
    with linear_policies(Listener):
        yield


def tokens(*words):
    return np.array(words, np.int32)[..., None], np.ones((*np.shape(words), 1), bool)


def conditioned(**changes) -> ACRLPDAgent:
    agent = acrlpd(actor_mode="condition", target="expectile", **changes)
    return dataclasses.replace(agent, threshold=jnp.float32(0.1))


def prompted_batch(size=24):
    batch = make_batch(size)
    both = tokens(NEGATIVE, POSITIVE)
    return dataclasses.replace(
        batch,
        observations=batch.observations.with_prompt(*tokens(*[PLAIN] * size)),
        next_observations=batch.next_observations.with_prompt(*tokens(*[PLAIN] * size)),
        indicated=tuple(np.repeat(part[None], size, axis=0) for part in both),
    )


def advantages_of(agent, batch):
    """Q(s, chunk) − V(s), both under the plain prompt."""
    config, critics = agent.config.critic, agent.critic.params
    prefix = agent.actor.build().encode(batch.observations)
    q = np.asarray(critic_values(config, q_logits(critics, config, prefix, batch.actions[:, None, :H, :REAL])))[..., 0]
    v = np.asarray(critic_values(config, v_logits(critics, config, prefix)))
    return q.mean(axis=0) - v.mean(axis=0)


def errors_under(agent, batch, words):
    """Squared errors of the flow, by hand, of chunks whose prompts are these words."""
    flow, learned = agent.encode(batch, KEY).inputs.flow, agent.actor.params
    state = np.asarray(batch.observations.state, np.float64) + 0.3 * words[:, None]
    plan = (state @ np.asarray(learned["eye"], np.float64) @ np.asarray(learned["plan"], np.float64)).reshape(
        -1, STEPS, WIDTH
    )
    noise, t = np.asarray(flow.noise, np.float64), np.asarray(flow.time, np.float64)[:, None, None]
    x_t = t * noise + (1 - t) * batch.actions
    residual = x_t @ np.asarray(learned["mix"], np.float64) + plan * (1 + t) - (noise - batch.actions)
    return np.square(residual[..., :REAL]).mean(axis=-1)


def test_chunks_are_learned_under_the_sign_of_their_advantage():
    agent, batch = conditioned(cond_dropout=0.0), prompted_batch()
    advantages = advantages_of(agent, batch)
    positive = advantages > 0.1
    assert 0 < positive.mean() < 1
    loss, metrics = agent.compute_actor_loss(batch, KEY)
    errors = errors_under(agent, batch, np.where(positive, POSITIVE, NEGATIVE))
    np.testing.assert_allclose(loss, errors[batch.valid].mean(), rtol=1e-3)
    np.testing.assert_allclose(metrics["actor/positive"], positive.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["actor/threshold"], np.quantile(advantages, 0.6), rtol=1e-3, atol=1e-4)


def test_some_chunks_keep_the_plain_prompt():
    agent, batch = conditioned(cond_dropout=0.5), prompted_batch()
    positive = advantages_of(agent, batch) > 0.1
    plain = errors_under(agent, batch, np.full(24, PLAIN)) * batch.valid
    indicated = errors_under(agent, batch, np.where(positive, POSITIVE, NEGATIVE)) * batch.valid
    # Each sample's loss is one or the other: over many keys both come, each about half of the time.
    kept = [
        jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5))(
            agent.encode(batch, key).inputs.keys
        )
        for key in jax.random.split(KEY, 20)
    ]
    assert 0.4 < np.mean(kept) < 0.6
    left_out = np.asarray(
        jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5))(
            agent.encode(batch, KEY).inputs.keys
        )
    )
    expected = np.where(left_out[:, None], plain, indicated).sum() / batch.valid.sum()
    np.testing.assert_allclose(agent.compute_actor_loss(batch, KEY)[0], expected, rtol=1e-3)


def test_the_threshold_follows_the_share_that_is_to_be_positive():
    """With critics that stand still, about as many chunks as asked for are positive in the end."""
    agent = conditioned(positive_fraction=0.25, policy_optimizer=acrlpd().config.policy_optimizer)
    frozen, shares = agent.critic, []
    for number in range(150):
        agent, metrics = update(agent, prompted_batch(24), jax.random.fold_in(KEY, number))
        agent = dataclasses.replace(agent, critic=frozen, actor=dataclasses.replace(agent.actor))
        shares.append(float(metrics["actor/positive"]))
    assert 0.15 < np.mean(shares[-20:]) < 0.35
    assert float(agent.threshold) != pytest.approx(0.1)


def test_cut_into_parts_the_update_is_the_same():
    batch = prompted_batch()
    whole, _ = update(conditioned(), batch, KEY)
    parts, _ = update(conditioned(accumulation_steps=2), batch, KEY)
    for one, other in zip(jax.tree.leaves(whole.actor.params), jax.tree.leaves(parts.actor.params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(whole.threshold, parts.threshold, rtol=1e-5)


@pytest.mark.parametrize(("weight", "words"), [(0.0, (1.0, 0.0)), (1.0, (0.0, 1.0)), (2.0, (-1.0, 2.0))])
def test_acting_is_guided_towards_the_positive_prompt(weight, words):
    """The flow is linear in what it sees, so that guidance mixes the two prompts' words."""
    agent, batch = conditioned(guidance_weight=weight, num_action_samples=1), prompted_batch(8)
    plain = batch.observations
    guided = GuidedObservation(plain, plain.with_prompt(*tokens(*[POSITIVE] * 8)))
    mixed = words[0] * PLAIN + words[1] * POSITIVE
    # As if one prompt said the mixture: a word need not be whole for this policy.
    said = Observation(plain.images, plain.image_masks, plain.state + 0.3 * (mixed - PLAIN), *tokens(*[PLAIN] * 8))
    expected = agent.act(said, KEY)
    np.testing.assert_allclose(agent.act(guided, KEY), expected, rtol=1e-3, atol=1e-4)


def test_a_model_without_a_prompt_cannot_be_conditioned():
    policy = linear_policy(kind=Listener)
    policy.config = dataclasses.replace(policy.config, max_token_len=0)
    with pytest.raises(ConfigError, match="needs a prompt"):
        ACRLPDAgent.create(ACRLPDConfig(horizon_length=H, actor_mode="condition"), policy, KEY)
