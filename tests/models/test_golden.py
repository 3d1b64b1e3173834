"""OpenPI's own models, recorded: the same parameters and inputs give the same outputs, gradients and updates."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from golden import MODELS, TINY_MODELS, arrays, assert_close, content, model, model_config, needs_golden, observation
from pirl.models import Observation, Pi0, create_model, get_parameters, preprocess
from pirl.models.gemma import attention_mask
from pirl.models.pi0 import embed_time

pytestmark = needs_golden


def run(policy: Pi0, obs: Observation, inputs: dict[str, np.ndarray], brief: bool = False) -> dict[str, Any]:
    """Everything the recordings hold, computed in one compiled function."""

    @jax.jit
    def compute(model, obs, inputs):
        prefix = model.encode(obs)
        actions, noise, time = inputs["actions"], inputs["noise"], inputs["time"]
        x_t = time[:, None, None] * noise + (1 - time[:, None, None]) * actions
        loss_key, sample_key = jax.random.key(inputs["key_seed"]), jax.random.key(inputs["sample_key_seed"])
        start = inputs["sample_noise"][:, None]
        suffix_tokens, condition = model.embed_suffix(prefix.state, x_t[:, None], time)
        return {
            "prefix": prefix,
            "prefix_tokens": model.embed_prefix(obs)[0],
            "suffix_tokens": suffix_tokens[:, 0],
            "adarms_cond": condition,
            "v_t": model.velocity(prefix, x_t[:, None], time)[:, 0],
            "loss": model.flow_loss(prefix, actions, noise=noise, time=time),
            "sample_actions_10": model.sample(prefix, noise=start)[:, 0],
        } | (
            {}
            if brief
            else {
                "compute_loss_key": model.flow_loss(prefix, actions, loss_key),
                "sample_actions_4": model.sample(prefix, num_steps=4, noise=start)[:, 0],
                "sample_actions_10_key": model.sample(prefix, sample_key)[:, 0],
            }
        )

    return compute(policy, obs, inputs)


@pytest.mark.parametrize("name", MODELS)
def test_float32_outputs_equal_openpi(name):
    """Also those drawn from a key. The recorded loss comes from OpenPI's joint pass over prefix and suffix."""
    obs, inputs = observation(name)
    ours = run(model(name), obs, inputs)
    expected = arrays("models", name, "expected_float32.npz")
    for key, value in ours.items():
        if key in expected:
            assert_close(value, expected[key])
    prefix = ours["prefix"]
    valid = np.asarray(prefix.mask)
    np.testing.assert_array_equal(valid, expected["prefix_mask"])
    for cached, recorded in (("keys", "k"), ("values", "v")):
        cache = np.asarray(getattr(prefix.cache, cached))
        assert_close(cache, expected[f"cache_{recorded}"])
        # In the joint pass a padded token attends uniformly to everything there is; only the real ones are comparable.
        joint = expected[f"kv_{recorded}"][:, :, : valid.shape[1]]
        assert_close(cache[:, valid], joint[:, valid])
    seen = np.concatenate([expected["prefix_mask"], expected["suffix_mask"]], axis=1)
    block_start = np.concatenate([expected["prefix_ar_mask"], expected["suffix_ar_mask"]])
    np.testing.assert_array_equal(attention_mask(seen, block_start), expected["attn_mask"])
    out = np.where(valid[..., None], expected["prefix_out"], 0).sum(axis=1) / valid.sum(axis=1, keepdims=True)
    assert_close(prefix.features, out)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_augmented_images_and_loss_equal_openpi(name):
    policy, (obs, inputs) = model(name), observation(name)
    recorded = arrays("models", name, "train_augmented.npz")
    key = jax.random.key(int(inputs["key_seed"]))
    images = jax.jit(lambda obs: preprocess(obs, policy.config, jax.random.split(key, 3)[0]).images)(obs)
    for camera, image in images.items():
        assert_close(image, recorded[f"image/{camera}"])
    loss = jax.jit(lambda model: model.flow_loss(model.encode(obs, key), inputs["actions"], key))(policy)
    assert_close(loss, recorded["loss_train_true"])


