"""Configurations from presets, YAML files and options, and back into YAML."""

import dataclasses
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pirl.agents.config import ACRLPDConfig
from pirl.config.presets import get_preset
from pirl.config.schema import LEARNERS, AgentConfig, RLTrainConfig
from pirl.config.yaml import dump_yaml, parse_yaml, read_yaml
from pirl.envs.registry import EnvConfig, find_env_class
from pirl.errors import ConfigError, UserError, did_you_mean
from pirl.imports import load_named
from pirl.models.config import Pi0Config, get_model_config, list_model_configs
from pirl.text import convert, format_type

_Config = TypeVar("_Config")
CHOICES = {"model": "preset", "agent": "learner"}
"""Groups that begin with a choice, whose other fields then refine it."""


# --- configurations ----------------------------------------------------------------------------------------------


@cache
def get_config(name: str) -> RLTrainConfig:
    """The configuration of a preset; an unknown name raises with the nearest."""
    fields = {field: value for field, value in get_preset(name).items() if field != "about"}
    return _read_config({"name": name} | fields, f"the preset {name}", None)


def load_config(file: Path, preset: str | None = None) -> RLTrainConfig:
    """The configuration of a YAML file: complete, or over a preset, named here or in the file (`preset: NAME`)."""
    return _read_config(read_yaml(file), str(file), preset)


def parse_config(text: str, preset: str | None = None) -> RLTrainConfig:
    """The same from a YAML text."""
    return _read_config(parse_yaml(text, "the configuration"), "", preset)


def _read_config(values: Any, source: str, preset: str | None) -> RLTrainConfig:
    where = source or "the configuration"
    values = {} if values is None else values
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} should hold fields and their values; it holds {values!r:.60}.")
    values = dict(values)
    named = values.pop("preset", preset)
    if named is not None and not isinstance(named, str):
        raise ConfigError(f"{where}: preset should be the name of one (pirl configs); it is {named!r:.60}.")
    if preset not in (None, named):
        raise ConfigError(f"{where} begins with the preset {named}, the command with {preset}: leave one of them out.")
    return _Reader(source).read_config(values, None if named is None else get_config(named))


def override_config(config: RLTrainConfig, overrides: Mapping[str, Any], *, texts: bool = False) -> RLTrainConfig:
    """Change fields by their dotted names, as in {"agent.discount": 0.9}; of a command line, the values are `texts`."""
    return _Reader("", texts).read_config(_nested(overrides), config)


def debug_config(config: RLTrainConfig) -> RLTrainConfig:
    """The same model, learner, data and environment for ten updates of eight chunks, everything done at least once.

    Metrics of every update; validation, evaluation (4 episodes) and checkpoints after five and ten; if there is an online
    phase, two short rounds of it; no trackers. RIPT makes two iterations with two groups of four attempts each.
    """
    every = 1 if config.on_policy else 5
    changes: dict[str, Any] = {
        "agent.accumulation_steps": 1,
        "evaluation.every": every if config.evaluation.every else 0,
        "evaluation.episodes": 4,
        "evaluation.videos": min(config.evaluation.videos, 1),
        "checkpoints.every": every,
        "checkpoints.keep_period": None,
        "logging.every": 1,
        "logging.wandb": "off",
        "logging.trackio": False,
        "steps": 10 if config.steps else 0,
        "batch_size": 8,
        "validation_every": every if config.validation_every else 0,
        "validation_batches": 1,
    }
    if isinstance(config.agent, ACRLPDConfig):
        changes["agent.critic_warmup_steps"] = min(config.agent.critic_warmup_steps, 2)
    if config.online.env_steps:
        changes |= {"online.env_steps": min(config.online.env_steps, 100), "online.utd_ratio": 0.1}
        changes["online.episodes_per_round"] = 2
    if config.on_policy:
        changes |= {"rollout.groups": 2, "rollout.attempts": 4, "rollout.budget": 4}
        changes["rollout.iterations"] = min(config.rollout.iterations, 2)
        changes["rollout.videos_every"] = min(config.rollout.videos_every, 1)
    return override_config(config, changes)


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted fields as groups in groups."""
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        *groups, field = name.split(".")
        inner = nested
        for group in groups:
            inner = inner.setdefault(group, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{group} cannot be given a value ({inner!r:.60}) and fields of its own ({name}).")
        inner[field] = value
    return nested


def format_config(config: RLTrainConfig) -> str:
    """The whole configuration as YAML, which `parse_config` reads back."""
    return dump_yaml(to_plain(config))


def to_plain(value: Any) -> Any:
    """A value as YAML can hold it. The learner is named; the options of an environment stand beside its name."""
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


def list_choices(group: str) -> list[str]:
    """What a group of `CHOICES` can begin with."""
    return list(LEARNERS) if group == "agent" else list_model_configs()


def list_fields(kind: Any = RLTrainConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted field with its type, of all learners; the options of environments are not among them."""
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


