"""The configuration of a training run: schema, presets, YAML and options, checks. Names are loaded when they are used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    """Find a public name; only the presets do not need JAX, which takes seconds to import."""
    for module in ("presets", "schema", "io", "checks"):
        if not name.startswith("_") and name in (names := vars(import_module(f"{__name__}.{module}"))):
            return names[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
