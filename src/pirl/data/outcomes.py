"""How episodes ended and what each step was worth, from whichever convention a dataset follows.

Success of an episode, from the first of these that is there: a label (`pirl data label`); the success column;
a success field in the episode metadata; rewards that are 1 at success or a cost of every step until then; and, only if
asked, that a demonstration without any of these, without rewards, and without any column named like an outcome,
succeeded. Rewards that are 0 throughout the dataset are a placeholder and count as none.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float32, Int8, Int64

from pirl.data.labels import LABEL_FILE, Label, read_labels, yes_or_no
from pirl.data.lerobot.reader import Dataset, is_beside
from pirl.data.lerobot.rows import by_episode
from pirl.data.problems import BrokenDatasetError, Problem
from pirl.errors import Checked

REWARD_COLUMN = "next.reward"
# LeRobot's own name first; then RLinf's, what many write by hand, that of DROID, and that of Evo-RL's recorder.
SUCCESS_COLUMNS = ("next.success", "is_success", "success", "is_episode_successful", "episode_success")
END_COLUMNS = {key: (f"next.{key}", key) for key in ("done", "truncated", "terminated")}
_SOUNDS_LIKE_OUTCOME = re.compile("success|succeed|solved|fail|outcome|reward", re.IGNORECASE)

_LABEL = "label them (pirl data label)"
_LABEL_ALL = "; or label all episodes (pirl data label), which is believed before columns"


@dataclass(frozen=True)
class OutcomeConfig(Checked):
    """What counts as reward, and how the end of an episode is understood."""

    reward: Literal["sparse", "step_penalty", "raw"] = "sparse"
    """sparse: 1 at the step of success, 0 elsewhere; step_penalty: -1 per step, 0 at the step of success; raw: the reward
    column as it is (without one, the same as sparse)."""
    reward_column: str | None = None
    """Reward column (none: next.reward)."""
    success_column: str | None = None
    """Success column (none: next.success, is_success, success, …)."""
    failures: Literal["auto", "terminal", "timeout"] = "auto"
    """Whether an unsuccessful episode truly ended (terminal) or ran out of time (timeout), where that is not recorded.
    auto is timeout for step_penalty, which would otherwise prefer to fail early, else terminal."""
    unlabeled: Literal["error", "success"] = "error"
    """How to treat episodes without any record of success. Where there are rewards that cannot be interpreted, or columns
    and metadata that are named like outcomes and are not read, nothing is taken for a success: they may record failures.
    Rewards of 0 throughout count as none."""
    success_threshold: float | None = None
    """An episode succeeds with the first reward of at least this much; for rewards such as 0 and 100, or of several
    stages. No success column is read then."""


@dataclass(frozen=True)
class Outcomes:
    """Rewards and ends by row and episode. Rows of an episode past `ends` come after its end and are not used."""

    rewards: Float32[np.ndarray, " rows"]
    terminals: Bool[np.ndarray, " rows"]
    ends: Int64[np.ndarray, " episodes"]
    success: Int8[np.ndarray, " episodes"]  # 1, 0, or -1 where it is not known
    notes: Sequence[Problem]


def read_outcomes(dataset: Dataset, config: OutcomeConfig) -> Outcomes:
    """Work out how each episode ended; raises with every episode where it is not recorded."""
    outcomes, problems = try_outcomes(dataset, config)
    if outcomes is None:
        raise BrokenDatasetError(dataset.name, problems, "does not tell how its episodes ended")
    return outcomes


def try_outcomes(dataset: Dataset, config: OutcomeConfig) -> tuple[Outcomes | None, list[Problem]]:
    """The outcomes, or every problem that keeps them from being known."""
    sources, problems = _read_sources(dataset, config)
    numbers, starts = dataset.episode_ids.tolist(), dataset.starts.tolist()
    labeled = {number for episode, number in enumerate(numbers) if sources.label(episode).success is not None}
    if config.reward == "raw":
        problems += sources.problems
    elif len(labeled) < len(numbers):  # labels are believed first: where all are labeled, no column is needed
        read = {sources.names[key] for key in sources.columns}  # if not in every episode
        problems += [p for p in sources.problems if p.episode not in labeled or p.column not in read]
    if problems:
        return None, problems
    rewards, terminals = np.zeros(len(dataset), np.float32), np.zeros(len(dataset), bool)
    ends, success = np.zeros(len(numbers), np.int64), np.full(len(numbers), -1, np.int8)
    silent: dict[str, list[int]] = {}
    marks: list[Problem] = []
    notes: list[Problem] = []
    guesses = 0
    for episode, number in enumerate(numbers):
        first, last = starts[episode], starts[episode + 1]
        ending = _find_ending(sources, config, episode, first, last)
        if ending is None:
            silent.setdefault(_advice(sources, episode), []).append(number)
            continue
        succeeded, end, terminals[ending[1] - 1] = ending
        marks += _early_marks(sources, episode, number, first, last, end)
        ends[episode], success[episode] = end, -1 if succeeded is None else succeeded
        rewards[first:end] = _rewards(sources, config, episode, first, end, bool(succeeded))
        guesses += sources.success(episode, first, last)[0] is None
        if end < last:
            message = f"goes on for {last - end} frames after its success; they are left out"
            notes.append(Problem(message, "note", number))
    problems = [mark for mark in marks if mark.severity == "problem"]
    for advice, silents in silent.items():
        listed = ", ".join(map(str, silents[:10])) + (f" and {len(silents) - 10} more" if len(silents) > 10 else "")
        episodes = "episodes say" if len(silents) > 1 else "episode says"
        problems.append(Problem(f"{len(silents)} {episodes} nothing about success ({listed}){advice}"))
    if problems:
        return None, problems
    if guesses and sources.has_only_zeros:
        taken = "taken as it is" if config.unlabeled == "error" else f"episodes that are taken for successes: {guesses}"
        message = f"is 0 throughout, which says nothing about success; {taken}"
        marks.append(Problem(message, "note", column=sources.names["reward"]))
    unread = [replace(problem, severity="note") for problem in sources.problems]
    return Outcomes(rewards, terminals, ends, success, [*marks, *unread, *notes]), []


def shaped_rewards(config: OutcomeConfig, succeeded: bool, steps: int) -> Float32[np.ndarray, " steps"]:
    at_success = np.zeros(steps, np.float32)
    at_success[-1] = succeeded
    return at_success - 1 if config.reward == "step_penalty" else at_success


# --- what the dataset records ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutcomeSources:
    """The columns, labels and metadata about outcomes; dictionaries are keyed by the position of an episode."""

    columns: Mapping[str, np.ndarray]  # those that could be read: reward, success, done, truncated, terminated
    names: Mapping[str, str | None]  # of all that were to be read
    labels: Mapping[int, Label]
    listed: Mapping[int, bool]  # success in the episode metadata
    success_in_rewards: Mapping[int, np.ndarray]  # marks by frame, where rewards show it
    unread_columns: Sequence[str]  # named like outcomes
    unread_fields: Mapping[int, Sequence[str]]  # of the metadata, likewise
    problems: Sequence[Problem]  # with columns that are there, but cannot be read

    @property
    def reward(self) -> np.ndarray | None:
        return self.columns.get("reward")

    @property
    def has_only_zeros(self) -> bool:
        """Whether the rewards are 0 throughout: presumably a recorder's placeholder."""
        return self.reward is not None and not self.reward.any()

    def label(self, episode: int) -> Label:
        """The label of an episode; an empty one if it has none."""
        return self.labels.get(episode, Label(episode))

    def has_rewards(self, episode: int) -> bool:
        return (self.reward is not None and not self.has_only_zeros) or self.label(episode).reward is not None

    def success(self, episode: int, first: int, last: int) -> tuple[bool | None, int]:
        """Whether an episode succeeded, and at which row if it did."""
        column, label = self.columns.get("success"), self.label(episode)
        marks = self.success_in_rewards.get(episode) if column is None else column[first:last]
        # A mark on every frame is a statement about the episode, not a moment.
        at = last - 1 if marks is None or not marks.any() or marks.all() else first + int(marks.argmax())
        if label.success is not None:
            return label.success, at
        if column is None and episode in self.listed:
            return self.listed[episode], at
        return None if marks is None else bool(marks.any()), at

    def truncated(self, episode: int, last: int) -> bool | None:
        """Whether an episode was cut off rather than ended, where that is known."""
        if (labeled := self.label(episode).truncated) is not None:
            return labeled
        at_last = {key: bool(self.columns[key][last - 1]) for key in END_COLUMNS if key in self.columns}
        if "terminated" in at_last:
            return not at_last["terminated"]
        # `done` is terminated OR truncated: False at the last frame means the recording was cut, True is ambiguous.
        return True if at_last.get("done") is False else at_last.get("truncated")