def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


# --- reading values ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reader:
    """Reads nested values; its errors begin with the `source`. On a command line, all values are `texts`."""

    source: str
    texts: bool = False

    def read_config(self, values: Any, base: RLTrainConfig | None) -> RLTrainConfig:
        """A configuration; what the values leave out is as in `base`, or as by default."""
        config = self._group(RLTrainConfig, values, base, "")
        env, data = (values.get(group) or {} for group in ("env", "data"))
        adapter = None if config.env is None else config.env.adapter
        # An adapter says which robot its environment is; a robot that is named, or described in a file, is kept.
        if adapter is None or "adapter" not in env or "robot" in data or config.data.robot.endswith(".json"):
            return config
        return replace(config, data=replace(config.data, robot=adapter))

    def _group(self, kind: type[_Config], value: Any, base: _Config | None, path: str) -> _Config:
        """A dataclass; `base` counts only if it is of the same kind."""
        values = self._mapping(value, path)
        if kind is Pi0Config and "preset" in values:
            base = self._checked(path, lambda: get_model_config(str(values.pop("preset"))))  # type: ignore[assignment]
        base = base if type(base) is kind else None
        hints, given = _hints(kind), {}
        fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        for name, entry in values.items():
            if name not in hints:
                raise self._unknown(name, kind, path)
            before = getattr(base, name, None)
            if base is None and callable(fields[name].default_factory):
                before = fields[name].default_factory()  # type: ignore[operator]
            given[name] = self._value(hints[name], entry, before, f"{path}.{name}" if path else name)
        if base is not None:
            return self._checked(path, lambda: replace(base, **given))  # type: ignore[type-var]
        required = [field.name for field in fields.values() if field.default is field.default_factory]
        if missing := [name for name in required if name not in given]:
            hint = "" if path else ": name a preset to begin with (preset: NAME)"
            raise ConfigError(f"{self._where(path)} lacks {', '.join(missing)}{hint}.")
        return self._checked(path, lambda: kind(**given))

    def _value(self, hint: Any, value: Any, before: Any, path: str) -> Any:
        choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if types.NoneType in choices and self._is_none(value):
            return None
        if get_origin(hint) is tuple and self._is_none(value):
            return ()
        if path == "agent":
            return self._agent(value, before)
        if path == "env":
            return self._env(value, before)
        if groups := [choice for choice in choices if dataclasses.is_dataclass(choice)]:
            return self._group(groups[0], value, before, path)  # type: ignore[arg-type]
        try:
            # Lists and mappings may be typed as in YAML.
            is_yaml = self.texts and str not in choices and isinstance(value, str) and value[:1] in ("[", "{")
            return convert(parse_yaml(value, path) if is_yaml else value, hint, texts=self.texts)
        except ValueError:
            advice = ""
        if str in choices and not self.texts and not isinstance(value, str | None):
            advice = " Put it in quotes."
        if int in choices and re.fullmatch("[-+]?[0-9]+", str(value)):
            advice = " That is too large."
        raise ConfigError(f"{self._where(path)} should be {format_type(hint)}; it is {value!r:.80}.{advice}")

    def _agent(self, value: Any, base: AgentConfig | None) -> AgentConfig:
        """A learner. One that is named begins with its own defaults, unless it is that of the base."""
        values = self._mapping(value, "agent")
        if base is None and "learner" not in values:
            raise ConfigError(f"{self._where('agent')} lacks learner: one of {', '.join(LEARNERS)}.")
        kind: Any = type(base)
        if "learner" in values:
            learner = values.pop("learner")
            if ":" in str(learner) and learner not in LEARNERS:  # the user's own, module:Class or file.py:Class
                own = self._checked("agent.learner", lambda: load_named(learner, "learner"))
                is_learner = dataclasses.is_dataclass(own) and hasattr(own, "create")
                if not is_learner:
                    raise ConfigError(
                        f"{self._where('agent.learner')}: {learner} is not a dataclass of settings with a method create."
                    )
                LEARNERS[learner] = own
            kind = LEARNERS.get(str(learner))
            if kind is None:
                known = f"{did_you_mean(str(learner), LEARNERS)}Known: {', '.join(LEARNERS)}."
                raise ConfigError(f"{self._where('agent.learner')}: there is no learner {learner!r}. {known}")
        agent: AgentConfig = self._group(kind, values, base, "agent")
        return agent

    def _env(self, value: Any, base: EnvConfig | None) -> EnvConfig | None:
        """An environment. One that is named by its id begins with the defaults of its options."""
        values = {str(name): entry for name, entry in self._mapping(value, "env").items()}
        if "id" not in values:
            if base is None:
                raise ConfigError(f"{self._where('env')} lacks id: the name of an environment (pirl envs list).")
            values = {"id": base.id, "adapter": base.adapter, **base.options, **values}
        env_id, adapter = values.pop("id"), values.pop("adapter", None)
        if self._is_none(env_id):
            return None
        adapter = None if self._is_none(adapter) else adapter
        for name, text in (("id", env_id), ("adapter", adapter)):
            if not isinstance(text, str | None):
                raise ConfigError(f"{self._where(f'env.{name}')} should be text; it is {text!r:.80}.")
        env = EnvConfig(env_id, adapter, values)
        options = self._checked("env", lambda: find_env_class(env)[1])
        if adapter is not None:
            # The types of a foreign environment's options are not known; they have to survive a file.
            options = self._checked("env", lambda: parse_yaml(dump_yaml(to_plain(options)), "options"))
        return replace(env, options=options)

    def _is_none(self, value: Any) -> bool:
        return value is None or (self.texts and isinstance(value, str) and value.lower() == "none")

    def _mapping(self, value: Any, path: str) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self._where(path)} should be a group of fields; it is {value!r:.80}.")
        return dict(value)

    def _unknown(self, name: Any, kind: Any, path: str) -> ConfigError:
        """The error about an unknown field: the nearest one may belong to another group, or to another learner."""
        siblings = [*_hints(kind), *([CHOICES[path]] if path in CHOICES else [])]
        fields, own = [field for field, _ in list_fields()], [field for field, _ in list_fields(kind, f"{path}.")]
        others = [field for field in fields if path == "" or not field.startswith(f"{path}.")]
        by_name = {field.rpartition(".")[2]: field.lstrip(".") for field in (*others, *own)}
        if f"{path}.{name}".lstrip(".") in fields:
            near = "Another learner has it. "
        elif name in by_name:
            near = f"Did you mean {by_name[name]}? "
        elif not (near := did_you_mean(str(name), siblings)) and (close := get_close_matches(str(name), by_name, n=1)):
            near = f"Did you mean {by_name[close[0]]}? "
        return ConfigError(f"{self._where(path)} has no field {name!r}. {near}It has {', '.join(siblings)}.")

    def _where(self, path: str) -> str:
        if self.texts and path:
            return f"--{path.replace('_', '-')}"
        return ": ".join(part for part in (self.source, path) if part) or "the configuration"

    def _checked(self, path: str, make: Callable[[], _Config]) -> _Config:
        """A value whose own checks may raise, with where it stands in the message."""
        try:
            return make()
        except UserError as error:
            raise ConfigError(f"{self._where(path)}: {error}") from error
