"""`pirl train --dry-run`: build everything, make a few updates, print what a run would take; write nothing but caches."""

import contextlib
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from pirl.agents.common import Agent
from pirl.agents.config import RIPTConfig
from pirl.agents.ript import RolloutBatch
from pirl.config import RLTrainConfig
from pirl.data import Loader, ReplayBuffer
from pirl.envs.pool import EnvPool, EpisodeFailed, ResetResult, open_pool
from pirl.envs.rollout import make_starts, roll_out
from pirl.errors import EnvError
from pirl.text import format_seconds, format_size
from pirl.training.evaluation import agent_policy, rollout_policy
from pirl.training.rollout_data import Rows, make_batch
from pirl.training.setup import Setup, check_env, compile_updates, create_agent, prepare_jax, set_up
from pirl.training.sharding import named_leaves
from pirl.training.streams import shaped_episode

T = TypeVar("T")
# What the arrays of a learner are, by the beginning of their path; all others belong to the critics.
_KINDS = {
    "actor/params": "parameters",
    "actor/frozen_params": "frozen",
    "actor/ema_params": "average",
    "actor/opt_state": "optimizer",
    "start_params": "start policy",
    "step": "optimizer",
}
_TIMED_UPDATES = 3


def dry_run(config: RLTrainConfig) -> int:
    """Print what training as configured would take; the return value is the exit code."""
    prepare_jax()
    with contextlib.ExitStack() as stack:
        _say("reading the data")
        setup = set_up(config)
        _say("making the learner")
        agent = jax.block_until_ready(create_agent(setup))
        rows = [*_about_learner(agent), ("data", _about_data(setup))]
        pool = None if config.env is None else stack.enter_context(open_pool(config.env, 1))
        if pool is not None:
            check_env(setup, pool)
        batch = _first_batch(setup, agent, pool)
        rows.append(("batch", _about_batch(batch)))
        if pool is not None:
            rows.append(("acting", _about_acting(setup, agent, pool)))
        rows += _about_update(setup, agent, batch)
    width = max(len(name) for name, _ in rows) + 2
    print("\n".join(f"{name:{width}}{value}".rstrip() for name, value in rows))
    return 0


def state_bytes(agent: Agent) -> dict[str, int]:
    """Bytes of the learner's state by what they are for, all devices together (a replicated array counted once)."""
    found: Counter[str] = Counter()
    for name, leaf in named_leaves(agent).items():
        found[kind_of(name)] += leaf.size * leaf.dtype.itemsize
    return {kind: found[kind] for kind in dict.fromkeys((*_KINDS.values(), "critics")) if found[kind]}


def kind_of(name: str) -> str:
    """What an array of the learner is for, by its path."""
    return next((kind for start, kind in _KINDS.items() if name.startswith(start)), "critics")


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """What the compiler expects a program to hold on each device at most: its inputs, results and all in between."""
    memory: Any = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(kept + memory.temp_size_in_bytes)


def _say(activity: str) -> None:
    print(f"{activity} …", file=sys.stderr, flush=True)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def _about_learner(agent: Agent) -> list[tuple[str, str]]:
    counts, sizes = agent.parameter_counts(), state_bytes(agent)
    parts = ", ".join(f"{kind} {format_size(count)}" for kind, count in sizes.items())
    return [
        ("policy", f"{counts['policy']:,} parameters, {counts['policy_trainable']:,} trainable"),
        *([("critics", f"{counts['critic']:,} parameters")] if "critic" in counts else []),
        ("state", f"{format_size(sum(sizes.values()))}: {parts}"),
    ]


def _about_data(setup: Setup) -> str:
    data = setup.trajectories
    if data is None or setup.weights is None:
        return "none; learned online"
    succeeded, known = np.count_nonzero(data.success == 1), np.count_nonzero(data.success >= 0)
    text = f"{len(data.starts):,} episodes ({succeeded:,} of {known:,} succeeded), {len(data.rewards):,} frames"
    held_out = "" if setup.held_out is None else f" and {np.count_nonzero(setup.held_out):,} held out"
    return f"{text}, of which {np.count_nonzero(setup.weights):,} are learned from{held_out}"


