"""The configuration of a training run as a whole."""

from dataclasses import dataclass, field
from pathlib import Path

from pirl.agents.config import ACRLPDConfig, BCConfig, RIPTConfig
from pirl.config.parts import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    HealthConfig,
    LoggingConfig,
    OnlineConfig,
    RolloutConfig,
    StoppingConfig,
)
from pirl.envs.registry import EnvConfig
from pirl.models.config import Pi0Config

AgentConfig = BCConfig | ACRLPDConfig | RIPTConfig
# What a configuration file calls them.
LEARNERS: dict[str, type[AgentConfig]] = {"bc": BCConfig, "acrlpd": ACRLPDConfig, "ript": RIPTConfig}


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
class RLTrainConfig:
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
    steps: int = 10_000
    """Offline updates (RIPT makes none)."""
    batch_size: int = 32
    """Global batch size: chunks per update, over all devices."""
    validation_every: int = 0
    """Updates between validations on the held-out episodes (0: never)."""
    validation_batches: int = 8
    """Batches per validation."""
    seed: int = 0
    """Random seed of training."""
    fsdp_devices: int = 1
    """Devices that share one copy of the parameters."""
    runs_dir: Path = Path("runs")
    """Directory for run directories."""

    @property
    def goes_by_iterations(self) -> bool:
        """Whether progress, evaluations and checkpoints are counted in iterations instead of updates."""
        return isinstance(self.agent, RIPTConfig)

    @property
    def practises(self) -> bool:
        """Whether the policy acts in the environment to learn from it."""
        return self.rollout.iterations > 0 if self.goes_by_iterations else self.online.env_steps > 0
