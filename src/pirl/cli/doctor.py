"""`pirl doctor`: checks whether this machine has what pirl needs, and says how to fix what is missing."""

import sys
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from pirl.cli.console import WithJson, show
from pirl.cli.parser import option


@dataclass(frozen=True, kw_only=True)
class Doctor(WithJson):
    """Check this machine: devices, packages, extras, disk, cache, tokenizers, video codecs, rendering.

    Each line is ✓ (works), – (absent, and optional) or ✗ (broken), with what to do. Takes seconds and needs no network.
    Exit code 1 if something that pirl itself needs is broken, else 0.
    """

    runs_dir: Path = option("DIR", default=Path("runs"))
    """Directory for runs, to check for space and permissions."""

    def run(self) -> int:
        """Print the results; exit code 1 if pirl does not work here."""
        from rich.table import Table

        import pirl
        from pirl.doctor import run_checks

        self.check_json()
        results = list(run_checks(self.runs_dir))
        marks = {"good": "✓", "absent": "–", "bad": "✗"}
        try:
            "".join(marks.values()).encode(sys.stdout.encoding or "ascii")
        except UnicodeEncodeError:
            marks = {"good": "+", "absent": "-", "bad": "x"}
        for section, members in groupby(results, lambda result: result.section):
            table = Table.grid("", "", "", padding=(0, 2, 0, 0))
            for result in members:
                table.add_row(f"  {marks[result.state]}", result.name, result.detail)
                if result.advice:
                    table.add_row("", "", f"→ {result.advice}")
            show(section, table)
        bad = [result for result in results if result.state == "bad"]
        broken = [result.name for result in bad if result.needed]
        optional = f", but some optional parts do not: {', '.join(result.name for result in bad)}" if bad else ""
        verdict = f"pirl works here{optional}."
        if broken:
            verdict = f"pirl does not work here yet. Fix: {', '.join(broken)}."
        print(f"\n{verdict}")
        findings = [{"section": result.section} | asdict(result) for result in results]
        self.write_json({"pirl": pirl.__version__, "fit": not broken, "findings": findings}, "the findings")
        return 1 if broken else 0
