"""The configuration of a training run: its fields, their defaults and bounds."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pirl.agents.config import ACRLPDConfig, BCConfig, RIPTConfig
from pirl.data.outcomes import OutcomeConfig
from pirl.data.prepare import Selection
from pirl.envs.registry import CurriculumConfig, EnvConfig
from pirl.errors import Checked, ConfigError, Count, Fraction, NotNegative, Positive, Weight
from pirl.models.config import Pi0Config

AgentConfig = BCConfig | ACRLPDConfig | RIPTConfig
LEARNERS: dict[str, type[AgentConfig]] = {"bc": BCConfig, "acrlpd": ACRLPDConfig, "ript": RIPTConfig}
"""The learners by their names in configurations."""


@dataclass(frozen=True)
class DataConfig(Checked):
    """The training data."""

    repo_id: str | None = None
    """LeRobot dataset: a directory, or a repository id on the Hugging Face Hub."""
    robot: str = "aloha"
    """Robot description, which maps the dataset's columns and cameras to the policy: a preset, a JSON file, or the robot
    of an adapter (FILE:CLASS). An --env.adapter brings its own robot unless you name another here."""
    outcomes: OutcomeConfig = field(default_factory=OutcomeConfig)
    """Rewards, and how episodes end."""
    selection: Selection = field(default_factory=Selection)
    """Which frames are sampled, and how often."""
    bad_episodes: Literal["refuse", "skip"] = "refuse"
    """Episodes that cannot be trained on, such as one without its video: refuse to train, or train on the others, with a
    list of what is skipped. If more than half would be, training is refused either way."""
    validation_fraction: Fraction = 0.0
    """Fraction of the episodes, chosen by the seed, to hold out from training for validation."""
    norm_stats: str = "dataset"
    """Normalization statistics of states and actions: computed from the dataset (dataset), those in the checkpoint
    (checkpoint), or those of a norm_stats.json, or a directory that holds one."""
    asset_id: str | None = None
    """Asset id of the statistics in checkpoints, read and written (none: the checkpoint's, else the robot's name)."""
    frame_compression: Literal["none", "png", "jpeg"] = "none"
    """Compression of decoded frames in the cache: compressed frames take less disk space and load more slowly."""
    prefetch: NotNegative = 2
    """Batches to prepare ahead. The online phase does not prefetch."""
    episodes_per_memory_pool: Count | None = None
    """Episodes whose frames are in use at the same time, for datasets larger than memory (none: all)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        asset = Path(self.asset_id or "some")
        if asset.is_absolute() or ".." in asset.parts:
            raise ConfigError(f"asset_id = {self.asset_id} should name a directory inside the assets of a checkpoint.")


@dataclass(frozen=True)
class OnlineConfig(Checked):
    """Online training on the policy's own episodes, after the offline updates."""

    env_steps: NotNegative = 0
    """Total environment steps (0: offline only)."""
    utd_ratio: Positive = 1.0
    """Updates per environment step."""
    updates_per_scan: Count = 1
    """Updates per compiled call (a scan over batches)."""
    episodes_per_round: Count = 16
    """Episodes to collect per round, between updates."""
    prior_ratio: Annotated[float, "[0, 1]"] = 0.5
    """Fraction of each batch that comes from the dataset; the rest comes from the replay buffer."""
    capacity: Count = 100_000
    """Capacity of the replay buffer in frames; the oldest episodes are evicted first."""
    in_memory: bool = True
    """Keep the images of the replay buffer in memory; otherwise read them from the run directory when sampled."""
    seed: NotNegative = 1
    """Seed of the online episodes' initial states. Must differ from evaluation.seed, whose states are held out."""


