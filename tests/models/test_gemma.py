"""The transformer's parts against OpenPI's recordings and hand-made cases; rematerialization and sharding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from builders import MICRO
from golden import arrays, assert_close, needs_golden
from pirl.models.gemma import RMSNorm, Transformer, attend, attention_mask, rotary_embedding, shard_batch
from pirl.training.sharding import make_mesh


@needs_golden
def test_attention_masks_equal_openpi():
    recorded = arrays("transforms", "attn_masks.npz")
    for case in ("causal", "prefix_lm", "blocks", "pi0_like_padded", "pi05_like_padded", "batched_ar"):
        mask = attention_mask(recorded[f"{case}/input_mask"], recorded[f"{case}/ar_mask"])
        np.testing.assert_array_equal(mask, recorded[f"{case}/attn_mask"], err_msg=case)


@needs_golden
def test_rotary_embedding_equals_openpi():
    recorded = arrays("transforms", "rope.npz")
    for case in ("case0", "case1", "case2"):
        assert_close(rotary_embedding(recorded[f"{case}/x"], recorded[f"{case}/positions"]), recorded[f"{case}/out"])


@needs_golden
def test_norms_equal_openpi():
    recorded = arrays("transforms", "rmsnorm.npz")
    float32 = jnp.dtype("float32")
    options = {"rngs": nnx.Rngs(0), "dtype": float32, "param_dtype": float32}
    plain = RMSNorm(12, conditioned=False, **options)
    plain.scale[...] = recorded["plain/scale"]
    out, gate = plain(recorded["plain/x"], None)
    assert_close(out, recorded["plain/out"])
    assert gate is None
    conditioned = RMSNorm(12, conditioned=True, **options)
    conditioned.Dense_0.kernel[...] = recorded["ada/kernel"]
    conditioned.Dense_0.bias[...] = recorded["ada/bias"]
    out, gate = conditioned(recorded["ada/x"], recorded["ada/cond"])
    assert_close(out, recorded["ada/out"])
    assert_close(gate, recorded["ada/gate"])


@settings(max_examples=60)
@given(st.integers(1, 9).flatmap(lambda n: st.lists(st.tuples(st.booleans(), st.booleans()), min_size=n, max_size=n)))
def test_attention_masks_follow_the_rule_pair_by_pair(tokens):
    """Query i sees key j if both are real and j opens no block after i's."""
    valid, starts = (np.array(column) for column in zip(*tokens, strict=True))
    mask = np.asarray(attention_mask(valid[None], starts))[0]
    for i in range(len(tokens)):
        for j in range(len(tokens)):
            later_block = any(starts[i + 1 : j + 1])
            assert mask[i, j] == (valid[i] and valid[j] and not later_block)


def test_rotary_attention_depends_on_distance_only():
    random = np.random.default_rng(0)
    q, k = (jnp.asarray(random.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def score(query_at: int, key_at: int) -> float:
        turned = [rotary_embedding(x, jnp.array([[at]])) for x, at in ((q, query_at), (k, key_at))]
        return float(jnp.vdot(*turned))

    assert score(7, 4) == pytest.approx(score(103, 100), abs=1e-4)
    assert score(7, 4) != pytest.approx(score(7, 5), abs=1e-2)


def test_groups_share_the_cache_and_do_not_see_each_other():
    random = np.random.default_rng(0)

    def draw(*shape: int) -> jnp.ndarray:
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    groups, length = 3, 2
    q, k, v = draw(1, groups * length, 4, 6), draw(1, groups * length, 2, 6), draw(1, groups * length, 2, 6)
    cached, cached_mask = (draw(1, 5, 2, 6), draw(1, 5, 2, 6)), jnp.array([[1, 1, 0, 1, 1]], bool)
    mask = attention_mask(jnp.ones((1, length), bool), jnp.ones(length, bool))
    out = attend(q, k, v, mask, cached, cached_mask)
    for group in range(groups):
        part = slice(group * length, (group + 1) * length)
        alone = attend(q[:, part], k[:, part], v[:, part], mask, cached, cached_mask)
        np.testing.assert_allclose(out[:, part], alone, rtol=1e-5, atol=1e-6)
    # By hand, for one query: softmax over the four real cached keys and its own first key.
    keys = jnp.concatenate([cached[0][0, :, 0], k[0, :1, 0]])[jnp.array([0, 1, 3, 4, 5])]
    values = jnp.concatenate([cached[1][0, :, 0], v[0, :1, 0]])[jnp.array([0, 1, 3, 4, 5])]
    weights = np.exp(np.asarray(keys @ q[0, 0, 1], np.float64))
    np.testing.assert_allclose(out[0, 0, 1], weights @ np.asarray(values) / weights.sum(), rtol=1e-4, atol=1e-5)


def test_a_query_without_any_key_attends_uniformly_instead_of_nan():
    values = jnp.arange(12, dtype=jnp.float32).reshape(1, 3, 1, 4)
    mask = jnp.zeros((1, 3, 3), bool)
    out = attend(jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 1, 4)), values, mask)
    np.testing.assert_allclose(out[0, 0, 0], values[0, :, 0].mean(axis=0), rtol=1e-6)


