"""Configuration from plain values, those of a YAML file or the texts of a command line, and back into them."""

import dataclasses
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pirl.config.train import LEARNERS, AgentConfig, RLTrainConfig
from pirl.config.yaml_files import dump_yaml, parse_yaml
from pirl.envs.registry import EnvConfig, find_env_class
from pirl.errors import ConfigError, UserError, did_you_mean
from pirl.models.config import Pi0Config, get_model_config
from pirl.text import convert, format_type

_Config = TypeVar("_Config")
# What a group takes besides the fields of its class: a choice that its other fields then refine.
CHOICES = {"model": "preset", "agent": "learner"}


def to_plain(value: Any) -> Any:
    """What YAML can hold. The learner is named; the options of an environment stand beside its name."""
    if isinstance(value, EnvConfig):
        adapter = {} if value.adapter is None else {"adapter": value.adapter}
        return {"id": value.id, **adapter, **to_plain(value.options)}
    if dataclasses.is_dataclass(value):
        fields = {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        learners = [name for name, kind in LEARNERS.items() if type(value) is kind]
        return {"learner": learners[0], **fields} if learners else fields
    if isinstance(value, Mapping):
        return {key: to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def list_fields(kind: Any = RLTrainConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted field with its type, of all learners; those of environments are their own matter."""
    if kind is EnvConfig:
        yield from ((f"{prefix}{name}", str) for name in ("id", "adapter"))
        return
    for name, hint in _hints(kind).items():
        if prefix == "" and name in CHOICES:
            yield f"{name}.{CHOICES[name]}", str
        groups = [choice for choice in (hint, *get_args(hint)) if dataclasses.is_dataclass(choice)]
        for group in groups:
            yield from list_fields(group, f"{prefix}{name}.")
        if not groups:
            yield f"{prefix}{name}", hint


@dataclass(frozen=True)
class Reader:
    """Reads configuration from a `source`, by which its errors begin. Of a command line, all values are `texts`."""

    source: str
    texts: bool = False

    def read_config(self, values: Any, base: RLTrainConfig | None) -> RLTrainConfig:
        """A configuration from nested values; what they do not say is as in `base`, or as by default."""
        config = self._dataclass(RLTrainConfig, values, base, "")
        env, data = (values.get(group) or {} for group in ("env", "data"))
        adapter = None if config.env is None else config.env.adapter
        # An adapter says which robot its environment is; only who describes one in a file knows better.
        if adapter is None or "adapter" not in env or "robot" in data or config.data.robot.endswith(".json"):
            return config
        return dataclasses.replace(config, data=dataclasses.replace(config.data, robot=adapter))

    def _read(self, hint: Any, value: Any, base: Any, path: str) -> Any:
        choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if types.NoneType in choices and self._is_none(value):
            return None
        groups: list[Any] = [choice for choice in choices if dataclasses.is_dataclass(choice)]
        if path == "agent":
            return self._agent(value, base)
        if path == "env":
            return self._env(value, base)
        if groups:
            return self._dataclass(groups[0], value, base, path)
        # Text fits everything, so it comes last.
        for choice in sorted(choices, key=lambda choice: choice is str):
            try:
                return self._convert(value, choice)
            except ValueError:
                continue
        advice = " Put it in quotes." if str in choices and not self.texts and not isinstance(value, str | None) else ""
        if int in choices and re.fullmatch("[-+]?[0-9]+", str(value)):
            advice = " That is too large."
        raise ConfigError(f"{self._called(path)} should be {format_type(hint)}; it is {value!r:.80}.{advice}")

    def _dataclass(self, kind: type[_Config], value: Any, base: _Config | None, path: str) -> _Config:
        """A group of fields; `base` counts only if it is of the same kind."""
        values = dict(self._mapping(value, path))
        if kind is Pi0Config and "preset" in values:
            base = self._refused_by(path, lambda: get_model_config(str(values.pop("preset"))))
        base = base if type(base) is kind else None
        hints, given = _hints(kind), {}
        for name, entry in values.items():
            if name not in hints:
                raise self._unknown(name, list(hints), path)
            below = f"{path}.{name}" if path else name
            given[name] = self._read(hints[name], entry, _value_before(kind, name, base), below)
        if base is not None:
            return self._refused_by(path, lambda: dataclasses.replace(base, **given))  # type: ignore[type-var]
        fields = dataclasses.fields(kind)  # type: ignore[arg-type]
        required = [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]
        if missing := [name for name in required if name not in given]:
            hint = "" if path else ": name a preset to begin with (preset: NAME)"
            raise ConfigError(f"{self._called(path)} lacks {', '.join(missing)}{hint}.")
        return self._refused_by(path, lambda: kind(**given))

    def _agent(self, value: Any, base: AgentConfig | None) -> AgentConfig:
        values = dict(self._mapping(value, "agent"))
        kind: Any = type(base)
        if "learner" in values:
            learner = values.pop("learner")
            if not isinstance(learner, str) or learner not in LEARNERS:
                question = did_you_mean(str(learner), LEARNERS)
                raise ConfigError(
                    f"{self._called('agent.learner')}: there is no learner {learner!r}. {question}"
                    f"Known: {', '.join(LEARNERS)}."
                )
            kind = LEARNERS[learner]
        if base is None and kind not in LEARNERS.values():
            raise ConfigError(f"{self._called('agent')} lacks learner: one of {', '.join(LEARNERS)}.")
        agent: AgentConfig = self._dataclass(kind, values, base, "agent")
        return agent

    def _env(self, value: Any, base: EnvConfig | None) -> EnvConfig | None:
        """An environment. Named by its id, it begins with the defaults of its options; else the one before is changed."""
        values = {str(name): entry for name, entry in self._mapping(value, "env").items()}
        if self._is_none(values.get("id", "")):
            return None
        if base is None and "id" not in values:
            raise ConfigError(f"{self._called('env')} lacks id: the name of an environment (pirl envs list).")
        given: dict[str, Any] = {name: values.pop(name) for name in ("id", "adapter") if name in values}
        if "adapter" in given and self._is_none(given["adapter"]):
            given["adapter"] = None
        for name, text in given.items():
            if not isinstance(text, str) and not (name == "adapter" and text is None):
                raise ConfigError(f"{self._called(f'env.{name}')} should be text; it is {text!r:.80}.")
        if base is not None and "id" not in given:
            given = {"id": base.id, "adapter": base.adapter} | given
            values = {**base.options, **values}
        env = EnvConfig(**given, options=values)
        options = self._refused_by("env", lambda: find_env_class(env)[1])
        if env.adapter is not None:
            # What a foreign environment takes is not known; but it has to be the same again after a way through a file.
            options = self._refused_by("env", lambda: parse_yaml(dump_yaml(to_plain(options)), "options"))
        return dataclasses.replace(env, options=options)

    def _convert(self, value: Any, hint: Any) -> Any:
        """A value of the annotated type; a ValueError if it is none. Lists and mappings may be typed as in YAML."""
        if self.texts and get_origin(hint) is not None and isinstance(value, str) and value[:1] in ("[", "{"):
            try:
                value = parse_yaml(value, "")
            except ConfigError:
                raise ValueError from None
        return convert(value, hint, texts=self.texts)

    def _is_none(self, value: Any) -> bool:
        return value is None or (self.texts and isinstance(value, str) and value.lower() == "none")

    def _mapping(self, value: Any, path: str) -> Mapping[Any, Any]:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self._called(path)} should be a group of fields; it is {value!r:.80}.")
        return value

    def _unknown(self, name: Any, siblings: list[str], path: str) -> ConfigError:
        """A field that is not there: perhaps one beside it is meant, perhaps one of another group, or learner."""
        siblings = [*siblings, *([CHOICES[path]] if path in CHOICES else [])]
        everywhere, dotted = dict(list_fields()), f"{path}.{name}".removeprefix(".")
        elsewhere = [field for field in everywhere if field.endswith(f".{name}")]
        if dotted in everywhere:
            near = "Another learner has it. "
        elif elsewhere:
            near = f"Did you mean {elsewhere[0]}? "
        else:
            near = did_you_mean(str(name), siblings) or did_you_mean(dotted, everywhere)
        return ConfigError(f"{self._called(path)} has no field {name!r}. {near}It has {', '.join(siblings)}.")

    def _called(self, path: str) -> str:
        if self.texts and path:
            return f"{self.source}: --{path.replace('_', '-')}"
        return ": ".join(filter(None, (self.source, path))) or "the configuration"

    def _refused_by(self, path: str, make: Any) -> Any:
        """What the values themselves object to, with the place where they stand."""
        try:
            return make()
        except UserError as error:
            raise ConfigError(f"{self._called(path)}: {error}") from error


def _value_before(kind: Any, name: str, base: Any) -> Any:
    """What a field was, or is by default."""
    if base is not None:
        return getattr(base, name)
    (field,) = (field for field in dataclasses.fields(kind) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
