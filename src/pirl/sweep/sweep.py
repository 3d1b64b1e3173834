"""A sweep from its first trial to its results, which goes on where it stopped."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pirl.errors import DataError, TrainingError
from pirl.files import write_file
from pirl.processes import GRACE, Interruptions, exit_in_words, last_lines
from pirl.run_files import RunFiles
from pirl.sweep.directory import PAGE_FILE, RESULTS_FILE, open_directory
from pirl.sweep.display import Display
from pirl.sweep.page import build_sweep_page
from pirl.sweep.plan import SweepPlan
from pirl.sweep.running import Job, Runner
from pirl.sweep.trials import Trial, find_best, is_share, measure, order

if TYPE_CHECKING:
    from pirl.sweep.study import Study

_SHOWN_LINES = 12


def run_sweep(plan: SweepPlan, *, resume: bool = False, overwrite: bool = False, grace: float = GRACE) -> list[Trial]:
    """Do what is not done yet; gives all trials, the best first. Writes sweep.json and sweep.html after every rung.

    A trial that fails is noted and left behind; if none is left, that is a `TrainingError`.
    """
    from pirl.sweep.study import Study  # here, because Optuna is an extra

    with open_directory(plan, resume=resume, overwrite=overwrite) as lock, Display() as display:
        with Interruptions() as interruptions:
            sweep = _Sweep(plan, Study(plan), Runner(plan.jobs, lock, display, interruptions, grace), display)
            sweep.run()
        return order(sweep.study.trials(), plan.mode)


class _Sweep:
    """A sweep under way."""

    def __init__(self, plan: SweepPlan, study: "Study", runner: Runner, display: Display) -> None:
        self.study = study
        self._plan, self._runner, self._display = plan, runner, display

    def run(self) -> None:
        """All rungs. What was decided on a rung follows from what was measured there, so a resumed sweep agrees."""
        on_rung: list[int] | None = None
        for rung in self._plan.halving.rungs:
            self._runner.run(self._jobs(rung, on_rung), self._on_end)
            trials = self.study.trials()
            on_rung = [trial.number for trial in trials] if on_rung is None else on_rung
            values = {number: _value_on(trials[number], rung) for number in on_rung}
            on_rung = self._decide(rung, values)
            self._write(is_over=not on_rung)
            if find_best(trials, self._plan.mode) is None:
                self._give_up(trials)
            if not on_rung:
                return

    def _jobs(self, rung: int, on_rung: list[int] | None) -> Iterator[Job]:
        """The trials that still have to come to a rung; those of the first are made as there is room for them."""
        known = self.study.trials()
        for trial in known if on_rung is None else [known[number] for number in on_rung]:
            if trial.state == "running" and rung not in trial.measured:
                yield self._job(trial, rung)
        if on_rung is None:
            for _ in range(len(known), self._plan.count):
                yield self._job(self.study.begin(), rung)

    def _job(self, trial: Trial, rung: int) -> Job:
        setting = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in trial.setting.items())
        self._display.say(f"{trial.name}: {setting}; to {rung:,} {self._plan.unit}")
        resume = RunFiles(self._plan.run_of(trial)).lock_file.exists()
        command = self._plan.trial_command(trial, rung, resume=resume)
        return Job(trial, rung, command, self._plan.log_of(trial))

    def _on_end(self, job: Job, code: int, seconds: float) -> None:
        trial, plan = job.trial, self._plan
        try:
            if code:
                said = ": ".join(("", *last_lines(job.log)))
                raise TrainingError(f"{exit_in_words(code)}{said}")
            found = measure(plan.run_of(trial), plan.metric)
        except (TrainingError, DataError) as error:
            self.study.fail(trial, str(error))
            self._display.say(f"{trial.name}: failed ({error}). Its log is {job.log}")
            return
        self.study.report(trial, job.rung, found)
        words = found.words(is_share(plan.metric))
        self._display.say(f"{trial.name}: {plan.metric} {words} after {job.rung:,} {plan.unit}, in {seconds:.0f} s")

    def _decide(self, rung: int, values: Mapping[int, float | None]) -> list[int]:
        """Who goes on; the others have ended here."""
        plan, trials = self._plan, self.study.trials()
        is_last = rung == plan.halving.rungs[-1]
        promoted = [] if is_last else plan.halving.promote(values, plan.mode)
        for number in values:
            if number not in promoted and trials[number].state == "running":
                (self.study.complete if is_last else self.study.prune)(trials[number])
        if all(value is None for value in values.values()):
            self._display.say(f"none of {len(values)} trials reached {rung:,} {plan.unit}")
        if promoted:
            names = ", ".join(trials[number].name for number in promoted)
            self._display.say(f"{len(promoted)} of {len(values)} trials continue beyond {rung:,} {plan.unit}: {names}")
        return sorted(promoted)

    def _give_up(self, failed: list[Trial]) -> None:
        """Say why, by the last that tried."""
        log = self._plan.log_of(failed[-1])
        lines = "".join(f"\n  {line}" for line in last_lines(log, _SHOWN_LINES))
        raise TrainingError(
            f"every trial failed. The end of {log}:{lines}\nFix the cause, and start over with --overwrite."
        )

    def _write(self, *, is_over: bool) -> None:
        trials = order(self.study.trials(), self._plan.mode)
        results = make_results(self._plan, trials, is_over=is_over)
        write_file(self._plan.directory / RESULTS_FILE, json.dumps(results, indent=2) + "\n")
        write_file(self._plan.directory / PAGE_FILE, build_sweep_page(self._plan, trials, datetime.now(UTC)))


def make_results(plan: SweepPlan, trials: list[Trial], *, is_over: bool) -> dict[str, Any]:
    """What sweep.json says; the trials with the best first."""
    best = find_best(trials, plan.mode)
    return {
        "settings": plan.settings(),
        "is_over": is_over,
        "best": None if best is None else {**best.to_json(), "command": plan.full_command(best.setting)},
        "trials": [trial.to_json() for trial in trials],
    }


def _value_on(trial: Trial, rung: int) -> float | None:
    return trial.measured[rung].value if rung in trial.measured else None
