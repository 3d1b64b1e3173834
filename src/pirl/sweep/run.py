"""Runs a sweep: an Optuna study in the sweep's directory proposes and keeps the trials, `pirl train` runs them."""

import functools
import json
import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from pirl.errors import DataError, TrainingError
from pirl.files import write_file
from pirl.jobs import GRACE, Job, JobTable, open_directory, run_jobs
from pirl.processes import format_exit, last_lines
from pirl.report.plots import Axis, Categories, Series, code_block, figure, legend, line_chart, plot
from pirl.report.runs import by_step, read_run, read_runs
from pirl.report.sections import Column, Section, build_page, run_sections, table
from pirl.run_files import RunFiles
from pirl.sweep.plan import SweepPlan, examples, flag_of, name_of, setting_of

RESULTS_FILE, PAGE_FILE, JOURNAL_FILE = "sweep.json", "sweep.html", "study.journal"
_OWN = ("trial-*", "logs", f"{JOURNAL_FILE}*", PAGE_FILE)
_ADVICE = "choose another --exp-name or --runs-dir."
_OUTCOMES = {TrialState.RUNNING: "running", TrialState.PRUNED: "others were better"}
_OUTCOMES |= {TrialState.COMPLETE: "trained to the last rung", TrialState.FAIL: "failed"}
_SHOWN_LINES = 12
_PROPOSALS = 50  # for a setting that was not tried before


def run_sweep(
    plan: SweepPlan, *, resume: bool = False, overwrite: bool = False, grace: float = GRACE
) -> list[FrozenTrial]:
    """Run what is not done yet; gives all trials, the best first. Writes sweep.json and sweep.html after every rung.

    A trial that fails is left behind; if none is left, that is a `TrainingError`.
    """
    record = plan.directory / RESULTS_FILE
    if record.exists() and not (resume or overwrite):
        raise DataError(
            f"{plan.directory} already contains a sweep: --resume continues it, --overwrite deletes it and starts over; "
            "or choose another --exp-name."
        )
    if resume and not record.exists() and not plan.directory.exists():
        raise DataError(f"{plan.directory} contains no sweep, so there is nothing to resume: leave --resume out.")
    opened = open_directory(record, plan.settings(), what="sweep", own=_OWN, overwrite=overwrite, advice=_ADVICE)
    with opened as lock, JobTable() as job_table:
        sweep = _Sweep(plan, open_study(plan), job_table)
        on_rung: Sequence[int] = range(plan.count)
        for rung in plan.rungs:
            lanes = [sweep.jobs(rung, on_rung)] * plan.jobs
            run_jobs(lanes, functools.partial(sweep.on_end, rung), lock=lock, table=job_table, grace=grace)
            on_rung = sweep.promote(rung, on_rung)
            sweep.write(is_over=not on_rung)
            if not on_rung:
                break
        trials = ranked(plan, sweep.trials())
    if find_best(plan, trials) is None:
        log = plan.log_of(trials[-1])
        lines = "".join(f"\n  {line}" for line in last_lines(log, _SHOWN_LINES))
        raise TrainingError(
            f"every trial failed. The end of {log}:{lines}\nFix the cause, and start over with --overwrite."
        )
    return trials


