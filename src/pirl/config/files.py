"""Configurations from YAML files and dotted overrides, into YAML files, and what differs between two of them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pirl.config.presets import get_config
from pirl.config.train import RLTrainConfig
from pirl.config.values import Reader, to_plain
from pirl.config.yaml_files import dump_yaml, parse_yaml, read_yaml
from pirl.errors import ConfigError
from pirl.files import write_file


def load_config(file: Path, preset: str | None = None) -> RLTrainConfig:
    """The configuration of a YAML file: complete, or on top of a preset, named here or in the file (`preset: NAME`)."""
    return _from_plain(read_yaml(file), str(file), preset)


def parse_config(text: str, preset: str | None = None) -> RLTrainConfig:
    """The same from a YAML text."""
    return _from_plain(parse_yaml(text, "the configuration"), "", preset)


def _from_plain(values: Any, source: str, preset: str | None) -> RLTrainConfig:
    where = source or "the configuration"
    values = {} if values is None else values
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} should hold fields and their values; it holds {values!r:.60}.")
    values = dict(values)
    if "preset" in values:
        named = values.pop("preset")
        if not isinstance(named, str):
            raise ConfigError(f"{where}: preset should be the name of one (pirl configs); it is {named!r:.60}.")
        if preset not in (None, named):
            raise ConfigError(
                f"{where} begins with the preset {named}, the command with {preset}: leave one of them out."
            )
        preset = named
    return Reader(source).read_config(values, None if preset is None else get_config(preset))


def format_config(config: RLTrainConfig) -> str:
    """The whole configuration as YAML, which `parse_config` reads back."""
    return dump_yaml(to_plain(config))


def save_config(file: Path, config: RLTrainConfig) -> None:
    """Write the whole configuration, which `load_config` reads back."""
    write_file(file, format_config(config))


def override_config(
    config: RLTrainConfig, overrides: Mapping[str, Any], source: str = "", *, texts: bool = False
) -> RLTrainConfig:
    """Change fields by their dotted names, as in {"agent.discount": 0.9}; of a command line, the values are `texts`."""
    nested: dict[str, Any] = {}
    for name, value in overrides.items():
        *groups, field = name.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{group} cannot be given a value ({place!r:.60}) and fields of its own ({name}).")
        place[field] = value
    return Reader(source, texts).read_config(nested, config)


def config_differences(first: RLTrainConfig, second: RLTrainConfig) -> list[tuple[str, Any, Any]]:
    """Every dotted field in which two configurations differ, with both values."""
    return list(_differences(to_plain(first), to_plain(second), ""))


def _differences(first: Any, second: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if not isinstance(first, dict) or not isinstance(second, dict):
        if first != second:
            yield path, first, second
    elif first.get("learner") != second.get("learner"):
        yield f"{path}.learner", first["learner"], second["learner"]  # their fields have nothing to do with each other
    else:
        for name in {**first, **second}:
            yield from _differences(first.get(name), second.get(name), f"{path}.{name}" if path else name)
