"""`pirl sweep`: searches hyperparameters by successive halving."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pirl.cli.console import facts, show, table
from pirl.cli.options import Configured, checked_name
from pirl.cli.parser import option
from pirl.errors import ConfigError, UserError
from pirl.files import expand_home

if TYPE_CHECKING:
    from pirl.config import RLTrainConfig
    from pirl.sweep.plan import SweepPlan


@dataclass(frozen=True, kw_only=True)
class Sweep(Configured):
    """Search hyperparameters by successive halving. Also takes every option of `pirl train`.

    All trials train up to the first rung, the best third of them up to the second, and so on. Rungs count iterations for
    RIPT, environment steps if there is an online phase, otherwise updates. If there are no more combinations than trials,
    all are tried; otherwise half of the trials are drawn at random, and TPE proposes the others. The results are a table,
    sweep.json and sweep.html. `pirl sweep PRESET --help` lists the fields that can be searched.
    """

    exp_name: str | None = option("NAME")
    """Name of the sweep and of its directory in runs_dir. Trials are the runs NAME/trial-000, NAME/trial-001, …"""
    param: tuple[str, ...] = option("FIELD=VALUES", default=())
    """Search-space parameter: FIELD=A,B,C or FIELD=LOW..HIGH or FIELD=log:LOW..HIGH. Repeat it for each field."""
    trials: int = 8
    """Number of settings to try."""
    rungs: str | None = option("INT,INT,…", shown="from the next three options")
    """Training lengths, such as 5,15,45."""
    iterations: int | None = option(shown="the length in the configuration")
    """The last rung."""
    min_iterations: int | None = option(shown="chosen to give three rungs")
    """The smallest first rung."""
    reduction: int = 3
    """One in N trials goes on to the next rung, which is N times as long."""
    metric: str = option("NAME", default="eval/success")
    """Metric to compare trials by: its last value in their metrics.jsonl."""
    mode: Literal["max", "min"] = "max"
    """Whether the best is the largest or the smallest."""
    jobs: int = 1
    """Trials to run in parallel, each on its share of the cores and of the devices in CUDA_VISIBLE_DEVICES."""
    dry_run: bool = False
    """Check everything and print how much work the sweep is; start nothing."""
    resume: bool = False
    """Continue the sweep of that name. Finished work is not repeated."""
    overwrite: bool = False
    """Delete the sweep of that name and start over."""

    def run(self) -> int:
        name = checked_name(self.exp_name, resume=self.resume, overwrite=self.overwrite)
        if not self.param:
            raise UserError("no parameter: pass at least one, such as --param agent.optimizer.peak-lr=1e-4,3e-4,1e-3.")
        if importlib.util.find_spec("optuna") is None:
            raise ConfigError("a sweep needs Optuna, which is not installed: pip install 'pirl[sweep]'.")
        plan = self.make_plan(name)
        show(facts(plan.describe()))
        if self.dry_run:
            return 0
        from pirl.sweep.run import PAGE_FILE, RESULTS_FILE, find_best, ranking, run_sweep, summarize

        trials = run_sweep(plan, resume=self.resume, overwrite=self.overwrite)
        columns, rows = ranking(plan, trials)
        headers = [column.title for column in columns]
        show("", table(headers, [[cell or "–" for cell in row] for row in rows]), "")
        print(summarize(plan, trials), flush=True)
        page, results = plan.directory / PAGE_FILE, plan.directory / RESULTS_FILE
        show("", facts([("page", f"{page}: open it in a browser"), ("results", str(results))]))
        best = find_best(plan, trials)
        assert best is not None
        print(f"The best setting in full:\n  {plan.full_command(best)}", flush=True)
        return 0

    def make_plan(self, name: str) -> "SweepPlan":
        """What is going to be done; raises if anything is wrong with it."""
        from pirl.config import override_config
        from pirl.sweep.plan import SweepPlan, check_plan, examples, length_of, make_rungs, make_space, parse_rungs

        if self.rungs is not None and (self.iterations is not None or self.min_iterations is not None):
            raise UserError("--rungs replaces --iterations and --min-iterations: leave them out.")
        base, given = self.resolve(), dict(self.settings)

        def configure(setting: Mapping[str, str]) -> "RLTrainConfig":
            return override_config(base, setting, texts=True)

        space = make_space(self.param, self.aliases, given, configure)
        length_field, length = length_of(configure({name: examples(values)[0] for name, values in space.items()}))
        if self.rungs is not None:
            rungs = parse_rungs(self.rungs)
        else:
            last = length if self.iterations is None else self.iterations
            rungs = make_rungs(self.min_iterations, last, self.reduction)
        plan = SweepPlan(
            name=name,
            directory=expand_home(base.runs_dir) / name,
            base=base,
            train=self._train_arguments(),
            given=given,
            length_field=length_field,
            space=space,
            rungs=rungs,
            reduction=self.reduction,
            trials=self.trials,
            metric=self.metric,
            mode=self.mode,
            seed=base.seed,
            jobs=self.jobs,
        )
        check_plan(plan, configure)
        return plan

    def _train_arguments(self) -> tuple[str, ...]:
        preset = () if self.preset is None else (self.preset,)
        file = () if self.config_file is None else ("--config-file", str(self.config_file))
        return (*preset, *file, *(("--debug",) if self.debug else ()))
