"""Brings LIBERO into the process: without the question it asks, the files it writes, or the downloads it starts."""

import hashlib
import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from pirl.envs.mujoco_rendering import import_simulator
from pirl.errors import ConfigError
from pirl.files import cache_directory, expand_home, write_file

Suite = Literal["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"]

ASSETS_VARIABLE = "PIRL_LIBERO_ASSETS"
ASSETS_REPOSITORY = "lerobot/libero-assets"
_CONFIG_VARIABLE = "LIBERO_CONFIG_PATH"


class LiberoPackage:
    """The installed package, imported: its tasks, where their files are, and its simulator."""

    def __init__(self) -> None:
        # `libero` itself is empty; `libero.libero` is where the question is asked.
        import_simulator("libero", "libero")
        spec = importlib.util.find_spec("libero.libero")
        if spec is None or spec.origin is None:
            raise ConfigError("the installed package `libero` is not LIBERO: pip install 'pirl[libero]' in a new venv.")
        self.root = Path(spec.origin).parent
        with _configured(self.root), _quiet_robosuite():
            self.wrapper: Any = import_simulator("libero.libero.envs.env_wrapper", "libero")
        self.module: Any = sys.modules["libero.libero"]

    def tasks(self, suite: Suite) -> tuple[str, ...]:
        """The names of a suite's tasks, in the package's order."""
        # The file by itself: the package around it imports torch, which nothing here needs.
        spec = importlib.util.spec_from_file_location(
            "libero_suite_task_map", self.root / "benchmark" / "libero_suite_task_map.py"
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return tuple(module.libero_task_map[suite])

    def description_file(self, suite: Suite, task: str) -> Path:
        """The file that describes a task's scene and goal."""
        return Path(self.module.get_libero_path("bddl_files")) / suite / f"{task}.bddl"

    def init_states_file(self, suite: Suite, task: str) -> Path:
        """The file with a task's initial states."""
        return Path(self.module.get_libero_path("init_states")) / suite / f"{task}.pruned_init"

    def use_assets(self, folder: Path) -> None:
        """Let what is built from now on take its meshes and textures from a folder."""
        # The package remembers here where it found them. It has no other place to say so, and downloads if it is empty.
        self.module._assets_path_cache = str(folder)


def task_prompt(task: str) -> str:
    """What to do, in words, as LIBERO derives it from a task's name: without the scene that some names begin with."""
    return re.sub(r"^[A-Z_]+_SCENE\d+_", "", task).replace("_", " ")


def find_assets(chosen: str | None, package_root: Path) -> Path:
    """The folder of meshes and textures: as chosen, as PIRL_LIBERO_ASSETS says, the package's own, or its cache."""
    for source, named in (("assets", chosen), (ASSETS_VARIABLE, os.environ.get(ASSETS_VARIABLE))):
        if named:
            folder = expand_home(named).resolve()
            if not _holds_assets(folder):
                problem = f"{source} = {named} does not hold LIBERO's assets: there is no folder `scenes`."
                raise ConfigError(f"{problem} {how_to_get_assets()}")
            return folder
    places = [package_root / "assets", Path.home() / ".cache" / "libero" / "assets"]
    for folder in places:
        if _holds_assets(folder):
            return folder
    raise ConfigError(
        f"LIBERO's assets (meshes and textures) are neither in {places[0]} nor in {places[1]}. {how_to_get_assets()}"
    )


def how_to_get_assets() -> str:
    """What to do about missing assets."""
    return (
        f"To get them: `hf download {ASSETS_REPOSITORY} --repo-type dataset --local-dir ~/.cache/libero/assets`; if you "
        f"have them elsewhere, name the folder with --env.assets or {ASSETS_VARIABLE}."
    )


def _holds_assets(folder: Path) -> bool:
    return (folder / "scenes").is_dir()


@contextmanager
def _configured(root: Path) -> Iterator[None]:
    """Let the package find a configuration when it is imported: the user's if one is set, else one of our own."""
    chosen = os.environ.get(_CONFIG_VARIABLE)
    if chosen:
        if not (Path(chosen) / "config.yaml").is_file():
            raise ConfigError(
                f"{_CONFIG_VARIABLE} = {chosen} has no config.yaml, and LIBERO would ask for one. Unset the variable "
                "(pirl then makes its own), or write the file."
            )
        yield
        return
    folders = {"benchmark_root": ".", "bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets"}
    config = {key: str(root / folder) for key, folder in folders.items()} | {"datasets": str(root.parent / "datasets")}
    # One for every installation, since the package reads it again and again.
    directory = cache_directory() / "libero" / hashlib.sha256(str(root).encode()).hexdigest()[:12]
    write_file(directory / "config.yaml", json.dumps(config, indent=2))  # JSON is YAML
    with mock.patch.dict(os.environ, {_CONFIG_VARIABLE: str(directory)}):
        yield


@contextmanager
def _quiet_robosuite() -> Iterator[None]:
    """Import robosuite without its advice on a private file, and without the log it keeps in /tmp for all users."""
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    # It opens /tmp/robosuite.log on import, which fails for every user but the first.
    with mock.patch.object(logging, "FileHandler", return_value=logging.NullHandler()):
        yield
