"""From a dataset on disk to something to sample from: columns, outcomes, statistics, frames, filters; and a summary."""

import contextlib
import hashlib
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from pirl.data.frame_cache import FrameCacheConfig, open_frames
from pirl.data.lerobot.parquet import DepthImageError
from pirl.data.lerobot.reader import Dataset, is_beside
from pirl.data.norm_stats import compute_norm_stats, degenerate_dimensions, safe_scales, sample_range
from pirl.data.outcomes import OutcomeConfig, Outcomes, read_outcomes, try_outcomes
from pirl.data.problems import BrokenDatasetError, Problem, format_episodes, format_problems
from pirl.data.robots import Robot
from pirl.data.transforms import make_mask
from pirl.errors import CheckpointError, ConfigError, DataError
from pirl.files import cache_directory
from pirl.interop.norm_stats import NormStats, read_norm_stats, write_norm_stats
from pirl.models.config import Pi0Config

if TYPE_CHECKING:
    from pirl.data.chunks import Trajectories

logger = logging.getLogger(__name__)
# Columns that mark actions of a human: LeRobot's, those of HIL-SERL and Evo-RL, and RLinf's.
INTERVENTION_COLUMNS = ("intervention", "is_intervention", "complementary_info.is_intervention", "intervene_flag")


def robot_problems(dataset: Dataset, robot: Robot) -> Iterator[Problem]:
    """What a robot needs that is not in the dataset, or that has another width."""
    for names, width in ((robot.state, robot.state_dim), (robot.actions, robot.action_dim)):
        for name in (name for name in names if name not in dataset.column_names):
            has = ", ".join(dataset.column_names)
            yield Problem(f"is not in the data, and robot {robot.name} needs it; the columns are {has}", column=name)
        declared = [dataset.info.features[name].shape for name in names if name in dataset.info.features]
        found = sum(map(math.prod, declared))
        if width is not None and len(declared) == len(names) and found != width:
            yield Problem(f"has {found} dimensions, robot {robot.name} has {width}", column=" + ".join(names))
    for name in (name for name in robot.cameras.values() if name not in dataset.cameras):
        has = ", ".join(dataset.cameras) or "none"
        yield Problem(f"is no camera of the dataset, and robot {robot.name} needs it; it has {has}", column=name)


def robot_columns(
    dataset: Dataset, robot: Robot
) -> tuple[Float[np.ndarray, "rows state_dim"], Float[np.ndarray, "rows action_dim"]]:
    """States and actions of every frame, as the robot description puts them together."""
    cameras = set(robot.cameras.values())
    if problems := [problem for problem in robot_problems(dataset, robot) if problem.column not in cameras]:
        raise BrokenDatasetError(dataset.name, problems, f"does not fit robot {robot.name!r}")
    columns = dataset.columns([*robot.state, *robot.actions])
    if text := [name for name, values in columns.items() if values.dtype.kind not in "biuf"]:
        raise DataError(f"{dataset.name}: {', '.join(text)} holds no numbers, robot {robot.name!r} needs them.")
    states, actions = (
        np.concatenate([columns[name].astype(np.float32).reshape(len(dataset), -1) for name in names], axis=1)
        for names in (robot.state, robot.actions)
    )
    for values, width in ((states, robot.state_dim), (actions, robot.action_dim)):  # columns may not be declared
        if width not in (None, values.shape[1]):
            raise DataError(f"{dataset.name} has {values.shape[1]} dimensions where robot {robot.name!r} has {width}.")
    return states, actions


