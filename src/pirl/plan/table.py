"""What a plan says, in words and tables: whether it fits first, then why."""

import math
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from pirl.plan.estimates import EFFICIENCY, Advice, Estimate, advise, make_estimate, needed_devices
from pirl.plan.measuring import Measurement
from pirl.plan.topologies import GIB, Topology
from pirl.words import short_duration, size

# How the kinds of bytes are called, in the order in which they are shown.
_KINDS = {
    "parameters": "trainable parameters",
    "frozen": "frozen parameters",
    "average": "EMA",
    "optimiser": "optimiser",
    "start policy": "start policy, which proposes chunks",
    "critics": "critics, target critics and optimiser",
}
_NEAR = 4
_LIMITS = {"compute": "operations", "memory": "memory traffic", "links": "links"}


@dataclass(frozen=True)
class Plan:
    """A measurement with all that follows from it."""

    topology: Topology
    measured: Measurement
    parts: int

    @property
    def estimate(self) -> Estimate:
        """What it says."""
        return make_estimate(self.measured, self.topology, self.parts)

    @property
    def advice(self) -> list[Advice]:
        """What to do where it does not fit."""
        return [] if self.estimate.fits else advise(self.measured, self.parts)


def describe(plan: Plan) -> list[Any]:
    """Everything about one topology, ready to be shown."""
    measured, estimate = plan.measured, plan.estimate
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_column(no_wrap=True)
    facts.add_column(justify="right", no_wrap=True)
    facts.add_column()
    for name, count, remark in _bytes(measured, estimate):
        if math.isfinite(count):
            facts.add_row(f"  {name}", close_size(count), remark)
    return ["", f"{measured.topology}: {verdict(plan)}", f"  compiled {plan.topology.describe()}", facts, *_rest(plan)]


def verdict(plan: Plan) -> str:
    """The answer in one line."""
    estimate, memory = plan.estimate, plan.measured.memory
    if estimate.fits is None or memory is None:
        return f"{close_size(estimate.peak)} on each device; the memory of the device is unknown."
    if not math.isfinite(estimate.peak):
        return f"DOES NOT FIT: more than {close_size(memory)} on {_each(plan.measured.devices)}."
    word = "fits" if estimate.fits else "DOES NOT FIT"
    return f"{word}: {close_size(estimate.peak)} of {close_size(memory)} on {_each(plan.measured.devices)}."


def summary(plans: list[Plan]) -> Any:
    """One line for each topology."""
    table = Table(box=None, pad_edge=False)
    columns = ("topology", "fits", "per device", "of", "step", "samples/s", "largest batch")
    for name in columns:
        table.add_column(name, justify="left" if name in ("topology", "fits") else "right")
    for plan in plans:
        table.add_row(*summary_cells(plan))
    return table


def summary_cells(plan: Plan) -> list[str]:
    """The cells of that line."""
    estimate, measured = plan.estimate, plan.measured
    seconds, largest = estimate.step_seconds, estimate.largest_batch
    timed = seconds if estimate.fits else None
    return [
        measured.topology,
        {True: "yes", False: "no", None: "?"}[estimate.fits],
        close_size(estimate.peak) if math.isfinite(estimate.peak) else "more",
        "?" if measured.memory is None else close_size(measured.memory),
        "" if timed is None else short_duration(timed),
        "" if timed is None else f"{measured.batch_size / timed:,.0f}",
        "?" if largest is None else f"{largest:,}",
    ]


def to_record(plan: Plan) -> dict[str, Any]:
    """The same for a program to read."""
    measured, estimate = plan.measured, plan.estimate
    return {
        "topology": measured.topology,
        "simulated": plan.topology.simulated,
        "devices": measured.devices,
        "batch_size": measured.batch_size,
        "parameters": measured.parameters,
        "fits": estimate.fits,
        "bytes_per_device": {
            **measured.state,
            "batch": measured.batch,
            "padding": measured.padding,
            "activations": estimate.activations,
            "workspace": _finite(estimate.workspace),
            "peak": _finite(estimate.peak),
            "available": measured.memory,
        },
        "flops_per_step": measured.flops,
        "bytes_sent_per_device": measured.sent,
        "seconds": {**estimate.seconds, "step": estimate.step_seconds},
        "largest_batch": estimate.largest_batch,
        "advice": [
            {"what": each.what, "how": each.how, "peak": _finite(each.peak), "fits": each.fits} for each in plan.advice
        ],
        "compile_seconds": measured.seconds,
    }


