"""The critic ensemble against the same networks written again in numpy; its losses against numbers worked out by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from builders import MICRO
from critic_reference import q_logits, v_logits
from pirl.errors import ConfigError
from pirl.models import get_model_config
from pirl.models.config import LARGE_CRITICS, TEN_CRITICS, CriticConfig
from pirl.models.critic import CriticEnsemble, bin_probabilities, critic_losses, critic_values
from pirl.models.gemma import KVCache
from pirl.models.pi0 import Prefix, count_parameters

CONFIG = CriticConfig(num_critics=3, hidden_dims=(8, 6), num_queries=3, query_width=4, num_heads=2)
STEPS, REAL = 2, 2


def make_prefix(batch: int = 4, tokens: int = 5) -> Prefix:
    random = np.random.default_rng(0)
    language = MICRO.language
    shape = (language.depth, batch, tokens, language.num_kv_heads, language.head_dim)
    keys, values = (jnp.asarray(random.normal(size=shape), jnp.float32) for _ in range(2))
    mask = random.random((batch, tokens)) < 0.6
    mask[:, 0] = True
    state = jnp.asarray(random.normal(size=(batch, MICRO.action_dim)), jnp.float32)
    return Prefix(KVCache(keys, values), jnp.asarray(mask), jnp.zeros((batch, language.width)), state)


def make_chunks(batch: int = 4, n: int = 3) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(batch, n, 4, MICRO.action_dim)), jnp.float32)


def ensemble(config: CriticConfig = CONFIG, model=MICRO) -> CriticEnsemble:
    return CriticEnsemble(config, model, STEPS, REAL, has_v=True)


def jittered(params, seed=1):
    """Away from the zeros and ones of fresh biases and norms."""
    random = np.random.default_rng(seed)
    return {name: x + 0.3 * random.normal(size=x.shape).astype(np.float32) for name, x in params.items()}


@pytest.mark.parametrize("changes", [{}, {"loss": "hl_gauss", "num_bins": 5}])
def test_every_critic_values_every_chunk_by_itself(changes):
    """By the first steps and real dimensions of the chunk, the state, and the tokens that are not masked."""
    config = dataclasses.replace(CONFIG, **changes)
    critics = ensemble(config)
    params, prefix, chunks = jittered(critics.create(jax.random.key(0))), make_prefix(), make_chunks()
    expected = q_logits(params, config, prefix, chunks[:, :, :STEPS, :REAL])
    np.testing.assert_allclose(critics.q(params, prefix, chunks), expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(critics.v(params, prefix), v_logits(params, config, prefix), rtol=1e-3, atol=1e-4)


def test_without_a_prefix_critics_see_the_state():
    model = dataclasses.replace(MICRO, cameras=(), max_token_len=0)
    params = ensemble(model=model).create(jax.random.key(0))
    assert not any(name.startswith("readout") for name in params)
    prefix, chunks = make_prefix(), make_chunks()
    empty = dataclasses.replace(
        prefix, cache=KVCache(prefix.cache.keys[:, :, :0], prefix.cache.values[:, :, :0]), mask=prefix.mask[:, :0]
    )
    params = jittered(params)
    expected = q_logits(params, CONFIG, empty, chunks[:, :, :STEPS, :REAL])
    np.testing.assert_allclose(ensemble(model=model).q(params, empty, chunks), expected, rtol=1e-3, atol=1e-4)


def test_fresh_critics_disagree():
    critics = ensemble()
    values = critics.q_values(critics.create(jax.random.key(0)), make_prefix(), make_chunks())
    assert np.ptp(np.asarray(values), axis=0).min() > 1e-3


def test_units_are_dropped_only_with_a_key_and_leave_the_mean_as_it_is():
    """After the last hidden layer the value is linear in its units, so there the mean over masks is exact."""
    config = dataclasses.replace(CONFIG, hidden_dims=(8,), dropout=0.4)
    critics, many = ensemble(config), 4000
    params = critics.create(jax.random.key(0))
    prefix = jax.tree.map(lambda x: jnp.repeat(x[:1], many, axis=0), make_prefix())
    cache = jax.tree.map(lambda x: jnp.repeat(x[:, :1], many, axis=1), make_prefix().cache)
    prefix, chunks = dataclasses.replace(prefix, cache=cache), jnp.repeat(make_chunks(1, 1), many, axis=0)
    plain = np.asarray(critics.q_values(params, prefix, chunks))
    dropped = np.asarray(critics.q(params, prefix, chunks, jax.random.split(jax.random.key(1), many)))[..., 0]
    error = dropped.std(axis=(1, 2)) / np.sqrt(many)
    assert np.all(error > 1e-4)
    assert np.all(np.abs(dropped.mean(axis=(1, 2)) - plain[:, 0, 0]) < 4 * error)
    assert not np.array_equal(dropped[0] == dropped[0, 0], dropped[1] == dropped[1, 0])  # each critic its own mask


# --- how values are expressed ----------------------------------------------------------------------------------------


def test_bce_is_the_cross_entropy_of_the_place_in_the_range():
    config = CriticConfig(loss="bce", value_range=(-10.0, 0.0))
    logits = jnp.asarray([[0.0], [2.0], [-1.0]])
    sigmoid = [0.5, 1 / (1 + math.exp(-2)), 1 / (1 + math.e)]
    np.testing.assert_allclose(critic_values(config, logits), [-10 + 10 * p for p in sigmoid], rtol=1e-5)
    targets = [-7.5, 3.0, -20.0]  # a quarter of the way, and two beyond the ends
    places = [0.25, 1.0, 0.0]
    expected = [-t * math.log(p) - (1 - t) * math.log(1 - p) for t, p in zip(places, sigmoid, strict=True)]
    np.testing.assert_allclose(critic_losses(config, logits, jnp.asarray(targets)), expected, rtol=1e-5)


def test_hl_gauss_smooths_the_target_over_the_bins():
    config = CriticConfig(loss="hl_gauss", value_range=(0.0, 1.0), num_bins=5)  # centers 0, ¼, ½, ¾, 1

    def normal_cdf(x):
        return (1 + math.erf(x / math.sqrt(2))) / 2

    edges = [(-0.125 + 0.25 * i - 0.5) / (0.75 * 0.25) for i in range(6)]
    mass = np.diff([normal_cdf(x) for x in edges])
    expected = mass / mass.sum()
    probabilities = bin_probabilities(config, jnp.asarray([0.5]))[0]
    np.testing.assert_allclose(probabilities, expected, rtol=1e-4)
    logits = jnp.asarray([[0.1, -0.3, 0.7, 0.0, 0.2]])
    log_p = np.asarray(logits[0]) - np.log(np.exp(np.asarray(logits[0])).sum())
    np.testing.assert_allclose(
        critic_losses(config, logits, jnp.asarray([0.5])), [-(expected * log_p).sum()], rtol=1e-4
    )
    np.testing.assert_allclose(critic_values(config, logits), [np.exp(log_p) @ [0, 0.25, 0.5, 0.75, 1]], rtol=1e-5)


@pytest.mark.parametrize("loss", ["bce", "hl_gauss"])
def test_the_best_outputs_for_a_target_stand_for_it(loss):
    """Descent on the loss ends at the target's value, whatever the target within the range."""
    config = CriticConfig(loss=loss, value_range=(-2.0, 3.0), num_bins=51)
    targets = jnp.asarray([-1.5, 0.0, 0.4, 2.5])
    logits = jnp.zeros((4, config.outputs))
    step = jax.jit(lambda x: x - 5.0 * jax.grad(lambda x: critic_losses(config, x, targets).sum())(x))
    for _ in range(400):
        logits = step(logits)
    np.testing.assert_allclose(critic_values(config, logits), targets, atol=0.05)


