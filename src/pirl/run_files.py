"""What lies where in the directory of a run."""

import json
from pathlib import Path

from pirl.errors import UserError

TRAIN_STATE = "train_state"  # in a checkpoint that a run can be resumed from


class RunFiles:
    """The paths of a run's files; they need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock_file = path / "lock"  # held by the process that uses the run; holds its number
        self.config_file = path / "config.yaml"  # the resolved configuration
        self.metadata_file = path / "metadata.json"  # versions, command line, when begun and resumed, whether stopped
        self.metrics_file = path / "metrics.jsonl"  # one object per logged step; the same run writes the same bytes
        self.timing_file = path / "timing.jsonl"  # what is measured by the clock
        self.checkpoints = path / "checkpoints"  # by step: OpenPI policies; the newest with the train state
        self.best_file = self.checkpoints / "best.json"  # which step was best, by which metric, with what value
        self.replay = path / "replay"  # episodes of the online phase
        self.rollouts = path / "rollouts"  # a LeRobot dataset of the rollouts of a RIPT run
        self.drift_probe = path / "drift_probe.npz"  # what the drift of a RIPT run is measured on
        self.videos = path / "videos"
        self.evaluations = path / "evaluations"  # results of every evaluated episode, by step
        self.tensorboard = path / "tensorboard"

    @property
    def log_file(self) -> Path:
        """The log of this process."""
        return self.path / "log.txt"

    @property
    def bad_batches(self) -> Path:
        """Batches whose update was skipped, as far as this process holds them."""
        return self.path / "bad_batches"

    @property
    def is_run(self) -> bool:
        """Whether a run was begun here: its metadata is written last."""
        return self.config_file.is_file() and self.metadata_file.is_file()

    @property
    def was_stopped(self) -> bool:
        """Whether it ended because somebody told it to, before its last step."""
        try:
            return bool(json.loads(self.metadata_file.read_text(encoding="utf-8"))["stopped"])
        except (OSError, ValueError, KeyError, TypeError):
            return False


def saved_steps(directory: Path, *, resumable: bool = False) -> list[int]:
    """The steps there are checkpoints of, or those with a train state (`resumable`), in order."""
    entries = directory.iterdir() if directory.is_dir() else ()
    numbers = sorted({int(entry.name) for entry in entries if entry.name.isdecimal()})
    part = TRAIN_STATE if resumable else ""
    return [step for step in numbers if (directory / str(step) / part).is_dir()]


def runs_in(directory: Path) -> list[Path]:
    """The runs that lie in a directory, in order."""
    entries = sorted(directory.iterdir()) if directory.is_dir() else []
    return [entry for entry in entries if RunFiles(entry).is_run or saved_steps(RunFiles(entry).checkpoints)]


def refuse_directory_of_runs(directory: Path) -> None:
    """Raise if one run is expected and a directory of several is named."""
    if runs := [str(run) for run in runs_in(directory)]:
        raise UserError(f"{directory} holds runs; name one of them: {', '.join(runs[:8])}{', …' * (len(runs) > 8)}.")
