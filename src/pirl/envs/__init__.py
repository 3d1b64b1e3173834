"""Where a policy acts: environments, pools of them, rollouts, evaluation, data collection.

Importing it registers pirl's environments with Gymnasium and loads neither JAX nor a simulator.
"""

from pirl.envs.adapter import EnvAdapter
from pirl.envs.base import EnvDescription, EnvObservation, Expert, RobotEnv, Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.registry import EnvConfig, make_env, register_envs

__all__ = [
    "EnvAdapter",
    "EnvConfig",
    "EnvDescription",
    "EnvObservation",
    "Expert",
    "ExpertConfig",
    "RobotEnv",
    "Start",
    "make_env",
]

register_envs()
