"""The networks: π₀ and π₀.₅ policies, their observations and their tokenizer."""

from pirl.models.config import (
    ExpertConfig,
    LoraConfig,
    Pi0Config,
    VisionConfig,
    get_model_config,
    list_model_configs,
)
from pirl.models.lora import merge_lora
from pirl.models.observation import GuidedObservation, Observation, preprocess
from pirl.models.pi0 import (
    Pi0,
    Prefix,
    abstract_model,
    create_model,
    expected_parameters,
    get_parameters,
    nest,
    sample_actions,
    set_parameters,
)
from pirl.models.tokenizer import Tokenizer, find_tokenizer

__all__ = [
    "ExpertConfig",
    "GuidedObservation",
    "LoraConfig",
    "Observation",
    "Pi0",
    "Pi0Config",
    "Prefix",
    "Tokenizer",
    "VisionConfig",
    "abstract_model",
    "create_model",
    "expected_parameters",
    "find_tokenizer",
    "get_model_config",
    "get_parameters",
    "list_model_configs",
    "merge_lora",
    "nest",
    "preprocess",
    "sample_actions",
    "set_parameters",
]
