"""Presets for bimanual ALOHA, real and simulated. What each says about needs and results also holds for its variants."""

from dataclasses import replace

from pirl.agents.config import ACRLPDConfig
from pirl.config.parts import CheckpointConfig, DataConfig, EvaluationConfig, RolloutConfig
from pirl.config.presets.full_size import ACRLPD
from pirl.config.presets.ript import with_ript
from pirl.config.train import RLTrainConfig
from pirl.data.outcomes import OutcomeConfig
from pirl.data.prepare import Selection
from pirl.envs.registry import EnvConfig
from pirl.models.config import get_model_config
from pirl.models.critic import LARGE_CRITICS

_CHECKPOINTS = CheckpointConfig(every=1_000, max_to_keep=1, keep_period=5_000)


def aloha_fold(pi05: bool) -> RLTrainConfig:
    """Folding with the real ALOHA, offline from labelled episodes.

    ACRLPD with a critic horizon of 20 steps, ten small critics and four sampled chunks.
    Command: pirl train aloha_fold --exp-name fold --data.repo-id me/fold_box --checkpoint checkpoints/pi0_base
    Data: 14 dimensions and three cameras, with success labels (pirl data label).
    Needs: 52 GB for parameters, optimizer and EMA of 3.2 B in float32, 13 GB more for gradients: two GPUs of 80 GB with
    --fsdp-devices 2, better eight. LoRA: one GPU of 40 GB.
    Should reach: more successes than its _bc variant on the same data. Evaluated on the robot; there is no simulator.
    """
    return RLTrainConfig(
        name="aloha_fold_pi05" if pi05 else "aloha_fold",
        model=get_model_config("pi05_base" if pi05 else "pi0_base"),
        agent=replace(ACRLPD, horizon_length=20),
        data=DataConfig(robot="aloha", selection=Selection(success_fraction=0.5)),
        checkpoints=_CHECKPOINTS,
        steps=30_000,
        batch_size=32,
    )


def rl_fold_box(pi05: bool) -> RLTrainConfig:
    """Box folding with the real ALOHA, offline from some hundred labelled episodes.

    As aloha_fold, but with two critics of 20 M parameters, and 5 % of the episodes held out for validation.
    Command: pirl train rl_fold_box --exp-name box --data.repo-id me/fold_box --checkpoint checkpoints/pi0_base
    Data: as aloha_fold, with successes and failures; larger critics need more data.
    Needs: GPUs as aloha_fold.
    Should reach: as aloha_fold.
    """
    base = aloha_fold(pi05)
    assert isinstance(base.agent, ACRLPDConfig)
    return replace(
        base,
        name="rl_fold_box_pi05" if pi05 else "rl_fold_box",
        agent=replace(base.agent, critic=replace(LARGE_CRITICS, loss="bce")),
        data=replace(base.data, validation_fraction=0.05),
        validation_every=1_000,
    )


def aloha_sim(pi05: bool) -> RLTrainConfig:
    """Handing over a cube in simulated ALOHA: offline from LeRobot's demonstrations, with evaluations.

    The demonstrations contain no failures. More can be gained in the simulator: add --online.env-steps 50000.
    Command: pirl train aloha_sim --exp-name cube --checkpoint checkpoints/pi0_base
    Data: LeRobot's dataset, which is downloaded.
    Needs: pip install 'pirl[aloha,hub]'; GPUs as aloha_fold.
    Should reach: at least its _bc variant offline, more after the online phase.
    """
    base = aloha_fold(pi05)
    return replace(
        base,
        name="aloha_sim_pi05" if pi05 else "aloha_sim",
        data=DataConfig(
            repo_id="lerobot/aloha_sim_transfer_cube_human",
            robot="aloha_sim",
            outcomes=OutcomeConfig(unlabelled="success"),
        ),
        env=EnvConfig("aloha"),
        evaluation=EvaluationConfig(every=5_000, episodes=50, execute_steps=10, videos=4),
        checkpoints=replace(_CHECKPOINTS, best_metric="eval/success"),
        steps=20_000,
    )


def aloha_ript(pi05: bool) -> RLTrainConfig:
    """Handing over a cube in simulated ALOHA by RIPT: eight rollouts per initial state, success as the only feedback.

    Command: pirl train aloha_ript --exp-name cube --checkpoint checkpoints/pi0_aloha_sim
    Needs: pip install 'pirl[aloha]'; a policy that succeeds sometimes, with its statistics (for π₀, OpenPI's fine-tune
    for this simulator; for π₀.₅ none is released: train one first, pirl train aloha_sim_pi05_bc --exp-name cube_bc); GPUs
    as aloha_fold; one core per environment, here or on a Ray cluster (--rollout.backend ray).
    Should reach: more than the start policy.
    """
    return with_ript(aloha_sim(pi05), rollout=RolloutConfig(iterations=100, videos_every=10))
