"""Evaluations that were written down, read back."""

import json
from pathlib import Path

from pirl.envs.evaluation import Evaluation
from pirl.errors import DataError
from pirl.run_files import RunFiles


def newest_evaluation(run: Path) -> Path | None:
    """The file of what a run itself has measured last, if it has measured anything."""
    files = [file for file in RunFiles(run).evaluations.glob("*.json") if file.stem.isdecimal()]
    return max(files, key=lambda file: int(file.stem), default=None)


def read_evaluation(file: Path) -> Evaluation:
    """An evaluation from its file."""
    try:
        return Evaluation.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file} is no evaluation that can be read: {error!r}. Delete it, and measure again."
        ) from error
