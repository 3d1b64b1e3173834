"""The transformer's small parts against OpenPI's recordings and hand-made cases."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from golden import arrays, assert_close, needs_golden
from pirl.models.gemma import RMSNorm, attend, attention_mask, rotary_embedding


@needs_golden
@pytest.mark.parametrize("case", ["causal", "prefix_lm", "blocks", "pi0_like_padded", "pi05_like_padded", "batched_ar"])
def test_attention_masks_equal_openpi(case):
    recorded = arrays("transforms", "attn_masks.npz")
    mask = attention_mask(recorded[f"{case}/input_mask"], recorded[f"{case}/ar_mask"])
    np.testing.assert_array_equal(mask, recorded[f"{case}/attn_mask"])


@needs_golden
@pytest.mark.parametrize("case", ["case0", "case1", "case2"])
def test_rotary_embedding_equals_openpi(case):
    recorded = arrays("transforms", "rope.npz")
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
