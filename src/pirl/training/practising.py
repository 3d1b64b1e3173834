"""Which practice a run has, and where it takes place."""

from collections.abc import Callable

import jax

from pirl.agents.config import RIPTConfig
from pirl.config import RLTrainConfig
from pirl.data import ReplayBuffer
from pirl.envs.pools import EnvPool, default_size, open_pool
from pirl.training.iterations import Iterations
from pirl.training.online import OnlinePractice
from pirl.training.practice import Practice
from pirl.training.run import RunDirectory
from pirl.training.setup import Setup
from pirl.training.shared_practice import FollowedReplay, SharedPractice


def open_environments(config: RLTrainConfig) -> EnvPool | None:
    """The environments of a run, if it needs any: the first of several hosts has them."""
    if config.env is None or not (config.evaluation.every or config.practises) or jax.process_index() > 0:
        return None
    size = config.evaluation.envs or default_size(config.env)
    return open_pool(
        config.env,
        size,
        timeout=config.evaluation.timeout,
        backend=config.rollout.backend,
        ray_address=config.rollout.ray_address,
    )


def make_practice(
    setup: Setup, pool: EnvPool | None, run: RunDirectory, *, is_new: bool, branch: Callable[[], int]
) -> Practice | None:
    """The practice of a run, if it has any. `branch` counts how often it has been rolled back."""
    config = setup.config
    if not config.practises:
        return None
    capacity = config.rollout.capacity if config.goes_by_iterations else config.online.capacity
    in_memory = config.goes_by_iterations or config.online.in_memory
    if pool is None:
        replay: ReplayBuffer = FollowedReplay(capacity, setup.policy_io, config.seed, run.replay, in_memory)
    else:
        replay = ReplayBuffer(capacity, setup.policy_io, seed=config.seed, directory=run.replay, in_memory=in_memory)
        if is_new and replay.num_episodes:
            # Killed before its first checkpoint: practice begins anew.
            replay.restore({"oldest": 0, "next": 0, "episodes": 0})
    practice: Practice
    if isinstance(config.agent, RIPTConfig):
        demonstrations = setup.source(config.seed) if config.agent.bc_loss_weight > 0 else None
        practice = Iterations(setup, pool, replay, run, demonstrations, branch)
    else:
        practice = _online(setup, pool, replay)
    return practice if jax.process_count() == 1 else SharedPractice(practice)


def _online(setup: Setup, pool: EnvPool | None, replay: ReplayBuffer) -> Practice:
    config, prior = setup.config, setup.config.online.prior_ratio
    # Another order than offline, so that it does not begin with the same chunks again.
    sources = [setup.source(config.seed + 1)] if prior > 0 else []
    ratios = [prior] if prior > 0 else []
    if prior < 1:
        sources, ratios = [*sources, replay], [*ratios, 1 - prior]  # type: ignore[list-item]
    return OnlinePractice(
        config.online,
        config.data.outcomes,
        pool,
        replay,
        setup.sampler(sources, ratios),
        policy_io=setup.policy_io,
        execute_steps=config.evaluation.execute_steps,
    )
