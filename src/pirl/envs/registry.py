"""Which environments there are, which options they take, and how one is made from a name and options."""

import ast
import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from pirl.envs.adapter import EnvAdapter
from pirl.envs.base import TASKS_APART, RobotEnv
from pirl.errors import Checked, ConfigError, EnvError, Fraction, Share, UserError, Weight, did_you_mean
from pirl.imports import load_module, load_named
from pirl.text import convert, format_type


@dataclass(frozen=True)
class EnvConfig:
    """An environment by name: an alias or Gymnasium id of pirl's, or any Gymnasium id with an adapter of the user's."""

    id: str = "tabletop"
    adapter: str | None = None
    """`module:Class` or `path/to/file.py:Class`: a subclass of `EnvAdapter` that translates the environment."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def flags(self) -> tuple[str, ...]:
        words = ["--env", self.id, *(() if self.adapter is None else ("--env.adapter", self.adapter))]
        for name, option in self.options.items():
            words += [f"--env.{name.replace('_', '-')}", _option_text(option, self.adapter is not None)]
        return tuple(words)


@dataclass(frozen=True)
class CurriculumConfig(Checked):
    """How contexts are chosen. The defaults suit about eight attempts at each."""

    initial_states: Annotated[int, f"[1, {TASKS_APART}]"] | None = None
    """Number of initial states per task to learn from, each with its own success rate. By default every group of
    attempts has a new initial state, and success rates are kept per task."""
    success_rate_target: Share = 0.5
    """Contexts whose success rate is near this value are drawn most often."""
    sharpness: Weight = 16.0
    """How quickly the probability falls with the distance from the target; 0 draws all contexts equally often."""
    floor: Annotated[float, "(0, 1]"] = 0.05
    """Relative probability of contexts far from the target (1 at the target)."""
    memory: Fraction = 0.5
    """Decay of the running success rates: the weight of the old value when a new one is recorded."""


@dataclass(frozen=True)
class KnownEnv:
    """An environment of pirl's. `extra` is what `pip install 'pirl[…]'` needs for it, if anything."""

    alias: str
    id: str
    entry_point: str
    extra: str | None

    def load(self) -> type[RobotEnv]:
        """Its class; no simulator is imported before it is made."""
        module, name = self.entry_point.split(":")
        env_class: type[RobotEnv] = getattr(importlib.import_module(module), name)
        return env_class

    @property
    def summary(self) -> str:
        """The first paragraph of its docstring."""
        return inspect.cleandoc(self.load().__doc__ or "").split("\n\n")[0].replace("\n", " ")

    @property
    def options(self) -> "tuple[EnvOption, ...]":
        return list_options(self.load())


KNOWN = (
    KnownEnv("tabletop", "pirl/Tabletop-v0", "pirl.envs.tabletop.env:TabletopEnv", None),
    KnownEnv("aloha", "pirl/Aloha-v0", "pirl.envs.aloha.env:AlohaEnv", "aloha"),
    KnownEnv("libero", "pirl/Libero-v0", "pirl.envs.libero.env:LiberoEnv", "libero"),
    KnownEnv("metaworld", "pirl/MetaWorld-v0", "pirl.envs.metaworld.env:MetaWorldEnv", "metaworld"),
)


def register_envs() -> None:
    for known in KNOWN:
        if known.id not in gymnasium.registry:
            gymnasium.register(known.id, known.entry_point)


def make_env(config: EnvConfig) -> RobotEnv:
    """Make the environment; what is wrong with its name, adapter or options is a `ConfigError`."""
    env_class, options = find_env_class(config)
    if not issubclass(env_class, EnvAdapter):
        return env_class(**options)
    # The adapter makes its own checks, with messages for its author; its step limit overrides the registered one.
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
    """The class of the environment, or of the adapter around it, and its converted options."""
    for known in KNOWN:
        if config.adapter is not None and config.id == known.alias:
            raise ConfigError(
                f"{known.alias} is an environment of pirl's and needs no adapter: leave out --env.adapter "
                f"{config.adapter}, or name the Gymnasium id of the environment that it is for."
            )
        if config.adapter is None and config.id in (known.alias, known.id):
            env_class = known.load()
            return env_class, convert_options(known.alias, env_class, config.options)
    spec = _find_spec(config.id)
    if config.adapter is not None:
        adapter = load_named(config.adapter, "adapter")
        if not (isinstance(adapter, type) and issubclass(adapter, EnvAdapter) and adapter is not EnvAdapter):
            raise ConfigError(f"{config.adapter} should be a subclass of pirl.envs.EnvAdapter; it is {adapter!r:.80}.")
        return adapter, {key: _literal(value) for key, value in config.options.items()}
    creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    if isinstance(creator, type) and issubclass(creator, RobotEnv):
        return creator, spec.kwargs | convert_options(config.id, creator, config.options)
    raise ConfigError(
        f"{config.id} is an environment of Gymnasium's that does not say which robot it is. Write a small subclass of "
        "pirl.envs.EnvAdapter with `robot`, `fps`, `prompt`, `observe()` and `success()`, and name it with "
        "--env.adapter my_adapter.py:MyAdapter (see docs/environments.md)."
    )


