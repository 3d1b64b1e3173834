"""`pirl inspect`: shows what a saved state consists of, how it is sharded, and how two states differ."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pirl.cli.console import WithJson, facts, show, table
from pirl.cli.parser import option, positional
from pirl.errors import UserError
from pirl.text import format_size

if TYPE_CHECKING:
    from pirl.training.inspect import Comparison, Layout, Part, SavedState

_LISTED = 20
"""Arrays that are named one by one."""


@dataclass(frozen=True, kw_only=True)
class Inspect(WithJson):
    """Show what a saved state contains: shapes, dtypes, bytes and sharding by subtree. With two, how they differ.

    One state is read from its metadata, without loading an array. Two are compared array by array; --of and --against
    compare two parts of one state, such as the parameters and their EMA, or two optimizers.
    """

    run_directory: Path = positional("RUN")
    """Run directory, one of its checkpoints, or any OpenPI checkpoint."""
    other: Path | None = positional("[OTHER]", None)
    """Second state, to compare with."""
    step: int | None = option(shown="the newest")
    """Step of the state."""
    other_step: int | None = option(shown="the newest")
    """Step of the second state; without OTHER, another state of the same run."""
    depth: int = 2
    """Depth to which subtrees are expanded."""
    of: str | None = option("SUBTREE", shown="everything")
    """Show only this subtree, such as actor/params."""
    against: str | None = option("SUBTREE", shown="the same subtree")
    """Compare --of with this subtree."""
    devices: int | None = option(shown="the layout it was saved with")
    """Show the sharding on this many devices."""
    fsdp: int | None = option(shown="all")
    """Devices that share one copy of the parameters."""

    def run(self) -> int:
        compares = self.other is not None or self.other_step is not None or self.against is not None
        if self.depth < 1:
            raise UserError(f"--depth {self.depth} shows nothing: use 1 or more.")
        if compares and (self.devices is not None or self.fsdp is not None):
            raise UserError("--devices and --fsdp apply to the inspection of one state.")
        if self.against is not None and self.of is None:
            raise UserError("--against needs --of, the subtree to compare with it.")
        self.check_json()
        from pirl.training.inspect import open_state

        state = open_state(self.run_directory, self.step)
        content = self._compare(state) if compares else self._inspect(state)
        self.write_json(content, "the inspection")
        return 0

    def _inspect(self, state: "SavedState") -> dict[str, Any]:
        from pirl.training.inspect import describe, left_whole, planned_layout, unexpected

        layout = state.layout
        if self.devices is not None or self.fsdp is not None:
            devices = self.devices or self.fsdp or 1
            layout = planned_layout(state.leaves, devices, self.fsdp or devices)
        parts = describe(state, layout, self.depth, self.of or "")
        odd, whole = unexpected(state), left_whole(state.leaves, layout)
        total, most = sum(part.bytes for part in parts), sum(part.bytes_per_device for part in parts)
        arrays, numbers = sum(part.leaves for part in parts), sum(part.parameters for part in parts)
        rows = [("state", state.title), ("total", f"{numbers:,} numbers in {arrays:,} arrays, {format_size(total)}")]
        if layout.devices > 1:
            copies = layout.devices // layout.fsdp_devices
            mesh = f"{layout.devices} devices, {layout.fsdp_devices} of which share one copy"
            even = f"{most * layout.fsdp_devices / total:.3f} times an even share" if total else ""
            rows.append(("devices", mesh + (f" ({copies} copies)" if copies > 1 else "")))
            rows.append(("a device", f"{format_size(most)}, {even}"))
        show(_table(parts, layout), "", facts(rows))
        for note in state.notes:
            print(note)
        _list("different from the configuration", odd)
        _list("replicated on every device, although large and divisible", whole)
        return {
            "state": state.title,
            "devices": layout.devices,
            "fsdp_devices": layout.fsdp_devices,
            "bytes": total,
            "bytes_per_device": most,
            "subtrees": [asdict(part) for part in parts],
            "leaves": {
                path: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "pieces": list(layout.pieces[path])}
                for path, leaf in state.leaves.items()
            },
            "unexpected": odd,
            "left_whole": whole,
        }

    def _compare(self, first: "SavedState") -> dict[str, Any]:
        from pirl.training.inspect import compare_states, open_state

        elsewhere = self.other is not None or self.other_step is not None
        second = open_state(self.other or self.run_directory, self.other_step) if elsewhere else first
        found = compare_states(first, second, depth=self.depth, of=self.of or "", against=self.against)
        sides = (first, self.of), (second, self.of if self.against is None else self.against)
        names = [f"{state.title}: {part}" if part else state.title for state, part in sides]
        show(f"{names[0]}\nand {names[1]}", "", _difference_table(found))
        alone = {"only_first": found.only_first, "only_second": found.only_second, "other_shape": found.other_shape}
        _list("only in the first", found.only_first)
        _list("only in the second", found.only_second)
        _list("of another shape", found.other_shape)
        return {"first": names[0], "second": names[1], "subtrees": [part.to_json() for part in found.parts], **alone}


def _table(parts: "list[Part]", layout: "Layout") -> Any:
    headers = ["subtree", "arrays", "shape", "numbers", "dtype", "bytes"]
    headers += ["sharded", "a device"] if layout.devices > 1 else []
    rows = []
    for part in parts:
        shape = "" if part.shape is None else "×".join(map(str, part.shape)) or "number"
        row = [part.name, str(part.leaves), shape, f"{part.parameters:,}"]
        row += [", ".join(part.dtypes), format_size(part.bytes)]
        row += [f"{part.sharded} of {part.leaves}", format_size(part.bytes_per_device)] if layout.devices > 1 else []
        rows.append(row)
    return table(headers, rows, left=1)


def _difference_table(found: "Comparison") -> Any:
    rows = []
    for part in found.parts:
        first, second = (f"{value:.3g}" for value in part.root_mean_squares)
        compared = [f"{part.largest:.3g}", f"{part.relative:.3g}"] if part.leaves else ["", ""]
        alone = part.only_first + part.only_second
        counts = [str(part.leaves), str(part.differing)]
        rows.append([part.name, *counts, *compared, first, second, str(alone) if alone else ""])
    headers = ("subtree", "arrays", "differ", "max |Δ|", "‖Δ‖ / ‖second‖", "rms first", "rms second", "only in one")
    return table(headers, rows, left=1)


def _list(what: str, names: list[str]) -> None:
    if not names:
        return
    print(f"{what} ({len(names)}):")
    for name in names[:_LISTED]:
        print(f"  {name}")
    if len(names) > _LISTED:
        print(f"  and {len(names) - _LISTED} more")
