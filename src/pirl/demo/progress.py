"""How far a run has come, by what is in its directory."""

from pathlib import Path

from pirl.report.runs import count_env_steps, read_log
from pirl.run_files import RunFiles, saved_steps


def updates_made(run: Path) -> int:
    """Updates after which it was saved last; 0 if it never was."""
    return max(saved_steps(RunFiles(run).states), default=0)


def steps_practised(run: Path) -> int:
    """Environment steps that it has taken to learn from them."""
    return count_env_steps(read_log(RunFiles(run).metrics_file)) or 0


def iterations_made(run: Path) -> int:
    """Iterations of RIPT, those without anything to learn from too."""
    return len(read_log(RunFiles(run).metrics_file).iterations)