@pytest.mark.parametrize("loss", ["huber", "hl_gauss"])
def test_asymmetric_weights_find_the_expectile(loss):
    """Of outcomes 0 (three in four) and 1 (one in four) the 0.9-expectile is 0.9·¼ / (0.9·¼ + 0.1·¾) = ¾."""
    config = CriticConfig(loss=loss, huber_delta=10.0, num_bins=51)
    outcomes = jnp.asarray([0.0, 0.0, 0.0, 1.0])

    def total(logits):
        logits = jnp.broadcast_to(logits, (4, config.outputs))
        weights = jax.lax.stop_gradient(jnp.where(outcomes > critic_values(config, logits), 0.9, 0.1))
        return (weights * critic_losses(config, logits, outcomes)).sum()

    logits, step = jnp.zeros((1, config.outputs)), jax.jit(lambda x: x - 0.5 * jax.grad(total)(x))
    for _ in range(600):
        logits = step(logits)
    np.testing.assert_allclose(critic_values(config, logits), [0.75], atol=0.02)


# --- sizes and what cannot be ------------------------------------------------------------------------------------------


def test_presets_have_the_sizes_they_are_named_for():
    def count(config):
        critics = CriticEnsemble(config, get_model_config("pi0_base"), 10, 14, has_v=True)
        return count_parameters(jax.eval_shape(lambda: critics.create(jax.random.key(0)))) / config.num_critics

    assert LARGE_CRITICS.num_critics == 2
    assert count(LARGE_CRITICS) == pytest.approx(20e6, rel=0.1)
    assert TEN_CRITICS.num_critics == 10
    assert count(TEN_CRITICS) < 5e6


@pytest.mark.usefixtures("unchecked_signatures")
def test_ensembles_that_cannot_be_are_refused():
    for wrong in ({"num_critics": 0}, {"hidden_dims": (8, 0)}, {"query_width": 6}, {"value_range": (1.0, 0.0)}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            CriticConfig(**wrong)
