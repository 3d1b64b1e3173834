"""What is kept for the backward pass changes memory and nothing else; activations stay spread over the batch."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from builders import MICRO
from pirl.config import get_config, override_config, parse_config
from pirl.config.io import format_config
from pirl.errors import ConfigError
from pirl.models import Pi0Config
from pirl.models.gemma import Transformer, shard_batch
from pirl.training.sharding import make_mesh

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


@pytest.mark.parametrize("remat", ["none", "full", "dots", "weight_dots"])
def test_a_policy_of_rematerialisation_survives_files_and_command_lines(remat):
    config = override_config(get_config("debug"), {"model.remat": remat}, texts=True)
    assert config.model.remat == remat
    assert parse_config(format_config(config)) == config
    assert Pi0Config.from_dict(json.loads(json.dumps(config.model.to_dict()))) == config.model


def test_an_unknown_policy_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="none or full or dots or weight_dots"):
        override_config(get_config("debug"), {"model.remat": "some"}, texts=True)


def test_activations_stay_spread_though_the_weight_is_not():
    mesh = make_mesh(4)
    weight = jax.device_put(np.ones((8, 64), np.float32), NamedSharding(mesh, PartitionSpec(None, "fsdp")))
    batch = jax.device_put(np.ones((16, 8), np.float32), NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
    wanted = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    assert jax.jit(lambda x, w: shard_batch(x @ w))(batch, weight).sharding.is_equivalent_to(wanted, 2)
    # The same when nothing but shapes is there, and where the batch itself is not spread yet.
    whole = jax.device_put(np.ones((16, 8), np.float32), NamedSharding(mesh, PartitionSpec()))
    assert jax.jit(shard_batch)(whole).sharding.is_equivalent_to(wanted, 2)


@pytest.mark.parametrize("rows", [16, 6])
def test_nothing_is_said_without_a_mesh_or_where_it_does_not_divide(rows):
    plain = jax.make_jaxpr(shard_batch)(jnp.ones((rows, 8)))
    assert not plain.eqns
    place = NamedSharding(make_mesh(4), PartitionSpec())
    on_mesh = jax.make_jaxpr(shard_batch)(jax.ShapeDtypeStruct((rows, 8), jnp.float32, sharding=place))
    assert len(on_mesh.eqns) == (1 if rows == 16 else 0)
