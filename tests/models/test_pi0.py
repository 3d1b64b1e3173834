"""The policy's three verbs against an independent float64 reference of the joint pass, and against each other."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
from builders import (
    MICRO,
    MICRO_LORA,
    MICRO_PI05,
    random_actions,
    random_model,
    random_observation,
    random_observation_dict,
    random_parameters,
)
from pirl.errors import ObservationError
from pirl.models import (
    ExpertConfig,
    Observation,
    Pi0Config,
    create_model,
    get_model_config,
    get_parameters,
)
from pirl.models.pi0 import sample_time

FIXTURES = Path(__file__).parents[1] / "fixtures"


def fused(expert: ExpertConfig) -> ExpertConfig:
    """As many key-value heads as heads: the projections become one weight."""
    return dataclasses.replace(expert, num_kv_heads=expert.num_heads)


VARIANTS = {
    "pi0": MICRO,
    "pi05": MICRO_PI05,
    "lora": MICRO_LORA,
    "fused_qkv_lora": dataclasses.replace(
        MICRO_LORA, language=fused(MICRO_LORA.language), action_expert=fused(MICRO_LORA.action_expert)
    ),
    "no_camera": dataclasses.replace(MICRO, cameras=()),
    "no_prompt": dataclasses.replace(MICRO, max_token_len=0),
    "state_only": dataclasses.replace(MICRO, cameras=(), max_token_len=0),
}


def reference_config(config: Pi0Config) -> reference.ReferenceConfig:
    loras = [expert.attention_lora for expert in (config.language, config.action_expert)]
    return reference.ReferenceConfig(
        pi05=config.pi05,
        action_horizon=config.action_horizon,
        lora_alpha=tuple(None if lora is None else lora.alpha for lora in loras),
        lora_rslora=tuple(lora is not None and lora.rank_stabilized for lora in loras),
    )


def reference_observation(config: Pi0Config) -> dict[str, Any]:
    return {"tokenized_prompt": None, "tokenized_prompt_mask": None} | random_observation_dict(config)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_samples_equal_the_joint_pass(variant):
    config = VARIANTS[variant]
    params, observation, policy = random_parameters(config), random_observation(config), random_model(config)
    actions, noise, time = random_actions(config, 2), random_actions(config, 2, seed=1), jnp.array([0.3, 0.9])
    described, raw = reference_config(config), reference_observation(config)

    @jax.jit
    def ours(model):
        prefix = model.encode(observation)
        loss = model.flow_loss(prefix, actions, noise=noise, time=time)
        return loss, model.sample(prefix, num_steps=3, noise=noise[:, None])[:, 0]

    loss, sample = ours(policy)
    expected = reference.forward(params, described, raw, actions, noise, time)["loss"]
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=5e-5)
    np.testing.assert_allclose(sample, reference.sample(params, described, raw, noise, 3), rtol=1e-5, atol=5e-5)


# LoRA's gradients are held against recordings of OpenPI in every run.
@pytest.mark.parametrize("variant", ["pi0", "pi05", pytest.param("lora", marks=pytest.mark.slow)])
def test_gradient_through_the_cache_equals_that_of_the_joint_pass(variant):
    config = VARIANTS[variant]
    params, observation, policy = random_parameters(config), random_observation(config), random_model(config)
    actions, noise, time = random_actions(config, 2), random_actions(config, 2, seed=1), jnp.array([0.3, 0.9])
    described, raw = reference_config(config), reference_observation(config)

    def ours(model):
        return jnp.mean(model.flow_loss(model.encode(observation), actions, noise=noise, time=time))

    def joint(params):
        return jnp.mean(reference.forward(params, described, raw, actions, noise, time, xp=jnp)["loss"])

    gradient, expected = jax.jit(jax.grad(ours))(policy), jax.jit(jax.grad(joint))(params)
    for path, value in get_parameters(gradient).items():
        np.testing.assert_allclose(value, expected[path], rtol=1e-4, atol=1e-4, err_msg=path)


@pytest.mark.parametrize("name", ["pi0", "pi05", "lora"])
def test_outputs_equal_the_recorded_ones(name):
    """Numbers written down once, so that a mistake made in the model and its reference alike would show."""
    with np.load(FIXTURES / f"{name}.npz") as file:
        recorded = dict(file)
    config = VARIANTS[name]
    policy, observation = random_model(config), random_observation(config)
    for path, value in get_parameters(policy).items():
        np.testing.assert_array_equal(value, recorded[f"params/{path}"], err_msg=path)
    actions, noise, time = recorded["actions"], recorded["noise"], recorded["time"]

    @jax.jit
    def ours(model):
        prefix = model.encode(observation)
        loss = model.flow_loss(prefix, actions, noise=noise, time=time)
        return loss, model.sample(prefix, noise=noise[:, None])[:, 0], prefix.features

    for value, key in zip(ours(policy), ("loss", "sample", "features"), strict=True):
        np.testing.assert_allclose(value, recorded[key], rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("variant", ["pi0", "state_only"])
def test_sampling_n_chunks_equals_n_separate_samples(variant):
    config = VARIANTS[variant]
    policy, observation = random_model(config), random_observation(config)
    noise = random_actions(config, 2, 8)
    sample = jax.jit(lambda model, noise: model.sample(model.encode(observation), noise=noise))
    together = sample(policy, noise)
    assert together.shape == noise.shape
    for i in range(8):
        np.testing.assert_allclose(together[:, i], sample(policy, noise[:, i : i + 1])[:, 0], rtol=1e-5, atol=2e-6)


def test_guidance_combines_the_flows_of_two_prompts():
    """One Euler step from time 1 to 0 is the noise minus the flow; 0 is the one prompt alone, 1 the other."""
    config = VARIANTS["no_camera"]
    model, plain = random_model(config), random_observation(config)
    other = plain.with_prompt(random_observation(config, seed=1).tokenized_prompt, plain.tokenized_prompt_mask)
    noise = random_actions(config, 2, 1)

    @jax.jit
    def sample(model: Any, plain: Observation, other: Observation) -> Any:
        prefix, guide = model.encode(plain), model.encode(other)
        flows = [model.velocity(one, noise, jnp.ones(2)) for one in (prefix, guide)]
        one_step = {w: model.sample(prefix, num_steps=1, noise=noise, guide=guide, guidance=w) for w in (0.0, 1.0, 2.5)}
        alone = model.sample(prefix, num_steps=1, noise=noise)
        return flows, one_step, alone

    (plain_flow, other_flow), one_step, alone = sample(model, plain, other)
    assert np.abs(other_flow - plain_flow).max() > 1e-2
    for weight, chunks in one_step.items():
        expected = noise - ((1 - weight) * plain_flow + weight * other_flow)
        np.testing.assert_allclose(chunks, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(one_step[0.0], alone)


@pytest.mark.usefixtures("unchecked_signatures")
def test_the_prefix_is_never_tiled():
    """No array in the compiled sampler has the size of n copies of the cache, and the prefix is not run n times."""
    config = dataclasses.replace(MICRO, image_resolution=(40, 40))
    policy, observation = random_model(config), random_observation(config, batch=1)
    prefix = jax.jit(lambda model: model.encode(observation))(policy)
    n = 16
    text = jax.jit(lambda model, prefix, key: model.sample(prefix, key, n)).lower(policy, prefix, jax.random.key(0))
    kv_heads, head_dim, length = config.language.num_kv_heads, config.language.head_dim, prefix.mask.shape[1]
    copies = [f"{n}x{length}x{kv_heads}x{head_dim}", f"{n},{length},{kv_heads},{head_dim}"]
    assert f"{length}x{kv_heads}x{head_dim}" in text.as_text()
    assert not any(copy in text.as_text() for copy in copies)

    def flops(n: int) -> float:
        run = jax.jit(lambda model, key: model.sample(model.encode(observation), key, n, num_steps=1))
        return run.lower(policy, jax.random.key(0)).cost_analysis()["flops"]

    # Adding samples costs the same however many there are: the prefix is not part of it.
    assert flops(9) - flops(5) == pytest.approx(flops(5) - flops(1), rel=1e-3)
    assert flops(9) < 9 * flops(1) / 3


def test_invalid_steps_and_padded_dimensions_leave_the_loss_where_asked():
    policy, observation = random_model(MICRO), random_observation(MICRO)
    actions, noise, time = random_actions(MICRO, 2), random_actions(MICRO, 2, seed=1), jnp.array([0.5, 0.2])
    valid = jnp.array([[1, 1, 0, 0], [1, 1, 1, 1]], bool)

    @jax.jit
    def losses(model):
        prefix, t = model.encode(observation), time[:, None, None]
        x_t = t * noise + (1 - t) * actions
        error = model.velocity(prefix, x_t[:, None], time)[:, 0] - (noise - actions)
        options = ({}, {"valid": valid}, {"real_action_dim": 3})
        return error, [model.flow_loss(prefix, actions, noise=noise, time=time, **option) for option in options]

    error, (plain, masked, real) = losses(policy)
    np.testing.assert_allclose(plain, np.mean(np.square(error), axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(masked, np.where(valid, plain, 0))
    np.testing.assert_allclose(real, np.mean(np.square(error[..., :3]), axis=-1), rtol=1e-5)


def test_absent_cameras_and_padded_prompt_do_not_matter():
    """What the masks hide may hold anything."""
    data = random_observation_dict(MICRO)
    changed = random_observation_dict(MICRO, seed=5)
    last = np.array([False, True])
    hidden = {name: ~mask for name, mask in data["image_mask"].items()}
    for name, image in data["image"].items():
        changed["image"][name] = np.where(hidden[name][:, None, None, None], changed["image"][name], image)
    keep = data["tokenized_prompt_mask"]
    changed["tokenized_prompt"] = np.where(keep, data["tokenized_prompt"], changed["tokenized_prompt"])
    changed["state"] = data["state"]
    assert any((changed["image"][n] != data["image"][n])[last].any() for n in data["image"])
    policy, noise = random_model(MICRO), random_actions(MICRO, 2, 1)
    run = jax.jit(lambda model, obs: (model.encode(obs).features, model.sample(model.encode(obs), noise=noise)))
    for ours, theirs in zip(*(run(policy, Observation.from_dict(d, MICRO)) for d in (data, changed)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_flow_times_follow_the_beta_distribution():
    time = np.asarray(sample_time(jax.random.key(0), 20_000))
    assert time.min() >= 0.001
    assert time.max() <= 1.0
    quantiles = np.linspace(0.05, 0.95, 10)
    # The distribution function of Beta(1.5, 1) is x^1.5.
    np.testing.assert_allclose(np.quantile(time, quantiles), 0.001 + 0.999 * quantiles ** (2 / 3), atol=0.012)


@pytest.mark.usefixtures("unchecked_signatures")
def test_actions_of_another_shape_are_refused():
    policy, observation = random_model(MICRO), random_observation(MICRO)
    prefix = jax.eval_shape(lambda: policy.encode(observation))
    with pytest.raises(ObservationError, match=r"actions of shape \(2, 4, 7\).*\(4, 5\)"):
        jax.eval_shape(lambda prefix: policy.flow_loss(prefix, jnp.zeros((2, 4, 7)), jax.random.key(0)), prefix)
    with pytest.raises(ObservationError, match=r"noise of shape \(2, 1, 9, 5\).*\(4, 5\)"):
        jax.eval_shape(lambda prefix: policy.sample(prefix, noise=jnp.zeros((2, 1, 9, 5))), prefix)


@pytest.mark.parametrize("name", ["tiny_pi05", "tiny_lora"])
def test_tiny_presets_run_and_are_small(name):
    config = get_model_config(name)
    policy = create_model(config, jax.random.key(0))
    assert sum(value.size for value in get_parameters(policy).values()) < 3e6
    sample = jax.jit(lambda model: model.sample(model.encode(random_observation(config)), jax.random.key(1), 2))
    actions = sample(policy)
    assert actions.shape == (2, 2, config.action_horizon, config.action_dim)
    assert bool(jnp.all(jnp.isfinite(actions)))


def test_layers_differ_and_seeds_repeat():
    first, again, other = (get_parameters(create_model(MICRO, jax.random.key(seed))) for seed in (0, 0, 1))
    for path, value in first.items():
        np.testing.assert_array_equal(value, again[path])
    weight = np.asarray(first["PaliGemma/llm/layers/mlp/linear"])
    assert np.abs(weight[0] - weight[1]).max() > 0.01
    assert np.abs(weight - np.asarray(other["PaliGemma/llm/layers/mlp/linear"])).max() > 0.01
