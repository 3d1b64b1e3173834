"""Hardware by name, as plain data, and devices to compile for."""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from pirl.errors import ConfigError, did_you_mean
from pirl.imports import is_installed
from pirl.processes import machine_memory, read_host

GIB = 1 << 30
# GPUs per machine, and bytes per second that each sends to other machines: one adapter of 400 Gbit/s per GPU.
HOST_GPUS, NETWORK = 8, 50e9


@dataclass(frozen=True)
class Topology:
    """Connected devices of one kind. What depends on an unknown value is not estimated."""

    platform: str
    kind: str  # JAX's device_kind, or how it begins
    memory: float | None = None  # bytes that a program may use
    flops: float | None = None  # per second, dense, bfloat16 with sums in float32
    bandwidth: float | None = None  # bytes per second to its memory
    links: float | None = None  # bytes per second sent to neighbors, in one direction; of a torus, along one axis
    name: str = "cpu"
    shape: str = "8"
    count: int = 1

    @property
    def simulated(self) -> bool:
        """Whether CPU devices stand in for them in the compiler."""
        return self.name != "here" and self.platform != "tpu" and not self.described_gpu

    @property
    def described_gpu(self) -> bool:
        """Whether XLA compiles for a GPU by its description."""
        return self.platform == "gpu" and self.name != "here" and compiles_for_gpus()


# Platform, JAX's device_kind, GiB, TFLOP/s, GB/s to the memory, GB/s to a neighbor, example of a shape, devices per chip.
# The memory of TPUs is what their compiler calls available; of GPUs, XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 of all.
_CHIPS: dict[str, tuple[str, str, float, float, float, float, str, int]] = {
    "v4": ("tpu", "TPU v4", 15.25, 137.5, 614, 45, "2x2x2", 2),
    "v5e": ("tpu", "TPU v5 lite", 15.75, 197, 819, 90, "2x4", 1),
    "v5p": ("tpu", "TPU v5", 95.74, 459, 2765, 180, "2x2x2", 1),
    "v6e": ("tpu", "TPU v6 lite", 31.25, 918, 1640, 180, "2x4", 1),
    "a100": ("gpu", "NVIDIA A100-SXM4-80GB", 0.9 * 80, 312, 2039, 300, "8", 1),
    "a100-40": ("gpu", "NVIDIA A100-SXM4-40GB", 0.9 * 40, 312, 1555, 300, "8", 1),
    "b200": ("gpu", "NVIDIA B200", 0.9 * 179, 2250, 8000, 900, "8", 1),
    "h100": ("gpu", "NVIDIA H100", 0.9 * 80, 989, 3350, 450, "8", 1),
    "h200": ("gpu", "NVIDIA H200", 0.9 * 140, 989, 4800, 450, "8", 1),
    "l40s": ("gpu", "NVIDIA L40S", 0.9 * 45, 362, 864, 32, "8", 1),
    "rtx4090": ("gpu", "NVIDIA GeForce RTX 4090", 0.9 * 24, 165, 1008, 32, "8", 1),
    "rtx5090": ("gpu", "NVIDIA GeForce RTX 5090", 0.9 * 32, 209, 1792, 64, "8", 1),
}
# Of GPUs what their compiler asks for: compute capability, multiprocessors, and of each of these FP32 units, threads,
# shared memory, the most of it that a block may have; bytes of the L2 cache, GHz.
_AMPERE, _ADA, _HOPPER, _BLACKWELL = (
    ("8.0", 108, 64, 2048, 167_936, 166_912, 40 << 20, 1.41),
    ("8.9", 142, 128, 1536, 102_400, 101_376, 96 << 20, 2.52),
    ("9.0", 132, 128, 2048, 233_472, 232_448, 50 << 20, 1.98),
    ("10.0", 148, 128, 2048, 233_472, 232_448, 132_644_864, 1.965),
)
_GPUS = {
    "a100": _AMPERE,
    "a100-40": _AMPERE,
    "b200": _BLACKWELL,
    "h100": _HOPPER,
    "h200": _HOPPER,
    "l40s": _ADA,
    "rtx4090": ("8.9", 128, 128, 1536, 102_400, 101_376, 72 << 20, 2.52),
    "rtx5090": ("12.0", 170, 128, 1536, 131_072, 101_376, 96 << 20, 2.41),
}
CHIPS = {
    name: Topology(platform, kind, memory * GIB, teraflops * 1e12, bandwidth * 1e9, links * 1e9, name, shape, count)
    for name, (platform, kind, memory, teraflops, bandwidth, links, shape, count) in _CHIPS.items()
} | {"cpu": Topology("cpu", "cpu")}


