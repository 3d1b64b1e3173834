"""Names of hardware."""

from types import SimpleNamespace

import jax
import pytest

from pirl import processes
from pirl.errors import ConfigError
from pirl.plan.topologies import (
    CHIPS,
    GIB,
    NETWORK,
    compiles_for_gpus,
    environment,
    find_devices,
    parse_topology,
)


def test_a_name_and_a_shape_give_so_many_devices():
    counts = {"v5e:2x4": 8, "V6e:4x4": 16, "v4:2x2x1": 8, "h100:8": 8, "a100-40:4": 4, "rtx4090": 1, "cpu:8": 8}
    for text, count in counts.items():
        topology = parse_topology(text)
        assert topology.count == count
        assert topology.simulated == (
            topology.platform == "cpu" or (topology.platform == "gpu" and not compiles_for_gpus())
        )
    one, two = parse_topology("h100:8"), parse_topology("h100:16")
    assert two.links == NETWORK < one.links, "several machines are as slow as the network between them"
    assert parse_topology("v5p:4x4x4").links == CHIPS["v5p"].links
    assert environment(parse_topology("h100:4"))["XLA_FLAGS"].endswith("device_count=4")
    assert find_devices(one) == (one, jax.devices())
    with pytest.raises(ConfigError, match="JAX started with 8"):
        find_devices(two)


def test_a_wrong_name_or_shape_is_answered_with_a_right_one():
    remedies = {"h10:8": "h100?", "v5e": "v5e:2x4", "v5p:2x4": "v5p:2x2x2", "v5e:0x4": "v5e:2x4", "h100:2x4": "h100:8"}
    for text, remedy in {**remedies, "h100:0": "h100:8", "": "Known", "here:8": "leave out :8"}.items():
        with pytest.raises(ConfigError) as refusal:
            parse_topology(text)
        assert remedy in str(refusal.value)


def test_devices_of_this_machine_are_recognized_with_their_memory(monkeypatch, tmp_path):
    for name, text in {"memory.max": GIB, "memory.current": 0, "memory.stat": "anon 5"}.items():
        (tmp_path / name).write_text(f"{text}\n")
    container = tuple(tmp_path / name for name in ("memory.max", "memory.current", "memory.stat"))
    monkeypatch.setattr(processes, "_CGROUPS", (container,))
    assert parse_topology("cpu:2").memory == GIB / 2, "of a container, what it may use"
    here, devices = find_devices(parse_topology("here"))
    assert (here.name, here.platform, here.memory, len(devices)) == ("here", "cpu", GIB / 8, 8)
    stats = {"bytes_limit": 3 * GIB}
    chip = SimpleNamespace(device_kind="TPU v5 lite", platform="tpu", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "devices", lambda: [chip] * 4)
    here, _ = find_devices(parse_topology("here"))
    assert (here.flops, here.memory, here.count) == (CHIPS["v5e"].flops, 3 * GIB, 4)
