"""`pirl report`: writes one HTML page about one or more runs."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pirl.cli.console import check_writable
from pirl.cli.parser import Command, option, positional

_FILE = "report.html"


@dataclass(frozen=True, kw_only=True)
class Report(Command):
    """Write the curves, evaluations, times and settings of runs as one self-contained HTML page.

    Runs are only read. An active run is not disturbed, and the page shows how far it is.
    """

    runs: tuple[Path, ...] = positional("RUN…")
    """Run directories; several are drawn in the same charts."""
    out: Path | None = option("FILE", shown=f"{_FILE} in the run directory, or in the current one for several runs")
    """File to write."""
    critics: bool = False
    """Also replay a success and a failure of the last evaluation, and plot the critics' values along them.
    This loads the learner and starts its environment."""

    def run(self) -> int:
        from pirl.files import write_file, writing
        from pirl.report.runs import read_runs
        from pirl.report.sections import build_run_report, summarize

        out = self.out or (self.runs[0] / _FILE if len(self.runs) == 1 else Path(_FILE))
        runs = read_runs(self.runs)
        check_writable(out)
        page = build_run_report(runs, datetime.now().astimezone(), critics=self.critics)
        with writing("the report", out.parent, "Choose another place (--out)."):
            write_file(out, page)
        print(summarize(runs))
        print(f"{out}: open it in a browser")
        return 0
