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


def with_image(**changes):
    data = random_observation_dict(MICRO)
    return data | {"image": data["image"] | {CAMERA: changes["image"](data["image"][CAMERA])}}


def without_camera():
    data = random_observation_dict(MICRO)
    return data | {"image": {name: image for name, image in data["image"].items() if name != CAMERA}}


def with_nan_state():
    data = random_observation_dict(MICRO)
    data["state"][1, 3] = np.nan
    return data


def with_nan_pixel():
    data = random_observation_dict(MICRO)
    data["image"][CAMERA][0, 2, 1, 0] = np.inf
    return data


BAD_OBSERVATIONS = {
    "wrong dtype": (with_image(image=lambda x: x.astype(np.float64)), f"{CAMERA}.*float64.*uint8"),
    "wrong range": (with_image(image=lambda x: x * 255), rf"{CAMERA}.*from -25.*x / 255"),
    "channels first": (with_image(image=lambda x: np.moveaxis(x, 3, 1)), f"{CAMERA}.*channels come last"),
    "no batch axis": (with_image(image=lambda x: x[0]), f"{CAMERA}.*height, width"),
    "missing camera": (without_camera(), rf"missing \['{CAMERA}'\].*zeros"),
    "unknown camera": (
        random_observation_dict(MICRO) | {"image": random_observation_dict(MICRO)["image"] | {"cam_low": np.zeros(3)}},
        r"unknown \['cam_low'\]",
    ),
    "nan state": (with_nan_state(), r"state contains nan at index \(1, 3\)"),
    "infinite pixel": (with_nan_pixel(), rf"{CAMERA}.*inf at index \(0, 2, 1, 0\)"),
    "wide state": (random_observation_dict(MICRO) | {"state": np.zeros((2, 9))}, r"\(2, 9\).*\(batch, 5\)"),
    "long prompt": (
        random_observation_dict(MICRO)
        | {"tokenized_prompt": np.zeros((2, 7), int), "tokenized_prompt_mask": np.ones((2, 7), bool)},
        "7 tokens.*max_token_len = 6",
    ),
    "prompt without mask": (random_observation_dict(MICRO) | {"tokenized_prompt_mask": None}, "come together"),
    "foreign token": (
        random_observation_dict(MICRO) | {"tokenized_prompt": np.full((2, 6), 900)},
        "token 900.*vocabulary of 40",
    ),
    "wrapped token": (
        random_observation_dict(MICRO) | {"tokenized_prompt": np.full((2, 6), 2**32 + 5)},
        "token 4294967301",
    ),
    "float tokens": (random_observation_dict(MICRO) | {"tokenized_prompt": np.full((2, 6), 5.9)}, "expected integers"),
    "empty image": (with_image(image=lambda x: x[:, :0]), f"{CAMERA}.*height, width"),
    "images as array": (random_observation_dict(MICRO) | {"image": np.zeros(3)}, "image should map camera names"),
    "state as text": (random_observation_dict(MICRO) | {"state": "hello"}, "state is not an array of numbers"),
    "unknown key": (random_observation_dict(MICRO) | {"proprio": 1}, "proprio"),
    "no state": ({"image": {}}, "state"),
}


@pytest.mark.parametrize("case", BAD_OBSERVATIONS)
def test_bad_observations_are_refused_by_name(case):
    data, message = BAD_OBSERVATIONS[case]
    with pytest.raises(ObservationError, match=message):
        Observation.from_dict(data, MICRO)


def test_shapes_are_checked_inside_the_model_too():
    good = Observation.from_dict(random_observation_dict(MICRO), MICRO)
    bad = Observation(good.images, good.image_masks, jnp.zeros((2, 9)))
    with pytest.raises(ObservationError, match="state has shape"):
        jax.jit(lambda observation: preprocess(observation, MICRO))(bad)


def test_masks_default_to_present():
    data = random_observation_dict(MICRO)
    del data["image_mask"]
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


@pytest.mark.parametrize("shape", [(30, 47), (53, 21), (8, 12), (5, 3)])
def test_resizing_keeps_proportions_and_centres(shape):
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
