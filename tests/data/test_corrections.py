"""Corrections: read from every column that marks them, shown, written and selected."""

import numpy as np
import pytest

from pirl.data import (
    ChunkShape,
    DatasetWriter,
    OutcomeConfig,
    PolicyIO,
    Robot,
    Selection,
    gather_chunks,
    load_trajectories,
    open_dataset,
    read_outcomes,
    summarize,
)
from pirl.data.prepare import human_throughout, read_interventions
from pirl.errors import ConfigError
from pirl.models import get_model_config
from sample_datasets import build, edit_column, edit_data, edit_info, info_of

ARM = Robot(name="arm", cameras={}, state=("observation.state",), actions=("action",))
MODEL = get_model_config("tiny_state")


def renamed(built, old, new):
    edit_data(built, lambda table: table.rename_columns([new if name == old else name for name in table.column_names]))
    edit_info(built, ["features", new], info_of(built)["features"][old])
    edit_info(built, ["features", old], ...)
    return built


@pytest.fixture(params=["intervention", "complementary_info.is_intervention"])
def column(request):
    return request.param


@pytest.fixture
def corrected(column, tmp_path):
    """A dataset with this column, and the marks of each episode."""
    version = "v2.1" if column == "intervention" else "v3.0"
    built = build(tmp_path, rewards="success", cameras="none", lengths=(9, 8, 12), version=version)
    marks = [[0, 1, 1, 1, 0, 0, 1, 1, 1], [0] * 8, [1] * 12]
    for episode, values in enumerate(marks):
        edit_column(built, "intervention", lambda _, values=values: [bool(mark) for mark in values], episode=episode)
    return renamed(built, "intervention", column) if column != "intervention" else built, np.concatenate(marks) == 1


def test_they_are_read_and_shown(corrected, column):
    built, marks = corrected
    dataset = open_dataset(built.root)
    np.testing.assert_array_equal(read_interventions(dataset)[0], marks)
    shown = summarize(dataset, OutcomeConfig())["interventions"]
    assert shown == {"column": column, "frames": 18, "episodes": 2}


def test_a_chunk_is_human_if_all_its_actions_are(corrected):
    built, marks = corrected
    dataset = open_dataset(built.root)
    trajectories = load_trajectories(dataset, ARM, MODEL)
    rows = np.concatenate([np.arange(s, e) for s, e in zip(trajectories.starts, trajectories.ends, strict=True)])
    for horizon in (1, 3, 7):
        chunks = gather_chunks(
            trajectories, rows, ChunkShape(horizon, sees_next=False), PolicyIO(ARM, MODEL, None, None)
        )
        expected = []
        for row in rows:
            end = trajectories.ends[trajectories.episode_of(np.array([row]))[0]]
            expected.append(all(marks[step] for step in range(row, min(row + horizon, end))))
        assert chunks.human.tolist() == expected
        ends = np.repeat(trajectories.ends, dataset.lengths)
        assert human_throughout(marks, ends, horizon)[rows].tolist() == expected


def test_they_can_be_selected(corrected):
    built, _ = corrected
    dataset = open_dataset(built.root)
    outcomes = read_outcomes(dataset, OutcomeConfig())
    weights = Selection(human=True).weights(dataset, outcomes, horizon=3)
    assert np.flatnonzero(weights).tolist() == [1, 6, 7, 8, *range(17, 29)]
    assert Selection().weights(dataset, outcomes, horizon=3).all(), "otherwise everything is used"


def test_without_marks_nothing_is_human_and_nothing_can_be_selected(tmp_path):
    dataset = open_dataset(build(tmp_path, cameras="none").root)
    trajectories = load_trajectories(dataset, ARM, MODEL)
    chunks = gather_chunks(trajectories, np.arange(4), ChunkShape(2), PolicyIO(ARM, MODEL, None, None))
    assert not chunks.human.any()
    with pytest.raises(ConfigError, match="does not tell what a human chose: no column is called intervention or"):
        Selection(human=True).weights(dataset, read_outcomes(dataset, OutcomeConfig()), horizon=2)


def test_the_writer_writes_them(tmp_path):
    features = {
        "observation.state": {"dtype": "float32", "shape": (2,)},
        "action": {"dtype": "float32", "shape": (2,)},
        "intervention": {"dtype": "bool", "shape": (1,)},
    }
    marks = np.array([False, True, True, False])
    with DatasetWriter(tmp_path / "data", fps=10, features=features, version="v3.0") as writer:
        columns = {"observation.state": np.zeros((4, 2)), "action": np.zeros((4, 2)), "intervention": marks}
        writer.write_episode(columns, task="pick")
    dataset = open_dataset(tmp_path / "data")
    np.testing.assert_array_equal(read_interventions(dataset)[0], marks)
