"""The optimizer and its schedules against OpenPI's, moments in bfloat16, and what is frozen by name and by LoRA."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learners import linear_policy

from golden import arrays, content, needs_golden
from pirl.agents.common import PolicyState, check_freeze, matches_any
from pirl.agents.config import OptimizerConfig
from pirl.agents.optimizer import learning_rate, make_optimizer, round_stochastically
from pirl.errors import ConfigError
from pirl.models import expected_parameters, get_model_config
from pirl.training.sharding import make_mesh, named_leaves

STEADY = OptimizerConfig(peak_lr=0.01, schedule="constant", warmup_steps=0, clip_norm=1e9)


@needs_golden
def test_learning_rates_equal_openpi():
    for case in ("cosine_default", "rsqrt_default", "pi05_libero", "short"):
        recorded = content("transforms", "lr_schedules.json")[case]
        fields = dict(recorded["config"])
        schedule = "rsqrt" if "timescale" in fields else "cosine"
        fields |= {"timescale": float(fields.pop("timescale", 1)), "end_lr": fields.pop("decay_lr", 0.0)}
        config = OptimizerConfig(schedule=schedule, **fields)
        ours = jax.vmap(learning_rate(config))(jnp.asarray(recorded["steps"]))
        # Near its end the cosine is a difference of numbers as large as the peak, in float32.
        np.testing.assert_allclose(ours, recorded["lr"], rtol=1e-6, atol=6e-8 * config.peak_lr, err_msg=case)


def test_the_default_schedule_is_openpi_s():
    config = OptimizerConfig()
    assert (config.peak_lr, config.end_lr, config.warmup_steps, config.decay_steps) == (2.5e-5, 2.5e-6, 1000, 30_000)
    assert (config.b1, config.b2, config.eps, config.weight_decay, config.clip_norm) == (0.9, 0.95, 1e-8, 1e-10, 1.0)


def test_a_constant_rate_is_reached_in_equal_steps_and_kept():
    rate = learning_rate(OptimizerConfig(peak_lr=0.4, schedule="constant", warmup_steps=3))
    np.testing.assert_allclose([rate(step) for step in range(6)], [0.1, 0.2, 0.3, 0.4, 0.4, 0.4], rtol=1e-6)
    np.testing.assert_allclose(learning_rate(OptimizerConfig(0.4, "constant", 0))(0), 0.4, rtol=1e-6)


@needs_golden
@pytest.mark.parametrize(("case", "weight_decay", "clip"), [("adamw_default", 1e-10, 1.0), ("adamw_wd", 0.1, 0.5)])
def test_five_updates_equal_openpi(case, weight_decay, clip):
    """Gradients above and below the norm at which they are clipped, through warm-up and cosine."""
    recorded = arrays("transforms", "optimizer.npz")

    def tree(name):
        return {key: jnp.asarray(recorded[f"{case}/{name}/{key}"]) for key in ("a", "b")}

    config = OptimizerConfig(
        0.01, "cosine", warmup_steps=2, decay_steps=8, end_lr=0.001, weight_decay=weight_decay, clip_norm=clip
    )
    optimizer, parameters = make_optimizer(config), tree("p0")
    state = optimizer.init(parameters)
    for step in range(5):
        changes, state = optimizer.update(tree(f"g{step}"), state, parameters)
        parameters = optax.apply_updates(parameters, changes)
        for key, expected in tree(f"p{step + 1}").items():
            np.testing.assert_allclose(parameters[key], expected, rtol=1e-6, atol=1e-7)


def test_gradients_beyond_their_norm_are_scaled_down_together_and_others_are_left_alone():
    """Adam's first moment is a tenth of the gradient that reached it."""
    optimizer, parameters = make_optimizer(OptimizerConfig(clip_norm=1.0)), {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    for size, factor in ((10.0, 0.1), (0.5, 1.0)):
        gradients = {"a": size * jnp.asarray([0.6, 0.0]), "b": size * jnp.asarray([-0.8])}
        _, state = optimizer.update(gradients, optimizer.init(parameters), parameters)
        mean = optax.tree_utils.tree_get(state, "mu")
        for name, gradient in gradients.items():
            np.testing.assert_allclose(mean[name], 0.1 * factor * gradient, rtol=1e-5)


@pytest.mark.usefixtures("unchecked_signatures")
def test_numbers_that_cannot_be_are_refused():
    for wrong in ({"schedule": "linear"}, {"peak_lr": math.nan}, {"b2": 1.0}, {"decay_steps": 1000}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            OptimizerConfig(**wrong)


# --- what is frozen ----------------------------------------------------------------------------------------------------


def test_as_many_parameters_learn_as_in_openpi():
    """From FACTS.md §4, and for the two names from the recorded sizes of the parts of π₀."""
    vision, language = 414_803_696, 2_508_531_712
    for model, freeze, trainable in (
        ("pi0_lora", (), 468_039_440),
        ("pi0_lora_action_expert_only", (), 2_948_701_968),
        ("pi0_base", ("vision",), 3_238_048_528 - vision),
        ("pi0_base", ("vision", "language"), 3_238_048_528 - vision - language),
        ("pi05_base", ("language",), 3_353_433_872 - language),
    ):
        config = get_model_config(model)
        shapes = expected_parameters(config).items()
        learning = [leaf.size for path, leaf in shapes if not (config.is_frozen(path) or matches_any(path, freeze))]
        assert sum(learning) == trainable, (model, freeze)


def test_names_freeze_their_part_and_nothing_of_the_action_expert():
    frozen = {
        name: {path for path in expected_parameters(get_model_config("pi0_base")) if matches_any(path, (name,))}
        for name in ("vision", "language")
    }
    assert {path.split("/")[1] for path in frozen["vision"]} == {"img"}
    assert {path.split("/")[1] for path in frozen["language"]} == {"llm"}
    assert "PaliGemma/llm/embedder/input_embedding" in frozen["language"]
    assert "PaliGemma/llm/final_norm/scale" in frozen["language"]
    assert not any("_1" in path for path in frozen["language"])


def test_what_is_frozen_is_kept_in_bfloat16_apart_from_what_was_handed_in():
    policy = linear_policy()
    learned = PolicyState.create(policy, OptimizerConfig(), 0.9, freeze=("eye",))
    assert set(learned.frozen_params) == {"eye"}
    assert set(learned.params) == set(learned.ema_params) == {"plan", "mix"}
    assert learned.frozen_params["eye"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(learned.frozen_params["eye"], policy.eye.get_value().astype(jnp.bfloat16))
    for leaf in jax.tree.leaves([learned.params, learned.frozen_params]):
        leaf.delete()  # as donating the learner does
    assert np.all(np.isfinite(policy.plan.get_value()))
    assert np.all(np.isfinite(learned.ema_params["plan"]))
    policy.eye.set_value(policy.eye.get_value().astype(jnp.bfloat16))
    PolicyState.create(policy, OptimizerConfig(), None, freeze=("eye",)).frozen_params["eye"].delete()
    assert policy.eye.get_value().shape


def test_a_policy_that_cannot_learn_is_refused():
    with pytest.raises(ConfigError, match="leaves no parameter"):
        PolicyState.create(linear_policy(), OptimizerConfig(), None, freeze=(".*",))


@pytest.mark.parametrize(("wrong", "said"), [("vison", "matches no parameter"), ("PaliGemma/(", "not a regular")])
def test_a_slip_in_freeze_is_named(wrong, said):
    with pytest.raises(ConfigError, match=said) as error:
        check_freeze((wrong,), ["PaliGemma/img/head/bias"])
    assert repr(wrong) in str(error.value)
    check_freeze(("vision",), ["mix"])  # a name may be of a part that the policy does not have


# --- moments in bfloat16: half the memory, neither biased nor stuck ----------------------------------------------------


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


@pytest.mark.parametrize("value", [1.0, 1.001, 3.1e-30])
def test_rounding_by_chance_is_right_on_average_and_takes_a_neighbour(value):
    x = jnp.full(40_000, value, jnp.float32)
    rounded = np.asarray(round_stochastically(x, jax.random.key(0)).astype(jnp.float32), np.float64)
    below = np.float64(np.asarray(x[:1]).view(np.uint32)[0] >> 16 << 16).astype(np.uint32).view(np.float32)
    step = np.float64((np.uint32(below.view(np.uint32)) + np.uint32(1 << 16)).view(np.float32)) - np.float64(below)
    assert set(rounded) <= {np.float64(below), np.float64(below) + step}
    assert abs(rounded.mean() - np.float64(x[0])) <= 4 * 0.5 * step / np.sqrt(len(rounded))


def test_chance_does_not_depend_on_the_layout():
    x, key = jnp.asarray(np.random.default_rng(0).normal(size=(16, 24)), jnp.float32), jax.random.key(3)
    sharding = jax.sharding.NamedSharding(make_mesh(8), jax.sharding.PartitionSpec("fsdp"))
    spread = jax.jit(round_stochastically, out_shardings=sharding)(jax.device_put(x, sharding), key)
    np.testing.assert_array_equal(np.asarray(spread), np.asarray(jax.jit(round_stochastically)(x, key)))


def test_the_mean_of_squares_falls_again_when_gradients_vanish():
    """Rounded to the nearest, 0.999 of a number of bfloat16 is that number."""
    b2 = 0.999
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
