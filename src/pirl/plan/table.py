"""What a measurement says of a run: whether it fits, how long an update takes, the largest batch, what to change."""

import functools
import math
from typing import Any

from rich.table import Table

from pirl.plan.measure import SHARD, Measurement
from pirl.plan.topologies import GIB
from pirl.text import format_seconds, format_size

# Kinds of bytes on a device: how they are shown, and a remark.
_KINDS = {
    "parameters": ("trainable parameters", ""),
    "frozen": ("frozen parameters", ""),
    "average": ("EMA", ""),
    "optimizer": ("optimizer", ""),
    "start policy": ("start policy, which proposes chunks", ""),
    "critics": ("critics, target critics and optimizer", ""),
    "batch": ("batch", ""),
    "padding": ("padding", "arrays are stored in tiles"),
    "activations": ("activations", "grows with the batch"),
    "workspace": ("workspace", "gradients, gathered parameters, compiler buffers"),
    "peak": ("at the peak", "upper bound; not all parts are needed at the same time"),
}
# What may limit an update, and the share of a chip's best that is usually reached.
_LIMITS = {"compute": ("operations", 0.4), "memory": ("memory traffic", 0.7), "links": ("links", 0.7)}
# Two decimals tell close calls apart.
format_bytes = functools.partial(format_size, digits=2)