# --- rematerialization and sharding ------------------------------------------------------------------------------------

EXPERT = dataclasses.replace(MICRO.language, depth=8, width=16, mlp_dim=64)
BATCH, TOKENS = 4, 24


def compile_gradient(remat):
    dtype = jnp.dtype("float32")
    options = {"adarms": False, "dtype": dtype, "param_dtype": dtype, "remat": remat}
    model = nnx.eval_shape(lambda: Transformer((EXPERT, EXPERT), 8, rngs=nnx.Rngs(0), **options))
    graph, shapes = nnx.split(model)
    positions, mask = jnp.tile(jnp.arange(TOKENS), (BATCH, 1)), jnp.ones((BATCH, TOKENS, TOKENS), bool)

    def loss(state, x):
        return jnp.mean(jnp.square(nnx.merge(graph, state)(0, x, positions, mask)[0]))

    x = jax.ShapeDtypeStruct((BATCH, TOKENS, EXPERT.width), dtype)
    return jax.jit(jax.grad(loss)).lower(shapes, x).compile(), shapes


def test_gradients_are_the_same_and_what_is_kept_is_less():
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(BATCH, TOKENS, EXPERT.width)), jnp.float32)
    compiled = {remat: compile_gradient(remat) for remat in ("none", "dots", "weight_dots", "full")}
    shapes = compiled["none"][1]
    state = jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape) / 8, leaf.dtype), shapes)
    gradients = {remat: jax.tree.leaves(program(state, x)) for remat, (program, _) in compiled.items()}
    assert max(float(jnp.max(jnp.abs(leaf))) for leaf in gradients["none"]) > 1e-3
    for found in gradients.values():
        for ours, theirs in zip(found, gradients["none"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    temporary = [program.memory_analysis().temp_size_in_bytes for program, _ in compiled.values()]
    assert temporary == sorted(temporary, reverse=True)
    assert temporary[-1] < 0.5 * temporary[0]


def test_activations_stay_spread_though_the_weight_is_not():
    mesh = make_mesh(4)
    weight = jax.device_put(np.ones((8, 64), np.float32), NamedSharding(mesh, PartitionSpec(None, "fsdp")))
    batch = jax.device_put(np.ones((16, 8), np.float32), NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
    wanted = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    assert jax.jit(lambda x, w: shard_batch(x @ w))(batch, weight).sharding.is_equivalent_to(wanted, 2)
    # The same when nothing but shapes is there, and where the batch itself is not spread yet.
    whole = jax.device_put(np.ones((16, 8), np.float32), NamedSharding(mesh, PartitionSpec()))
    assert jax.jit(shard_batch)(whole).sharding.is_equivalent_to(wanted, 2)


def test_without_a_mesh_that_divides_the_batch_nothing_is_constrained():
    assert not jax.make_jaxpr(shard_batch)(jnp.ones((16, 8))).eqns
    whole = NamedSharding(make_mesh(4), PartitionSpec())
    for rows, constraints in ((16, 1), (6, 0)):
        on_mesh = jax.make_jaxpr(shard_batch)(jax.ShapeDtypeStruct((rows, 8), jnp.float32, sharding=whole))
        assert len(on_mesh.eqns) == constraints
