"""Which learner belongs to which configuration."""

import jax

from pirl.agents.acrlpd import ACRLPDAgent
from pirl.agents.bc import BCAgent
from pirl.agents.common import Agent
from pirl.agents.config import ACRLPDConfig, RIPTConfig
from pirl.agents.ript import RIPTAgent
from pirl.config import RLTrainConfig
from pirl.models import Pi0


def create_learner(config: RLTrainConfig, action_dim: int | None, policy: Pi0, rng: jax.Array) -> Agent:
    """The learner of a configuration at its beginning; the robot has so many dimensions of the policy's actions."""
    if isinstance(config.agent, ACRLPDConfig):
        return ACRLPDAgent.create(config.agent, policy, rng, real_action_dim=action_dim)
    if isinstance(config.agent, RIPTConfig):
        return RIPTAgent.create(config.agent, policy, rng, real_action_dim=action_dim)
    return BCAgent.create(config.agent, policy, rng, real_action_dim=action_dim)
