"""Where a policy acts: environments, pools of them, rollouts, and what measures and collects them.

Importing this registers pirl's environments with Gymnasium and nothing more; each name is loaded when it is used.
"""

from typing import TYPE_CHECKING

from pirl.envs.known import register_envs
from pirl.lazy import lazy_names

if TYPE_CHECKING:
    from pirl.envs.adapter import EnvAdapter
    from pirl.envs.base import EnvDescription, EnvObservation, EnvState, Expert, RobotEnv, Start
    from pirl.envs.collecting import collect
    from pirl.envs.evaluation import Comparison, Evaluation, compare, evaluate
    from pirl.envs.experts import ExpertConfig
    from pirl.envs.intervals import mcnemar, wilson
    from pirl.envs.planner import Planner, PolicyPlanner, find_policy, load_planner
    from pirl.envs.pools import EnvPool, Lost, Segment, Started, open_pool
    from pirl.envs.registry import EnvConfig, EnvEntry, list_envs, make_env
    from pirl.envs.rollouts import Rollout, make_starts, roll_out

register_envs()

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "adapter": ("EnvAdapter",),
        "base": (
            "EnvDescription",
            "EnvObservation",
            "EnvState",
            "Expert",
            "RobotEnv",
            "Start",
        ),
        "collecting": ("collect",),
        "evaluation": (
            "Comparison",
            "Evaluation",
            "compare",
            "evaluate",
        ),
        "experts": ("ExpertConfig",),
        "intervals": (
            "mcnemar",
            "wilson",
        ),
        "planner": (
            "Planner",
            "PolicyPlanner",
            "find_policy",
            "load_planner",
        ),
        "pools": (
            "EnvPool",
            "Lost",
            "Segment",
            "Started",
            "open_pool",
        ),
        "registry": (
            "EnvConfig",
            "EnvEntry",
            "list_envs",
            "make_env",
        ),
        "rollouts": (
            "Rollout",
            "make_starts",
            "roll_out",
        ),
    },
)
