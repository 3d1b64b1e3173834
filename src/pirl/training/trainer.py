"""The training loop: next batch, update, log, now and then measure and save. It knows none of the maths."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from pirl.agents.base import Metrics
from pirl.agents.ript import RIPTConfig
from pirl.config import RLTrainConfig, format_config, to_plain
from pirl.data import Loader
from pirl.errors import DataError, TrainingError, UserError
from pirl.training.checkpoints import Checkpoints
from pirl.training.compiling import use_compilation_cache
from pirl.training.display import Display, Stopwatch
from pirl.training.health import EarlyStopping, Health, StopSignal
from pirl.training.iteration_health import IterationHealth, Problem
from pirl.training.measuring import measure_losses, measure_success
from pirl.training.metrics import MetricsLog
from pirl.training.practice import Told
from pirl.training.practising import make_practice, open_environments
from pirl.training.run import RunDirectory, saved_steps
from pirl.training.setup import Setup, agent_shapes, check_env, create_agent, data_identity, set_up
from pirl.training.updates import compile_updates
from pirl.training.writers import Number, check_trackers


def train(
    config: RLTrainConfig,
    *,
    exp_name: str,
    resume: bool = False,
    overwrite: bool = False,
) -> int:
    """Train as configured, into the run directory runs_dir/exp_name; the return value is the exit code."""
    check_trackers(config.logging)
    use_compilation_cache()
    directory = config.runs_dir / exp_name
    plain = to_plain(config)
    with RunDirectory.open(
        directory, plain, resume=resume, overwrite=overwrite, config_text=format_config(config)
    ) as run:
        try:
            setup = set_up(config)
            display = _make_display(config, exp_name, run)
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
        self._stopwatch = Stopwatch()
        self._compiled: set[str] = set()
        self._data_identity = data_identity(setup)
        self._measured: dict[str, Number] = {}
        self._losses: list[jax.Array] = []
        self._step = self._first_step = self._good_step = 0
        self._saved_at = (0, 0)
        self._timed_step = self._logged_step = self._evaluated_step = self._looked_at = 0
        saved = None
        display.say(f"{config.name} in {run.path}")
        self._open = contextlib.ExitStack()
        try:
            self._checkpoints = self._open.enter_context(Checkpoints(run, config.checkpoints))
            self._health = Health(config.health, run.bad_batches, run.states, self._checkpoints.wait)
            self._stopping = EarlyStopping(config.stopping)
            self._watch = IterationHealth(config.health)
            is_new = self._checkpoints.latest() is None
            self._pool = open_environments(config)
            if self._pool is not None:
                self._open.enter_context(self._pool)
                check_env(setup, self._pool)
            self._practice = make_practice(setup, self._pool, run, is_new=is_new, branch=lambda: len(self._rollbacks))
            if self._practice is not None:
                self._open.callback(self._practice.close)
            if is_new:
                with self._compiling("the learner"):
                    self._agent = create_agent(setup)
                self._take_positions(None)
            else:
                saved = self._restore()
                self._refuse_other_data(saved["data"])
            self._first_step, self._began_at = self._step, (self._step, self._clock())
            self._sampler_state = None if saved is None else saved["sampler"]
            self._loader = self._open_loader()
            self._log = self._open.enter_context(
                MetricsLog(run.path, config.logging, None if saved is None else saved["log"], to_plain(config))
            )
        except BaseException:
            self._open.close()
            raise
        self._update, self._updates, self._validate = compile_updates(setup)
        run.note(parameters=self._agent.parameter_counts(), action_dim=setup.action_dim)

    # --- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Until everything is learned, nothing improves any more, or somebody says stop."""
        self._say_hello()
        self._stop_early = self._was_stopped()
        if self._config.goes_by_iterations and self._checkpoints.latest() is None:
            self._save()  # something to go back to
        with StopSignal(self._display.note) as signal:
            while not (self._is_over() or self._stop_early or signal.requested):
                if not self._is_offline() and not self._practise():
                    continue
                batch, count = self._next_batch()
                update, what = (self._update, "the update") if count == 1 else (self._updates, f"{count} updates")
                with self._compiling(what), self._stopwatch("update"):
                    self._agent, metrics = update(self._agent, batch, self._keys(count))
                before, self._step = self._step, self._step + count
                self._log.add(metrics)
                if not self._is_sound(metrics, batch):
                    continue
                if _is_passed(before, self._step, self._config.logging.every):
                    self._write_log()
                if self._due(self._config.validation_every):
                    self._stop_early |= self._measure(self._validation())
                if self._due(self._config.evaluation.every):
                    self._stop_early |= self._measure(self._evaluation())
                is_last = self._is_over() or self._stop_early
                if self._due(self._config.checkpoints.every) and not is_last:
                    self._save()
                self._looked_at = self._clock()
            self._finish(signal)
        return signal.exit_code

    def _is_offline(self) -> bool:
        online = 0 if self._practice is None else self._practice.updates
        return self._step - online < self._config.steps

    def _is_over(self) -> bool:
        return not self._is_offline() and (self._practice is None or self._practice.is_over)

    def _was_stopped(self) -> bool:
        """Whether the run that is resumed had ended because nothing improved."""
        stopping = self._config.stopping
        return stopping.metric is not None and self._stopping.state()["waited"] >= stopping.patience

    def _clock(self) -> int:
        """What measurements and checkpoints are counted by: updates made, or iterations that came to their end."""
        if not self._config.goes_by_iterations:
            return self._step
        return 0 if self._practice is None else self._practice.rounds

    def _due(self, every: int) -> bool:
        """Whether the clock has passed a multiple of `every` since it was last looked at."""
        return _is_passed(self._looked_at, self._clock(), every)

    def _keys(self, count: int) -> jax.Array:
        """The randomness of an update follows from the seed and its number; of several, one key each."""
        key = jax.random.key(self._config.seed)
        if rollbacks := len(self._rollbacks):
            key = jax.random.fold_in(key, rollbacks)
        if count == 1:
            return jax.random.fold_in(key, self._step)
        return jax.vmap(lambda step: jax.random.fold_in(key, step))(np.arange(self._step, self._step + count))

    def _next_batch(self) -> tuple[Any, int]:
        """A batch on the device, or several stacked for updates that are compiled into one; and how many."""
        with self._stopwatch("data"):
            if self._is_offline():
                assert self._loader is not None
                return next(self._loader), 1
            assert self._practice is not None
            batches = self._practice.batches()
            several = len(batches) > 1
            batch = jax.tree.map(lambda *leaves: np.stack(leaves), *batches) if several else batches[0]
            sharding = self._setup.batch_sharding(stacked=several)
            if sharding is None:
                return jax.device_put(batch), len(batches)
            place = functools.partial(jax.make_array_from_process_local_data, sharding)
            return jax.tree.map(place, batch), len(batches)

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

    def _practise(self) -> bool:
        """Collect a round of episodes if no updates are owed; says whether there are any now."""
        assert self._practice is not None
        if self._practice.owes_updates:
            return True
        with self._display.phase("practising"), self._stopwatch("rollout"), self._compiling("acting"):
            told = self._practice.collect(self._agent)
        self._losses = []
        self._tell(told)
        success, speed = told.metrics.get("rollout/success"), told.timing.get("env_steps_per_second")
        if problem := self._watch.after_rollouts(success, speed):
            if self._respond(problem):
                return False
        elif success is not None:
            self._good_step = self._step
        return self._practice.owes_updates

    def _is_sound(self, metrics: Metrics, batch: Any) -> bool:
        """Look at an update, and at what has come of a round when it was the last; False if the run went back."""
        try:
            self._health.check(self._step - 1, metrics, batch)
            if self._config.goes_by_iterations and not (self._practice and self._practice.owes_updates):
                self._health.finish()  # so that nothing of it comes to light later, in the next iteration
        except TrainingError:
            reason = f"{self._config.health.max_skipped} updates in a row were skipped"
            if self._config.health.action != "rollback" or not self._go_back(reason):
                raise
            return False
        if not self._config.goes_by_iterations or self._practice is None:
            return True
        self._losses.append(metrics["loss"])
        if self._practice.owes_updates:
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

    @property
    def _rollbacks(self) -> list[Any]:
        """How often the run has gone back to an earlier checkpoint, and why."""
        return list(self._run.metadata.get("rollbacks", []))

    def _respond(self, problem: Problem) -> bool:
        """Warn, go back, or stop, as configured; says whether the run went back."""
        action = self._config.health.action
        if action == "warn" or (action == "rollback" and not problem.can_go_back):
            self._display.say(f"warning: {problem.reason}.")
            return False
        if action == "rollback" and self._go_back(problem.reason):
            return True
        self._checkpoints.wait()
        tried = f" after {len(self._rollbacks)} roll-backs" if self._rollbacks else ""
        raise TrainingError(
            f"training stopped at step {self._step}{tried}: {problem.reason}. Checkpoints up to step "
            f"{self._checkpoints.latest()} are kept. Try a lower learning rate, fewer epochs per iteration "
            "(agent.num_epochs), or demonstrations mixed in (agent.bc_loss_weight)."
        )

    def _go_back(self, reason: str) -> bool:
        """Go on from the newest checkpoint of a policy that was fine, with other rollouts; False if that cannot be."""
        self._checkpoints.wait()
        good = [step for step in saved_steps(self._run.states) if step <= self._good_step]
        if not self._config.goes_by_iterations or not good or len(self._rollbacks) >= self._config.health.max_rollbacks:
            return False
        self._display.say(f"{reason}: going back from step {self._step} to the checkpoint of step {good[-1]}.")
        entry = {"from": self._step, "to": good[-1], "reason": reason}
        # In this order: a process that dies in between goes back to that checkpoint, and comes here again.
        self._checkpoints.discard_after(good[-1])
        self._run.note(rollbacks=[*self._rollbacks, entry])
        saved = self._restore()
        self._log.rewind(saved["log"])
        self._measured, self._stop_early = {}, self._was_stopped()
        # From now on it is the beginning of another story, also for whoever resumes it.
        self._save()
        self._checkpoints.wait()
        return True

    def _write_log(self) -> None:
        values = self._log.flush(self._step)
        timing = self._stopwatch.lap(self._step - self._timed_step)
        self._logged_step = self._timed_step = self._step
        self._log.write_timing(self._step, timing)
        self._display.update(self._shown_step(), {**values, **self._measured}, timing)

    def _shown_step(self) -> int:
        """Where the run is, as its display counts."""
        return self._clock() if self._config.goes_by_iterations else self._step

    def _finish(self, signal: StopSignal) -> None:
        self._health.finish()
        unsaved = (self._step, self._clock()) != self._saved_at or self._checkpoints.latest() is None
        if self._step > self._logged_step and not signal.requested:
            self._write_log()
            unsaved = True
        if self._config.evaluation.every and self._step > self._evaluated_step and not signal.requested:
            self._measure(self._evaluation())  # the end, whatever the interval
            unsaved = True
        if unsaved:
            self._save()
        self._checkpoints.wait()
        if signal.requested:
            self._display.say(f"stopped at step {self._step}; --resume goes on from here.")
        elif self._stop_early:
            self._display.say(
                f"stopped at step {self._step}: {self._config.stopping.metric} has not improved for "
                f"{self._config.stopping.patience} measurements (--stopping.patience)."
            )
        elif (self._step, self._clock()) == self._began_at:
            more = "--rollout.iterations" if self._config.goes_by_iterations else "--steps"
            self._display.say(f"all {self._step} updates were made already: more {more} would go on.")
        else:
            self._display.say(f"done after {self._step} updates.")
        self._display.say(f"policy: {self._run.policies / str(self._checkpoints.latest())}")

    # --- measuring -----------------------------------------------------------------------------------------------

    def _measure(self, values: dict[str, Number]) -> bool:
        """Write what was measured; says whether to stop."""
        self._measured |= self._log.write(self._step, values)
        self._display.update(self._shown_step(), self._measured)
        metric = self._config.stopping.metric
        return metric in values and self._stopping.update(float(values[metric]))

    def _validation(self) -> dict[str, Number]:
        with self._display.phase("validating"), self._stopwatch("evaluation"), self._compiling("the validation"):
            return measure_losses(self._setup, self._validate, self._agent)

    def _evaluation(self) -> dict[str, Number]:
        assert self._pool is not None
        self._evaluated_step = self._step
        with self._display.phase("evaluating"), self._stopwatch("evaluation"), self._compiling("acting"):
            values, summary = measure_success(self._setup, self._agent, self._pool, self._run, self._step)
        self._display.say(f"step {self._step}: {summary}")
        return values

    # --- beginning and saving ------------------------------------------------------------------------------------

    def _save(self) -> None:
        with self._display.phase("saving"), self._stopwatch("checkpoint"):
            # First: the replay buffer may let go of what only the state before the last one needs.
            self._checkpoints.wait()
            host: dict[str, Any] = {
                "log": self._log.position(),
                "health": self._health.state(),
                "stopping": self._stopping.state(),
                "watch": self._watch.state(),
                "good_step": self._good_step,
                "practice": None if self._practice is None else self._practice.state(),
                "sampler": self._sampler_state if self._loader is None else self._loader.state(),
                "data": self._data_identity,
                "logged_step": self._logged_step,
                "evaluated_step": self._evaluated_step,
            }
            metadata: dict[str, Any] = {
                "config": to_plain(self._config),
                "robot": self._setup.policy_io.robot.to_dict(),
                "parameter_counts": self._agent.parameter_counts(),
            }
            agent = self._config.agent
            if isinstance(agent, RIPTConfig) and agent.weighting == "guidance":
                metadata["guidance"] = agent.guidance_weight
            measured = {name: float(value) for name, value in self._measured.items()}
            self._checkpoints.save(
                self._step, self._agent, host, self._agent.policy(), self._setup.norm_stats, metadata, measured
            )
            self._saved_at, self._measured = (self._step, self._clock()), {}

    def _restore(self) -> dict[str, Any]:
        """Take everything from the newest checkpoint; returns what was saved beside the learner."""
        self._agent, saved, self._step = self._checkpoints.restore(agent_shapes(self._setup))
        self._health.restore(saved["health"])
        self._stopping.restore(saved["stopping"])
        self._watch.restore(saved["watch"])
        if self._practice is not None and saved["practice"] is not None:
            self._practice.restore(saved["practice"])
        self._take_positions(saved)
        return saved

    def _take_positions(self, saved: dict[str, Any] | None) -> None:
        """Where the run stands, at its beginning or as it was saved."""
        self._timed_step = self._step
        self._good_step = 0 if saved is None else saved["good_step"]
        self._logged_step = 0 if saved is None else saved["logged_step"]
        self._evaluated_step = 0 if saved is None else saved["evaluated_step"]
        self._looked_at = self._clock()
        self._saved_at = (self._step, self._clock())

    def _refuse_other_data(self, before: dict[str, Any] | None) -> None:
        now = self._data_identity
        if before is not None and now is not None and now != before:
            raise DataError(
                f"{self._config.data.repo_id} is not the dataset that this run began with: it had {before['episodes']} "
                f"episodes ({before['frames']} frames) then, and has {now['episodes']} ({now['frames']}) now, or other "
                "values, rewards or labels. Put it back, or begin another run (--exp-name) from the policy of this one "
                "(--checkpoint)."
            )

    def _open_loader(self) -> Loader | None:
        if not self._is_offline():
            return None
        sampler = self._setup.sampler([self._setup.source(self._config.seed)])
        if self._sampler_state is not None:
            sampler.restore(self._sampler_state)
        sharding = self._setup.batch_sharding()
        return self._open.enter_context(Loader(sampler, sharding=sharding, prefetch=self._config.data.prefetch))

    def _say_hello(self) -> None:
        counts = ", ".join(f"{name} {count:,}" for name, count in self._agent.parameter_counts().items())
        self._display.say(f"parameters: {counts}")
        for hint in self._log.hints:
            self._display.say(hint)
        if self._step:
            self._display.say(f"going on from step {self._step}.")

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


def _make_display(config: RLTrainConfig, title: str, run: RunDirectory) -> Display:
    if config.goes_by_iterations:
        # Its table says how it goes.
        return Display(config.rollout.iterations, title, unit="iteration", every=None, log=run.log_file)
    total = config.steps + int(config.online.env_steps * config.online.utd_ratio)
    return Display(total, title, every=config.logging.every, log=run.log_file)


def _is_passed(before: int, now: int, every: int) -> bool:
    """Whether a multiple of `every` lies between."""
    return every > 0 and now // every > before // every
