"""How good a learner is: its losses on what was held out, and its success in the environment."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pirl.agents.common import Agent, Metrics
from pirl.config import to_plain
from pirl.config.metrics import GAPS
from pirl.data import Loader
from pirl.envs.evaluation import evaluate
from pirl.envs.pools import EnvPool
from pirl.envs.rollouts import make_starts
from pirl.envs.video import write_films
from pirl.files import write_file
from pirl.training.acting import StoppablePlanner, acting_copy, evaluated_planner
from pirl.training.exchange import Exchange
from pirl.training.run import RunDirectory
from pirl.training.setup import Setup
from pirl.training.writers import Number


def measure_losses(setup: Setup, validate: Any, agent: Agent) -> dict[str, Number]:
    """The means over batches of held-out episodes, given the compiled validation, and training episodes minus these."""
    held_out = _validate(setup, validate, agent, held_out=True)
    compared = [name for name in GAPS if name in held_out]
    learned = _validate(setup, validate, agent, held_out=False) if compared else {}
    values: dict[str, Number] = {f"val/{name}": value for name, value in held_out.items()}
    return values | {f"gap/{name}": learned[name] - held_out[name] for name in compared}


def _validate(setup: Setup, validate: Any, agent: Agent, *, held_out: bool) -> dict[str, float]:
    config = setup.config
    sampler = setup.sampler([setup.source(config.seed, held_out=held_out)])
    found: list[Metrics] = []
    # The same batches and noise every time, so that only the learner makes a difference.
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


def measure_success_once(
    setup: Setup,
    agent: Agent,
    pool: EnvPool | None,
    run: RunDirectory,
    step: int,
    line: Exchange,
    is_stopped: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Number], str]:
    """The same for all hosts: the first one measures it, to the end if there are others."""
    here = acting_copy(agent)
    is_stopped = is_stopped if line.count == 1 else lambda: False

    def measure() -> tuple[dict[str, Number], str]:
        assert pool is not None
        return measure_success(setup, here, pool, run, step, is_stopped)

    values, summary = line.share(measure)
    return values, summary


def measure_success(
    setup: Setup,
    agent: Agent,
    pool: EnvPool,
    run: RunDirectory,
    step: int,
    is_stopped: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, Number], str]:
    """The success from the same starts as ever, and a sentence about it. Every episode is written into the run.

    Raises `Interrupted` if it is stopped meanwhile; nothing is written then.
    """
    config = setup.config.evaluation
    planner = evaluated_planner(agent, setup.policy_io, pool, setup.config)
    result = evaluate(
        pool,
        StoppablePlanner(planner, is_stopped),
        make_starts(pool.description, config.episodes, config.seed),
        execute_steps=config.execute_steps,
        settings={"step": step, "denoising_steps": setup.config.agent.denoising_steps, **to_plain(config)},
        films=config.videos,
    )
    write_file(run.evaluations / f"{step}.json", json.dumps(result.to_json(), indent=2) + "\n")
    if result.films:
        run.videos.mkdir(exist_ok=True)
        write_films(run.videos / f"{step}.mp4", list(result.films.values()), pool.description.fps)
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