def _read_sources(dataset: Dataset, config: OutcomeConfig) -> tuple[OutcomeSources, list[Problem]]:
    """Columns (by their usual names, unless configured), labels and metadata about outcomes, and problems with them."""
    problems: list[Problem] = []
    present, threshold = dataset.column_names, config.success_threshold

    def first_of(names: Sequence[str]) -> str | None:
        return next((name for name in names if name in present), None)

    names = {
        "reward": config.reward_column or first_of([REWARD_COLUMN]),
        "success": config.success_column or (first_of(SUCCESS_COLUMNS) if threshold is None else None),
        **{key: first_of(usual) for key, usual in END_COLUMNS.items()},
    }
    for key, wanted in (("reward", config.reward_column), ("success", config.success_column)):
        if wanted is not None and wanted not in present and not is_beside(wanted):
            message = f"is not in the data; its columns are {', '.join(present)}"
            problems.append(Problem(message, column=wanted or "''"))
            names[key] = None
    if threshold is not None and (config.success_column is not None or names["reward"] is None):
        other = "success_column instead" if config.success_column is not None else "reward_column for their column"
        problems.append(Problem(f"success_threshold = {threshold} is for rewards: set {other}"))
    columns, unreadable = _read_columns(dataset, names)
    if threshold is not None and "reward" in columns:
        columns["success"] = columns["reward"] >= threshold
    listed, unread_fields = _listed_success(dataset)
    sources = OutcomeSources(
        columns=columns,
        names=names,
        labels=_labels(dataset, problems),
        listed=listed,
        success_in_rewards=_success_in_rewards(columns["reward"], dataset.starts) if "reward" in columns else {},
        unread_columns=[name for name in present if _SOUNDS_LIKE_OUTCOME.search(name) and name not in names.values()],
        unread_fields=unread_fields,
        problems=unreadable,
    )
    return sources, problems


