"""What the package says of itself."""

import re
from pathlib import Path

from pirl import training


def test_the_map_of_the_package_names_every_module_once():
    named = re.findall(r"`(\w+)`", training.__doc__)
    assert sorted(named) == sorted(file.stem for file in Path(training.__file__).parent.glob("[!_]*.py"))
