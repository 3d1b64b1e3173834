"""The memory of a sweep: an Optuna study in a journal file, which also proposes what to try next."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from pirl.errors import DataError
from pirl.sweep.directory import JOURNAL_FILE
from pirl.sweep.knobs import Knob, Range, Setting
from pirl.sweep.plan import SweepPlan
from pirl.sweep.trials import Measurement, State, Trial

_NAME = "sweep"
_STATES: dict[TrialState, State] = {
    TrialState.RUNNING: "running",
    TrialState.PRUNED: "pruned",
    TrialState.COMPLETE: "complete",
    TrialState.FAIL: "failed",
}
# How often another setting is asked for if one was tried already.
_ATTEMPTS = 50


class Study:
    """The trials of a sweep. What is told here is on disk when the call returns; one process at a time uses it."""

    def __init__(self, plan: SweepPlan):
        self._plan = plan
        self._space = {knob.name: _distribution(knob) for knob in plan.knobs}
        self._direction: Literal["maximize", "minimize"] = "maximize" if plan.mode == "max" else "minimize"
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        file = (plan.directory / JOURNAL_FILE).absolute()  # Optuna's lock is a link to it
        _mend(file)
        try:
            storage = JournalStorage(JournalFileBackend(str(file)))
            self._study = optuna.create_study(
                storage=storage, study_name=_NAME, direction=self._direction, load_if_exists=True
            )
            self.trials()
        except Exception as error:  # Optuna does what the lines say, and fails in whatever way they make it
            raise DataError(
                f"{file} is damaged ({error!r:.200}): restore it, or start over with --overwrite."
            ) from error

    def trials(self) -> list[Trial]:
        """All there are, by number."""
        return [_read(trial) for trial in self._study.get_trials(deepcopy=False)]

    def begin(self) -> Trial:
        """A trial with a setting that was not tried before, if there is one."""
        trials = self.trials()
        setting = self._propose(trials)
        self._study.add_trial(
            create_trial(
                state=TrialState.RUNNING,
                params={name: self._parameter(name, text) for name, text in setting.items()},
                distributions=self._space,
                user_attrs={"setting": setting},
            )
        )
        return self.trials()[-1]

    def report(self, trial: Trial, rung: int, measurement: Measurement) -> None:
        """A trial has come to a rung."""
        told = optuna.trial.Trial(self._study, self._frozen(trial)._trial_id)
        # The value last: it is what says that the trial was there.
        if measurement.low is not None:
            told.set_user_attr(f"interval {rung}", [measurement.low, measurement.high])
        told.report(measurement.value, rung)

    def prune(self, trial: Trial) -> None:
        """Others were better."""
        self._study.tell(trial.number, state=TrialState.PRUNED)

    def complete(self, trial: Trial) -> None:
        """It has come to the last rung."""
        assert trial.last is not None
        self._study.tell(trial.number, trial.last.value)

    def fail(self, trial: Trial, reason: str) -> None:
        """It cannot go on."""
        optuna.trial.Trial(self._study, self._frozen(trial)._trial_id).set_user_attr("reason", reason)
        self._study.tell(trial.number, state=TrialState.FAIL)

    def _frozen(self, trial: Trial) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[trial.number]

    def _propose(self, trials: Sequence[Trial]) -> Setting:
        """The next of the grid; where there is none, what TPE thinks of the values on the first rung, which all have."""
        if self._plan.grid is not None:
            return self._plan.grid[len(trials)]
        tried = [dict(trial.setting) for trial in trials]
        first = self._plan.halving.rungs[0]
        # Half of them at random, to learn from.
        sampler = optuna.samplers.TPESampler(
            seed=_seed(self._plan.seed, len(trials)), n_startup_trials=max(2, self._plan.trials // 2)
        )
        study = optuna.create_study(sampler=sampler, direction=self._direction)
        for trial in trials:
            if first in trial.measured:
                params = {name: self._parameter(name, text) for name, text in trial.setting.items()}
                value = trial.measured[first].value
                study.add_trial(create_trial(params=params, distributions=self._space, value=value))
        setting: Setting = {}
        for _ in range(_ATTEMPTS):
            params = study.ask(self._space).params
            setting = {knob.name: _spell(knob, params[knob.name]) for knob in self._plan.knobs}
            if setting not in tried:
                break
        return setting

    def _parameter(self, name: str, text: str) -> str | float | int:
        """A value as Optuna has it."""
        distribution = self._space[name]
        if isinstance(distribution, CategoricalDistribution):
            return text
        return int(text) if isinstance(distribution, IntDistribution) else float(text)


def _distribution(knob: Knob) -> BaseDistribution:
    values = knob.values
    if not isinstance(values, Range):
        return CategoricalDistribution(values)
    if values.whole:
        return IntDistribution(round(values.low), round(values.high), log=values.log)
    return FloatDistribution(values.low, values.high, log=values.log)


def _spell(knob: Knob, value: str | int | float) -> str:
    return value if isinstance(value, str) else knob.values.spell(value) if isinstance(knob.values, Range) else ""


def _read(trial: FrozenTrial) -> Trial:
    attributes = trial.user_attrs
    measured = {
        rung: Measurement(value, *attributes.get(f"interval {rung}", ()))
        for rung, value in trial.intermediate_values.items()
    }
    state = _STATES[trial.state]
    return Trial(trial.number, attributes["setting"], measured, state, attributes.get("reason", ""))


def _seed(seed: int, number: int) -> int:
    """Another for every trial; numpy takes 32 bits."""
    return (seed * 1_000_003 + number) % 2**32


def _mend(file: Path) -> None:
    """Cut off a last line that was being written when the power failed, and the lock of who wrote it."""
    if not file.exists():
        return
    content = file.read_bytes()
    if not content.endswith(b"\n"):
        with file.open("rb+") as journal:
            journal.truncate(content.rfind(b"\n") + 1)
    file.with_name(f"{file.name}.lock").unlink(missing_ok=True)
