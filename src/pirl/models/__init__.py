"""The networks: π₀ and π₀.₅ policies, their observations and their tokenizer. Each name is loaded when it is used."""

from typing import TYPE_CHECKING

from pirl.imports import lazy_names

if TYPE_CHECKING:
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

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
