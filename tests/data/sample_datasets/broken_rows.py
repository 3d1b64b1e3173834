"""How damage is listed, and damage to rows; `BROKEN` is whole once broken_info is imported."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sample_datasets.build import (
    CAMERAS,
    Builder,
    Built,
    Variant,
    edit_column,
    edit_episodes,
    edit_info,
    edit_table,
    set_episode,
)
from sample_datasets.odd import made

# Damage. A description says what is wrong and what a complaint should name; `broken` and the helpers below list it.

BROKEN: dict[str, tuple[Builder, tuple[str, ...]]] = {}
BOTH = ("v2.1", "v3.0")
# Where episode 1 lies, its video being that of the first camera.
FILES = {
    "v2.1": {"data": "episode_000001.parquet", "video": "episode_000001.mp4", "meta": "episodes.jsonl"},
    "v3.0": {"data": "file-000.parquet", "video": "file-001.mp4", "meta": "meta/episodes"},
}
NAN = float("nan")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"


def broken(*expected: str, versions: Sequence[str] = BOTH, **options: Any) -> Callable[[Variant], Variant]:
    """List a variant as damage; the texts are what a complaint must contain, <data> etc. standing for `FILES`."""

    def register(variant: Variant) -> Variant:
        for version in versions:
            name = variant.__name__ + ("_v30" if version == "v3.0" else "")
            texts = [
                functools.reduce(lambda t, f: t.replace(f"<{f}>", FILES[version][f]), FILES[version], text)
                for text in expected
            ]
            assert name not in BROKEN, name
            BROKEN[name] = made(variant, **{"cameras": "none", "version": version} | options), tuple(texts)
        return variant

    return register


def damage(name: str, description: str, variant: Variant, *expected: str, **options: Any) -> None:
    """List damage that one expression can do."""
    variant.__name__, variant.__doc__ = name, description
    broken(*expected, **options)(variant)


def unmentioned(message: str, expected: Sequence[str]) -> list[str]:
    """Which of the expected texts a complaint leaves out, whatever its case and line breaks.

    "a|b" asks for either. "episode 1" may also be said as "episode_000001", "Episodes: 1" or "episode_index 1".
    """
    said = " ".join(message.split()).lower()

    def found(text: str) -> bool:
        if number := re.fullmatch(r"episode (\d+)", text):
            return re.search(rf"episodes?(_index)?[\s_:=#\[]{{0,3}}0*{number[1]}(?!\d)", said) is not None
        return text.lower() in said

    return [text for text in expected if not any(found(either) for either in text.split("|"))]


def replaced(position: int, value: Any) -> Callable[[list[Any]], list[Any]]:
    """A change of one element of a list; a function changes what is there."""

    def change(values: list[Any]) -> list[Any]:
        new = value(values[position]) if callable(value) else value
        return [*values[:position], new, *values[position + 1 :]]

    return change


def data_of(built: Built) -> Path:
    return built.episodes[1].data_file


def video_of(built: Built) -> Path:
    return built.episodes[1].video_files[CAMERAS[0]]


def outside(built: Built) -> Path:
    """A directory beside the dataset."""
    path = built.root.parent / "outside"
    path.mkdir(exist_ok=True)
    return path


# Damage to rows.


def column_damage(
    name: str,
    description: str,
    column: str,
    change: Callable[[list[Any]], list[Any]],
    kind: pa.DataType | None = None,
    where: str = "episode 1",
) -> None:
    """List wrong values in one column of episode 1: a complaint names the column and the episode."""
    damage(name, description, lambda built: edit_column(built, column, change, kind), column, where)


FLOATS = pa.list_(pa.float32())
STATE = "observation.state"
WHERE = "episode 1|<data>"  # what is found by type rather than by value may be told of the file
column_damage("nan_in_state", "A number of the state is NaN.", STATE, replaced(3, replaced(2, NAN)))
column_damage("infinite_action", "A number of the action is infinite.", "action", replaced(0, replaced(1, -np.inf)))
column_damage("null_state", "The state of a frame is null.", STATE, replaced(2, None), where=WHERE)
column_damage("null_in_action", "A number is null.", "action", replaced(2, replaced(0, None)), where=WHERE)
column_damage("narrow_row", "A state has three numbers, not four.", STATE, replaced(2, lambda row: row[:3]), FLOATS)
column_damage(
    "hidden_widths",
    "A state has three numbers and the next has five, so that the total hides it.",
    STATE,
    lambda rows: [*rows[:2], rows[2][:3], [*rows[3], 0.0], *rows[4:]],
    FLOATS,
)
column_damage("nan_reward", "A reward is NaN.", "next.reward", replaced(1, NAN))
column_damage("done_too_early", "next.done is true amid an episode: warn.", "next.done", replaced(2, True))
column_damage("time_goes_back", "A timestamp is earlier than the one before: warn.", "timestamp", replaced(3, 0.05))
column_damage("nan_timestamp", "A timestamp is NaN.", "timestamp", replaced(3, NAN))
column_damage("frame_index_gap", "Number 2 is left out.", "frame_index", lambda rows: [0, 1, 3, 4, 5])
column_damage("frame_index_twice", "Number 1 comes twice.", "frame_index", replaced(2, 1))


@broken("action", "2")
def constant_action_dimension(built: Built) -> Built:
    """The last dimension of the action never changes: warn, naming the column and the dimension."""
    for episode in range(len(built.episodes)):
        edit_column(built, "action", lambda rows: [[*row[:2], 0.5] for row in rows], episode=episode)
    constant = [np.pad(e.action[:, :2], ((0, 0), (0, 1)), constant_values=0.5) for e in built.episodes]
    episodes = [dataclasses.replace(e, action=a) for e, a in zip(built.episodes, constant, strict=True)]
    return dataclasses.replace(built, episodes=tuple(episodes))


def new_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)


@broken("action", WHERE)
def narrow_column(built: Built) -> None:
    """All actions of one file have two numbers where info.json promises three: name the column, and where."""

    def change(table: pa.Table) -> pa.Table:
        rows = [row[:2] for row in table["action"].to_pylist()]
        return new_column(table, "action", pa.array(rows, pa.list_(pa.float32(), 2)))

    edit_table(data_of(built), change)


@broken(STATE, WHERE)
def state_of_strings(built: Built) -> None:
    """The state in one file is text: name the column, and where."""
    edit_table(data_of(built), lambda table: new_column(table, STATE, pa.array(["up"] * table.num_rows)))


@broken("next.reward", WHERE)
def no_reward_column(built: Built) -> None:
    """One data file lacks the reward that info.json declares: name the column, and where."""
    edit_table(data_of(built), lambda table: table.drop_columns(["next.reward"]))


@broken("observation.velocity")
def feature_without_column(built: Built) -> None:
    """info.json declares a feature that no parquet file has: name it."""
    edit_info(built, ["features", "observation.velocity"], {"dtype": "float32", "shape": [4], "names": None})


def without_rows(built: Built) -> None:
    edit_table(data_of(built), lambda table: table.filter(pc.field("episode_index") != 1))


@broken("<data>|episode 1")
def episode_without_data(built: Built) -> None:
    """The metadata list an episode of which there are no rows: name it, or the file that should have it."""
    if built.version == "v3.0":
        without_rows(built)
    else:
        data_of(built).unlink()


@broken("episode 1")
def episode_of_length_zero(built: Built) -> None:
    """An episode has no rows, and the metadata say so: name it."""
    set_episode(built, "length", 0)
    without_rows(built)


@broken("episode 1")
def episode_without_metadata(built: Built) -> None:
    """There are rows of an episode that the metadata leave out: name it."""
    edit_episodes(built, lambda rows: [row for row in rows if row["episode_index"] != 1])


@broken("<data>|episode 1", versions=["v2.1"])
def wrong_episode_in_file(built: Built) -> None:
    """The file of episode 1 says that its rows are of episode 2: name the file."""
    edit_column(built, "episode_index", lambda values: [2] * len(values))


@broken("task", "7")
def task_without_name(built: Built) -> None:
    """A row's task_index is 7, and there is no such task: name the number."""
    edit_column(built, "task_index", replaced(1, 7))
