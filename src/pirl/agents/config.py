"""Hyper-parameters of the learners."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pirl.errors import Checked, ConfigError, Count, Fraction, NotNegative, Positive, Share, Weight
from pirl.models.config import CriticConfig

# What a flow loss averages over: all action dimensions and steps, padding included, as in OpenPI; or real ones only.
LossOver = Literal["all", "real"]
# How the values of the ensemble are combined.
Aggregate = Literal["min", "mean", "subset_min", "lower_bound"]


@dataclass(frozen=True)
class OptimizerConfig(Checked):
    """AdamW with gradient clipping and a learning-rate schedule."""

    peak_lr: Positive = 2.5e-5
    """Learning rate at the end of the warm-up."""
    schedule: Literal["cosine", "rsqrt", "constant"] = "cosine"
    """Schedule after the warm-up: cosine decay to end_lr, inverse square root, or constant."""
    warmup_steps: NotNegative = 1_000
    """Updates of linear warm-up."""
    decay_steps: int = 30_000
    """Updates, including the warm-up, until the cosine reaches end_lr."""
    end_lr: Weight = 2.5e-6
    """Learning rate at the end of the cosine decay."""
    timescale: Positive = 10_000.0
    """rsqrt: updates after which the learning rate has fallen to 1/√2 of its peak."""
    b1: Fraction = 0.9
    """Adam's β₁: decay of the first moment."""
    b2: Fraction = 0.95
    """Adam's β₂: decay of the second moment."""
    eps: Positive = 1e-8
    """Adam's ε, added to the root of the second moment."""
    weight_decay: Weight = 1e-10
    """Decoupled weight decay."""
    clip_norm: Positive = 1.0
    """Global gradient norm above which gradients are clipped."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage dtype of both moments; bfloat16 halves their memory. They are computed in float32."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule == "cosine" and self.decay_steps <= self.warmup_steps:
            raise ConfigError(
                f"decay_steps = {self.decay_steps} should exceed warmup_steps = {self.warmup_steps}, which it includes."
            )


@dataclass(frozen=True)
class BCConfig(Checked):
    """Behavior cloning. The defaults are OpenPI's."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the policy."""
    ema_decay: Fraction | None = 0.99
    """Decay of the policy's EMA, which acts and is exported (none: the latest parameters do)."""
    freeze: tuple[str, ...] = ()
    """Frozen parts: vision, language, or regular expressions on parameter paths. LoRA freezes the base weights itself."""
    augment: bool = True
    """Augment images as OpenPI does: crop, rotate, color jitter."""
    loss_over: LossOver = "all"
    """What the flow loss averages over: all action dimensions and steps, padding included, as in OpenPI; or real ones."""
    denoising_steps: Count = 10
    """Euler steps of the flow when acting."""
    accumulation_steps: Count = 1
    """Gradient accumulation: parts of a batch that are processed one after the other."""
    acting_guidance: ClassVar[float] = 0.0


@dataclass(frozen=True)
class TemperatureConfig(Checked):
    """Temperature of the advantage weights exp(advantage / β)."""

    beta: Positive = 0.1
    """The temperature β; its initial value if adaptive."""
    adaptive: bool = False
    """Adjust β so that the effective sample size of the weights stays at target_ess."""
    target_ess: Share = 0.5
    """Target effective sample size, as a fraction of the batch."""
    learning_rate: Positive = 0.01
    """Learning rate of log β."""
    max_weight: Positive = 100.0
    """Largest weight; larger ones are clipped."""


