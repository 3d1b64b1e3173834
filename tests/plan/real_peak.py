"""Make one update of a small policy, and print the bytes that the compiler predicts and that the process takes.

Run as a process of its own, with one device: `python real_peak.py BATCH_SIZE`.
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pirl.config import get_config
from pirl.plan.measure import abstract_batch, abstract_setup, device_bytes, trace_update
from pirl.training.setup import create_agent


def resident(name: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most since `forget`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def forget() -> None:
    """Let the most begin with what there is now."""
    Path("/proc/self/clear_refs").write_text("5")


def main(batch_size: int) -> None:
    config = dataclasses.replace(get_config("demo_state_bc"), batch_size=batch_size)
    setup = abstract_setup(config, jax.devices()[:1])
    compiled = trace_update(setup).lower().compile()
    shapes = abstract_batch(setup)
    predicted = device_bytes(shapes) + compiled.memory_analysis().temp_size_in_bytes
    before = resident("VmRSS")
    agent = create_agent(setup)
    predicted += device_bytes(agent)
    batch = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype, device=leaf.sharding), shapes)
    jax.block_until_ready((agent, batch))
    key = jax.device_put(jax.random.key(0), NamedSharding(setup.mesh, PartitionSpec()))
    forget()
    jax.block_until_ready(compiled(agent, batch, key))
    print(json.dumps({"predicted": predicted, "taken": resident("VmHWM") - before}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
