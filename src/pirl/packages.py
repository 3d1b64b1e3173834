"""Which packages are installed, without importing them."""

import importlib.util


def is_installed(package: str) -> bool:
    """Whether a package can be imported; a mere directory of its name is none."""
    found = importlib.util.find_spec(package)
    # A directory of that name in the working directory, such as W&B leaves behind, is found too, but has no origin.
    return found is not None and found.origin is not None
