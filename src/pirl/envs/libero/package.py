"""The installed LIBERO package: imported without its questions, files and downloads; its tasks and initial states."""

import hashlib
import importlib.util
import io
import json
import logging
import os
import pickle
import re
import runpy
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
from jaxtyping import Float64

from pirl.envs.mujoco import import_simulator
from pirl.errors import ConfigError, DataError
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
        return tuple(
            runpy.run_path(str(self.root / "benchmark" / "libero_suite_task_map.py"))["libero_task_map"][suite]
        )

    def description_file(self, suite: Suite, task: str) -> Path:
        return Path(self.module.get_libero_path("bddl_files")) / suite / f"{task}.bddl"

    def init_states_file(self, suite: Suite, task: str) -> Path:
        return Path(self.module.get_libero_path("init_states")) / suite / f"{task}.pruned_init"

    def use_assets(self, folder: Path) -> None:
        """Let what is built from now on take its meshes and textures from a folder."""
        # The package remembers here where it found them. It has no other place to say so, and downloads if it is empty.
        self.module._assets_path_cache = str(folder)


def task_prompt(task: str) -> str:
    return re.sub(r"^[A-Z_]+_SCENE\d+_", "", task).replace("_", " ")


def find_assets(chosen: str | None, package_root: Path) -> Path:
    """The folder of meshes and textures: as chosen, as PIRL_LIBERO_ASSETS says, the package's own, or its cache."""
    for source, named in (("assets", chosen), (ASSETS_VARIABLE, os.environ.get(ASSETS_VARIABLE))):
        if named:
            folder = expand_home(named).resolve()
            if not (folder / "scenes").is_dir():
                problem = f"{source} = {named} does not hold LIBERO's assets: there is no folder `scenes`."
                raise ConfigError(f"{problem} {how_to_get_assets()}")
            return folder
    folders = [package_root / "assets", Path.home() / ".cache" / "libero" / "assets"]
    for folder in folders:
        if (folder / "scenes").is_dir():
            return folder
    raise ConfigError(
        f"LIBERO's assets (meshes and textures) are neither in {folders[0]} nor in {folders[1]}. {how_to_get_assets()}"
    )


def how_to_get_assets() -> str:
    return (
        f"To get them: `hf download {ASSETS_REPOSITORY} --repo-type dataset --local-dir ~/.cache/libero/assets`; if you "
        f"have them elsewhere, name the folder with --env.assets or {ASSETS_VARIABLE}."
    )


@contextmanager
def _configured(root: Path) -> Iterator[None]:
    chosen = os.environ.get(_CONFIG_VARIABLE)
    if chosen:
        if not (Path(chosen) / "config.yaml").is_file():
            raise ConfigError(f"{_CONFIG_VARIABLE} = {chosen} has no config.yaml. Unset it: pirl then makes its own.")
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


# --- initial states: pickles, read without running what a pickle can contain ------------------------------------------


def read_init_states(path: Path) -> Float64[np.ndarray, "states values"]:
    """The initial states in a file that `torch.save` made of one float64 array."""
    if not path.is_file():
        raise DataError(
            f"{path} does not exist. LIBERO has the initial states of a task there: install hf-libero again."
        )
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl")
            states = _ArrayUnpickler(archive.read(name), path).load()
        if not isinstance(states, np.ndarray) or states.dtype != "<f8" or states.ndim != 2:
            raise TypeError(f"it holds {type(states).__name__}, not a table of float64 numbers")
        return states.copy(order="K")
    except DataError:
        raise
    except Exception as error:  # damaged archives and pickles fail in every way there is
        raise DataError(
            f"{path} is damaged, or not initial states as LIBERO has them, an array saved by torch "
            f"({type(error).__name__}: {error}). Install hf-libero again."
        ) from error


# What the pickle of an array calls; numpy 1 and 2 call the same function by different names.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    ("numpy._core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): lambda text, encoding: text.encode("latin1"),  # protocol 2 has no bytes: they are text
}


class _ArrayUnpickler(pickle.Unpickler):
    def __init__(self, content: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(content))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise DataError(
                f"{self._path} wants to call {module}.{name}, which an array does not need. Nothing was run, but do not "
                "open this file with other programs: install hf-libero again, from a source you trust."
            )
        return _ALLOWED[module, name]
