"""Whether a model is the one that a checkpoint says it is of, in what the shapes of parameters do not show."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pirl.errors import CheckpointError
from pirl.models.config import Pi0Config


def check_agreement(directory: Path, described: Pi0Config | None, config: Pi0Config, *, to_learn: bool = False) -> None:
    """Raise if the parameters, which fit both models, would compute something else in this one than in theirs.

    How far a policy plans, in which dtype it computes, how long prompts may be, what is computed again: all that may
    differ. A policy that goes on learning may be told its state in another way, as OpenPI's π₀.₅ of LIBERO was.
    """
    if described is None:
        return
    differences = [
        f"{name} is {theirs} there, and {ours} here"
        for name, theirs, ours in _unseen(described, config)
        if not (to_learn and name == "discrete_state_input")
    ]
    if differences:
        raise CheckpointError(
            f"{directory} is of another model, by its pirl.json, though the parameters fit: {'; '.join(differences)}. "
            "They would compute something else: leave the model out, so that the checkpoint tells it, or set this as it "
            "is there."
        )


def _unseen(described: Pi0Config, config: Pi0Config) -> Iterator[tuple[str, Any, Any]]:
    """What differs of that which decides what is computed, and that no shape shows."""
    names = []
    if described.max_token_len and config.max_token_len:
        names += ["discrete_state_input", "tokenizer"]
    if described.cameras and config.cameras:
        names.append("image_resolution")
    for name in names:
        if getattr(described, name) != getattr(config, name):
            yield name, getattr(described, name), getattr(config, name)
    for expert in ("language", "action_expert"):
        theirs, ours = (getattr(model, expert).attention_lora for model in (described, config))
        # One without LoRA is merged, or begins to have it; the feed-forward LoRA is not scaled.
        if theirs is not None and ours is not None and theirs.scale != ours.scale:
            for name in ("alpha", "rank_stabilised"):
                if getattr(theirs, name) != getattr(ours, name):
                    yield f"{expert}.attention_lora.{name}", getattr(theirs, name), getattr(ours, name)
