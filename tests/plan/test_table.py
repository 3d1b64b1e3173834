"""What a plan concludes from a measurement, checked by arithmetic."""

from dataclasses import replace

import jax
import pytest

from pirl.config import get_config, override_config
from pirl.plan.measure import SHARD, Measurement, list_changes
from pirl.plan.table import describe, make_plan, needed_devices, summary
from pirl.plan.topologies import GIB, parse_topology

# Eight devices, each with a whole copy: 40 GiB of learner, and 1 GiB for every sample beside 12 for gradients and such.
WHOLE = {"parameters": 10 * GIB, "average": 10 * GIB, "optimizer": 20 * GIB}
FROZEN = {"parameters": GIB // 4, "frozen": GIB // 2, "average": GIB // 4, "optimizer": GIB // 2}
H100 = parse_topology("h100:8")
MEASURED = Measurement(
    topology=H100,
    parameters={"policy": 10, "policy_trainable": 10},
    state=WHOLE,
    batch=0,
    padding=0,
    temporary={"32": 16.0 * GIB, "16": 14.0 * GIB},
    flops=10**15,
    sent={"all-reduce": 60e9},
    products=1e12,
    refused="",
    changes=[
        (SHARD, "--fsdp-devices 8", {kind: size // 8 for kind, size in WHOLE.items()}),
        ("train only the action expert", "--agent.freeze vision,language --fsdp-devices 8", FROZEN),
        ("recompute activations in the backward pass instead of keeping them", "--model.remat full", {}),
    ],
    seconds=1.0,
)


def measured(memory, **changes):
    return replace(MEASURED, topology=replace(H100, memory=None if memory is None else memory * GIB), **changes)


def shown(m, parts=1):
    plan = make_plan(m, 32, parts)
    return "\n".join(map(str, describe(plan, m, parts)))


def test_peak_and_largest_batch_follow_the_line_through_two_batches():
    plan = make_plan(MEASURED, 32, 1)
    sizes = plan["bytes_per_device"]
    assert (sizes["activations"], sizes["workspace"], sizes["peak"]) == (4 * GIB, 12 * GIB, 56 * GIB)
    assert (plan["fits"], plan["largest_batch"], plan["advice"]) == (True, 8 * 20, [])
    assert make_plan(measured(40.0), 32, 1)["largest_batch"] == 0
    assert make_plan(measured(53.5), 32, 1)["largest_batch"] == 8
    accumulated = replace(MEASURED, temporary={"32": 14.0 * GIB, "64": 16.0 * GIB})
    assert make_plan(accumulated, 32, 2)["largest_batch"] == 2 * 8 * 20
    assert make_plan(replace(MEASURED, temporary={"32": 16.0 * GIB}), 32, 1)["bytes_per_device"]["workspace"] == 0


def test_the_less_memory_there_is_the_more_has_to_change():
    firsts = {
        55.0: "--agent.accumulation-steps 2",
        53.5: "--agent.accumulation-steps 4",
        50.0: "--fsdp-devices 8",
        10.0: "--fsdp-devices 8 --agent.accumulation-steps 4",
        9.0: "--agent.freeze vision,language --fsdp-devices 8",
    }
    for memory, first in firsts.items():
        plan = make_plan(measured(memory), 32, 1)
        assert plan["fits"] is False
        assert plan["advice"][0]["how"] == first
        assert all(advice["fits"] and advice["peak"] <= memory * GIB for advice in plan["advice"])
        assert first in shown(measured(memory))
        assert "--model.remat full" in shown(measured(memory)), "its effect is unknown, so it is only mentioned"


def test_where_no_change_is_enough_more_devices_are_counted():
    (closest,) = make_plan(measured(4.0), 32, 1)["advice"]
    assert not closest["fits"]
    # 40 GiB of learner and 10 of gradients over 64 devices; 2 of other things, and a sample, on each.
    assert needed_devices(measured(4.0), 32, 1) == 64
    assert "64" in shown(measured(4.0))
    assert needed_devices(measured(0.5), 32, 1) is None


def test_the_slowest_of_compute_memory_and_links_decides_the_time():
    """1 PFLOP on eight H100; 80 GiB and 1 TB through memory; 60 GB over NVLink."""
    seconds = make_plan(MEASURED, 32, 1)["seconds"]
    assert seconds["compute"] == pytest.approx(1e15 / 8 / 989e12 / 0.4)
    assert seconds["memory"] == pytest.approx((2 * 40 * GIB + 1e12) / 3350e9 / 0.7) == seconds["step"]
    assert seconds["links"] == pytest.approx(60e9 / 450e9 / 0.7)
    slow = make_plan(replace(MEASURED, topology=parse_topology("l40s:8")), 32, 1)["seconds"]
    assert slow["step"] == slow["links"]


def test_what_is_unknown_is_not_concluded():
    unlimited = make_plan(measured(None), 32, 1)
    assert (unlimited["fits"], unlimited["largest_batch"], unlimited["advice"]) == (None, None, [])
    refused = measured(72.0, temporary={}, sent=None, products=0.0, refused="RESOURCE_EXHAUSTED: no")
    plan = make_plan(refused, 32, 1)
    assert (plan["fits"], plan["largest_batch"], plan["bytes_per_device"]["peak"]) == (False, 0, None)
    assert "RESOURCE_EXHAUSTED" in shown(refused)
    assert shown(measured(None))
    assert summary([unlimited, plan]).row_count == 2


@pytest.mark.usefixtures("unchecked_signatures")
def test_every_change_makes_the_learner_smaller_and_can_be_given():
    config = override_config(get_config("aloha_fold"), {"agent.freeze": (), "agent.actor_mode": "awr"})
    changes = list_changes(config, jax.devices())
    sizes = [sum(state.values()) for _, _, state in changes]
    assert sizes[0] > sizes[1] > max(sizes[2:])
    options = ["--fsdp-devices", "--agent.policy-optimizer.moments-dtype", "--agent.freeze", "--model.preset"]
    assert [how.split()[0] for _, how, _ in changes] == options
    # 52 GB of a policy with its average and moments, over eight devices; a quarter less with half the moments.
    assert sizes[0] - changes[0][2]["critics"] == pytest.approx(52e9 / 8, rel=0.01)
    assert sizes[0] - sizes[1] == pytest.approx(12.9e9 / 8, rel=0.01)
    for _, how, _ in changes:
        words = how.split()
        names = [name.removeprefix("--").replace("-", "_") for name in words[::2]]
        override_config(config, dict(zip(names, words[1::2], strict=True)), texts=True)
    lora = override_config(config, {"model.preset": "pi0_lora", "model.remat": "dots", "agent.policy_ema_decay": None})
    found = [how.split()[0] for _, how, _ in list_changes(lora, jax.devices()[:1])]
    assert found == ["--agent.policy-optimizer.moments-dtype", "--model.remat"]
