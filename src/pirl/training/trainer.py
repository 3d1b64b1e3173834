"""The training loop: next batch, update, log, now and then measure and save. It knows none of the maths."""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pirl.agents.base import Agent, Metrics
from pirl.config import RLTrainConfig, format_config, to_plain
from pirl.data import ChunkBatch, Loader, ReplayBuffer
from pirl.envs.evaluation import evaluate
from pirl.envs.pools import EnvPool, default_size, open_pool
from pirl.envs.rollouts import make_starts
from pirl.envs.video import write_films
from pirl.files import write_file
from pirl.training.acting import agent_planner, evaluated_planner
from pirl.training.checkpoints import Checkpoints
from pirl.training.compiling import use_compilation_cache
from pirl.training.display import Display, Stopwatch
from pirl.training.health import EarlyStopping, Health, StopSignal, guarded
from pirl.training.metrics import MetricsLog
from pirl.training.online import Practice
from pirl.training.run import RunDirectory
from pirl.training.setup import Setup, agent_shapes, create_agent, set_up
from pirl.training.writers import check_trackers


def train(
    config: RLTrainConfig,
    *,
    exp_name: str,
    resume: bool = False,
    overwrite: bool = False,
    command: Sequence[str] | None = None,
) -> int:
    """Train as configured, into the run directory runs_dir/exp_name; the return value is the exit code."""
    check_trackers(config.logging)
    use_compilation_cache()
    directory = config.runs_dir / exp_name
    plain = to_plain(config)
    with RunDirectory.open(
        directory, plain, resume=resume, overwrite=overwrite, config_text=format_config(config)
    ) as run:
        setup = set_up(config)
        with Trainer(setup, run, exp_name) as trainer:
            return trainer.run()


