"""The training loop: next batch, update, log, now and then measure and save. It knows none of the maths."""

import contextlib
import functools
from collections.abc import Iterator
from signal import Signals
from typing import Any, cast

import jax
import numpy as np

from pirl.agents.common import Agent, Metrics
from pirl.config import RLTrainConfig, format_config, to_plain
from pirl.errors import EnvError, TrainingError, UserError
from pirl.training.checkpoints import Checkpoints
from pirl.training.compiling import prepare_jax
from pirl.training.display import Display, Stopwatch
from pirl.training.exchange import Exchange, Requests
from pirl.training.following import open_display, open_log, open_run
from pirl.training.health import EarlyStopping, Health, StopSignal
from pirl.training.iteration_health import IterationHealth, Problem
from pirl.training.measuring import measure_losses, measure_success_once
from pirl.training.memory import MemoryMonitor
from pirl.training.practice import Interrupted, Told
from pirl.training.practising import make_practice, open_environments
from pirl.training.rollbacks import Rollbacks
from pirl.training.run import RunDirectory
from pirl.training.setup import (
    Setup,
    agent_shapes,
    check_env,
    create_agent,
    data_identity,
    describe_policy,
    refuse_other_data,
    set_up,
)
from pirl.training.sharding import own_rows
from pirl.training.updates import compile_updates, update_keys
from pirl.training.words import Ending, closing_words, opening_words
from pirl.training.writers import Number


def train(
    config: RLTrainConfig,
    *,
    exp_name: str,
    resume: bool = False,
    overwrite: bool = False,
) -> int:
    """Train as configured, into the run directory runs_dir/exp_name; the return value is the exit code."""
    prepare_jax()
    directory = config.runs_dir / exp_name
    plain = to_plain(config)
    begin = functools.partial(
        RunDirectory.open, directory, plain, resume=resume, overwrite=overwrite, config_text=format_config(config)
    )
    with open_run(begin) as run:
        try:
            setup = set_up(config, resumed=run if resume else None, progress=jax.process_index() == 0)
            if not run.is_resumed:
                run.begin()
            display = open_display(config, exp_name, run)
            with display, Trainer(setup, run, display) as trainer:
                return trainer.run()
        except UserError:
            run.abandon()
            raise


