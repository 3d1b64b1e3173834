"""Metrics of ACRLPD: values and targets, spread and weights of advantages, and what the critics know."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from pirl.agents.common import Metrics, nan_if_empty
from pirl.agents.config import ACRLPDConfig
from pirl.data.chunks import ChunkBatch
from pirl.models.observation import Observation
from pirl.models.pi0 import Prefix
from pirl.models.types import Array

# Chunks of other samples that each recorded chunk is compared with.
_OTHERS = 8
# Of an update of the critics alone.
NO_ACTOR_METRICS = dict.fromkeys(
    (
        *("actor/loss", "bc/loss", "actor/ess", "actor/clip_fraction", "actor/temperature"),
        *("actor/advantage_p10", "actor/advantage_p50", "actor/advantage_p90"),
        *("actor/chosen_value", "actor/data_chosen", "actor/positive", "actor/threshold"),
        *("critic/sample_spread", "critic/state_spread", "grad_norm/policy", "param_norm/policy", "lr/policy"),
    ),
    np.float32(np.nan),
)


def critic_metrics(
    loss: Float[Array, ""],
    values: Float[Array, "critics b"],
    target: Float[Array, " b"],
    usable: Bool[Array, " b"],
    count: Float[Array, ""],
) -> Metrics:
    """Means over the usable chunks, `count` in the whole batch, and for each chunk its lowest and highest value."""

    def mean(x: Float[Array, " b"]) -> Float[Array, ""]:
        return jnp.sum(jnp.where(usable, x, 0.0)) / jnp.maximum(count, 1e-6)

    means = {
        "critic/loss": loss,
        "critic/q_mean": mean(jnp.mean(values, axis=0)),
        "critic/q_spread": mean(jnp.std(values, axis=0)),
        "critic/td_error": mean(jnp.mean(jnp.abs(values - target), axis=0)),
        "critic/target": mean(target),
    }
    return {name: nan_if_empty(count, mean) for name, mean in means.items()} | {
        "critic/q_min": jnp.min(values, axis=0),
        "critic/q_max": jnp.max(values, axis=0),
        "data/valid_chunks": jnp.mean(usable),
    }


def compute_auc(
    better: Float[Array, "*#b"], worse: Float[Array, "*#b"], counted: Bool[Array, "*#b"]
) -> Float[Array, ""]:
    """How often the better one of a pair has the higher value, over the pairs that count; ties are half."""
    wins = jnp.where(better > worse, 1.0, jnp.where(better == worse, 0.5, 0.0))
    count = jnp.sum(counted, dtype=jnp.float32)
    return nan_if_empty(count, jnp.sum(wins * counted) / jnp.maximum(count, 1.0))


def pair_chunks(
    batch: ChunkBatch, horizon: int
) -> tuple[Float[Array, "b n chunk action_dim"], Bool[Array, "b others"]]:
    """Each sample's own chunk first, then those of n - 1 others, and which of these comparisons count.

    They do in successes, where both chunks have all steps that critics see. The chunk of the next sample, whose images
    `shuffle_images` shows, is never among the others.
    """
    whole = jnp.all(batch.valid[:, :horizon], axis=1)
    places = range(max(1, min(len(batch.success) - 1, _OTHERS + 1)))
    chunks, are_whole = (jnp.stack([jnp.roll(x, at, axis=0) for at in places], axis=1) for x in (batch.actions, whole))
    return chunks, (batch.success & whole)[:, None] & are_whole[:, 1:]


def pair_auc(values: Float[Array, "b n"], counted: Bool[Array, "b others"]) -> Float[Array, ""]:
    """How often an observation's own chunk, the first, is valued above another's; 0.5 is chance."""
    return compute_auc(values[:, :1], values[:, 1:], counted)


def outcome_auc(values: Float[Array, " b"], success: Bool[Array, " b"]) -> Float[Array, ""]:
    """How often a sample of a success is valued above one of a failure."""
    return compute_auc(values[:, None], values[None], success[:, None] & ~success[None])


def compare_chunks(
    value: Callable[[Prefix, Array], Array],
    batch: ChunkBatch,
    horizon: int,
    prefix: Prefix,
    shuffled_prefix: Prefix | None,
) -> Metrics:
    """How well values [b, n] of chunks tell whose chunk is whose, under the right images and others', and outcomes."""
    chunks, counted = pair_chunks(batch, horizon)
    values = value(prefix, chunks)
    metrics = {
        "critic/pair_auc": pair_auc(values, counted),
        "critic/outcome_auc": outcome_auc(values[:, 0], batch.success),
    }
    if shuffled_prefix is not None:
        metrics["critic/pair_auc_shuffled"] = pair_auc(value(shuffled_prefix, chunks), counted)
    return metrics


def shuffle_images(observation: Observation) -> Observation:
    """Show each sample the images of the next; state and prompt stay."""
    images, masks = jax.tree.map(lambda x: jnp.roll(x, -1, axis=0), (observation.images, observation.image_masks))
    return replace(observation, images=images, image_masks=masks)


def summarize(metrics: Metrics, config: ACRLPDConfig, log_beta: Float[Array, ""]) -> Metrics:
    """Metrics with one value per sample, summarized over the whole batch."""
    summary = dict(metrics)
    for name, reduce in (("critic/q_min", jnp.min), ("critic/q_max", jnp.max)):
        if name in metrics:
            summary[name] = reduce(metrics[name])
    if "actor/advantage" in metrics:
        advantages, beta = summary.pop("actor/advantage"), jnp.exp(log_beta)
        p10, p50, p90 = jnp.quantile(advantages, jnp.array([0.1, 0.5, 0.9]))
        summary |= {"actor/advantage_p10": p10, "actor/advantage_p50": p50, "actor/advantage_p90": p90}
        summary["critic/state_spread"] = jnp.std(summary.pop("critic/state_value"))
        if config.actor_mode == "condition":
            summary["actor/threshold"] = jnp.quantile(advantages, 1 - config.positive_fraction)
        else:
            # Before clipping: only so does the effective sample size rise with β.
            summary["actor/ess"] = effective_sample_size(jnp.exp((advantages - jnp.max(advantages)) / beta))
            summary["actor/clip_fraction"] = jnp.mean(advantages / beta >= jnp.log(config.temperature.max_weight))
            summary["actor/temperature"] = beta
    return summary


def effective_sample_size(weights: Float[Array, " b"]) -> Float[Array, ""]:
    """(Σ w)² / (b · Σ w²): the share of samples that would count as much if they had equal weights."""
    return jnp.square(jnp.sum(weights)) / jnp.maximum(weights.shape[0] * jnp.sum(jnp.square(weights)), 1e-12)
