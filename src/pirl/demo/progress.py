"""How far a run has come, by what is in its directory."""

from pathlib import Path

from pirl.report.iterations import PREFIXES, find_iterations
from pirl.report.runs import Log, count_env_steps, read_log
from pirl.run_files import RunFiles, saved_steps


def updates_made(run: Path) -> int:
    """Updates after which it was saved last; 0 if it never was."""
    return max(saved_steps(RunFiles(run).states), default=0)


def steps_practised(run: Path) -> int:
    """Environment steps that it has taken to learn from them."""
    return count_env_steps(_read(run).curves) or 0


def iterations_made(run: Path) -> int:
    """Iterations of RIPT, those without anything to learn from too."""
    return len(find_iterations(_read(run).kept))


def _read(run: Path) -> Log:
    file = RunFiles(run).metrics_file
    return read_log(file, keep=PREFIXES) if file.exists() else Log({})
