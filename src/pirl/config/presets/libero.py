"""The presets for the LIBERO benchmark."""

from dataclasses import replace

from pirl.config.parts import CheckpointConfig, DataConfig, EvaluationConfig, RolloutConfig
from pirl.config.presets.full_size import ACRLPD
from pirl.config.presets.ript import with_ript
from pirl.config.train import RLTrainConfig
from pirl.data.outcomes import OutcomeConfig
from pirl.envs.registry import EnvConfig
from pirl.models.config import get_model_config


def libero(pi05: bool) -> RLTrainConfig:
    """LIBERO's tasks: offline from OpenPI's conversion of its demonstrations, with evaluations.

    The demonstrations contain no failures. More can be gained in the simulator: add --online.env-steps 100000.
    Command: pirl train libero --exp-name goal --checkpoint checkpoints/pi0_base --env.suite libero_goal
    Data: OpenPI's conversion, which is downloaded.
    Needs: pip install 'pirl[libero,hub]'; GPUs as aloha_fold.
    Should reach: at least its _bc variant offline, more after the online phase.
    """
    # OpenPI's π₀ for LIBERO has the state subtracted from its actions, its π₀.₅ takes them as they are.
    return RLTrainConfig(
        name="libero_pi05" if pi05 else "libero",
        model=get_model_config("pi05_libero" if pi05 else "pi0_base"),
        agent=ACRLPD,
        data=DataConfig(
            repo_id="physical-intelligence/libero",
            robot="libero" if pi05 else "libero_delta",
            outcomes=OutcomeConfig(unlabelled="success"),
        ),
        env=EnvConfig("libero", options={"suite": "libero_goal"}),
        evaluation=EvaluationConfig(every=5_000, episodes=200, execute_steps=5, videos=4),
        checkpoints=CheckpointConfig(every=1_000, max_to_keep=1, keep_period=5_000, best_metric="eval/success"),
        steps=30_000,
        batch_size=32,
    )


def libero_ript(pi05: bool) -> RLTrainConfig:
    """LIBERO's tasks by RIPT: eight rollouts per initial state, success as the only feedback, no demonstrations.

    Command: pirl train libero_ript --exp-name goal --checkpoint checkpoints/pi0_libero --env.suite libero_goal
    Needs: pip install 'pirl[libero]'; a policy that succeeds sometimes (OpenPI's fine-tune for LIBERO), with its
    statistics; GPUs as aloha_fold; one core per environment, here or on a Ray cluster (--rollout.backend ray).
    Should reach: more than the start policy on the tasks it trains on.
    """
    base = libero(pi05)
    return with_ript(
        base,
        # The benchmark itself has fifty initial states per task.
        rollout=RolloutConfig(
            iterations=100, curriculum=replace(RolloutConfig().curriculum, initial_states=50), videos_every=10
        ),
    )
