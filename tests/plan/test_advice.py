"""What to do about too little memory depends on how little it is, and would help."""

import dataclasses

import jax
import pytest

from pirl.config import get_config, override_config
from pirl.plan.advice import Change, list_changes
from pirl.plan.estimates import advise, make_estimate, needed_devices
from pirl.plan.measuring import Measurement
from pirl.plan.table import Plan, describe, summary_cells, verdict
from pirl.plan.topologies import GIB, parse_topology

# Eight devices, each with a whole copy: 40 GiB of learner, and 1 GiB for every sample beside 12 for gradients and such.
WHOLE = {"parameters": 10 * GIB, "average": 10 * GIB, "optimiser": 20 * GIB}
SPREAD = {kind: size // 8 for kind, size in WHOLE.items()}
FROZEN = {"parameters": GIB // 4, "frozen": GIB // 2, "average": GIB // 4, "optimiser": GIB // 2}
MEASURED = Measurement(
    topology="h100:8",
    devices=8,
    kind="NVIDIA H100",
    memory=72.0 * GIB,
    batch_size=32,
    parameters={"policy": 10, "policy_trainable": 10},
    state=WHOLE,
    batch=0,
    padding=0,
    temporary=[(32, 16.0 * GIB), (16, 14.0 * GIB)],
    flops=10**15,
    sent={"all-reduce": 60e9},
    products=1e12,
    refused="",
    changes=[
        Change("shard one copy of the learner over all devices", "--fsdp-devices 8", SPREAD),
        Change("train only the action expert", "--agent.freeze vision,language --fsdp-devices 8", FROZEN),
    ],
    seconds=1.0,
)


def planned(memory, parts=1):
    return Plan(parse_topology("h100:8"), dataclasses.replace(MEASURED, memory=memory * GIB), parts)


def test_what_fits_needs_no_advice():
    plan = planned(72.0)
    assert plan.estimate.fits
    assert plan.estimate.peak == 56 * GIB
    assert (plan.estimate.activations, plan.estimate.workspace) == (4 * GIB, 12 * GIB)
    assert plan.estimate.largest_batch == 8 * 20
    assert "160, estimated by a line through batches of 16 and 32; plan again with this batch size" in str(
        describe(plan)[-1]
    )
    assert plan.advice == []
    assert verdict(plan) == "fits: 56.00 GiB of 72.00 GiB on each of 8 devices."


@pytest.mark.parametrize(
    ("memory", "first"),
    [
        (55.0, "--agent.accumulation-steps 2"),
        (53.5, "--agent.accumulation-steps 4"),
        (50.0, "--fsdp-devices 8"),
        (10.0, "--fsdp-devices 8 --agent.accumulation-steps 4"),
        (9.0, "--agent.freeze vision,language --fsdp-devices 8"),
    ],
)
def test_the_less_memory_the_more_has_to_change(memory, first):
    plan = planned(memory)
    assert not plan.estimate.fits
    found = plan.advice
    assert all(advice.fits and advice.peak <= memory * GIB for advice in found)
    assert found[0].how == first
    shown = "\n".join(str(part) for part in describe(plan))
    assert "DOES NOT FIT" in shown
    assert first in shown
    assert summary_cells(plan)[1] == "no"


def test_where_nothing_helps_more_devices_are_counted():
    plan = planned(4.0)
    (best,) = plan.advice
    assert not best.fits
    # 40 GiB of learner and 10 of gradients over 64 devices; 2 of other things, and a sample, on each.
    assert needed_devices(plan.measured, 1) == 64
    assert "about 64 such devices would be enough" in str(describe(plan)[-1])
    assert needed_devices(planned(0.5).measured, 1) is None
    assert "more memory" in str(describe(planned(0.5))[-1])


def test_where_nothing_can_be_changed_there_are_larger_machines():
    alone = {"devices": 1, "batch_size": 1, "temporary": [(1, 13.0 * GIB), (2, 14.0 * GIB)], "changes": []}
    plan = Plan(parse_topology("h100:1"), dataclasses.replace(MEASURED, **alone, memory=30.0 * GIB), 1)
    assert plan.advice == []
    assert "about 2 such devices would be enough" in str(describe(plan)[-1])


def test_a_change_of_unknown_effect_is_mentioned_and_no_promise():
    again = Change("recompute activations in the backward pass instead of keeping them", "--model.remat full", {})
    plan = planned(50.0)
    plan = dataclasses.replace(plan, measured=dataclasses.replace(plan.measured, changes=[*MEASURED.changes, again]))
    assert plan.advice == planned(50.0).advice
    assert "--model.remat full  → less; plan again to see how much" in str(describe(plan)[-1])


def test_no_batch_fits_where_the_learner_does_not():
    assert planned(40.0).estimate.largest_batch == 0
    assert planned(53.5).estimate.largest_batch == 8


def test_accumulating_lets_a_batch_be_larger():
    measured = dataclasses.replace(MEASURED, temporary=[(32, 14.0 * GIB), (64, 16.0 * GIB)])
    once = make_estimate(MEASURED, parse_topology("h100:8"), 1)
    twice = make_estimate(measured, parse_topology("h100:8"), 2)
    assert twice.largest_batch == 2 * once.largest_batch


def test_the_slowest_of_compute_memory_and_links_decides():
    """1 PFLOP on eight H100; 80 GiB and 1 TB through memory; 60 GB over NVLink."""
    estimate = make_estimate(MEASURED, parse_topology("h100:8"), 1)
    assert estimate.seconds["compute"] == pytest.approx(1e15 / 8 / 989e12 / 0.4)
    assert estimate.seconds["memory"] == pytest.approx((2 * 40 * GIB + 1e12) / 3350e9 / 0.7)
    assert estimate.seconds["links"] == pytest.approx(60e9 / 450e9 / 0.7)
    assert estimate.limit == "memory"
    assert estimate.step_seconds == estimate.seconds["memory"]
    slow = make_estimate(MEASURED, parse_topology("l40s:8"), 1)
    assert slow.limit == "links"


def test_what_was_not_compiled_for_want_of_memory_does_not_fit():
    unknown = dataclasses.replace(MEASURED, temporary=[], sent=None, products=None, refused="RESOURCE_EXHAUSTED: no")
    plan = Plan(parse_topology("v5e:2x4"), unknown, 1)
    assert plan.estimate.fits is False
    assert plan.estimate.largest_batch == 0
    assert any("RESOURCE_EXHAUSTED" in str(part) for part in describe(plan))


def test_memory_that_nobody_knows_is_not_judged():
    plan = Plan(parse_topology("h100:8"), dataclasses.replace(MEASURED, memory=None), 1)
    assert plan.estimate.fits is None
    assert plan.estimate.largest_batch is None
    assert advise(plan.measured, 1) == []
    assert summary_cells(plan)[1] == "?"


@pytest.mark.usefixtures("unchecked_signatures")
def test_every_change_makes_the_learner_smaller_and_can_be_given():
    config = get_config("aloha_fold")
    changes = list_changes(config, jax.devices())
    sizes = [sum(change.state.values()) for change in changes]
    assert sizes[0] > sizes[1] > max(sizes[2:])
    assert [change.how.split()[0] for change in changes] == [
        "--fsdp-devices",
        "--agent.policy-optimiser.moments-dtype",
        "--agent.freeze",
        "preset",
    ]
    # 52 GB of a policy with its average and moments, over eight devices; a quarter less with half the moments. Every
    # device has the critics.
    assert sizes[0] - changes[0].state["critics"] == pytest.approx(52e9 / 8, rel=0.01)
    moments = [change.state["optimiser"] for change in changes[:2]]
    assert moments[0] - moments[1] == pytest.approx(12.9e9 / 8, rel=0.01)
    assert sizes[0] - sizes[1] == moments[0] - moments[1]
    for change in changes[1:3]:
        words = change.how.split()
        settings = {
            name.removeprefix("--").replace("-", "_"): value
            for name, value in zip(words[::2], words[1::2], strict=True)
        }
        override_config(config, settings, texts=True)
    lora = override_config(get_config("aloha_fold_lora"), {"model.remat": "dots"})
    assert [change.how.split()[0] for change in list_changes(lora, jax.devices()[:1])] == [
        "--agent.policy-optimiser.moments-dtype",
        "--model.remat",
    ]