@dataclass(frozen=True)
class ACRLPDConfig(Checked):
    """ACRLPD: action-chunked RL with prior data, an actor-critic method."""

    horizon_length: Count = 10
    """Steps of a chunk that the critics value (H); at most the length of the policy's chunk."""
    discount: Annotated[float, "[0, 1]"] = 0.99
    """Discount per step (γ)."""
    num_action_samples: Count = 4
    """Chunks to sample from the policy for a target, for the baseline, and when acting (N)."""
    num_acting_samples: Count | None = None
    """Chunks to sample when acting (none: num_action_samples)."""
    denoising_steps: Count = 10
    """Euler steps of the flow for each sampled chunk."""
    aggregate: Aggregate = "mean"
    """How the values of the ensemble are combined; subset_min is the minimum of a random pair, lower_bound the mean minus
    pessimism times the standard deviation."""
    pessimism: Weight = 0.5
    """How far below the mean the lower bound is, in standard deviations of the ensemble."""
    target: Literal["best_of_n", "expectile"] = "best_of_n"
    """What critics expect after a chunk: the value of the best of N sampled chunks, or an upper expectile over the chunks
    in the data, which needs no samples and never asks about chunks that nobody has tried."""
    mc_lower_bound: bool = False
    """Raise what critics expect to the discounted Monte-Carlo return of the data where that is known. It speeds up the
    start; where outcomes are chance, it makes critics optimistic."""
    expectile: Share = 0.8
    """The expectile: 0.5 is the mean over the data, 1 the best in it."""
    actor_mode: Literal["awr", "distill", "condition", "bc"] = "awr"
    """Train the policy on chunks in the data weighted by advantage (awr); in each state on the best of that chunk and N
    samples of the start policy, weighted too (distill: critics read the start policy's encoder, whatever the policy's
    learns); on all chunks, with the sign of the advantage in the prompt (condition); or on all chunks equally (bc)."""
    positive_fraction: Share = 0.4
    """condition: share of the chunks whose advantage counts as positive; the threshold follows the critics."""
    cond_dropout: Fraction = 0.3
    """condition: fraction of chunks trained without the indicator in the prompt."""
    guidance_weight: Weight = 1.0
    """condition: weight of the indicator when acting; 0 ignores it, 1 follows it (a prompt is all that takes), above 1
    extrapolates."""
    temperature: TemperatureConfig = field(default_factory=TemperatureConfig)
    """Temperature of the weights in actor_mode awr and distill; small against the spread of the advantages."""
    critic_weight: Weight = 1.0
    """Weight of the critic loss."""
    actor_weight: Weight = 1.0
    """Weight of the actor loss."""
    bc_loss_weight: Weight = 0.0
    """Weight of an additional plain flow-matching loss."""
    bc_on: Literal["successes", "all"] = "successes"
    """Chunks that the additional flow-matching loss uses: those of successful episodes and those that a human chose
    throughout (corrections), or all."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic ensemble."""
    critic_trains_encoder: bool = False
    """Let gradients of the critic loss train the policy's encoder."""
    policy_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the policy."""
    critic_optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(
            peak_lr=3e-4, schedule="constant", warmup_steps=0, b2=0.999, weight_decay=0.0
        )
    )
    """Optimizer of the critics."""
    critic_warmup_steps: NotNegative = 0
    """Updates that train only the critics, before the policy starts to train."""
    actor_every: Count = 1
    """Train the policy in every N-th update only."""
    target_update_rate: Annotated[float, "(0, 1]"] = 0.005
    """Rate at which the target critics follow the critics (τ)."""
    policy_ema_decay: Fraction | None = 0.99
    """Decay of the policy's EMA, which acts and is exported (none: the latest parameters do)."""
    critic_ema_decay: Fraction = 0.99
    """Decay of the critics' EMA, which chooses among samples when acting."""
    freeze: tuple[str, ...] = ()
    """Frozen parts of the policy: vision, language, or regular expressions on parameter paths."""
    augment: bool = True
    """Augment images as OpenPI does: crop, rotate, color jitter."""
    accumulation_steps: Count = 1
    """Gradient accumulation: parts of a batch that are processed one after the other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aggregate == "subset_min" and self.critic.num_critics < 2:
            raise ConfigError("aggregate = subset_min needs critic.num_critics of at least 2.")

    def policy_updates(self, updates: int) -> int:
        """How many of a run's first updates train the policy as well."""
        return max(0, updates - self.critic_warmup_steps) // self.actor_every

    @property
    def acting_guidance(self) -> float:
        """Weight of the indicator in the prompt when acting; 0 for a policy that knows none."""
        return self.guidance_weight if self.actor_mode == "condition" else 0.0


