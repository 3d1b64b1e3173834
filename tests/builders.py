"""Small models, parameters and observations that tests are made of."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pirl.models import (
    ExpertConfig,
    LoraConfig,
    Observation,
    Pi0,
    Pi0Config,
    VisionConfig,
    abstract_model,
    expected_parameters,
    set_parameters,
)

MICRO = Pi0Config(
    vision=VisionConfig(width=16, depth=2, mlp_dim=24, num_heads=2, patch_size=(4, 4)),
    language=ExpertConfig(width=16, depth=2, mlp_dim=24, num_heads=4, num_kv_heads=2, head_dim=6),
    action_expert=ExpertConfig(width=12, depth=2, mlp_dim=20, num_heads=4, num_kv_heads=2, head_dim=6),
    vocab_size=40,
    action_dim=5,
    action_horizon=4,
    max_token_len=6,
    image_resolution=(8, 12),
    dtype="float32",
)
MICRO_PI05 = dataclasses.replace(MICRO, pi05=True, discrete_state_input=True)
MICRO_LORA = dataclasses.replace(
    MICRO,
    language=MICRO.language.with_lora(LoraConfig(rank=3, alpha=5.0)),
    action_expert=MICRO.action_expert.with_lora(LoraConfig(rank=2, alpha=3.0, rank_stabilized=True)),
)


def random_parameters(config: Pi0Config, seed: int = 0) -> dict[str, jax.Array]:
    """Every leaf random, also those that start at zero, so that each of them influences the output."""
    random = np.random.default_rng(seed)

    def draw(path: str, shape: tuple[int, ...]) -> np.ndarray:
        fan_in = np.prod(shape[-2:-1]) if len(shape) > 1 else 25
        centre = 1.0 if "LayerNorm" in path and path.endswith("scale") else 0.0
        return (centre + random.normal(size=shape) / np.sqrt(fan_in)).astype(np.float32)

    shapes = expected_parameters(config)
    return {path: jnp.asarray(draw(path, leaf.shape), leaf.dtype) for path, leaf in sorted(shapes.items())}


def random_model(config: Pi0Config, seed: int = 0) -> Pi0:
    return set_parameters(abstract_model(config), random_parameters(config, seed))


def random_observation_dict(config: Pi0Config, batch: int = 2, seed: int = 0, prompt: bool = True) -> dict[str, Any]:
    """OpenPI's dictionary form, with an absent camera and a short prompt in the last sample."""
    random = np.random.default_rng(seed)
    shape = (batch, *config.image_resolution, 3)
    last_is_off = np.arange(batch) < batch - 1
    data: dict[str, Any] = {
        "image": {name: random.uniform(-1, 1, shape).astype(np.float32) for name in config.cameras},
        "image_mask": {
            name: np.ones(batch, bool) if index == 0 else last_is_off for index, name in enumerate(config.cameras)
        },
        "state": random.normal(size=(batch, config.action_dim)).astype(np.float32),
    }
    if prompt and config.max_token_len:
        data["tokenized_prompt"] = random.integers(0, config.vocab_size, (batch, config.max_token_len)).astype(np.int32)
        length = np.where(last_is_off, config.max_token_len, config.max_token_len // 2)
        data["tokenized_prompt_mask"] = np.arange(config.max_token_len) < length[:, None]
    return data


def random_observation(config: Pi0Config, batch: int = 2, seed: int = 0, prompt: bool = True) -> Observation:
    return Observation.from_dict(random_observation_dict(config, batch, seed, prompt), config)


def random_actions(config: Pi0Config, *leading: int, seed: int = 0) -> jax.Array:
    shape = (*leading, config.action_horizon, config.action_dim)
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)
