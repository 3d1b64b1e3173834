"""The `pirl` command: finds the subcommand, parses its options, and turns errors into messages and exit codes."""

import sys

try:  # loading takes a moment, during which Ctrl-C should end quietly
    import contextlib
    import dataclasses
    import inspect
    import io
    import itertools
    import logging
    import os
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import Any, NoReturn

    import tyro

    import pirl
    from pirl.cli.collect import Collect
    from pirl.cli.configs import Configs
    from pirl.cli.console import complete_json_flag, text_beside_json
    from pirl.cli.convert import Convert
    from pirl.cli.data import DATA_COMMANDS
    from pirl.cli.demo import Demo
    from pirl.cli.doctor import Doctor
    from pirl.cli.envs import ENVS_COMMANDS
    from pirl.cli.evaluate import Evaluate
    from pirl.cli.inspect import Inspect
    from pirl.cli.options import Settings, take_env_options, take_settings
    from pirl.cli.plan import Plan
    from pirl.cli.report import Report
    from pirl.cli.sweep import Sweep
    from pirl.cli.train import Train
    from pirl.errors import UserError, did_you_mean
    from pirl.files import expand_home
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)

# A subcommand is a dataclass of its options with a `run` that returns the exit code, or a group of such subcommands.
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
# Options that the parser cannot know, by the field that holds them.
_OPEN_OPTIONS: dict[str, Callable[[Sequence[str], str, Any], tuple[list[str], Settings]]] = {
    "env_options": take_env_options,
    "settings": take_settings,
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
        command = _parse(arguments)
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


def _report_unraisable(what: Any) -> None:
    """Report as usual, except for TensorStore's writes that go on after the first one failed."""
    if not (isinstance(what.exc_value, RuntimeError) and str(what.exc_value) == "Event loop is closed"):
        sys.__unraisablehook__(what)


def _parse(arguments: Sequence[str], commands: dict[str, Any] = COMMANDS, program: str = "pirl") -> Any:
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        raise UserError(
            f"{program} has no command {arguments[0]}. {did_you_mean(arguments[0], commands)}See {program} --help."
        )
    command = commands.get(arguments[0]) if arguments else None
    if isinstance(command, dict):
        return _parse(arguments[1:], command, f"{program} {arguments[0]}")
    if command is not None:
        return _parse_options(arguments[1:], command, f"{program} {arguments[0]}")
    listed = {name: _stand_in(f"{program} {name}", entry) for name, entry in commands.items()}
    tyro.extras.subcommand_cli_from_dict(listed, prog=program, description=_ABOUT[program], args=arguments)
    raise AssertionError("without a command, the parser prints the list of commands and exits")


def _stand_in(program: str, entry: Any) -> Any:
    """A command in the list of commands: the first paragraph of its help."""
    about = _ABOUT[program] if isinstance(entry, dict) else inspect.cleandoc(entry.__doc__).split("\n\n")[0]
    return dataclasses.make_dataclass("Entry", [], namespace={"__doc__": about.replace("\n", " ")})


def _parse_options(arguments: Sequence[str], command: Any, program: str) -> Any:
    taken: dict[str, Settings] = {}
    names = [field.name for field in dataclasses.fields(command)]
    if "json" in names:
        arguments = complete_json_flag(arguments)
    for name, take in _OPEN_OPTIONS.items():
        if name in names:
            arguments, taken[name] = take(arguments, program, command)
    known = ["--help", *_flags(command)]
    # The parser alone would take what follows a mistyped flag for an argument.
    options = itertools.takewhile(lambda argument: argument != "--", arguments)
    for flag in (argument.split("=")[0].replace("_", "-") for argument in options if argument.startswith("--")):
        if flag not in known:
            raise UserError(f"{program} has no option {flag}. {did_you_mean(flag, known)}See {program} --help.")
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed, unexpected = tyro.cli(
                command,
                prog=program,
                args=arguments,
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as end:
        # An error of a dataclass of options reads better without the parser's frame.
        error: BaseException | None = end
        while error is not None and not isinstance(error, UserError):
            error = error.__context__
        if error is not None:
            raise error from None
        sys.stderr.write(complaint.getvalue())
        raise
    if unexpected:
        raise UserError(_about_unexpected(unexpected, arguments, command, program))
    return dataclasses.replace(parsed, **taken, **_expanded_paths(parsed))


def _flags(command: Any, prefix: str = "--") -> Iterator[str]:
    """The flags of a command; those of a group, such as the expert's, begin with its name."""
    for field in dataclasses.fields(command):
        name = f"{prefix}{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(field.default_factory):
            yield from _flags(field.default_factory, f"{name}.")
        elif field.name not in _OPEN_OPTIONS:
            yield name


def _expanded_paths(parsed: Any) -> dict[str, Any]:
    """Paths with `~` replaced by homes: the shell leaves it as it is in --json=~/result.json."""
    expanded: dict[str, Any] = {}
    for field in dataclasses.fields(parsed):
        value = getattr(parsed, field.name)
        if isinstance(value, Path):
            expanded[field.name] = expand_home(value)
        elif isinstance(value, tuple) and any(isinstance(entry, Path) for entry in value):
            expanded[field.name] = tuple(map(expand_home, value))
    return expanded


def _about_unexpected(words: Sequence[str], arguments: Sequence[str], command: Any, program: str) -> str:
    """The message about words that no option takes."""
    from pirl.envs.registry import KNOWN

    fields = {f"--{field.name.replace('_', '-')}": field for field in dataclasses.fields(command)}
    before = next((flag for flag, word in itertools.pairwise(arguments) if word == words[0]), "")
    hint = ""
    if before in fields and fields[before].type is bool:
        hint = f"{before} is a switch and takes no value. "
    elif "--env" in fields and words[0] in [known.alias for known in KNOWN]:
        hint = f"Did you mean --env {words[0]}? "
    return f"{program} does not expect {' '.join(words)!r}. {hint}See {program} --help."


if __name__ == "__main__":
    main()
