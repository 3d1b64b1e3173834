"""The configuration of a training run: schema, presets, YAML and options, checks. Names are loaded when they are used."""

from typing import TYPE_CHECKING

from pirl.imports import lazy_names

if TYPE_CHECKING:
    from pirl.config.checks import check_config, check_data, check_layout, find_missing_room
    from pirl.config.io import (
        debug_config,
        format_config,
        get_config,
        load_config,
        override_config,
        parse_config,
        to_plain,
    )
    from pirl.config.presets import get_preset, list_configs
    from pirl.config.schema import (
        LEARNERS,
        AgentConfig,
        CheckpointConfig,
        DataConfig,
        EvaluationConfig,
        HealthConfig,
        HostsConfig,
        LoggingConfig,
        OnlineConfig,
        RLTrainConfig,
        RolloutConfig,
        StoppingConfig,
    )


__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
