"""How episodes ended and what each step was worth, from whichever convention a dataset follows.

Success of an episode, from the first of these that says something: a label (`pirl data label`); the success column;
a success field in the episode metadata; rewards that are 1 at success or a cost of every step until then; and, only if
asked, that a demonstration without any of these, and without rewards, succeeded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float32, Int8, Int64

from pirl.data.labels import LABEL_FILE, Label, read_labels
from pirl.data.lerobot.dataset import Dataset
from pirl.data.problems import BrokenDatasetError, Problem
from pirl.errors import ConfigError

SUCCESS_COLUMNS = ("next.success", "is_success", "success")
END_COLUMNS = {key: (f"next.{key}", key) for key in ("done", "truncated", "terminated")}
REWARD_COLUMN = "next.reward"
_WITHOUT_REWARDS = ": label them (pirl data label) or, for plain demonstrations, set unlabelled to success"
_WITH_REWARDS = (
    ", nor do the rewards: label them (pirl data label), name a success column (--success-column), or take the rewards "
    "as they are (--reward raw)"
)


@dataclass(frozen=True)
class OutcomeConfig:
    """What counts as reward, and how the end of an episode is understood.

    `reward`: `sparse` is 1 at the step of success and 0 elsewhere; `step_penalty` is -1 per step, 0 at the step of
    success; `raw` is the reward column as it is (without one, the same as `sparse`).
    `failures`: whether an unsuccessful episode truly ended (`terminal`) or ran out of time (`timeout`), where the data
    does not tell. `auto` is `timeout` for `step_penalty`, which would otherwise prefer to fail early, else `terminal`.
    `unlabelled`: what to make of episodes that say nothing about success. Where there are rewards that cannot be
    understood, nothing is taken for a success: they may well tell failures.
    """

    reward: Literal["sparse", "step_penalty", "raw"] = "sparse"
    reward_column: str | None = None
    success_column: str | None = None
    failures: Literal["auto", "terminal", "timeout"] = "auto"
    unlabelled: Literal["error", "success"] = "error"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("reward", self.reward, ("sparse", "step_penalty", "raw")),
            ("failures", self.failures, ("auto", "terminal", "timeout")),
            ("unlabelled", self.unlabelled, ("error", "success")),
        ):
            if value not in known:
                raise ConfigError(f"{name} should be one of {', '.join(known)}; it is {value!r}.")


@dataclass(frozen=True)
class Outcomes:
    """Rewards and ends by row and episode. Rows of an episode past `ends` come after its end and are not used."""

    rewards: Float32[np.ndarray, " rows"]
    terminals: Bool[np.ndarray, " rows"]
    ends: Int64[np.ndarray, " episodes"]
    success: Int8[np.ndarray, " episodes"]  # 1, 0, or -1 where nothing tells
    notes: Sequence[Problem]


def read_outcomes(dataset: Dataset, config: OutcomeConfig) -> Outcomes:
    """Work out how each episode ended; raises with every episode that does not say."""
    outcomes, problems = try_outcomes(dataset, config)
    if problems:
        raise BrokenDatasetError(dataset.name, problems)
    assert outcomes is not None
    return outcomes


def try_outcomes(dataset: Dataset, config: OutcomeConfig) -> tuple[Outcomes | None, list[Problem]]:
    """The outcomes, or everything that keeps them from being told."""
    evidence, problems = _gather_evidence(dataset, config)
    if problems:
        return None, problems
    starts, episodes = dataset.starts, len(dataset.episode_ids)
    rewards = np.zeros(len(dataset), np.float32)
    terminals = np.zeros(len(dataset), bool)
    ends, success = starts[1:].copy(), np.full(episodes, -1, np.int8)
    notes: list[Problem] = []
    silent: dict[str, list[int]] = {_WITHOUT_REWARDS: [], _WITH_REWARDS: []}
    for episode in range(episodes):
        first, last = int(starts[episode]), int(starts[episode + 1])
        number = int(dataset.episode_ids[episode])
        succeeded, at = evidence.success(episode, first, last)
        rewarded = evidence.is_rewarded(episode)
        if succeeded is None and config.unlabelled == "success" and not rewarded:
            succeeded, at = True, last - 1
        if succeeded is None and not (config.reward == "raw" and rewarded):
            silent[_WITH_REWARDS if rewarded else _WITHOUT_REWARDS].append(number)
            continue
        truncated = evidence.truncated(episode, last)
        end = last
        if succeeded:
            end = at + 1
            if end < last:
                notes.append(
                    Problem(
                        f"goes on for {last - end} frames after its success; they are left out",
                        severity="note",
                        episode=number,
                    )
                )
        ended = bool(succeeded)
        if not succeeded:
            told = truncated if truncated is not None else _failures(config) == "timeout"
            ended = not told
        for key, marks in evidence.ends.items():
            if len(early := np.flatnonzero(marks[first : end - 1])):
                message = f"frame {early[0]} is marked as the end, but the episode goes on"
                problems.append(Problem(message, "problem", number, None, evidence.names[key]))
        terminals[end - 1] = ended
        ends[episode] = end
        success[episode] = -1 if succeeded is None else int(succeeded)
        rewards[first:end] = _shape(config, evidence, episode, first, end, bool(succeeded))
    for advice, numbers in silent.items():
        if numbers:
            shown = ", ".join(map(str, numbers[:10])) + (f" and {len(numbers) - 10} more" if len(numbers) > 10 else "")
            plural = "episodes say" if len(numbers) > 1 else "episode says"
            problems.append(Problem(f"{len(numbers)} {plural} nothing about success ({shown}){advice}"))
    if problems:
        return None, problems
    return Outcomes(rewards, terminals, ends, success, notes), []


def _failures(config: OutcomeConfig) -> str:
    if config.failures != "auto":
        return config.failures
    return "timeout" if config.reward == "step_penalty" else "terminal"


def _shape(
    config: OutcomeConfig, evidence: "_Evidence", episode: int, first: int, end: int, succeeded: bool
) -> Float32[np.ndarray, " steps"]:
    label = evidence.labels.get(episode)
    if config.reward == "raw":
        if label is not None and label.reward is not None:
            return np.r_[np.zeros(end - first - 1), label.reward].astype(np.float32)
        if evidence.reward is not None:
            return evidence.reward[first:end].astype(np.float32)
    return shaped_rewards(config, succeeded, end - first)


def shaped_rewards(config: OutcomeConfig, succeeded: bool, steps: int) -> Float32[np.ndarray, " steps"]:
    """Rewards that follow from success alone."""
    at_success = np.zeros(steps, np.float32)
    at_success[-1] = succeeded
    return at_success - 1 if config.reward == "step_penalty" else at_success


@dataclass(frozen=True)
class _Evidence:
    """The columns and labels that speak about outcomes."""

    labels: dict[int, Label]  # by position
    listed: dict[int, bool]  # by position
    reward: np.ndarray | None
    success_column: np.ndarray | None
    success_in_rewards: dict[int, np.ndarray]  # by position, where rewards tell
    ends: dict[str, np.ndarray]  # done, truncated, terminated: those that are there
    names: dict[str, str | None]  # of their columns

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

    def is_rewarded(self, episode: int) -> bool:
        """Whether there is a reward to take as it is."""
        label = self.labels.get(episode)
        return self.reward is not None or (label is not None and label.reward is not None)

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


def _gather_evidence(dataset: Dataset, config: OutcomeConfig) -> tuple[_Evidence, list[Problem]]:
    problems: list[Problem] = []
    present = dataset.column_names

    def first_of(names: Sequence[str]) -> str | None:
        return next((name for name in names if name in present), None)

    chosen = {
        "reward": config.reward_column or first_of([REWARD_COLUMN]),
        "success": config.success_column or first_of(SUCCESS_COLUMNS),
        **{key: first_of(names) for key, names in END_COLUMNS.items()},
    }
    for key, wanted in (("reward", config.reward_column), ("success", config.success_column)):
        if wanted is not None and wanted not in present:
            message = f"is not in the data; its columns are {', '.join(present)}"
            problems.append(Problem(message, column=wanted or "''"))
            chosen[key] = None
    columns, complaints = dataset.try_columns([name for name in chosen.values() if name is not None])
    problems += complaints

    def column(key: str) -> np.ndarray | None:
        name = chosen[key]
        if name is None or name not in columns:
            return None
        values = columns[name]
        if values.ndim != 1 or values.dtype.kind not in "biuf":
            problems.append(Problem("should hold one number per frame", column=name, value=str(values.dtype)))
            return None
        bad = np.flatnonzero(~(np.isfinite(values) if key == "reward" else np.isin(values, (0, 1))))
        if len(bad):
            episode = int(np.searchsorted(dataset.starts, bad[0], side="right") - 1)
            frame, number = int(bad[0] - dataset.starts[episode]), int(dataset.episode_ids[episode])
            message = f"frame {frame} is not finite" if key == "reward" else f"frame {frame} should be 0 or 1"
            problems.append(Problem(message, "problem", number, None, name, str(values[bad[0]])))
            return None
        return values if key == "reward" else values.astype(bool)

    found = {key: column(key) for key in chosen}
    evidence = _Evidence(
        _labels(dataset, problems),
        _listed_success(dataset),
        found["reward"],
        found["success"],
        {} if found["reward"] is None else _success_in_rewards(found["reward"], dataset.starts),
        {key: marks for key in END_COLUMNS if (marks := found[key]) is not None},
        chosen,
    )
    return evidence, problems


def _success_in_rewards(
    rewards: np.ndarray, starts: Int64[np.ndarray, " episodes_plus_one"]
) -> dict[int, Bool[np.ndarray, " steps"]]:
    """The frames that rewards mark as a success, by episode; only of those whose rewards are of a kind that does."""
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
    position = {number: episode for episode, number in enumerate(dataset.episode_ids.tolist())}
    labels = {}
    for number, label in read_labels(dataset.root).items():
        if number not in position:
            message = "is labelled but not in the data: take its line out"
            problems.append(Problem(message, file=LABEL_FILE, episode=number))
        elif label.length not in (None, int(dataset.lengths[position[number]])):
            problems.append(
                Problem(
                    f"was labelled when it had {label.length} frames, now it has "
                    f"{dataset.lengths[position[number]]}: label it again",
                    file=LABEL_FILE,
                    episode=number,
                )
            )
        else:
            labels[position[number]] = label
    return labels


def _listed_success(dataset: Dataset) -> dict[int, bool]:
    """Success fields that some recorders add to the episode metadata."""
    found: dict[int, bool] = {}
    for episode, number in enumerate(dataset.episode_ids.tolist()):
        listed = dataset.listing.episodes.get(number)
        value: Any = (
            next((listed.extra[name] for name in SUCCESS_COLUMNS if name in listed.extra), None) if listed else None
        )
        if isinstance(value, bool) or value in (0, 1):
            found[episode] = bool(value)
    return found