def parse_topology(text: str) -> Topology:
    """`v5e:2x4`, `h100:8`, `cpu:8` or `here`, whose devices are known only where JAX runs."""
    name, _, shape = text.strip().lower().partition(":")
    if name == "here":
        if shape:
            raise ConfigError(f"--topology {text}: `here` means all devices of this machine; leave out :{shape}.")
        return replace(CHIPS["cpu"], name="here", count=0)
    if name not in CHIPS:
        known = [*CHIPS, "here"]
        raise ConfigError(f"no chip is named {name!r}. {did_you_mean(name, known)}Known: {', '.join(known)}.")
    chip = CHIPS[name]
    dimensions = chip.shape.count("x") + 1
    shape = shape or ("1" if dimensions == 1 else "")
    if not re.fullmatch("x".join([r"[1-9]\d{0,4}"] * dimensions), shape):
        wanted = f"shape of {dimensions} numbers" if dimensions > 1 else "number of devices"
        raise ConfigError(f"--topology {text} needs a {wanted}, such as {name}:{chip.shape}.")
    count = chip.count * math.prod(map(int, shape.split("x")))
    memory = _host_memory() / count if name == "cpu" else chip.memory
    links = NETWORK if chip.platform == "gpu" and count > HOST_GPUS else chip.links
    return replace(chip, name=f"{name}:{shape}", shape=shape, count=count, memory=memory, links=links)


def compiles_for_gpus() -> bool:
    """Whether XLA's compiler for NVIDIA GPUs is installed; it needs no GPU."""
    return any(is_installed(f"jax_cuda{version}_plugin") for version in (12, 13))


def check_topology(topology: Topology) -> None:
    """Raise if what compiles for it is not installed."""
    if topology.platform == "tpu" and not is_installed("libtpu"):
        raise ConfigError(
            f"--topology {topology.name}: compiling for TPUs needs their compiler, which runs on any Linux machine: "
            "pip install 'pirl[plan]'."
        )


def environment(topology: Topology) -> dict[str, str]:
    """Variables to set before JAX starts in the process that compiles for it."""
    if topology.name == "here":
        return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if topology.simulated:
        # The program is never run: skip the optimizations, which take most of the compile time.
        flags = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
        flags += f" --xla_force_host_platform_device_count={topology.count}"
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    if topology.platform == "gpu":
        return {"JAX_PLATFORMS": "cpu"}
    # Else libtpu searches this machine for a TPU, complains that there is none, and lets only one process load it.
    search = {"TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_SKIP_MDS_QUERY": "1"}
    return {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", **search}


def find_devices(topology: Topology) -> tuple[Topology, list[Any]]:
    """JAX devices to compile for, real or described; for `here`, also what is known of them."""
    import jax
    from jax.experimental import topologies

    if topology.platform == "tpu":
        # A host has up to 2×2 chips; smaller slices are parts of one.
        sizes = [*map(int, topology.shape.split("x")), 1, 1]
        host = [min(size, most) for size, most in zip(sizes, (2, 2, 1), strict=False)]
        try:
            found = topologies.get_topology_desc(topology.name, "tpu", chips_per_host_bounds=host)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            raise ConfigError(f"--topology {topology.name}: the compiler does not know this slice: {error}") from error
        return topology, list(found.devices)
    if topology.described_gpu:
        hosts = 1 if topology.count % HOST_GPUS else topology.count // HOST_GPUS
        machines = f"1x{hosts}x{topology.count // hosts}"
        target = gpu_target(topology)
        found = topologies.get_topology_desc(topology.name, "cuda", target_config=target, topology=machines)
        return topology, list(found.devices)
    devices = jax.devices()
    if topology.name == "here":
        kinds = [chip for chip in CHIPS.values() if devices[0].device_kind.startswith(chip.kind)]
        known = max(kinds, key=lambda chip: len(chip.kind), default=CHIPS["cpu"])
        limit = (devices[0].memory_stats() or {}).get("bytes_limit")
        memory = float(limit) if limit else known.memory
        if devices[0].platform == "cpu":
            memory = _host_memory() / len(devices)
        topology = replace(known, name="here", memory=memory, count=len(devices))
    if len(devices) < topology.count:
        raise ConfigError(f"{topology.name} needs {topology.count} devices; JAX started with {len(devices)}.")
    return topology, devices[: topology.count]


def gpu_target(topology: Topology) -> str:
    """The description that XLA compiles for (a GpuTargetConfigProto)."""
    capability, cores, units, threads, shared, block, cache, clock = _GPUS[topology.name.partition(":")[0]]
    major, minor = capability.split(".")
    exact = "ACCELERATED_FEATURES" if major in ("9", "10") else "NONE"
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {exact} }}
          core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {clock} l2_cache_size: {cache}
          memory_bandwidth: {topology.bandwidth:.0f} device_memory_size: {(topology.memory or 0) / 0.9:.0f}
          shared_memory_per_core: {shared} shared_memory_per_block_optin: {block} shared_memory_per_block: 49152
          threads_per_core_limit: {threads} threads_per_block_limit: 1024 threads_per_warp: 32
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          runtime_version: "12.8.0" dnn_version: "9.10.0"
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }}
        device_description_str: "{topology.kind}"
    """


def _host_memory() -> float:
    """Bytes that this machine, or the container around it, has."""
    return float(read_host().total or machine_memory())
