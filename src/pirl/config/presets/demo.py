"""The presets of `make demo`, and the smallest run there is."""

from dataclasses import replace

from pirl.agents.config import ACRLPDConfig, BCConfig, OptimizerConfig, RIPTConfig, TemperatureConfig
from pirl.config.parts import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    OnlineConfig,
    RolloutConfig,
)
from pirl.config.train import RLTrainConfig
from pirl.data.prepare import Selection
from pirl.envs.registry import EnvConfig
from pirl.models.config import get_model_config
from pirl.models.critic import CriticConfig

_PIXELS = EnvConfig("tabletop")
_STATE = EnvConfig("tabletop", options={"observation": "state"})
# RIPT knows success or failure only: where there is no time to try again and again, these tell more about each decision.
_SHORT_TABLE = EnvConfig("tabletop", options={"observation": "state", "max_steps": 50})


def demo_bc() -> RLTrainConfig:
    """The demo's baseline: behaviour cloning of a tiny π₀ with two cameras on noisy demonstrations in Tabletop.

    Command: pirl train demo_bc --exp-name demo/bc --data.repo-id runs/demo/data
    Needs: one CPU core, three minutes; a dataset from `pirl demo` or `pirl collect`.
    Should reach: about 5 % success: its actions are as noisy as the expert's, and it recovers less often.
    """
    optimizer = OptimizerConfig(peak_lr=2e-3, warmup_steps=100, decay_steps=3_000, end_lr=1e-4, weight_decay=1e-4)
    return RLTrainConfig(
        name="demo_bc",
        model=get_model_config("tiny"),
        agent=BCConfig(optimizer=optimizer, loss_over="real", augment=False),
        data=DataConfig(repo_id="runs/demo/data", robot="tabletop"),
        env=_PIXELS,
        checkpoints=CheckpointConfig(every=3_000),
        logging=LoggingConfig(every=50),
        from_scratch=True,
        steps=3_000,
        batch_size=32,
    )


def demo() -> RLTrainConfig:
    """The demo: ACRLPD from a clone of the successes in Tabletop, on all demonstrations, then also on its own episodes.

    Command: pirl train demo --exp-name demo/acrlpd --checkpoint runs/demo/bc_successes
    Needs: one CPU core, ten minutes; a run of demo_bc on successes to start from, as `pirl demo` makes it.
    Should reach: offline 91 % with the policy alone (one run, 800 demonstrations), where BC on successes had 10 %.
    """
    agent = ACRLPDConfig(
        horizon_length=5,
        discount=0.98,
        num_action_samples=4,
        num_acting_samples=8,
        denoising_steps=4,
        target="expectile",
        aggregate="lower_bound",
        actor_mode="distill",
        temperature=TemperatureConfig(beta=0.01, max_weight=20.0),
        critic=CriticConfig(num_critics=4, hidden_dims=(256, 256), loss="bce"),
        # Constant, since online the policy has to follow what the critics learn; its average is what counts.
        policy_optimizer=OptimizerConfig(peak_lr=5e-4, schedule="constant", warmup_steps=100, weight_decay=1e-4),
        policy_ema_decay=0.995,
        critic_optimizer=OptimizerConfig(
            peak_lr=1e-3, warmup_steps=50, decay_steps=9_500, end_lr=5e-5, b2=0.999, weight_decay=0.0
        ),
        # The policy waits until the critics know: what it learns from worse ones it does not unlearn in time.
        critic_warmup_steps=5_000,
        target_update_rate=0.01,
        augment=False,
    )
    base = demo_bc()
    return replace(
        base,
        name="demo",
        agent=agent,
        # The start policy goes on with the units that it has learned.
        data=replace(base.data, norm_stats="checkpoint", selection=Selection(success_fraction=0.5)),
        online=OnlineConfig(env_steps=6_000, utd_ratio=0.2, updates_per_scan=8, episodes_per_round=32),
        evaluation=EvaluationConfig(every=9_500, envs=64),
        checkpoints=CheckpointConfig(every=500, keep_period=9_500),
        from_scratch=False,
        steps=9_500,
    )


def demo_state_bc() -> RLTrainConfig:
    """As demo_bc, but of a tiny π₀ that observes the true state instead of two cameras: the quick variant.

    Command: pirl train demo_state_bc --exp-name demo_state/bc --data.repo-id runs/demo_state/data
    Needs: one CPU core, one minute; a dataset from `pirl demo --observation state` or `pirl collect`.
    Should reach: about 10 % success: its actions are as noisy as the expert's, and it recovers less often.
    """
    optimizer = OptimizerConfig(peak_lr=2e-3, warmup_steps=100, decay_steps=1_500, end_lr=1e-4, weight_decay=1e-4)
    return RLTrainConfig(
        name="demo_state_bc",
        model=get_model_config("tiny_state"),
        agent=BCConfig(optimizer=optimizer, loss_over="real", augment=False),
        data=DataConfig(repo_id="runs/demo_state/data", robot="tabletop_state"),
        env=_STATE,
        checkpoints=CheckpointConfig(every=1_500),
        logging=LoggingConfig(every=50),
        from_scratch=True,
        steps=1_500,
        batch_size=32,
    )


