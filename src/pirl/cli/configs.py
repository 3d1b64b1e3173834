"""`pirl configs`: lists the presets, or shows one."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from pirl.cli.console import optional, show
from pirl.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from pirl.models.config import Pi0Config


@dataclass(frozen=True)
class Configs:
    """List the presets of `pirl train`, or print one as YAML for --config-file (`pirl configs show NAME`)."""

    command: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[list|show]")] = "list"
    """List all presets, or show one."""
    name: Annotated[tyro.conf.Positional[str | None], optional("[NAME]")] = None
    """The preset to show."""

    def run(self) -> int:
        """Do it; the return value is the exit code."""
        if self.command == "show" and self.name is not None:
            return _show(self.name)
        if self.command == "list" and self.name is None:
            return _list()
        if self.command in ("list", "show"):
            takes = "no preset name" if self.command == "list" else "the name of a preset"
            raise UserError(f"pirl configs {self.command} takes {takes}.")
        question = did_you_mean(self.command, ("list", "show")) or f"Did you mean show {self.command}? "
        raise UserError(f"pirl configs has no command {self.command}. {question}See pirl configs --help.")


def _list() -> int:
    from rich.table import Table

    from pirl.config import LEARNERS, get_preset, list_configs

    table = Table("name", "learner", "model", "what it is for", box=None, pad_edge=False)
    for name in list_configs():
        preset = get_preset(name)
        (learner,) = (learner for learner, kind in LEARNERS.items() if type(preset.config.agent) is kind)
        table.add_row(name, learner, _model(preset.config.model), preset.summary)
    show(table)
    print("\npirl configs show NAME prints one; pirl train NAME --exp-name RUN trains it.")
    return 0


def _model(model: "Pi0Config") -> str:
    size = "tiny " if model.language.width < 512 else ""
    lora = ", LoRA" if model.language.has_lora or model.action_expert.has_lora else ""
    return f"{size}{'π₀.₅' if model.pi05 else 'π₀'}{lora}"


def _show(name: str) -> int:
    from pirl.config import format_config, get_preset

    preset = get_preset(name)
    for line in preset.about.splitlines():
        print(f"# {line}".rstrip())
    print()
    print(format_config(preset.config), end="")
    return 0
