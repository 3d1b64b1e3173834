"""From what was measured to what decides: does it fit, how long does an update take, how large may a batch be."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pirl.plan.advice import SHARDING
from pirl.plan.measuring import Measurement
from pirl.plan.memory import Fit, fit_line
from pirl.plan.topologies import Topology

# What of a chip's best is usually reached: in large matrix products with all around them, from its memory, on its links.
EFFICIENCY = {"compute": 0.4, "memory": 0.7, "links": 0.7}


@dataclass(frozen=True)
class Estimate:
    """What a measurement says about a run. Sizes are bytes on each device."""

    peak: float
    activations: float
    """What grows with the batch."""
    workspace: float
    """What does not: gradients, parameters gathered for use, and the compiler's own."""
    fits: bool | None
    """None where nobody knows how much memory there is."""
    largest_batch: int | None
    """The largest that fits, by the line through what was compiled; 0 if none does."""
    seconds: dict[str, float]
    """What an update would take if nothing but compute, memory or links were the limit; only what is known."""

    @property
    def step_seconds(self) -> float | None:
        """The slowest of them: what overlaps is not added."""
        return max(self.seconds.values(), default=None)

    @property
    def limit(self) -> str | None:
        """Which one that is."""
        return max(self.seconds, key=lambda name: self.seconds[name], default=None)


@dataclass(frozen=True)
class Advice:
    """A change, and where it would lead: the bytes at the peak, and whether that is few enough."""

    what: str
    how: str
    peak: float
    fits: bool


def make_estimate(measured: Measurement, topology: Topology, parts: int) -> Estimate:
    """Put it together; `parts` are the steps in which gradients are accumulated."""
    fit, samples = _line(measured, parts), measured.batch_size / measured.devices / parts
    held = sum(measured.state.values()) + measured.batch + measured.padding
    peak = held + fit.at(samples)
    memory = measured.memory
    return Estimate(
        peak=peak,
        activations=fit.slope * samples,
        workspace=fit.fixed,
        fits=None if memory is None else peak <= memory,
        largest_batch=None if memory is None else _largest(measured, memory, parts),
        seconds=dict(_seconds(measured, topology)),
    )


def advise(measured: Measurement, parts: int) -> list[Advice]:
    """What makes it fit, the least change first: all that does, else all there is, and at last more devices."""
    memory = measured.memory
    if memory is None:
        return []
    fit, gradients = _line(measured, parts), measured.state.get("parameters", 0)
    local = measured.batch_size // measured.devices

    def peak(state: dict[str, int], samples: float) -> float:
        # Gradients are as large as what learns; the rest of what does not grow is taken to stay.
        fixed = max(0.0, fit.fixed - gradients) + min(gradients, state.get("parameters", 0))
        return sum(state.values()) + measured.batch + measured.padding + fixed + fit.slope * samples

    found = []
    states = [
        ("", "", measured.state),
        *((change.what, change.how, change.state) for change in measured.changes if change.state),
    ]
    for what, how, state in states:
        for more in (1, *(n for n in range(parts + 1, local + 1) if local % n == 0)):
            if not what and more == 1:
                continue
            size = peak(state, local / max(parts, more))
            steps = "" if more == 1 else f"process a batch in {more} parts"
            flag = "" if more == 1 else f"--agent.accumulation-steps {more}"
            words = ", and ".join(filter(None, (what, steps)))
            found.append(Advice(words, " ".join(filter(None, (how, flag))), size, size <= memory))
            if size <= memory:
                break
    helpful = [advice for advice in found if advice.fits]
    return helpful or sorted(found, key=lambda advice: advice.peak)[:1]


def needed_devices(measured: Measurement, parts: int) -> int | None:
    """How many devices of this kind would do, the learner spread over them, one sample on each; none if too many."""
    memory, fit = measured.memory, _line(measured, parts)
    if memory is None:
        return None
    # The change that only shards comes first; without it, the learner is sharded already.
    first = measured.changes[0] if measured.changes and measured.changes[0].what == SHARDING else None
    state = first.state if first else measured.state
    # Gradients are spread as the learner is; the rest of what does not grow is taken to stay.
    divided = (sum(state.values()) + state.get("parameters", 0)) * measured.devices
    rest = max(0.0, fit.fixed - measured.state.get("parameters", 0)) + measured.padding
    sample = fit.slope + measured.batch * measured.devices / measured.batch_size
    candidates = (measured.devices * 2**power for power in range(1, 8))
    return next((devices for devices in candidates if divided / devices + rest + sample <= memory), None)


def _line(measured: Measurement, parts: int) -> Fit:
    points = [(batch / measured.devices / parts, size) for batch, size in measured.temporary]
    return fit_line(points) if points else Fit(math.inf, 0.0)


def _largest(measured: Measurement, memory: float, parts: int) -> int:
    fit, unit = _line(measured, parts), measured.devices * parts
    left = memory - sum(measured.state.values()) - measured.padding - fit.fixed
    sample = fit.slope + parts * measured.batch * measured.devices / measured.batch_size
    return unit * max(0, math.floor(left / sample)) if math.isfinite(left) else 0


def _seconds(measured: Measurement, topology: Topology) -> Iterator[tuple[str, float]]:
    chip = topology.chip
    if chip.flops is not None:
        yield "compute", measured.flops / measured.devices / chip.flops / EFFICIENCY["compute"]
    if chip.bandwidth is not None and measured.products is not None:
        # The learner is read and written once, besides what matrix products read and write.
        moved = 2 * sum(measured.state.values()) + measured.products
        yield "memory", moved / chip.bandwidth / EFFICIENCY["memory"]
    if topology.links is not None and measured.sent is not None:
        yield "links", sum(measured.sent.values()) / topology.links / EFFICIENCY["links"]
