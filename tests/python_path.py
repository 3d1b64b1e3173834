"""Where processes that tests start look for modules: in what a test gives them, and in the sources beside the tests.

Without the latter they would import pirl from wherever it is installed, which may be another checkout.
"""

import os
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "src"


def python_path(*places: Path | str) -> str:
    return os.pathsep.join(map(str, (*places, SOURCES)))
