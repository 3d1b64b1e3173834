"""The `pirl` command: picks the subcommand, and turns errors into messages and exit codes."""

import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

import pirl
from pirl.cli.convert import Convert
from pirl.errors import UserError

# A subcommand is a dataclass of its options with a `run` that returns the exit code.
Command = Annotated[Convert, tyro.conf.subcommand("convert")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 a crash or a difference found, 2 bad input, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"pirl {pirl.__version__}")
        sys.exit(0)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    command = _parse(arguments)
    try:
        sys.exit(command.run())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader (head, less) has had enough; keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _parse(arguments: Sequence[str]) -> Any:
    """Parse with OmitSubcommandPrefixes so that options keep their plain names, and without --no-x twins of flags."""
    return tyro.extras.subcommand_cli_from_dict(
        {"convert": Convert},
        prog="pirl",
        description="Reinforcement-learning post-training for π₀-family robot policies.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
    )