@dataclass(frozen=True)
class RIPTConfig(Checked):
    """RIPT: critic-free RL with leave-one-out advantages over rollouts from the same initial state."""

    weighting: Literal["signed", "positive", "exp", "guidance"] = "positive"
    """How advantages weight chunks: signed also pushes away from failures; positive uses only rollouts better than the
    others; exp weights all by exp(advantage / beta); guidance puts the sign of the advantage in the prompt."""
    normalize_advantages: bool = True
    """Divide advantages by their standard deviation over the episodes of an iteration."""
    negative_weight: Weight = 0.25
    """Weight of a failure relative to a success: 0.25 repels (signed) or teaches (guidance) a quarter as much."""
    negative_clip: Weight = 1.0
    """signed: negative advantages are clipped to minus this."""
    negative_loss_limit: Positive = 1.0
    """signed: a chunk whose flow loss exceeds this is pushed no further, so the loss is bounded below."""
    beta: Positive = 1.0
    """exp: temperature of the weights."""
    max_weight: Positive = 20.0
    """exp: largest weight; larger ones are clipped."""
    cond_dropout: Annotated[float, "[0, 1]"] = 0.2
    """guidance: fraction of chunks trained without the indicator in the prompt."""
    guidance_weight: Weight = 2.0
    """guidance: weight of the indicator when acting; 0 ignores it, 1 follows it, above 1 extrapolates."""
    rollout_guidance: Weight = 1.0
    """guidance: the same weight in rollouts; 0 in the first iteration, where the policy does not know the indicator."""
    num_epochs: Count = 2
    """Passes over the chunks of an iteration."""
    chunks: Literal["decisions", "all"] = "decisions"
    """Chunks of a rollout to train on: those that start where the policy was queried, or all. The others start with
    actions decided some steps earlier; a policy that trains on them reacts later with every iteration."""
    batch_by: Literal["chunks", "groups"] = "chunks"
    """What batches are drawn from: all chunks of the iteration, or those of a few contexts at a time."""
    bc_loss_weight: Weight = 0.0
    """Weight of plain flow matching on demonstrations, to prevent forgetting (0: no dataset is needed)."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of the policy."""
    ema_decay: Fraction | None = 0.99
    """Decay of the policy's EMA, which acts and is exported (none: the latest parameters do)."""
    freeze: tuple[str, ...] = ()
    """Frozen parts: vision, language, or regular expressions on parameter paths. LoRA freezes the base weights itself."""
    augment: bool = True
    """Augment images as OpenPI does: crop, rotate, color jitter."""
    loss_over: LossOver = "all"
    """What the flow loss averages over: all action dimensions and steps, padding included, as in OpenPI; or real ones."""
    denoising_steps: Count = 10
    """Euler steps of the flow when acting."""
    rollout_solver: Literal["euler", "midpoint"] = "midpoint"
    """ODE solver of the flow in rollouts, with the same number of evaluations. Euler, which deployed policies use,
    samples a narrower distribution than the policy's; training on such samples would narrow it every iteration."""
    accumulation_steps: Count = 1
    """Gradient accumulation: parts of a batch that are processed one after the other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rollout_solver == "midpoint" and self.denoising_steps % 2:
            raise ConfigError(f"denoising_steps = {self.denoising_steps} should be even for rollout_solver = midpoint.")

    @property
    def acting_guidance(self) -> float:
        """Weight of the indicator in the prompt when acting; 0 for a policy that knows none."""
        return self.guidance_weight if self.weighting == "guidance" else 0.0
