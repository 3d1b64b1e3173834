"""Machines by name: what each of their chips can hold, compute and send, and devices to compile for."""

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pirl.errors import ConfigError, did_you_mean
from pirl.memory import machine_memory, read_host
from pirl.packages import is_installed

if TYPE_CHECKING:
    import jax

GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """One device, as its maker describes it. What is not known is none, and what depends on it is not estimated."""

    platform: Literal["tpu", "gpu", "cpu"]
    memory: float | None
    """Bytes that a program may use."""
    flops: float | None = None
    """Operations per second at its best, dense, in bfloat16 with sums in float32."""
    bandwidth: float | None = None
    """Bytes per second between the chip and its memory."""
    links: float | None = None
    """Bytes per second that it sends to its neighbours in the same machine (TPUs: in the same slice)."""
    kind: str = ""
    """How JAX calls it, or how that begins."""
    devices: int = 1
    """Devices that a chip counts as."""


def _tpu(memory: float, teraflops: float, bandwidth: float, links: float, kind: str, devices: int = 1) -> Chip:
    return Chip("tpu", memory * GIB, teraflops * 1e12, bandwidth * 1e9, links * 1e9, kind, devices)


def _gpu(memory: float, teraflops: float, bandwidth: float, links: float, kind: str) -> Chip:
    # With XLA_PYTHON_CLIENT_MEM_FRACTION=0.9; the rest is the driver's, and what libraries need.
    return Chip("gpu", 0.9 * memory * GIB, teraflops * 1e12, bandwidth * 1e9, links * 1e9, kind)


# Memory of TPUs is what their compiler says is available. Links are one direction; of a torus, along one axis.
CHIPS: dict[str, Chip] = {
    "v4": _tpu(15.25, 137.5, 614.0, 45.0, "TPU v4", devices=2),
    "v5e": _tpu(15.75, 197.0, 819.0, 90.0, "TPU v5 lite"),
    "v5p": _tpu(95.74, 459.0, 2765.0, 180.0, "TPU v5"),
    "v6e": _tpu(31.25, 918.0, 1640.0, 180.0, "TPU v6 lite"),
    "a100": _gpu(80.0, 312.0, 2039.0, 300.0, "NVIDIA A100-SXM4-80GB"),
    "a100-40": _gpu(40.0, 312.0, 1555.0, 300.0, "NVIDIA A100-SXM4-40GB"),
    "b200": _gpu(179.0, 2250.0, 8000.0, 900.0, "NVIDIA B200"),
    "h100": _gpu(80.0, 989.0, 3350.0, 450.0, "NVIDIA H100"),
    "h200": _gpu(140.0, 989.0, 4800.0, 450.0, "NVIDIA H200"),
    "l40s": _gpu(45.0, 362.0, 864.0, 32.0, "NVIDIA L40S"),
    "rtx4090": _gpu(24.0, 165.0, 1008.0, 32.0, "NVIDIA GeForce RTX 4090"),
    "cpu": Chip("cpu", None, kind="cpu"),
}
_EXAMPLES = {2: "2x4", 3: "2x2x2"}
# GPUs that share a machine, and what each sends to another: one adapter of 400 Gbit/s for each.
HOST_GPUS = 8
NETWORK = 50e9


@dataclass(frozen=True)
class Topology:
    """Some chips, joined."""

    name: str
    chip: Chip
    count: int
    """Devices."""

    @property
    def here(self) -> bool:
        """Whether these are the devices of this machine."""
        return self.name == "here"

    @property
    def simulated(self) -> bool:
        """Whether the compiler has to make do with as many devices of the CPU."""
        return self.chip.platform != "tpu" and not self.here

    @property
    def links(self) -> float | None:
        """Bytes per second that a device sends; the slowest link decides where there are several machines."""
        many = self.chip.platform == "gpu" and self.count > HOST_GPUS
        return NETWORK if many and self.chip.links is not None else self.chip.links

    def describe(self) -> str:
        """How the update is compiled for it."""
        if self.here:
            return "for the devices of this machine"
        if self.simulated:
            if self.count == 1:
                return "for 1 simulated CPU device, which stands in for the real one"
            return f"for {self.count} simulated CPU devices, which stand in for the real ones"
        return f"by the TPU's own compiler, for {self.count} devices"


