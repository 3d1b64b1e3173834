"""`pirl demo`: compares RL with behavior cloning, from data collection to a report, with one command."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pirl.cli.console import facts, show
from pirl.cli.parser import Command, option, positional
from pirl.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Demo(Command):
    """Collect demonstrations, train a small π₀ with behavior cloning and then with RL, and compare them, with controls.

    Takes a quarter of an hour or more on two cores. To continue an interrupted demo, run the same command again.
    """

    learner: Literal["acrlpd", "ript"] = positional("[acrlpd|ript]", "acrlpd")
    """The RL method.
    ACRLPD: with critics, on the demonstrations and then also on its own episodes.
    RIPT: only rollouts in the simulator."""
    observation: Literal["pixels", "state"] | None = option(shown="pixels")
    """What the policies of the ACRLPD demo observe: two cameras, or the true state of the table, which is quicker."""
    out: Path | None = option("DIR", shown="runs/demo, runs/demo_state or runs/demo_ript")
    """Directory for data, runs and the report."""
    episodes: int | None = option(shown="200; 8 with --quick")
    """Evaluation episodes per policy."""
    demonstrations: int | None = option(shown="as many as the demo needs")
    """Demonstrations to collect."""
    quick: bool = False
    """Make few updates and run few episodes: checks that everything works, not that it learns."""
    overwrite: bool = False
    """Delete the demo in that directory and start over."""

    def run(self) -> int:
        for name, value in (("episodes", self.episodes), ("demonstrations", self.demonstrations)):
            if value is not None and value < 1:
                raise UserError(f"--{name} should be at least 1; it is {value}.")
        if self.learner == "ript" and self.observation is not None:
            raise UserError("pirl demo ript has no --observation: its policies observe the true state.")
        from pirl.demo.plans import DEMOS
        from pirl.demo.run import RESULTS_FILE, next_commands, run_demo, summarize, write_report
        from pirl.training.setup import prepare_jax

        demo = DEMOS["acrlpd_state" if self.observation == "state" else self.learner].configure(
            out=self.out, episodes=self.episodes, demonstrations=self.demonstrations, quick=self.quick
        )
        print(f"{demo.command}, in {demo.out}", file=sys.stderr, flush=True)
        begun = time.monotonic()
        results = run_demo(demo, overwrite=self.overwrite)
        show("", _table(results, demo.names[demo.baseline]), "")
        print(summarize(demo, results), flush=True)
        print("writing the report …", file=sys.stderr, flush=True)
        prepare_jax()
        report = write_report(demo, results)
        minutes = f"{(time.monotonic() - begun) / 60:.1f} minutes"
        rows = [
            ("report", f"{report}, after {minutes}: open it in a browser"),
            ("results", str(demo.out / RESULTS_FILE)),
        ]
        rows += [("" if number else "next", line) for number, line in enumerate(next_commands(demo, results))]
        show("", facts(rows))
        return 0


def _table(results: Mapping[str, Any], baseline: str) -> Any:
    from rich.table import Table

    table = Table("policy", box=None, pad_edge=False)
    for name in ("success", "95 % interval", "episodes", "policy updates", "env steps", f"against {baseline}", "p"):
        table.add_column(name, justify="right")
    table.add_column("what it is")
    for result in (result for key, result in results.items() if key != "about"):
        paired = result.get("paired")
        table.add_row(
            result["name"],
            f"{100 * result['success']:.1f} %",
            f"[{100 * result['low']:.1f}, {100 * result['high']:.1f}]",
            str(result["episodes"]),
            f"{result['updates']:,}",
            f"{result['env_steps']:,}" if result.get("env_steps") else "",
            f"{100 * paired['difference']:+.1f}" if paired else "",
            f"{paired['p_value']:.2g}" if paired else "",
            result["description"],
        )
    return table
