"""How episodes ended and what each step was worth, from whichever convention a dataset follows.

Success of an episode, from the first of these that says something: a label (`pirl data label`); the success column;
a success field in the episode metadata; rewards that are 1 at success or a cost of every step until then; and, only if
asked, that a demonstration without any of these, without rewards, and without anything that may tell by its name,
succeeded. Rewards that are 0 throughout the dataset are a placeholder: they say nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float32, Int8, Int64

from pirl.data.evidence import Evidence, gather_evidence
from pirl.data.lerobot.reader import Dataset
from pirl.data.problems import BrokenDatasetError, Problem
from pirl.errors import ConfigError

_LABEL = "label them (pirl data label)"
_WITHOUT_REWARDS = f": {_LABEL} or, for plain demonstrations, set unlabelled to success"
_WITH_ZEROS = (
    f", and the rewards are 0 throughout, as if nobody had filled them in{_WITHOUT_REWARDS}; if all of them failed, set "
    "success_threshold to 1"
)
_WITH_REWARDS = (
    f", nor do the rewards, which go from {{low:g}} to {{high:g}}: {_LABEL}, set success_threshold to the reward from "
    "which on it is a success (perhaps {high:g}), set success_column to the column that tells{perhaps}, or set reward to "
    "raw, which takes the rewards as they are"
)
_WITH_COLUMNS = (
    ", though {names} may tell: set success_column to the column that is 1 at success, or reward_column to that of the "
    f"rewards (with success_threshold, if success is not a reward of 1), or {_LABEL}"
)
_WITH_FIELDS = f", and what {{names}} in their metadata means is not known: {_LABEL}"


@dataclass(frozen=True)
class OutcomeConfig:
    """What counts as reward, and how the end of an episode is understood.

    `reward`: `sparse` is 1 at the step of success and 0 elsewhere; `step_penalty` is -1 per step, 0 at the step of
    success; `raw` is the reward column as it is (without one, the same as `sparse`).
    `failures`: whether an unsuccessful episode truly ended (`terminal`) or ran out of time (`timeout`), where the data
    does not tell. `auto` is `timeout` for `step_penalty`, which would otherwise prefer to fail early, else `terminal`.
    `unlabelled`: what to make of episodes that say nothing about success. Where there are rewards that cannot be
    understood, or columns and metadata that are called like outcomes and are not read, nothing is taken for a success:
    they may well tell failures. Rewards of 0 throughout are as none.
    `success_threshold`: an episode succeeds with the first reward of at least this much; for rewards such as 0 and 100,
    or of several stages. No success column is read then.
    """

    reward: Literal["sparse", "step_penalty", "raw"] = "sparse"
    reward_column: str | None = None
    success_column: str | None = None
    failures: Literal["auto", "terminal", "timeout"] = "auto"
    unlabelled: Literal["error", "success"] = "error"
    success_threshold: float | None = None

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
        raise BrokenDatasetError(dataset.name, problems, "does not tell how its episodes ended")
    assert outcomes is not None
    return outcomes


def try_outcomes(dataset: Dataset, config: OutcomeConfig) -> tuple[Outcomes | None, list[Problem]]:
    """The outcomes, or everything that keeps them from being told."""
    evidence, problems = gather_evidence(dataset, config.reward_column, config.success_column, config.success_threshold)
    # What people said goes before columns, so those that cannot be read are not missed where it is said.
    numbers = dataset.episode_ids.tolist()
    labelled = {number for episode, number in enumerate(numbers) if evidence.is_labelled(episode)}
    if config.reward == "raw":
        problems += evidence.problems
    elif len(labelled) < len(numbers):
        problems += [p for p in evidence.problems if p.episode not in labelled or p.column not in evidence.read]
    if problems:
        return None, problems
    starts = dataset.starts.tolist()
    episodes = [
        _Episode(position, number, starts[position], starts[position + 1])
        for position, number in enumerate(dataset.episode_ids.tolist())
    ]
    endings = {episode: _find_ending(episode, evidence, config) for episode in episodes}
    told = {episode: ending for episode, ending in endings.items() if ending is not None}
    silent = [episode for episode in episodes if episode not in told]
    marks = list(_early_marks(told, evidence))
    if problems := [*(mark for mark in marks if mark.severity == "problem"), *_silences(silent, evidence)]:
        return None, problems
    return _lay_out(told, evidence, config, marks), []


@dataclass(frozen=True)
class _Episode:
    """Where it is in the dataset: its position, its number, and its rows, from the first up to `last`."""

    position: int
    number: int
    first: int
    last: int


@dataclass(frozen=True)
class _Ending:
    """Whether an episode succeeded, if that is told; up to which row it is used; and whether it truly ended there."""

    success: bool | None
    end: int
    terminal: bool


def _find_ending(episode: _Episode, evidence: Evidence, config: OutcomeConfig) -> _Ending | None:
    """How an episode ended, or nothing where it should say and does not."""
    success, at = evidence.success(episode.position, episode.first, episode.last)
    may_be_told = evidence.has_rewards(episode.position) or any(evidence.unread(episode.position))
    if success is None and config.unlabelled == "success" and not may_be_told:
        success, at = True, episode.last - 1
    if success is None and not (config.reward == "raw" and evidence.is_rewarded(episode.position)):
        return None
    if success:
        return _Ending(True, at + 1, terminal=True)
    truncated = evidence.truncated(episode.position, episode.last)
    if truncated is None:
        truncated = _failures(config) == "timeout"
    return _Ending(success, episode.last, terminal=not truncated)


def _failures(config: OutcomeConfig) -> str:
    if config.failures != "auto":
        return config.failures
    return "timeout" if config.reward == "step_penalty" else "terminal"


def _early_marks(told: Mapping[_Episode, _Ending], evidence: Evidence) -> Iterator[Problem]:
    """Ends that are marked where an episode goes on, unless somebody said how it ended.

    Some recorders go on for a moment after the end: marks that last until the end of the recording are a note.
    """
    for episode, ending in told.items():
        for key, marks in evidence.ends.items() if not evidence.is_spoken_for(episode.position) else ():
            unmarked = np.flatnonzero(~marks[episode.first : episode.last])
            early = np.flatnonzero(marks[episode.first : ending.end - 1])
            if not len(early):
                continue
            if not len(unmarked) or early[0] > unmarked[-1]:
                message = "marks several frames up to the last as the end; the last one is taken"
                yield Problem(message, "note", episode.number, None, evidence.names[key])
            else:
                message = (
                    f"frame {early[0]} is marked as the end, but the episode goes on: label it (pirl data label), which "
                    "is believed before the mark"
                )
                yield Problem(message, "problem", episode.number, None, evidence.names[key])


def _silences(silent: Sequence[_Episode], evidence: Evidence) -> Iterator[Problem]:
    """Episodes that say nothing, with what to do about them."""
    by_advice: dict[str, list[int]] = {}
    for episode in silent:
        by_advice.setdefault(_advice(episode.position, evidence), []).append(episode.number)
    for advice, numbers in by_advice.items():
        shown = ", ".join(map(str, numbers[:10])) + (f" and {len(numbers) - 10} more" if len(numbers) > 10 else "")
        plural = "episodes say" if len(numbers) > 1 else "episode says"
        yield Problem(f"{len(numbers)} {plural} nothing about success ({shown}){advice}")


def _advice(episode: int, evidence: Evidence) -> str:
    columns, fields = (" and ".join(names) for names in evidence.unread(episode))
    if evidence.has_rewards(episode):
        rewards = np.zeros(1) if evidence.reward is None else evidence.reward
        perhaps = f" (perhaps {columns})" if columns else ""
        return _WITH_REWARDS.format(perhaps=perhaps, low=rewards.min(), high=rewards.max())
    if columns:
        return _WITH_COLUMNS.format(names=columns)
    if fields:
        return _WITH_FIELDS.format(names=fields)
    return _WITH_ZEROS if evidence.has_only_zeros else _WITHOUT_REWARDS


def _lay_out(
    told: Mapping[_Episode, _Ending], evidence: Evidence, config: OutcomeConfig, marks: Sequence[Problem]
) -> Outcomes:
    """What is known of all episodes, by row and by episode."""
    rows = max((episode.last for episode in told), default=0)
    rewards, terminals = np.zeros(rows, np.float32), np.zeros(rows, bool)
    notes = [
        *marks,
        *_placeholders(told, evidence),
        *(replace(problem, severity="note") for problem in evidence.problems),
    ]
    for episode, ending in told.items():
        terminals[ending.end - 1] = ending.terminal
        rewards[episode.first : ending.end] = _rewards(episode, ending, evidence, config)
        if ending.end < episode.last:
            message = f"goes on for {episode.last - ending.end} frames after its success; they are left out"
            notes.append(Problem(message, "note", episode.number))
    ends = np.array([ending.end for ending in told.values()], np.int64)
    success = np.array([-1 if ending.success is None else int(ending.success) for ending in told.values()], np.int8)
    return Outcomes(rewards, terminals, ends, success, notes)


def _placeholders(told: Mapping[_Episode, _Ending], evidence: Evidence) -> Iterator[Problem]:
    """Rewards that were passed over, and what the episodes were taken for without them."""
    silent = [each for each in told if evidence.success(each.position, each.first, each.last)[0] is None]
    if silent and evidence.has_only_zeros:
        successes = sum(told[episode].success is not None for episode in silent)
        taken = "taken as it is" if not successes else f"episodes that are taken for successes: {successes}"
        message = f"is 0 throughout, which says nothing about success; {taken}"
        yield Problem(message, "note", column=evidence.names["reward"])


def _rewards(
    episode: _Episode, ending: _Ending, evidence: Evidence, config: OutcomeConfig
) -> Float32[np.ndarray, " steps"]:
    label, steps = evidence.labels.get(episode.position), ending.end - episode.first
    if config.reward == "raw":
        if label is not None and label.reward is not None:
            return np.r_[np.zeros(steps - 1), label.reward].astype(np.float32)
        if evidence.reward is not None:
            return evidence.reward[episode.first : ending.end].astype(np.float32)
    return shaped_rewards(config, bool(ending.success), steps)


def shaped_rewards(config: OutcomeConfig, succeeded: bool, steps: int) -> Float32[np.ndarray, " steps"]:
    """Rewards that follow from success alone."""
    at_success = np.zeros(steps, np.float32)
    at_success[-1] = succeeded
    return at_success - 1 if config.reward == "step_penalty" else at_success