def _about_batch(batch: Any) -> str:
    batch = batch.chunks if isinstance(batch, RolloutBatch) else batch
    seen = batch.observations
    arrays = {**seen.images, "state": seen.state, "prompt": seen.tokenized_prompt}
    arrays |= {"actions": batch.actions, "rewards": batch.rewards}
    shapes = {name: "×".join(map(str, array.shape)) for name, array in arrays.items() if array is not None}
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


def _about_acting(setup: Setup, agent: Agent, pool: EnvPool) -> str:
    """One chunk for an observation of the environment, compiled and then timed."""
    start = make_starts(pool.description, 1, setup.config.online.seed)[0]
    pool.start(0, start)
    answer = pool.wait([0])[0]
    if isinstance(answer, EpisodeFailed):
        raise EnvError(f"{pool.description.name} could not be started: {answer.reason}")
    assert isinstance(answer, ResetResult)
    observation = {name: value[None] for name, value in answer.observation.items()}
    policy = agent_policy(agent, setup.policy_io, pool)
    _say("compiling acting")
    for _ in range(2):
        chunk, seconds = _timed(lambda: policy.infer(observation, [answer.prompt], [start.seed], [0]))
    shape = "×".join(map(str, chunk.shape[1:]))
    return f"{format_seconds(seconds)} for a chunk of {shape} in {pool.description.name}"


def _about_update(setup: Setup, agent: Agent, batch: Any) -> list[tuple[str, str]]:
    """Compile the update, make one, and time a few more. The learner is donated."""
    key = jax.random.key(setup.config.seed)
    _say("compiling the update")
    compiled, compile_seconds = _timed(lambda: compile_updates(setup)[0].lower(agent, batch, key).compile())
    _say("updating")
    seconds = []
    for number in range(1 + _TIMED_UPDATES):
        began = time.perf_counter()
        agent, metrics = jax.block_until_ready(compiled(agent, batch, jax.random.fold_in(key, number)))
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[1:])
    devices = "" if setup.mesh.size == 1 else f" on each of {setup.mesh.size} devices"
    return [
        ("memory", f"{format_size(peak_bytes(compiled))} at the peak of an update{devices}, as the compiler estimates"),
        ("compiling", f"{format_seconds(compile_seconds)}; less where the compiled program is in the cache"),
        ("update", f"{format_seconds(median)}, {setup.config.batch_size / median:,.1f} samples per second"),
        ("loss", f"{float(metrics['loss']):.4g} after {1 + _TIMED_UPDATES} updates on one batch"),
    ]


def _first_batch(setup: Setup, agent: Agent, pool: EnvPool | None) -> Any:
    """The first batch of the run; without a dataset one of an episode of the learner, for RIPT as of a good attempt."""
    config, size = setup.config, setup.config.batch_size
    if not isinstance(config.agent, RIPTConfig):
        source: Any = _rollout(setup, agent, pool) if setup.trajectories is None else setup.source(config.seed)
        with Loader(setup.sampler([source]), sharding=setup.batch_sharding(), prefetch=0) as loader:
            return next(loader)
    replay, demonstrations = _rollout(setup, agent, pool), None
    if config.agent.bc_loss_weight > 0:
        prior = setup.source(config.seed)
        demonstrations = Rows(prior.trajectories, prior.indices.take(0, size))
    rows = Rows(replay.trajectories, np.arange(size, dtype=np.int64) % len(replay))
    advantages, included = np.ones(1, np.float32), np.ones(size, bool)
    batch = make_batch(config.agent, rows, advantages, included, setup.shape, setup.policy_io, demonstrations)
    return jax.device_put(batch, setup.batch_sharding())


def _rollout(setup: Setup, agent: Agent, pool: EnvPool | None) -> ReplayBuffer:
    """An episode of the learner."""
    assert pool is not None
    config = setup.config
    replay = ReplayBuffer(config.online.capacity, setup.policy_io, seed=config.seed)
    policy, starts = rollout_policy(agent, setup.policy_io, pool), make_starts(pool.description, 1, 0)
    _say("acting an episode")
    for rollout in roll_out(pool, policy, starts, execute_steps=config.evaluation.execute_steps, keep_images=True):
        if rollout.lost is not None:
            raise EnvError(f"the episode was lost: {rollout.lost}")
        replay.add(shaped_episode(rollout, setup.policy_io.robot, config.data.outcomes))
    return replay
