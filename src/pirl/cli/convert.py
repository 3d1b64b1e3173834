"""`pirl convert`: inspect, convert, merge the LoRA of, or check an OpenPI checkpoint."""

import math
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pirl.cli.console import WithJson, facts, show, table
from pirl.cli.parser import option, positional
from pirl.errors import UserError
from pirl.run_files import refuse_directory_of_runs
from pirl.text import format_size

if TYPE_CHECKING:
    from pirl.interop.checkpoint import Checkpoint
    from pirl.models.config import Pi0Config


@dataclass(frozen=True, kw_only=True)
class Convert(WithJson):
    """Inspect an OpenPI checkpoint, convert it, merge its LoRA, or check it.

    With one checkpoint, print its parameters, counts, dtypes and statistics. With two, convert the first and write it as
    the second. With --check, verify one checkpoint or compare two; exit code 1 means that there are differences.
    """

    checkpoint: Path = positional("CHECKPOINT")
    """Checkpoint directory (the one with params/ or model.safetensors), or a run (its newest policy)."""
    output: Path | None = positional("[OUTPUT]", None)
    """Where to write the converted checkpoint; with --check, the checkpoint to compare with."""
    check: bool = False
    """Verify one checkpoint (readable, finite, fits its model; reports missing statistics) or compare two."""
    model: str | None = option("PRESET|FILE")
    """Model of a checkpoint without pirl.json; needed to merge LoRA or to check the fit. A preset, or a file that holds
    one: a run's config.yaml, or the pirl.json of another checkpoint."""
    merge_lora: bool = False
    """Fold LoRA weights into the weights they update."""
    dtype: Literal["float32", "bfloat16"] | None = option(shown="as saved")
    """Cast all parameters to this dtype."""
    style: Literal["released", "trained", "pytorch"] = "released"
    """What to write: OpenPI's JAX format with plain keys (released) or with the trailing `value` of its training runs
    (trained), or the model.safetensors of its PyTorch models (pytorch). OpenPI reads all three."""
    overwrite: bool = False
    """Replace the output if it exists."""
    rtol: float = 0.0
    """Relative tolerance of --check."""
    atol: float = 0.0
    """Absolute tolerance of --check."""

    def run(self) -> int:
        """Run the command; returns the exit code."""
        from pirl.envs.policy import find_policy
        from pirl.interop.checkpoint import open_checkpoint

        self._reject_unused_options()
        self.check_json()
        refuse_directory_of_runs(self.checkpoint)
        checkpoint = open_checkpoint(find_policy(self.checkpoint), self._given_model())
        if self.check and self.output is not None:
            refuse_directory_of_runs(self.output)
            return self._compare(checkpoint, open_checkpoint(find_policy(self.output)))
        if self.check:
            return self._verify(checkpoint)
        if self.output is not None:
            return self._convert(checkpoint, self.output)
        return self._inspect(checkpoint)

    def _reject_unused_options(self) -> None:
        writes = self.output is not None and not self.check
        compares = self.output is not None and self.check
        defaults = {field.name: field.default for field in fields(self)}
        for names, used, what in (
            (("merge_lora", "dtype", "overwrite", "style"), writes, "writing a checkpoint (an output, and no --check)"),
            (("rtol", "atol"), compares, "--check with two checkpoints"),
            (("model",), writes or (self.check and not compares), "--check of one checkpoint, or to writing one"),
            (("json",), not writes and not self.check, "the inspection of one checkpoint"),
        ):
            for name in names:
                if not used and getattr(self, name) != defaults[name]:
                    raise UserError(f"--{name.replace('_', '-')} applies to {what}.")
        if not all(0 <= tolerance < math.inf for tolerance in (self.rtol, self.atol)):
            raise UserError("--rtol and --atol should be finite and cannot be negative.")

    def _given_model(self) -> "Pi0Config | None":
        from pirl.config.yaml import read_yaml
        from pirl.models.config import Pi0Config, get_model_config

        if self.model is None:
            return None
        if Path(self.model).suffix not in (".json", ".yaml", ".yml"):
            return get_model_config(self.model)
        values = read_yaml(Path(self.model))
        return Pi0Config.from_dict(values.get("model") if isinstance(values, dict) else values)

    def _inspect(self, checkpoint: "Checkpoint") -> int:
        summary = _summary(checkpoint)
        leaves = [
            (path, "×".join(map(str, leaf.shape)), str(leaf.dtype), f"{leaf.size:,}")
            for path, leaf in checkpoint.leaves.items()
        ]
        statistics = [
            ("statistics", f"{asset_id}: " + ", ".join(f"{name} [{width}]" for name, width in widths.items()))
            for asset_id, widths in summary["norm_stats"].items()
        ]
        rows = [
            ("checkpoint", summary["directory"]),
            ("style", summary["style"]),
            ("parameters", f"{summary['parameters']:,} in {summary['leaves']} arrays, {format_size(summary['bytes'])}"),
            *((f"  {group}", f"{count:,}") for group, count in summary["groups"].items()),
            ("dtypes", ", ".join(f"{name}: {count:,}" for name, count in summary["dtypes"].items())),
            ("LoRA", "yes" if summary["lora"] else "no"),
            ("pirl.json", "yes" if summary["described"] else "no"),
            ("fits presets", ", ".join(summary["presets"]) or "none"),
            *(statistics or [("statistics", "none")]),
            ("items", ", ".join(summary["items"])),
        ]
        show(table(("parameter", "shape", "dtype", "count"), leaves, left=1), "", facts(rows))
        self.write_json(summary, "the inspection")
        return 0

    def _convert(self, checkpoint: "Checkpoint", output: Path) -> int:
        from pirl.interop.checkpoint import OWN_KEYS, check_target, resolve_target, save_checkpoint
        from pirl.models.lora import merge_lora

        source, target = checkpoint.directory.resolve(), resolve_target(output)
        if target == source or target in source.parents or source in target.parents:
            raise UserError(
                f"the output {target} is the checkpoint itself, contains it or lies inside it: choose another."
            )
        check_target(target, self.overwrite)
        config = self._matching_config(checkpoint, required=self.merge_lora)
        if self.merge_lora and not any("lora" in path for path in checkpoint.leaves):
            raise UserError(f"{checkpoint.directory} has no LoRA weights to merge.")
        left_out = [item for item in _items(checkpoint) if item not in ("params", "assets", "model.safetensors")]
        for file in sorted((checkpoint.directory / "assets").rglob("*")):
            if file.is_file() and file.name != "norm_stats.json":
                left_out.append(str(file.relative_to(checkpoint.directory)))
        # The described model only: a preset named on the command line may have another horizon or prompt format.
        described = checkpoint.config
        if self.merge_lora:
            assert config is not None
            params = merge_lora(checkpoint.read(), config, self.dtype)
            described = None if described is None else described.without_lora()
        else:
            params = checkpoint.read(dtypes={} if self.dtype is None else dict.fromkeys(checkpoint.leaves, self.dtype))
        save_checkpoint(
            output,
            params,
            described,
            norm_stats=checkpoint.norm_stats(),
            metadata={key: value for key, value in checkpoint.description.items() if key not in OWN_KEYS},
            style=self.style,
            overwrite=self.overwrite,
        )
        print(f"wrote {output}: {sum(value.size for value in params.values()):,} parameters in {len(params)} arrays")
        _warn_if_blind(checkpoint)
        if left_out:
            print(f"left out, because not part of a policy: {', '.join(left_out)}")
        if self.merge_lora and any(str(value.dtype) == "bfloat16" for value in params.values()):
            print("some merged weights are bfloat16, which rounds small updates away: --dtype float32 keeps them")
        return 0

    def _matching_config(self, checkpoint: "Checkpoint", *, required: bool) -> "Pi0Config | None":
        """The model that the checkpoint or the command line names; the parameters have to fit it."""
        from pirl.interop.checkpoint import check_match, resolve_config

        config = self._given_model() or checkpoint.config
        config = resolve_config(checkpoint, config) if required else config
        if config is not None:
            check_match(checkpoint, config)
        return config

    def _compare(self, first: "Checkpoint", second: "Checkpoint") -> int:
        from pirl.interop.checkpoint import compare

        differences = compare(first, second, rtol=self.rtol, atol=self.atol)
        for difference in differences:
            print(difference)
        tolerance = f" within rtol {self.rtol:g} and atol {self.atol:g}" if self.rtol or self.atol else ""
        verdict = f"{len(differences)} differences" if differences else f"equal{tolerance}"
        print(f"{first.directory} and {second.directory}: {verdict}")
        return 1 if differences else 0

    def _verify(self, checkpoint: "Checkpoint") -> int:
        from pirl.interop.checkpoint import check_values

        self._matching_config(checkpoint, required=True)
        problems = check_values(checkpoint)
        for problem in problems:
            print(problem)
        _warn_if_blind(checkpoint)
        if not checkpoint.norm_stats():
            print("assets: no norm_stats.json; a robot needs one to normalize its state and actions")
        print(f"{checkpoint.directory}: {'not sound' if problems else 'sound'}, {len(checkpoint.leaves)} arrays")
        return 1 if problems else 0


def _warn_if_blind(checkpoint: "Checkpoint") -> None:
    if not any(path.startswith("PaliGemma/img") for path in checkpoint.leaves):
        print("no vision tower: the policy has no cameras, so OpenPI cannot load it; pirl can")


def _items(checkpoint: "Checkpoint") -> list[str]:
    """The parts of a checkpoint: directories, and what PyTorch has as files."""
    entries = checkpoint.directory.iterdir()
    return sorted(entry.name for entry in entries if entry.is_dir() or entry.suffix in (".safetensors", ".pt"))


def _summary(checkpoint: "Checkpoint") -> dict[str, Any]:
    """What the inspection found, ready for JSON."""
    groups: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for path, leaf in checkpoint.leaves.items():
        groups[_group(path)] += leaf.size
        dtypes[str(leaf.dtype)] += leaf.size
    statistics = checkpoint.norm_stats()
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
        "norm_stats": {id_: {name: len(one.mean) for name, one in stats.items()} for id_, stats in statistics.items()},
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
