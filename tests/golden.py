"""Recorded inputs and outputs of OpenPI itself. They lie beside the project; where they are absent, tests skip."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pirl.models import (
    ExpertConfig,
    LoraConfig,
    Observation,
    Pi0,
    Pi0Config,
    VisionConfig,
    abstract_model,
    set_parameters,
)

ROOT = Path(__file__).resolve().parents[2] / "shared" / "golden"
MODELS = ["pi0_dummy", "pi05_dummy", "pi0_tiny", "pi05_tiny", "pi0_tiny_lora"]
# The ones that also have full gradients, training steps and checkpoints.
TINY_MODELS = ["pi0_tiny", "pi05_tiny", "pi0_tiny_lora"]
# What FACTS.md §10 allows two compilations of the same float32 maths.
RTOL, ATOL = 1e-5, 2e-5

needs_golden = pytest.mark.skipif(not ROOT.is_dir(), reason="recordings of OpenPI (../shared/golden) are not here")


def arrays(*path: str) -> dict[str, np.ndarray]:
    with np.load(ROOT.joinpath(*path)) as file:
        return dict(file)


def content(*path: str) -> Any:
    return json.loads(ROOT.joinpath(*path).read_text())


def model_config(name: str, **changes: Any) -> Pi0Config:
    """The configuration a recording was made with."""
    described = content("models", name, "config.json")

    def expert(fields: dict[str, Any]) -> ExpertConfig:
        loras = fields.pop("lora_configs", {})
        attention, mlp = (LoraConfig(**loras[key]) if key in loras else None for key in ("attn", "ffn"))
        return ExpertConfig(**fields, attention_lora=attention, mlp_lora=mlp)

    siglip, pi0 = described["siglip"], described["pi0_config"]
    fields = {
        "vision": VisionConfig(
            siglip["width"], siglip["depth"], siglip["mlp_dim"], siglip["num_heads"], tuple(siglip["patch_size"])
        ),
        "language": expert(described["paligemma"]),
        "action_expert": expert(described["action_expert"]),
        "vocab_size": described["vocab_size"],
        "image_resolution": tuple(described["image_resolution"]),
        "dtype": "float32",
        **{key: pi0[key] for key in ("pi05", "discrete_state_input", "action_dim", "action_horizon", "max_token_len")},
    }
    return Pi0Config(**(fields | changes))


def model(name: str, param_dtype: Any = np.float32, **changes: Any) -> Pi0:
    """The recorded parameters in a model."""
    params = {path: value.astype(param_dtype) for path, value in arrays("models", name, "params.npz").items()}
    return set_parameters(abstract_model(model_config(name, **changes)), params)


def observation_dict(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The recorded observation as OpenPI's dictionary, and the other recorded inputs."""
    inputs = arrays("models", name, "inputs.npz")

    def below(prefix: str) -> dict[str, np.ndarray]:
        return {key.removeprefix(prefix): value for key, value in inputs.items() if key.startswith(prefix)}

    data = {"image": below("obs/image/"), "image_mask": below("obs/image_mask/")}
    data |= {key: inputs[f"obs/{key}"] for key in ("state", "tokenized_prompt", "tokenized_prompt_mask")}
    return data, inputs


def observation(name: str) -> tuple[Observation, dict[str, np.ndarray]]:
    data, inputs = observation_dict(name)
    return Observation.from_dict(data, model_config(name)), inputs


def assert_close(actual: Any, expected: Any, rtol: float = RTOL, atol: float = ATOL) -> None:
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=rtol, atol=atol)
