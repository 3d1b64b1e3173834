"""What a dataset says about how its episodes ended: columns, labels, fields of the metadata, and rewards that tell."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from pirl.data.labels import LABEL_FILE, Label, read_labels, yes_or_no
from pirl.data.lerobot.reader import Dataset, by_episode, is_beside
from pirl.data.problems import Problem

# LeRobot's own name first; then RLinf's, what many write by hand, that of DROID, and that of Evo-RL's recorder.
SUCCESS_COLUMNS = ("next.success", "is_success", "success", "is_episode_successful", "episode_success")
END_COLUMNS = {key: (f"next.{key}", key) for key in ("done", "truncated", "terminated")}
REWARD_COLUMN = "next.reward"
_REMEDY = "; or label all episodes (pirl data label), which is believed before columns"
_SOUNDS_LIKE_OUTCOME = re.compile("success|succeed|solved|fail|outcome|reward", re.IGNORECASE)


@dataclass(frozen=True)
class Evidence:
    """The columns and labels that speak about outcomes."""

    labels: dict[int, Label]  # by position
    listed: dict[int, bool]  # by position
    reward: np.ndarray | None
    success_column: np.ndarray | None
    success_in_rewards: dict[int, np.ndarray]  # by position, where rewards tell
    ends: dict[str, np.ndarray]  # done, truncated, terminated: those that are there
    names: dict[str, str | None]  # of their columns
    unread_columns: tuple[str, ...]  # that may tell, by their names
    unread_fields: dict[int, tuple[str, ...]]  # of the metadata, by position, likewise
    problems: tuple[Problem, ...]  # with columns that are there, but cannot be read
    read: frozenset[str | None]  # columns that could be read, if not in every episode

    def success(self, episode: int, first: int, last: int) -> tuple[bool | None, int]:
        """Whether an episode succeeded, and at which row if it did."""
        label = self.labels.get(episode)
        column = self.success_column
        marks = self.success_in_rewards.get(episode) if column is None else column[first:last]
        marked = np.zeros(last - first, bool) if marks is None else marks
        # A mark on every frame is a statement about the episode, not a moment.
        at = first + int(marked.argmax()) if marked.any() and not marked.all() else last - 1
        if label is not None and label.success is not None:
            return label.success, at
        if self.success_column is None and episode in self.listed:
            return self.listed[episode], at
        return None if marks is None else bool(marked.any()), at

    @cached_property
    def has_only_zeros(self) -> bool:
        """Whether the rewards are 0 throughout: a recorder's placeholder, as far as anybody can tell."""
        return self.reward is not None and not self.reward.any()

    def has_label_reward(self, episode: int) -> bool:
        """Whether somebody said what the episode is worth."""
        label = self.labels.get(episode)
        return label is not None and label.reward is not None

    def is_rewarded(self, episode: int) -> bool:
        """Whether there is a reward to take as it is."""
        return self.reward is not None or self.has_label_reward(episode)

    def has_rewards(self, episode: int) -> bool:
        """Whether there are rewards that may tell of success, even if not in a way that is understood."""
        return (self.reward is not None and not self.has_only_zeros) or self.has_label_reward(episode)

    def unread(self, episode: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Columns, and fields of the metadata, that may tell of its success by their names, and were not read."""
        return self.unread_columns, self.unread_fields.get(episode, ())

    def is_labelled(self, episode: int) -> bool:
        """Whether somebody said if it succeeded."""
        label = self.labels.get(episode)
        return label is not None and label.success is not None

    def is_spoken_for(self, episode: int) -> bool:
        """Whether somebody said how it ended, which is believed before marks."""
        label = self.labels.get(episode)
        return label is not None and (label.success is not None or label.truncated is not None)

    def truncated(self, episode: int, last: int) -> bool | None:
        """Whether an episode was cut off rather than ended, where that is told."""
        label = self.labels.get(episode)
        if label is not None and label.truncated is not None:
            return label.truncated
        at_last = {key: bool(marks[last - 1]) for key, marks in self.ends.items()}
        if "terminated" in at_last:
            return not at_last["terminated"]
        # `done` is terminated OR truncated: False at the last frame means the recording was cut, True tells nothing.
        return True if at_last.get("done") is False else at_last.get("truncated")


def gather_evidence(
    dataset: Dataset, reward_column: str | None, success_column: str | None, success_threshold: float | None = None
) -> tuple[Evidence, list[Problem]]:
    """What is there, and what is wrong with it. The columns have their usual names unless others are given."""
    problems: list[Problem] = []
    present = dataset.column_names

    def first_of(names: Sequence[str]) -> str | None:
        return next((name for name in names if name in present), None)

    chosen = {
        "reward": reward_column or first_of([REWARD_COLUMN]),
        "success": success_column or (first_of(SUCCESS_COLUMNS) if success_threshold is None else None),
        **{key: first_of(names) for key, names in END_COLUMNS.items()},
    }
    for key, wanted in (("reward", reward_column), ("success", success_column)):
        if wanted is not None and wanted not in present and not is_beside(wanted):
            message = f"is not in the data; its columns are {', '.join(present)}"
            problems.append(Problem(message, column=wanted or "''"))
            chosen[key] = None
    if success_threshold is not None and (success_column is not None or chosen["reward"] is None):
        other = "success_column instead" if success_column is not None else "reward_column for their column"
        problems.append(Problem(f"success_threshold = {success_threshold} is for rewards: set {other}"))
    found, complaints = _read_columns(dataset, chosen)
    if success_threshold is not None and "reward" in found:
        found["success"] = found["reward"] >= success_threshold
    listed, unread_fields = _listed_success(dataset)
    sounding = [name for name in present if _SOUNDS_LIKE_OUTCOME.search(name)]
    evidence = Evidence(
        _labels(dataset, problems),
        listed,
        found.get("reward"),
        found.get("success"),
        _success_in_rewards(found["reward"], dataset.starts) if "reward" in found else {},
        {key: found[key] for key in END_COLUMNS if key in found},
        chosen,
        tuple(name for name in sounding if name not in chosen.values()),
        unread_fields,
        tuple(complaints),
        frozenset(chosen[key] for key in found),
    )
    return evidence, problems


def _read_columns(dataset: Dataset, chosen: Mapping[str, str | None]) -> tuple[dict[str, np.ndarray], list[Problem]]:
    """The chosen columns by what they are for, as numbers (rewards) or marks, and what is wrong with the others."""
    columns, problems = dataset.try_columns([name for name in chosen.values() if name is not None])
    found: dict[str, np.ndarray] = {}
    for key, name in chosen.items():
        if name is None or name not in columns:
            continue
        values = columns[name]
        if values.ndim != 1 or values.dtype.kind not in "biuf":
            message = f"should hold one number per frame{_REMEDY}"
            problems.append(Problem(message, column=name, value=str(values.dtype)))
            continue
        sound = np.isfinite(values) if key == "reward" else np.isin(values, (0, 1))
        wrong = list(by_episode(dataset.starts, np.flatnonzero(~sound)))
        if 2 * len(wrong) > len(dataset.episode_ids):  # not a slip in some episodes: another kind of column
            message = f"should be {'finite' if key == 'reward' else '0 or 1'} in every frame{_REMEDY}"
            problems.append(Problem(message, column=name, value=str(values[wrong[0][1][0]])))
            continue
        for episode, rows in wrong:
            frame, number = int(rows[0] - dataset.starts[episode]), int(dataset.episode_ids[episode])
            message = f"frame {frame} {'is not finite' if key == 'reward' else 'should be 0 or 1'}{_REMEDY}"
            problems.append(Problem(message, "problem", number, None, name, str(values[rows[0]])))
        found[key] = np.where(sound, values, 0) if key == "reward" else sound & (values == 1)
    return found, problems


def _success_in_rewards(
    rewards: np.ndarray, starts: Int64[np.ndarray, " episodes_plus_one"]
) -> dict[int, Bool[np.ndarray, " steps"]]:
    """The frames that rewards mark as a success, by episode; only of those whose rewards are of a kind that does."""
    if not rewards.any():
        return {}  # a placeholder looks the same as nothing but failures
    episodes = dict(enumerate(np.split(rewards, starts[1:-1])))
    values = set(np.unique(rewards).tolist())
    if values <= {0, 1} or (1 in values and values <= {-1, 0, 1}):
        return {episode: steps == 1 for episode, steps in episodes.items()}
    # Where steps cost something, an episode of zeros tells nothing.
    costly = {episode: steps for episode, steps in episodes.items() if steps.any()}
    return {episode: steps == 0 for episode, steps in costly.items()} if _are_costs(list(costly.values())) else {}


def _are_costs(episodes: Sequence[np.ndarray]) -> bool:
    """Whether every step costs something until success, and success nothing."""
    values = set(np.unique(np.concatenate(episodes)).tolist())
    if values <= {-1, 0}:
        # A -1 after a 0 is a penalty, such as for a failure.
        return not any((np.diff(steps) < 0).any() for steps in episodes)
    before_last = np.concatenate([steps[:-1] for steps in episodes])
    # Distances to a goal look like costs. If none ever reaches 0, a cost is known by its being always the same.
    same = len(np.unique(before_last)) == 1
    return max(values) <= 0 and bool((before_last < 0).all()) and (0 in values or same)


def _labels(dataset: Dataset, problems: list[Problem]) -> dict[int, Label]:
    """Labels by position. Those of episodes that are not there, or not selected, are nobody's."""
    labels = read_labels(dataset.root)
    found = {}
    for episode, (number, length) in enumerate(
        zip(dataset.episode_ids.tolist(), dataset.lengths.tolist(), strict=True)
    ):
        label = labels.get(number)
        if label is None:
            continue
        if label.length not in (None, length):
            message = f"was labelled when it had {label.length} frames, now it has {length}: label it again"
            problems.append(Problem(message, file=LABEL_FILE, episode=number))
        else:
            found[episode] = label
    return found


def _listed_success(dataset: Dataset) -> tuple[dict[int, bool], dict[int, tuple[str, ...]]]:
    """What success fields that recorders add to the episode metadata say, and the fields that are not understood."""
    found: dict[int, bool] = {}
    unread: dict[int, tuple[str, ...]] = {}
    for episode, number in enumerate(dataset.episode_ids.tolist()):
        listed = dataset.listing.episodes.get(number)
        said = {name: value for name, value in listed.extra.items() if value is not None} if listed else {}
        told = next((answer for name in SUCCESS_COLUMNS if (answer := _answer(said.get(name))) is not None), None)
        if told is not None:
            found[episode] = told
        elif sounding := tuple(name for name in said if _SOUNDS_LIKE_OUTCOME.search(name)):
            unread[episode] = sounding
    return found, unread


def _answer(value: Any) -> bool | None:
    """Yes or no, in whichever way a recorder puts it."""
    if isinstance(value, str):
        return yes_or_no(value)
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None
