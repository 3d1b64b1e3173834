"""The critic ensemble against the same networks written again in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pirl.errors import ConfigError
from pirl.models.critic import LARGE_CRITICS, TEN_CRITICS, CriticConfig, count_parameters, create_critics, value_chunks

CONFIG = CriticConfig(num_critics=3, hidden_dims=(8, 6))


def inputs(b: int = 4, n: int = 3) -> list[jax.Array]:
    random = np.random.default_rng(0)
    shapes = ((b, 5), (b, 3), (b, n, 2, 2))
    return [jnp.asarray(3 * random.normal(size=shape), jnp.float32) for shape in shapes]


def reference(critic, features, state, chunk) -> float:
    """One critic, one observation, one chunk."""

    def normalise(x):
        return (x - x.mean()) / np.sqrt(x.var() + 1e-6)

    hidden = np.concatenate([normalise(features), state, chunk.ravel()])
    for number in range(len(critic) - 1):
        layer = critic[f"layer_{number}"]
        hidden = hidden @ layer["kernel"] + layer["bias"]
        if "norm_scale" in layer:
            hidden = normalise(hidden) * layer["norm_scale"] + layer["norm_bias"]
        hidden = hidden / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
    last = critic[f"layer_{len(critic) - 1}"]
    return float((hidden @ last["kernel"] + last["bias"])[0])


@pytest.mark.parametrize("layer_norm", [True, False])
def test_every_critic_values_every_chunk_by_itself(layer_norm):
    config = CriticConfig(3, (8, 6), layer_norm)
    random = np.random.default_rng(1)
    fresh = create_critics(config, 8, 4, jax.random.key(0))
    # Away from the zeros and ones of fresh biases and norms.
    critics = jax.tree.map(lambda x: np.asarray(x + 0.3 * random.normal(size=x.shape), np.float32), fresh)
    features, state, chunks = inputs()
    values = value_chunks(critics, features, state, chunks)
    assert values.shape == (3, 4, 3)
    for k, b, n in np.ndindex(values.shape):
        one = jax.tree.map(lambda x, k=k: x[k].astype(np.float64), critics)
        expected = reference(one, *(np.asarray(x, np.float64) for x in (features[b], state[b], chunks[b, n])))
        np.testing.assert_allclose(values[k, b, n], expected, rtol=1e-4, atol=1e-5)


def test_fresh_critics_disagree():
    values = value_chunks(create_critics(CONFIG, 8, 4, jax.random.key(0)), *inputs())
    assert np.ptp(np.asarray(values), axis=0).min() > 1e-3


def test_units_are_dropped_only_with_a_key_and_leave_the_mean_as_it_is():
    """After the last hidden layer the value is linear in its units, so there the mean over masks is exact."""
    critics = create_critics(CriticConfig(2, (8,)), 8, 4, jax.random.key(0))
    features, state, chunks = (jnp.repeat(x[:1], 4000, axis=0) for x in inputs(1, 1))
    plain = np.asarray(value_chunks(critics, features, state, chunks, dropout=0.4))
    keys = jax.random.split(jax.random.key(1), 4000)
    dropped = np.asarray(value_chunks(critics, features, state, chunks, dropout=0.4, keys=keys))
    np.testing.assert_array_equal(plain, value_chunks(critics, features, state, chunks))
    np.testing.assert_array_equal(plain, value_chunks(critics, features, state, chunks, keys=keys))
    error = dropped.std(axis=(1, 2)) / np.sqrt(4000)
    assert np.all(error > 1e-4)
    assert np.all(np.abs(dropped.mean(axis=(1, 2)) - plain[:, 0, 0]) < 4 * error)
    assert not np.array_equal(dropped[0] == dropped[0, 0], dropped[1] == dropped[1, 0])  # each critic its own mask


def test_presets_have_the_sizes_they_are_named_for():
    def count(config):
        critics = jax.eval_shape(lambda: create_critics(config, 2048 + 32, 10 * 14, jax.random.key(0)))
        return count_parameters(critics) / config.num_critics

    assert LARGE_CRITICS.num_critics == 2
    assert count(LARGE_CRITICS) == pytest.approx(20e6, rel=0.02)
    assert TEN_CRITICS.num_critics == 10


@pytest.mark.parametrize("wrong", [{"num_critics": 0}, {"hidden_dims": ()}, {"hidden_dims": (8, 0)}, {"dropout": 1.0}])
def test_ensembles_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError):
        CriticConfig(**wrong)
