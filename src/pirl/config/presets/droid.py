"""The preset for the Franka arm of DROID."""

from pirl.config.parts import CheckpointConfig, DataConfig
from pirl.config.presets.full_size import ACRLPD
from pirl.config.train import RLTrainConfig
from pirl.models.config import get_model_config


def droid(pi05: bool) -> RLTrainConfig:
    """Your own task on the DROID arm, with joint velocities, offline from labelled episodes.

    Command: pirl train droid --exp-name mine --data.repo-id me/droid_task --checkpoint checkpoints/pi0_droid
    Data: a LeRobot dataset with DROID's columns and success labels (pirl data label).
    Needs: GPUs as aloha_fold. With --data.norm-stats checkpoint, the policy keeps the DROID statistics it was trained
    with.
    Should reach: more successes than its _bc variant on the same data. Evaluated on the robot.
    """
    return RLTrainConfig(
        name="droid_pi05" if pi05 else "droid",
        model=get_model_config("pi05_droid" if pi05 else "pi0_droid"),
        agent=ACRLPD,
        data=DataConfig(robot="droid"),
        checkpoints=CheckpointConfig(every=1_000, max_to_keep=1, keep_period=5_000),
        steps=20_000,
        batch_size=32,
    )
