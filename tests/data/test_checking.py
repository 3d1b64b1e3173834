"""Checking: sound data passes, and every kind of damage is named by file, episode, column or value."""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pirl.data.checking import check_dataset
from pirl.data.lerobot.dataset import open_dataset
from pirl.data.outcomes import OutcomeConfig
from pirl.errors import DataError
from sample_datasets import BROKEN, VALID, build, fuzz_info, info_of


def snapshot(directory):
    return {
        os.path.join(parent, name): os.stat(os.path.join(parent, name), follow_symlinks=False).st_mtime_ns
        for parent, directories, names in os.walk(directory)
        for name in [*directories, *names]
    }


# Told, but no reason not to train: the files themselves are read, and they are sound.
READ_ALL_THE_SAME = (
    "total_episodes_too", "total_frames_other", "dtype_unknown", "dtype_object", "camera_shape_flat", "camera_shape_four",
    "other_size", "other_image_size", "overlapping_videos",
)  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_damage_is_named(name, tmp_path):
    builder, expected = BROKEN[name]
    built = builder(tmp_path / "data")
    before = snapshot(tmp_path)
    _, found = check_dataset(built.root, decode=True)
    severities = ("problem", "note") if name.startswith(READ_ALL_THE_SAME) else ("problem",)
    problems = "\n".join(str(entry) for entry in found if entry.severity in severities).lower()
    for text in expected:  # alternatives are separated by |
        assert any(alternative in problems for alternative in text.lower().split("|")), text
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", VALID)
def test_every_dialect_passes(name, tmp_path):
    built = VALID[name](tmp_path / "data")
    _, found = check_dataset(built.root, OutcomeConfig(unlabelled="success"), decode=True)
    assert [str(entry) for entry in found if entry.severity == "problem"] == []


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_fuzzed_description_is_read_or_refused_in_words(data, tmp_path):
    root = tmp_path / "data"
    built = build(root, cameras="none") if not root.exists() else None
    original = tmp_path / "info.json"
    if built is not None:
        original.write_text(json.dumps(info_of(built)))
    mutated = data.draw(fuzz_info(json.loads(original.read_text())))
    (root / "meta" / "info.json").write_text(json.dumps(mutated))
    before = snapshot(tmp_path)
    _, found = check_dataset(root)
    assert all(str(entry) for entry in found)
    try:
        open_dataset(root)
    except DataError as error:
        assert "cannot be read" in str(error)
    assert snapshot(tmp_path) == before
