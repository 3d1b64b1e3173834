"""What a policy sees: the observation type, its checks, and the preparation of its images."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, PRNGKeyArray, UInt8

from pirl.errors import ObservationError
from pirl.models.augmentation import augment
from pirl.models.config import Pi0Config
from pirl.models.types import Array

Image = Float[Array, "b h w 3"] | UInt8[Array, "b h w 3"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Observation:
    """A batch of observations. Images are uint8, or float32 in [-1, 1]; state is normalized and padded."""

    images: dict[str, Image]
    image_masks: dict[str, Bool[Array, " b"]]
    state: Float[Array, "b action_dim"]
    tokenized_prompt: Int[Array, "b tokens"] | None = None
    tokenized_prompt_mask: Bool[Array, "b tokens"] | None = None

    def with_prompt(self, tokens: Int[Array, "b tokens"], mask: Bool[Array, "b tokens"]) -> "Observation":
        """The same under another prompt."""
        return replace(self, tokenized_prompt=tokens, tokenized_prompt_mask=mask)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], config: Pi0Config) -> "Observation":
        """Build from OpenPI's dictionary (`image`, `image_mask`, `state`, `tokenized_prompt`, …) of batched arrays.

        Shapes, dtypes and values are checked here, before anything is computed.
        """
        unknown = set(data) - {"image", "image_mask", "state", "tokenized_prompt", "tokenized_prompt_mask"}
        if unknown or "state" not in data:
            raise ObservationError(
                f"an observation has the keys image, image_mask, state, tokenized_prompt and tokenized_prompt_mask; "
                f"got {sorted(data)}."
            )
        for key in ("image", "image_mask"):
            if not isinstance(data.get(key, {}), Mapping):
                raise ObservationError(f"{key} should map camera names to arrays; it is {type(data[key]).__name__}.")
        state = _as_array("state", data["state"], np.float32)
        images = {name: _as_array(f"image {name!r}", image) for name, image in data.get("image", {}).items()}
        # Cameras without a mask are there, as in OpenPI.
        masks: dict[str, Any] = {name: np.ones(state.shape[:1], bool) for name in images}
        masks |= {name: _as_array(f"image_mask {name!r}", m, bool) for name, m in data.get("image_mask", {}).items()}
        tokens, mask = data.get("tokenized_prompt"), data.get("tokenized_prompt_mask")
        if tokens is not None:
            tokens = _as_tokens(_as_array("tokenized_prompt", tokens), config)
        if mask is not None:
            mask = _as_array("tokenized_prompt_mask", mask, bool)
        observation = cls(images, masks, state, tokens, mask)
        check_shapes(observation, config)
        _check_values(observation)
        return observation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GuidedObservation:
    """The same observations under two prompts: the plain one, and one that asks for good actions."""

    plain: Observation
    indicated: Observation


def check_shapes(observation: Observation, config: Pi0Config) -> None:
    """Raise if names, dtypes or shapes do not fit the model; also while tracing."""
    given, wanted = set(observation.images), set(config.cameras)
    if given != wanted:
        problems = [f"missing {sorted(wanted - given)}"] if wanted - given else []
        problems += [f"unknown {sorted(given - wanted)}"] if given - wanted else []
        raise ObservationError(
            f"the cameras of the observation do not fit the model: {' and '.join(problems)}; the model has "
            f"{list(config.cameras)}. A camera the robot lacks is given as zeros with its image_mask False."
        )
    if observation.state.ndim != 2 or observation.state.shape[1] != config.action_dim:
        raise ObservationError(
            f"state has shape {observation.state.shape}, the model takes (batch, {config.action_dim}): "
            "pad a narrower state with zeros; a wider one needs a model with a larger action_dim."
        )
    batch = observation.state.shape[0]
    for name, image in observation.images.items():
        if image.ndim != 4 or image.shape[0] != batch or image.shape[3] != 3 or 0 in image.shape[1:]:
            raise ObservationError(
                f"image {name!r} has shape {image.shape}, expected ({batch}, height, width, 3): channels come last."
            )
        if image.dtype not in (jnp.uint8, jnp.float32):
            raise ObservationError(
                f"image {name!r} has dtype {image.dtype}, expected uint8 (0 to 255) or float32 (-1 to 1)."
            )
    if set(observation.image_masks) != given:
        raise ObservationError(
            f"image_masks are for {sorted(observation.image_masks)}, the images are {sorted(given)}: one mask per camera."
        )
    for name, mask in observation.image_masks.items():
        if mask.shape != (batch,):
            raise ObservationError(f"image_mask {name!r} has shape {mask.shape}, expected ({batch},).")
    prompt, prompt_mask = observation.tokenized_prompt, observation.tokenized_prompt_mask
    if (prompt is None) != (prompt_mask is None):
        raise ObservationError("tokenized_prompt and tokenized_prompt_mask come together or not at all.")
    if prompt is not None and prompt_mask is not None:
        if prompt.ndim != 2 or prompt.shape[0] != batch or prompt_mask.shape != prompt.shape:
            raise ObservationError(
                f"tokenized_prompt has shape {prompt.shape} and its mask {prompt_mask.shape}, expected ({batch}, tokens)."
            )
        if prompt.shape[1] > config.max_token_len:
            raise ObservationError(
                f"the prompt has {prompt.shape[1]} tokens, the model takes max_token_len = {config.max_token_len}: "
                "shorten the prompt or raise max_token_len."
            )


def _check_values(observation: Observation) -> None:
    floats = {f"image {name!r}": image for name, image in observation.images.items() if image.dtype != np.uint8}
    for name, array in {"state": observation.state, **floats}.items():
        bad = np.argwhere(~np.isfinite(array))
        if len(bad):
            raise ObservationError(f"{name} contains {array[tuple(bad[0])]} at index {tuple(map(int, bad[0]))}.")
    for name, image in floats.items():
        low, high = float(np.min(image, initial=0.0)), float(np.max(image, initial=0.0))
        if low < -1 - 1e-5 or high > 1 + 1e-5:
            raise ObservationError(
                f"{name} has values from {low:.4g} to {high:.4g}; float images lie in [-1, 1]. "
                "Pass uint8, or map 0..255 by x / 255 * 2 - 1."
            )


def _as_array(name: str, value: Any, dtype: Any = None) -> Any:
    try:
        return np.asarray(value, dtype)
    except (TypeError, ValueError) as error:
        raise ObservationError(f"{name} is not an array of numbers: {error}.") from error


def _as_tokens(tokens: np.ndarray, config: Pi0Config) -> Any:
    """As int32, checked before the cast, which would hide what does not fit."""
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ObservationError(f"tokenized_prompt has dtype {tokens.dtype}, expected integers.")
    outside = tokens[(tokens < 0) | (tokens >= config.vocab_size)]
    if outside.size:
        raise ObservationError(
            f"tokenized_prompt contains token {outside.flat[0]}, outside the vocabulary of {config.vocab_size}: "
            f"was it written by another tokenizer than the model's ({config.tokenizer!r})?"
        )
    return tokens.astype(np.int32)


def preprocess(observation: Observation, config: Pi0Config, rng: PRNGKeyArray | None = None) -> Observation:
    """Images as the vision tower takes them: float32 in [-1, 1] at the model's size; augmented if `rng` is given."""
    check_shapes(observation, config)
    images = {}
    for name in config.cameras:
        image = to_float(observation.images[name])
        if image.shape[1:3] != config.image_resolution:
            image = resize_with_pad(image, *config.image_resolution)
        if rng is not None:
            image = augment(rng, image, geometric="wrist" not in name)
        images[name] = image
    return replace(observation, images=images)


def to_float(image: Image) -> Float[Array, "b h w 3"]:
    """uint8 0..255 to float32 -1..1; float images pass."""
    return image.astype(jnp.float32) / 255.0 * 2.0 - 1.0 if image.dtype == jnp.uint8 else image


def resize_with_pad(image: Float[Array, "b old_h old_w 3"], height: int, width: int) -> Float[Array, "b h w 3"]:
    """Scale images in [-1, 1] to fit inside height × width without distortion, and center them on black."""
    batch, old_height, old_width, channels = image.shape
    ratio = max(old_width / width, old_height / height)
    new_height, new_width = int(old_height / ratio), int(old_width / ratio)
    resized = jax.image.resize(image, (batch, new_height, new_width, channels), method="linear")
    # The smaller half of an odd margin goes first.
    top, left = (height - new_height) // 2, (width - new_width) // 2
    margins = ((0, 0), (top, height - new_height - top), (left, width - new_width - left), (0, 0))
    return jnp.pad(jnp.clip(resized, -1.0, 1.0), margins, constant_values=-1.0)
