"""What a run needs on a topology, measured where JAX may be started for it: traced, compiled, taken apart."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from pirl.config import RLTrainConfig, check_layout
from pirl.plan.advice import Change, list_changes
from pirl.plan.compiling import abstract_agent, abstract_batch_in_place, abstract_setup, trace_update
from pirl.plan.flops import count_flops
from pirl.plan.memory import device_bytes, read_exhausted, state_device_bytes
from pirl.plan.topologies import Topology, find_devices, resolve_here
from pirl.plan.traffic import Traffic, read_traffic
from pirl.training.setup import Setup

Say = Callable[[str], None]


@dataclass(frozen=True)
class Measurement:
    """What was found out about a run on a topology. Sizes are bytes on each device, but for those of all together."""

    topology: str
    devices: int
    kind: str
    """How JAX calls the chip, or how that begins."""
    memory: float | None
    """What a program may use."""
    batch_size: int
    parameters: dict[str, int]
    state: dict[str, int]
    """Of the learner, by what it is for."""
    batch: int
    padding: int
    """What arrays take beyond their content, because the chip keeps them in tiles."""
    temporary: list[tuple[int, float]]
    """Batch sizes that were compiled, and what each needs beside the learner and the batch."""
    flops: int
    """Of one update, all devices together."""
    sent: dict[str, float] | None
    """By each device in one update, to others; none where the program did not compile, for want of memory."""
    products: float | None
    """Read and written by matrix products."""
    refused: str
    """What the compiler said where it found the memory too small."""
    changes: list[Change]
    """What could be done about too little memory."""
    seconds: float

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "Measurement":
        """What `asdict` made, also after a way through JSON."""
        changes = [Change(**change) for change in values["changes"]]
        points = [(int(batch), float(size)) for batch, size in values["temporary"]]
        return cls(**{**values, "changes": changes, "temporary": points})


@dataclass(frozen=True)
class _Program:
    """An update compiled for one batch size; where memory is too small, what is known of it nevertheless."""

    temporary: float | None
    padding: int = 0
    traffic: Traffic | None = None
    refused: str = ""


def measure(config: RLTrainConfig, topology: Topology, say: Say = lambda _: None) -> Measurement:
    """Compile the update of a run for a topology, twice: what is temporary is a line in the size of the batch."""
    devices = find_devices(topology)
    topology = replace(resolve_here(topology), count=len(devices))
    check_layout(config, len(devices))
    setup, began = abstract_setup(config, devices), time.perf_counter()
    agent: Any = abstract_agent(setup)
    say("tracing the update")
    traced = trace_update(setup)
    flops = count_flops(traced.jaxpr)
    points, program = [], None
    for size in (config.batch_size, other_batch(config, len(devices))):
        say(f"compiling the update for a batch of {size}")
        other = replace(setup, config=replace(config, batch_size=size))
        compiled = _compile(other, traced if size == config.batch_size else trace_update(other), program is None)
        program = program or compiled
        points += [] if compiled.temporary is None else [(size, compiled.temporary)]
    assert program is not None
    say("looking for what could be changed")
    return Measurement(
        topology=topology.name,
        devices=len(devices),
        kind=topology.chip.kind,
        memory=topology.chip.memory,
        batch_size=config.batch_size,
        parameters=agent.parameter_counts(),
        state=state_device_bytes(agent),
        batch=device_bytes(abstract_batch_in_place(setup)),
        padding=program.padding,
        temporary=points,
        flops=flops,
        sent=None if program.traffic is None else program.traffic.sent,
        products=None if program.traffic is None else program.traffic.products,
        refused=program.refused,
        changes=list_changes(config, devices),
        seconds=time.perf_counter() - began,
    )


def to_plain(measurement: Measurement) -> dict[str, Any]:
    """Ready for JSON."""
    return asdict(measurement)


def other_batch(config: RLTrainConfig, devices: int) -> int:
    """A second batch size to compile: half the first, or twice where it cannot be halved."""
    unit = devices * config.agent.accumulation_steps
    count = config.batch_size // unit
    return unit * (count // 2 if count > 1 else 2)


def _compile(setup: Setup, traced: jax.stages.Traced, with_traffic: bool) -> _Program:
    held = device_bytes(abstract_agent(setup)) + device_bytes(abstract_batch_in_place(setup))
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message = str(error).splitlines()[0]
        return _Program(read_exhausted(message), refused=message)
    memory: Any = compiled.memory_analysis()
    # The learner is updated in place; what else comes out is small.
    extra = memory.output_size_in_bytes - memory.alias_size_in_bytes
    traffic = read_traffic(compiled.as_text() or "", setup.mesh.size) if with_traffic else None
    padding = max(0, memory.argument_size_in_bytes - held)
    return _Program(float(memory.temp_size_in_bytes + max(0, extra)), padding, traffic)
