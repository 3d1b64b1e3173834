"""The presets, which are in presets.yaml: listing them imports neither JAX nor the schema."""

from functools import cache
from pathlib import Path
from typing import Any

from pirl.config.yaml import read_yaml
from pirl.errors import ConfigError, did_you_mean


@cache
def _presets() -> dict[str, dict[str, Any]]:
    presets: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_suffix(".yaml"))
    return presets


def list_configs() -> list[str]:
    """The names of the presets."""
    return [name for name in _presets() if not name.startswith("_")]


def get_preset(name: str) -> dict[str, Any]:
    """The fields of a preset, the preset that they are over, and the text `about` it."""
    if name in _presets():
        return _presets()[name]
    raise ConfigError(f"no preset is named {name!r}. {did_you_mean(name, list_configs())}See pirl configs.")


def find_choice(name: str, group: str, choice: str) -> str:
    """The model preset, or the learner, of a preset or of the nearest one below it."""
    preset = get_preset(name)
    return preset.get(group, {}).get(choice) or find_choice(preset["preset"], group, choice)
