"""Small LeRobot datasets for tests, written without pirl: sound ones, odd ones, and every kind of damage."""

from sample_datasets.broken import BROKEN
from sample_datasets.build import (
    build,
    edit_column,
    edit_data,
    edit_episodes,
    edit_info,
    edit_table,
    info_of,
    read_bars,
    set_episode,
    write_jsonl,
)
from sample_datasets.odd import VALID

__all__ = [
    "BROKEN",
    "VALID",
    "build",
    "edit_column",
    "edit_data",
    "edit_episodes",
    "edit_info",
    "edit_table",
    "info_of",
    "read_bars",
    "set_episode",
    "write_jsonl",
]
