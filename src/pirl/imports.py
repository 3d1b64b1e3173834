"""Imports by name: the user's modules and classes, optional packages, and names that are loaded when they are used."""

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from pirl.errors import ConfigError, did_you_mean
from pirl.files import expand_home


def is_installed(package: str) -> bool:
    """Whether a package can be imported; a mere directory of its name, such as W&B leaves behind, has no origin."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package whose `if TYPE_CHECKING` imports are loaded when used."""
    nodes = (node for node in ast.walk(ast.parse(Path(file).read_bytes())) if isinstance(node, ast.ImportFrom))
    own = [node for node in nodes if (node.module or "").startswith(f"{package}.")]
    module_of = {alias.name: str(node.module) for node in own for alias in node.names}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    return load, lambda: sorted(module_of), list(module_of)


def load_module(module: str, whose: str) -> ModuleType:
    """A module, also one in the current directory; errors name `whose` it is."""
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
    """A class named `module:Class` or `path/to/file.py:Class`; errors say `what` it should be."""
    module_name, _, class_name = name.rpartition(":")
    if not module_name or not class_name:
        raise ConfigError(f"{name!r} names no {what}: give module:Class, or path/to/file.py:Class.")
    is_file = module_name.endswith(".py")
    module = _load_file(module_name, what) if is_file else load_module(module_name, f"the {what} {name!r}")
    if (found := getattr(module, class_name, None)) is not None:
        return found
    classes = {key: value for key, value in vars(module).items() if isinstance(value, type)}
    own = [key for key, value in classes.items() if value.__module__ == module.__name__]
    has = f"It has {', '.join(own)}." if own else "It has none."
    raise ConfigError(f"{module_name} has no class {class_name!r}. {did_you_mean(class_name, classes)}{has}")


def _load_file(path: str, what: str) -> ModuleType:
    """A file as a module; its neighbors become importable, before those of the current directory."""
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
