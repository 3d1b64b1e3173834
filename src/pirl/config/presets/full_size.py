"""What the presets of full-size policies have in common."""

from dataclasses import replace

from pirl.agents.acrlpd import ACRLPDConfig
from pirl.models.critic import TEN_CRITICS

# Ten small critics, judged by their lower bound; they learn for a while before the policy moves.
ACRLPD = ACRLPDConfig(
    horizon_length=10,
    num_action_samples=4,
    target="expectile",
    aggregate="lower_bound",
    actor_mode="distill",
    critic=replace(TEN_CRITICS, loss="bce"),
    critic_guidance=0.05,
    critic_warmup_steps=5_000,
)
