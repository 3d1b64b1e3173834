"""Parameters lie where OpenPI puts them, and are loaded straight there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import random_observation
from golden import content, needs_golden
from pirl.agents.acrlpd import ACRLPDAgent
from pirl.agents.config import ACRLPDConfig
from pirl.errors import ConfigError
from pirl.interop import load_policy, save_policy
from pirl.models import abstract_model, create_model, expected_parameters, get_model_config, get_parameters
from pirl.training import sharding
from pirl.training.sharding import ParameterSharding, make_mesh, parameter_spec


@needs_golden
@pytest.mark.parametrize("name", ["pi0_base", "pi05_base", "pi0_lora", "pi05_lora"])
def test_sharded_axes_equal_openpi(name):
    recorded, leaves = content("spec", f"{name}.json"), expected_parameters(get_model_config(name))
    for devices in (2, 4, 8):
        specs = {path: parameter_spec(leaf.shape, leaf.dtype, devices) for path, leaf in leaves.items()}
        sharded = {path: list(spec) for path, spec in specs.items() if any(spec)}
        assert sharded == recorded["fsdp_sharded_axes"][str(devices)]


def test_small_arrays_vectors_and_odd_ones_are_replicated():
    assert not any(parameter_spec((1024, 1000), np.float32, 8))
    assert not any(parameter_spec((1 << 22,), np.float32, 8))
    assert not any(parameter_spec((2047, 2047), np.float32, 8))
    assert not any(parameter_spec((2048, 2048), np.float32, 1))
    assert list(parameter_spec((2048, 2048), np.float32, 8)) == [None, "fsdp"]
    assert list(parameter_spec((2048, 2047), np.float32, 8)) == ["fsdp", None]


@settings(max_examples=200)
@given(st.lists(st.sampled_from([1, 3, 7, 8, 24, 1000, 1024, 4096]), max_size=4), st.sampled_from([1, 2, 4, 8]))
def test_a_spec_always_divides_and_takes_the_largest_axis(shape, devices):
    spec = parameter_spec(tuple(shape), np.float32, devices)
    sharded = [axis for axis, name in enumerate(spec) if name]
    divisible = [size for size in shape if size % devices == 0]
    if devices == 1 or len(shape) < 2 or 4 * int(np.prod(shape)) < sharding.MIN_SHARD_BYTES or not divisible:
        assert sharded == []
    else:
        assert len(sharded) == 1
        assert shape[sharded[0]] == max(divisible)


def test_a_mesh_needs_a_divisor():
    assert dict(make_mesh(4).shape) == {"data": jax.device_count() // 4, "fsdp": 4}
    with pytest.raises(ConfigError, match="does not divide"):
        make_mesh(3)


def test_a_checkpoint_is_loaded_onto_the_mesh_and_computes_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(sharding, "MIN_SHARD_BYTES", 1 << 12)
    config = get_model_config("tiny")
    policy = create_model(config, jax.random.key(0))
    save_policy(tmp_path / "policy", policy)
    mesh = make_mesh(4)
    sharded = load_policy(tmp_path / "policy", sharding=ParameterSharding(mesh), param_dtype="float32")
    embedding = get_parameters(sharded)["PaliGemma/llm/embedder/input_embedding"]
    assert embedding.sharding.spec == jax.sharding.PartitionSpec("fsdp", None)
    assert {shard.data.shape for shard in embedding.addressable_shards} == {
        (config.vocab_size // 4, config.language.width)
    }
    # The rule looks at the size in memory, not at that in the file: half of it is below the threshold here.
    monkeypatch.setattr(sharding, "MIN_SHARD_BYTES", embedding.nbytes)
    halved = load_policy(tmp_path / "policy", sharding=ParameterSharding(mesh), param_dtype="bfloat16")
    assert not any(get_parameters(halved)["PaliGemma/llm/embedder/input_embedding"].sharding.spec)
    observation = random_observation(config)
    sample = jax.jit(lambda model: model.sample(model.encode(observation), jax.random.key(1), num_steps=2))
    np.testing.assert_allclose(sample(sharded), sample(policy), rtol=1e-5, atol=1e-5)
    assert bool(jnp.all(jnp.isfinite(sample(sharded))))


def test_critics_are_whole_on_every_device_and_the_policy_is_not(monkeypatch):
    """Their arrays are found by the name of the learner's field, which has to be the one that it has."""
    monkeypatch.setattr(sharding, "MIN_SHARD_BYTES", 0)
    mesh, policy = make_mesh(8), abstract_model(get_model_config("tiny"))
    shapes = jax.eval_shape(lambda policy: ACRLPDAgent.create(ACRLPDConfig(), policy, jax.random.key(0)), policy)
    rule = ParameterSharding(mesh)
    cut: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        cut[name.split("/")[0]] = cut.get(name.split("/")[0], 0) + (not rule(name, leaf).is_fully_replicated)
    assert cut[sharding.CRITICS] == 0
    assert cut["actor"] > 50
