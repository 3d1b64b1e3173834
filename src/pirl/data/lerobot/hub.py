"""Where a dataset is: a directory, LeRobot's own folder, or the Hugging Face hub."""

import os
import re
from pathlib import Path

from pirl.errors import DataError
from pirl.files import is_elsewhere


def is_hub_id(name: str) -> bool:
    """Whether datasets on the hub are named so: NAME/DATASET."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) is not None


def lerobot_home() -> Path:
    """Where LeRobot keeps datasets, by the variables that it and the hub library go by."""
    if own := os.environ.get("HF_LEROBOT_HOME"):
        return Path(os.path.expanduser(own))
    if hub := os.environ.get("HF_HOME"):
        return Path(os.path.expanduser(hub)) / "lerobot"
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "huggingface" / "lerobot"


def locate(source: str | os.PathLike[str]) -> tuple[Path, str]:
    """The directory of a dataset given as a path or as a hub id, and the name to call it by."""
    name = os.fspath(source)
    if is_elsewhere(name):
        raise DataError(
            f"{name} is not on this machine: copy it and give its directory, or name a dataset on the Hugging Face hub "
            "as NAME/DATASET."
        )
    path = Path(os.path.expanduser(name))
    if path.exists() or not is_hub_id(name):
        return path, name
    home = lerobot_home() / name
    # LeRobot may have fetched the metadata alone.
    if (home / "meta").is_dir() and (home / "data").is_dir():
        return home, name
    try:
        import huggingface_hub
    except ImportError as error:
        raise DataError(
            f"there is no directory {name}. If it is a dataset on the Hugging Face hub: pip install 'pirl[hub]', "
            "or download it and give its directory."
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(name, repo_type="dataset")), name
    except Exception as error:  # the hub library raises errors of many families: network, authentication, names
        raise DataError(
            f"there is no directory {name}, and it cannot be fetched from the hub: {str(error).splitlines()[0]}"
        ) from error
