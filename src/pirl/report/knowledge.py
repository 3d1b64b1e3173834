"""What the critics of a run know: the charts, and whether to trust them by the last validation."""

import math

from pirl.report.curves import Panel
from pirl.report.runs import Run

# Rules of thumb, all of them here. Chance is 0.5.
TELLS_APART = 0.6  # from this pair_auc on, chunks are told apart
CONFUSES = 0.45  # below this outcome_auc, failures are valued above successes
SEES = 0.05  # what shuffling the images costs at least if they are used
REMEMBERS = 0.1  # a larger gap of pair_auc is memory of the training episodes

KNOWLEDGE = (
    Panel(
        "Chunks told apart",
        "critic/pair_auc",
        "How often the chunk recorded at an observation is valued above chunks recorded at others; 50 % is chance. "
        "Solid: with the images shuffled among the samples.",
        share=True,
        beside=("critic/pair_auc_shuffled", "images shuffled"),
    ),
    Panel(
        "Outcomes told apart",
        "critic/outcome_auc",
        "How often a sample of a success is valued above one of a failure; 50 % is chance. Knowing how far an episode "
        "has come is enough to do well.",
        share=True,
    ),
    Panel(
        "Spread over samples",
        "critic/sample_spread",
        "Standard deviation of Q over the chunks sampled at one observation: what best-of-N chooses by.",
        noisy=True,
    ),
    Panel(
        "Spread over states",
        "critic/state_spread",
        "Standard deviation of the mean Q over observations. If this is many times the spread over samples, Q is about "
        "states and hardly about actions.",
        noisy=True,
    ),
    Panel(
        "Gap: chunks told apart",
        "gap/critic/pair_auc",
        "Training minus held-out episodes; well above 0, the critics remember the training episodes.",
    ),
    Panel("Gap: outcomes told apart", "gap/critic/outcome_auc", "Training minus held-out episodes."),
    Panel(
        "Gap: TD error",
        "gap/critic/td_error",
        "Training minus held-out episodes; well below 0, the critics remember the training episodes.",
    ),
)


def judge_critics(run: Run) -> str:
    """Whether to trust the critics, in a sentence."""
    pairs = _by_step(run, "val/critic/pair_auc")
    if not pairs:
        return (
            "Whether to trust the critics was not measured: it takes held-out episodes with successes among them "
            "(--data.validation-fraction, --validation-every)."
        )
    step, pair = max(pairs.items())
    names = ("val/critic/pair_auc_shuffled", "val/critic/outcome_auc", "gap/critic/pair_auc")
    # NaN, which passes, where there is none.
    shuffled, outcome, gap = (_by_step(run, name).get(step, math.nan) for name in names)
    if pair < TELLS_APART:
        return f"Do not trust best-of-N: the critics do not tell chunks apart (pair_auc {pair:.2f}; chance is 0.5)."
    if outcome < CONFUSES:
        return f"Do not trust the critics: they value failures above successes (outcome_auc {outcome:.2f})."
    if gap > REMEMBERS:
        return (
            f"Do not trust the critics beyond the training episodes: they remember these (pair_auc {pair + gap:.2f}, and "
            f"{pair:.2f} on held-out ones)."
        )
    if pair - shuffled < SEES:
        return (
            f"Trust the critics only as far as the robot's state tells: they do not use the images (pair_auc {pair:.2f}, "
            f"and {shuffled:.2f} with the images shuffled)."
        )
    seen = "" if math.isnan(shuffled) else f", {shuffled:.2f} with the images shuffled"
    return f"Trust the critics: they tell chunks apart in episodes that they have not seen (pair_auc {pair:.2f}{seen})."


def _by_step(run: Run, name: str) -> dict[float, float]:
    """What was measured, by the step at which it was."""
    curve = run.curves.get(name)
    pairs = () if curve is None else zip(curve.steps.tolist(), curve.values.tolist(), strict=True)
    return {step: value for step, value in pairs if math.isfinite(value)}