@dataclass(frozen=True)
class RolloutConfig(Checked):
    """RIPT's iterations and their rollouts."""

    iterations: NotNegative = 0
    """Total iterations."""
    groups: Count = 8
    """Groups of rollouts with mixed outcomes to train on per iteration."""
    attempts: Annotated[int, "[2, inf)"] = 8
    """Rollouts (attempts) per group, all from the same initial state."""
    budget: Count = 32
    """Initial states to try at most per iteration to find these groups; then it continues with those it has found."""
    discount: Annotated[float, "(0, 1]"] = 1.0
    """Discount per step of a success's reward: below 1, quick successes count for more."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """Which initial states to try."""
    seed: NotNegative = 1
    """Seed of the initial states. Must differ from evaluation.seed, whose states are held out."""
    recheck: bool = True
    """After the updates, make one more rollout from each state that was trained on, to measure the improvement."""
    max_barren: Count = 5
    """Consecutive iterations without a group of mixed outcomes after which the run ends."""
    capacity: Count = 100_000
    """Frames of an iteration to keep for training; groups beyond that are left out."""
    save_dataset: bool = False
    """Write all rollouts, labeled with their success, to the LeRobot dataset `rollouts` in the run directory."""
    videos_every: NotNegative = 0
    """Iterations between videos of successes and failures (0: none)."""
    backend: Literal["local", "ray"] = "local"
    """Where environments run: on this machine, or on a Ray cluster."""
    ray_address: str | None = None
    """Address of the Ray cluster (none: that in RAY_ADDRESS, else start one on this machine)."""


@dataclass(frozen=True)
class EvaluationConfig(Checked):
    """When and how success is measured."""

    every: NotNegative = 0
    """Updates (with RIPT: iterations) between evaluations (0: never)."""
    episodes: Count = 200
    """Episodes per evaluation."""
    seed: NotNegative = 0
    """Seed of the initial states; the same in every evaluation, so that results can be compared."""
    execute_steps: Count = 5
    """Actions of each chunk to execute before replanning, here and in training rollouts."""
    envs: Count | None = None
    """Environments to run in parallel (none: 16, or the number of cores if each needs a process)."""
    best_of_n: bool = True
    """Act as the learner does, with its critics choosing the best of N samples; otherwise as the exported policy does."""
    videos: NotNegative = 0
    """Episodes to record as video in each evaluation."""
    timeout: Positive = 120.0
    """Seconds after which an environment that does not respond is restarted and its episode counted as lost."""


@dataclass(frozen=True)
class CheckpointConfig(Checked):
    """When checkpoints are saved, each with the policy and the train state, and which are kept."""

    every: Count = 1_000
    """Updates (with RIPT: iterations) between checkpoints; the last update is always saved."""
    max_to_keep: Count = 2
    """Newest checkpoints to keep; of the best and the periodic ones before them, the policy is kept."""
    keep_period: Count | None = None
    """Updates (with RIPT: iterations) between policies that are never deleted (none: no such policies)."""
    best_metric: str | None = None
    """Metric by which the best policy is also kept, such as eval/success (none: no such policy)."""
    best_mode: Literal["max", "min"] = "max"
    """Whether the best is the largest or the smallest."""


@dataclass(frozen=True)
class LoggingConfig(Checked):
    """Where metrics go, in addition to the run directory and the terminal."""

    every: Count = 100
    """Updates between logged metrics."""
    tensorboard: bool = True
    """Write TensorBoard files, if TensorBoard is installed."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases."""
    trackio: bool = False
    """Trackio, a local tracker."""
    project: str = "pirl"
    """Project name for the trackers."""


@dataclass(frozen=True)
class StoppingConfig(Checked):
    """Early stopping."""

    metric: str | None = None
    """Metric that has to improve, such as eval/success or val/loss (none: train to the end)."""
    mode: Literal["max", "min"] = "max"
    """Whether larger or smaller is better."""
    patience: Count = 5
    """Measurements without improvement after which the run ends."""
    min_delta: Weight = 0.0
    """Smallest change that counts as an improvement."""


