"""Reading: what LeRobot itself returned, and every dialect of the format, comes back value by value."""

import json
from pathlib import Path

import numpy as np
import pytest

from pirl.data.checking import check_dataset
from pirl.data.lerobot.dataset import open_dataset
from sample_datasets import VALID, read_bars

GOLDEN = Path(__file__).resolve().parents[2].parent / "shared" / "golden_data"
RECORDED = sorted(path.parent.name for path in GOLDEN.glob("*/expected.npz"))
needs_golden_data = pytest.mark.skipif(not RECORDED, reason="the recordings are not beside the project")


@needs_golden_data
@pytest.mark.parametrize("name", RECORDED or ["none"])
def test_real_datasets_read_back_as_lerobot_returned_them(name):
    expected = np.load(GOLDEN / name / "expected.npz")
    about = json.loads(str(expected["info_json"]))
    dataset = open_dataset(GOLDEN / name)
    columns = {key.removeprefix("column/"): expected[key] for key in expected if key.startswith("column/")}
    for column, values in dataset.columns(list(columns)).items():
        np.testing.assert_array_equal(values, columns[column], err_msg=column)
        assert values.dtype == columns[column].dtype
    assert list(dataset.cameras) == about["cameras"]
    texts = {int(index): text for index, text in about["tasks"].items()}
    spoken = [dataset.rows.tasks[task] for task in dataset.rows.task_of_row]
    assert spoken == [texts[index] for index in columns["task_index"].tolist()]
    for camera in dataset.cameras:
        frames = np.concatenate([np.stack(list(dataset.decode(camera, e))) for e in range(len(dataset.episode_ids))])
        for row in about["plain_indices"]:
            np.testing.assert_array_equal(frames[row].transpose(2, 0, 1), expected[f"frame/{row}/{camera}"])
        for row in about["chunk_indices"]:
            if f"chunk/{row}/{camera}" in expected:
                end = int(dataset.starts[np.searchsorted(dataset.starts, row, side="right")])
                rows = [row, min(row + about["chunk_horizon"], end - 1)]
                np.testing.assert_array_equal(frames[rows].transpose(0, 3, 1, 2), expected[f"chunk/{row}/{camera}"])


@needs_golden_data
@pytest.mark.parametrize("name", RECORDED or ["none"])
def test_real_datasets_have_no_problems(name):
    _, found = check_dataset(GOLDEN / name, decode=True)
    assert [str(problem) for problem in found] == []


@pytest.mark.parametrize("name", VALID)
def test_every_dialect_reads_back_as_it_was_written(name, tmp_path):
    built = VALID[name](tmp_path / "data")
    dataset = open_dataset(built.root)
    assert dataset.lengths.tolist() == [len(episode) for episode in built.episodes]
    names = [built.state_key, built.action_key]
    columns = dataset.columns(names)
    for number, episode in enumerate(built.episodes):
        rows = slice(dataset.starts[number], dataset.starts[number + 1])
        for column, truth in zip(names, (episode.state, episode.action), strict=True):
            np.testing.assert_array_equal(columns[column][rows], truth)
        assert [dataset.rows.tasks[task] for task in dataset.rows.task_of_row[rows]] == list(episode.tasks)
        for place, camera in enumerate(built.cameras):
            seen = [read_bars(frame) for frame in dataset.decode(camera, number)]
            assert seen == [(place, number, frame) for frame in range(len(episode))]
