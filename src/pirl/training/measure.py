"""What is measured during a run and when: losses on held-out episodes, success in the environment."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pirl.agents.common import Agent, Metrics
from pirl.config import to_plain
from pirl.config.metrics import GAPS
from pirl.data import Loader
from pirl.envs.evaluation import evaluate
from pirl.envs.pool import EnvPool
from pirl.envs.rollout import make_starts
from pirl.envs.video import write_videos
from pirl.errors import EnvError
from pirl.files import write_file
from pirl.run_files import RunFiles
from pirl.training.acting import StoppablePolicy, acting_copy, evaluated_policy
from pirl.training.distributed import broadcast
from pirl.training.health import StopSignal
from pirl.training.logging import RunLog
from pirl.training.metrics import Number
from pirl.training.setup import Setup
from pirl.training.streams import TrainState


@dataclass
class Hook:
    """Calls `run` when another multiple of `every` has been passed, and remembers when it did so last."""

    every: int
    run: Callable[[TrainState], None]
    by_updates: bool = False
    """Count updates, also where progress is counted in iterations."""
    last: int = 0
    step: int = 0

    def is_due(self, state: TrainState) -> bool:
        """Whether a multiple lies between the last call and now."""
        return self.every > 0 and self._count(state) // self.every > self.last // self.every

    def __call__(self, state: TrainState) -> None:
        """Call `run` if it is due."""
        if self.is_due(state):
            self.fire(state)

    def fire(self, state: TrainState) -> None:
        """Call `run`; if that is interrupted, it remains due."""
        self.run(state)
        self.last, self.step = self._count(state), state.step

    def _count(self, state: TrainState) -> int:
        return state.step if self.by_updates else state.progress

    def state(self) -> dict[str, int]:
        """When it was called last."""
        return {"last": self.last, "step": self.step}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on from a saved state."""
        self.last, self.step = state["last"], state["step"]


def validate_agent(setup: Setup, log: RunLog, validate: Any, state: TrainState) -> None:
    """Measure the losses on held-out episodes, by the compiled `validate`."""
    with log.activity("evaluation", "validating", compiles="the validation"):
        values = measure_losses(setup, validate, state.agent)
    log.measure(state.step, state.progress, values)


def evaluate_agent(
    setup: Setup,
    pool: EnvPool | None,
    run: RunFiles,
    log: RunLog,
    stop: StopSignal,
    save: Callable[[TrainState], None],
    state: TrainState,
) -> None:
    """Measure success in the main process. Raises `Interrupted` if it is stopped, where it is the only one."""
    is_alone, agent = jax.process_count() == 1, acting_copy(state.agent)

    def measure() -> tuple[dict[str, Number], str]:
        assert pool is not None
        return measure_success(setup, agent, pool, run, state.step, lambda: is_alone and stop.requested)

    with log.activity("evaluation", "evaluating", compiles="acting"):
        try:
            values, summary = broadcast(measure)
        except EnvError:
            if is_alone:
                save(state)  # what was learned is kept until the environment works again
            raise
    log.say(f"step {state.step}: {summary}")
    log.measure(state.step, state.progress, values)


def measure_losses(setup: Setup, validate: Any, agent: Agent) -> dict[str, Number]:
    """Means over batches of held-out episodes, by the compiled `validate`; and training episodes minus these."""
    held_out = _validate(setup, validate, agent, held_out=True)
    compared = [name for name in GAPS if name in held_out]
    learned = _validate(setup, validate, agent, held_out=False) if compared else {}
    values: dict[str, Number] = {f"val/{name}": value for name, value in held_out.items()}
    return values | {f"gap/{name}": learned[name] - held_out[name] for name in compared}


def _validate(setup: Setup, validate: Any, agent: Agent, *, held_out: bool) -> dict[str, float]:
    config = setup.config
    sampler = setup.sampler([setup.source(config.seed, held_out=held_out)])
    found: list[Metrics] = []
    # The same batches and noise every time.
    with Loader(sampler, sharding=setup.batch_sharding(), prefetch=0) as loader:
        for number in range(config.validation_batches):
            key = jax.random.fold_in(jax.random.key(config.seed + 1), number)
            found.append(validate(agent, next(loader), key))
    found = jax.device_get(found)
    return {name: _mean([metrics[name] for metrics in found]) for name in found[0]}


def _mean(values: list[Any]) -> float:
    """Over the batches that had something to measure; NaN if none had."""
    measured = [value for value in values if not np.isnan(value)]
    return float(np.mean(measured)) if measured else float("nan")


def measure_success(
    setup: Setup,
    agent: Agent,
    pool: EnvPool,
    run: RunFiles,
    step: int,
    is_stopped: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Number], str]:
    """The success from the same starts every time, and a sentence about it; every episode is written into the run.

    Raises `Interrupted` if it is stopped meanwhile; nothing is written then.
    """
    config = setup.config.evaluation
    policy = evaluated_policy(agent, setup.policy_io, pool, setup.config)
    result = evaluate(
        pool,
        StoppablePolicy(policy, is_stopped),
        make_starts(pool.description, config.episodes, config.seed),
        execute_steps=config.execute_steps,
        settings={"step": step, "denoising_steps": setup.config.agent.denoising_steps, **to_plain(config)},
        videos=config.videos,
    )
    write_file(run.evaluations / f"{step}.json", json.dumps(result.to_json(), indent=2) + "\n")
    if result.videos:
        run.videos.mkdir(exist_ok=True)
        write_videos(run.videos / f"{step}.mp4", list(result.videos.values()), pool.description.fps)
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
    return {name: value for name, value in values.items() if value is not None}, str(summary)