class Trainer:
    """A run under way."""

    def __init__(self, setup: Setup, run: RunDirectory, display: Display):
        self._setup, self._run, self._config, self._display = setup, run, setup.config, display
        config = self._config
        self._line, self._stop_requests = Exchange("trainer"), Requests("stop")
        self._is_interrupted = self._owes_evaluation = False
        self._stopwatch, self._memory = Stopwatch(), MemoryMonitor()
        self._remembered = self._memory.take("data")
        self._compiled: set[str] = set()
        self._data_identity = data_identity(setup)
        self._measured: dict[str, Number] = {}
        self._losses: list[jax.Array] = []
        self._step = self._first_step = self._good_step = 0
        self._saved_at: tuple[int, int] | None = (0, 0)
        self._timed_step = self._logged_step = self._evaluated_step = self._looked_at = 0
        saved = None
        display.say(f"{config.name} in {run.path}")
        self._open = contextlib.ExitStack()
        try:
            self._checkpoints = self._open.enter_context(Checkpoints(run, config.checkpoints))
            returns = None if config.online.env_steps else setup.returns  # online, there may be better ones
            self._health = Health(config.health, run.bad_batches, run.states, self._checkpoints.wait, returns)
            self._stopping = EarlyStopping(config.stopping)
            self._watch = IterationHealth(config.health)
            is_new = self._checkpoints.latest() is None
            self._pool = open_environments(config)
            if self._pool is not None:
                self._open.enter_context(self._pool)
                check_env(setup, self._pool)
            self._rollbacks = Rollbacks(config, run, self._checkpoints)
            self._practice = make_practice(setup, self._pool, run, is_new=is_new, branch=self._rollbacks.__len__)
            if self._practice is not None:
                self._open.callback(self._practice.close)
            if is_new:
                run.begin()
                with self._compiling("the learner"):
                    self._agent = create_agent(setup)
            else:
                saved = self._load()
                refuse_other_data(config.data.repo_id, saved["data"], self._data_identity)
                run.begin()
                self._go_on_from(saved)
            self._remembered |= self._memory.take("learner")
            self._first_step, self._began_at = self._step, (self._step, self._clock())
            self._sampler_state = None if saved is None else saved["sampler"]
            self._loader = setup.open_loader(self._sampler_state) if self._is_offline() else None
            self._open.callback(self._close_loader)
            position = None if saved is None else saved["log"]
            self._log = self._open.enter_context(open_log(config, run, position, to_plain(config)))
            run.note(parameters=self._agent.parameter_counts(), action_dim=setup.action_dim)
        except BaseException:
            self._open.close()
            raise
        self._update, self._updates, self._validate = compile_updates(setup)

    # --- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Until everything is learned, nothing improves any more, or somebody says stop."""
        for words in opening_words(self._agent, self._log.hints, self._step):
            self._display.say(words)
        self._stop_early = self._stopping.is_over  # as the run had ended before
        if self._config.goes_by_iterations and self._checkpoints.latest() is None:
            self._save()  # something to go back to
        with StopSignal(self._display.note) as signal:
            while self._owes_evaluation or not (self._is_over() or self._stop_early):
                if self._is_stopped(signal):
                    break
                if self._owes_evaluation:
                    self._look_around(signal)
                    continue
                if not self._is_offline() and not self._practise(signal):
                    continue
                batch, count = self._next_batch()
                update, what = (self._update, "the update") if count == 1 else (self._updates, f"{count} updates")
                with self._compiling(what), self._stopwatch("update"):
                    keys = update_keys(self._config.seed, len(self._rollbacks), self._step, count)
                    self._agent, metrics = update(self._agent, batch, keys)
                before, self._step = self._step, self._step + count
                self._log.add(metrics)
                if not self._is_sound(metrics, batch):
                    continue
                if _is_passed(before, self._step, self._config.logging.every):
                    self._write_log()
                self._look_around(signal)
            self._finish(signal)
        return signal.exit_code

    def _look_around(self, signal: StopSignal) -> None:
        """Measure and save what is due after an update; an evaluation that is stopped is owed, and what follows it."""
        if self._due(self._config.validation_every) and not self._owes_evaluation:
            self._stop_early |= self._measure(self._validation())
        if self._owes_evaluation or self._due(self._config.evaluation.every):
            values = self._evaluation(signal)
            self._owes_evaluation = values is None
            if values is None:
                return
            self._stop_early |= self._measure(values)
            self._saved_at = None  # if this step was saved, it was when it owed this
        is_last = self._is_over() or self._stop_early
        if self._due(self._config.checkpoints.every) and not is_last:
            self._save()
        self._looked_at = self._clock()

    def _is_offline(self) -> bool:
        online = 0 if self._practice is None else self._practice.updates
        return self._step - online < self._config.steps

    def _is_over(self) -> bool:
        return not self._is_offline() and (self._practice is None or self._practice.is_over)

    def _is_stopped(self, signal: StopSignal) -> bool:
        """Whether somebody has told this process or another one to stop: all of them hear it at the same step."""
        heard = self._stop_requests.heard(signal.received)
        if heard is not None:
            signal.received = Signals(heard)
        self._is_interrupted = heard is not None
        return self._is_interrupted

    def _is_within_iteration(self) -> bool:
        """Whether updates of an iteration have yet to be made."""
        return self._config.goes_by_iterations and self._practice is not None and self._practice.owes_updates

    def _clock(self) -> int:
        """What is shown, and measurements and checkpoints are counted by: updates, or iterations that have ended."""
        if not self._config.goes_by_iterations:
            return self._step
        return 0 if self._practice is None else self._practice.rounds

    def _due(self, every: int) -> bool:
        """Whether the clock has passed a multiple of `every` since it was last looked at."""
        return _is_passed(self._looked_at, self._clock(), every)

    def _next_batch(self) -> tuple[Any, int]:
        """A batch on the device, or several stacked for updates that are compiled into one; and how many."""
        with self._stopwatch("data"):
            if self._is_offline():
                assert self._loader is not None
                return next(self._loader), 1
            assert self._practice is not None
            batches = self._practice.batches()
            return self._setup.place(batches), len(batches)

    @contextlib.contextmanager
    def _compiling(self, what: str) -> Iterator[None]:
        """Say what takes so long the first time. How fast steps are is measured from when the first is compiled."""
        if what in self._compiled:
            yield
            return
        with self._display.phase(f"compiling {what}"):
            self._display.say(f"compiling {what} …")
            yield
        self._compiled.add(what)
        if self._step == self._first_step:
            self._stopwatch = Stopwatch()

    def _practise(self, signal: StopSignal) -> bool:
        """Collect a round of episodes if no updates are owed; says whether there are any now."""
        assert self._practice is not None
        self._close_loader()
        if self._practice.owes_updates:
            return True
        with self._display.phase("practising"), self._stopwatch("rollout"), self._compiling("acting"):
            try:
                told = self._practice.collect(self._agent, lambda: signal.requested)
            except Interrupted:
                return False
        self._losses = []
        self._tell(told)
        success, speed = told.metrics.get("rollout/success"), told.timing.get("env_steps_per_second")
        problem = self._watch.after_rollouts(success, speed)
        if problem is not None and self._respond(problem):
            return False
        if success is not None and (problem is None or not problem.can_go_back):
            self._good_step = self._step  # the policy was fine, however slow its rollouts were
        return self._practice.owes_updates

    def _is_sound(self, metrics: Metrics, batch: Any) -> bool:
        """Look at an update, and at what has come of a round when it was the last; False if the run went back."""
        try:
            with self._stopwatch("update"):  # it is here that the host waits for the device
                self._health.check(self._step - 1, metrics, own_rows(batch))
                if self._config.goes_by_iterations and not self._is_within_iteration():
                    self._health.finish()  # so that nothing of it comes to light later, in the next iteration
        except TrainingError:
            reason = f"{self._config.health.max_skipped} updates in a row were skipped"
            if self._config.health.action != "rollback" or not self._go_back(reason):
                raise
            return False
        if not self._config.goes_by_iterations or self._practice is None:
            return True
        self._losses.append(metrics["loss"])
        if self._is_within_iteration():
            return True
        with self._display.phase("looking back"), self._stopwatch("rollout"):
            told = self._practice.conclude(self._agent, float(np.mean(jax.device_get(self._losses))))
        self._tell(told)
        problem = self._watch.after_updates(told.metrics.get("rollout/drift"))
        return problem is None or not self._respond(problem)

    def _tell(self, told: Told) -> None:
        for line in told.lines:
            self._display.say(line)
        if told.timing:
            self._log.write_timing(self._step, told.timing)
        if told.metrics:
            self._stop_early |= self._measure(dict(told.metrics))

    # --- when an iteration does not go well -----------------------------------------------------------------------

    def _respond(self, problem: Problem) -> bool:
        """Warn, go back, or stop, as configured; says whether the run went back."""
        action = self._config.health.action
        if action == "warn" or (action == "rollback" and not problem.can_go_back):
            self._display.say(f"warning: {problem.reason}.")
            return False
        if action == "rollback" and self._go_back(problem.reason):
            return True
        raise self._rollbacks.give_up(self._step, problem.reason)

    def _go_back(self, reason: str) -> bool:
        """Go on from the newest checkpoint of a policy that was fine, with other rollouts; False if that cannot be."""
        candidates, left = self._rollbacks.candidates(self._good_step), self._step
        if not candidates:
            return False
        saved = self._load(candidates)
        self._display.say(f"{reason}: going back from step {left} to the checkpoint of step {self._step}.")
        self._rollbacks.record(left, self._step, reason)
        self._go_on_from(saved)
        self._log.rewind(saved["log"])
        self._measured, self._stop_early = {}, self._stopping.is_over
        # From now on it is the beginning of another story, also for whoever resumes it.
        self._save()
        self._checkpoints.wait()
        return True

    def _write_log(self) -> None:
        values = self._log.flush(self._step)
        timing = self._stopwatch.lap(self._step - self._timed_step)
        self._logged_step = self._timed_step = self._step
        self._log.write_timing(self._step, {**timing, **self._remembered, **self._memory.take("update")})
        self._remembered = {}
        self._display.update(self._clock(), {**values, **self._measured}, timing)

    def _finish(self, signal: StopSignal) -> None:
        self._health.finish()
        self._checkpoints.wait()
        unsaved = (self._step, self._clock()) != self._saved_at or self._checkpoints.latest() is None
        if self._step > self._logged_step and not self._is_interrupted:
            self._write_log()
            unsaved = True
        if self._config.evaluation.every and self._step > self._evaluated_step and not self._is_interrupted:
            if (values := self._evaluation(signal)) is not None:  # the end, whatever the interval
                self._measure(values)
            unsaved = True
        if unsaved:
            self._save()
        self._checkpoints.wait()
        self._run.note(stopped=self._is_interrupted)
        self._display.say(closing_words(self._config, self._step, self._clock(), self._ending()))
        self._display.say(f"policy: {self._run.policies / str(self._checkpoints.latest())}")

    def _ending(self) -> Ending:
        if self._is_interrupted:
            return "interrupted"
        if self._stop_early:
            return "no better"
        return "nothing to do" if (self._step, self._clock()) == self._began_at else "done"

    # --- measuring -----------------------------------------------------------------------------------------------

    def _measure(self, values: dict[str, Number]) -> bool:
        """Write what was measured; says whether to stop."""
        self._measured |= self._log.write(self._step, values)
        self._display.update(self._clock(), self._measured)
        metric = self._config.stopping.metric
        return metric in values and self._stopping.update(float(values[metric]))

    def _validation(self) -> dict[str, Number]:
        with self._display.phase("validating"), self._stopwatch("evaluation"), self._compiling("the validation"):
            return measure_losses(self._setup, self._validate, self._agent)

    def _evaluation(self, signal: StopSignal) -> dict[str, Number] | None:
        """Success in the environment; None if somebody says stop meanwhile."""
        with self._display.phase("evaluating"), self._stopwatch("evaluation"), self._compiling("acting"):
            try:
                values, summary = measure_success_once(
                    *(self._setup, self._agent, self._pool, self._run, self._step, self._line),
                    is_stopped=lambda: signal.requested,
                )
            except Interrupted:
                self._is_interrupted = True
                return None
            except EnvError:
                if self._line.count == 1:  # what was learned is kept, until the environment works again
                    self._owes_evaluation = True
                    self._save()
                raise
        self._evaluated_step = self._step
        self._display.say(f"step {self._step}: {summary}")
        return values

    # --- beginning and saving ------------------------------------------------------------------------------------

    def _save(self) -> None:
        with self._display.phase("saving"), self._stopwatch("checkpoint"):
            # First: the replay buffer may let go of what only the state before the last one needs.
            self._checkpoints.wait()
            measured = {name: float(value) for name, value in self._measured.items()}
            host: dict[str, Any] = {
                "log": self._log.position(),
                "health": self._health.state(),
                "stopping": self._stopping.state(),
                "watch": self._watch.state(),
                "good_step": self._good_step,
                "practice": None if self._practice is None else self._practice.state(),
                "within_iteration": self._is_within_iteration(),
                "owed": {"looked_at": self._looked_at, "measured": measured} if self._owes_evaluation else None,
                "sampler": self._sampler_state if self._loader is None else self._loader.state(),
                "data": self._data_identity,
                "logged_step": self._logged_step,
                "evaluated_step": self._evaluated_step,
            }
            about = describe_policy(self._setup, self._agent)
            policy, statistics, clock = self._agent.policy(), self._setup.norm_stats, self._clock()
            self._checkpoints.save(self._step, self._agent, host, policy, statistics, about, measured, clock)
            self._saved_at, self._measured = (self._step, clock), {}
            self._remembered |= self._memory.take("checkpoint")

    def _load(self, candidates: list[int] | None = None) -> dict[str, Any]:
        """Take the learner from the newest checkpoint, of all or of some; returns what was saved beside it."""
        shapes = agent_shapes(self._setup)
        self._agent = cast(Agent, None)  # devices may have no room for two
        self._agent, saved, self._step = self._checkpoints.restore(shapes, among=candidates)
        return saved

    def _go_on_from(self, saved: dict[str, Any]) -> None:
        """Take over what was saved beside the learner."""
        self._health.restore(saved["health"])
        self._stopping.restore(saved["stopping"])
        self._watch.restore(saved["watch"])
        if self._practice is not None and saved["practice"] is not None:
            self._practice.restore(saved["practice"])
        self._good_step, self._timed_step = saved["good_step"], self._step
        self._logged_step, self._evaluated_step = saved["logged_step"], saved["evaluated_step"]
        self._looked_at, self._saved_at = self._clock(), (self._step, self._clock())
        owed = saved.get("owed")  # earlier versions always finished an evaluation first
        self._owes_evaluation = owed is not None
        if owed is not None:
            self._looked_at, self._measured = owed["looked_at"], owed["measured"]

    def _close_loader(self) -> None:
        """When the offline updates are made, or the run ends: nothing more is prepared or held for them."""
        if self._loader is not None:
            self._sampler_state = self._loader.state()
            self._loader.close()
            self._loader = None

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


def _is_passed(before: int, now: int, every: int) -> bool:
    """Whether a multiple of `every` lies between."""
    return every > 0 and now // every > before // every