def _bytes(measured: Measurement, estimate: Estimate) -> list[tuple[str, float | int, str]]:
    rows: list[tuple[str, float | int, str]] = [
        (name, measured.state[kind], "") for kind, name in _KINDS.items() if measured.state.get(kind)
    ]
    rows += [("batch", measured.batch, "")]
    rows += [("padding", measured.padding, "arrays are stored in tiles")] if measured.padding > GIB / 100 else []
    rows += [
        ("activations", estimate.activations, "grows with the batch"),
        ("workspace", estimate.workspace, "gradients, gathered parameters, compiler buffers"),
        ("at the peak", estimate.peak, "upper bound; not all parts are needed at the same time"),
    ]
    return rows


def _rest(plan: Plan) -> list[str]:
    measured, estimate = plan.measured, plan.estimate
    counts = measured.parameters
    critics = f", and {counts['critic']:,} of the critics" if "critic" in counts else ""
    lines = [
        f"  parameters     {counts['policy']:,} of the policy, {counts['policy_trainable']:,} of them trainable{critics}",
        f"  operations     {_rounded(measured.flops / 1e12)} TFLOP for {measured.batch_size} samples, on all devices",
    ]
    if measured.sent is not None:
        told = {name: sent for name, sent in sorted(measured.sent.items()) if sent >= GIB / 1000}
        kinds = f" ({', '.join(f'{name} {close_size(sent)}' for name, sent in told.items())})" if told else ""
        lines += [f"  sent           {close_size(sum(measured.sent.values()))} by each device{kinds}"]
    if estimate.fits is not False and estimate.step_seconds is not None:
        parts = ", ".join(
            f"{_LIMITS[name]} {short_duration(seconds)} at {EFFICIENCY[name]:.0%}"
            for name, seconds in estimate.seconds.items()
        )
        about = f"{short_duration(estimate.step_seconds)}, {measured.batch_size / estimate.step_seconds:,.0f} samples/s"
        lines += [f"  update         about {about}: the longest of {parts}"]
    if estimate.largest_batch is not None:
        compiled = " and ".join(str(batch) for batch, _ in sorted(measured.temporary)) or "none"
        # A line tells little about what is far away: other parts of an update may then need the most.
        far = (
            "; plan again with this batch size before you rely on it"
            if estimate.largest_batch > _NEAR * measured.batch_size
            else ""
        )
        text = f"{estimate.largest_batch:,}, estimated by a line through batches of {compiled}{far}"
        lines += [f"  largest batch  {text if estimate.largest_batch else 'not even one sample on each device'}"]
    if measured.refused:
        lines += [f"  the compiler   {measured.refused}"]
    return lines + _advice(plan)


def _advice(plan: Plan) -> list[str]:
    if plan.estimate.fits is not False:
        return []
    untold = [
        f"    {change.how}  → less; plan again to see how much: {change.what}"
        for change in plan.measured.changes
        if not change.state
    ]
    if helpful := [each for each in plan.advice if each.fits]:
        lines = [f"    {each.how}  → about {close_size(each.peak)}: {each.what}" for each in helpful]
        return ["  what to do     any of these", *lines, *untold]
    needed = needed_devices(plan.measured, plan.parts)
    more = f"about {needed} such devices would be enough" if needed else "choose devices with more memory"
    best = [
        f" The smallest peak of any change is {close_size(each.peak)} ({each.how})."
        if math.isfinite(each.peak)
        else f" Or plan again with {each.how}."
        for each in plan.advice
    ]
    return [f"  what to do     no known change makes it fit here: {more}.{''.join(best)}", *untold]


def _each(devices: int) -> str:
    return f"each of {devices} devices" if devices > 1 else "one device"


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def close_size(count: float | int) -> str:
    """Bytes for people, who have to tell close calls apart."""
    return size(count, digits=2)
