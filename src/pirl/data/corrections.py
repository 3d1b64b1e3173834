"""Frames in which a human, not the policy, chose the action."""

import numpy as np
from jaxtyping import Bool, Int64

from pirl.data.lerobot.reader import Dataset
from pirl.data.problems import Problem

# LeRobot's, those of HIL-SERL and Evo-RL, and RLinf's.
INTERVENTION_COLUMNS = ("intervention", "is_intervention", "complementary_info.is_intervention", "intervene_flag")


def find_interventions(dataset: Dataset) -> str | None:
    """The column that marks human actions, if there is one."""
    return next((name for name in INTERVENTION_COLUMNS if name in dataset.column_names), None)


def read_interventions(dataset: Dataset) -> tuple[Bool[np.ndarray, " rows"] | None, list[Problem]]:
    """Whether a human chose the action of each frame; nothing if no column tells, or if it cannot be read."""
    name = find_interventions(dataset)
    if name is None:
        return None, []
    columns, problems = dataset.try_columns([name])
    if name not in columns:
        return None, problems
    values = columns[name]
    if values.ndim != 1 or values.dtype.kind not in "biuf" or not np.isin(values, (0, 1)).all():
        wrong = "is left aside: it should hold 0 or 1 for each frame"
        return None, [Problem(wrong, "note", column=name, value=str(values.dtype))]
    return values.astype(bool), []


def human_throughout(
    human: Bool[np.ndarray, " rows"], ends: Int64[np.ndarray, " rows"], horizon: int
) -> Bool[np.ndarray, " rows"]:
    """Whether a human chose all actions of the chunk from each row on; `ends` are those of the rows' episodes."""
    before = np.concatenate([[0], np.cumsum(human)])
    rows = np.arange(len(human))
    stop = np.minimum(rows + horizon, ends)
    return (stop > rows) & (before[stop.clip(min=0)] - before[rows] == stop - rows)
