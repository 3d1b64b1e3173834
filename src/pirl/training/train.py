"""The training loop: next batch, update, hooks; and what a run saves and loads. It knows none of the maths."""

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pirl.agents.config import RIPTConfig
from pirl.config import RLTrainConfig, format_config, to_plain
from pirl.envs.pool import EnvPool, default_size, open_pool
from pirl.errors import TrainingError
from pirl.training.checkpoints import Checkpoints
from pirl.training.display import open_display
from pirl.training.distributed import is_main_process
from pirl.training.evaluation import Hook, evaluate_agent, validate_agent
from pirl.training.health import Diverged, EarlyStopping, Interrupted, RolloutMonitor, StopSignal, UpdateGuard
from pirl.training.logging import RunLog
from pirl.training.rollout_stream import RolloutStream
from pirl.training.run import RunDirectory, open_shared_run
from pirl.training.setup import (
    Setup,
    agent_shapes,
    check_env,
    compile_updates,
    create_agent,
    data_identity,
    describe_policy,
    prepare_jax,
    refuse_other_data,
    set_up,
    update_keys,
)
from pirl.training.sharding import own_rows
from pirl.training.streams import Stream, TrainState, make_chain, open_replay


def train(config: RLTrainConfig, *, exp_name: str, resume: bool = False, overwrite: bool = False) -> int:
    """Train as configured, in the run directory runs_dir/exp_name; returns the exit code."""
    prepare_jax()
    options: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "config_text": format_config(config)}
    open_run = partial(RunDirectory.open, config.runs_dir / exp_name, to_plain(config), **options)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(open_shared_run(open_run))
        setup = set_up(config, resumed=run if resume else None, progress=is_main_process())
        if not run.is_resumed:
            run.begin()
        display = stack.enter_context(open_display(config, exp_name, run))
        display.say(f"{config.name} in {run.path}")
        checkpoints = stack.enter_context(Checkpoints(run, config.checkpoints))
        pool = _open_environments(setup, stack)

        stop, early_stopping = StopSignal(display.note), EarlyStopping(config.stopping)
        log = RunLog(config, run, display, early_stopping)
        stack.callback(log.close)
        log.take_memory("data")
        returns = None if config.online.env_steps else setup.returns  # online, there may be better ones
        guard = UpdateGuard(config.health, run, checkpoints.wait, returns)
        monitor = RolloutMonitor(config.health, display.say)
        stream = _open_stream(setup, pool, run, log, guard, monitor, stop, is_new=checkpoints.latest() is None)
        stack.callback(stream.close)
        update, updates, validate_batch = compile_updates(setup)
        write_log = Hook(config.logging.every, log.flush, by_updates=True)
        validate = Hook(config.validation_every, partial(validate_agent, setup, log, validate_batch))
        evaluate = Hook(
            config.evaluation.every, lambda state: evaluate_agent(setup, pool, run, log, stop, saver.save, state)
        )
        parts = {"log": log, "guard": guard, "early_stopping": early_stopping, "monitor": monitor, "stream": stream}
        parts |= {"write_log": write_log, "validate": validate, "evaluate": evaluate}
        saver = Saver(setup, run, checkpoints, stream, log, parts)
        state = saver.begin()
        began = state.step, stream.progress
        _say_opening(log, run, setup, state)

        interrupted = stopped_early = False
        stack.enter_context(stop)
        try:
            while True:
                try:
                    for hook in (write_log, validate, evaluate):
                        hook(state)
                    if stream.done or early_stopping.done:
                        break
                    saver(state)
                    if interrupted := stop.agreed():
                        break
                    batch = stream.next(state)
                    if batch is None:
                        continue
                    count = batch.num_updates
                    with log.activity("update", compiles="the update" if count == 1 else f"{count} updates"):
                        keys = update_keys(config.seed, len(run.rollbacks), state.step, count)
                        state.agent, info = (update if count == 1 else updates)(state.agent, batch.data, keys)
                    state.step += count
                    log.add(info, count)
                    with log.activity("update"):  # it is here that the host waits for the device
                        guard.check(state.step - 1, info, own_rows(batch.data))
                    stream.after_update(state, info)
                    state.progress = stream.progress
                except Diverged as problem:
                    saver.roll_back(state, problem, monitor.good_step)
            stopped_early = early_stopping.done
            guard.finish()
            if not interrupted and state.step > write_log.step:
                write_log.fire(state)
            if not interrupted and config.evaluation.every and state.step > evaluate.step:
                evaluate.fire(state)  # the end, whatever the interval
        except Interrupted:
            interrupted = True
            guard.finish()

        saver.finish(state)
        run.note(stopped=interrupted)
        is_idle = (state.step, stream.progress) == began
        display.say(_closing_line(config, state.step, stream.progress, interrupted, stopped_early, is_idle))
        display.say(f"policy: {run.checkpoints / str(checkpoints.latest())}")
    return stop.exit_code


