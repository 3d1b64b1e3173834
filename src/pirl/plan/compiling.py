"""The update of a run, traced and compiled for devices that need not exist: shapes stand in for every array."""

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pirl.agents.base import Agent
from pirl.agents.ript import RIPTConfig, RolloutBatch
from pirl.config import RLTrainConfig
from pirl.data import ChunkBatch, load_robot
from pirl.models import Observation
from pirl.training.setup import Setup, agent_shapes
from pirl.training.updates import compile_updates


def abstract_setup(config: RLTrainConfig, devices: list[jax.Device]) -> Setup:
    """What a run on these devices would be made of, but for its data, which decides no shape."""
    shape = (len(devices) // config.fsdp_devices, config.fsdp_devices)
    axes = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh(shape, ("data", "fsdp"), axis_types=axes, devices=devices)
    # Where the robot leaves its width open, the data would tell it; no more than the model has room for.
    action_dim = load_robot(config.data.robot).action_dim or config.model.action_dim
    nothing = cast(Any, None)
    return Setup(
        config=config,
        policy_io=nothing,
        norm_stats={},
        trajectories=None,
        weights=None,
        held_out=None,
        action_dim=action_dim,
        mesh=mesh,
    )


def trace_update(setup: Setup) -> jax.stages.Traced:
    """The update that the trainer would make, traced for the learner and the batches of this setup."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    update: Any = compile_updates(setup)[0]
    traced: jax.stages.Traced = update.trace(
        abstract_agent(setup), abstract_batch_in_place(setup), _placed(key, setup, PartitionSpec())
    )
    return traced


def abstract_agent(setup: Setup) -> Agent:
    """The learner with shapes in the place of arrays, each with its layout."""
    return cast(Agent, _placed(agent_shapes(setup), setup, PartitionSpec()))


def abstract_batch_in_place(setup: Setup) -> Any:
    """A batch with shapes in the place of arrays, spread over the devices."""
    return _placed(abstract_batch(setup), setup, PartitionSpec(("data", "fsdp")))


def abstract_batch(setup: Setup) -> Any:
    """A batch as the learner gets it, with shapes in the place of arrays."""
    agent, size = setup.config.agent, setup.config.batch_size
    if not isinstance(agent, RIPTConfig):
        return _chunks(setup)
    guided, cloning = agent.weighting == "guidance", agent.bc_loss_weight > 0
    fields: dict[str, Any] = dict(
        chunks=_chunks(setup),
        advantages=_shape((size,), jnp.float32),
        included=_shape((size,), jnp.bool_),
        prompts=_prompt(setup) if guided else None,
        demonstrations=_chunks(setup) if cloning else None,
        demonstration_prompts=_prompt(setup) if guided and cloning else None,
    )
    return RolloutBatch(**fields)


def _chunks(setup: Setup) -> ChunkBatch:
    size, model = setup.config.batch_size, setup.config.model
    horizon, chunk = setup.shape.horizon, setup.shape.chunk
    fields: dict[str, Any] = dict(
        observations=_observation(setup),
        actions=_shape((size, chunk, model.action_dim), jnp.float32),
        valid=_shape((size, chunk), jnp.bool_),
        rewards=_shape((size, horizon), jnp.float32),
        terminals=_shape((size, horizon), jnp.bool_),
        masks=_shape((size, horizon), jnp.bool_),
        next_observations=_observation(setup) if setup.shape.sees_next else None,
        next_terminal=_shape((size,), jnp.bool_),
        sequence_mask=_shape((size,), jnp.bool_),
        success=_shape((size,), jnp.bool_),
        human=_shape((size,), jnp.bool_),
    )
    return ChunkBatch(**fields)


def _observation(setup: Setup) -> Observation:
    size, model = setup.config.batch_size, setup.config.model
    tokens, mask = _prompt(setup) if model.max_token_len else (None, None)
    fields: dict[str, Any] = dict(
        images={slot: _shape((size, *model.image_resolution, 3), jnp.uint8) for slot in model.cameras},
        image_masks={slot: _shape((size,), jnp.bool_) for slot in model.cameras},
        state=_shape((size, model.action_dim), jnp.float32),
        tokenized_prompt=tokens,
        tokenized_prompt_mask=mask,
    )
    return Observation(**fields)


def _prompt(setup: Setup) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    shape = (setup.config.batch_size, setup.config.model.max_token_len)
    return _shape(shape, jnp.int32), _shape(shape, jnp.bool_)


def _shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _placed(tree: Any, setup: Setup, spec: PartitionSpec) -> Any:
    """Every shape with a layout: its own, or else this one. Without, it would be compiled for the devices here."""
    place = NamedSharding(setup.mesh, spec)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or place), tree
    )
