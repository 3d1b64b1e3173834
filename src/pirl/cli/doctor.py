"""`pirl doctor`: checks whether this machine has what pirl needs, and says how to fix what is missing."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pirl.cli.console import show
from pirl.cli.json_output import WithJson

if TYPE_CHECKING:
    from pirl.doctor import Finding

_MARKS = {"good": "✓", "absent": "–", "bad": "✗"}
# For terminals that know no others.
_PLAIN_MARKS = {"good": "+", "absent": "-", "bad": "x"}


@dataclass(frozen=True, kw_only=True)
class Doctor(WithJson):
    """Check this machine: devices, packages, extras, disk, cache, tokenisers, video codecs, rendering.

    Each line is ✓ (works), – (absent, and optional) or ✗ (broken), with what to do. Takes seconds and needs no network.
    Exit code 1 if something that pirl itself needs is broken, else 0.
    """

    runs_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs")
    """Directory for runs, to check for space and permissions."""

    def run(self) -> int:
        """Do it; the return value is the exit code."""
        import pirl
        from pirl.doctor import examine

        self.check_json()
        findings = list(examine(self.runs_dir))
        broken = [finding for finding in findings if finding.breaks_pirl]
        for section in dict.fromkeys(finding.section for finding in findings):
            show(section, _table([finding for finding in findings if finding.section == section]))
        print(f"\n{_verdict(findings, broken)}")
        record = {"pirl": pirl.__version__, "fit": not broken, "findings": [entry.to_json() for entry in findings]}
        self.write_json(record, "the findings")
        return 1 if broken else 0


def _table(findings: "list[Finding]") -> Any:
    from rich.table import Table

    table = Table.grid("", "", "", padding=(0, 2, 0, 0))
    marks = _marks()
    for finding in findings:
        table.add_row(f"  {marks[finding.state]}", finding.name, finding.detail)
        if finding.advice:
            table.add_row("", "", f"→ {finding.advice}")
    return table


def _marks() -> dict[str, str]:
    try:
        "".join(_MARKS.values()).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return _PLAIN_MARKS
    return _MARKS


def _verdict(findings: "list[Finding]", broken: "list[Finding]") -> str:
    if broken:
        return f"pirl does not work here yet. Fix: {', '.join(finding.name for finding in broken)}."
    bad = [finding.name for finding in findings if finding.state == "bad"]
    return "pirl works here" + (f", but some optional parts do not: {', '.join(bad)}." if bad else ".")
