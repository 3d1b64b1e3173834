"""Moments in bfloat16 take half the memory, and still learn: rounding neither biases them nor holds them fast."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pirl.agents.config import OptimizerConfig
from pirl.agents.optimizer import make_optimizer, round_stochastically
from pirl.errors import ConfigError
from pirl.training.records import named_leaves
from pirl.training.sharding import make_mesh

STEADY = OptimizerConfig(peak_lr=0.01, schedule="constant", warmup_steps=0, clip_norm=1e9)


def small(config):
    return dataclasses.replace(config, moments_dtype="bfloat16")


def test_both_moments_take_half_and_nothing_else_changes():
    parameters = {"a": jnp.ones((8, 4)), "b": jnp.ones(3)}
    wide, narrow = (named_leaves(make_optimizer(config).init(parameters)) for config in (STEADY, small(STEADY)))
    assert list(wide) == list(narrow)
    moments = [name for name in wide if "/mu/" in name or "/nu/" in name]
    assert len(moments) == 4
    for name, leaf in narrow.items():
        assert leaf.dtype == (jnp.bfloat16 if name in moments else wide[name].dtype)
        assert leaf.nbytes == wide[name].nbytes // (2 if name in moments else 1)
    optimizer = make_optimizer(small(STEADY))
    state = optimizer.init(parameters)
    _, after = jax.eval_shape(optimizer.update, parameters, state, parameters)
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(lambda leaf: leaf.dtype, state)


def test_the_first_update_is_computed_in_float32():
    """Before anything was stored, nothing was rounded."""
    random = np.random.default_rng(0)
    gradients, parameters = ({"a": jnp.asarray(random.normal(size=(64,)), jnp.float32)} for _ in range(2))
    changes = [
        jax.jit(make_optimizer(config).update)(gradients, make_optimizer(config).init(parameters), parameters)[0]["a"]
        for config in (STEADY, small(STEADY))
    ]
    np.testing.assert_array_equal(*changes)


@pytest.mark.parametrize("value", [1.0, 1.001, 0.3, 1e-12, 3.1e-30, 7e5])
def test_rounding_by_chance_is_right_on_average_and_takes_a_neighbour(value):
    x = jnp.full(40_000, value, jnp.float32)
    rounded = np.asarray(round_stochastically(x, jax.random.key(0)).astype(jnp.float32), np.float64)
    below = np.float64(np.asarray(x[:1]).view(np.uint32)[0] >> 16 << 16).astype(np.uint32).view(np.float32)
    step = np.float64((np.uint32(below.view(np.uint32)) + np.uint32(1 << 16)).view(np.float32)) - np.float64(below)
    assert set(rounded) <= {np.float64(below), np.float64(below) + step}
    assert abs(rounded.mean() - np.float64(x[0])) <= 4 * 0.5 * step / np.sqrt(len(rounded))


def test_numbers_that_need_no_rounding_stay():
    x = jnp.asarray([0.0, 1.0, 0.5, 3.0, 2.0**-60], jnp.float32)
    for seed in range(20):
        np.testing.assert_array_equal(round_stochastically(x, jax.random.key(seed)).astype(jnp.float32), x)


def test_chance_does_not_depend_on_the_layout():
    x, key = jnp.asarray(np.random.default_rng(0).normal(size=(16, 24)), jnp.float32), jax.random.key(3)
    sharding = jax.sharding.NamedSharding(make_mesh(8), jax.sharding.PartitionSpec("fsdp"))
    spread = jax.jit(round_stochastically, out_shardings=sharding)(jax.device_put(x, sharding), key)
    np.testing.assert_array_equal(np.asarray(spread), np.asarray(jax.jit(round_stochastically)(x, key)))


@pytest.mark.parametrize("b2", [0.95, 0.999])
def test_the_mean_of_squares_falls_again_when_gradients_vanish(b2):
    """Rounded to the nearest, 0.999 of a number of bfloat16 is that number."""
    stuck = jnp.bfloat16(1.0)
    assert (jnp.float32(stuck) * 0.999).astype(jnp.bfloat16) == stuck
    optimizer, parameters = make_optimizer(dataclasses.replace(small(STEADY), b2=b2)), {"a": jnp.ones(2_000)}
    steps = round(2 / (1 - b2))

    @jax.jit
    def run(state):
        def step(state, _):
            return optimizer.update({"a": jnp.zeros(2_000)}, state, parameters)[1], None

        _, state = optimizer.update({"a": jnp.ones(2_000)}, state, parameters)
        return jax.lax.scan(step, state, length=steps)[0]

    nu = np.asarray(optax.tree_utils.tree_get(run(optimizer.init(parameters)), "nu")["a"], np.float64)
    assert nu.mean() == pytest.approx((1 - b2) * b2**steps, rel=0.03)


@pytest.mark.parametrize("b2", [0.95, 0.999])
def test_a_regression_is_learned_as_well(b2):
    random = np.random.default_rng(1)
    inputs = jnp.asarray(random.normal(size=(256, 16)), jnp.float32)
    targets = inputs @ jnp.asarray(random.normal(size=(16, 4)), jnp.float32) + 0.1 * random.normal(size=(256, 4))

    def loss(parameters, rows):
        return jnp.mean(jnp.square(inputs[rows] @ parameters["w"] - targets[rows]))

    def final(config):
        optimizer = make_optimizer(config)

        def step(carry, rows):
            parameters, state = carry
            changes, state = optimizer.update(jax.grad(loss)(parameters, rows), state, parameters)
            return (optax.apply_updates(parameters, changes), state), None

        begun = {"w": jnp.zeros((16, 4))}
        rows = jnp.asarray(random.integers(0, 256, (800, 32)))
        (parameters, _), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, rows))((begun, optimizer.init(begun)))
        return float(loss(parameters, jnp.arange(256)))

    random = np.random.default_rng(2)
    wide = final(dataclasses.replace(STEADY, b2=b2))
    random = np.random.default_rng(2)
    narrow = final(dataclasses.replace(small(STEADY), b2=b2))
    assert wide < 0.02
    assert narrow == pytest.approx(wide, rel=0.1)


@pytest.mark.usefixtures("unchecked_signatures")
def test_another_dtype_is_refused():
    with pytest.raises(ConfigError, match="moments_dtype"):
        OptimizerConfig(moments_dtype="float16")
