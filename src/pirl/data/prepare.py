"""From a dataset on disk to something to sample from: columns, outcomes, statistics, frames, filters."""

import contextlib
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from pirl.data.chunks import Trajectories
from pirl.data.corrections import INTERVENTION_COLUMNS, human_throughout, read_interventions
from pirl.data.frame_cache import FrameCacheConfig, open_frames
from pirl.data.lerobot.reader import Dataset
from pirl.data.norm_stats import compute_norm_stats, degenerate_dimensions, safe_scales, sample_range
from pirl.data.outcomes import OutcomeConfig, Outcomes, read_outcomes
from pirl.data.robots import Robot
from pirl.data.transforms import make_mask
from pirl.errors import CheckpointError, ConfigError, DataError
from pirl.files import cache_directory
from pirl.interop.norm_stats import NormStats, read_norm_stats, write_norm_stats
from pirl.models.config import Pi0Config

logger = logging.getLogger(__name__)


def robot_columns(
    dataset: Dataset, robot: Robot
) -> tuple[Float[np.ndarray, "rows state_dim"], Float[np.ndarray, "rows action_dim"]]:
    """States and actions of every frame, as the robot description puts them together."""
    wanted = [*robot.state, *robot.actions]
    if missing := [name for name in wanted if name not in dataset.column_names]:
        raise DataError(
            f"{dataset.name} has no column {', '.join(missing)}, which robot {robot.name!r} needs. It has "
            f"{', '.join(dataset.column_names)}: choose another robot, or describe this one."
        )
    columns = dataset.columns(wanted)
    if words := [name for name in wanted if columns[name].dtype.kind not in "biuf"]:
        raise DataError(f"{dataset.name}: {', '.join(words)} holds no numbers, robot {robot.name!r} needs them.")
    joined = []
    for names, width in ((robot.state, robot.state_dim), (robot.actions, robot.action_dim)):
        parts = [columns[name].astype(np.float32).reshape(len(dataset), -1) for name in names]
        array = np.concatenate(parts, axis=1)
        if width is not None and array.shape[1] != width:
            raise DataError(
                f"{dataset.name}: {' + '.join(names)} has {array.shape[1]} dimensions, robot {robot.name!r} has {width}."
            )
        joined.append(array)
    return joined[0], joined[1]


def _place(dataset: Dataset, row: int) -> str:
    """Episode and frame of a row, in words."""
    episode = int(np.searchsorted(dataset.starts, row, side="right") - 1)
    return f"episode {dataset.episode_ids[episode]}, frame {row - dataset.starts[episode]}"