def open_study(plan: SweepPlan) -> optuna.Study:
    """The study in the sweep's directory. What it is told is on disk when the call returns."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file = (plan.directory / JOURNAL_FILE).absolute()  # Optuna's lock is a link to it
    if file.exists():  # a line that was being written when the process was killed, and its lock
        os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
        file.with_name(f"{file.name}.lock").unlink(missing_ok=True)
    try:
        storage = JournalStorage(JournalFileBackend(str(file)))
        return optuna.create_study(storage=storage, study_name="sweep", direction=plan.direction, load_if_exists=True)
    except Exception as error:  # Optuna fails in whatever way a damaged line makes it
        raise DataError(f"{file} is damaged ({error!r:.200}): restore it, or start over with --overwrite.") from error


def propose(plan: SweepPlan, trials: Sequence[FrozenTrial]) -> dict[str, Any]:
    """The parameters of the next trial: the next of the grid, otherwise random ones at first and then those of TPE.

    TPE learns from the first rung, which all trials reach, and ignores trials that are not over: so it gets a study in
    which they are.
    """
    if plan.grid is not None:
        return dict(plan.grid[len(trials)])
    seed = (plan.seed * 1_000_003 + len(trials)) % 2**32
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(2, plan.trials // 2))
    study = optuna.create_study(sampler=sampler, direction=plan.direction)
    for trial in trials:
        if (value := trial.intermediate_values.get(plan.rungs[0])) is not None:
            study.add_trial(create_trial(params=trial.params, distributions=plan.space, value=value))
    for _ in range(_PROPOSALS):
        params = study.ask(plan.space).params
        for name, values in plan.space.items():
            if isinstance(values, FloatDistribution):  # no more digits than people write
                params[name] = min(max(float(f"{params[name]:.4g}"), values.low), values.high)
        if params not in [trial.params for trial in trials]:
            break
    return params


def measure(directory: Path, metric: str) -> tuple[float, list[float]]:
    """The last value of a metric of a run that came to its end, and its 95 % interval, or an empty list."""
    if RunFiles(directory).was_stopped:
        raise DataError(f"{directory} was stopped before it came to its end.")
    curves = read_run(directory).curves
    values = by_step(curves, metric)
    if not values:
        known = ", ".join(sorted(curves)) or "nothing"
        raise DataError(f"{directory} was trained, but logged no {metric}; it logged {known}.")
    step = max(values)
    edges = [by_step(curves, f"{metric}_{edge}") for edge in ("low", "high")]
    return values[step], [edge[step] for edge in edges] if all(step in edge for edge in edges) else []


class _Sweep:
    """A sweep in progress. What is promoted follows from the values on a rung alone, so a resumed sweep agrees."""

    def __init__(self, plan: SweepPlan, study: optuna.Study, job_table: JobTable) -> None:
        self._plan, self._study, self._job_table = plan, study, job_table

    def trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def jobs(self, rung: int, on_rung: Sequence[int]) -> Iterator[Job]:
        """Those trials that still have to come to a rung; new ones are proposed when there is room for them."""
        plan = self._plan
        for number in on_rung:
            if number == len(trials := self.trials()):
                params, state = propose(plan, trials), TrialState.RUNNING
                self._study.add_trial(create_trial(state=state, params=params, distributions=plan.space))
            trial = self.trials()[number]
            if trial.state == TrialState.RUNNING and rung not in trial.intermediate_values:
                title = f"{_format_setting(trial)}; to {rung:,} {plan.unit}"
                yield Job(name_of(trial), title, plan.trial_command(trial, rung), plan.log_of(trial))

    def on_end(self, rung: int, job: Job, code: int | None, seconds: float) -> None:
        plan, job_table = self._plan, self._job_table
        job_table.end(job.name, "done", seconds)
        if code is None:
            return
        trial = next(trial for trial in self.trials() if name_of(trial) == job.name)
        handle = optuna.trial.Trial(self._study, trial._trial_id)
        try:
            if code:
                raise TrainingError(": ".join((format_exit(code), *last_lines(job.log))))
            value, interval = measure(plan.run_of(trial), plan.metric)
        except (TrainingError, DataError) as error:
            handle.set_user_attr("reason", str(error))
            self._study.tell(trial.number, state=TrialState.FAIL)
            job_table.say(f"{job.name}: failed ({error}). Its log is {job.log}")
            return
        handle.set_user_attr(f"interval {rung}", interval)
        handle.report(value, rung)  # last: this says that the trial was there
        words = measured(plan, self.trials()[trial.number])
        job_table.say(f"{job.name}: {plan.metric} {words} after {rung:,} {plan.unit}, in {seconds:.0f} s")

    def promote(self, rung: int, on_rung: Sequence[int]) -> list[int]:
        """Which trials go on; the others end here."""
        plan, trials, say = self._plan, self.trials(), self._job_table.say
        is_last = rung == plan.rungs[-1]
        values = {number: trials[number].intermediate_values.get(rung) for number in on_rung}
        promoted = [] if is_last else plan.promote(values)
        for number in values:
            if number not in promoted and trials[number].state == TrialState.RUNNING:
                state = TrialState.COMPLETE if is_last else TrialState.PRUNED
                self._study.tell(number, values[number] if is_last else None, state=state)
        if all(value is None for value in values.values()):
            say(f"none of {len(values)} trials reached {rung:,} {plan.unit}")
        if promoted:
            names = ", ".join(name_of(trials[number]) for number in promoted)
            say(f"{len(promoted)} of {len(values)} trials continue beyond {rung:,} {plan.unit}: {names}")
        return promoted

    def write(self, *, is_over: bool) -> None:
        plan = self._plan
        trials = ranked(plan, self.trials())
        best = find_best(plan, trials)
        results = {
            "settings": json.loads(json.dumps(plan.settings(), default=str)),
            "is_over": is_over,
            "best": None if best is None else {**_to_json(best), "command": plan.full_command(best)},
            "trials": [_to_json(trial) for trial in trials],
        }
        write_file(plan.directory / RESULTS_FILE, json.dumps(results, indent=2) + "\n")
        write_file(plan.directory / PAGE_FILE, build_sweep_page(plan, trials, datetime.now().astimezone()))


def _to_json(trial: FrozenTrial) -> dict[str, Any]:
    rungs = {
        str(rung): {"value": value} | dict(zip(("low", "high"), trial.user_attrs[f"interval {rung}"], strict=False))
        for rung, value in sorted(trial.intermediate_values.items())
    }
    about = {"name": name_of(trial), "parameters": setting_of(trial), "state": trial.state.name.lower()}
    return about | {"outcome": outcome(trial), "rungs": rungs}


def ranked(plan: SweepPlan, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The best first: who came further, then who is better there, then who was earlier; those that failed last."""
    sign = -1 if plan.mode == "max" else 1

    def rank(trial: FrozenTrial) -> tuple[bool, int, float, int]:
        rung = trial.last_step or 0
        return trial.state == TrialState.FAIL, -rung, sign * trial.intermediate_values.get(rung, 0.0), trial.number

    return sorted(trials, key=rank)


