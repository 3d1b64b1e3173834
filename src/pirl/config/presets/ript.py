"""What RIPT's presets for full-size policies have in common."""

from dataclasses import replace

from pirl.agents.config import OptimizerConfig, RIPTConfig
from pirl.config.parts import CheckpointConfig, DataConfig, OnlineConfig, RolloutConfig
from pirl.config.train import RLTrainConfig


def with_ript(config: RLTrainConfig, rollout: RolloutConfig) -> RLTrainConfig:
    """The same model, robot and environment, learned by RIPT from the policy's own attempts and nothing else."""
    suffix = "_pi05" if config.model.pi05 else ""
    family = config.name.removesuffix(suffix).removesuffix("_sim")
    return replace(
        config,
        name=f"{family}_ript{suffix}",
        # A learning rate like that at the end of OpenPI's own training: the policy is only to change a little at a time.
        agent=RIPTConfig(optimizer=OptimizerConfig(peak_lr=1e-5, schedule="constant", warmup_steps=20)),
        data=DataConfig(robot=config.data.robot, norm_stats="checkpoint"),
        online=OnlineConfig(),
        rollout=rollout,
        evaluation=replace(config.evaluation, every=10),
        checkpoints=CheckpointConfig(every=5, max_to_keep=2, best_metric="eval/success"),
        steps=0,
    )
