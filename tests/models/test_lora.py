"""Merging LoRA changes where the update lives, not what the policy does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from builders import MICRO, MICRO_LORA, random_actions, random_observation, random_parameters
from golden import arrays, assert_close, model_config, needs_golden, observation
from pirl.errors import CheckpointError
from pirl.models import Pi0Config, abstract_model, expected_parameters, merge_lora, set_parameters

FUSED = dataclasses.replace(
    MICRO_LORA,
    language=dataclasses.replace(MICRO_LORA.language, num_kv_heads=4),
    action_expert=dataclasses.replace(MICRO_LORA.action_expert, num_kv_heads=4),
)
ACTION_EXPERT_ONLY = dataclasses.replace(MICRO_LORA, language=MICRO.language)


@pytest.mark.parametrize("config", [MICRO_LORA, FUSED, ACTION_EXPERT_ONLY], ids=["both", "fused", "expert_only"])
def test_a_merged_policy_samples_the_same(config: Pi0Config):
    params, noise = random_parameters(config), random_actions(config, 2, 1)
    merged = merge_lora(params, config)
    assert set(merged) == set(expected_parameters(config.without_lora()))

    observation = random_observation(config)
    run = jax.jit(lambda model: model.sample(model.encode(observation), num_steps=3, noise=noise))

    def sample(config: Pi0Config, params) -> np.ndarray:
        return np.asarray(run(set_parameters(abstract_model(config), params)))

    adapted = sample(config, params)
    np.testing.assert_allclose(sample(config.without_lora(), merged), adapted, rtol=1e-4, atol=2e-5)
    unadapted = {path: value for path, value in params.items() if "lora" not in path}
    assert np.abs(sample(config.without_lora(), unadapted) - adapted).max() > 0.1


@needs_golden
def test_the_merged_recording_gives_openpi_outputs():
    """In the recording alpha and rank differ, so each quirk of the scaling shows."""
    config = model_config("pi0_tiny_lora")
    params = {path: jnp.asarray(value) for path, value in arrays("models", "pi0_tiny_lora", "params.npz").items()}
    policy = set_parameters(abstract_model(config.without_lora()), merge_lora(params, config))
    obs, inputs = observation("pi0_tiny_lora")
    run = jax.jit(lambda model: model.sample(model.encode(obs), noise=inputs["sample_noise"][:, None])[:, 0])
    expected = arrays("models", "pi0_tiny_lora", "expected_float32.npz")["sample_actions_10"]
    assert_close(run(policy), expected, atol=5e-5)


def test_merging_keeps_the_dtype_of_the_weights():
    params = {path: value.astype(jnp.bfloat16) for path, value in random_parameters(MICRO_LORA).items()}
    assert {value.dtype for value in merge_lora(params, MICRO_LORA).values()} == {jnp.dtype(jnp.bfloat16)}


def test_lora_weights_that_belong_nowhere_are_named():
    params = random_parameters(MICRO_LORA)
    stray = "PaliGemma/llm/layers/attn/q_einsum/lora_a"
    del params["PaliGemma/llm/layers/attn/q_einsum/lora_b"]
    with pytest.raises(CheckpointError, match=stray):
        merge_lora(params, MICRO_LORA)
    with pytest.raises(CheckpointError, match="no attention LoRA"):
        merge_lora(random_parameters(MICRO_LORA), MICRO)
