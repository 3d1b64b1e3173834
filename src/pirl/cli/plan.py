"""`pirl plan`: estimates memory and time of a training run on hardware you need not have."""

import sys
import time
from dataclasses import dataclass
from functools import partial

from pirl.cli.console import WithJson, show
from pirl.cli.options import Configured
from pirl.cli.parser import option
from pirl.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Plan(WithJson, Configured):
    """Estimate memory and time of a run on hardware you need not have. Also takes every option of `pirl train`.

    The real update is compiled for the named devices, without having them: for TPUs after pip install 'pirl[plan]', for
    NVIDIA GPUs after pip install 'pirl[plan-gpu]' (without, simulated CPU devices stand in for them). This takes minutes
    for a full-size model; results are cached. Nothing is downloaded or allocated, and no data is needed. Exit code 0 if
    the run fits on at least one of them, else 1.
    """

    topology: tuple[str, ...] = option("NAME[:SHAPE]", default=())
    """Hardware, such as v5e:2x4, v5p:2x2x2, h100:8 or cpu:8; `here` is this machine. Repeat it to compare several."""
    fresh: bool = False
    """Ignore cached results and compile again."""
    debug: bool = False
    """Plan the short run that `pirl train --debug` would make."""

    def run(self) -> int:
        """Print the plans; exit code 1 if the run fits nowhere."""
        from pirl.plan.measure import measure_run
        from pirl.plan.table import describe, make_plan, summary
        from pirl.plan.topologies import check_topology, parse_topology

        if not self.topology:
            raise UserError("no hardware: pass a --topology, such as --topology h100:8 or --topology v5e:2x4.")
        topologies = [parse_topology(text) for text in self.topology]
        config = self.resolve()
        self.check_json()
        for topology in topologies:
            check_topology(topology)
        print("compiling takes minutes for a full-size model; results are cached", file=sys.stderr)
        plans, parts = [], config.agent.accumulation_steps
        for topology in topologies:
            say = partial(_say, topology.name, time.monotonic())
            measured = measure_run(config, topology, say, fresh=self.fresh)
            plans.append(make_plan(measured, config.batch_size, parts))
            show(*describe(plans[-1], measured, parts))
        if len(plans) > 1:
            show("", summary(plans))
        self.write_json(plans, "the plan")
        return 0 if any(plan["fits"] is not False for plan in plans) else 1


def _say(name: str, began: float, what: str) -> None:
    print(f"{name}: {what} … ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