def dataset_norm_stats(
    dataset: Dataset,
    robot: Robot,
    horizon: int,
    *,
    ends: Int64[np.ndarray, " episodes"] | None = None,
    used: Bool[np.ndarray, " rows"] | None = None,
) -> dict[str, NormStats]:
    """The statistics to normalize with, from the columns alone; kept in the cache, by content.

    They are over chunks from all frames or, as training samples them, from frames that are `used`, up to the `ends` of
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
    samples: dict[str, Any] = {"states": states, "actions": actions, "starts": dataset.starts, "horizon": horizon}
    samples |= {"delta_mask": np.asarray(mask, bool) if any(mask) else None, "ends": ends, "used": used}
    try:
        stats = read_norm_stats(file)
    except CheckpointError:  # a cache that is damaged, or cannot be written, only costs time
        stats = compute_norm_stats(**samples)
        with contextlib.suppress(OSError):
            write_norm_stats(file, stats)
    for sentence in degenerate_dimensions(stats):
        logger.warning("%s: %s", dataset.name, sentence)
    return safe_scales(stats, lambda: sample_range(**samples))


def load_trajectories(
    dataset: Dataset,
    robot: Robot,
    model: Pi0Config,
    *,
    outcomes: OutcomeConfig | Outcomes | None = None,
    frame_cache: FrameCacheConfig | None = None,
    progress: bool = True,
) -> "Trajectories":
    """Everything a sampler needs of a dataset. Images are decoded once, into the frame cache."""
    if problems := list(robot_problems(dataset, robot)):
        raise BrokenDatasetError(dataset.name, problems, f"does not fit robot {robot.name!r}")
    states, actions = robot_columns(dataset, robot)
    found = outcomes if isinstance(outcomes, Outcomes) else read_outcomes(dataset, outcomes or OutcomeConfig())
    used = np.arange(len(dataset)) < np.repeat(found.ends, dataset.lengths)
    if not (np.isfinite(states[used]).all() and np.isfinite(actions[used]).all()):
        raise DataError(f"{dataset.name}: state or actions are not finite: see pirl data check {dataset.name}.")
    prompts = [task or robot.default_prompt or "" for task in dataset.rows.tasks]
    if model.max_token_len and not all(prompts[task] for task in np.unique(dataset.rows.task_of_row).tolist()):
        raise DataError(f"{dataset.name}: frames have no task to tell the model: give the robot a default_prompt.")
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
    from pirl.data.chunks import Trajectories  # which imports JAX

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


# --- actions of a human ----------------------------------------------------------------------------------------------


def find_interventions(dataset: Dataset) -> str | None:
    return next((name for name in INTERVENTION_COLUMNS if name in dataset.column_names), None)


def read_interventions(dataset: Dataset) -> tuple[Bool[np.ndarray, " rows"] | None, list[Problem]]:
    """Whether a human chose the action of each frame; None if there is no such column, or if it cannot be read."""
    name = find_interventions(dataset)
    if name is None:
        return None, []
    columns, problems = dataset.try_columns([name])
    if name not in columns:
        return None, problems
    values = columns[name]
    if values.ndim != 1 or values.dtype.kind not in "biuf" or not np.isin(values, (0, 1)).all():
        message = "is ignored: it should hold 0 or 1 for each frame"
        return None, [Problem(message, "note", column=name, value=str(values.dtype))]
    return values.astype(bool), []


def human_throughout(
    human: Bool[np.ndarray, " rows"], ends: Int64[np.ndarray, " rows"], horizon: int
) -> Bool[np.ndarray, " rows"]:
    """Whether a human chose all actions of the chunk from each row on; `ends` are those of the rows' episodes."""
    before = np.concatenate([[0], np.cumsum(human)])
    rows = np.arange(len(human))
    stop = np.minimum(rows + horizon, ends)
    return (stop > rows) & (before[stop.clip(min=0)] - before[rows] == stop - rows)


# --- filters ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """Which frames are sampled, and how often. Filters come first; weights multiply."""

    tasks: tuple[str, ...] | None = None
    """Sample only these tasks."""
    success: bool | None = None
    """Sample only successes (true) or failures (false)."""
    episodes: tuple[int, ...] | None = None
    """Use only these episodes, such as 0,3,7-12; others are neither checked nor read."""
    success_weight: float = 1.0
    """Sampling weight of successes; episodes without a known outcome have weight 1."""
    failure_weight: float = 1.0
    """Sampling weight of failures."""
    success_fraction: float | None = None
    """Fraction of the samples that come from successes, however many of these there are (none: by the weights)."""
    task_weights: Mapping[str, float] = field(default_factory=dict)
    """Sampling weights of tasks; others have weight 1."""
    human: bool = False
    """Sample only chunks that a human chose throughout, as a column `intervention` tells."""
    where: str | None = None
    """Sample only chunks that begin where this column is above 0, such as meta/advantages_TAG.parquet:advantage."""

    def __post_init__(self) -> None:
        if self.success_fraction is not None and not 0 < self.success_fraction < 1:
            raise ConfigError(f"success_fraction should be between 0 and 1, or none; it is {self.success_fraction}.")

    def weights(self, dataset: Dataset, outcomes: Outcomes, horizon: int = 1) -> Float64[np.ndarray, " rows"]:
        """The weight of each row as the start of a chunk of so many actions."""
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
        if self.where is not None:
            if self.where not in dataset.column_names and not is_beside(self.where):
                has = ", ".join(dataset.column_names)
                raise ConfigError(f"selection.where: {dataset.name} has no column {self.where}; it has {has}.")
            values = dataset.columns([self.where])[self.where]
            if values.ndim != 1 or values.dtype.kind not in "biuf":
                raise ConfigError(f"selection.where: column {self.where} should hold one number per frame.")
            weights = weights * (values > 0)
        if not weights.any():
            raise ConfigError(f"the filters leave nothing of {dataset.name}: {self}.")
        succeeded = np.repeat(success == 1, dataset.lengths)
        share = weights[succeeded].sum() / weights.sum()
        if self.success_fraction is not None and 0 < share < 1:  # with one kind only there is nothing to balance
            balance = self.success_fraction / (1 - self.success_fraction) * (1 - share) / share
            weights = np.where(succeeded, weights * balance, weights)
        return weights


