"""What hostile input is made from: sound datasets and a sound checkpoint, made once, copied per case."""

import shutil

import pytest
from arena import Arena

from sample_datasets import build


@pytest.fixture
def arena(tmp_path, capsys, monkeypatch, unchecked_signatures):
    """A guarded directory to call commands in; nobody checks signatures there, as for those who use pirl."""
    arena = Arena(tmp_path, capsys)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(arena.work)
    return arena


@pytest.fixture(scope="session")
def sound_datasets(tmp_path_factory):
    root = tmp_path_factory.mktemp("sound")
    for version in ("v2.1", "v3.0"):
        build(root / version, version=version, size=(16, 32), lengths=(4, 3, 5))
    build(root / "pictures", version="v2.1", size=(16, 32), lengths=(3, 2), cameras="image")
    return root


@pytest.fixture(scope="session")
def sound_checkpoint(tmp_path_factory):
    import numpy as np

    from builders import MICRO, random_model
    from pirl.interop import NormStats, save_policy

    path = tmp_path_factory.mktemp("sound") / "policy"
    stats = {name: NormStats(np.zeros(3), np.ones(3), -np.ones(3), np.ones(3)) for name in ("state", "actions")}
    save_policy(path, random_model(MICRO), norm_stats={"arm": stats})
    return path


@pytest.fixture
def with_datasets(arena, sound_datasets):
    """Sound datasets at v2.1, v3.0 and pictures."""
    for dataset in sound_datasets.iterdir():
        shutil.copytree(dataset, arena.work / dataset.name)
    return arena


@pytest.fixture
def with_checkpoint(arena, sound_checkpoint):
    """A sound checkpoint at `policy`."""
    shutil.copytree(sound_checkpoint, arena.work / "policy")
    return arena