def parse_topology(text: str) -> Topology:
    """`v5e:2x4`, `h100:8`, `cpu:8` or `here`."""
    name, _, shape = text.strip().lower().partition(":")
    if name == "here":
        if shape:
            raise ConfigError(f"--topology {text}: `here` means all devices of this machine; leave out :{shape}.")
        return Topology("here", CHIPS["cpu"], 0)  # what there is, is known where JAX runs
    if name not in CHIPS:
        known = ", ".join([*CHIPS, "here"])
        raise ConfigError(f"no chip is named {name!r}. {did_you_mean(name, [*CHIPS, 'here'])}Known: {known}.")
    chip = CHIPS[name]
    if chip.platform == "tpu":
        dims = 2 if name in ("v5e", "v6e") else 3
        if not re.fullmatch("x".join([r"[1-9]\d*"] * dims), shape):
            raise ConfigError(f"--topology {text} needs a shape of {dims} numbers, such as {name}:{_EXAMPLES[dims]}.")
        return Topology(f"{name}:{shape}", chip, chip.devices * math.prod(map(int, shape.split("x"))))
    if not re.fullmatch(r"[1-9]\d{0,4}", shape or "1"):
        raise ConfigError(f"--topology {text} needs a number of devices, such as {name}:8.")
    count = int(shape or 1)
    if chip.platform == "cpu":
        chip = replace(chip, memory=_host_memory() / count)
    return Topology(f"{name}:{count}", chip, count)


def check_topology(topology: Topology) -> None:
    """Raise if what compiles for it is not installed."""
    if topology.chip.platform == "tpu" and not topology.here and not is_installed("libtpu"):
        raise ConfigError(
            f"--topology {topology.name}: compiling for TPUs needs their compiler, which runs on any Linux machine: "
            "pip install 'pirl[plan]'."
        )


def environment(topology: Topology) -> dict[str, str]:
    """What has to be set before JAX starts, in the process that compiles for it."""
    if topology.here:
        return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    settings = {"JAX_PLATFORMS": "cpu"}
    if topology.simulated:
        # The program is never run: what makes it fast, and takes the compiler most of its time, is left out.
        settings["XLA_FLAGS"] = (
            "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
            f"--xla_force_host_platform_device_count={topology.count}"
        )
    else:
        # The compiler looks for the machine that it runs on, complains at length if that is no TPU, and lets only one
        # process load it at a time, though nothing is run.
        settings |= {"TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost"}
        settings |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return settings


def find_devices(topology: Topology) -> "list[jax.Device]":
    """Its devices, to compile for: real ones, or descriptions that nothing can run on."""
    import jax

    if topology.here or topology.simulated:
        devices = jax.devices()
        if topology.simulated and len(devices) < topology.count:
            raise ConfigError(
                f"{topology.name} needs {topology.count} simulated devices; JAX started with {len(devices)}."
            )
        return devices if topology.here else devices[: topology.count]
    from jax.experimental import topologies

    shape = [int(size) for size in topology.name.partition(":")[2].split("x")]
    # A host has up to 2 × 2 chips; smaller slices are parts of one.
    host = [min(size, most) for size, most in zip([*shape, 1, 1], (2, 2, 1), strict=False)]
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology.name, chips_per_host_bounds=host)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise ConfigError(f"--topology {topology.name}: the compiler does not know this slice: {error}") from error
    return list(found.devices)


def resolve_here(topology: Topology) -> Topology:
    """The devices there are, with what is known of their kind and their memory."""
    import jax

    if not topology.here:
        return topology
    device = jax.devices()[0]
    kinds = sorted(CHIPS.values(), key=lambda chip: len(chip.kind), reverse=True)
    known = next((chip for chip in kinds if device.device_kind.startswith(chip.kind)), CHIPS["cpu"])
    limit = (device.memory_stats() or {}).get("bytes_limit")
    memory = float(limit) if limit else known.memory
    if device.platform == "cpu":
        memory = _host_memory() / jax.local_device_count()
    return Topology("here", replace(known, memory=memory), jax.device_count())


def found_here(topology: Topology, kind: str, count: int) -> Topology:
    """What `here` turned out to be, in the process that looked."""
    if not topology.here:
        return topology
    return Topology("here", next(chip for chip in CHIPS.values() if chip.kind == kind), count)


def _host_memory() -> float:
    """What the processes of this machine, or of the container they are in, may use."""
    return float(read_host().total or machine_memory())
