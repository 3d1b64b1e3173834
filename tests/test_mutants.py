"""What `make mutants` breaks is there to be broken, and so is the test that stands against it."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MUTANTS = runpy.run_path(str(ROOT / "scripts" / "mutants.py"))["MUTANTS"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}-{mutant.test.split('::')[-1]}")
def test_a_mutant_can_be_made(mutant):
    assert (ROOT / "src" / "pirl" / mutant.file).read_text().count(mutant.right) == 1
    file, _, name = mutant.test.partition("::")
    assert f"def {name}" in (ROOT / "tests" / file).read_text()
