"""However many devices there are and however they share the parameters, a learner learns the same."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from builders import MICRO, random_model, random_observation
from pirl.agents.config import ACRLPDConfig, BCConfig, OptimizerConfig, RIPTConfig
from pirl.agents.ript import RolloutBatch
from pirl.config.schema import RLTrainConfig
from pirl.data.chunks import ChunkBatch
from pirl.models import LoraConfig
from pirl.models.config import CriticConfig
from pirl.training import sharding
from pirl.training.setup import Setup, agent_shapes, agent_sharding, compile_updates, create_learner
from pirl.training.sharding import named_leaves

pytestmark = pytest.mark.usefixtures("unchecked_signatures", "small_shards")
MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]
BATCH, HORIZON, REAL = 32, 2, 3
_EXPERT = dataclasses.replace(MICRO.language, mlp_dim=32, head_dim=8)
# Every matrix has an axis that eight devices divide.
MODEL = dataclasses.replace(
    MICRO,
    vision=dataclasses.replace(MICRO.vision, mlp_dim=32),
    language=_EXPERT,
    action_expert=_EXPERT,
    action_dim=4,
    cameras=MICRO.cameras[:1],
    image_resolution=(8, 8),
    remat="full",
)
BLIND = dataclasses.replace(MODEL, cameras=())  # compiles in half the time
_RANK = LoraConfig(rank=8, alpha=8.0)
LORA = dataclasses.replace(MODEL, language=_EXPERT.with_lora(_RANK), action_expert=_EXPERT.with_lora(_RANK))
STEADY = OptimizerConfig(peak_lr=1e-3, schedule="constant", warmup_steps=0)
SMALL = dataclasses.replace(STEADY, moments_dtype="bfloat16")
LEARNERS = {
    "bc": BCConfig(optimizer=STEADY, augment=False),
    "acrlpd": ACRLPDConfig(
        horizon_length=HORIZON,
        num_action_samples=2,
        denoising_steps=1,
        aggregate="subset_min",
        bc_loss_weight=0.1,
        critic=CriticConfig(hidden_dims=(8,)),
        policy_optimizer=STEADY,
        critic_optimizer=STEADY,
        augment=False,
    ),
    "ript": RIPTConfig(optimizer=STEADY, weighting="signed", augment=False),
}


@pytest.fixture
def small_shards(monkeypatch):
    """Let matrices of a few bytes be worth sharding."""
    monkeypatch.setattr(sharding, "MIN_SHARD_BYTES", 64)


def lay_out(agent, data, fsdp, model=MODEL):
    """What a run is made of, as far as updates look at it, on data × fsdp devices."""
    axes = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((data, fsdp), ("data", "fsdp"), axis_types=axes, devices=jax.devices()[: data * fsdp])
    config = RLTrainConfig("test", model, agent, from_scratch=True, batch_size=BATCH, fsdp_devices=fsdp)
    return Setup(config, None, {}, None, None, None, REAL, mesh)


def make_batch(agent, number, model):
    """Everything random; ends of episodes and successes here and there."""
    random = np.random.default_rng([7, number])

    def chance(*shape):
        return random.random((BATCH, *shape)) < 0.7

    def normal(*shape):
        return random.normal(size=(BATCH, *shape)).astype(np.float32)

    terminal = chance()
    chunks = ChunkBatch(
        observations=random_observation(model, BATCH, seed=2 * number),
        actions=normal(MODEL.action_horizon, MODEL.action_dim),
        valid=np.arange(MODEL.action_horizon) < random.integers(1, MODEL.action_horizon + 1, (BATCH, 1)),
        rewards=normal(HORIZON),
        terminals=np.stack([np.zeros_like(terminal), terminal], axis=1),
        masks=np.stack([np.ones_like(terminal), ~terminal], axis=1),
        next_observations=random_observation(model, BATCH, seed=2 * number + 1),
        next_terminal=terminal,
        sequence_mask=chance(),
        success=chance(),
    )
    return RolloutBatch(chunks, normal(), chance()) if isinstance(agent, RIPTConfig) else chunks


def learn(agent, data, fsdp, steps, model=MODEL):
    """The losses of a few updates, and the learner after them, which has been looked after as to where it lies."""
    setup = lay_out(agent, data, fsdp, model)
    key = jax.random.key(3)
    learner = jax.jit(lambda policy: create_learner(setup.config, REAL, policy, key))(random_model(model))
    if setup.mesh.size > 1:
        learner = jax.device_put(learner, agent_sharding(setup))
    update, losses = compile_updates(setup)[0], []
    for number in range(steps):
        batch = jax.device_put(make_batch(agent, number, model), setup.batch_sharding())
        before = learner
        learner, metrics = update(learner, batch, jax.random.fold_in(key, number))
        losses.append(float(metrics["loss"]))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before)), "its memory was not taken over"
    if setup.mesh.size > 1:
        for (name, leaf), place in zip(
            named_leaves(learner).items(), jax.tree.leaves(agent_sharding(setup)), strict=True
        ):
            assert leaf.sharding.is_equivalent_to(place, leaf.ndim), name
    return losses, learner


def assert_same(found, expected):
    """The same losses, and learners of the same kind."""
    (losses, learner), (reference_losses, reference) = found, expected
    assert len(set(reference_losses)) == len(reference_losses)
    np.testing.assert_allclose(losses, reference_losses, rtol=1e-5, atol=1e-6)
    shapes = [{name: (x.shape, x.dtype) for name, x in named_leaves(tree).items()} for tree in (learner, reference)]
    assert shapes[0] == shapes[1]


@functools.cache
def alone(agent, steps, model):
    """What one device learns."""
    return learn(agent, 1, 1, steps, model)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param("bc", (1, 8), marks=pytest.mark.slow),
        ("acrlpd", (2, 4)),
        ("ript", (4, 2)),
    ],
)
def test_a_few_updates_are_the_same_on_eight_devices(name, mesh):
    assert_same(learn(LEARNERS[name], *mesh, 3, BLIND), alone(LEARNERS[name], 3, BLIND))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", LEARNERS)
def test_fifty_updates_are_the_same_on_every_mesh(name, mesh):
    assert_same(learn(LEARNERS[name], *mesh, 50), alone(LEARNERS[name], 50, MODEL))


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("bc", (2, 4)), *(pytest.param(name, (1, 8), marks=pytest.mark.slow) for name in LEARNERS)],
)
def test_a_batch_in_four_parts_gives_the_same_updates_as_a_whole_one(name, mesh):
    in_parts = dataclasses.replace(LEARNERS[name], accumulation_steps=4)
    assert_same(learn(in_parts, *mesh, 3, BLIND), alone(LEARNERS[name], 3, BLIND))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 4), (1, 8)])
@pytest.mark.parametrize(
    ("model", "changes"),
    [(LORA, {}), (MODEL, {"freeze": ("vision", "language")}), (MODEL, {"optimizer": SMALL})],
    ids=["lora", "action expert only", "moments in bfloat16"],
)
def test_what_is_trained_in_part_or_kept_small_learns_the_same(model, changes, mesh):
    agent = dataclasses.replace(LEARNERS["bc"], **changes)
    losses, learner = learn(agent, *mesh, 10, model)
    assert_same((losses, learner), alone(agent, 10, model))
    assert bool(learner.actor.frozen_params) == ("optimizer" not in changes)
    parts = [learner.actor.params, learner.actor.frozen_params, learner.actor.opt_state]
    for part in filter(None, parts):
        assert any(any(leaf.sharding.spec) for leaf in jax.tree.leaves(part))


def test_layers_are_gathered_one_at_a_time():
    """A stack of layers that is gathered before the loop over them would undo the sharding."""
    agent = LEARNERS["bc"]
    setup = lay_out(agent, 1, 8, BLIND)
    shapes = agent_shapes(setup)
    batch = jax.device_put(make_batch(agent, 0, BLIND), setup.batch_sharding())
    text = compile_updates(setup)[0].lower(shapes, batch, jax.random.key(0)).compile().as_text()
    gathered = [tuple(map(int, found.split(","))) for found in re.findall(r"\w+\[([\d,]+)\]\S* all-gather\(", text)]
    stacked = {leaf.shape for path, leaf in shapes.actor.params.items() if "/layers/" in path and leaf.ndim > 2}
    assert {shape[1:] for shape in stacked} & set(gathered)
    assert not stacked & set(gathered)
