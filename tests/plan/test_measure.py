"""Bytes, FLOPs and traffic that a plan measures are those of a real update."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from golden import content, needs_golden
from pirl.agents.config import RIPTConfig
from pirl.config import format_config, get_config, override_config
from pirl.data import PolicyIO, load_robot
from pirl.data.chunks import gather_chunks
from pirl.errors import TrainingError
from pirl.models import Tokenizer
from pirl.plan import measure
from pirl.plan.measure import abstract_agent, abstract_batch, abstract_setup, count_flops, read_traffic, trace_update
from pirl.plan.table import make_plan
from pirl.plan.topologies import parse_topology
from pirl.training import sharding
from pirl.training.dry_run import kind_of, peak_bytes
from pirl.training.setup import create_agent
from pirl.training.sharding import named_leaves
from trajectories import build

# A learner of shapes does not fit the signatures of one of arrays.
pytestmark = pytest.mark.usefixtures("unchecked_signatures")


def tiny(**changes):
    """Cloning by a policy that sees the state alone, two copies of it over four devices each."""
    return override_config(get_config("demo_state_bc"), {"fsdp_devices": 4, "batch_size": 64, **changes})


@pytest.fixture
def spread(monkeypatch):
    """Shard small arrays as large ones are."""
    monkeypatch.setattr(sharding, "MIN_SHARD_BYTES", 1 << 10)


@pytest.fixture(scope="module")
def measured():
    jaxtyping.config.update("jaxtyping_disable", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "MIN_SHARD_BYTES", 1 << 10)
        return measure.measure(tiny(), parse_topology("cpu:8"), print)


@pytest.mark.usefixtures("spread")
def test_bytes_of_each_kind_are_those_that_lie_on_every_device(measured):
    agent, kinds = create_agent(abstract_setup(tiny(), jax.devices())), {}
    for name, leaf in named_leaves(agent).items():
        for shard in leaf.addressable_shards:
            held = kinds.setdefault(shard.device, {})
            held[kind_of(name)] = held.get(kind_of(name), 0) + shard.data.nbytes
    assert kinds == dict.fromkeys(jax.devices(), measured.state)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(agent))
    assert 1 / 4 < sum(measured.state.values()) / whole < 0.35, "spread over four devices, but for small arrays"


@pytest.mark.usefixtures("spread")
def test_the_peak_is_that_of_the_trainers_program(measured):
    compiled = trace_update(abstract_setup(tiny(), jax.devices())).lower().compile()
    sizes = make_plan(measured, 64, 1)["bytes_per_device"]
    assert sizes["peak"] == pytest.approx(peak_bytes(compiled), rel=0.01)
    assert sum(sizes[kind] for kind in sizes if kind not in ("peak", "available")) == pytest.approx(sizes["peak"])


@pytest.mark.usefixtures("spread")
def test_the_largest_batch_fills_the_memory_and_no_more(measured):
    """Predicted from batches of 64 and 32, and then compiled."""
    memory = float(sum(measured.state.values()) + 6 * measured.temporary["64"])
    small = replace(measured, topology=replace(measured.topology, memory=memory))
    predicted = make_plan(small, 64, 1)["largest_batch"]
    assert predicted > 4 * 64, "far from what was measured"
    compiled = trace_update(abstract_setup(tiny(batch_size=predicted), jax.devices())).lower().compile()
    assert peak_bytes(compiled) == pytest.approx(memory, rel=0.1)


@needs_golden
def test_parameters_of_full_size_are_openpis():
    for name in ("pi0_base", "pi05_lora", "pi0_lora"):
        spec = content("spec", f"{name}.json")
        changes = {"model.preset": name, "fsdp_devices": 8, "agent.freeze": ()}
        config = override_config(get_config("aloha_fold"), changes)
        if "lora" in name:
            config = override_config(config, measure.lora_options(config))
        agent = abstract_agent(abstract_setup(config, jax.devices()))
        counts, state = agent.parameter_counts(), measure.state_bytes(agent)
        assert counts["policy"] == spec["total_params"]
        assert counts["policy_trainable"] == spec["freeze_filter_trainable_count"]
        assert state["optimizer"] == pytest.approx(2 * state["parameters"], rel=1e-6)
        assert state["parameters"] == sum(
            4 * math.prod(leaf[0]) // (8 if path in spec["fsdp_sharded_axes"]["8"] else 1)
            for path, leaf in spec["params"].items()
            if path not in spec["freeze_filter_frozen_keys"]
        )


def test_a_batch_of_shapes_has_the_shapes_of_a_real_one():
    model = {"model.preset": "tiny", "data.robot": "tabletop", "batch_size": 8, "fsdp_devices": 1}
    setup = abstract_setup(
        override_config(get_config("demo"), {**model, "agent.actor_mode": "condition"}), jax.devices()
    )
    robot, model = load_robot("tabletop"), setup.config.model

    class Dark:
        def gather(self, rows):
            return np.zeros((len(rows), *model.image_resolution, 3), np.uint8)

    trajectories = build([12], frames=dict.fromkeys(robot.cameras, Dark()))
    arrays = {"states": np.zeros((12, robot.state_dim), np.float32), "actions": np.zeros((12, 3), np.float32)}
    policy_io = PolicyIO(robot, model, None, Tokenizer.for_model(model))
    real = gather_chunks(replace(trajectories, **arrays), np.arange(8), setup.shape, policy_io)
    shapes = lambda tree: {name: (leaf.shape, leaf.dtype) for name, leaf in named_leaves(tree).items()}  # noqa: E731
    assert shapes(abstract_batch(setup)) == shapes(real)
    for weighting in ("signed", "guidance"):
        config = override_config(get_config("aloha_ript"), {"batch_size": 8})
        config = replace(config, agent=RIPTConfig(weighting=weighting, bc_loss_weight=0.1))
        batch = abstract_batch(abstract_setup(config, jax.devices()))
        assert batch.demonstrations.actions.shape == batch.chunks.actions.shape == (8, 50, 32)
        assert (batch.prompts is None) == (batch.demonstration_prompts is None) == (weighting == "signed")


def test_what_decides_the_program_decides_the_cache_key(tmp_path, monkeypatch):
    file, robot, topology = tmp_path / "robot.json", load_robot("tabletop_state").to_dict(), parse_topology("h100:8")
    file.write_text(json.dumps(robot))
    config = tiny(**{"data.robot": str(file)})
    key = measure.cache_key(config, topology)
    assert measure.cache_key(override_config(config, {"seed": 7}), parse_topology("a100:8")) == key
    assert measure.cache_key(config, parse_topology("h100:4")) != key
    file.write_text(json.dumps(robot | {"action_dim": 2}))
    assert measure.cache_key(config, topology) != key
    file.write_text(json.dumps(robot))
    for room in ("agents", "config", "data", "models", "training"):
        monkeypatch.setattr(measure, "__file__", str(tmp_path / "plan" / "measure.py"))
        before = measure.cache_key(config, topology)
        (tmp_path / room).mkdir()
        (tmp_path / room / "shapes.py").write_text("width = 7")
        assert measure.cache_key(config, topology) != before, room


def test_the_compiling_process_ends_when_its_parent_does(tmp_path):
    (tmp_path / "config.yaml").write_text(format_config(tiny()))
    command = [sys.executable, "-m", "pirl.plan.measure", "cpu:8", str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=300)  # closes its input, as the system does when the parent is gone
    assert (process.returncode, b"Traceback" in said) == (1, False)
    assert [file.name for file in tmp_path.iterdir()] == ["config.yaml"]


def test_a_compiler_that_is_killed_is_reported(tmp_path, monkeypatch):
    (tmp_path / "python").write_text("#!/bin/sh\nkill -9 $$\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PIRL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(TrainingError, match="too little memory"):
        measure.measure_run(tiny(), parse_topology("h100:8"), print)
    assert not (tmp_path / "cache").exists()


def test_what_a_compiler_says_about_memory_is_understood():
    said = "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (44.06G) exceeds available HBM (15.75G)."
    assert measure.read_exhausted(said) == pytest.approx(44.06 * 2**30)
    assert measure.read_exhausted("Ran out of memory. Used 512.5M of 15.75G hbm.") == 512.5 * 2**20
    assert measure.read_exhausted("out of luck") is None


@pytest.mark.slow
def test_a_process_takes_at_the_peak_what_was_predicted():
    """About a gigabyte, most of it temporary, on one device of the CPU."""
    flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"}
    command = [sys.executable, Path(__file__).with_name("real_peak.py"), "4096"]
    done = subprocess.run(command, env={**os.environ, **flags}, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["taken"] == pytest.approx(found["predicted"], rel=0.1)


def flops(function, *shapes):
    return count_flops(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)))


def layers(x, weights):
    return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]


def test_products_and_convolutions_are_two_flops_for_each_pair_of_numbers():
    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert flops(jnp.matmul, (5, 7), (7, 3)) == 2 * 5 * 7 * 3
    assert flops(lambda x, y: jnp.einsum("bij,bkj->bik", x, y), (4, 5, 7), (4, 3, 7)) == 4 * 2 * 5 * 7 * 3
    assert flops(convolve, (2, 8, 8, 3), (2, 2, 3, 16)) == 2 * (2 * 4 * 4 * 16) * (2 * 2 * 3)


def test_loops_count_as_often_as_they_run_and_the_largest_branch_once():
    def either(flag, x, y):
        return jax.lax.cond(flag[0] > 0, lambda: x @ y, lambda: jnp.tanh(x @ (y @ y)))

    shapes, once = ((4, 8), (6, 8, 8)), 2 * 4 * 8 * 8
    assert flops(layers, *shapes) == 6 * once
    assert flops(lambda x, w: jax.lax.fori_loop(0, 3, lambda _, x: layers(x, w), x), *shapes) == 3 * 6 * once
    assert flops(lambda x: jax.jit(jnp.matmul)(x, x), (6, 6)) == 2 * 6**3
    assert flops(either, (1,), (4, 8), (8, 8)) == 2 * 8 * 8 * 8 + once


def test_a_gradient_is_two_more_products_and_rematerializing_one_more():
    def loss(weights, x):
        for weight in weights:
            x = jnp.sin(x @ weight)
        return jnp.sum(x)

    shapes, first = ((3, 8, 8), (4, 8)), 2 * 4 * 8 * 8
    assert flops(loss, *shapes) == 3 * first
    # By weights and by inputs, but not by the data.
    assert flops(jax.grad(loss), *shapes) == 9 * first - first
    assert flops(jax.grad(jax.checkpoint(loss)), *shapes) == 12 * first - first


@pytest.mark.slow
def test_flops_of_full_size_are_six_for_each_parameter_and_token():
    """The rule of thumb for transformers: 2 forward and 4 backward, attention and heads being small beside it."""
    config = override_config(get_config("aloha_fold"), {"agent.learner": "bc", "batch_size": 1, "model.remat": "none"})
    traced = trace_update(abstract_setup(config, jax.devices()[:1]))
    parameter_tokens = 3 * 256 * 414_803_696 + (3 * 256 + 48) * 1_981_884_416 + 51 * 311_464_960
    assert count_flops(traced.jaxpr) == pytest.approx(6 * parameter_tokens, rel=0.1)


def traffic(function, *arguments, out=None):
    """Of a program for 2 × 4 devices, given shapes and specs of its arguments."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    place = lambda spec: NamedSharding(mesh, PartitionSpec(*spec))  # noqa: E731
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place(spec)) for shape, spec in arguments]
    options = {} if out is None else {"out_shardings": place(out)}
    return read_traffic(jax.jit(function, **options).lower(*shapes).compile().as_text(), 8)


