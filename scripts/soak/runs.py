"""The learners of a soak, their processes, and whether two runs came to the same bits."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pirl.run_files import saved_steps

CLOCK = Path(__file__).parent / "clock"
_POLL = 0.1  # seconds
_MARK = "SOAK_MARK"
_SIGTERM_CAUGHT = 1 << 14


@dataclass(frozen=True)
class Learner:
    """A preset, what makes it small enough to be run again and again, and what makes it outlast any soak."""

    preset: str
    options: Mapping[str, Any]
    without_end: Mapping[str, Any] = field(default_factory=dict)


_EVALUATION = {"evaluation.episodes": 16, "evaluation.envs": 16}
# Only what sees pictures has a frame cache to lose: that is the one which clones.
LEARNERS = {
    "acrlpd": Learner(
        "demo_state",
        {
            **{"data.repo_id": "{place}/state", "env.max_steps": 50, "from_scratch": "true"},
            **{"steps": 80, "batch_size": 16, "logging.every": 8, "checkpoints.every": 16},
            **{"online.env_steps": 800, "online.episodes_per_round": 8, "checkpoints.keep_period": "none"},
            **{"evaluation.every": 80, **_EVALUATION},
        },
        # The buffer is full after some rounds, so that what grows then is nobody's wish.
        {"online.env_steps": 10**9, "online.capacity": 2_000, "checkpoints.every": 80},
    ),
    "ript": Learner(
        "demo_ript",
        {
            **{"checkpoint": "{place}/start", "rollout.iterations": 5, "rollout.groups": 6, "rollout.budget": 12},
            **{"agent.num_epochs": 2, "batch_size": 32, "logging.every": 2, "checkpoints.every": 1},
            **{"evaluation.every": 3, **_EVALUATION},
        },
        {"rollout.iterations": 10**6, "rollout.max_barren": 10**6},
    ),
    "bc": Learner(
        "demo_bc",
        {
            **{"data.repo_id": "{place}/pixels", "steps": 40, "batch_size": 8},
            **{"logging.every": 2, "checkpoints.every": 6},
        },
        {"steps": 10**9, "checkpoints.every": 30},
    ),
}
_START = {"data.repo_id": "{place}/state", "steps": 300, "checkpoints.every": 300}
_EXPERT = {"expert.aim-bias": 0.025, "expert.noise": 0.2, "expert.delay": 5, "expert.flawed": 0.5}


@dataclass
class Place:
    """Where a soak keeps everything; caches and temporary files too, so that it can delete or count them."""

    out: Path
    data: Path | None = None  # if it is kept elsewhere
    mark: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def cache(self) -> Path:
        """What pirl can compute again."""
        return self.out / "cache"

    @property
    def clock(self) -> Path:
        """Seconds by which the clock of disturbed runs is off."""
        return self.out / "clock"

    def environment(self) -> dict[str, str]:
        """Of every process: its own caches, a clock that can be moved, and a mark by which it is found."""
        temporary = self.out / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, (str(CLOCK), os.environ.get("PYTHONPATH"))))
        own = {"PIRL_CACHE": str(self.cache), "TMPDIR": str(temporary), "SOAK_CLOCK": str(self.clock), _MARK: self.mark}
        return {**os.environ, **own, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}

    def prepare(self) -> None:
        """Demonstrations, seen as state and as pictures, and a policy that RIPT can begin with."""
        expert = flags(_EXPERT)
        collect = [*_pirl(), "collect", "--env", "tabletop", "--policy", "expert", "--storage", "image", *expert]
        state = ["--env.observation", "state", "--env.max-steps", "50", "--episodes", "60"]
        self._do("collect_state", [*collect, *state, "--out", str(self.out / "state")])
        self._do("collect_pixels", [*collect, "--episodes", "20", "--out", str(self.out / "pixels")])
        self._do("start", self.command(Learner("demo_ript_start", _START), self.out / "start"))

    def command(self, learner: Learner, run: Path, *more: str) -> list[str]:
        """`pirl train` into a run directory."""
        options = {name: str(value).format(place=self.data or self.out) for name, value in learner.options.items()}
        where = ("--exp-name", run.name, "--runs-dir", str(run.parent))
        return [*_pirl(), "train", learner.preset, *where, *flags(options), *more]

    def _do(self, name: str, command: list[str]) -> None:
        segment = Segment(command, self.out / "logs" / f"{name}.log", self.environment())
        if segment.finish(3600) != 0:
            raise SystemExit(f"soak: {name} failed before anything was disturbed; see {segment.log}")

    def marked_processes(self, patience: float = 10.0) -> dict[int, str]:
        """Processes of this soak that are still there after a while, by id, with their command lines."""
        give_up = time.monotonic() + patience
        while True:
            found = {}
            for entry in Path("/proc").iterdir():
                with contextlib.suppress(OSError):
                    if entry.name.isdecimal() and f"{_MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                        words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                        found[int(entry.name)] = words.strip()
            if not found or time.monotonic() > give_up:
                return found
            time.sleep(_POLL)


class Segment:
    """One process of a run, and its memory while it lasted."""

    def __init__(self, command: list[str], log: Path, environment: Mapping[str, str], first_line: int = 0):
        """`first_line`: of the metrics, when it began."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.first_line = first_line
        self.log, self._log_start, self._began = log, log.stat().st_size if log.exists() else 0, time.monotonic()
        self.memory: list[tuple[float, float]] = []  # hours since it began, MiB resident
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    @property
    def words(self) -> str:
        """What it said."""
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")

    @property
    def is_learning(self) -> bool:
        """Whether it has come to its loop: from then on it catches SIGTERM."""
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            return bool(int(status.split("SigCgt:")[1].split()[0], 16) & _SIGTERM_CAUGHT)
        return False

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Until it is so; False if the process ends before, or it takes too long."""
        give_up = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < give_up:
            self._measure()
            if condition():
                return True
            time.sleep(_POLL)
        return False

    def finish(self, seconds: float) -> int | None:
        """The exit code; None if it had to be ended by force because it took so long."""
        self.wait(lambda: False, seconds)
        code = self.process.poll()
        if code is None:
            self.kill()
        return code

    def kill(self) -> None:
        """End it by force, and nothing that it started: that has to notice by itself."""
        self.process.kill()
        self.process.wait()

    def _measure(self) -> None:
        with contextlib.suppress(OSError, IndexError):
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
            self.memory.append((self.seconds / 3600, pages * os.sysconf("SC_PAGESIZE") / 2**20))


def flags(options: Mapping[str, Any]) -> list[str]:
    """Fields as options of a command."""
    return [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def lines_in(run: Path) -> int:
    """Metrics written so far."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def states(run: Path) -> list[Path]:
    """The checkpoints that a run can be resumed from, oldest first."""
    return [run / "checkpoints" / str(step) for step in saved_steps(run / "checkpoints", resumable=True)]


