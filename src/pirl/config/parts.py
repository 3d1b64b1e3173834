"""The parts of a training run's configuration, apart from the model, the learner and the environment."""

from dataclasses import dataclass, field
from typing import Literal

from pirl.data.outcomes import OutcomeConfig
from pirl.data.prepare import Selection
from pirl.envs.curriculum import CurriculumConfig


@dataclass(frozen=True)
class DataConfig:
    """What is learned from."""

    repo_id: str | None = None
    """LeRobot dataset: a directory, or the name of one on the Hugging Face hub."""
    robot: str = "aloha"
    """How the dataset's columns and cameras fit the policy: a robot preset, a JSON file, or the robot of an adapter,
    FILE:CLASS. An --env.adapter brings its own robot, unless another is given here."""
    outcomes: OutcomeConfig = field(default_factory=OutcomeConfig)
    """What counts as reward, and how episodes end."""
    selection: Selection = field(default_factory=Selection)
    """Which frames are sampled, and how often."""
    validation_fraction: float = 0.0
    """Part of the episodes, chosen by the seed, that is kept out of training and measured in between."""
    norm_stats: Literal["dataset", "checkpoint"] = "dataset"
    """Whose statistics normalise states and actions: the dataset's own, or those that came with the checkpoint."""
    asset_id: str | None = None
    """Name of the statistics in checkpoints, read and written (none: the checkpoint's own, else the robot's name)."""
    frame_compression: Literal["none", "png", "jpeg"] = "none"
    """How decoded frames are kept in the cache: as they are, or smaller and slower."""
    prefetch: int = 2
    """Batches prepared ahead; the online phase prepares each when it is needed."""
    episodes_per_memory_pool: int | None = None
    """Episodes whose frames are in use at a time, for datasets larger than memory (none: all)."""


@dataclass(frozen=True)
class OnlineConfig:
    """Learning from what the policy itself does, after the offline updates."""

    env_steps: int = 0
    """Environment steps to take in all (0: offline only)."""
    utd_ratio: float = 1.0
    """Updates per environment step."""
    updates_per_scan: int = 1
    """Updates that one compiled call makes, one after the other."""
    episodes_per_round: int = 16
    """Episodes that are collected between updates."""
    prior_ratio: float = 0.5
    """Part of each batch that comes from the dataset; the rest is from the replay buffer."""
    capacity: int = 100_000
    """Frames the replay buffer holds; the oldest episodes make room."""
    in_memory: bool = True
    """Keep the pictures of the replay buffer in memory; else they are read from the run directory as they are drawn."""
    seed: int = 1
    """Decides the starts of online episodes; another than the evaluation's, whose starts are not to be practised."""


@dataclass(frozen=True)
class RolloutConfig:
    """RIPT's iterations: what is tried in each of them, and how many there are."""

    iterations: int = 0
    """Iterations in all."""
    groups: int = 8
    """Groups of attempts with mixed outcomes to learn from in an iteration."""
    attempts: int = 8
    """Attempts of a group, all from the same initial state."""
    budget: int = 32
    """Initial states that may be tried in an iteration to find these groups; then it goes on with what it has."""
    discount: float = 1.0
    """What is left of the worth of a success with every step that it took: below 1, quick ones count for more."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """Which initial states are tried."""
    seed: int = 1
    """Decides the initial states; another than the evaluation's, whose starts are not to be practised."""
    recheck: bool = True
    """Try the states that were learned from once more after the updates, to see what has come of them."""
    max_barren: int = 5
    """Iterations in a row with nothing to learn from (all attempts alike) after which the run ends."""
    capacity: int = 100_000
    """Frames of an iteration that are kept to learn from; groups beyond them are left out."""
    save_dataset: bool = False
    """Write all attempts, labelled by their success, into the LeRobot dataset `rollouts` in the run directory."""
    videos_every: int = 0
    """Iterations between films of successes and failures (0: none)."""
    backend: Literal["local", "ray"] = "local"
    """Where environments run: on this machine, or on a Ray cluster."""
    ray_address: str | None = None
    """Address of the cluster (none: what RAY_ADDRESS says, else one that is started here)."""


@dataclass(frozen=True)
class EvaluationConfig:
    """How often, and how, success is measured."""

    every: int = 0
    """Updates (with RIPT: iterations) between evaluations (0: never)."""
    episodes: int = 200
    """Episodes of one evaluation."""
    seed: int = 0
    """Decides the starts; the same in every evaluation, so that they can be compared."""
    execute_steps: int = 5
    """Actions of a planned chunk to execute before planning again, here and wherever the policy practises."""
    envs: int | None = None
    """Environments that run at the same time (none: 16, or the number of cores where each needs a process)."""
    best_of_n: bool = True
    """Act as the learner does, with its critic choosing among samples; else as the exported policy does alone."""
    videos: int = 0
    """Episodes to film each time."""
    timeout: float = 120.0
    """Seconds after which an environment that does not answer is given up."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state and the policy are saved, and which are kept."""

    every: int = 1_000
    """Updates (with RIPT: iterations) between checkpoints; the last update is always saved."""
    max_to_keep: int = 2
    """Newest checkpoints to keep, besides the best and the periodic ones."""
    keep_period: int | None = None
    """Updates (with RIPT: iterations) between checkpoints that are kept for good (none: no such)."""
    best_metric: str | None = None
    """Metric whose best checkpoint is kept too, such as eval/success (none: no such)."""
    best_mode: Literal["max", "min"] = "max"
    """Whether the best is the largest or the smallest."""


@dataclass(frozen=True)
class LoggingConfig:
    """Where metrics go, besides the run directory and the terminal."""

    every: int = 100
    """Updates between logged metrics."""
    tensorboard: bool = True
    """Write TensorBoard files, where it is installed."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases."""
    trackio: bool = False
    """Trackio, a local tracker."""
    project: str = "pirl"
    """Project name for the trackers."""


@dataclass(frozen=True)
class StoppingConfig:
    """Ending a run that no longer improves."""

    metric: str | None = None
    """Metric that has to improve, such as eval/success or val/loss (none: train to the end)."""
    mode: Literal["max", "min"] = "max"
    """Whether larger or smaller is better."""
    patience: int = 5
    """Measurements without improvement after which the run ends."""
    min_delta: float = 0.0
    """What counts as an improvement, at least."""


@dataclass(frozen=True)
class HealthConfig:
    """What is done about updates that go wrong."""

    max_skipped: int = 10
    """Updates skipped in a row (NaN, or a loss above the limit) after which the run stops."""
    loss_limit: float = 1e6
    """Absolute loss above which an update counts as exploded and is skipped."""
    min_success_ratio: float = 0.25
    """RIPT: part of the best iteration's success below which success has collapsed (0: not watched)."""
    max_drift: float | None = None
    """RIPT: drift from the start policy (rollout/drift) that is too much (none: not watched)."""
    min_speed_ratio: float = 0.0
    """RIPT: part of the usual environment steps per second that is too slow, three times in a row (0: not watched)."""
    action: Literal["stop", "rollback", "warn"] = "rollback"
    """RIPT: what follows: stop; go back to the last good checkpoint and on with other rollouts; or only say so."""
    max_rollbacks: int = 2
    """RIPT: so often; then the run stops."""
