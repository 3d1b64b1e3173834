"""Which metrics a run of a configuration measures, for those that decide what is kept and when to stop."""

from collections.abc import Iterator

from pirl.agents.bc import BCConfig
from pirl.config.train import RLTrainConfig
from pirl.errors import did_you_mean

_POLICY = ("loss", "bc/loss", "grad_norm/policy", "param_norm/policy", "lr/policy")
_ACTOR_CRITIC = (
    *("critic/loss", "critic/q_mean", "critic/q_min", "critic/q_max", "critic/q_spread", "critic/td_error"),
    *("critic/target", "actor/loss", "actor/advantage_p10", "actor/advantage_p50", "actor/advantage_p90", "actor/ess"),
    *("actor/clip_fraction", "actor/temperature", "actor/action_mse", "grad_norm/critic", "param_norm/critic"),
    *("lr/critic", "data/valid_chunks"),
)
# What belongs to an update, and is not there where nothing is learned.
_OF_UPDATES = ("grad_norm/", "param_norm/", "lr/")
_EVALUATION = ("eval/success", "eval/success_low", "eval/success_high", "eval/return", "eval/length")
_ONLINE = ("online/success", "online/episodes", "online/env_steps")


def check_metric(config: RLTrainConfig, name: str) -> Iterator[str]:
    """What keeps a metric from being measured."""
    learned = _POLICY if isinstance(config.agent, BCConfig) else (*_POLICY, *_ACTOR_CRITIC)
    validated = [f"val/{metric}" for metric in (*learned, "actor/action_mse") if not metric.startswith(_OF_UPDATES)]
    known = [*_EVALUATION, *_ONLINE, *validated, *learned]
    if name not in known:
        yield f"this learner has no such metric. {did_you_mean(name, known)}See metrics.jsonl of a run."
    elif name in _EVALUATION and not config.evaluation.every:
        yield "nothing is evaluated; set --evaluation.every."
    elif name in _ONLINE and not config.online.env_steps:
        yield "there is no online phase; set --online.env-steps."
    elif name in validated and not config.validation_every:
        yield "no episodes are held out; set --validation-every and --data.validation-fraction."
