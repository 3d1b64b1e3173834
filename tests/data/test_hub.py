"""Datasets by name: a directory first, then LeRobot's own folder, then the hub."""

import sys
import types

import pytest

from pirl.data import open_dataset
from pirl.errors import DataError
from sample_datasets import build


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for the hub library that knows one dataset."""
    built = build(tmp_path / "there", cameras="none")

    def snapshot_download(name, repo_type):
        if (name, repo_type) != ("me/pick", "dataset"):
            raise OSError(f"404: no dataset {name}\nand a long story")
        return str(built.root)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return built


def test_a_hub_id_is_fetched(hub):
    dataset = open_dataset("me/pick")
    assert dataset.name == "me/pick"
    assert len(dataset) == sum(len(episode) for episode in hub.episodes)


def test_what_is_on_disk_comes_before_the_hub(hub, tmp_path):
    build(tmp_path / "home" / "me" / "pick", cameras="none", lengths=(3,))
    assert len(open_dataset("me/pick")) == 3
    build(tmp_path / "me" / "pick", cameras="none", lengths=(2,))
    assert len(open_dataset("me/pick")) == 2


def test_a_name_nobody_knows_is_explained_in_a_line(hub):
    with pytest.raises(DataError, match="me/place.*404: no dataset me/place$"):
        open_dataset("me/place")


def test_without_the_hub_library_it_says_what_to_install(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"pirl\[hub\]"):
        open_dataset("me/pick")
