"""What a run says when it begins and when it ends."""

from collections.abc import Iterator, Sequence
from typing import Literal

from pirl.agents.common import Agent
from pirl.config import RLTrainConfig

Ending = Literal["interrupted", "no better", "nothing to do", "done"]


def opening_words(agent: Agent, hints: Sequence[str], step: int) -> Iterator[str]:
    """How large the learner is, how to look at its curves, and where it goes on."""
    counts = ", ".join(f"{name} {count:,}" for name, count in agent.parameter_counts().items())
    yield f"parameters: {counts}"
    yield from hints
    if step:
        yield f"resuming from step {step}."


def closing_words(config: RLTrainConfig, step: int, clock: int, ending: Ending) -> str:
    """Why it ends after so many updates, and iterations if it goes by them; and what could be done about it."""
    if ending == "interrupted":
        return f"stopped at step {step}; continue with --resume."
    if ending == "no better":
        return (
            f"stopped at step {step}: {config.stopping.metric} has not improved for {config.stopping.patience} "
            "measurements (--stopping.patience)."
        )
    if ending == "nothing to do":
        more = "--rollout.iterations" if config.goes_by_iterations else "--steps"
        if config.goes_by_iterations and clock < config.rollout.iterations:
            more = "--rollout.max-barren (iterations in a row without any signal)"
        return f"all {step} updates are done already; to continue, raise {more}."
    return f"done after {step} updates."
