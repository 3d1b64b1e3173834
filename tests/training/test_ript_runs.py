"""Runs of RIPT as a whole, with a toy for a learner in an environment of chance: what is done when, and when it fails."""

import pytest
from training_runs import read_metrics, values_of

from pirl.training.trainer import train


def test_probe(practise, tmp_path, capsys):
    assert train(practise(), exp_name="run") == 0
    print(capsys.readouterr().err)
    for l in read_metrics(tmp_path / "run"): print(l)
    assert 0
