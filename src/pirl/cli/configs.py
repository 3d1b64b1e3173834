"""`pirl configs`: lists the presets, or shows one."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from pirl.cli.console import optional, show, table
from pirl.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Configs:
    """List the presets of `pirl train`, or print one as YAML for --config-file (`pirl configs show NAME`)."""

    command: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[list|show]")] = "list"
    """List all presets, or show one."""
    name: Annotated[tyro.conf.Positional[str | None], optional("[NAME]")] = None
    """The preset to show."""

    def run(self) -> int:
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
    from pirl.config import LEARNERS, get_preset, list_configs

    rows = []
    for name in list_configs():
        preset = get_preset(name)
        (learner,) = (learner for learner, kind in LEARNERS.items() if type(preset.config.agent) is kind)
        model = preset.config.model
        size = "tiny " if model.language.width < 512 else ""
        lora = ", LoRA" if model.language.has_lora or model.action_expert.has_lora else ""
        rows.append((name, learner, f"{size}{'π₀.₅' if model.pi05 else 'π₀'}{lora}", preset.summary))
    show(table(("name", "learner", "model", "what it is for"), rows))
    print("\npirl configs show NAME prints one; pirl train NAME --exp-name RUN trains it.")
    return 0


def _show(name: str) -> int:
    from pirl.config import format_config, get_preset

    preset = get_preset(name)
    for line in preset.about.splitlines():
        print(f"# {line}".rstrip())
    print()
    print(format_config(preset.config), end="")
    return 0
