"""What a soak has found so far, as a table, as JSON, and as what memory did."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pirl.files import write_file

LEFT_ALONE = "left alone"


@dataclass
class Row:
    """One kind of fault. It is survived if the run could be brought to its end; a run may have had several faults."""

    injected: int = 0
    survived: int = 0
    bit_equal: int = 0


@dataclass
class Round:
    """One run from its beginning to its end, and what was done to it."""

    number: int
    learner: str
    faults: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)  # what was not survived
    remarks: list[str] = field(default_factory=list)  # what was odd, though it was
    missed: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    peak: float | None = None  # MiB of the process that came to the end, if it made most of the run

    @property
    def is_fine(self) -> bool:
        """Whether it came to its end, and to the same bits."""
        return not self.complaints and not self.differences


@dataclass
class LongRun:
    """A learner that nobody disturbed or stopped for long."""

    memory: list[tuple[float, float]] = field(default_factory=list)  # hours since it began, mean MiB resident
    lines: int = 0  # of metrics
    ended_with: int | None = None  # by itself, which it should not

    @property
    def settled(self) -> list[tuple[float, float]]:
        """Without its first third, in which it compiles and its buffers fill."""
        return self.memory[len(self.memory) // 3 :]


@dataclass
class Tally:
    """All rounds, and what ran beside them."""

    minutes: float = 0.0
    seed: int = 0
    not_injected: dict[str, str] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    long_runs: dict[str, LongRun] = field(default_factory=dict)

    @property
    def is_fine(self) -> bool:
        """Whether every fault was survived, and every run came to the same bits."""
        return all(done.is_fine for done in self.rounds) and all(
            run.ended_with is None for run in self.long_runs.values()
        )

    def rows(self, kinds: Sequence[str]) -> dict[str, Row]:
        """By kind of fault, in the order given."""
        rows = {kind: Row() for kind in kinds}
        for done in self.rounds:
            for kind in done.faults or [LEFT_ALONE]:
                row = rows.setdefault(kind, Row())
                row.injected += 1
                row.survived += not done.complaints
                row.bit_equal += done.is_fine
        return rows

    def summary(self, kinds: Sequence[str]) -> dict[str, Any]:
        """Everything that counts, as plain data."""
        peaks: dict[str, int] = {}
        for done in self.rounds:
            if done.peak is not None:
                peaks[done.learner] = max(peaks.get(done.learner, 0), round(done.peak))
        return {
            "name": "soak",
            "minutes": round(self.minutes, 1),
            "seed": self.seed,
            "rounds": len(self.rounds),
            "faults": {kind: asdict(row) for kind, row in self.rows(kinds).items() if kind != LEFT_ALONE},
            "left_alone": asdict(self.rows(kinds).get(LEFT_ALONE, Row())),
            "not_injected": self.not_injected,
            "missed": sum(len(done.missed) for done in self.rounds),
            "bit_equal_runs": sum(done.is_fine for done in self.rounds),
            "remarks": sum(len(done.remarks) for done in self.rounds),
            "leftovers": sum(len(done.leftovers) for done in self.rounds),
            "peak_mib": peaks,
            "long_runs": {
                name: {
                    "minutes": round(60 * run.memory[-1][0], 1) if run.memory else 0.0,
                    "lines": run.lines,
                    "ended_with": run.ended_with,
                    "slope_mib_per_hour": slope(run.settled),
                }
                for name, run in self.long_runs.items()
            },
        }

    def markdown(self, kinds: Sequence[str]) -> str:
        """The table, and a sentence for each thing it does not hold."""
        facts = self.summary(kinds)
        lines = ["| fault | injected | survived | ended bit-equal |", "|---|---|---|---|"]
        for kind, row in self.rows([*kinds, LEFT_ALONE]).items():
            if kind in self.not_injected:
                lines.append(f"| {kind} | not injected: {self.not_injected[kind]} | | |")
            else:
                lines.append(f"| {kind} | {row.injected} | {row.survived} | {row.bit_equal} |")
        peaks = ", ".join(f"{name} {mib} MiB" for name, mib in facts["peak_mib"].items())
        lines += [
            "",
            f"{facts['minutes']:.0f} minutes, seed {self.seed}: {facts['bit_equal_runs']} of {facts['rounds']} runs "
            f"ended bit-equal. {facts['missed']} faults came too late, and are not counted.",
            "",
            f"Peak of the resident memory: {peaks or 'not measured'}. Processes and files left behind: "
            f"{facts['leftovers']}.",
            "",
        ]
        if self.long_runs:
            lines += ["| run without an end | minutes | lines of metrics | slope of its memory |", "|---|---|---|---|"]
        for name, run in facts["long_runs"].items():
            ended = "" if run["ended_with"] is None else f"; it ended by itself with {run['ended_with']}"
            shown = _shown(run["slope_mib_per_hour"])
            lines.append(f"| {name} | {run['minutes']:.0f} | {run['lines']} | {shown}{ended} |")
        for done in self.rounds:
            for what in (*done.complaints, *(f"differs: {name}" for name in done.differences[:5])):
                lines.append(
                    f"\n- round {done.number} ({done.learner}; {', '.join(done.faults) or LEFT_ALONE}): {what}"
                )
            if done.leftovers:
                lines.append(f"\n- round {done.number} left behind: {', '.join(done.leftovers[:5])}")
        return "\n".join(lines).rstrip() + "\n"

    def write(self, out: Path, kinds: Sequence[str]) -> None:
        """The table, and what it was made of, so that an interrupted soak has something to say."""
        write_file(out / "table.md", self.markdown(kinds))
        write_file(out / "summary.json", json.dumps(self.summary(kinds)) + "\n")
        write_file(out / "rounds.json", json.dumps([asdict(done) for done in self.rounds], indent=1) + "\n")
        memory = {name: run.memory for name, run in self.long_runs.items()}
        write_file(out / "memory.json", json.dumps(memory) + "\n")


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Least squares; None if there are too few points."""
    if len(points) < 3:
        return None
    hours, mib = np.asarray(points, np.float64).T
    return round(float(np.polyfit(hours, mib, 1)[0]), 1)


def _shown(value: float | None) -> str:
    return "too little to tell" if value is None else f"{value:+.1f} MiB per hour"
