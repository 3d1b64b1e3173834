"""`pirl convert`: look into an OpenPI checkpoint, convert it, merge its LoRA, or check it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from pirl.errors import UserError

# JAX and Orbax take seconds to import; `--help` and a typo should not wait for them.
if TYPE_CHECKING:
    from pirl.interop import Checkpoint


@dataclass(frozen=True)
class Convert:
    """Look into an OpenPI checkpoint, convert it, merge its LoRA, or check it.

    One checkpoint: print its parameters, counts, dtypes and statistics. Two: write the first, converted, as the second.
    With --check, one checkpoint is verified and two are compared; exit code 1 means that something differs.
    """

    checkpoint: tyro.conf.Positional[Path]
    """Checkpoint directory (the one that holds params/)."""
    output: tyro.conf.Positional[Path | None] = None
    """Where to write the converted checkpoint; with --check, the checkpoint to compare with."""
    check: bool = False
    """Verify one checkpoint (readable, finite, fits its model, has statistics) or compare two."""
    model: str | None = None
    """Model preset, where the checkpoint does not name its model itself; needed to merge or to check the fit."""
    merge_lora: bool = False
    """Fold LoRA weights into the weights they update."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Cast every parameter (default: as saved)."""
    style: Literal["released", "trained"] = "released"
    """Key layout to write: plain, or with the trailing `value` of OpenPI's own training runs. OpenPI reads both."""
    overwrite: bool = False
    """Replace the output if it exists."""
    rtol: float = 0.0
    """Relative tolerance of --check."""
    atol: float = 0.0
    """Absolute tolerance of --check."""
    json: bool = False
    """Print the inspection as JSON."""

    def run(self) -> int:
        """Do it; the return value is the exit code."""
        from pirl.interop import open_checkpoint

        self._reject_unused_options()
        checkpoint = open_checkpoint(self.checkpoint)
        if self.check and self.output is not None:
            return self._compare(checkpoint, open_checkpoint(self.output))
        if self.check:
            return self._verify(checkpoint)
        if self.output is not None:
            return self._convert(checkpoint, self.output)
        return self._inspect(checkpoint)

    def _reject_unused_options(self) -> None:
        writing = {"--merge-lora": self.merge_lora, "--dtype": self.dtype, "--overwrite": self.overwrite}
        writing["--style"] = self.style != "released"
        comparing = {"--rtol": self.rtol, "--atol": self.atol}
        if self.check or self.output is None:
            self._reject(writing, "writes a checkpoint: give an output directory, and no --check")
        if not (self.check and self.output is not None):
            self._reject(comparing, "belongs to --check with two checkpoints")
        if self.check or self.output is not None:
            self._reject({"--json": self.json}, "belongs to the inspection of one checkpoint")

    def _reject(self, options: dict[str, Any], why: str) -> None:
        for name, given in options.items():
            if given:
                raise UserError(f"{name} {why}.")

    # --- inspect -------------------------------------------------------------------------------------------------

    def _inspect(self, checkpoint: "Checkpoint") -> int:
        from rich.console import Console
        from rich.table import Table

        summary = _summary(checkpoint)
        if self.json:
            print(json.dumps(summary, indent=2))
            return 0
        console = Console(width=None if Console().is_terminal else 160, highlight=False)
        table = Table("parameter", "shape", "dtype", "count", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for path, leaf in checkpoint.leaves.items():
            table.add_row(path, "×".join(map(str, leaf.shape)), str(leaf.dtype), f"{leaf.size:,}")
        console.print(table)
        console.print()
        facts = Table(show_header=False, box=None, pad_edge=False)
        facts.add_row("checkpoint", summary["directory"])
        facts.add_row("key style", summary["style"])
        facts.add_row(
            "parameters", f"{summary['parameters']:,} in {summary['leaves']} arrays, {_gib(summary['bytes'])}"
        )
        for group, count in summary["groups"].items():
            facts.add_row(f"  {group}", f"{count:,}")
        facts.add_row("dtypes", ", ".join(f"{name}: {count:,}" for name, count in summary["dtypes"].items()))
        facts.add_row("LoRA", "yes" if summary["lora"] else "no")
        facts.add_row("describes itself", "yes (pirl.json)" if summary["described"] else "no")
        facts.add_row("fits presets", ", ".join(summary["presets"]) or "none")
        for asset_id, widths in summary["norm_stats"].items():
            facts.add_row(
                "statistics", f"{asset_id}: " + ", ".join(f"{name} [{dims}]" for name, dims in widths.items())
            )
        if not summary["norm_stats"]:
            facts.add_row("statistics", "none")
        facts.add_row("items", ", ".join(summary["items"]))
        console.print(facts)
        return 0

    # --- convert -------------------------------------------------------------------------------------------------

    def _convert(self, checkpoint: "Checkpoint", output: Path) -> int:
        from pirl.interop import check_fit, resolve_config, save_checkpoint
        from pirl.models import expected_parameters, merge_lora

        if output.expanduser().exists() and not self.overwrite:
            raise UserError(f"{output} exists already: choose another place, or add --overwrite.")
        if output.expanduser().resolve() == checkpoint.directory.resolve():
            raise UserError("the output is the checkpoint itself: choose another place.")
        # Without a name the parameters can still be re-written as they are; merging needs to know the LoRA scale.
        config = checkpoint.config
        if self.model is not None or self.merge_lora:
            config = resolve_config(checkpoint, self.model)
        if config is not None:
            check_fit(checkpoint, expected_parameters(config))
        statistics = checkpoint.norm_stats()
        dtypes = {} if self.dtype is None else dict.fromkeys(checkpoint.leaves, self.dtype)
        if self.merge_lora:
            assert config is not None
            if not any("lora" in path for path in checkpoint.leaves):
                raise UserError(f"{checkpoint.directory} has no LoRA weights to merge.")
            # Merge at the saved precision, and round once afterwards.
            params = merge_lora(checkpoint.read(), config)
            params = {path: value.astype(self.dtype or value.dtype) for path, value in params.items()}
            config = config.without_lora()
        else:
            params = checkpoint.read(dtypes=dtypes)
        rewritten = ("pirl", "model", "parameters", "versions")
        carried = {key: value for key, value in checkpoint.description.items() if key not in rewritten}
        save_checkpoint(
            output, params, config, norm_stats=statistics, metadata=carried, style=self.style, overwrite=self.overwrite
        )
        print(f"wrote {output}: {sum(value.size for value in params.values()):,} parameters in {len(params)} arrays")
        left_out = [item for item in _items(checkpoint) if item == "train_state"]
        if left_out:
            print("left out: train_state (optimiser state is not part of a policy)")
        return 0

    # --- check ---------------------------------------------------------------------------------------------------

    def _compare(self, first: "Checkpoint", second: "Checkpoint") -> int:
        from pirl.interop import compare

        differences = compare(first, second, rtol=self.rtol, atol=self.atol)
        for difference in differences:
            print(f"{difference.path}: {difference.what}")
        tolerance = f" within rtol {self.rtol:g} and atol {self.atol:g}" if self.rtol or self.atol else ""
        verdict = f"{len(differences)} differences" if differences else f"equal{tolerance}"
        print(f"{first.directory} and {second.directory}: {verdict}")
        return 1 if differences else 0

    def _verify(self, checkpoint: "Checkpoint") -> int:
        from pirl.interop import check_fit, check_values, resolve_config
        from pirl.models import expected_parameters

        config = resolve_config(checkpoint, self.model)
        check_fit(checkpoint, expected_parameters(config))
        statistics = checkpoint.norm_stats()
        problems = check_values(checkpoint)
        for problem in problems:
            print(f"{problem.path}: {problem.what}")
        if not statistics:
            print("assets: no norm_stats.json; a robot needs one to normalise its state and actions")
        print(f"{checkpoint.directory}: {'not sound' if problems else 'sound'}, {len(checkpoint.leaves)} arrays")
        return 1 if problems else 0


def _items(checkpoint: "Checkpoint") -> list[str]:
    return sorted(entry.name for entry in checkpoint.directory.iterdir() if entry.is_dir())


def _summary(checkpoint: "Checkpoint") -> dict[str, Any]:
    """What the inspection says, ready for JSON."""
    groups: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    for path, leaf in checkpoint.leaves.items():
        groups[_group(path)] = groups.get(_group(path), 0) + leaf.size
        dtypes[str(leaf.dtype)] = dtypes.get(str(leaf.dtype), 0) + leaf.size
    return {
        "directory": str(checkpoint.directory),
        "style": checkpoint.style,
        "parameters": sum(groups.values()),
        "leaves": len(checkpoint.leaves),
        "bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in checkpoint.leaves.values()),
        "groups": groups,
        "dtypes": dtypes,
        "lora": any("lora" in path for path in checkpoint.leaves),
        "described": checkpoint.config is not None,
        "presets": checkpoint.fitting_presets(),
        "norm_stats": {
            asset_id: {name: len(entry.mean) for name, entry in stats.items()}
            for asset_id, stats in checkpoint.norm_stats().items()
        },
        "items": _items(checkpoint),
        "tree": {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in checkpoint.leaves.items()},
    }


def _group(path: str) -> str:
    """The part of the model a parameter belongs to."""
    if path.startswith("PaliGemma/img"):
        return "vision tower"
    if path.startswith("PaliGemma/llm"):
        return "action expert" if any(part.endswith("_1") for part in path.split("/")) else "language model"
    return "flow head"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
