"""`pirl demo`: RL against behaviour cloning, from nothing to a report, with one command."""

import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from pirl.cli.console import facts, show
from pirl.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Collect demonstrations, train a small π₀ by behaviour cloning and then by RL, and compare them, with controls.

    About ten minutes on two cores. What was interrupted goes on when the same command is called again.
    """

    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs/demo")
    """Directory for everything."""
    episodes: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Episodes by which each policy is measured; 200 if not told."""
    demonstrations: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Demonstrations to collect; 500 if not told."""
    quick: bool = False
    """Ten updates of everything and few episodes: shows that it works, not that it learns."""
    overwrite: bool = False
    """Delete the demo in that directory, and begin anew."""

    def run(self) -> int:
        """Do it; the return value is the exit code."""
        for name, value in (("episodes", self.episodes), ("demonstrations", self.demonstrations)):
            if value is not None and value < 1:
                raise UserError(f"--{name} should be at least 1; it is {value}.")
        print(f"pirl demo, in {self.out}", file=sys.stderr, flush=True)
        from pirl.demo import plan
        from pirl.demo.demo import run_demo

        episodes = plan.QUICK_EPISODES if self.quick else plan.EPISODES
        demonstrations = plan.QUICK_DEMONSTRATIONS if self.quick else plan.DEMONSTRATIONS
        config = plan.DemoConfig(
            self.out, self.episodes or episodes, self.demonstrations or demonstrations, quick=self.quick
        )
        begun = time.monotonic()
        results = run_demo(config, overwrite=self.overwrite)
        from pirl.demo.page import summarise, write_report
        from pirl.training.compiling import use_compilation_cache

        show("", _table(results), "")
        print(summarise(results), flush=True)
        print("writing the report …", file=sys.stderr, flush=True)
        use_compilation_cache()
        report = write_report(config, results)
        minutes = f"{(time.monotonic() - begun) / 60:.1f} minutes"
        policy = f"{config.run('acrlpd')}/checkpoints/policy/{results['acrlpd']['step']}"
        env = shlex.join(plan.env_options(config.rl))
        rows = [
            ("report", f"{report}, after {minutes}: open it in a browser"),
            ("results", str(config.out / "results.json")),
            ("next", f"pirl envs play {env} --checkpoint {config.run('acrlpd')} --out {config.out}/film.gif"),
            ("", f"pirl eval {config.run('bc_successes')} {config.run('acrlpd')} {env}"),
            ("", f"pirl convert {policy} --check"),
            ("", "pirl train aloha_fold --exp-name mine --data.repo-id YOUR_DATA --checkpoint CHECKPOINT"),
        ]
        show("", facts(rows))
        return 0


def _table(results: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("policy")
    for name in ("success", "95 % interval", "episodes", "updates", "against BC", "p"):
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
            f"{100 * paired['difference']:+.1f}" if paired else "",
            f"{paired['p_value']:.2g}" if paired else "",
            result["description"],
        )
    return table
