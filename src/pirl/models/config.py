"""Architecture of a π₀ / π₀.₅ policy and of critics, and named presets from a laptop model to the released ones."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pirl.errors import Checked, ConfigError, Count, Fraction, NotNegative, Positive, did_you_mean
from pirl.text import read_dataclass

DType = Literal["float32", "bfloat16"]
Remat = Literal["none", "full", "dots", "weight_dots"]

# OpenPI's camera slots, in the order in which their tokens enter the prefix.
OPENPI_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


@dataclass(frozen=True)
class LoraConfig(Checked):
    """A low-rank update of a frozen weight."""

    rank: Count
    alpha: Positive = 1.0
    rank_stabilized: bool = False

    @property
    def scale(self) -> float:
        """The factor on the low-rank product (attention only: OpenPI's feed-forward LoRA is not scaled)."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


@dataclass(frozen=True)
class ExpertConfig(Checked):
    """One of the two experts of the transformer. Depth, heads and head size must agree between the two."""

    width: Count
    depth: Count
    mlp_dim: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    attention_lora: LoraConfig | None = None
    mlp_lora: LoraConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads = {self.num_heads} should be a multiple of num_kv_heads = {self.num_kv_heads}."
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim = {self.head_dim} should be even: rotary embedding turns pairs of components.")

    @property
    def has_lora(self) -> bool:
        """Whether any of its weights carries a low-rank update."""
        return self.attention_lora is not None or self.mlp_lora is not None

    def with_lora(self, lora: LoraConfig | None) -> "ExpertConfig":
        """The same expert with `lora` on attention and feed-forward, or without any."""
        return dataclasses.replace(self, attention_lora=lora, mlp_lora=lora)


@dataclass(frozen=True)
class VisionConfig(Checked):
    """The SigLIP vision tower; its output width is that of the first expert."""

    width: Count
    depth: Count
    mlp_dim: Count
    num_heads: Count
    patch_size: tuple[int, int]

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.patch_size) < 1:
            raise ConfigError(f"patch_size should be positive; it is {self.patch_size}.")
        if self.width % self.num_heads:
            raise ConfigError(f"vision.width = {self.width} should be a multiple of num_heads = {self.num_heads}.")


