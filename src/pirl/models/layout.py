"""What the compiler is told about activations: how they lie over devices, and which are kept for the backward pass."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Shaped

from pirl.models.config import Remat
from pirl.models.types import Array

# The axes of the mesh, both of which a batch is spread over.
BATCH_AXES = ("data", "fsdp")


def spread(x: Shaped[Array, "b ..."]) -> Shaped[Array, "b ..."]:
    """Keep a batch of activations spread over all devices, one share of the samples each.

    Left alone, the compiler may carry the layout of a sharded weight over to what it is multiplied with, so that every
    device holds some columns of all samples. Where there is no mesh, or it does not divide the batch, nothing is said.
    """
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty or set(mesh.axis_names) != set(BATCH_AXES) or mesh.size == 1 or x.shape[0] % mesh.size:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))


def rematerialised(step: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """One layer of a scan, which keeps for its backward pass what the policy says and computes the rest again."""
    if remat == "none":
        return step
    policies = {
        "full": None,
        "dots": jax.checkpoint_policies.dots_saveable,
        "weight_dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }
    return jax.checkpoint(step, prevent_cse=False, policy=policies[remat])
