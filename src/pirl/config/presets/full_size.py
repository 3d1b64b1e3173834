"""What the presets of full-size policies have in common."""

from pirl.agents.acrlpd import ACRLPDConfig
from pirl.models.critic import TEN_CRITICS

# Ten small critics, of which a random pair is asked; they learn for a while before the policy moves.
ACRLPD = ACRLPDConfig(
    horizon_length=10,
    num_action_samples=4,
    aggregate="subset_min",
    critic=TEN_CRITICS,
    bc_loss_weight=0.1,
    critic_warmup_steps=1_000,
)
