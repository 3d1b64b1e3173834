"""OpenPI's own models, recorded: the same parameters and inputs give the same outputs, gradients and updates."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from golden import MODELS, TINY_MODELS, arrays, assert_close, content, model, needs_golden, observation
from pirl.models import Observation, Pi0, get_parameters, preprocess, set_parameters
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
    out = np.where(valid[..., None], expected["prefix_out"], 0).sum(axis=1) / valid.sum(axis=1, keepdims=True)
    assert_close(prefix.features, out)


@pytest.mark.parametrize("name", MODELS)
def test_attention_masks_equal_openpi(name):
    expected = arrays("models", name, "expected_float32.npz")
    valid = np.concatenate([expected["prefix_mask"], expected["suffix_mask"]], axis=1)
    block_start = np.concatenate([expected["prefix_ar_mask"], expected["suffix_ar_mask"]])
    np.testing.assert_array_equal(attention_mask(valid, block_start), expected["attn_mask"])


@pytest.mark.parametrize("name", MODELS)
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
    ("name", "params"), [(name, "bf16") for name in MODELS] + [(name, "f32") for name in TINY_MODELS]
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


# LoRA: tests/agents/test_bc.py. What is added here to gradients, which are compared for all of them, is not pirl's own.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["pi05_tiny", "pi0_tiny"])
def test_three_training_steps_equal_openpi(name):
    """Augmentation, noise, loss, gradients, freezing and AdamW together, step after step."""
    policy, (obs, inputs) = model(name), observation(name)
    config = policy.config
    recorded, infos = arrays("models", name, "train_steps.npz"), content("models", name, "train_steps.json")
    schedule = [info["lr_used"] for info in infos["infos"]]
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(lambda step: jnp.asarray(schedule)[step], b1=0.9, b2=0.95, eps=1e-8, weight_decay=1e-10),
    )
    params = get_parameters(policy)
    trainable = {path: value for path, value in params.items() if not config.is_frozen(path)}
    assert sorted(trainable) == sorted(content("models", name, "trainable.json")["trainable"])
    frozen = {path: value.astype(jnp.bfloat16) for path, value in params.items() if path not in trainable}
    state = optimizer.init(trainable)
    train_key = jax.random.split(jax.random.key(42))[0]

    # Arguments, not constants: XLA would fold the bfloat16 constants in bfloat16, and round where OpenPI does not.
    @jax.jit
    def step(trainable, frozen, state, key, actions):
        def loss(trainable):
            model = set_parameters(policy, trainable | frozen)
            return jnp.mean(model.flow_loss(model.encode(obs, key), actions, key))

        value, gradients = jax.value_and_grad(loss)(trainable)
        updates, state = optimizer.update(gradients, state, trainable)
        return value, gradients, optax.apply_updates(trainable, updates), state

    for index, info in enumerate(infos["infos"]):
        key = jax.random.fold_in(train_key, index)
        _, noise_key, _ = jax.random.split(key, 3)
        noise = jax.random.normal(noise_key, inputs["actions"].shape)
        np.testing.assert_allclose(noise, recorded[f"step{index}/noise"], rtol=1e-6)
        loss, gradients, trainable, state = step(trainable, frozen, state, key, inputs["actions"])
        np.testing.assert_allclose(loss, info["loss"], rtol=1e-4)
        # After the first update those elements whose gradient is rounding noise (see below) stand elsewhere.
        np.testing.assert_allclose(optax.tree.norm(gradients), info["grad_norm"], rtol=1e-4 if index == 0 else 1e-3)
        for path, value in trainable.items():
            if f"step{index}/params/{path}" in recorded:
                close = np.isclose(value, recorded[f"step{index}/params/{path}"], rtol=1e-4, atol=1e-4)
                # Adam divides a gradient by its own size, so the rounding error of a tiny one (float32 leaves about 5e-7,
                # a hundredth of the bound here) becomes a visible step. The key bias has no other gradients.
                if index == 0:
                    assert np.all(close | (np.abs(gradients[path]) < 5e-5)), path
                assert np.sum(~close) <= max(2, value.size // 200) or path.endswith("key/bias"), path


# The fourth recording is of a range of periods that π₀ does not use.
@pytest.mark.parametrize("case", range(3))
def test_time_embedding_equals_openpi(case):
    recorded = arrays("transforms", "posemb_sincos.npz")
    width, low, high = recorded[f"case{case}/dim_min_max"]
    assert (low, high) == (4e-3, 4.0)
    # The shortest period turns 1 571 rad, which float32 resolves to 1.2e-4.
    assert_close(embed_time(recorded[f"case{case}/pos"], int(width)), recorded[f"case{case}/out"], atol=2e-4)
