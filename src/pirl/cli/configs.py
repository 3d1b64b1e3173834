"""`pirl configs`: lists the presets, or shows one."""

from dataclasses import dataclass

from pirl.cli.console import show, table
from pirl.cli.parser import Command, positional
from pirl.errors import UserError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Configs(Command):
    """List the presets of `pirl train`, or print one as YAML for --config-file (`pirl configs show NAME`)."""

    command: str = positional("[list|show]", "list")
    """List all presets, or show one."""
    name: str | None = positional("[NAME]", None)
    """The preset to show."""

    def run(self) -> int:
        if self.command not in ("list", "show"):
            question = did_you_mean(self.command, ("list", "show")) or f"Did you mean show {self.command}? "
            raise UserError(f"pirl configs has no command {self.command}. {question}See pirl configs --help.")
        if (self.command == "show") != (self.name is not None):
            takes = "no preset name" if self.command == "list" else "the name of a preset"
            raise UserError(f"pirl configs {self.command} takes {takes}.")
        if self.name is None:
            _list()
        else:
            _show(self.name)
        return 0


def _list() -> None:
    from pirl.config.presets import find_choice, get_preset, list_configs

    rows = []
    for name in list_configs():
        learner, model = find_choice(name, "agent", "learner"), find_choice(name, "model", "preset")
        rows.append((name, learner, model, get_preset(name)["about"].splitlines()[0]))
    show(table(("name", "learner", "model", "what it is for"), rows))
    print("\npirl configs show NAME prints one; pirl train NAME --exp-name RUN trains it.")


def _show(name: str) -> None:
    from pirl.config import format_config, get_config, get_preset

    for line in get_preset(name)["about"].splitlines():
        print(f"# {line}".rstrip())
    print()
    print(format_config(get_config(name)), end="")
