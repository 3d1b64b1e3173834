"""Which environments there are, and how one is made from a name and options."""

import ast
import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from pirl.envs.adapter import EnvAdapter
from pirl.envs.base import RobotEnv
from pirl.envs.known import KNOWN, KnownEnv
from pirl.envs.options import EnvOption, convert_options, list_options
from pirl.errors import ConfigError, EnvError, UserError, did_you_mean
from pirl.imports import load_module, load_named


@dataclass(frozen=True)
class EnvConfig:
    """An environment by name: an alias or Gymnasium id of pirl's, or any Gymnasium id with an adapter of the user's."""

    id: str = "tabletop"
    adapter: str | None = None
    """`module:Class` or `path/to/file.py:Class`: a subclass of `EnvAdapter` that translates the environment."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def flags(self) -> tuple[str, ...]:
        """As one would give it to a command."""
        words = ["--env", self.id, *(() if self.adapter is None else ("--env.adapter", self.adapter))]
        for name, option in self.options.items():
            words += [f"--env.{name.replace('_', '-')}", _text(option, self.adapter is not None)]
        return tuple(words)


@dataclass(frozen=True)
class EnvEntry:
    """What is said of an environment of pirl's. `extra` is what `pip install 'pirl[…]'` needs for it, if anything."""

    alias: str
    id: str
    extra: str | None
    summary: str
    options: tuple[EnvOption, ...]


def list_envs() -> list[EnvEntry]:
    """The environments of pirl's, without starting any simulator."""
    entries = []
    for known in KNOWN:
        env_class = _load_known(known)
        summary = inspect.cleandoc(env_class.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        entries.append(EnvEntry(known.alias, known.id, known.extra, summary, list_options(env_class)))
    return entries


def make_env(config: EnvConfig) -> RobotEnv:
    """Make the environment; what is wrong with its name, adapter or options is a `ConfigError`."""
    env_class, options = find_env_class(config)
    if not issubclass(env_class, EnvAdapter):
        return env_class(**options)
    # Checked by the adapter, which says more to its author; and its limit goes before the registered one.
    settings: dict[str, Any] = {"disable_env_checker": True, "max_episode_steps": env_class.max_steps} | options
    try:
        return env_class(gymnasium.make(config.id, **settings))
    except UserError:
        raise
    except TypeError as error:
        raise ConfigError(f"{config.id} does not take these options: {error}.") from error
    except Exception as error:
        raise EnvError(f"{config.id} could not be made: {type(error).__name__}: {error}") from error


def find_env_class(config: EnvConfig) -> tuple[type[RobotEnv], dict[str, Any]]:
    """The class that is meant (of the environment, or of the adapter around it), and its options, converted."""
    for known in KNOWN:
        if config.adapter is not None:
            if config.id == known.alias:
                raise ConfigError(
                    f"{known.alias} is an environment of pirl's and needs no adapter: leave out --env.adapter "
                    f"{config.adapter}, or name the Gymnasium id of the environment that it is for."
                )
        elif config.id in (known.alias, known.id):
            env_class = _load_known(known)
            return env_class, convert_options(known.alias, env_class, config.options)
    spec = _find_spec(config.id)
    if config.adapter is not None:
        return _load_adapter(config.adapter), {key: _literal(value) for key, value in config.options.items()}
    creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    if isinstance(creator, type) and issubclass(creator, RobotEnv):
        return creator, spec.kwargs | convert_options(config.id, creator, config.options)
    raise ConfigError(
        f"{config.id} is an environment of Gymnasium's that does not say which robot it is. Write a small subclass of "
        "pirl.envs.EnvAdapter with `robot`, `fps`, `prompt`, `observe()` and `success()`, and name it with "
        "--env.adapter my_adapter.py:MyAdapter (see docs/environments.md)."
    )


def with_render_size(config: EnvConfig, size: int) -> EnvConfig:
    """The environment with pictures of this size for people, if it can be told and its options do not say another."""
    env_class, _ = find_env_class(config)
    if "render_size" not in inspect.signature(env_class).parameters:
        return config
    return replace(config, options={"render_size": size, **config.options})


def _load_known(known: KnownEnv) -> type[RobotEnv]:
    module, name = known.entry_point.split(":")
    env_class: type[RobotEnv] = getattr(importlib.import_module(module), name)
    return env_class


def _find_spec(name: str) -> EnvSpec:
    """What Gymnasium knows under that id, after importing what stands before a colon."""
    module, _, env_id = name.rpartition(":")
    if module:
        load_module(module, f"the environment {name!r}")
    if spec := gymnasium.registry.get(env_id):
        return spec
    ours = [name for known in KNOWN for name in (known.alias, known.id)]
    question = did_you_mean(env_id, [*ours, *gymnasium.registry])
    if not re.search(r"/|-v\d+$", env_id):
        raise ConfigError(
            f"no environment is named {name!r}. {question}pirl has {', '.join(known.alias for known in KNOWN)}; any "
            "other is named by its Gymnasium id, as in my_package:my_package/MyEnv-v0."
        )
    raise ConfigError(
        f"no environment {env_id!r} is registered with Gymnasium. {question}Install the package that registers it and "
        f"name its module too, as in my_package:{env_id}."
    )


def _load_adapter(name: str) -> type[EnvAdapter]:
    adapter = load_named(name, "adapter")
    if isinstance(adapter, type) and issubclass(adapter, EnvAdapter) and adapter is not EnvAdapter:
        return adapter
    raise ConfigError(f"{name} should be a subclass of pirl.envs.EnvAdapter; it is {adapter!r:.80}.")


def _literal(value: Any) -> Any:
    """Text that is a Python literal as what it says."""
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError):
        return value


def _text(option: Any, is_foreign: bool) -> str:
    """What is read back as the same: of a foreign environment as a literal, else as what the option takes."""
    if is_foreign:
        return option if isinstance(option, str) and _literal(option) == option else repr(option)
    if isinstance(option, bool):
        return str(option).lower()
    return ",".join(map(str, option)) if isinstance(option, list | tuple) else str(option)