@dataclass(frozen=True)
class Pi0Config(Checked):
    """Architecture of a policy. The defaults outside the networks are OpenPI's."""

    vision: VisionConfig
    language: ExpertConfig
    action_expert: ExpertConfig
    vocab_size: Count = 257_152
    """Tokens in the vocabulary."""
    pi05: bool = False
    """π₀.₅: flow time conditions the action expert's norms; the state is part of the prompt, or not used."""
    discrete_state_input: bool = False
    """The prompt contains the state in 256 bins (π₀.₅ only). Off for π₀.₅ LIBERO, which sees no state."""
    action_dim: Count = 32
    """Width of states and actions; narrower ones are padded with zeros."""
    action_horizon: Count = 50
    """Steps of an action chunk."""
    max_token_len: NotNegative = 48
    """Longest prompt in tokens (0: no prompt)."""
    cameras: tuple[str, ...] = OPENPI_CAMERAS
    """Without cameras the policy has no vision tower; without a prompt too, the prefix is empty."""
    image_resolution: tuple[int, int] = (224, 224)
    """Height and width that images are resized to."""
    dtype: DType = "bfloat16"
    """Compute dtype of the large matrix products."""
    param_dtype: DType = "float32"
    """Storage dtype of new parameters."""
    remat: Remat = "full"
    """Rematerialization: what the backward pass recomputes. none: nothing; full: everything but the input of each
    layer; dots: everything but matrix products; weight_dots: everything but products with weights."""
    tokenizer: Literal["paligemma", "tiny"] = "paligemma"
    """The public SentencePiece file of π₀ (paligemma), or the vocabulary inside this package (tiny)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        first, second = self.language, self.action_expert
        for field in ("depth", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(first, field) != getattr(second, field):
                raise ConfigError(
                    f"language.{field} = {getattr(first, field)} but action_expert.{field} = "
                    f"{getattr(second, field)}: the experts attend jointly, so these must be equal."
                )
        if second.width % 2:
            raise ConfigError(f"action_expert.width = {second.width} should be even: time becomes sines and cosines.")
        if self.cameras and any(r < p for r, p in zip(self.image_resolution, self.vision.patch_size, strict=True)):
            raise ConfigError(f"image_resolution {self.image_resolution} is below a patch {self.vision.patch_size}.")
        if len(set(self.cameras)) != len(self.cameras):
            raise ConfigError(f"cameras = {self.cameras} names a camera twice.")
        if self.discrete_state_input and not self.pi05:
            raise ConfigError("discrete_state_input needs pi05 = True: it puts the state in the π₀.₅ prompt.")
        if self.pi05 and not self.cameras and not self.max_token_len:
            raise ConfigError("π₀.₅ sees the state only as text: without cameras and prompt this policy sees nothing.")

    @property
    def tokens_per_image(self) -> int:
        """How many prefix tokens one camera takes."""
        (height, width), (patch_height, patch_width) = self.image_resolution, self.vision.patch_size
        return (height // patch_height) * (width // patch_width)

    def is_frozen(self, path: str) -> bool:
        """OpenPI's freeze rule for LoRA training, on a '/'-joined parameter path. Without LoRA nothing is frozen."""
        if not self.language.has_lora and not self.action_expert.has_lora:
            return False
        if re.fullmatch(".*lora.*", path):
            return False
        in_language_model = re.fullmatch(".*llm.*", path) is not None
        in_action_expert = re.fullmatch(".*llm.*_1.*", path) is not None
        if not self.language.has_lora:
            return in_action_expert
        return in_language_model and (self.action_expert.has_lora or not in_action_expert)

    def without_lora(self) -> "Pi0Config":
        """The configuration of the same policy after its LoRA has been merged."""
        return dataclasses.replace(
            self, language=self.language.with_lora(None), action_expert=self.action_expert.with_lora(None)
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description, the inverse of `from_dict`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> "Pi0Config":
        """Read what `to_dict` wrote, also after a way through JSON; an unknown or missing field is named."""
        model: Pi0Config = read_dataclass(cls, data, "model description: model")
        return model


@dataclass(frozen=True)
class CriticConfig(Checked):
    """Architecture of the critics, and how they represent values."""

    num_critics: Count = 2
    """Critics in the ensemble."""
    hidden_dims: tuple[int, ...] = (512, 512, 512, 512)
    """Widths of the hidden layers, each with LayerNorm before its activation."""
    dropout: Fraction = 0.0
    """Dropout rate of the hidden layers in training."""
    num_queries: Count = 4
    """Queries by which each critic reads the policy's prefix (its cached keys and values)."""
    query_width: Count = 64
    """Width of each query and of what it reads."""
    num_heads: Count = 4
    """Attention heads of the queries."""
    loss: Literal["huber", "bce", "hl_gauss"] = "huber"
    """Regression of the value (huber); cross-entropy of its place in value_range (bce); or cross-entropy of num_bins
    bins over value_range against the target smoothed by a Gaussian (hl_gauss)."""
    huber_delta: Positive = 1.0
    """Huber threshold: larger errors count linearly."""
    value_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest value that bce and hl_gauss can express: the range of returns."""
    num_bins: Annotated[int, "[2, inf)"] = 101
    """Bins of hl_gauss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hidden_dims or min(self.hidden_dims) < 1:
            raise ConfigError(f"critic.hidden_dims should be positive widths; it is {self.hidden_dims}.")
        if self.query_width % self.num_heads:
            raise ConfigError(
                f"critic.query_width = {self.query_width} should be a multiple of critic.num_heads = {self.num_heads}."
            )
        if len(self.value_range) != 2 or not self.value_range[0] < self.value_range[1]:
            raise ConfigError(f"critic.value_range should be lowest, highest; it is {self.value_range}.")

    @property
    def outputs(self) -> int:
        """Numbers by which a network expresses a value."""
        return self.num_bins if self.loss == "hl_gauss" else 1


# --- presets -----------------------------------------------------------------------------------------------------

# Two critics of 20 M parameters each on π₀'s prefix, and ten small ones.
LARGE_CRITICS = CriticConfig(num_critics=2, hidden_dims=(1024,) * 4, query_width=512, num_heads=8)
TEN_CRITICS = CriticConfig(num_critics=10, hidden_dims=(512,) * 4)


SIGLIP_SO400M = VisionConfig(width=1152, depth=27, mlp_dim=4304, num_heads=16, patch_size=(14, 14))
GEMMA_2B = ExpertConfig(width=2048, depth=18, mlp_dim=16_384, num_heads=8, num_kv_heads=1, head_dim=256)
GEMMA_300M = ExpertConfig(width=1024, depth=18, mlp_dim=4096, num_heads=8, num_kv_heads=1, head_dim=256)
GEMMA_2B_LORA = GEMMA_2B.with_lora(LoraConfig(rank=16, alpha=16.0))
GEMMA_300M_LORA = GEMMA_300M.with_lora(LoraConfig(rank=32, alpha=32.0))


def _pi0(language: ExpertConfig = GEMMA_2B, action_expert: ExpertConfig = GEMMA_300M) -> Pi0Config:
    return Pi0Config(vision=SIGLIP_SO400M, language=language, action_expert=action_expert)


def _pi05(language: ExpertConfig = GEMMA_2B, action_expert: ExpertConfig = GEMMA_300M) -> Pi0Config:
    base = _pi0(language, action_expert)
    return dataclasses.replace(base, pi05=True, discrete_state_input=True, max_token_len=200)


# About 0.4 M parameters: two 56×56 cameras (4 tokens each) and the package's own tokenizer. Made for two CPU cores:
# large patches learn a small scene as well as small ones do, at a third of the cost.
_TINY_EXPERT = ExpertConfig(width=64, depth=2, mlp_dim=128, num_heads=4, num_kv_heads=1, head_dim=16)
_TINY = Pi0Config(
    vision=VisionConfig(width=64, depth=2, mlp_dim=128, num_heads=4, patch_size=(28, 28)),
    language=_TINY_EXPERT,
    action_expert=_TINY_EXPERT,
    vocab_size=1024,
    action_dim=8,
    action_horizon=10,
    max_token_len=16,
    cameras=("base_0_rgb", "left_wrist_0_rgb"),
    image_resolution=(56, 56),
    dtype="float32",
    remat="none",
    tokenizer="tiny",
)

_PRESETS: dict[str, Pi0Config] = {
    # A CPU demo. `tiny_pi05` leaves room for the state in the prompt; `tiny_state` sees nothing but the state.
    "tiny": _TINY,
    "tiny_pi05": dataclasses.replace(_TINY, pi05=True, discrete_state_input=True, max_token_len=64),
    "tiny_lora": dataclasses.replace(
        _TINY,
        language=_TINY.language.with_lora(LoraConfig(rank=8, alpha=8.0)),
        action_expert=_TINY.action_expert.with_lora(LoraConfig(rank=8, alpha=8.0)),
    ),
    "tiny_state": dataclasses.replace(_TINY, cameras=(), max_token_len=0),
    # The released models (3.2 B and 3.4 B) and OpenPI's LoRA variants of them.
    "pi0_base": _pi0(),
    "pi05_base": _pi05(),
    # Released fine-tunes that plan another number of steps, or (π₀.₅ LIBERO) do not see the state.
    "pi05_libero": dataclasses.replace(_pi05(), action_horizon=10, discrete_state_input=False),
    "pi0_droid": dataclasses.replace(_pi0(), action_horizon=10),
    "pi05_droid": dataclasses.replace(_pi05(), action_horizon=15),
    "pi0_lora": _pi0(GEMMA_2B_LORA, GEMMA_300M_LORA),
    "pi05_lora": _pi05(GEMMA_2B_LORA, GEMMA_300M_LORA),
    "pi0_lora_paligemma_only": _pi0(GEMMA_2B_LORA, GEMMA_300M),
    "pi0_lora_action_expert_only": _pi0(GEMMA_2B, GEMMA_300M_LORA),
}


def list_model_configs() -> list[str]:
    """The names of the presets."""
    return list(_PRESETS)


def get_model_config(name: str) -> Pi0Config:
    """The preset of that name; an unknown one is answered with the nearest."""
    if name in _PRESETS:
        return _PRESETS[name]
    raise ConfigError(f"no model preset is named {name!r}. {did_you_mean(name, _PRESETS)}Known: {', '.join(_PRESETS)}.")