# Float32 parameters in one model of each kind: that is how one trains, bfloat16 how a robot acts.
@pytest.mark.parametrize(
    ("name", "params"), [("pi0_tiny", "bf16"), ("pi05_tiny", "bf16"), ("pi0_tiny_lora", "f32"), ("pi05_tiny", "f32")]
)
def test_bfloat16_outputs_equal_openpi_up_to_rounding(name, params):
    """Compilers fuse, and so round, differently: ours may be as far from OpenPI's as its own rounding error."""
    policy = model(name, jnp.bfloat16 if params == "bf16" else jnp.float32, dtype="bfloat16")
    exact = arrays("models", name, "expected_float32.npz")
    rounded = arrays("models", name, "expected_bfloat16.npz")
    ours = run(policy, *observation(name), brief=True)
    assert ours["v_t"].dtype == (jnp.bfloat16 if params == "bf16" else jnp.float32)
    assert ours["sample_actions_10"].dtype == jnp.float32

    def distance(a, b):
        return np.sqrt(np.mean(np.square(np.asarray(a, np.float64) - b)))

    for key in ("prefix_tokens", "v_t", "loss", "sample_actions_10"):
        recorded = rounded[f"dtype_bf16_params_{params}/{key}"]
        assert distance(ours[key], recorded) <= distance(exact[key], recorded), key


@pytest.mark.parametrize("name", TINY_MODELS)
def test_gradients_equal_openpi(name):
    policy, (obs, inputs) = model(name), observation(name)
    expected = arrays("models", name, "grads_given.npz")

    @jax.jit
    @jax.grad
    def gradients(model):
        prefix = model.encode(obs)
        return jnp.mean(model.flow_loss(prefix, inputs["actions"], noise=inputs["noise"], time=inputs["time"]))

    ours = get_parameters(gradients(policy))
    assert set(ours) == set(expected)
    for path, gradient in expected.items():
        np.testing.assert_allclose(ours[path], gradient, rtol=1e-4, atol=1e-4, err_msg=path)
        # The absolute tolerance says nothing about small leaves, so each is also held to its own size.
        if not path.endswith("key/bias") and path != "PaliGemma/llm/final_norm/scale":
            assert np.abs(ours[path] - gradient).max() <= 1e-4 * np.abs(gradient).max(), path


def test_time_embedding_equals_openpi():
    recorded = arrays("transforms", "posemb_sincos.npz")
    for case in range(3):  # the fourth recording is of a range of periods that π₀ does not use
        width, low, high = recorded[f"case{case}/dim_min_max"]
        assert (low, high) == (4e-3, 4.0)
        # The shortest period turns 1 571 rad, which float32 resolves to 1.2e-4.
        assert_close(embed_time(recorded[f"case{case}/pos"], int(width)), recorded[f"case{case}/out"], atol=2e-4)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_initial_statistics_equal_openpi(name):
    recorded = content("models", name, "init_stats.json")
    ours = get_parameters(create_model(model_config(name), jax.random.key(0)))
    assert set(ours) == set(recorded)
    for path, stats in recorded.items():
        value = np.asarray(ours[path])
        assert list(value.shape) == stats["shape"]
        if stats["all_zero"] or stats["all_one"]:
            np.testing.assert_array_equal(value, np.full_like(value, 1.0 if stats["all_one"] else 0.0), err_msg=path)
            continue
        # Two samples of the same distribution: their deviations differ by about 1 / sqrt(2 n) each.
        assert value.std() == pytest.approx(stats["std"], rel=6 / np.sqrt(value.size)), path
        assert abs(value.mean()) <= 5 * stats["std"] / np.sqrt(value.size), path
        # The same kind of distribution: uniform and truncated ones end where they should.
        assert np.abs(value).max() <= 1.5 * max(abs(stats["min"]), abs(stats["max"])), path
