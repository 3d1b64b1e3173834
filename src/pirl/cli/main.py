"""The `pirl` command: finds the subcommand, and turns errors into messages and exit codes."""

import sys

try:  # loading takes a moment, during which Ctrl-C should end quietly
    import inspect
    import io
    import logging
    import os
    from collections.abc import Sequence
    from typing import Any, NoReturn

    import pirl
    from pirl.cli.collect import Collect
    from pirl.cli.configs import Configs
    from pirl.cli.console import text_beside_json
    from pirl.cli.convert import Convert
    from pirl.cli.data import DATA_COMMANDS
    from pirl.cli.demo import Demo
    from pirl.cli.doctor import Doctor
    from pirl.cli.envs import ENVS_COMMANDS
    from pirl.cli.evaluate import Evaluate
    from pirl.cli.inspect import Inspect
    from pirl.cli.parser import Command, print_commands
    from pirl.cli.plan import Plan
    from pirl.cli.report import Report
    from pirl.cli.sweep import Sweep
    from pirl.cli.train import Train
    from pirl.errors import UserError, did_you_mean
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)

COMMANDS: dict[str, Any] = {
    "demo": Demo,
    "train": Train,
    "sweep": Sweep,
    "plan": Plan,
    "report": Report,
    "eval": Evaluate,
    "collect": Collect,
    "envs": ENVS_COMMANDS,
    "convert": Convert,
    "inspect": Inspect,
    "data": DATA_COMMANDS,
    "configs": Configs,
    "doctor": Doctor,
}
_ABOUT = {
    "pirl": "Reinforcement-learning post-training for π₀-family robot policies. "
    "`pirl COMMAND --help` explains a command, `pirl --version` prints the version.",
    "pirl data": "Inspect, validate and label LeRobot datasets.",
    "pirl envs": "List environments, show their options, render episodes.",
}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point. Exit codes: 0 done, 1 a crash or a difference found, 2 bad input, 130 interrupted."""
    is_program = arguments is None
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"pirl {pirl.__version__}")
        sys.exit(0)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # for terminals without ×
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if is_program:
        sys.unraisablehook = _report_unraisable
    try:
        command = parse(arguments)
        with text_beside_json(command):
            code = command.run()
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe; the interpreter should not complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        print(f"error: {error.filename or 'system'}: {error.strerror or error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        if is_program and "jax" in sys.modules:
            # XLA compiles in its own threads, which crash if the interpreter ends before them.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(130)
        code = 130
    sys.exit(code)


def parse(arguments: Sequence[str], commands: dict[str, Any] = COMMANDS, program: str = "pirl") -> Command:
    """The command that the arguments name, with its options. --help prints and exits."""
    name = arguments[0] if arguments else "no command"
    if name in ("-h", "--help"):
        print_commands(program, _ABOUT[program], {name: _summary(name, entry) for name, entry in commands.items()})
        sys.exit(0)
    if name not in commands:
        problem = f"has no command {name}. {did_you_mean(name, commands)}" if arguments else "needs a command. "
        raise UserError(f"{program} {problem}See {program} --help.")
    entry = commands[name]
    if isinstance(entry, dict):
        return parse(arguments[1:], entry, f"{program} {name}")
    command: Command = entry.parse(arguments[1:], f"{program} {name}")
    return command


def _summary(name: str, entry: Any) -> str:
    """The first paragraph of a command's help."""
    if isinstance(entry, dict):
        return _ABOUT[f"pirl {name}"]
    return inspect.cleandoc(entry.__doc__).split("\n\n")[0].replace("\n", " ")


def _report_unraisable(what: Any) -> None:
    """Report as usual, except for TensorStore's writes that go on after the first one failed."""
    if not (isinstance(what.exc_value, RuntimeError) and str(what.exc_value) == "Event loop is closed"):
        sys.__unraisablehook__(what)


if __name__ == "__main__":
    main()
