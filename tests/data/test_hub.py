"""Datasets by name: a directory first, then LeRobot's own folder, then the hub."""

import shutil
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


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_LEROBOT_HOME": "own", "HF_HOME": "hub", "XDG_CACHE_HOME": "cache"}, "own"),
        ({"HF_HOME": "hub", "XDG_CACHE_HOME": "cache"}, "hub/lerobot"),
        ({"XDG_CACHE_HOME": "cache"}, "cache/huggingface/lerobot"),
        ({}, ".cache/huggingface/lerobot"),
        ({"HF_LEROBOT_HOME": "", "HF_HOME": "", "XDG_CACHE_HOME": ""}, ".cache/huggingface/lerobot"),
        ({"HF_HOME": "~/hub"}, "hub/lerobot"),
    ],
)
def test_lerobots_own_folder_is_where_lerobot_has_it(hub, tmp_path, monkeypatch, variables, folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_LEROBOT_HOME", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value if value[:1] in ("", "~") else str(tmp_path / value))
    built = build(tmp_path / folder / "me" / "pick", cameras="none", lengths=(3,))
    assert open_dataset("me/pick").root == built.root


def test_metadata_alone_are_not_taken_for_the_dataset(hub, tmp_path):
    kept = build(tmp_path / "home" / "me" / "pick", cameras="none", lengths=(3,))
    shutil.rmtree(kept.root / "data")
    assert open_dataset("me/pick").root == hub.root


def test_a_name_nobody_knows_is_explained_in_a_line(hub):
    with pytest.raises(DataError, match="me/place.*404: no dataset me/place$"):
        open_dataset("me/place")


def test_without_the_hub_library_it_says_what_to_install(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"pirl\[hub\]"):
        open_dataset("me/pick")


@pytest.mark.parametrize(
    "place", ["https://huggingface.co/datasets/me/pick", "gs://bucket/pick", "hf://datasets/me/pick"]
)
def test_a_dataset_elsewhere_is_to_be_copied_or_named_as_the_hub_does(place):
    with pytest.raises(DataError, match=f"{place} is not on this machine: copy it .* NAME/DATASET"):
        open_dataset(place)
