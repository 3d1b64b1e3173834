"""The configuration of a training run as a whole."""

from dataclasses import dataclass, field
from pathlib import Path

from pirl.agents.acrlpd import ACRLPDConfig
from pirl.agents.bc import BCConfig
from pirl.agents.ript import RIPTConfig
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
    """Several processes that train together, each started with the same command but for its number."""

    coordinator: str | None = None
    """Address of the first process, HOST:PORT (none: what the cluster says; see docs/scale.md)."""
    processes: int | None = None
    """Processes in all (none: what the cluster says, else one)."""
    process_id: int | None = None
    """Which of them this is, counted from 0 (none: what the cluster says)."""
    connect_timeout: int = 300
    """Seconds in which all of them have to be there."""
    lost_timeout: int = 100
    """Seconds without a sign of life after which a process counts as lost, and the others end."""


@dataclass(frozen=True)
class RLTrainConfig:
    """Everything that decides what a training run does, apart from its name."""

    name: str
    """Name of the preset this began as."""
    model: Pi0Config
    """Sizes of the policy."""
    agent: AgentConfig
    """The learner, and its settings."""
    data: DataConfig = field(default_factory=DataConfig)
    """What is learned from."""
    env: EnvConfig | None = None
    """Where the policy acts, for evaluation and online learning (none: nowhere)."""
    online: OnlineConfig = field(default_factory=OnlineConfig)
    """Learning from what the policy itself does."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """RIPT's iterations."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """How success is measured."""
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is saved."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Where metrics go."""
    stopping: StoppingConfig = field(default_factory=StoppingConfig)
    """When a run ends early."""
    health: HealthConfig = field(default_factory=HealthConfig)
    """What is done about updates that go wrong."""
    hosts: HostsConfig = field(default_factory=HostsConfig)
    """Several processes that train together."""
    checkpoint: str | None = None
    """OpenPI checkpoint directory to start from."""
    from_scratch: bool = False
    """Start from random parameters instead."""
    steps: int = 10_000
    """Offline updates (RIPT makes none)."""
    batch_size: int = 32
    """Chunks per update, over all devices."""
    validation_every: int = 0
    """Updates between measurements on the held-out episodes (0: never)."""
    validation_batches: int = 8
    """Held-out batches of one measurement."""
    seed: int = 0
    """Decides everything random in training."""
    fsdp_devices: int = 1
    """Devices that share one copy of the parameters."""
    runs_dir: Path = Path("runs")
    """Directory that holds run directories."""

    @property
    def goes_by_iterations(self) -> bool:
        """Whether progress, evaluations and checkpoints are counted in iterations instead of updates."""
        return isinstance(self.agent, RIPTConfig)

    @property
    def practises(self) -> bool:
        """Whether the policy acts in the environment to learn from it."""
        return self.rollout.iterations > 0 if self.goes_by_iterations else self.online.env_steps > 0
