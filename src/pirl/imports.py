"""Code of the user's, by name: modules, and classes as `module:Class` or `path/to/file.py:Class`."""

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from pirl.errors import ConfigError, did_you_mean
from pirl.files import expand_home


def load_module(module: str, whose: str) -> ModuleType:
    """A module, also one in the current directory; `whose` it is, an error says."""
    _make_current_directory_importable()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{whose} needs the module {error.name}, which cannot be imported: install its package, or run where "
            "its file is."
        ) from error
    except Exception as error:
        raise ConfigError(f"{whose}: importing {module} failed with {type(error).__name__}: {error}") from error


def load_named(name: str, what: str) -> Any:
    """What is named as `module:Class` or `path/to/file.py:Class`; `what` it is meant to be, an error says."""
    place, _, class_name = name.rpartition(":")
    if not place or not class_name:
        raise ConfigError(f"{name!r} names no {what}: give module:Class, or path/to/file.py:Class.")
    module = _load_file(place, what) if place.endswith(".py") else load_module(place, f"the {what} {name!r}")
    if (found := getattr(module, class_name, None)) is not None:
        return found
    classes = [key for key, value in vars(module).items() if isinstance(value, type)]
    # What is only imported there is hardly what is looked for.
    own = [key for key in classes if vars(module)[key].__module__ == module.__name__]
    has = f"It has {', '.join(own)}." if own else "It has none."
    raise ConfigError(f"{place} has no class {class_name!r}. {did_you_mean(class_name, classes)}{has}")


def _load_file(path: str, what: str) -> ModuleType:
    """A file as a module, with its neighbours importable, which go before those of the current directory."""
    file = expand_home(path).absolute()
    if not file.is_file():
        raise ConfigError(f"there is no {what} file {file}.")
    loaded = sys.modules.get(file.stem)
    if loaded is not None and getattr(loaded, "__file__", None) != str(file):
        raise ConfigError(f"{file} has the name of another module, {file.stem}: rename the file.")
    _make_current_directory_importable()
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    return load_module(file.stem, f"the {what} file {file}")


def _make_current_directory_importable() -> None:
    """As `python` itself does, but not a command that pip installed."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
