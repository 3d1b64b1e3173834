"""The presets of `make demo`, and the smallest run there is."""

from dataclasses import replace

from pirl.agents.acrlpd import ACRLPDConfig
from pirl.agents.bc import BCConfig
from pirl.agents.optimisers import OptimiserConfig
from pirl.config.parts import CheckpointConfig, DataConfig, EvaluationConfig, LoggingConfig, OnlineConfig
from pirl.config.train import RLTrainConfig
from pirl.envs.registry import EnvConfig
from pirl.models.config import get_model_config
from pirl.models.critic import CriticConfig

_POLICY = OptimiserConfig(peak_lr=1e-3, warmup_steps=100, decay_steps=4_000, end_lr=1e-4)


def demo_bc() -> RLTrainConfig:
    """The demo's baseline: behaviour cloning of a tiny π₀ on demonstrations of mixed quality in Tabletop.

    Command: pirl train demo_bc --exp-name demo/bc --data.repo-id runs/demo/data
    Needs: two CPU cores, five minutes.
    Should reach: 30 to 60 % success.
    """
    return RLTrainConfig(
        name="demo_bc",
        model=get_model_config("tiny"),
        agent=BCConfig(optimiser=_POLICY, loss_over="real", augment=False),
        data=DataConfig(repo_id="runs/demo/data", robot="tabletop"),
        env=EnvConfig("tabletop"),
        checkpoints=CheckpointConfig(every=1_000),
        logging=LoggingConfig(every=50),
        from_scratch=True,
        steps=4_000,
        batch_size=32,
    )


def demo() -> RLTrainConfig:
    """The demo: ACRLPD from the cloned policy on the same demonstrations in Tabletop.

    Command: pirl train demo --exp-name demo/acrlpd --checkpoint runs/demo/bc
    Needs: two CPU cores, five minutes; the run of demo_bc before it, to begin with.
    Should reach: more than demo_bc, with intervals that do not overlap.
    """
    agent = ACRLPDConfig(
        horizon_length=10,
        num_action_samples=4,
        critic=CriticConfig(num_critics=2, hidden_dims=(256, 256)),
        policy_optimiser=replace(_POLICY, peak_lr=3e-4, end_lr=3e-5),
        bc_loss_weight=0.1,
        critic_warmup_steps=500,
        augment=False,
    )
    return replace(demo_bc(), name="demo", agent=agent, from_scratch=False, steps=3_000)


def debug() -> RLTrainConfig:
    """The smallest run of everything: offline, online, validation, evaluation, checkpoints, with a policy without eyes.

    Command: pirl train debug --exp-name try --data.repo-id DATA
    Needs: one CPU core, seconds; DATA made by
    pirl collect --env tabletop --env.observation state --policy expert --episodes 20 --out DATA
    Should reach: its end.
    """
    agent = ACRLPDConfig(
        horizon_length=4,
        num_action_samples=2,
        denoising_steps=2,
        critic=CriticConfig(num_critics=2, hidden_dims=(16,)),
        critic_warmup_steps=2,
    )
    return RLTrainConfig(
        name="debug",
        model=replace(get_model_config("tiny_state"), action_dim=8, action_horizon=4),
        agent=agent,
        data=DataConfig(robot="tabletop_state", validation_fraction=0.2, prefetch=0),
        env=EnvConfig("tabletop", options={"observation": "state", "max_steps": 20}),
        online=OnlineConfig(env_steps=40, utd_ratio=0.1, updates_per_scan=2, episodes_per_round=2, capacity=1_000),
        evaluation=EvaluationConfig(every=5, episodes=4, execute_steps=4, envs=4),
        checkpoints=CheckpointConfig(every=5, best_metric="eval/success"),
        logging=LoggingConfig(every=1, tensorboard=False),
        from_scratch=True,
        steps=10,
        batch_size=8,
        validation_every=5,
        validation_batches=1,
    )
