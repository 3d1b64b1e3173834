"""Which metrics a run of a configuration measures, for those that decide what is kept and when to stop."""

from collections.abc import Iterator

from pirl.agents.config import ACRLPDConfig
from pirl.config.schema import RLTrainConfig
from pirl.errors import did_you_mean

_POLICY = ("loss", "bc/loss")
_ACTOR_CRITIC = (
    *("critic/loss", "critic/q_mean", "critic/q_min", "critic/q_max", "critic/q_spread", "critic/td_error"),
    *("critic/target", "critic/pair_auc", "critic/outcome_auc", "critic/sample_spread", "actor/loss"),
    "data/valid_chunks",
)
_ADVANTAGES = ("actor/advantage_p10", "actor/advantage_p50", "actor/advantage_p90", "critic/state_spread")
_BY_MODE: dict[str, tuple[str, ...]] = {
    "awr": (*_ADVANTAGES, "actor/ess", "actor/clip_fraction", "actor/temperature"),
    "distill": (
        *(*_ADVANTAGES, "actor/ess", "actor/clip_fraction", "actor/temperature"),
        *("actor/chosen_value", "actor/data_chosen"),
    ),
    "condition": (*_ADVANTAGES, "actor/positive", "actor/threshold"),
    "bc": (),
}
# What a learner may remember of its training episodes: measured on them as well as on held-out ones.
GAPS = ("critic/pair_auc", "critic/outcome_auc", "critic/td_error", "bc/loss")
_EVALUATION = ("eval/success", "eval/success_low", "eval/success_high", "eval/return", "eval/length")
_ONLINE = ("online/success", "online/episodes", "online/env_steps")
_ROLLOUT = ("rollout/success", "rollout/success_kept", "rollout/success_after", "rollout/groups", "rollout/drift")


def check_metric(config: RLTrainConfig, name: str) -> Iterator[str]:
    """What keeps a metric from being measured now and then: what is logged of updates decides nothing."""
    learned = [*_POLICY, "actor/action_mse"]
    if isinstance(config.agent, ACRLPDConfig):
        learned += [*_ACTOR_CRITIC, *_BY_MODE[config.agent.actor_mode]]
        learned += ["critic/pair_auc_shuffled"] if config.model.cameras else []
    validated = [f"val/{metric}" for metric in learned] + [f"gap/{metric}" for metric in GAPS if metric in learned]
    collected = _ROLLOUT if config.on_policy else _ONLINE
    known = [*_EVALUATION, *collected, *validated]
    if name not in known:
        yield f"no such thing is measured. {did_you_mean(name, known)}Known: {', '.join(dict.fromkeys(known))}."
    elif name in _EVALUATION and not config.evaluation.every:
        yield "nothing is evaluated; set --evaluation.every."
    elif name == "rollout/success_after" and not config.rollout.recheck:
        yield "success is not measured after the updates; set --rollout.recheck."
    elif name in _ONLINE and not config.online.env_steps:
        yield "there is no online phase; set --online.env-steps."
    elif name in validated and not config.validation_every:
        yield "no episodes are held out; set --validation-every and --data.validation-fraction."
