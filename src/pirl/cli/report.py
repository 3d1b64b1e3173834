"""`pirl report`: what one run, or several over each other, have to show, as one HTML page."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import tyro

from pirl.cli.console import check_writable, default
from pirl.errors import UserError

_FILE = "report.html"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write the curves, evaluations, times and settings of runs as one HTML page that needs nothing else to be read.

    Runs are only read: one that is at work goes on undisturbed, and the page says how far it has come.
    """

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN…")]
    """Run directories; several are drawn over each other."""
    out: Annotated[Path | None, default(f"{_FILE} in the run, or here if there are several", "FILE")] = None
    """The page."""
    critics: bool = False
    """Also play a success and a failure of the last evaluation again, and show what the critics think along them. This
    loads the learner and starts its environment."""

    def run(self) -> int:
        """Do it; the return value is the exit code."""
        if not self.runs:
            raise UserError("which runs? Name at least one directory that `pirl train` made: pirl report runs/mine.")
        from pirl.files import write_file, writing
        from pirl.report.run_report import build_run_report, read_runs, summarise

        out = self.out or (self.runs[0] / _FILE if len(self.runs) == 1 else Path(_FILE))
        runs = read_runs(self.runs)
        check_writable(out)
        page = build_run_report(runs, datetime.now().astimezone(), critics=self.critics)
        with writing("the report", out.parent, "Choose another place (--out)."):
            write_file(out, page)
        print(summarise(runs))
        print(f"{out}: open it in a browser")
        return 0