def find_best(plan: SweepPlan, trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    first = ranked(plan, trials)[0]
    return None if first.last_step is None or first.state == TrialState.FAIL else first


def measured(plan: SweepPlan, trial: FrozenTrial) -> str:
    """The metric of a trial on its last rung: 42.0 % [35.1, 49.2], or 0.1234; empty if it came to none."""
    if (rung := trial.last_step) is None:
        return ""
    value, interval = trial.intermediate_values[rung], trial.user_attrs[f"interval {rung}"]
    if "success" not in plan.metric:
        return f"{value:.4g}"
    return f"{100 * value:.1f} %" + (" [{:.1f}, {:.1f}]".format(*(100 * edge for edge in interval)) if interval else "")


def outcome(trial: FrozenTrial) -> str:
    reason = trial.user_attrs.get("reason")
    return f"{_OUTCOMES[trial.state]}: {reason}" if reason else _OUTCOMES[trial.state]


def _format_setting(trial: FrozenTrial) -> str:
    return ", ".join(f"{flag_of(name)} {value}" for name, value in setting_of(trial).items())


def ranking(plan: SweepPlan, trials: Sequence[FrozenTrial]) -> tuple[list[Column], list[list[str]]]:
    """The results as a table, of trials with the best first."""
    numeric = ("Rank", *map(flag_of, plan.space), plan.unit.capitalize(), plan.metric)
    rows = [
        [
            name_of(trial),
            "" if trial.state == TrialState.FAIL else str(rank),
            *setting_of(trial).values(),
            "" if trial.last_step is None else f"{trial.last_step:,}",
            measured(plan, trial),
            outcome(trial),
        ]
        for rank, trial in enumerate(trials, start=1)
    ]
    return [Column("Trial"), *(Column(title, numeric=True) for title in numeric), Column("Result")], rows


def summarize(plan: SweepPlan, trials: Sequence[FrozenTrial]) -> str:
    """The result in a sentence or two."""
    if (best := find_best(plan, trials)) is None:
        return f"None of {len(trials)} trials has a result."
    return (
        f"{name_of(best)} is the best of {len(trials)} trials: {plan.metric} {measured(plan, best)} after "
        f"{best.last_step:,} {plan.unit}, with {_format_setting(best)}. It was selected for its number, so expect a "
        "little less when you evaluate it again."
    )


def build_sweep_page(plan: SweepPlan, trials: Sequence[FrozenTrial], when: datetime) -> str:
    """The ranking, the metric against each parameter and the best command, above the report of all runs."""
    sections = [Section("Ranking", table(*ranking(plan, trials)), f"The run directories are in {plan.directory}.")]
    (count, rung), *later = plan.schedule()
    counts = "".join(f", the best {count} to {rung:,}" for count, rung in later)
    colors = [(f"{rung:,} {plan.unit}", index) for index, rung in enumerate(plan.rungs)]
    charts = "".join(figure(plot(_chart(plan, name, trials)), "", flag_of(name)) for name in plan.space)
    introduction = (
        f"Successive halving: {count} trials are trained to {rung:,} {plan.unit}{counts}. A dot is a trial on a rung, "
        "with its 95 % interval if it has one. Only dots of the same color were trained equally long; higher rungs "
        "contain only trials that did well on lower ones, so the first color is the fairest comparison."
    )
    sections.append(Section("Parameters", legend(colors) + f'<div class="panels">{charts}</div>', introduction))
    if (best := find_best(plan, trials)) is not None:
        command = code_block(plan.full_command(best, " \\\n  "))
        sections.append(Section("Next", command, f"This trains the setting of {name_of(best)} in full, as a new run."))
    if runs := [plan.run_of(trial) for trial in trials if RunFiles(plan.run_of(trial)).is_run]:
        sections += run_sections(read_runs(runs))
    subtitle = f"pirl sweep · {len(trials)} trials · {when:%d %B %Y}"
    return build_page(f"Sweep: {plan.name}", summarize(plan, trials), sections, subtitle=subtitle)


def _chart(plan: SweepPlan, name: str, trials: Sequence[FrozenTrial]) -> str:
    """A dot for each trial on each rung, over the values of a parameter: ranges to scale, lists in columns."""
    distribution, series = plan.space[name], []
    if isinstance(distribution, CategoricalDistribution):
        values = examples(distribution)
        axis: Axis = Categories(-0.5, len(values) - 0.5, names=values)
    else:
        assert isinstance(distribution, IntDistribution | FloatDistribution)
        axis = Axis(distribution.low, distribution.high, distribution.log)
    for trial in trials:
        x = trial.params[name]
        if isinstance(axis, Categories):  # side by side in a column, so that none hides another
            x = axis.names.index(x) + 0.5 * (trial.number + 0.5) / len(trials) - 0.25
        for rung, value in trial.intermediate_values.items():
            low, high = np.array(trial.user_attrs[f"interval {rung}"] or [np.nan, np.nan])
            edges, color = (np.array([low]), np.array([high])), plan.rungs.index(rung)
            title = f"{name_of(trial)} after {rung:,}"
            series.append(Series(title, np.array([x], float), np.array([value]), *edges, color=color))
    is_share = "success" in plan.metric
    y_range = (0.0, 1.0) if is_share else None
    label = f"{plan.metric} against {flag_of(name)}"
    return line_chart(series, label=label, percent=is_share, x_axis=axis, y_range=y_range, unit=flag_of(name))
