"""What the memory monitor says is what is there."""

import logging

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pirl.processes import HostMemory
from pirl.training import logging as memory
from pirl.training.logging import MemoryMonitor, live_bytes
from pirl.training.sharding import make_mesh

GIB = 2**30


def test_arrays_are_counted_on_the_devices_they_lie_on():
    mesh = make_mesh(4)
    before = live_bytes()
    array = np.zeros((1024, 256), np.float32)
    kept = [
        jax.device_put(array, NamedSharding(mesh, PartitionSpec("fsdp"))),
        jax.device_put(array, NamedSharding(mesh, PartitionSpec())),
        jax.device_put(array, jax.devices()[3]),
    ]
    now = live_bytes()
    added = {device.id: now[device.id] - before.get(device.id, 0) for device in jax.devices()}
    expected = {device.id: array.nbytes // 4 + array.nbytes for device in jax.devices()}
    expected[jax.devices()[3].id] += array.nbytes
    assert added == expected
    for each in kept:
        each.delete()
    assert live_bytes() == before


def test_a_peak_outlives_what_caused_it():
    monitor = MemoryMonitor()
    begun = monitor.take("begin")
    array = jax.device_put(np.zeros(8 << 20, np.uint8), jax.devices()[0])
    held = monitor.take("data")
    array.delete()
    after = monitor.take("update")
    assert held["memory/data/device_0"] - begun["memory/begin/device_0"] == pytest.approx(2**-7)
    assert after["memory/update/device_0"] == begun["memory/begin/device_0"]
    assert after["memory/update/device_peak"] >= held["memory/data/device_0"]
    assert set(after) == {
        f"memory/update/{name}"
        for name in (
            *("host", "host_peak", "host_available", "device", "device_peak"),
            *(f"device_{number}" for number in range(jax.local_device_count())),
        )
    }


def test_a_device_that_keeps_an_account_is_believed(monkeypatch):
    class Accelerator:
        def __init__(self, number, used, peak):
            self.id, self._stats = number, {"bytes_in_use": used, "peak_bytes_in_use": peak}

        def memory_stats(self):
            return self._stats

    devices = [Accelerator(0, GIB, 3 * GIB), Accelerator(1, 2 * GIB, 2 * GIB)]
    monkeypatch.setattr(memory.jax, "local_devices", lambda: devices)
    values = MemoryMonitor().take("update")
    assert values["memory/update/device"] == values["memory/update/device_1"] == 2
    assert values["memory/update/device_0"] == 1
    assert values["memory/update/device_peak"] == 3


def test_a_nearly_full_host_is_said_once(monkeypatch, caplog):
    monitor = MemoryMonitor()
    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(memory, "read_host", lambda: HostMemory(GIB, GIB, GIB, 16 * GIB))
        monitor.take("data")
        assert not caplog.records
        monkeypatch.setattr(memory, "read_host", lambda: HostMemory(GIB, GIB, GIB // 2, 16 * GIB))
        monitor.take("update")
        monitor.take("update")
    (record,) = caplog.records
    assert "(update): 0.50 of 16.0 GiB are left" in record.getMessage()
