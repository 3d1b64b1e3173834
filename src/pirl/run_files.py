"""What lies where in the directory of a run, for all who write one or read it."""

import json
from pathlib import Path

from pirl.errors import UserError


class RunFiles:
    """The directory of a run, by the names of what is in it; whether anything is there is another question."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def is_run(self) -> bool:
        """Whether a run was begun here: its metadata is written last."""
        return self.config_file.is_file() and self.metadata_file.is_file()

    @property
    def was_stopped(self) -> bool:
        """Whether it ended because somebody told it to: it has come no further than it had by then."""
        try:
            return bool(json.loads(self.metadata_file.read_text(encoding="utf-8"))["stopped"])
        except (OSError, ValueError, KeyError, TypeError):  # earlier versions did not write it down
            return False

    @property
    def lock_file(self) -> Path:
        """Held by the process that uses the run, which says in it who it is."""
        return self.path / "lock"

    @property
    def config_file(self) -> Path:
        """The resolved configuration: a run can be made again from it."""
        return self.path / "config.yaml"

    @property
    def metadata_file(self) -> Path:
        """Versions, parameter counts, the command line, when it was begun and resumed, whether it was stopped."""
        return self.path / "metadata.json"

    @property
    def metrics_file(self) -> Path:
        """One object per logged step; the same run writes the same bytes."""
        return self.path / "metrics.jsonl"

    @property
    def timing_file(self) -> Path:
        """What is measured by the clock."""
        return self.path / "timing.jsonl"

    @property
    def log_file(self) -> Path:
        """What was said."""
        return self.path / "log.txt"

    @property
    def checkpoints(self) -> Path:
        """Both kinds of checkpoint, and which is the best."""
        return self.path / "checkpoints"

    @property
    def states(self) -> Path:
        """Full states, by step: to resume."""
        return self.checkpoints / "state"

    @property
    def policies(self) -> Path:
        """OpenPI policies, by step: to deploy."""
        return self.checkpoints / "policy"

    @property
    def best_file(self) -> Path:
        """Which step was best, by which metric, and with what value."""
        return self.checkpoints / "best.json"

    @property
    def replay(self) -> Path:
        """Episodes of the online phase."""
        return self.path / "replay"

    @property
    def rollouts(self) -> Path:
        """A LeRobot dataset of the attempts of a RIPT run."""
        return self.path / "rollouts"

    @property
    def drift_probe(self) -> Path:
        """What the drift of a RIPT run is measured by."""
        return self.path / "drift_probe.npz"

    @property
    def videos(self) -> Path:
        """Films of evaluated episodes."""
        return self.path / "videos"

    @property
    def evaluations(self) -> Path:
        """Results of every evaluated episode, by step."""
        return self.path / "evaluations"

    @property
    def bad_batches(self) -> Path:
        """Batches whose update was skipped."""
        return self.path / "bad_batches"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's files."""
        return self.path / "tensorboard"


def saved_steps(directory: Path) -> list[int]:
    """The steps there are checkpoints of, in order: directories with a number for a name."""
    entries = directory.iterdir() if directory.is_dir() else ()
    numbers = [(int(entry.name), entry) for entry in entries if entry.name.isdecimal()]
    return sorted(step for step, entry in numbers if entry.name == str(step) and entry.is_dir())


def runs_in(directory: Path) -> list[Path]:
    """The runs that lie in a directory, in order."""
    places = sorted(directory.iterdir()) if directory.is_dir() else []
    return [place for place in places if RunFiles(place).is_run or RunFiles(place).policies.is_dir()]


def refuse_directory_of_runs(directory: Path) -> None:
    """Raise where one run is meant, and the directory of several is named."""
    if runs := [str(run) for run in runs_in(directory)]:
        raise UserError(f"{directory} holds runs; name one of them: {', '.join(runs[:8])}{', …' * (len(runs) > 8)}.")