def demo_state() -> RLTrainConfig:
    """As demo, but from a policy that observes the true state instead of two cameras: the quick variant.

    Command: pirl train demo_state --exp-name demo_state/acrlpd --checkpoint runs/demo_state/bc_successes
    Needs: one CPU core, six minutes; a run of demo_state_bc on successes to start from.
    Should reach: offline 92 % with the policy alone (one run, 800 demonstrations), where BC on successes had 12 %.
    """
    base, pixels = demo_state_bc(), demo()
    return replace(
        pixels,
        name="demo_state",
        model=base.model,
        agent=pixels.agent,
        data=replace(pixels.data, repo_id=base.data.repo_id, robot=base.data.robot),
        env=base.env,
    )


def demo_ript_start() -> RLTrainConfig:
    """The start policy of the RIPT demo: weak, cloned from a few demonstrations of mixed quality in Tabletop.

    Command: pirl train demo_ript_start --exp-name demo_ript/start --data.repo-id runs/demo_ript/data
    Needs: one CPU core, one minute; a dataset from `pirl demo ript` or `pirl collect`.
    Should reach: 30 to 50 % success: enough to learn from, with much left to gain.
    """
    base = demo_state_bc()
    return replace(
        base,
        name="demo_ript_start",
        # It reads its prompt, so that guidance can say more in it.
        model=replace(base.model, max_token_len=16),
        data=replace(base.data, repo_id="runs/demo_ript/data"),
        env=_SHORT_TABLE,
    )


def demo_ript() -> RLTrainConfig:
    """The RIPT demo: the weak policy improves by rollouts in Tabletop; the only feedback is success, and how soon.

    Command: pirl train demo_ript --exp-name demo_ript/ript --checkpoint runs/demo_ript/start
    Needs: one CPU core, five minutes; a run of demo_ript_start to start from.
    Should reach: clearly more than demo_ript_start, without any further demonstration.
    """
    optimizer = OptimizerConfig(peak_lr=5e-4, warmup_steps=20, decay_steps=1_500, end_lr=2e-5, weight_decay=1e-4)
    return replace(
        demo_ript_start(),
        name="demo_ript",
        agent=RIPTConfig(optimizer=optimizer, ema_decay=0.995, loss_over="real", augment=False, num_epochs=4),
        data=DataConfig(robot="tabletop_state", norm_stats="checkpoint"),
        rollout=RolloutConfig(iterations=16, groups=48, attempts=8, budget=120, discount=0.97),
        evaluation=EvaluationConfig(every=5, envs=64),
        checkpoints=CheckpointConfig(every=5),
        from_scratch=False,
        steps=0,
        batch_size=64,
    )


def debug() -> RLTrainConfig:
    """The smallest run of everything: offline, online, validation, evaluation, checkpoints; a policy without cameras.

    Command: pirl train debug --exp-name try --data.repo-id DATA
    Needs: two CPU cores, about a minute, most of it compilation; DATA from
    pirl collect --env tabletop --env.observation state --policy expert --episodes 20 --out DATA
    Should reach: its end; it is too short to learn.
    """
    agent = ACRLPDConfig(
        horizon_length=4,
        num_action_samples=2,
        denoising_steps=2,
        critic=CriticConfig(num_critics=2, hidden_dims=(16,)),
    )
    return RLTrainConfig(
        name="debug",
        model=replace(get_model_config("tiny_state"), action_dim=8, action_horizon=4),
        agent=agent,
        data=DataConfig(robot="tabletop_state", validation_fraction=0.2, prefetch=0),
        env=EnvConfig("tabletop", options={"observation": "state", "max_steps": 20}),
        online=OnlineConfig(env_steps=40, utd_ratio=0.1, episodes_per_round=2, capacity=1_000),
        evaluation=EvaluationConfig(every=5, episodes=4, execute_steps=4, envs=4),
        checkpoints=CheckpointConfig(every=5, best_metric="eval/success"),
        logging=LoggingConfig(every=1, tensorboard=False),
        from_scratch=True,
        steps=10,
        batch_size=8,
        validation_every=5,
        validation_batches=1,
    )
