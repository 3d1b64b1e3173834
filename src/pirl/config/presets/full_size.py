"""What the presets of full-size policies have in common."""

from dataclasses import replace

from pirl.agents.config import ACRLPDConfig, TemperatureConfig
from pirl.models.critic import TEN_CRITICS

# Ten small critics, judged by their lower bound; they learn for a while before the policy moves, then weigh the chunks in
# the data so sharply that about one in ten counts.
ACRLPD = ACRLPDConfig(
    horizon_length=10,
    num_action_samples=4,
    target="expectile",
    aggregate="lower_bound",
    actor_mode="awr",
    temperature=TemperatureConfig(beta=0.01, max_weight=20.0),
    critic=replace(TEN_CRITICS, loss="bce"),
    critic_warmup_steps=5_000,
)
