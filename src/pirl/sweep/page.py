"""The results of a sweep as one HTML page."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from pirl.errors import DataError
from pirl.report.plots import code_block, figure, legend, plot
from pirl.report.runs import Run, read_run
from pirl.report.sections import Column, Section, build_page, table
from pirl.sweep.plan import SweepPlan
from pirl.sweep.plots import colour_of, curves_chart, knob_chart
from pirl.sweep.trials import Trial, find_best, is_share


def build_sweep_page(plan: SweepPlan, trials: Sequence[Trial], when: datetime) -> str:
    """The page; `trials` come the best first."""
    best = find_best(trials, plan.mode)
    sections = [_curves(plan, trials), _knobs(plan, trials), _table(plan, trials)]
    if best is not None:
        sections.append(_next(plan, best))
    return build_page(
        f"Sweep: {plan.name}",
        summarise(plan, trials),
        sections,
        subtitle=f"pirl sweep · {len(trials)} trials · {when:%d %B %Y}",
    )


def summarise(plan: SweepPlan, trials: Sequence[Trial]) -> str:
    """What came of it, in a sentence or two."""
    best = find_best(trials, plan.mode)
    if best is None or best.last is None or best.rung is None:
        return f"None of {len(trials)} trials has a result."
    words = best.last.words(is_share(plan.metric))
    setting = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in best.setting.items())
    return (
        f"{best.name} is the best of {len(trials)} trials: {plan.metric} {words} after {best.rung:,} {plan.unit}, with "
        f"{setting}. It was selected for its number, so expect a little less when you evaluate it again."
    )


def what_became(trial: Trial) -> str:
    """The end of a trial, in a few words."""
    return {
        "running": "running",
        "pruned": "others were better",
        "complete": "trained to the last rung",
        "failed": f"failed: {trial.reason}",
    }[trial.state]


def _curves(plan: SweepPlan, trials: Sequence[Trial]) -> Section:
    rungs = plan.halving.rungs
    runs = [_read(plan.run_of(trial), trial.name) for trial in trials]
    # The best last: they lie on top.
    chart = curves_chart(list(reversed(trials)), list(reversed(runs)), rungs, plan.metric)
    better = "Higher" if plan.mode == "max" else "Lower"
    caption = f"{plan.metric} of each trial; {better.lower()} is better. Hover to see which trial is which."
    (count, rung), *later = plan.halving.schedule(plan.count)
    counts = "".join(f", the best {count} to {rung:,}" for count, rung in later)
    introduction = (
        f"Successive halving: {count} trials are trained to {rung:,} {plan.unit}{counts}. The colour of a line is the "
        "highest rung that its trial reached."
    )
    return Section("Trials", _legend(plan, trials) + figure(plot(chart), caption), introduction)


def _knobs(plan: SweepPlan, trials: Sequence[Trial]) -> Section:
    charts = "".join(
        figure(plot(knob_chart(knob, trials, plan.halving.rungs, plan.metric)), "", knob.flag) for knob in plan.knobs
    )
    introduction = (
        "A dot is a trial on a rung, with its 95 % interval if it has one. Only dots of the same colour were trained "
        "equally long. Higher rungs contain only trials that did well on lower ones, so the first colour is the fairest "
        "comparison."
    )
    return Section("Knobs", f'{_legend(plan, trials)}<div class="panels">{charts}</div>', introduction)


def _table(plan: SweepPlan, trials: Sequence[Trial]) -> Section:
    columns = [
        Column("Trial"),
        Column("Rank", numeric=True),
        *(Column(knob.flag, numeric=True) for knob in plan.knobs),
        Column(plan.unit.capitalize(), numeric=True),
        Column(plan.metric, numeric=True),
        Column("Result"),
    ]
    rows = [
        (
            trial.name,
            "" if trial.state == "failed" else str(rank),
            *(trial.setting[knob.name] for knob in plan.knobs),
            "" if trial.rung is None else f"{trial.rung:,}",
            "" if trial.last is None else trial.last.words(is_share(plan.metric)),
            what_became(trial),
        )
        for rank, trial in enumerate(trials, start=1)
    ]
    return Section("Ranking", table(columns, rows), f"The run directories are in {plan.directory}.")


def _next(plan: SweepPlan, best: Trial) -> Section:
    introduction = f"This trains the best setting, that of {best.name}, in full, as a new run."
    return Section("Next", code_block(plan.full_command(best.setting, " \\\n  ")), introduction)


def _legend(plan: SweepPlan, trials: Sequence[Trial]) -> str:
    reached = {rung for trial in trials for rung in trial.measured}
    rungs = [rung for rung in plan.halving.rungs if rung in reached]
    return legend([(f"{rung:,} {plan.unit}", colour_of(rung, plan.halving.rungs)) for rung in rungs])


def _read(directory: Path, name: str) -> Run:
    """The curves of a run; of one that failed before it logged anything, none."""
    try:
        return read_run(directory, name)
    except DataError:
        return Run(name, {})