def make_plan(m: Measurement, batch_size: int, parts: int) -> dict[str, Any]:
    """The plan as `--json` writes it; `parts` are the accumulation steps. Sizes are bytes on each device."""
    topology, count, memory = m.topology, m.topology.count, m.topology.memory
    (fixed, slope), state = fit_line(m, parts), sum(m.state.values())
    activations = slope * (batch_size / count / parts)
    peak = state + m.batch + m.padding + (fixed + activations)
    fits, largest = None, None
    if memory is not None:
        fits, left = peak <= memory, memory - state - m.padding - fixed
        sample = slope + parts * m.batch * count / batch_size
        largest = count * parts * max(0, math.floor(left / sample)) if m.temporary else 0
    used = {"compute": (m.flops / count, topology.flops)}
    if m.sent is not None:
        # The learner is read and written once, besides what matrix products read and write.
        used["memory"] = (2 * state + m.products, topology.bandwidth)
        used["links"] = (sum(m.sent.values()), topology.links)
    seconds = {name: amount / best / _LIMITS[name][1] for name, (amount, best) in used.items() if best is not None}
    sizes: dict[str, float | None] = {"batch": m.batch, "padding": m.padding, "activations": activations}
    sizes |= {"workspace": fixed, "peak": peak} if m.temporary else dict.fromkeys(("workspace", "peak"))
    return {
        "topology": topology.name,
        "simulated": topology.simulated,
        "devices": count,
        "batch_size": batch_size,
        "parameters": m.parameters,
        "fits": fits,
        "bytes_per_device": {**m.state, **sizes, "available": memory},
        "flops_per_step": m.flops,
        "bytes_sent_per_device": m.sent,
        "seconds": {**seconds, "step": max(seconds.values(), default=None)},
        "largest_batch": largest,
        "advice": _advise(m, batch_size // count, parts) if fits is False else [],
        "compile_seconds": m.seconds,
    }


def fit_line(m: Measurement, parts: int) -> tuple[float, float]:
    """Temporary bytes: fixed, and for each sample that a device has at a time; of one point, all of it grows."""
    points = sorted((int(batch) / m.topology.count / parts, size) for batch, size in m.temporary.items())
    if len(points) < 2:
        return (0.0, points[0][1] / points[0][0]) if points else (math.inf, 0.0)
    (few, small), (many, large) = points
    slope = max(0.0, (large - small) / (many - few))
    return max(0.0, small - slope * few), slope


def _advise(m: Measurement, local: int, parts: int) -> list[dict[str, Any]]:
    """What makes it fit, the smallest changes first; if nothing does, what comes closest."""
    (fixed, slope), gradients, found = fit_line(m, parts), m.state.get("parameters", 0), []
    more = [n for n in range(parts + 1, local + 1) if local % n == 0]
    for what, how, state in [("", "", m.state), *(change for change in m.changes if change[2])]:
        for n in ([parts] if what else []) + more:
            # Gradients are as large as what learns; the rest of the workspace is taken to stay.
            workspace = max(0.0, fixed - gradients) + min(gradients, state.get("parameters", 0))
            peak = sum(state.values()) + m.batch + m.padding + workspace + slope * (local / n)
            words = filter(None, (what, f"process a batch in {n} parts" if n > parts else ""))
            flags = filter(None, (how, f"--agent.accumulation-steps {n}" if n > parts else ""))
            advice = {"what": ", and ".join(words), "how": " ".join(flags), "peak": peak if m.temporary else None}
            found.append(advice | {"fits": peak <= (m.topology.memory or 0.0)})
            if found[-1]["fits"]:
                break
    return [each for each in found if each["fits"]] or sorted(found, key=lambda each: each["peak"] or 0.0)[:1]


def needed_devices(m: Measurement, batch_size: int, parts: int) -> int | None:
    """How many such devices would hold the sharded learner and a sample each; None if too many."""
    (fixed, slope), count = fit_line(m, parts), m.topology.count
    state = next((state for what, _, state in m.changes if what == SHARD), m.state)
    # Gradients are spread as the learner is; the rest of the workspace is taken to stay.
    spread = (sum(state.values()) + state.get("parameters", 0)) * count
    rest = max(0.0, fixed - m.state.get("parameters", 0)) + m.padding + slope + m.batch * count / batch_size
    candidates = (count * 2**power for power in range(1, 8))
    return next((n for n in candidates if spread / n + rest <= (m.topology.memory or 0.0)), None)


def describe(plan: dict[str, Any], m: Measurement, parts: int) -> list[Any]:
    """Everything about one topology, ready to be shown."""
    sizes, seconds, batch, count = plan["bytes_per_device"], plan["seconds"], plan["batch_size"], plan["devices"]
    peak, memory, largest, step = sizes["peak"], sizes["available"], plan["largest_batch"], seconds["step"]
    verdict = f"{format_bytes(peak or 0)} on each device; the memory of the device is unknown."
    if memory is not None:
        verdict = "fits: " if plan["fits"] else "DOES NOT FIT: "
        verdict += "more than " if peak is None else f"{format_bytes(peak)} of "
        verdict += f"{format_bytes(memory)} on {f'each of {count} devices' if count > 1 else 'one device'}."
    chips = "TPUs" if m.topology.platform == "tpu" else "NVIDIA GPUs"
    how = f"by the compiler of {chips}, for {count} device{'s' * (count > 1)}"
    if plan["simulated"]:
        one = "device, which stands in for the real one"
        how = f"for {count} simulated CPU {one if count == 1 else 'devices, which stand in for the real ones'}"
        how += "; pip install 'pirl[plan-gpu]' for GPUs" if m.topology.platform == "gpu" else ""
    elif plan["topology"] == "here":
        how = "for the devices of this machine"
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for kind, (name, remark) in _KINDS.items():
        if sizes.get(kind) is not None and (kind != "padding" or sizes[kind] > GIB / 100):
            table.add_row(f"  {name}", format_bytes(sizes[kind]), remark)
    counts, operations = plan["parameters"], plan["flops_per_step"] / 1e12
    critics = f", and {counts['critic']:,} of the critics" if "critic" in counts else ""
    rounded = f"{operations:,.0f}" if operations >= 100 else f"{operations:.3g}"
    lines = [
        f"  parameters     {counts['policy']:,} of the policy, {counts['policy_trainable']:,} of them trainable{critics}",
        f"  operations     {rounded} TFLOP for {batch} samples, on all devices",
    ]
    if m.sent is not None:
        kinds = [f"{kind} {format_bytes(sent)}" for kind, sent in sorted(m.sent.items()) if sent >= GIB / 1000]
        listed = f" ({', '.join(kinds)})" if kinds else ""
        lines += [f"  sent           {format_bytes(sum(m.sent.values()))} by each device{listed}"]
    if plan["fits"] is not False and step is not None:
        limits = ((name, share, seconds[key]) for key, (name, share) in _LIMITS.items() if key in seconds)
        each = ", ".join(f"{name} {format_seconds(time)} at {share:.0%}" for name, share, time in limits)
        lines += [
            f"  update         about {format_seconds(step)}, {batch / step:,.0f} samples/s: the longest of {each}"
        ]
    if largest is not None:
        compiled = " and ".join(map(str, sorted(map(int, m.temporary))))
        # Far from the compiled sizes, another part of the update may need the most.
        far = "; plan again with this batch size before you rely on it" if largest > 4 * batch else ""
        line = f"{largest:,}, estimated by a line through batches of {compiled}{far}"
        lines += [f"  largest batch  {line if largest else 'not even one sample on each device'}"]
    if m.refused:
        lines += [f"  the compiler   {m.refused}"]
    if plan["fits"] is False:
        fitting = [each for each in plan["advice"] if each["fits"]]
        text = "any of these"
        if not fitting:
            needed = needed_devices(m, batch, parts)
            text = f"about {needed} such devices would be enough" if needed else "choose devices with more memory"
            text = f"no known change makes it fit here: {text}."
            for each in plan["advice"]:
                least = f"The smallest peak of any change is {format_bytes(each['peak'] or 0)} ({each['how']})."
                text += f" Or plan again with {each['how']}." if each["peak"] is None else f" {least}"
        lines += [f"  what to do     {text}"]
        lines += [f"    {each['how']}  → about {format_bytes(each['peak'])}: {each['what']}" for each in fitting]
        unknown = [(what, how) for what, how, state in m.changes if not state]
        lines += [f"    {how}  → less; plan again to see how much: {what}" for what, how in unknown]
    return ["", f"{plan['topology']}: {verdict}", f"  compiled {how}", table, *lines]


def summary(plans: list[dict[str, Any]]) -> Table:
    table = Table("topology", "fits", box=None, pad_edge=False)
    for name in ("per device", "of", "step", "samples/s", "largest batch"):
        table.add_column(name, justify="right")
    for plan in plans:
        sizes, largest = plan["bytes_per_device"], plan["largest_batch"]
        step = plan["seconds"]["step"] if plan["fits"] else None
        table.add_row(
            plan["topology"],
            {True: "yes", False: "no", None: "?"}[plan["fits"]],
            "more" if sizes["peak"] is None else format_bytes(sizes["peak"]),
            "?" if sizes["available"] is None else format_bytes(sizes["available"]),
            "" if step is None else format_seconds(step),
            "" if step is None else f"{plan['batch_size'] / step:,.0f}",
            "?" if largest is None else f"{largest:,}",
        )
    return table
