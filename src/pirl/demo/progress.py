"""How far a run has come, by what is in its directory."""

import json
from pathlib import Path
from typing import Any

from pirl.run_files import RunFiles, saved_steps


def updates_made(run: Path) -> int:
    """Updates after which it was saved last; 0 if it never was."""
    return max(saved_steps(RunFiles(run).states), default=0)


def steps_practised(run: Path) -> int:
    """Environment steps that it has taken to learn from them."""
    counted = [record.get("rollout/env_steps", record.get("online/env_steps")) for record in _metrics(run)]
    return next((int(count) for count in reversed(counted) if count is not None), 0)


def iterations_made(run: Path) -> int:
    """Iterations of RIPT, those without anything to learn from too."""
    return sum("rollout/contexts" in record for record in _metrics(run))


def _metrics(run: Path) -> list[dict[str, Any]]:
    """What was logged, in order; of a line that was cut by a kill, nothing."""
    file = RunFiles(run).metrics_file
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]
