"""Bytes between devices are those of rings of known size, as often as the program sends them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pirl.plan.traffic import read_traffic


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def compiled(mesh, function, *arguments, out=None):
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for shape, spec in arguments
    ]
    place = {} if out is None else {"out_shardings": NamedSharding(mesh, PartitionSpec(*out))}
    return read_traffic(jax.jit(function, **place).lower(*shapes).compile().as_text(), 8)


def test_gathering_sends_each_share_to_all_others(mesh):
    found = compiled(mesh, lambda x: x * 2, ((64, 32), ("fsdp",)), out=())
    assert found.sent == {"all-gather": 3 * (64 // 4) * 32 * 4}
    both = compiled(mesh, lambda x: x * 2, ((64, 32), (("data", "fsdp"),)), out=())
    assert sum(both.sent.values()) == pytest.approx(7 / 8 * 64 * 32 * 4)


def test_a_sum_over_devices_goes_around_twice(mesh):
    found = compiled(mesh, lambda x: jnp.sum(x, axis=0), ((64, 32), ("fsdp",)), out=())
    assert found.sent == {"all-reduce": 2 * 3 / 4 * 32 * 4}


def test_what_a_loop_sends_counts_as_often_as_it_runs(mesh):
    def layers(x, weights):
        return jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]

    batch = (("data", "fsdp"),)
    found = compiled(mesh, layers, ((64, 32), batch), ((5, 32, 32), (None, None, "fsdp")), out=batch)
    gathered = 5 * 3 * 32 * 8 * 4
    assert found.sent["all-gather"] == gathered
    # Each device multiplies its eight samples with the whole of each matrix.
    assert found.products == 5 * 4 * (8 * 32 + 32 * 32 + 8 * 32)


def test_nothing_is_sent_where_all_is_at_home(mesh):
    batch = (("data", "fsdp"),)
    assert compiled(mesh, lambda x: x @ x.T, ((64, 32), ())).sent == {}
    assert compiled(mesh, jnp.tanh, ((64, 32), batch), out=batch).sent == {}


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


def test_the_language_of_tpus_is_understood():
    found = read_traffic(TPU, 8)
    assert found.sent == {"all-gather": 18 * 3 * 64 * 16 * 2, "reduce-scatter": 18 * 3 / 4 * 2 * 64 * 64 * 4}
    assert found.products == 18 * 4 * (8 * 64 + 64 * 64 + 8 * 64)


def test_the_dearest_of_branches_counts_and_groups_may_be_written_as_a_range():
    text = TPU.replace(
        "while(%a), condition=%condition, body=%body", "conditional(%a, %a), branch_computations={%started, %body}"
    ).replace("{{0,1,2,3},{4,5,6,7}}", "[4,2]<=[8]")
    assert read_traffic(text, 8).sent["reduce-scatter"] == 1 / 2 * 2 * 64 * 64 * 4
