"""Properties of the training augmentation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from builders import MICRO, random_observation
from pirl.models import augmentation, preprocess
from pirl.models.augmentation import _adjust_contrast, _hsv_to_rgb, _rgb_to_hsv

augment = jax.jit(augmentation.augment, static_argnames="geometric")


def images(batch: int = 16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (batch, 12, 14, 3)), jnp.float32)


def test_augmented_images_stay_in_range_and_finite():
    black_white_gray = jnp.stack([jnp.full((12, 14, 3), value) for value in (-1.0, 1.0, 0.0)])
    for batch in (images(), black_white_gray):
        out = augment(jax.random.key(0), batch, geometric=True)
        assert bool(jnp.all(jnp.isfinite(out)))
        assert float(jnp.abs(out).max()) <= 1 + 1e-5


def test_about_half_of_the_images_keep_their_colors():
    out = augment(jax.random.key(1), images(200), geometric=False)
    kept = np.mean(np.all(np.isclose(out, images(200), atol=1e-6), axis=(1, 2, 3)))
    assert 0.38 < kept < 0.62


def test_wrist_cameras_get_the_same_jitter_and_only_the_others_are_cropped_and_turned():
    """As in OpenPI, whose keys do not depend on the camera: of the same picture the wrists see the same."""
    seen, key = random_observation(MICRO, batch=16), jax.random.key(2)
    picture = seen.images["base_0_rgb"]
    seen = dataclasses.replace(seen, images=dict.fromkeys(seen.images, picture))
    out = jax.jit(lambda seen: preprocess(seen, MICRO, key).images)(seen)
    np.testing.assert_array_equal(out["left_wrist_0_rgb"], out["right_wrist_0_rgb"])
    changed = {name: np.abs(image - picture).max(axis=(1, 2, 3)) > 1e-3 for name, image in out.items()}
    assert 0 < changed["left_wrist_0_rgb"].sum() < 16, "half of them, by color alone"
    assert changed["base_0_rgb"].all()


def test_colors_survive_the_way_through_hsv():
    pixels = jnp.asarray(np.random.default_rng(0).uniform(0, 1, (20, 20, 3)), jnp.float32)
    np.testing.assert_allclose(_hsv_to_rgb(*_rgb_to_hsv(pixels)), pixels, atol=1e-5)


def test_contrast_is_undone_by_its_opposite():
    value = jnp.linspace(0, 1, 50)[None]
    for contrast in (0.39, -0.2, 1e-7):
        there = _adjust_contrast(value, jnp.float32(contrast))
        np.testing.assert_allclose(_adjust_contrast(there, jnp.float32(-contrast)), value, atol=1e-5)
        assert bool(jnp.all(jnp.diff(there) > 0))
