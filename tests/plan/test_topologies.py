"""Names of machines are understood, and misunderstandings are answered."""

import importlib.util

import pytest

from pirl import memory
from pirl.errors import ConfigError
from pirl.plan import topologies
from pirl.plan.topologies import CHIPS, GIB, check_topology, environment, find_devices, parse_topology


@pytest.mark.parametrize(
    ("text", "devices", "simulated"),
    [
        *(("v5e:2x4", 8, False), ("v5p:2x2x2", 8, False), ("V6e:4x4", 16, False), ("v4:2x2x1", 8, False)),
        *(("h100:8", 8, True), ("a100-40:4", 4, True), ("rtx4090", 1, True), ("cpu:8", 8, True)),
    ],
)
def test_a_name_and_a_shape_are_so_many_devices(text, devices, simulated):
    topology = parse_topology(text)
    assert (topology.name.partition(":")[0], topology.count) == (text.lower().partition(":")[0], devices)
    assert topology.simulated is simulated
    assert ("simulated" in topology.describe()) is simulated


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h10:8", "no chip is named 'h10'. Did you mean h100?"),
        ("v5:2x4", "Did you mean v5"),
        ("", "no chip is named ''"),
        ("v5e", "needs a shape of 2 numbers, such as v5e:2x4"),
        ("v5e:8", "needs a shape of 2 numbers, such as v5e:2x4"),
        ("v5p:2x4", "needs a shape of 3 numbers, such as v5p:2x2x2"),
        ("v5e:0x4", "needs a shape"),
        ("h100:2x4", "needs a number of devices, such as h100:8"),
        ("h100:0", "needs a number of devices"),
        ("here:8", "leave out :8"),
    ],
)
def test_a_slip_is_named_with_what_was_meant(text, words):
    with pytest.raises(ConfigError) as refusal:
        parse_topology(text)
    assert words in str(refusal.value)


def test_tpus_without_their_compiler_are_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'pirl\[plan\]'"):
        check_topology(parse_topology("v5e:2x4"))
    check_topology(parse_topology("h100:8"))


def test_many_machines_are_as_slow_as_the_network_between_them():
    one, two = parse_topology("h100:8"), parse_topology("h100:16")
    assert one.links == CHIPS["h100"].links
    assert two.links == topologies.NETWORK < one.links
    assert parse_topology("v5p:4x4x4").links == CHIPS["v5p"].links


def test_memory_is_less_than_is_written_on_the_box():
    sizes = {"v5e": 16, "v6e": 32, "v5p": 96, "h100": 80, "a100": 80, "a100-40": 40, "l40s": 48, "rtx4090": 24}
    for name, size in sizes.items():
        assert 0.8 * size * GIB < CHIPS[name].memory < size * GIB, name


def test_the_memory_of_this_machine_is_what_its_container_lets_it_have(monkeypatch, tmp_path):
    files = {"memory.max": GIB, "memory.current": 0, "memory.stat": "anon 5"}
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    whole = parse_topology("cpu:2").chip.memory
    monkeypatch.setattr(memory, "_GROUPS", (tuple(tmp_path / name for name in files),))
    assert parse_topology("cpu:2").chip.memory == GIB / 2 < whole
    assert topologies.resolve_here(parse_topology("here")).chip.memory == GIB / 8


def test_simulated_devices_are_asked_for_before_jax_starts():
    assert "device_count=4" in environment(parse_topology("h100:4"))["XLA_FLAGS"]
    assert "XLA_FLAGS" not in environment(parse_topology("here"))
    assert len(find_devices(parse_topology("h100:8"))) == 8
    with pytest.raises(ConfigError, match="JAX started with 8"):
        find_devices(parse_topology("h100:16"))


def test_what_is_here_is_found_out():
    here = topologies.resolve_here(parse_topology("here"))
    assert (here.count, here.chip.platform) == (8, "cpu")
    assert here.chip.memory * 8 > GIB
    told = topologies.found_here(parse_topology("here"), "NVIDIA H100", 4)
    assert (told.chip, told.count, told.here) == (CHIPS["h100"], 4, True)
    assert topologies.found_here(parse_topology("a100:8"), "NVIDIA H100", 4) == parse_topology("a100:8")