class Saver:
    """Saves the learner and the state of all parts of a run, loads them, and goes back to earlier ones."""

    def __init__(
        self,
        setup: Setup,
        run: RunDirectory,
        checkpoints: Checkpoints,
        stream: Stream,
        log: RunLog,
        parts: Mapping[str, Any],
    ) -> None:
        """`parts` have `state()` and `load_state()`."""
        self._setup, self._run, self._checkpoints, self._parts = setup, run, checkpoints, parts
        self._stream, self._log = stream, log
        self._data_identity = data_identity(setup)
        self._saved: tuple[int, ...] = ()
        self._last = 0

    def begin(self) -> TrainState:
        """Create the learner, or load the newest checkpoint."""
        if self._checkpoints.latest() is None:
            self._run.begin()
            with self._log.activity("update", compiles="the learner"):
                state = TrainState(create_agent(self._setup))
            self._log.load_state(None)
            if self._setup.config.on_policy:
                self.save(state)  # something to go back to
        else:
            state = TrainState(None)
            saved = self._load(state)
            refuse_other_data(self._setup.config.data.repo_id, saved["data"], self._data_identity)
            self._run.begin()
            self._load_parts(state, saved)
        self._log.take_memory("learner")
        return state

    def __call__(self, state: TrainState) -> None:
        """Save, if it is due."""
        every = self._setup.config.checkpoints.every
        if every and state.progress // every > self._last // every:
            self.save(state)

    def save(self, state: TrainState) -> None:
        """Begin to save; it is complete after `checkpoints.wait()`."""
        with self._log.activity("checkpoint", "saving"):
            # First: the replay buffer may delete what only the state before the last one needs.
            self._checkpoints.wait()
            metrics = {name: float(value) for name, value in self._log.measured.items()}
            if not self._parts["evaluate"].is_due(state):
                # Otherwise the evaluation was interrupted; with its metrics this step is saved again.
                self._log.measured, self._last = {}, state.progress
            host = {
                "parts": {name: part.state() for name, part in self._parts.items()},
                "progress": state.progress,
                "last_save": self._last,
                "within_iteration": self._stream.is_within_iteration,
                "data": self._data_identity,
            }
            about, policy = describe_policy(self._setup, state.agent), state.agent.policy()
            statistics, progress = self._setup.norm_stats, self._stream.progress
            self._checkpoints.save(state.step, state.agent, host, policy, statistics, about, metrics, progress)
            self._saved = self._position(state)
            self._log.take_memory("checkpoint")

    def finish(self, state: TrainState) -> None:
        """Save what has not been saved, and wait until it is complete."""
        self._checkpoints.wait()
        if self._position(state) != self._saved or self._checkpoints.latest() is None:
            self.save(state)
        self._checkpoints.wait()

    def roll_back(self, state: TrainState, problem: Diverged, good_step: int) -> None:
        """Go on from the newest checkpoint up to the good step, with other rollouts; raise where that cannot be."""
        config, run, checkpoints = self._setup.config, self._run, self._checkpoints
        checkpoints.wait()
        candidates = []
        if config.on_policy and config.health.action == "rollback":
            candidates = [step for step in checkpoints.saved_between_iterations() if step <= good_step]
        if not candidates or len(run.rollbacks) >= config.health.max_rollbacks:
            if problem.explanation:
                raise problem
            tried = f" after {len(run.rollbacks)} rollbacks" if run.rollbacks else ""
            raise TrainingError(
                f"training stopped at step {state.step}{tried}: {problem.reason}. Checkpoints up to step "
                f"{checkpoints.latest()} are kept. Try a lower learning rate, fewer epochs per iteration "
                "(agent.num_epochs), or demonstrations mixed in (agent.bc_loss_weight)."
            )
        left = state.step
        saved = self._load(state, candidates)
        self._log.say(f"{problem.reason}: going back from step {left} to the checkpoint of step {state.step}.")
        # In this order: a process that dies in between goes back to that checkpoint, and comes here again.
        checkpoints.discard_after(state.step)
        run.note(rollbacks=[*run.rollbacks, {"from": left, "to": state.step, "reason": problem.reason}])
        self._load_parts(state, saved)
        self._log.measured = {}
        # Saved again at once, so that a resume goes the other way, too.
        self.save(state)
        checkpoints.wait()

    def _load(self, state: TrainState, candidates: Sequence[int] | None = None) -> dict[str, Any]:
        """Load the learner of the newest checkpoint, of all or of some; returns what was saved beside it."""
        shapes = agent_shapes(self._setup)
        state.agent = None  # devices may have no room for two
        state.agent, saved, state.step = self._checkpoints.restore(shapes, among=candidates)
        return saved

    def _load_parts(self, state: TrainState, saved: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state(saved["parts"][name])
        state.progress, self._last = saved["progress"], saved["last_save"]
        self._saved = self._position(state)

    def _position(self, state: TrainState) -> tuple[int, ...]:
        """What changes whenever there is something new to save."""
        return state.step, self._stream.progress, self._parts["write_log"].step, self._parts["evaluate"].step


def _open_environments(setup: Setup, stack: contextlib.ExitStack) -> EnvPool | None:
    config = setup.config
    if config.env is None or not (config.evaluation.every or config.collects_rollouts) or not is_main_process():
        return None
    pool = stack.enter_context(
        open_pool(
            config.env,
            config.evaluation.envs or default_size(config.env),
            timeout=config.evaluation.timeout,
            backend=config.rollout.backend,
            ray_address=config.rollout.ray_address,
        )
    )
    check_env(setup, pool)
    return pool


def _open_stream(
    setup: Setup,
    pool: EnvPool | None,
    run: RunDirectory,
    log: RunLog,
    guard: UpdateGuard,
    monitor: RolloutMonitor,
    stop: StopSignal,
    *,
    is_new: bool,
) -> Stream:
    config, replay = setup.config, None
    if config.collects_rollouts:
        replay = open_replay(setup, run.replay, has_environments=pool is not None, is_new=is_new)
    if isinstance(config.agent, RIPTConfig):
        assert replay is not None
        return RolloutStream(setup, run, log, guard, monitor, pool, replay, stop)
    return make_chain(setup, log, pool, replay, stop)


def _closing_line(
    config: RLTrainConfig, step: int, progress: int, interrupted: bool, stopped_early: bool, is_idle: bool
) -> str:
    """Why the run ends, and what could be done about it. `is_idle`: nothing was left to do."""
    if interrupted:
        return f"stopped at step {step}; continue with --resume."
    if stopped_early:
        unimproved = f"{config.stopping.metric} has not improved for {config.stopping.patience} measurements"
        return f"stopped at step {step}: {unimproved} (--stopping.patience)."
    if is_idle:
        more = "--rollout.iterations" if config.on_policy else "--steps"
        if config.on_policy and progress < config.rollout.iterations:
            more = "--rollout.max-barren (iterations in a row without any signal)"
        return f"all {step} updates are done already; to continue, raise {more}."
    return f"done after {step} updates."


def _say_opening(log: RunLog, run: RunDirectory, setup: Setup, state: TrainState) -> None:
    counts = state.agent.parameter_counts()
    run.note(parameters=counts, action_dim=setup.action_dim)
    log.say(f"parameters: {', '.join(f'{name} {count:,}' for name, count in counts.items())}")
    for hint in log.hints:
        log.say(hint)
    if state.step:
        log.say(f"resuming from step {state.step}.")
