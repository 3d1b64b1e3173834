"""Learners as policies in environments, and what is measured during a run: losses on held-out episodes, success."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Float, Float32, Key

from pirl.agents.common import Agent, Metrics
from pirl.agents.ript import RIPTAgent
from pirl.config import RLTrainConfig, to_plain
from pirl.config.checks import GAPS
from pirl.data import Loader, PolicyIO
from pirl.envs.base import EnvObservation, Policy
from pirl.envs.evaluation import evaluate
from pirl.envs.policy import ChunkPolicy, Pi0Policy, SampleActions
from pirl.envs.pool import EnvPool
from pirl.envs.rollout import make_starts
from pirl.envs.video import write_videos
from pirl.errors import EnvError
from pirl.files import write_file
from pirl.models import GuidedObservation, Observation
from pirl.models.types import Array
from pirl.run_files import RunFiles
from pirl.training.display import Number
from pirl.training.distributed import broadcast
from pirl.training.health import Interrupted, StopSignal
from pirl.training.logging import RunLog
from pirl.training.setup import Setup
from pirl.training.sharding import copy_to_hosts

if TYPE_CHECKING:
    from pirl.training.streams import TrainState

# --- learners as policies ---------------------------------------------------------------------------------------------


def agent_policy(agent: Agent, policy_io: PolicyIO, pool: EnvPool) -> ChunkPolicy:
    """The learner as it acts: ACRLPD's critics choose among samples; RIPT under guidance steers by the prompt."""
    guided = agent.config.acting_guidance > 0
    return ChunkPolicy(partial(_act, agent), policy_io, batch_size=_batch_size(pool), guided=guided)


def rollout_policy(agent: Agent, policy_io: PolicyIO, pool: EnvPool) -> ChunkPolicy:
    """The learner as it acts in the rollouts that it learns from."""
    if not isinstance(agent, RIPTAgent):
        return agent_policy(agent, policy_io, pool)
    act: SampleActions = partial(_act_in_rollout, agent)
    # Before the first update the indicator means nothing to the policy.
    guided = agent.config.acting_guidance > 0 and agent.config.rollout_guidance > 0 and int(agent.step) > 0
    return ChunkPolicy(act, policy_io, batch_size=_batch_size(pool), guided=guided)


def evaluated_policy(agent: Agent, policy_io: PolicyIO, pool: EnvPool, config: RLTrainConfig) -> ChunkPolicy:
    """The policy whose success is measured: the learner, or the policy that it exports."""
    if config.evaluation.best_of_n:
        return agent_policy(agent, policy_io, pool)
    # With the settings of its checkpoint, as it will act elsewhere.
    return Pi0Policy(
        agent.policy(),
        policy_io,
        batch_size=_batch_size(pool),
        num_steps=config.agent.denoising_steps,
        guidance=agent.config.acting_guidance,
    )


class StoppablePolicy:
    """A policy that raises `Interrupted` once a stop is requested."""

    def __init__(self, policy: Policy, stop: StopSignal) -> None:
        self.horizon = policy.horizon
        self._policy, self._stop = policy, stop

    def infer(
        self, observations: EnvObservation, prompts: Sequence[str], seeds: Sequence[int], steps: Sequence[int]
    ) -> Float32[np.ndarray, "n horizon action_dim"]:
        if self._stop.interrupts_rollouts:
            raise Interrupted
        return self._policy.infer(observations, prompts, seeds, steps)


def acting_copy(agent: Agent) -> Agent:
    """The learner on the devices of each host alone, without optimizer states, so that one of them can act by itself.

    All processes have to call it.
    """
    if jax.process_count() == 1:
        return agent

    def without_opt_state(path: Any, leaf: Any) -> Any:
        return None if any(getattr(key, "name", "") == "opt_state" for key in path) else leaf

    acting: Agent = copy_to_hosts(jax.tree_util.tree_map_with_path(without_opt_state, agent))
    return acting