# --- what there is, in numbers ---------------------------------------------------------------------------------------


def summarize(dataset: Dataset, config: OutcomeConfig) -> dict[str, Any]:
    """What is in a dataset, JSON-ready, for `pirl data info`; `problems` are what could not be read.

    `outcomes` is None where the data does not tell how its episodes ended; `outcome_problem` says why.
    """
    known_of, (found, problems) = dataset, try_outcomes(dataset, config)
    outcomes, lacking = None, {problem.episode for problem in problems}
    unread: list[Problem] = []
    if None not in lacking and 0 < len(lacking) < len(dataset.episode_ids):
        known_of, unread = dataset.select(set(dataset.episode_ids.tolist()) - lacking), problems
        found, problems = try_outcomes(known_of, config)
    if found is not None:
        known, success = int((found.success >= 0).sum()), int((found.success == 1).sum())
        outcomes = {
            "known": known,
            "success": success,
            "rate": success / max(known, 1),
            "timeouts": int((~found.terminals[found.ends - 1]).sum()),
            "returns": _histogram(np.add.reduceat(found.rewards, known_of.starts[:-1])),
        }
    task_of_episode = dataset.rows.task_of_row[dataset.starts[:-1]]
    tasks = [{"task": text, "episodes": int((task_of_episode == i).sum())} for i, text in enumerate(dataset.rows.tasks)]
    human, unread_human = read_interventions(dataset)
    interventions = None
    if human is not None:
        episodes = np.add.reduceat(human, dataset.starts[:-1]).astype(bool)
        column = find_interventions(dataset)
        interventions = {"column": column, "frames": int(human.sum()), "episodes": int(episodes.sum())}
    unread = [*unread, *unread_human, *(problem for problem in dataset.problems if problem.severity == "problem")]
    cameras = [_summarize_camera(dataset, name, unread) for name in dataset.cameras]
    features = {name: dataset.info.features[name] for name in dataset.column_names if name in dataset.info.features}
    return {
        "name": dataset.name,
        "version": dataset.info.version,
        "fps": dataset.info.fps,
        "robot_type": dataset.info.robot_type,
        "episodes": len(dataset.episode_ids),
        "frames": len(dataset),
        "tasks": tasks,
        "lengths": _histogram(dataset.lengths),
        "outcomes": outcomes,
        "outcome_problem": str(problems[0]) if problems else None,
        "interventions": interventions,
        "cameras": cameras,
        "problems": format_problems(dict.fromkeys(unread)),
        "columns": [{"name": name, "dtype": f.dtype, "shape": list(f.shape)} for name, f in features.items()],
    }


def _summarize_camera(dataset: Dataset, name: str, unread: list[Problem]) -> dict[str, Any]:
    """Size and storage, by the first image that can be read; problems are added to `unread`."""
    storage, readable = "images in parquet", list(range(len(dataset.episode_ids)))
    if name not in dataset.rows.column_types:
        segments, problems = dataset.segments(name)
        unread += [problem for problem in problems if problem.severity == "problem"]
        readable = [episode for episode, segment in enumerate(segments) if segment is not None]
        codecs = sorted({segment.video.codec for segment in segments if segment is not None})
        storage = f"video ({', '.join(codecs)})" if codecs else "no video that can be read"
        if codecs and len(readable) < len(segments):
            missing = set(dataset.episode_ids.tolist()) - set(dataset.episode_ids[readable].tolist())
            storage += f", not for episodes {format_episodes(missing)}"
    size = dataset.info.features[name].image_size or (0, 0)
    try:
        if readable:
            size = next(iter(dataset.decode(name, readable[0]))).shape[:2]
    except DataError as error:
        if isinstance(error.__cause__, DepthImageError):
            size, storage = error.__cause__.size, "depths in parquet, which no policy sees"
        else:
            unread.append(Problem(str(error), episode=int(dataset.episode_ids[readable[0]]), column=name))
    return {"name": name, "height": size[0], "width": size[1], "storage": storage}


def _histogram(values: np.ndarray, bins: int = 10) -> dict[str, Any]:
    # In float64: neighboring float32 numbers leave no room for bins.
    counts, edges = np.histogram(values.astype(np.float64), bins=min(bins, len(np.unique(values))))
    return {
        "min": float(values.min()),
        "max": float(values.max()),
        "mean": float(values.mean()),
        "counts": counts.tolist(),
        "edges": edges.tolist(),
    }
