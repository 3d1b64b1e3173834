"""`--debug`: a small and quick version of any configuration, to see whether everything works together."""

from dataclasses import replace

from pirl.agents.config import ACRLPDConfig
from pirl.config.train import RLTrainConfig

_BATCH = 8
_STEPS = 10


def debug_config(config: RLTrainConfig) -> RLTrainConfig:
    """The same model, learner, data and environment for ten updates of eight chunks, everything done at least once.

    Metrics of every update; validation, evaluation (4 episodes) and checkpoints after five and ten; if there is an online
    phase, two short rounds of it; no trackers. RIPT makes two iterations with two groups of four attempts each.
    """
    agent, online, rollout, half = config.agent, config.online, config.rollout, _STEPS // 2
    if isinstance(agent, ACRLPDConfig):
        agent = replace(agent, critic_warmup_steps=min(agent.critic_warmup_steps, 2))
    if online.env_steps:
        online = replace(online, env_steps=min(online.env_steps, 100), utd_ratio=0.1, episodes_per_round=2)
    if config.goes_by_iterations:
        half = 1
        rollout = replace(
            rollout,
            iterations=min(rollout.iterations, 2),
            groups=2,
            attempts=4,
            budget=4,
            videos_every=min(rollout.videos_every, 1),
        )
    return replace(
        config,
        agent=replace(agent, accumulation_steps=1),
        online=online,
        rollout=rollout,
        evaluation=replace(
            config.evaluation,
            every=half if config.evaluation.every else 0,
            episodes=4,
            videos=min(config.evaluation.videos, 1),
        ),
        checkpoints=replace(config.checkpoints, every=half, keep_period=None),
        logging=replace(config.logging, every=1, wandb="off", trackio=False),
        steps=_STEPS if config.steps else 0,
        batch_size=_BATCH,
        validation_every=half if config.validation_every else 0,
        validation_batches=1,
    )
