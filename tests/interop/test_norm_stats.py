"""OpenPI's statistics files are read, written, and complained about."""

import json
import os

import numpy as np
import pytest

from golden import ROOT, needs_golden
from pirl.errors import CheckpointError
from pirl.interop.norm_stats import read_norm_stats, write_norm_stats


@needs_golden
@pytest.mark.parametrize("asset", ["asset", "asset_no_quantiles"])
def test_a_file_of_openpi_comes_back_equal(tmp_path, asset):
    file = ROOT / "transforms" / "running_stats" / asset / "norm_stats.json"
    stats = read_norm_stats(file)
    assert all(entry.mean.dtype == np.float64 for entry in stats.values())
    assert (next(iter(stats.values())).q01 is None) == (asset == "asset_no_quantiles")
    write_norm_stats(tmp_path / "norm_stats.json", stats)
    assert json.loads((tmp_path / "norm_stats.json").read_text()) == json.loads(file.read_text())
    assert read_norm_stats(tmp_path / "norm_stats.json") == stats


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "no 'norm_stats'"),
        ('{"norm_stats": {"state": {"mean": [1]}}}', "state needs at least"),
        ('{"norm_stats": {"state": {"mean": [1], "std": [1, 2]}}}', "different lengths"),
        ('{"norm_stats": {"state": {"mean": [NaN], "std": [1]}}}', "state.mean"),
        ('{"norm_stats": {"state": {"mean": [1], "std": [-1]}}}', "state.std should be zero or more"),
        ('{"norm_stats": {"state": {"mean": 3, "std": [1]}}}', "state.mean"),
    ],
)
def test_broken_files_are_explained(tmp_path, text, message):
    file = tmp_path / "norm_stats.json"
    file.write_text(text)
    with pytest.raises(CheckpointError, match=message) as error:
        read_norm_stats(file)
    assert str(file) in str(error.value)


def test_an_absent_file_and_a_pipe_are_named(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("norm_stats.json", "pipe.json"):
        with pytest.raises(CheckpointError, match=f"cannot read .*{name}"):
            read_norm_stats(tmp_path / name)