def differences(run: Path, reference: Path) -> list[str]:
    """What is not bit for bit the same: metrics, the last state (arrays, and what is saved beside them), its policy."""
    if (run / "metrics.jsonl").read_bytes() != (reference / "metrics.jsonl").read_bytes():
        return ["metrics.jsonl"]
    newest, expected = states(run)[-1], states(reference)[-1]
    if newest.name != expected.name:
        return [f"the last state is of step {newest.name} instead of {expected.name}"]
    found = [] if _host(newest) == _host(expected) else ["the state's host part"]
    for part in ("train_state", "params"):
        ours, theirs = _arrays(newest / part), _arrays(expected / part)
        names = ours.keys() | theirs.keys()
        found += sorted(name for name in names if not _same(ours.get(name), theirs.get(name)))
    return found


def leftovers(run: Path, reference: Path, temporary: Path) -> list[str]:
    """Files that a finished run should not have, and temporary ones."""
    hidden = [str(path.relative_to(run)) for path in run.rglob("*") if path.name.startswith(".")]
    usual = {entry.name for entry in reference.iterdir()}
    extra = [entry.name for entry in run.iterdir() if entry.name not in usual and not entry.name.startswith(".")]
    return hidden + extra + [f"tmp/{entry.name}" for entry in temporary.iterdir()]


def _pirl() -> list[str]:
    return [sys.executable, "-m", "pirl.cli.main"]


def _same(left: np.ndarray | None, right: np.ndarray | None) -> bool:
    if left is None or right is None:
        return False
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def _host(state: Path) -> Any:
    """What is saved beside the arrays, but for what depends on the clock."""
    host = json.loads((state / "state.json").read_text())["host"]
    host["parts"]["log"]["metrics"].pop("timing")
    return host


def _arrays(directory: Path) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, read by Orbax alone."""
    import jax
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.metadata(directory).item_metadata.tree
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        arrays = reader.restore(directory, restore_args=arguments)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(arrays)}
