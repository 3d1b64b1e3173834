"""How much memory a run takes, on the host and on each device, at named points; measured without waiting for anything."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax

from pirl.processes import read_host

_GIB = 2.0**30
# Below this share of its memory the host is nearly full; the kernel may end the process at any time.
_NEARLY_FULL = 0.05
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes in use on one device, and the most there were."""

    used: int
    peak: int


@dataclass
class MemoryMonitor:
    """Takes measurements, remembers the highest ones, and warns once when the host is nearly full."""

    _peaks: dict[int, int] = field(default_factory=dict)
    _warned: bool = False

    def take(self, point: str) -> dict[str, float]:
        """Metrics in GiB: `memory/<point>/host`, `host_peak`, `host_available`, `device`, `device_peak`.

        `device` is the fullest of this process's devices; where there are several, `device_0`, … follow. Peaks are of the
        whole run so far. A device that keeps no account (the CPU) has the arrays that are alive, at the moments of
        measurement: what a program holds while it runs is not among them.
        """
        host, devices = read_host(), self._read_devices()
        if host.available is not None and host.total and host.available < _NEARLY_FULL * host.total:
            self._warn(point, host.available, host.total)
        values = {
            "host": host.used,
            "host_peak": host.peak,
            "host_available": host.available,
            "device": max(device.used for device in devices.values()),
            "device_peak": max(device.peak for device in devices.values()),
        }
        if len(devices) > 1:
            values |= {f"device_{number}": device.used for number, device in enumerate(devices.values())}
        return {f"memory/{point}/{name}": value / _GIB for name, value in values.items() if value is not None}

    def _read_devices(self) -> Mapping[int, DeviceMemory]:
        devices = jax.local_devices()
        kept = {device.id: device.memory_stats() for device in devices}
        alive = live_bytes() if any(stats is None for stats in kept.values()) else {}
        found = {}
        for number, stats in kept.items():
            used = alive.get(number, 0) if stats is None else int(stats["bytes_in_use"])
            reported = 0 if stats is None else int(stats.get("peak_bytes_in_use", 0))
            self._peaks[number] = max(self._peaks.get(number, 0), used, reported)
            found[number] = DeviceMemory(used, self._peaks[number])
        return found

    def _warn(self, point: str, available: int, total: int) -> None:
        if not self._warned:
            _logger.warning(
                "the host's memory is nearly full (%s): %.2f of %.1f GiB are left. Fewer --evaluation.envs, a smaller "
                "--data.prefetch or --online.capacity need less.",
                *(point, available / _GIB, total / _GIB),
            )
        self._warned = True


def live_bytes() -> dict[int, int]:
    """Bytes of the arrays that are alive, by the number of the device."""
    found: dict[int, int] = {}
    for array in jax.live_arrays():
        sharding = array.sharding
        size = array.dtype.itemsize
        for length in sharding.shard_shape(array.shape):
            size *= length
        for device in sharding.addressable_devices:
            found[device.id] = found.get(device.id, 0) + size
    return found
