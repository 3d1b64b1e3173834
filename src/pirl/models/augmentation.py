"""Training-time image augmentation, equal to OpenPI's draw for draw.

Cameras that do not ride on a wrist are cropped, resized back and rotated; all cameras get color jitter. Two oddities of
the original are kept for parity: the jitter leaves the saturation alone although a strength is configured for it, and
the per-sample keys do not depend on the camera, so both wrist cameras see the same jitter.
"""

import math

import jax
import jax.numpy as jnp
from jax.scipy.ndimage import map_coordinates
from jaxtyping import Float, PRNGKeyArray

from pirl.models.types import Array

_CROP = 0.95
_MAX_ROTATION = math.radians(5)
_BRIGHTNESS, _CONTRAST, _HUE = 0.3, 0.4, 0.1
_JITTER_PROBABILITY = 0.5


def augment(rng: PRNGKeyArray, images: Float[Array, "b h w 3"], *, geometric: bool) -> Float[Array, "b h w 3"]:
    """Augment images in [-1, 1], each with its own draw; `geometric` adds crop and rotation to the color jitter."""

    def one(key: PRNGKeyArray, image: Array) -> Array:
        stages = jax.random.split(key, 2 if geometric else 1)
        if geometric:
            image = _crop_and_rotate(stages[0], image)
        return _jitter(jax.random.split(stages[-1], 1)[0], image)

    keys = jax.random.split(rng, images.shape[0])
    return jax.vmap(one)(keys, images / 2.0 + 0.5) * 2.0 - 1.0


def _crop_and_rotate(key: PRNGKeyArray, image: Float[Array, "h w 3"]) -> Float[Array, "h w 3"]:
    """One bilinear resampling for crop, resize and rotation together; black outside."""
    height, width, _ = image.shape
    crop_height, crop_width = int(height * _CROP), int(width * _CROP)
    # Three stages split the key (the middle one, the resize, draws nothing).
    crop_key, _, rotation_key = jax.random.split(key, 3)
    slack = jnp.array([(height - crop_height) / 2, (width - crop_width) / 2])
    offset = jax.random.uniform(crop_key, [2], minval=-slack, maxval=slack)
    angle = jax.random.uniform(rotation_key, minval=-_MAX_ROTATION, maxval=_MAX_ROTATION)

    center_y, center_x = height / 2 - 0.5, width / 2 - 0.5
    y, x = jnp.mgrid[0:height, 0:width]
    y, x = y - center_y, x - center_x
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    source_y = (cos * y + sin * x) * (crop_height / height) + offset[0] + center_y
    source_x = (cos * x - sin * y) * (crop_width / width) + offset[1] + center_x

    def resample(channel: Float[Array, "h w"]) -> Float[Array, "h w"]:
        return map_coordinates(channel, [source_y, source_x], order=1, mode="constant", cval=0.0)

    return jax.vmap(resample, in_axes=-1, out_axes=-1)(image)


def _jitter(key: PRNGKeyArray, image: Float[Array, "h w 3"]) -> Float[Array, "h w 3"]:
    """Brightness, contrast and hue shifts in HSV, with probability one half."""
    brightness_key, contrast_key, hue_key, *_ = jax.random.split(key, 5)
    brightness = jax.random.uniform(brightness_key, minval=-_BRIGHTNESS, maxval=_BRIGHTNESS)
    contrast = jax.random.uniform(contrast_key, minval=-_CONTRAST, maxval=_CONTRAST)
    hue_shift = jax.random.uniform(hue_key, minval=-_HUE, maxval=_HUE)

    hue, saturation, value = _rgb_to_hsv(image)
    value = jnp.where(brightness < 0, value * (1 + brightness), value * (1 - brightness) + brightness)
    jittered = _hsv_to_rgb(hue + hue_shift, saturation, _adjust_contrast(value, contrast))
    return jnp.where(jax.random.bernoulli(key, _JITTER_PROBABILITY), jittered, image)


def _adjust_contrast(value: Float[Array, "h w"], contrast: Float[Array, ""]) -> Float[Array, "h w"]:
    """An invertible S-curve on [0, 1]: slope `slant` in the middle, 1 / slant at both ends."""
    slant = jnp.tan((contrast + 1) * (jnp.pi / 4))
    knee = slant / (2 * (1 + slant))
    middle = slant * (value - 0.5) + 0.5
    return jnp.where(value < knee, value / slant, jnp.where(value > 1 - knee, value / slant + 1 - 1 / slant, middle))


def _rgb_to_hsv(image: Float[Array, "h w 3"]) -> tuple[Array, Array, Array]:
    value = jnp.max(image, axis=-1)
    spread = value - jnp.min(image, axis=-1)
    largest = jnp.argmax(image, axis=-1)

    def channel(offset: int) -> Array:
        return jnp.take_along_axis(image, ((largest + offset) % 3)[..., None], axis=-1)[..., 0]

    gray, black = spread == 0, value == 0
    hue = jnp.where(gray, 0.0, (2 * largest + (channel(1) - channel(2)) / jnp.where(gray, 1.0, spread)) / 6)
    return hue, jnp.where(black, 0.0, spread / jnp.where(black, 1.0, value)), value


def _hsv_to_rgb(hue: Array, saturation: Array, value: Array) -> Float[Array, "h w 3"]:
    sector = jnp.mod(jnp.array([5, 3, 1]) + hue[..., None] * 6, 6)
    fall = jnp.maximum(0, jnp.minimum(jnp.minimum(sector, 4 - sector), 1))
    return value[..., None] - (value * saturation)[..., None] * fall