@dataclass(frozen=True)
class HealthConfig(Checked):
    """Handling of bad updates and collapsing policies."""

    max_skipped: Count = 10
    """Consecutive skipped updates (NaN, or a loss above the limit) after which the run stops."""
    loss_limit: Annotated[float, "(0, inf]"] = 1e6
    """Absolute loss above which an update is skipped."""
    max_value_excess: Weight = 0.25
    """ACRLPD: how far the mean of Q may leave the range of returns in the data, as a fraction of that range, before the
    run stops (0: not monitored)."""
    min_success_ratio: Fraction = 0.25
    """RIPT: fraction of the best iteration's success below which success counts as collapsed (0: not monitored)."""
    max_drift: Annotated[float, "(0, inf]"] | None = None
    """RIPT: largest allowed drift from the start policy (rollout/drift; none: not monitored)."""
    min_speed_ratio: Fraction = 0.0
    """RIPT: fraction of the usual steps per second that is too slow, three times in a row (0: not monitored)."""
    action: Literal["stop", "rollback", "warn"] = "rollback"
    """RIPT: what to do then: stop; return to the last good checkpoint and continue with other rollouts; or only warn."""
    max_rollbacks: NotNegative = 2
    """RIPT: rollbacks after which the run stops instead."""


@dataclass(frozen=True)
class HostsConfig:
    """Multi-host training: processes started with the same command, except for their number."""

    coordinator: str | None = None
    """Address of process 0, HOST:PORT (none: detected from the cluster, see docs/scale.md)."""
    processes: int | None = None
    """Number of processes (none: detected from the cluster, else one)."""
    process_id: int | None = None
    """Number of this process, from 0 (none: detected from the cluster)."""
    connect_timeout: int = 300
    """Seconds to wait at the start for all processes to connect."""
    lost_timeout: int = 100
    """Seconds without a heartbeat after which a process counts as lost and the others exit."""


@dataclass(frozen=True)
class RLTrainConfig(Checked):
    """The configuration of a training run."""

    name: str
    """Name of the preset that this configuration is based on."""
    model: Pi0Config
    """Architecture of the policy."""
    agent: AgentConfig
    """The learner and its settings."""
    data: DataConfig = field(default_factory=DataConfig)
    """The training data."""
    env: EnvConfig | None = None
    """Environment for evaluation and online training (none: no environment)."""
    online: OnlineConfig = field(default_factory=OnlineConfig)
    """Online training on the policy's own episodes."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """RIPT's iterations and their rollouts."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """How success is measured."""
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is saved."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Where metrics go."""
    stopping: StoppingConfig = field(default_factory=StoppingConfig)
    """When a run ends early."""
    health: HealthConfig = field(default_factory=HealthConfig)
    """Handling of bad updates and collapsing policies."""
    hosts: HostsConfig = field(default_factory=HostsConfig)
    """Multi-host training."""
    checkpoint: str | None = None
    """OpenPI checkpoint directory, or a run, to start from."""
    from_scratch: bool = False
    """Start from random parameters instead."""
    steps: NotNegative = 10_000
    """Offline updates (RIPT makes none)."""
    batch_size: Count = 32
    """Global batch size: chunks per update, over all devices."""
    validation_every: NotNegative = 0
    """Updates between validations on the held-out episodes (0: never)."""
    validation_batches: Count = 8
    """Batches per validation."""
    seed: NotNegative = 0
    """Random seed of training."""
    fsdp_devices: Count = 1
    """Devices that share one copy of the parameters."""
    runs_dir: Path = Path("runs")
    """Directory for run directories."""

    @property
    def on_policy(self) -> bool:
        """Whether the learner is on-policy (RIPT); progress, evaluations and checkpoints then count iterations."""
        return isinstance(self.agent, RIPTConfig)

    @property
    def collects_rollouts(self) -> bool:
        """Whether the run collects rollouts to train on."""
        return self.rollout.iterations > 0 if self.on_policy else self.online.env_steps > 0