def _read_columns(dataset: Dataset, names: Mapping[str, str | None]) -> tuple[dict[str, np.ndarray], list[Problem]]:
    """The columns by what they are for, as numbers (rewards) or marks, and what is wrong with the others."""
    columns, problems = dataset.try_columns([name for name in names.values() if name is not None])
    found: dict[str, np.ndarray] = {}
    for key, name in names.items():
        if name is None or name not in columns:
            continue
        values = columns[name]
        if values.ndim != 1 or values.dtype.kind not in "biuf":
            message = f"should hold one number per frame{_LABEL_ALL}"
            problems.append(Problem(message, column=name, value=str(values.dtype)))
            continue
        sound = np.isfinite(values) if key == "reward" else np.isin(values, (0, 1))
        wrong = list(by_episode(dataset.starts, np.flatnonzero(~sound)))
        if 2 * len(wrong) > len(dataset.episode_ids):  # not a slip in some episodes: another kind of column
            message = f"should be {'finite' if key == 'reward' else '0 or 1'} in every frame{_LABEL_ALL}"
            problems.append(Problem(message, column=name, value=str(values[wrong[0][1][0]])))
            continue
        message = f"{'is not finite' if key == 'reward' else 'should be 0 or 1'}{_LABEL_ALL}"
        problems += dataset.problems_at(np.flatnonzero(~sound), message, name, values)
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
    # Where steps cost something, an episode of zeros is ambiguous.
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
    """Labels by position; those of episodes that are not there, or not selected, are ignored."""
    labels, found = read_labels(dataset.root), {}
    for episode, number in enumerate(dataset.episode_ids.tolist()):
        label, length = labels.get(number), int(dataset.lengths[episode])
        if label is not None and label.length not in (None, length):
            message = f"was labeled when it had {label.length} frames, now it has {length}: label it again"
            problems.append(Problem(message, file=LABEL_FILE, episode=number))
        elif label is not None:
            found[episode] = label
    return found


