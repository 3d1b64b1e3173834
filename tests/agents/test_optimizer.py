"""The optimizer and its schedules against recordings of OpenPI's; what is frozen, by name and by LoRA."""

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
from pirl.agents.optimizer import learning_rate, make_optimizer
from pirl.errors import ConfigError
from pirl.models import expected_parameters, get_model_config

FLOATS = [field.name for field in dataclasses.fields(OptimizerConfig) if field.type is float]


@needs_golden
@pytest.mark.parametrize("case", ["cosine_default", "rsqrt_default", "pi05_libero", "short"])
def test_learning_rates_equal_openpi(case):
    recorded = content("transforms", "lr_schedules.json")[case]
    fields = dict(recorded["config"])
    schedule = "rsqrt" if "timescale" in fields else "cosine"
    fields |= {"timescale": float(fields.pop("timescale", 1)), "end_lr": fields.pop("decay_lr", 0.0)}
    config = OptimizerConfig(schedule=schedule, **fields)
    ours = jax.vmap(learning_rate(config))(jnp.asarray(recorded["steps"]))
    # Near its end the cosine is a difference of numbers as large as the peak, in float32.
    np.testing.assert_allclose(ours, recorded["lr"], rtol=1e-6, atol=6e-8 * config.peak_lr)


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


def test_the_cosine_rises_to_its_peak_and_comes_down_to_its_end():
    rate = learning_rate(OptimizerConfig(peak_lr=1.0, end_lr=0.1, warmup_steps=4, decay_steps=12))
    expected = [0.2, 0.4, 0.6, 0.8, 1.0, *(0.1 + 0.45 * (1 + math.cos(math.pi * k / 8)) for k in range(1, 9)), 0.1]
    np.testing.assert_allclose([rate(step) for step in range(14)], expected, rtol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"schedule": "linear"},
        {"peak_lr": 0.0},
        {"clip_norm": -1.0},
        {"b2": 1.0},
        {"warmup_steps": -1},
        {"warmup_steps": 10, "decay_steps": 10},
        *({name: value} for name in FLOATS for value in (math.inf, math.nan)),
    ],
)
@pytest.mark.usefixtures("unchecked_signatures")
def test_numbers_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        OptimizerConfig(**wrong)


# Parameters that learn, from FACTS.md §4, and for the two names from the recorded sizes of the parts of π₀.
@pytest.mark.parametrize(
    ("model", "freeze", "trainable"),
    [
        ("pi0_lora", (), 468_039_440),
        ("pi05_lora", (), 466_957_072),
        ("pi0_lora_paligemma_only", (), 757_386_000),
        ("pi0_lora_action_expert_only", (), 2_948_701_968),
        ("pi0_base", (), 3_238_048_528),
        ("pi0_base", ("vision",), 3_238_048_528 - 414_803_696),
        ("pi0_base", ("language",), 3_238_048_528 - 2_508_531_712),
        ("pi0_base", ("vision", "language"), 3_238_048_528 - 414_803_696 - 2_508_531_712),
        ("pi05_base", ("language",), 3_353_433_872 - 2_508_531_712),
    ],
)
def test_as_many_parameters_learn_as_in_openpi(model, freeze, trainable):
    config = get_model_config(model)
    shapes = expected_parameters(config)
    learning = [leaf.size for path, leaf in shapes.items() if not (config.is_frozen(path) or matches_any(path, freeze))]
    assert sum(learning) == trainable


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


def test_bfloat16_parameters_are_not_shared_either():
    policy = linear_policy()
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


def test_a_policy_without_a_tower_may_have_it_frozen():
    check_freeze(("vision",), ["mix"])