class Trainer:
    """A run under way."""

    def __init__(self, setup: Setup, run: RunDirectory, title: str):
        self._setup, self._run, self._config = setup, run, setup.config
        config = self._config
        self._open = contextlib.ExitStack()
        try:
            self._checkpoints = self._open.enter_context(Checkpoints(run, config.checkpoints))
            self._health = Health(config.health, run.bad_batches, run.states)
            self._stopping = EarlyStopping(config.stopping)
            self._pool = self._open_pool()
            self._practice = self._prepare_practice()
            self._step, saved = 0, None
            if self._checkpoints.latest() is None:
                self._agent = create_agent(setup)
            else:
                self._agent, saved, self._step = self._checkpoints.restore(agent_shapes(setup))
            self._loader = self._open_loader(saved)
            self._log = self._open.enter_context(
                MetricsLog(run.path, config.logging, None if saved is None else saved["log"], to_plain(config))
            )
            if saved is not None:
                self._health.restore(saved["health"])
                self._stopping.restore(saved["stopping"])
                if self._practice is not None:
                    self._practice.restore(saved["practice"])
            self._display = self._open.enter_context(
                Display(self._total_steps(), title, every=config.logging.every, log=run.log_file)
            )
        except BaseException:
            self._open.close()
            raise
        self._stopwatch = Stopwatch()
        self._measured: dict[str, float] = {}
        self._logged_step = self._saved_step = self._evaluated_step = self._step
        self._update, self._updates, self._validate = compile_updates(config)
        run.note(parameters=self._agent.parameter_counts(), action_dim=setup.action_dim)

    # --- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Until everything is learned, nothing improves any more, or somebody says stop."""
        self._say_hello()
        stop_early = False
        with StopSignal(self._display.note) as signal:
            while not (self._is_over() or stop_early or signal.requested):
                if self._is_offline():
                    batch, count = self._next_batch(), 1
                    update = self._update
                else:
                    if not self._practise():
                        continue
                    batch, count = self._next_batches(), self._config.online.updates_per_scan
                    update = self._updates
                with self._stopwatch("update"):
                    self._agent, metrics = update(self._agent, batch, self._keys(count))
                before, self._step = self._step, self._step + count
                self._log.add(metrics)
                self._health.check(self._step - 1, metrics, batch)
                if self._due(before, self._config.logging.every):
                    self._write_log()
                if self._due(before, self._config.validation_every):
                    stop_early |= self._measure(self._validation())
                if self._due(before, self._config.evaluation.every):
                    stop_early |= self._measure(self._evaluation())
                if self._due(before, self._config.checkpoints.every):
                    self._save()
            self._finish(stop_early, signal)
        return signal.exit_code

    def _is_offline(self) -> bool:
        return self._step < self._config.steps

    def _is_over(self) -> bool:
        return not self._is_offline() and (self._practice is None or self._practice.is_over)

    def _due(self, before: int, every: int) -> bool:
        """Whether a multiple of `every` was passed."""
        return every > 0 and self._step // every > before // every

    def _keys(self, count: int) -> jax.Array:
        """The randomness of an update follows from the seed and its number; of several, one key each."""
        key = jax.random.key(self._config.seed)
        if self._is_offline():
            return jax.random.fold_in(key, self._step)
        return jax.vmap(lambda step: jax.random.fold_in(key, step))(np.arange(self._step, self._step + count))

    def _next_batch(self) -> ChunkBatch:
        assert self._loader is not None
        with self._stopwatch("data"):
            return next(self._loader)

    def _next_batches(self) -> ChunkBatch:
        assert self._practice is not None
        with self._stopwatch("data"):
            batches = self._practice.batches()
            sharding = self._setup.batch_sharding(stacked=True)
            if sharding is None:
                return jax.device_put(batches)
            return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batches)

    def _practise(self) -> bool:
        """Collect a round of episodes if no updates are owed; says whether there are any now."""
        assert self._practice is not None
        assert self._pool is not None
        if not self._practice.owes_updates:
            with self._display.phase("practising"), self._stopwatch("rollout"):
                told = self._practice.collect(agent_planner(self._agent, self._setup.policy_io, self._pool))
            self._measured |= self._log.write(self._step, told)
        return self._practice.owes_updates

    def _write_log(self) -> None:
        steps, self._logged_step = self._step - self._logged_step, self._step
        values = self._log.flush(self._step)
        timing = self._stopwatch.lap(steps)
        self._log.write_timing(self._step, timing)
        self._display.update(self._step, {**values, **self._measured}, timing)

    def _finish(self, stop_early: bool, signal: StopSignal) -> None:
        self._health.finish()
        if not signal.requested:
            if self._step > self._logged_step:
                self._write_log()
            if self._config.evaluation.every and self._step > self._evaluated_step:
                self._measure(self._evaluation())  # the end, whatever the interval
        if self._step > self._saved_step or self._checkpoints.latest() is None:
            self._save()
        self._checkpoints.wait()
        if signal.requested:
            self._display.say(f"stopped at step {self._step}; --resume goes on from here.")
        elif stop_early:
            self._display.say(
                f"stopped at step {self._step}: {self._config.stopping.metric} has not improved for "
                f"{self._config.stopping.patience} measurements."
            )
        else:
            self._display.say(f"done after {self._step} updates.")
        self._display.say(f"policy: {self._run.policies / str(self._checkpoints.latest())}")

    # --- measuring -----------------------------------------------------------------------------------------------

    def _measure(self, values: dict[str, float]) -> bool:
        """Write what was measured; says whether to stop."""
        self._measured |= self._log.write(self._step, values)
        self._display.update(self._step, self._measured)
        metric = self._config.stopping.metric
        return metric in values and self._stopping.update(values[metric])

    def _validation(self) -> dict[str, float]:
        with self._display.phase("validating"), self._stopwatch("evaluation"):
            sampler = self._setup.sampler([self._setup.source(self._config.seed, held_out=True)])
            found: list[Metrics] = []
            # The same batches and noise every time, so that only the learner makes a difference.
            with Loader(sampler, sharding=self._setup.batch_sharding(), prefetch=0) as loader:
                for number in range(self._config.validation_batches):
                    key = jax.random.fold_in(jax.random.key(self._config.seed + 1), number)
                    found.append(self._validate(self._agent, next(loader), key))
            found = jax.device_get(found)
        return {f"val/{name}": float(np.mean([metrics[name] for metrics in found])) for name in found[0]}

    def _evaluation(self) -> dict[str, float]:
        config, pool = self._config.evaluation, self._pool
        assert pool is not None
        self._evaluated_step = self._step
        with self._display.phase("evaluating"), self._stopwatch("evaluation"):
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
            host: dict[str, Any] = {
                "log": self._log.position(),
                "health": self._health.state(),
                "stopping": self._stopping.state(),
                "practice": None if self._practice is None else self._practice.state(),
                "sampler": None if self._loader is None else self._loader.state(),
            }
            metadata = {
                "config": to_plain(self._config),
                "robot": self._setup.policy_io.robot.to_dict(),
                "parameter_counts": self._agent.parameter_counts(),
            }
            self._checkpoints.save(
                self._step, self._agent, host, self._agent.policy(), self._setup.norm_stats, metadata, self._measured
            )
            self._saved_step, self._measured = self._step, {}

    def _open_pool(self) -> EnvPool | None:
        config = self._config
        if config.env is None or not (config.evaluation.every or config.online.env_steps):
            return None
        size = config.evaluation.envs or default_size(config.env)
        return self._open.enter_context(open_pool(config.env, size, timeout=config.evaluation.timeout))

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

    def _open_loader(self, saved: dict[str, Any] | None) -> Loader | None:
        if not self._is_offline():
            return None
        sampler = self._setup.sampler([self._setup.source(self._config.seed)])
        if saved is not None and saved["sampler"] is not None:
            sampler.restore(saved["sampler"])
        sharding = self._setup.batch_sharding()
        return self._open.enter_context(Loader(sampler, sharding=sharding, prefetch=self._config.data.prefetch))

    def _total_steps(self) -> int:
        online = self._config.online
        return self._config.steps + int(online.env_steps * online.utd_ratio)

    def _say_hello(self) -> None:
        counts = ", ".join(f"{name} {count:,}" for name, count in self._agent.parameter_counts().items())
        self._display.say(f"{self._config.name} in {self._run.path}: parameters {counts}")
        for hint in self._log.hints:
            self._display.say(hint)
        if self._step:
            self._display.say(f"going on from step {self._step}.")

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


def compile_updates(config: RLTrainConfig) -> tuple[Any, Any, Any]:
    """One update; a scan of several; and a validation. Updates take over the learner's memory."""

    def update(agent: Agent, batch: ChunkBatch, rng: jax.Array) -> tuple[Agent, Metrics]:
        return agent.update(batch, rng)

    careful = guarded(update, config.health.loss_limit)

    def updates(agent: Agent, batches: ChunkBatch, rngs: jax.Array) -> tuple[Agent, Metrics]:
        return jax.lax.scan(lambda agent, each: careful(agent, *each), agent, (batches, rngs))

    def validate(agent: Agent, batch: ChunkBatch, rng: jax.Array) -> Metrics:
        return agent.validate(batch, rng)

    return jax.jit(careful, donate_argnums=0), jax.jit(updates, donate_argnums=0), jax.jit(validate)
