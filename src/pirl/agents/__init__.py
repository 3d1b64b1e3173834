"""The learners: behaviour cloning, ACRLPD and RIPT, one file each. Names are loaded lazily."""

from typing import TYPE_CHECKING

from pirl.lazy import lazy_names

if TYPE_CHECKING:
    from pirl.agents.acrlpd import ACRLPDAgent, ACRLPDConfig
    from pirl.agents.base import Agent, Metrics
    from pirl.agents.bc import BCAgent, BCConfig
    from pirl.agents.optimisers import OptimiserConfig
    from pirl.agents.ript import RIPTAgent, RIPTConfig, RolloutBatch
    from pirl.agents.temperature import TemperatureConfig

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "acrlpd": ("ACRLPDAgent", "ACRLPDConfig"),
        "base": ("Agent", "Metrics"),
        "bc": ("BCAgent", "BCConfig"),
        "optimisers": ("OptimiserConfig",),
        "ript": ("RIPTAgent", "RIPTConfig", "RolloutBatch"),
        "temperature": ("TemperatureConfig",),
    },
)
