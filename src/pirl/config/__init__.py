"""The configuration of a training run: typed fields, presets, YAML files, checks. Names are loaded lazily."""

from typing import TYPE_CHECKING

from pirl.lazy import lazy_names

if TYPE_CHECKING:
    from pirl.config.checks import check_config, check_data, check_layout
    from pirl.config.debugging import debug_config
    from pirl.config.files import (
        config_differences,
        format_config,
        load_config,
        override_config,
        parse_config,
        save_config,
    )
    from pirl.config.parts import (
        CheckpointConfig,
        DataConfig,
        EvaluationConfig,
        HealthConfig,
        LoggingConfig,
        OnlineConfig,
        RolloutConfig,
        StoppingConfig,
    )
    from pirl.config.presets import Preset, get_config, get_preset, list_configs
    from pirl.config.train import LEARNERS, AgentConfig, RLTrainConfig
    from pirl.config.values import to_plain

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "checks": ("check_config", "check_data", "check_layout"),
        "debugging": ("debug_config",),
        "files": (
            "config_differences",
            "format_config",
            "load_config",
            "override_config",
            "parse_config",
            "save_config",
        ),
        "parts": (
            "CheckpointConfig",
            "DataConfig",
            "EvaluationConfig",
            "HealthConfig",
            "LoggingConfig",
            "OnlineConfig",
            "RolloutConfig",
            "StoppingConfig",
        ),
        "presets": ("Preset", "get_config", "get_preset", "list_configs"),
        "train": ("LEARNERS", "AgentConfig", "RLTrainConfig"),
        "values": ("to_plain",),
    },
)
