"""The training loop: next batch, update, log, now and then measure and save. It knows none of the maths."""

import contextlib
import functools
import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from pirl.agents.base import Metrics
from pirl.config import RLTrainConfig, format_config, to_plain
from pirl.data import ChunkBatch, Loader, ReplayBuffer
from pirl.envs.evaluation import evaluate
from pirl.envs.pools import EnvPool, default_size, open_pool
from pirl.envs.rollouts import make_starts
from pirl.envs.video import write_films
from pirl.errors import DataError, UserError
from pirl.files import write_file
from pirl.training.acting import agent_planner, evaluated_planner
from pirl.training.checkpoints import Checkpoints
from pirl.training.compiling import use_compilation_cache
from pirl.training.display import Display, Stopwatch
from pirl.training.health import EarlyStopping, Health, StopSignal
from pirl.training.metrics import MetricsLog
from pirl.training.online import Practice
from pirl.training.run import RunDirectory
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
            display = Display(_total_steps(config), exp_name, every=config.logging.every, log=run.log_file)
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
        self._step = self._first_step = 0
        saved = None
        display.say(f"{config.name} in {run.path}")
        self._open = contextlib.ExitStack()
        try:
            self._checkpoints = self._open.enter_context(Checkpoints(run, config.checkpoints))
            self._health = Health(config.health, run.bad_batches, run.states, self._checkpoints.wait)
            self._stopping = EarlyStopping(config.stopping)
            self._pool = self._open_pool()
            self._practice = self._prepare_practice()
            if self._checkpoints.latest() is None:
                with self._compiling("the learner"):
                    self._agent = create_agent(setup)
            else:
                self._agent, saved, self._step = self._checkpoints.restore(agent_shapes(setup))
                self._refuse_other_data(saved["data"])
                self._health.restore(saved["health"])
                self._stopping.restore(saved["stopping"])
                if self._practice is not None and saved["practice"] is not None:
                    self._practice.restore(saved["practice"])
            self._saved_step = self._first_step = self._timed_step = self._step
            self._logged_step = 0 if saved is None else saved["logged_step"]
            self._evaluated_step = 0 if saved is None else saved["evaluated_step"]
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
                self._health.check(self._step - 1, metrics, batch)
                if self._due(before, self._config.logging.every):
                    self._write_log()
                if self._due(before, self._config.validation_every):
                    self._stop_early |= self._measure(self._validation())
                if self._due(before, self._config.evaluation.every):
                    self._stop_early |= self._measure(self._evaluation())
                if self._due(before, self._config.checkpoints.every) and not (self._is_over() or self._stop_early):
                    self._save()
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

    def _due(self, before: int, every: int) -> bool:
        """Whether a multiple of `every` was passed."""
        return every > 0 and self._step // every > before // every

    def _keys(self, count: int) -> jax.Array:
        """The randomness of an update follows from the seed and its number; of several, one key each."""
        key = jax.random.key(self._config.seed)
        if count == 1:
            return jax.random.fold_in(key, self._step)
        return jax.vmap(lambda step: jax.random.fold_in(key, step))(np.arange(self._step, self._step + count))

    def _next_batch(self) -> tuple[ChunkBatch, int]:
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
        assert self._pool is not None
        if not self._practice.owes_updates:
            with self._display.phase("practising"), self._stopwatch("rollout"), self._compiling("acting"):
                told = self._practice.collect(agent_planner(self._agent, self._setup.policy_io, self._pool))
            self._stop_early |= self._measure(told)
        return self._practice.owes_updates

    def _write_log(self) -> None:
        values = self._log.flush(self._step)
        timing = self._stopwatch.lap(self._step - self._timed_step)
        self._logged_step = self._timed_step = self._step
        self._log.write_timing(self._step, timing)
        self._display.update(self._step, {**values, **self._measured}, timing)

    def _finish(self, signal: StopSignal) -> None:
        self._health.finish()
        unsaved = self._step > self._saved_step or self._checkpoints.latest() is None
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
        elif self._step == self._first_step:
            self._display.say(f"all {self._step} updates were made already: more --steps would go on.")
        else:
            self._display.say(f"done after {self._step} updates.")
        self._display.say(f"policy: {self._run.policies / str(self._checkpoints.latest())}")

    # --- measuring -----------------------------------------------------------------------------------------------

    def _measure(self, values: dict[str, Number]) -> bool:
        """Write what was measured; says whether to stop."""
        self._measured |= self._log.write(self._step, values)
        self._display.update(self._step, self._measured)
        metric = self._config.stopping.metric
        return metric in values and self._stopping.update(float(values[metric]))

    def _validation(self) -> dict[str, Number]:
        with self._display.phase("validating"), self._stopwatch("evaluation"), self._compiling("the validation"):
            sampler = self._setup.sampler([self._setup.source(self._config.seed, held_out=True)])
            found: list[Metrics] = []
            # The same batches and noise every time, so that only the learner makes a difference.
            with Loader(sampler, sharding=self._setup.batch_sharding(), prefetch=0) as loader:
                for number in range(self._config.validation_batches):
                    key = jax.random.fold_in(jax.random.key(self._config.seed + 1), number)
                    found.append(self._validate(self._agent, next(loader), key))
            found = jax.device_get(found)
        return {f"val/{name}": float(np.mean([metrics[name] for metrics in found])) for name in found[0]}

    def _evaluation(self) -> dict[str, Number]:
        config, pool = self._config.evaluation, self._pool
        assert pool is not None
        self._evaluated_step = self._step
        with self._display.phase("evaluating"), self._stopwatch("evaluation"), self._compiling("acting"):
            planner = evaluated_planner(self._agent, self._setup.policy_io, pool, config)
            starts = make_starts(pool.description, config.episodes, config.seed)
            settings = {"step": self._step, **to_plain(config)}
            result = evaluate(
                pool, planner, starts, execute_steps=config.execute_steps, settings=settings, films=config.videos
            )
            write_file(self._run.evaluations / f"{self._step}.json", json.dumps(result.to_json(), indent=2) + "\n")
            if result.films:
                self._run.videos.mkdir(exist_ok=True)
                write_films(self._run.videos / f"{self._step}.mp4", list(result.films.values()), pool.description.fps)
        summary = result.summary()
        low, high = summary.interval
        values = {
            "eval/success": summary.rate,
            "eval/success_low": low,
            "eval/success_high": high,
            "eval/episodes": summary.finished,
            "eval/lost": summary.lost,
            "eval/return": summary.mean_return,
            "eval/length": summary.mean_length,
        }
        self._display.say(f"step {self._step}: {summary}")
        return {name: value for name, value in values.items() if value is not None}

    # --- beginning and saving ------------------------------------------------------------------------------------

    def _save(self) -> None:
        with self._display.phase("saving"), self._stopwatch("checkpoint"):
            # First: the replay buffer may let go of what only the state before the last one needs.
            self._checkpoints.wait()
            host: dict[str, Any] = {
                "log": self._log.position(),
                "health": self._health.state(),
                "stopping": self._stopping.state(),
                "practice": None if self._practice is None else self._practice.state(),
                "sampler": self._sampler_state if self._loader is None else self._loader.state(),
                "data": self._data_identity,
                "logged_step": self._logged_step,
                "evaluated_step": self._evaluated_step,
            }
            metadata = {
                "config": to_plain(self._config),
                "robot": self._setup.policy_io.robot.to_dict(),
                "parameter_counts": self._agent.parameter_counts(),
            }
            measured = {name: float(value) for name, value in self._measured.items()}
            self._checkpoints.save(
                self._step, self._agent, host, self._agent.policy(), self._setup.norm_stats, metadata, measured
            )
            self._saved_step, self._measured = self._step, {}

    def _open_pool(self) -> EnvPool | None:
        config = self._config
        if config.env is None or not (config.evaluation.every or config.online.env_steps):
            return None
        size = config.evaluation.envs or default_size(config.env)
        pool = self._open.enter_context(open_pool(config.env, size, timeout=config.evaluation.timeout))
        check_env(self._setup, pool)
        return pool

    def _refuse_other_data(self, before: dict[str, Any] | None) -> None:
        now = self._data_identity
        if before is not None and now is not None and now != before:
            raise DataError(
                f"{self._config.data.repo_id} is not the dataset that this run began with: it had {before['episodes']} "
                f"episodes ({before['frames']} frames) then, and has {now['episodes']} ({now['frames']}) now, or other "
                "values, rewards or labels. Put it back, or begin another run (--exp-name) from the policy of this one "
                "(--checkpoint)."
            )

    def _prepare_practice(self) -> Practice | None:
        config, setup = self._config, self._setup
        if not config.online.env_steps:
            return None
        assert self._pool is not None
        replay = ReplayBuffer(config.online.capacity, setup.policy_io, seed=config.seed, directory=self._run.replay)
        if self._checkpoints.latest() is None and replay.num_episodes:
            # Killed before its first checkpoint: practice begins anew.
            replay.restore({"oldest": 0, "next": 0, "episodes": 0})
        prior = config.online.prior_ratio
        # Another order than offline, so that it does not begin with the same chunks again.
        sources = [setup.source(config.seed + 1)] if prior > 0 else []
        ratios = [prior] if prior > 0 else []
        if prior < 1:
            sources, ratios = [*sources, replay], [*ratios, 1 - prior]  # type: ignore[list-item]
        return Practice(
            config.online,
            config.data.outcomes,
            self._pool,
            replay,
            setup.sampler(sources, ratios),
            robot=setup.policy_io.robot,
            execute_steps=config.evaluation.execute_steps,
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


def _total_steps(config: RLTrainConfig) -> int:
    return config.steps + int(config.online.env_steps * config.online.utd_ratio)
