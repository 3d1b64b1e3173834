"""What enters the model is checked, and images are prepared as OpenPI prepares them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from builders import MICRO, random_observation_dict
from golden import arrays, assert_close, model_config, needs_golden
from pirl.errors import ObservationError
from pirl.models import Observation, Pi0Config, preprocess
from pirl.models.observation import resize_with_pad, to_float

CAMERA = MICRO.cameras[1]


GOOD = random_observation_dict(MICRO)


def with_image(change):
    return {"image": GOOD["image"] | {CAMERA: change(GOOD["image"][CAMERA])}}


def holed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


def tokens(length, value):
    mask = np.ones((2, length), bool)
    return {"tokenized_prompt": np.full((2, length), value), "tokenized_prompt_mask": mask}


BAD_OBSERVATIONS = {
    "wrong dtype": (with_image(lambda x: x.astype(np.float64)), f"{CAMERA}.*float64.*uint8"),
    "wrong range": (with_image(lambda x: x * 255), rf"{CAMERA}.*from -25.*x / 255"),
    "channels first": (with_image(lambda x: np.moveaxis(x, 3, 1)), f"{CAMERA}.*channels come last"),
    "infinite pixel": (with_image(lambda x: holed(x, (0, 2, 1, 0), np.inf)), rf"{CAMERA}.*inf at index \(0, 2, 1, 0\)"),
    "missing camera": ({"image": {CAMERA: GOOD["image"][CAMERA]}}, r"missing \[.*zeros"),
    "nan state": ({"state": holed(GOOD["state"], (1, 3), np.nan)}, r"state contains nan at index \(1, 3\)"),
    "wide state": ({"state": np.zeros((2, 9))}, r"\(2, 9\).*\(batch, 5\)"),
    "state as text": ({"state": "hello"}, "state is not an array of numbers"),
    "long prompt": (tokens(7, 0), "7 tokens.*max_token_len = 6"),
    "prompt without mask": ({"tokenized_prompt_mask": None}, "come together"),
    "wrapped token": (tokens(6, 2**32 + 5), "token 4294967301"),
    "float tokens": (tokens(6, 5.9), "expected integers"),
    "unknown key": ({"proprio": 1}, "proprio"),
}


@pytest.mark.parametrize("case", BAD_OBSERVATIONS)
def test_bad_observations_are_refused_by_name(case):
    changes, message = BAD_OBSERVATIONS[case]
    with pytest.raises(ObservationError, match=message):
        Observation.from_dict(GOOD | changes, MICRO)


def test_shapes_are_checked_inside_the_model_too():
    good = Observation.from_dict(GOOD, MICRO)
    bad = Observation(good.images, good.image_masks, jnp.zeros((2, 9)))
    with pytest.raises(ObservationError, match="state has shape"):
        jax.jit(lambda observation: preprocess(observation, MICRO))(bad)


def test_masks_default_to_present():
    data = {key: value for key, value in GOOD.items() if key != "image_mask"}
    assert all(mask.all() for mask in Observation.from_dict(data, MICRO).image_masks.values())


def test_bytes_and_floats_give_the_same_images():
    data = random_observation_dict(MICRO)
    random = np.random.default_rng(0)
    pixels = {name: random.integers(0, 256, image.shape, np.uint8) for name, image in data["image"].items()}
    floats = {name: np.asarray(to_float(image)) for name, image in pixels.items()}
    results = [preprocess(Observation.from_dict(data | {"image": i}, MICRO), MICRO).images for i in (pixels, floats)]
    for name in pixels:
        np.testing.assert_array_equal(results[0][name], results[1][name])
        assert results[0][name].dtype == jnp.float32
        assert float(jnp.abs(results[0][name]).max()) <= 1


@pytest.mark.parametrize("shape", [(30, 47), (5, 3)])
def test_resizing_keeps_proportions_and_centers(shape):
    """A bright image has a bright rectangle of its own proportions in the middle, and black around it."""
    out = np.asarray(resize_with_pad(jnp.ones((1, *shape, 3)), 20, 30))[0, :, :, 0]
    bright = np.argwhere(out > 0.99)
    (top, left), (bottom, right) = bright.min(axis=0), bright.max(axis=0) + 1
    assert abs((bottom - top) / (right - left) - shape[0] / shape[1]) < 0.15 * shape[0] / shape[1]
    assert abs(top - (20 - bottom)) <= 1
    assert abs(left - (30 - right)) <= 1
    assert (bottom - top == 20) or (right - left == 30)
    outside = np.ones_like(out, bool)
    outside[top:bottom, left:right] = False
    np.testing.assert_array_equal(out[outside], -1)


@needs_golden
def test_resizing_equals_openpi():
    recorded = arrays("transforms", "images.npz")
    cases = [key.split("/")[1] for key in recorded if key.startswith("pil/") and key.endswith("/in")]
    assert len(cases) == 8
    for case in cases:
        image, (height, width) = recorded[f"pil/{case}/in"][None], recorded[f"pil/{case}/target_hw"]
        resize = jax.jit(resize_with_pad, static_argnums=(1, 2))
        assert_close(
            resize(to_float(jnp.asarray(image)), int(height), int(width))[0], recorded[f"jax_float/{case}/out"]
        )
    assert_close(to_float(jnp.asarray(recorded["uint8_to_float/in"])), recorded["uint8_to_float/out"])


@needs_golden
@pytest.mark.parametrize(
    ("case", "size", "key"), [("resize_only", 28, None), ("aug_key3", 56, 3), ("aug_key4_resized", 28, 4)]
)
def test_preprocessing_equals_openpi(case, size, key):
    recorded = arrays("transforms", "preprocess.npz")
    config: Pi0Config = model_config("pi0_tiny", image_resolution=(size, size))
    data = {
        "image": {name: recorded[f"in/image/{name}"] for name in config.cameras},
        "image_mask": {"base_0_rgb": recorded["in/image_mask/base_0_rgb"]},
        "state": np.zeros((2, 32)),
    }
    rng = None if key is None else jax.random.key(key)
    out = jax.jit(lambda obs: preprocess(obs, config, rng))(Observation.from_dict(data, config))
    for name in config.cameras:
        assert_close(out.images[name], recorded[f"{case}/image/{name}"])
        np.testing.assert_array_equal(out.image_masks[name], recorded[f"{case}/image_mask/{name}"])