def dataset_norm_stats(
    dataset: Dataset,
    robot: Robot,
    horizon: int,
    *,
    ends: Int64[np.ndarray, " episodes"] | None = None,
    used: Bool[np.ndarray, " rows"] | None = None,
) -> dict[str, NormStats]:
    """The statistics to normalise with, from the columns alone; kept in the cache, by content.

    They are over chunks from all frames or, as training sees them, from frames that are `used`, up to the `ends` of
    episodes. Dimensions that do not vary get a scale that is safe to divide by, with a warning.
    """
    states, actions = robot_columns(dataset, robot)
    adapted = robot.joint_transforms()({"state": states, "actions": actions})
    states, actions = (np.asarray(adapted[key], np.float64) for key in ("state", "actions"))
    ends = dataset.starts[1:] if ends is None else ends
    used = np.ones(len(states), bool) if used is None else used
    digest = hashlib.blake2b(digest_size=16)
    for array in (states, actions, dataset.starts, ends, used, np.array([horizon, *robot.delta], np.int64)):
        digest.update(repr((array.shape, array.dtype.str)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    file = cache_directory() / "norm_stats" / f"{digest.hexdigest()}.json"
    mask = make_mask(*robot.delta)
    samples: tuple[Any, ...] = (states, actions, dataset.starts, horizon, np.asarray(mask, bool) if any(mask) else None)
    try:
        stats = read_norm_stats(file)
    except CheckpointError:  # a cache that is damaged, or cannot be written, only costs time
        stats = compute_norm_stats(*samples, ends=ends, used=used)
        with contextlib.suppress(OSError):
            write_norm_stats(file, stats)
    for sentence in degenerate_dimensions(stats):
        logger.warning("%s: %s", dataset.name, sentence)
    return safe_scales(stats, lambda: sample_range(*samples, ends=ends, used=used))


def load_trajectories(
    dataset: Dataset,
    robot: Robot,
    model: Pi0Config,
    *,
    outcomes: OutcomeConfig | None = None,
    frame_cache: FrameCacheConfig | None = None,
    progress: bool = True,
) -> Trajectories:
    """Everything a sampler needs of a dataset. Pictures are decoded once, into the frame cache."""
    if unknown := {slot: name for slot, name in robot.cameras.items() if name not in dataset.cameras}:
        raise DataError(
            f"{dataset.name} has no camera {', '.join(unknown.values())}, which robot {robot.name!r} shows the model as "
            f"{', '.join(unknown)}; it has {', '.join(dataset.cameras) or 'none'}."
        )
    states, actions = robot_columns(dataset, robot)
    found = read_outcomes(dataset, outcomes or OutcomeConfig())
    last = np.repeat(found.ends, dataset.lengths)
    finite = np.isfinite(states).all(axis=1) & np.isfinite(actions).all(axis=1) | (np.arange(len(last)) >= last)
    if not finite.all():
        where = _place(dataset, int(np.argmin(finite)))
        raise DataError(
            f"{dataset.name}: state or actions are not finite in {np.count_nonzero(~finite)} frames, first in {where}: "
            f"see pirl data check {dataset.name}."
        )
    prompts = [task or robot.default_prompt or "" for task in dataset.rows.tasks]
    speechless = np.flatnonzero(~np.array([bool(prompt) for prompt in prompts], bool)[dataset.rows.task_of_row])
    if model.max_token_len and len(speechless):
        raise DataError(
            f"{dataset.name}: {_place(dataset, int(speechless[0]))} has no task to tell the model: give the robot a "
            "default_prompt."
        )
    height, width = model.image_resolution
    config = frame_cache or FrameCacheConfig(height, width)
    if (config.height, config.width) != (height, width):
        raise ConfigError(
            f"a frame cache of {config.height}×{config.width} pixels does not fit a model that sees {height}×{width}."
        )
    human, unread = read_interventions(dataset)
    for problem in unread:
        logger.warning("%s: %s", dataset.name, problem)
    frames = open_frames(dataset, list(robot.cameras.values()), config, progress=progress) if robot.cameras else {}
    return Trajectories(
        states=states,
        actions=actions,
        rewards=found.rewards,
        terminals=found.terminals,
        starts=dataset.starts[:-1],
        ends=found.ends,
        success=found.success,
        prompts=prompts,
        prompt_of_row=dataset.rows.task_of_row,
        frames={slot: frames[name] for slot, name in robot.cameras.items()},
        human=human,
    )


@dataclass(frozen=True)
class Selection:
    """Which frames are sampled, and how often. Filters first: what they leave out has no weight.

    `tasks`: only these task strings. `success`: only successes (True) or failures (False). `episodes`: only these
    episode numbers (0,3,7-12 as an option); others are neither checked nor read. Weights multiply: of the outcome (1
    where it is not known), and of the task. `success_fraction`: how much of what is sampled comes from successes, however
    many of these there are. `human`: only chunks that a human chose throughout, as a column `intervention` tells.
    """

    tasks: tuple[str, ...] | None = None
    success: bool | None = None
    episodes: tuple[int, ...] | None = None
    success_weight: float = 1.0
    failure_weight: float = 1.0
    success_fraction: float | None = None
    task_weights: Mapping[str, float] = field(default_factory=dict)
    human: bool = False

    def __post_init__(self) -> None:
        if self.success_fraction is not None and not 0 < self.success_fraction < 1:
            raise ConfigError(f"success_fraction should be between 0 and 1, or none; it is {self.success_fraction}.")

    def weights(self, dataset: Dataset, outcomes: Outcomes, horizon: int = 1) -> Float64[np.ndarray, " rows"]:
        """The weight of each row as an anchor of a chunk of so many actions."""
        texts, numbers = list(dataset.rows.tasks), dataset.episode_ids.tolist()
        for name in (*(self.tasks or ()), *self.task_weights):
            if name not in texts:
                raise ConfigError(f"{dataset.name} has no task {name!r}; its tasks are {', '.join(map(repr, texts))}.")
        if absent := sorted(set(self.episodes or ()) - set(numbers)):
            raise ConfigError(f"{dataset.name} has no episode {absent[0]}.")
        of_task = np.array([self.task_weights.get(text, 1.0) for text in texts])
        if self.tasks is not None:
            of_task *= [text in self.tasks for text in texts]
        success = outcomes.success
        of_episode = np.select([success == 1, success == 0], [self.success_weight, self.failure_weight], 1.0)
        if self.success is not None:
            of_episode = of_episode * (success == int(self.success))
        if self.episodes is not None:
            of_episode = of_episode * np.isin(dataset.episode_ids, self.episodes)
        weights = np.repeat(of_episode, dataset.lengths) * of_task[dataset.rows.task_of_row]
        if self.human:
            marks, problems = read_interventions(dataset)
            if marks is None:
                why = str(problems[0]) if problems else f"no column is called {' or '.join(INTERVENTION_COLUMNS)}"
                raise ConfigError(f"selection.human: {dataset.name} does not tell what a human chose: {why}.")
            weights = weights * human_throughout(marks, np.repeat(outcomes.ends, dataset.lengths), horizon)
        if not weights.any():
            raise ConfigError(f"the filters leave nothing of {dataset.name}: {self}.")
        succeeded = np.repeat(success == 1, dataset.lengths)
        share = weights[succeeded].sum() / weights.sum()
        if self.success_fraction is not None and 0 < share < 1:  # with one kind only there is nothing to balance
            balance = self.success_fraction / (1 - self.success_fraction) * (1 - share) / share
            weights = np.where(succeeded, weights * balance, weights)
        return weights
