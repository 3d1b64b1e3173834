"""What fuzzing and hand-made input found in the readers, and some fuzzing of them at every run: see scripts/fuzz.py."""

import importlib.util
import json
import random
from pathlib import Path

import pytest

from pirl.errors import UserError

_FILE = Path(__file__).parents[2] / "scripts" / "fuzz.py"
_SPEC = importlib.util.spec_from_file_location("fuzz", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
fuzz = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(fuzz)

# How many inputs a reader is given, by how long it takes.
MENDED = {
    **dict.fromkeys(("read_info", "read_listing", "read_norm_stats", "read_labels", "read_csv", "load_robot"), 150),
    **dict.fromkeys(("read_metrics", "read_record", "read_model"), 150),
    "load_config": 10,
}
NEST = "[" * 5000
MEAN = '{"norm_stats": {"state": {"mean": %s, "std": [1.0]}}}'
ROBOT = '{"name": "a", "cameras": {}, "state": ["s"], "actions": ["a"], "delta": [%s]}'

FINDINGS = [
    ("an integer that no float can hold", "read_norm_stats", MEAN % f"[{10**400}]", "finite numbers"),
    ("no mean where there should be one", "read_norm_stats", MEAN % "null", "needs at least 'mean'"),
    ("numbers in quotes", "read_norm_stats", MEAN % '["1"]', "is not a list of numbers"),
    ("true for a number", "read_norm_stats", MEAN % "[true]", "is not a list of numbers"),
    ("statistics that are nested without end", "read_norm_stats", NEST, "not JSON"),
    ("a deviation below zero", "read_norm_stats", MEAN.replace("1.0", "-1.0") % "[0]", "zero or more"),
    ("a robot that is nested without end", "load_robot", NEST, "cannot be read"),
    ("as many dimensions as memory cells", "load_robot", ROBOT % 10**10, "dimensions"),
    ("more dimensions than can be counted", "load_robot", ROBOT % 10**30, "whole numbers"),
    ("an integer that cannot be printed", "load_config", f"steps: 0x{'f' * 5000}", "whole number"),
    ("an integer in base 60 that cannot be printed", "load_config", f"steps: 1{':59' * 3000}", "whole number"),
    ("an integer that no counter holds", "load_config", f"steps: {2**63}", "too large"),
    ("a NUL in the name of a place", "load_config", 'runs_dir: "a\\0b"', "runs_dir should be a path"),
    ("runs in the home of nobody", "load_config", "runs_dir: ~nobody_at_all/x", "home of nobody"),
]


@pytest.mark.parametrize(
    ("reader", "content", "words"), [row[1:] for row in FINDINGS], ids=[row[0] for row in FINDINGS]
)
def test_what_was_found_is_refused_in_words(tmp_path, unchecked_signatures, reader, content, words):
    with pytest.raises(UserError, match=words):
        fuzz.READERS[reader](tmp_path, content.encode())


@pytest.mark.parametrize("reader", MENDED)
def test_a_reader_returns_or_says_what_is_wrong(tmp_path, unchecked_signatures, reader):
    rng, findings = random.Random(reader), tmp_path / "findings"
    findings.mkdir()
    seeds = list(fuzz.seeds(reader))
    for _ in range(MENDED[reader]):
        text = rng.choice(seeds)
        try:
            text = json.dumps(fuzz._mutated(json.loads(text), rng))
        except ValueError:
            place = rng.randrange(len(text))
            text = text[:place] + rng.choice(fuzz.TEXTS) + text[place + rng.randrange(3) :]
        fuzz.attempt(fuzz.READERS[reader], tmp_path, findings, text.encode(errors="surrogatepass"))
    assert [(file.name, file.read_bytes()) for file in findings.iterdir()] == []