def with_render_size(config: EnvConfig, size: int) -> EnvConfig:
    """The environment with `render()` of this size, if it has such an option and the config does not set it."""
    env_class, _ = find_env_class(config)
    if "render_size" not in inspect.signature(env_class).parameters:
        return config
    return replace(config, options={"render_size": size, **config.options})


def _find_spec(name: str) -> EnvSpec:
    """Gymnasium's registration of an id, after importing the module before its colon."""
    module, _, env_id = name.rpartition(":")
    if module:
        load_module(module, f"the environment {name!r}")
    if spec := gymnasium.registry.get(env_id):
        return spec
    aliases = [known.alias for known in KNOWN]
    question = did_you_mean(env_id, [*aliases, *gymnasium.registry])
    if not re.search(r"/|-v\d+$", env_id):
        raise ConfigError(
            f"no environment is named {name!r}. {question}pirl has {', '.join(aliases)}; any other is named by its "
            "Gymnasium id, as in my_package:my_package/MyEnv-v0."
        )
    raise ConfigError(
        f"no environment {env_id!r} is registered with Gymnasium. {question}Install the package that registers it and "
        f"name its module too, as in my_package:{env_id}."
    )


def _literal(value: Any) -> Any:
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError):
        return value


def _option_text(option: Any, is_foreign: bool) -> str:
    """An option as text that is read back as the same: as a literal for an adapter, else as its type is typed."""
    if is_foreign:
        return option if isinstance(option, str) and _literal(option) == option else repr(option)
    if isinstance(option, bool):
        return str(option).lower()
    return ",".join(map(str, option)) if isinstance(option, list | tuple) else str(option)


# --- options: the parameters of a constructor, explained in the class's docstring -------------------------------------

# `gymnasium.make` may pass it; there is nothing to choose.
_FOR_GYMNASIUM = "render_mode"


@dataclass(frozen=True)
class EnvOption:
    name: str
    kind: str
    default: Any
    help: str


def list_options(env_class: type) -> tuple[EnvOption, ...]:
    """The options of an environment, in the order of its constructor.

    Their help are the lines `name: text` under `Options:` in its docstring.
    """
    hints, parameters = _parameters(env_class)
    _, _, section = inspect.cleandoc(env_class.__doc__ or "").partition("\nOptions:\n")
    helps = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE))
    return tuple(
        EnvOption(name, _kind(hints[name]), parameter.default, " ".join(helps.get(name, "").split()))
        for name, parameter in parameters.items()
        if name != _FOR_GYMNASIUM
    )


def convert_options(where: str, env_class: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options, also given as text, in the types of the constructor."""
    hints, known = _parameters(env_class)
    converted = {}
    for name, value in options.items():
        if name not in known:
            shown = [name for name in known if name != _FOR_GYMNASIUM]
            raise ConfigError(
                f"{where} has no option {name!r}. {did_you_mean(name, shown)}It has {', '.join(shown) or 'none'}."
            )
        try:
            converted[name] = convert(value, hints[name], texts=True)
        except ValueError:
            raise ConfigError(f"{where}: {name} should be {_kind(hints[name])}; it is {value!r:.80}.") from None
    return converted


def _parameters(env_class: type) -> tuple[dict[str, Any], dict[str, inspect.Parameter]]:
    hints = get_type_hints(env_class.__init__)  # type: ignore[misc]
    parameters = inspect.signature(env_class).parameters
    return hints, {name: each for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD}


def _kind(hint: Any) -> str:
    lists = any(get_origin(choice) is tuple for choice in (hint, *get_args(hint)))
    return f"{format_type(hint)}{' with commas between' if lists else ''}"