def _listed_success(dataset: Dataset) -> tuple[dict[int, bool], dict[int, tuple[str, ...]]]:
    """Success fields that recorders add to the episode metadata, and the fields that are not understood."""
    found: dict[int, bool] = {}
    unread: dict[int, tuple[str, ...]] = {}
    for episode, number in enumerate(dataset.episode_ids.tolist()):
        listed = dataset.listing.episodes.get(number)
        fields = {name: value for name, value in listed.extra.items() if value is not None} if listed else {}
        answers = (_to_bool(fields.get(name)) for name in SUCCESS_COLUMNS)
        if (success := next((answer for answer in answers if answer is not None), None)) is not None:
            found[episode] = success
        elif sounding := tuple(name for name in fields if _SOUNDS_LIKE_OUTCOME.search(name)):
            unread[episode] = sounding
    return found, unread


def _to_bool(value: Any) -> bool | None:
    if isinstance(value, str):
        return yes_or_no(value)
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


# --- what follows from it ----------------------------------------------------------------------------------------------


def _find_ending(
    sources: OutcomeSources, config: OutcomeConfig, episode: int, first: int, last: int
) -> tuple[bool | None, int, bool] | None:
    """Success (if known), the row after the last one used, and whether it truly ended there; None if unknown."""
    success, at = sources.success(episode, first, last)
    may_tell = sources.has_rewards(episode) or sources.unread_columns or episode in sources.unread_fields
    if success is None and config.unlabeled == "success" and not may_tell:
        success, at = True, last - 1
    has_reward = sources.reward is not None or sources.label(episode).reward is not None
    if success is None and not (config.reward == "raw" and has_reward):
        return None
    if success:
        return True, at + 1, True
    truncated = sources.truncated(episode, last)
    if truncated is None:
        by_default = "timeout" if config.reward == "step_penalty" else "terminal"
        truncated = (by_default if config.failures == "auto" else config.failures) == "timeout"
    return success, last, not truncated


def _early_marks(
    sources: OutcomeSources, episode: int, number: int, first: int, last: int, end: int
) -> Iterator[Problem]:
    """Ends that are marked where an episode goes on, unless a label says how it ended.

    Some recorders go on for a moment after the end: marks that last until the end of the recording are a note.
    """
    label = sources.label(episode)
    if label.success is not None or label.truncated is not None:
        return
    for key in (key for key in END_COLUMNS if key in sources.columns):
        marks = sources.columns[key]
        unmarked, early = np.flatnonzero(~marks[first:last]), np.flatnonzero(marks[first : end - 1])
        if not len(early):
            continue
        if not len(unmarked) or early[0] > unmarked[-1]:
            message = "marks several frames up to the last as the end; the last one is taken"
            yield Problem(message, "note", number, None, sources.names[key])
        else:
            message = f"frame {early[0]} is marked as the end, but the episode goes on: label it (pirl data label)"
            yield Problem(message, "problem", number, None, sources.names[key])


def _advice(sources: OutcomeSources, episode: int) -> str:
    columns = " and ".join(sources.unread_columns)
    if sources.has_rewards(episode):
        rewards = np.zeros(1) if sources.reward is None else sources.reward
        return (
            f", nor do the rewards, which go from {rewards.min():g} to {rewards.max():g}: {_LABEL}, set "
            f"success_threshold to the reward from which on it is a success (perhaps {rewards.max():g}), set "
            f"success_column to the column that tells{f' (perhaps {columns})' if columns else ''}, or set reward to raw, "
            "which takes the rewards as they are"
        )
    if columns:
        return (
            f", though {columns} may tell: set success_column to the column that is 1 at success, or reward_column to "
            f"that of the rewards (with success_threshold, if success is not a reward of 1), or {_LABEL}"
        )
    if fields := sources.unread_fields.get(episode):
        return f", and what {' and '.join(fields)} in their metadata means is not known: {_LABEL}"
    advice = f": {_LABEL} or, for plain demonstrations, set unlabeled to success"
    if sources.has_only_zeros:
        reason = ", and the rewards are 0 throughout, as if nobody had filled them in"
        return f"{reason}{advice}; if all of them failed, set success_threshold to 1"
    return advice


def _rewards(
    sources: OutcomeSources, config: OutcomeConfig, episode: int, first: int, end: int, succeeded: bool
) -> Float32[np.ndarray, " steps"]:
    if config.reward == "raw":
        if (labeled := sources.label(episode).reward) is not None:
            return np.r_[np.zeros(end - first - 1), labeled].astype(np.float32)
        if sources.reward is not None:
            return sources.reward[first:end].astype(np.float32)
    return shaped_rewards(config, succeeded, end - first)
