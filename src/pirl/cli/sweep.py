"""`pirl sweep`: searches hyperparameters by successive halving."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from pirl.cli.console import default, facts, optional, show, table
from pirl.cli.options import SHORT_NAMES, Configured, checked_name
from pirl.errors import UserError
from pirl.files import expand_home

if TYPE_CHECKING:
    from pirl.config import RLTrainConfig
    from pirl.sweep.plan import SweepPlan
    from pirl.sweep.trials import Trial


@dataclass(frozen=True, kw_only=True)
class Sweep(Configured):
    """Search hyperparameters by successive halving. Also takes every option of `pirl train`.

    All trials train up to the first rung, the best third of them up to the second, and so on. Rungs count iterations for
    RIPT, environment steps if there is an online phase, otherwise updates. If there are no more combinations than trials,
    all are tried; otherwise half of the trials are drawn at random, and TPE proposes the others. The results are a table,
    sweep.json and sweep.html. `pirl sweep PRESET --help` lists the fields that can be knobs.
    """

    program = "pirl sweep"
    needs = "--exp-name NAME --knob FIELD=VALUES"

    exp_name: Annotated[str | None, optional("NAME")] = None
    """Name of the sweep and of its directory in runs_dir. Trials are the runs NAME/trial-000, NAME/trial-001, …"""
    knob: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="FIELD=VALUES")] = ()
    """Field to vary: FIELD=A,B,C or FIELD=LOW..HIGH or FIELD=log:LOW..HIGH. Repeat it for each knob."""
    trials: Annotated[int, tyro.conf.arg(metavar="INT")] = 8
    """Number of settings to try."""
    rungs: Annotated[str | None, default("from the next three options", "INT,INT,…")] = None
    """Training lengths, such as 5,15,45."""
    iterations: Annotated[int | None, default("the length in the configuration", "INT")] = None
    """The last rung."""
    min_iterations: Annotated[int | None, default("chosen to give three rungs", "INT")] = None
    """The smallest first rung."""
    reduction: Annotated[int, tyro.conf.arg(metavar="INT")] = 3
    """One in N trials goes on to the next rung, which is N times as long."""
    metric: Annotated[str, tyro.conf.arg(metavar="NAME")] = "eval/success"
    """Metric to compare trials by: its last value in their metrics.jsonl."""
    mode: Literal["max", "min"] = "max"
    """Whether the best is the largest or the smallest."""
    jobs: Annotated[int, tyro.conf.arg(metavar="INT")] = 1
    """Trials to run in parallel, each on its share of the cores and of the devices in CUDA_VISIBLE_DEVICES."""
    dry_run: bool = False
    """Check everything and print how much work the sweep is; start nothing."""
    resume: bool = False
    """Continue the sweep of that name. Finished work is not repeated."""
    overwrite: bool = False
    """Delete the sweep of that name and start over."""

    def run(self) -> int:
        name = checked_name(self.exp_name, resume=self.resume, overwrite=self.overwrite)
        if not self.knob:
            raise UserError("no knob: pass at least one, such as --knob agent.optimizer.peak-lr=1e-4,3e-4,1e-3.")
        plan = self.make_plan(name)
        show(facts(_about(plan)))
        if self.dry_run:
            return 0
        from pirl.sweep.directory import PAGE_FILE, RESULTS_FILE
        from pirl.sweep.page import summarise
        from pirl.sweep.sweep import run_sweep
        from pirl.sweep.trials import find_best

        trials = run_sweep(plan, resume=self.resume, overwrite=self.overwrite)
        show("", _table(plan, trials), "")
        print(summarise(plan, trials), flush=True)
        best = find_best(trials, plan.mode)
        assert best is not None
        rows = [
            ("page", f"{plan.directory / PAGE_FILE}: open it in a browser"),
            ("results", str(plan.directory / RESULTS_FILE)),
        ]
        show("", facts(rows))
        print(f"The best setting in full:\n  {plan.full_command(best.setting)}", flush=True)
        return 0

    def make_plan(self, name: str) -> "SweepPlan":
        """What is going to be done; raises if anything is wrong with it."""
        from pirl.config import override_config
        from pirl.sweep.halving import Halving, make_rungs, parse_rungs
        from pirl.sweep.knobs import parse_knob, settle_knobs
        from pirl.sweep.plan import SweepPlan, check_plan, length_of

        if self.rungs is not None and (self.iterations is not None or self.min_iterations is not None):
            raise UserError("--rungs replaces --iterations and --min-iterations: leave them out.")
        base, given = self.resolve(), dict(self.settings)

        def configure(setting: Mapping[str, str]) -> "RLTrainConfig":
            return override_config(base, setting, self.program, texts=True)

        knobs = settle_knobs([parse_knob(text, SHORT_NAMES) for text in self.knob], given, configure)
        length_field, length = length_of(configure({knob.name: knob.examples[0] for knob in knobs}))
        if self.rungs is not None:
            rungs = parse_rungs(self.rungs)
        else:
            most = length if self.iterations is None else self.iterations
            rungs = make_rungs(self.min_iterations, most, max(2, self.reduction))
        plan = SweepPlan(
            name=name,
            directory=expand_home(base.runs_dir) / name,
            base=base,
            train=self._train_arguments(),
            given=given,
            length_field=length_field,
            knobs=knobs,
            halving=Halving(rungs, self.reduction),
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


def _about(plan: "SweepPlan") -> list[tuple[str, str]]:
    """What is going to be done, and how much it is."""
    from pirl.sweep.knobs import Range

    rows = []
    for knob in plan.knobs:
        low, high = knob.examples[0], knob.examples[-1]
        log = isinstance(knob.values, Range) and knob.values.log
        values = f"{low} to {high}{', log' * log}" if isinstance(knob.values, Range) else ", ".join(knob.values)
        rows.append((knob.flag, values))
    tried = "all combinations" if plan.grid is not None else "half at random, then by TPE"
    counts = ", ".join(f"{count} to {rung:,}" for count, rung in plan.halving.schedule(plan.count))
    work, whole = plan.halving.work(plan.count), plan.count * plan.halving.rungs[-1]
    return [
        ("sweep", str(plan.directory)),
        *rows,
        ("trials", f"{plan.count}, {tried}: {counts} {plan.unit}"),
        ("work", f"{work:,} {plan.unit} in total, instead of {whole:,}"),
        ("compared by", f"{plan.metric}, {'the larger' if plan.mode == 'max' else 'the smaller'} the better"),
    ]


def _table(plan: "SweepPlan", trials: Sequence["Trial"]) -> Any:
    from pirl.sweep.page import what_became
    from pirl.sweep.trials import is_share

    rows = []
    for rank, trial in enumerate(trials, start=1):
        rows.append(
            (
                "–" if trial.state == "failed" else str(rank),
                *(trial.setting[knob.name] for knob in plan.knobs),
                "–" if trial.rung is None else f"{trial.rung:,}",
                "–" if trial.last is None else trial.last.words(is_share(plan.metric)),
                what_became(trial),
                str(plan.run_of(trial)),
            )
        )
    return table(("rank", *(knob.flag for knob in plan.knobs), plan.unit, plan.metric, "result", "run"), rows)