def test_collectives_send_what_rings_send():
    batch = (("data", "fsdp"),)
    assert traffic(lambda x: x * 2, ((64, 32), ("fsdp",)), out=()) == {"all-gather": 3 * (64 // 4) * 32 * 4}
    both = traffic(lambda x: x * 2, ((64, 32), batch), out=())
    assert sum(both.values()) == pytest.approx(7 / 8 * 64 * 32 * 4)
    summed = traffic(lambda x: jnp.sum(x, axis=0), ((64, 32), ("fsdp",)), out=())
    assert summed == {"all-reduce": 2 * 3 / 4 * 32 * 4}
    assert traffic(jnp.tanh, ((64, 32), batch), out=batch) == {}


def test_what_a_loop_sends_counts_as_often_as_it_runs():
    batch = (("data", "fsdp"),)
    found = traffic(layers, ((64, 32), batch), ((5, 32, 32), (None, None, "fsdp")), out=batch)
    assert found["all-gather"] == 5 * 3 * 32 * 8 * 4
    # Each device multiplies its eight samples with the whole of each matrix.
    assert found["products"] == 5 * 4 * (8 * 32 + 32 * 32 + 8 * 32)


# As the compiler for TPUs writes: layouts with tiles, gathers that overlap with products, sums of which each device
# keeps a part, and loops whose length only their condition tells.
TPU = """HloModule jit_update, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[]{:T(128)} add(%x, %y)
}

%started (p0: bf16[64,16]) -> (bf16[64,16], bf16[64,64]) {
  %p0 = bf16[64,16]{0,1:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.1 = bf16[64,64]{0,1:T(8,128)(2,1)} all-gather(%p0), channel_id=7, FOURS, dimensions={1}
}

%async_collective_fusion.1 (p1: bf16[64,16], p2: f32[8,64], p3: f32[64,64]) -> f32[8,64] {
  %p1 = bf16[64,16]{0,1:T(8,128)(2,1)} parameter(0)
  %p2 = f32[8,64]{1,0:T(8,128)} parameter(1)
  %p3 = f32[64,64]{1,0:T(8,128)} parameter(2)
  %all-gather.2 = bf16[64,64]{0,1:T(8,128)(2,1)S(1)} all-gather(%p1), channel_id=7, FOURS, dimensions={1}
  ROOT %convolution.1 = f32[8,64]{1,0:T(8,128)} convolution(%p2, %p3), dim_labels=bf_io->bf
}

%done (p4: bf16[64,64]) -> bf16[64,64] {
  %p4 = bf16[64,16]{0,1:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.3 = bf16[64,64]{0,1:T(8,128)(2,1)} all-gather(%p4), channel_id=7, FOURS, dimensions={1}
}

%all-reduce-scatter.1 (p5: f32[64,64], p6: f32[64,64]) -> (f32[16,64], f32[16,64]) {
  %p5 = f32[64,64]{1,0:T(8,128)} parameter(0)
  %p6 = f32[64,64]{1,0:T(8,128)} parameter(1)
  %all-reduce.1 = (f32[64,64], /*index=1*/f32[64,64]) all-reduce(%p5, /*index=1*/%p6), LISTED, to_apply=%add
}

%condition (c: (s32[], f32[8,64])) -> pred[] {
  %limit = s32[]{:T(128)} constant(18)
  %number = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %less = pred[]{:T(512)} compare(%number, %limit), direction=LT
}

%body (b: (s32[], f32[8,64])) -> (s32[], f32[8,64]) {
  %b = (s32[]{:T(128)}, f32[8,64]{1,0:T(8,128)}) parameter(0)
  %async-collective-start.1 = (bf16[64,16], bf16[64,64]) fusion(%b), kind=kCustom, calls=%started
  %fusion.1 = f32[8,64]{1,0:T(8,128)} fusion(%b), kind=kOutput, calls=%async_collective_fusion.1
  %async-collective-done.1 = bf16[64,64] fusion(%b), kind=kCustom, calls=%done
  ROOT %fusion.2 = (f32[16,64], f32[16,64]) fusion(%b), kind=kCustom, calls=%all-reduce-scatter.1
}

ENTRY %main (a: f32[8,64]) -> f32[8,64] {
  %a = f32[8,64]{1,0:T(8,128)} parameter(0)
  ROOT %while.1 = (s32[]{:T(128)}, f32[8,64]{1,0:T(8,128)}) while(%a), condition=%condition, body=%body
}
"""
TPU = TPU.replace(
    "FOURS", "replica_groups=mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_1'}"
).replace("LISTED", "replica_groups={{0,1,2,3},{4,5,6,7}}")


def test_programs_of_the_tpu_compiler_are_understood():
    found = read_traffic(TPU, 8)
    assert found["all-gather"] == 18 * 3 * 64 * 16 * 2
    assert found["reduce-scatter"] == 18 * 3 / 4 * 2 * 64 * 64 * 4
    assert found["products"] == 18 * 4 * (8 * 64 + 64 * 64 + 8 * 64)
    branches = "conditional(%a, %a), branch_computations={%started, %body}"
    once = TPU.replace("while(%a), condition=%condition, body=%body", branches)
    pairs = once.replace("{{0,1,2,3},{4,5,6,7}}", "[4,2]<=[8]")
    assert read_traffic(pairs, 8)["reduce-scatter"] == 1 / 2 * 2 * 64 * 64 * 4, "of the largest branch"


# As the compiler for GPUs writes: products are calls of cuBLAS, which also return a workspace.
GPU = """HloModule jit_update, is_scheduled=true

ENTRY %main.0_spmd (w: bf16[128,1024], x: bf16[32,1024]) -> bf16[32,1024] {
  %w = bf16[128,1024]{1,0} parameter(0)
  %x = bf16[32,1024]{1,0} parameter(1)
  %all-gather-start = (bf16[128,1024]{1,0}, bf16[1024,1024]{1,0}) all-gather-start(%w), MESH, dimensions={0}
  %all-gather-done = bf16[1024,1024]{1,0} all-gather-done(%all-gather-start)
  %custom-call.1 = (bf16[32,1024]{1,0}, s8[4194304]{0}) custom-call(%x, %all-gather-done), CUBLAS
  ROOT %get-tuple-element.1 = bf16[32,1024]{1,0} get-tuple-element(%custom-call.1), index=0
}
""".replace("CUBLAS", 'custom_call_target="__cublas$lt$matmul"').replace(
    "MESH", "replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}"
)


def test_programs_of_the_gpu_compiler_are_understood():
    product = 2 * (32 * 1024 + 1024 * 1024 + 32 * 1024)
    assert read_traffic(GPU, 8) == {"all-gather": 7 * 128 * 1024 * 2, "products": product}