def _batch_size(pool: EnvPool) -> int:
    """As many environments as need actions at a time."""
    return -(-pool.size // pool.groups)


@jax.jit
def _act(
    agent: Agent, observation: Observation | GuidedObservation, keys: Key[Array, " b"]
) -> Float[Array, "b horizon action_dim"]:
    return agent.act(observation, keys)


@jax.jit
def _act_in_rollout(
    agent: RIPTAgent, observation: Observation | GuidedObservation, keys: Key[Array, " b"]
) -> Float[Array, "b horizon action_dim"]:
    return agent.act_in_rollout(observation, keys)


# --- measurements -----------------------------------------------------------------------------------------------------


@dataclass
class Hook:
    """Calls `run` when another multiple of `every` has been passed, and remembers when it did so last."""

    every: int
    run: Callable[["TrainState"], None]
    by_updates: bool = False
    """Count updates, also where progress is counted in iterations."""
    last: int = 0
    step: int = 0

    def is_due(self, state: "TrainState") -> bool:
        """Whether a multiple lies between the last call and now."""
        return self.every > 0 and self._count(state) // self.every > self.last // self.every

    def __call__(self, state: "TrainState") -> None:
        """Call `run` if it is due."""
        if self.is_due(state):
            self.fire(state)

    def fire(self, state: "TrainState") -> None:
        """Call `run`; if that is interrupted, it remains due."""
        self.run(state)
        self.last, self.step = self._count(state), state.step

    def _count(self, state: "TrainState") -> int:
        return state.step if self.by_updates else state.progress

    def state(self) -> dict[str, int]:
        return {"last": self.last, "step": self.step}

    def load_state(self, state: Mapping[str, int]) -> None:
        self.last, self.step = state["last"], state["step"]


def validate_agent(setup: Setup, log: RunLog, validate: Any, state: "TrainState") -> None:
    """Measure the losses on held-out episodes, by the compiled `validate`."""
    with log.activity("evaluation", "validating", compiles="the validation"):
        values = measure_losses(setup, validate, state.agent)
    log.measure(state.step, state.progress, values)


def measure_losses(setup: Setup, validate: Any, agent: Agent) -> dict[str, Number]:
    """Means over batches of held-out episodes; and those of training episodes minus these."""
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
    return {name: _mean([metrics[name] for metrics in jax.device_get(found)]) for name in found[0]}


def _mean(values: list[Any]) -> float:
    """Over the batches that had something to measure; NaN if none had."""
    measured = [value for value in values if not np.isnan(value)]
    return float(np.mean(measured)) if measured else float("nan")


def evaluate_agent(
    setup: Setup,
    pool: EnvPool | None,
    run: RunFiles,
    log: RunLog,
    stop: StopSignal,
    save: Callable[["TrainState"], None],
    state: "TrainState",
) -> None:
    """Measure success in the main process. Raises `Interrupted` if it is stopped, where it is the only one."""
    agent = acting_copy(state.agent)

    def measure() -> tuple[dict[str, Number], str]:
        assert pool is not None
        return measure_success(setup, agent, pool, run, state.step, stop)

    with log.activity("evaluation", "evaluating", compiles="acting"):
        try:
            values, summary = broadcast(measure)
        except EnvError:
            if jax.process_count() == 1:
                save(state)  # what was learned is kept until the environment works again
            raise
    log.say(f"step {state.step}: {summary}")
    log.measure(state.step, state.progress, values)


def measure_success(
    setup: Setup, agent: Agent, pool: EnvPool, run: RunFiles, step: int, stop: StopSignal
) -> tuple[dict[str, Number], str]:
    """The success from the same starts every time, and a sentence about it; every episode is written into the run."""
    config = setup.config.evaluation
    policy = evaluated_policy(agent, setup.policy_io, pool, setup.config)
    result = evaluate(
        pool,
        StoppablePolicy(policy, stop),
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
