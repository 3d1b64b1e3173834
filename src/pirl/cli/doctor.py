"""`pirl doctor`: is this machine fit for pirl, and what would make it fit?"""

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
    """Look at the machine: devices, packages, extras, disk, cache, tokenisers, video codecs, rendering.

    Each line is ✓ (well), – (not there, and nobody has to have it) or ✗ (broken), with what to do. Takes seconds and
    needs no network. Exit code 1 if something is broken that pirl itself needs, else 0.
    """

    runs_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs")
    """Where runs will go."""

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
        return f"pirl does not work here yet: see to {', '.join(finding.name for finding in broken)}."
    bad = [finding.name for finding in findings if finding.state == "bad"]
    return "pirl works here" + (f", but not all that it can use: see to {', '.join(bad)}." if bad else ".")
