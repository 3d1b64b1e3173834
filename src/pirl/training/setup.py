"""From a configuration to the things a run is made of: data, statistics, policy, learner, compiled updates."""

import contextlib
import ctypes
import hashlib
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Float64

from pirl.agents.acrlpd import ACRLPDAgent
from pirl.agents.bc import BCAgent
from pirl.agents.common import Agent, Metrics
from pirl.agents.config import ACRLPDConfig, BCConfig, RIPTConfig
from pirl.agents.ript import RIPTAgent
from pirl.config import RLTrainConfig, check_data, to_plain
from pirl.data import (
    ChunkBatch,
    ChunkIndexSampler,
    ChunkSampler,
    ChunkShape,
    Dataset,
    DatasetSource,
    FrameCacheConfig,
    Loader,
    PolicyIO,
    Robot,
    Trajectories,
    dataset_norm_stats,
    load_robot,
    load_trajectories,
    open_frames,
    read_outcomes,
    scan_episodes,
)
from pirl.data.problems import BrokenDatasetError
from pirl.data.validate import leave_out, split_episodes
from pirl.envs.policy import check_policy, check_same_actions, choose_statistics, find_policy
from pirl.envs.pool import EnvPool
from pirl.errors import CheckpointError, ConfigError, DataError
from pirl.files import cache_directory, expand_home
from pirl.interop.checkpoint import check_match, load_policy, open_checkpoint
from pirl.interop.norm_stats import NormStats, read_norm_stats
from pirl.models import Pi0, Tokenizer, abstract_model, create_model
from pirl.run_files import RunFiles
from pirl.training.checkpoints import newest_whole
from pirl.training.health import guarded
from pirl.training.sharding import ParameterSharding, make_host_mesh, make_mesh

_logger = logging.getLogger(__name__)
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # mallopt's names in malloc.h


def prepare_jax() -> None:
    """Keep compiled programs in pirl's cache directory, unless the user chose another; and keep freed memory."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    if jax.default_backend() == "cpu":
        # An update takes its buffers from malloc; the page faults of mapping them anew take up to a third of the time.
        with contextlib.suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(_M_MMAP_MAX, 0)
            libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


@dataclass(frozen=True)
class Setup:
    """Data, statistics and the mesh of a run; `create_agent` makes the learner."""

    config: RLTrainConfig
    policy_io: PolicyIO
    norm_stats: dict[str, dict[str, NormStats]]
    trajectories: Trajectories | None
    # Weights of rows as anchors: to learn from, and to be measured by.
    weights: Float64[np.ndarray, " rows"] | None
    held_out: Float64[np.ndarray, " rows"] | None
    action_dim: int
    mesh: Mesh
    # Lowest and highest discounted return from any row on, for learners with critics.
    returns: tuple[float, float] | None = None

    @property
    def shape(self) -> ChunkShape:
        agent, chunk = self.config.agent, self.config.model.action_horizon
        if (horizon := getattr(agent, "horizon_length", None)) is None:  # only critics look further
            return ChunkShape(chunk, chunk, sees_next=False)
        indicated = getattr(agent, "actor_mode", None) == "condition"
        return ChunkShape(horizon, chunk, indicated=indicated, discount=getattr(agent, "discount", 1.0))

    def source(self, seed: int, *, held_out: bool = False) -> DatasetSource:
        """The dataset as something to draw from."""
        assert self.trajectories is not None
        weights, pooled = self.held_out if held_out else self.weights, self.config.data.episodes_per_memory_pool
        indices = ChunkIndexSampler(self.trajectories, seed=seed, weights=weights, episodes_per_memory_pool=pooled)
        return DatasetSource(self.trajectories, indices, self.policy_io)

    def sampler(self, sources: list[Any], ratios: list[float] | None = None) -> ChunkSampler:
        """Batches from sources, this process's share of them."""
        return ChunkSampler(
            sources,
            batch_size=self.config.batch_size,
            shape=self.shape,
            ratios=ratios,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )

    @property
    def share(self) -> slice:
        """The rows of a batch that this process provides."""
        size = self.config.batch_size // jax.process_count()
        return slice(jax.process_index() * size, (jax.process_index() + 1) * size)

    @property
    def here(self) -> "Setup":
        """The same on the devices of this process alone."""
        return self if jax.process_count() == 1 else replace(self, mesh=make_host_mesh())

    def open_loader(self, state: Mapping[str, Any] | None) -> Loader:
        """The batches of offline updates on the devices, from the beginning or from a saved state on."""
        sampler = self.sampler([self.source(self.config.seed)])
        if state is not None:
            sampler.restore(state)
        return Loader(sampler, sharding=self.batch_sharding(), prefetch=self.config.data.prefetch)

    def place(self, batches: list[Any]) -> Any:
        """This process's share of a batch on the devices, or of several, stacked."""
        several = len(batches) > 1
        batch = jax.tree.map(lambda *leaves: np.stack(leaves), *batches) if several else batches[0]
        sharding = self.batch_sharding(stacked=several)
        if sharding is None:
            return jax.device_put(batch)
        return jax.tree.map(partial(jax.make_array_from_process_local_data, sharding), batch)

    def batch_sharding(self, *, stacked: bool = False) -> NamedSharding | None:
        """Batches are spread over all devices, stacked ones along their second axis."""
        if self.mesh.size == 1:
            return None
        spec = PartitionSpec(("data", "fsdp"))
        return NamedSharding(self.mesh, PartitionSpec(None, *spec) if stacked else spec)


def set_up(config: RLTrainConfig, *, resumed: RunFiles | None = None, progress: bool = True) -> Setup:
    """Open and check the data, read or compute statistics, decode frames that are not in the cache.

    A run that is `resumed` takes its statistics from the policies that it has written.
    """
    if config.checkpoint is not None and resumed is None:
        # Checked here, since it is loaded only after all this.
        start = open_checkpoint(find_policy(expand_home(config.checkpoint)))
        check_match(start, config.model, fresh_lora=True, to_learn=True)
    robot, model = load_robot(config.data.robot), config.model
    dataset = trajectories = weights = held_out = None
    if config.data.repo_id is not None:
        dataset = _open_data(config, robot, progress)
        found = read_outcomes(dataset, config.data.outcomes)
        weights = config.data.selection.weights(dataset, found, model.action_horizon)
        if config.data.validation_fraction:
            weights, held_out = hold_out(weights, dataset, config.data.validation_fraction, config.seed)
        samples = {"ends": found.ends, "used": weights > 0}
    asset_id, statistics = _statistics(config, robot, resumed, dataset, samples if dataset is not None else {})
    tokenizer = Tokenizer.for_model(model) if model.max_token_len else None
    returns = None
    action_dim = robot.action_dim or statistics["actions"].width_in(model.action_dim)
    if dataset is not None and weights is not None:
        trajectories = load_trajectories(
            dataset, robot, model, outcomes=found, frame_cache=_frame_cache(config), progress=progress
        )
        action_dim = robot.action_dim or trajectories.actions.shape[1]
        if isinstance(config.agent, ACRLPDConfig):
            returns = return_range(trajectories, weights > 0, config.agent.discount)
            _check_value_range(config.agent, returns)
    return Setup(
        config=config,
        policy_io=PolicyIO(robot, model, statistics, tokenizer),
        norm_stats={asset_id: statistics},
        trajectories=trajectories,
        weights=weights,
        held_out=held_out,
        action_dim=action_dim,
        mesh=make_mesh(config.fsdp_devices),
        returns=returns,
    )


def _frame_cache(config: RLTrainConfig) -> FrameCacheConfig:
    return FrameCacheConfig(*config.model.image_resolution, compression=config.data.frame_compression)


def _open_data(config: RLTrainConfig, robot: Robot, progress: bool) -> Dataset:
    """The episodes to train on, checked before anything is decoded, and then decoded."""
    data = config.data
    assert data.repo_id is not None
    dataset = scan_episodes(data.repo_id, data.selection.episodes)
    check_data(config, dataset, robot)
    cameras = list(robot.cameras.values())
    usable, problems = split_episodes(dataset, (*robot.state, *robot.actions), cameras, data.outcomes)
    for note in dataset.problems:
        _logger.info("%s: %s", dataset.name, note)
    dataset = leave_out(usable, problems, data.bad_episodes)
    try:
        if cameras:
            skips = data.bad_episodes == "skip"
            open_frames(dataset, cameras, _frame_cache(config), progress=progress, find_all_damage=skips)
    except BrokenDatasetError as error:
        return leave_out(dataset, [*problems, *error.problems], data.bad_episodes)
    return dataset


def return_range(trajectories: Trajectories, used: Bool[np.ndarray, " rows"], discount: float) -> tuple[float, float]:
    """The lowest and the highest discounted return from any row of the episodes that are used."""
    low, high = np.inf, -np.inf
    for start, end in zip(trajectories.starts, trajectories.ends, strict=True):
        if not used[start:end].any():
            continue
        value = 0.0
        for reward in trajectories.rewards[start:end][::-1].tolist():
            value = reward + discount * value
            low, high = min(low, value), max(high, value)
    return low, high


def _check_value_range(agent: ACRLPDConfig, returns: tuple[float, float]) -> None:
    """Raise where returns in the data are beyond what the critics can express."""
    (low, high), critic = returns, agent.critic
    if critic.loss != "huber" and not (critic.value_range[0] - 1e-6 <= low and high <= critic.value_range[1] + 1e-6):
        raise ConfigError(
            f"returns in the data are {low:.4g} to {high:.4g}, and agent.critic.value_range = {critic.value_range} is "
            f"all that critics with loss {critic.loss} can express: set --agent.critic.value-range {low:.4g} {high:.4g} "
            "or more, or --agent.critic.loss huber."
        )


def data_identity(setup: Setup) -> dict[str, Any] | None:
    """Digests of the data as they are used, by which a resumed run recognizes them."""
    data = setup.trajectories
    if data is None:
        return None
    content, prompts = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    arrays = [data.states, data.actions, data.rewards, data.terminals, data.ends, data.success]
    for array in [*arrays, *([] if data.human is None else [data.human])]:
        content.update(np.ascontiguousarray(array).tobytes())
    prompts.update("\0".join(data.prompts).encode())
    prompts.update(np.ascontiguousarray(data.prompt_of_row).tobytes())
    digests = {"content": content.hexdigest(), "prompts": prompts.hexdigest()}
    return {"episodes": len(data.ends), "frames": len(data.rewards), **digests}


def refuse_other_data(name: str | None, before: dict[str, Any] | None, now: dict[str, Any] | None) -> None:
    """Raise if the data, by their identities, are not those that a run began with."""
    if before == now:
        return
    advice = "or begin another run (--exp-name) from the policy of this one (--checkpoint)."
    if before is None or now is None:
        had, has = ("a", "none") if now is None else ("no", f"{name}")
        raise DataError(f"this run began with {had} dataset, and has {has} now: leave it as it was, {advice}")
    raise DataError(
        f"{name} is not the dataset that this run began with: it had {before['episodes']} "
        f"episodes ({before['frames']} frames) then, and has {now['episodes']} ({now['frames']}) now, or other "
        f"values, rewards, labels or prompts. Put it back, {advice}"
    )


def describe_policy(setup: Setup, agent: Agent) -> dict[str, Any]:
    """The metadata of an exported policy."""
    guidance = setup.config.agent.acting_guidance
    return {
        "config": to_plain(setup.config),
        "robot": setup.policy_io.robot.to_dict(),
        "parameter_counts": agent.parameter_counts(),
        **({"guidance": guidance} if guidance else {}),
    }


def hold_out(
    weights: Float64[np.ndarray, " rows"], dataset: Dataset, fraction: float, seed: int
) -> tuple[Float64[np.ndarray, " rows"], Float64[np.ndarray, " rows"]]:
    """Split by episodes, chosen by the seed among those that are used: what is left to learn from, and what is not."""
    used = np.flatnonzero(np.add.reduceat(weights, dataset.starts[:-1]) > 0)
    count = max(1, round(fraction * len(used)))
    if count >= len(used):
        raise ConfigError(
            f"data.validation_fraction = {fraction} of the {len(used)} episodes that are used leaves none to learn from."
        )
    chosen = np.zeros(len(dataset.lengths), bool)
    chosen[np.random.default_rng([seed, 7]).permutation(used)[:count]] = True
    rows = np.repeat(chosen, dataset.lengths)
    return np.where(rows, 0.0, weights), np.where(rows, weights, 0.0)


def check_env(setup: Setup, pool: EnvPool) -> None:
    """Raise if robot, policy and statistics do not fit the environment they are to act in."""
    (statistics,) = setup.norm_stats.values()
    check_policy(setup.policy_io.robot, setup.config.model, statistics, pool.description)


def create_learner(config: RLTrainConfig, action_dim: int | None, policy: Pi0, rng: jax.Array) -> Agent:
    """The learner of a configuration; `action_dim` of the policy's action dimensions are the robot's."""
    if isinstance(config.agent, ACRLPDConfig):
        return ACRLPDAgent.create(config.agent, policy, rng, real_action_dim=action_dim)
    if isinstance(config.agent, RIPTConfig):
        return RIPTAgent.create(config.agent, policy, rng, real_action_dim=action_dim)
    if isinstance(config.agent, BCConfig):
        return BCAgent.create(config.agent, policy, rng, real_action_dim=action_dim)
    agent: Agent = config.agent.create(policy, rng, real_action_dim=action_dim)  # the user's own
    return agent


def create_agent(setup: Setup) -> Agent:
    """The learner, created on its final sharding: no device ever holds more than its part."""
    config, key = setup.config, jax.random.key(setup.config.seed)
    # With a sharding also on a single device, as a restored one has: else a resumed run would compile everything anew.
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings: dict[str, Any] = {"out_shardings": one if setup.mesh.size == 1 else agent_sharding(setup)}
    create = partial(create_learner, config, setup.action_dim)
    if config.checkpoint is None:
        fresh: Agent = jax.jit(lambda key: create(create_model(config.model, key), key), **shardings)(key)
        return fresh
    policy = _load(config, ParameterSharding(setup.mesh))
    with warnings.catch_warnings():
        # What is frozen changes its dtype, so its memory cannot be taken over.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        agent: Agent = jax.jit(create, donate_argnums=0, **shardings)(policy, key)
    return agent


def agent_shapes(setup: Setup) -> Agent:
    """The learner as shapes with shardings: what a checkpoint is restored into."""
    create = partial(create_learner, setup.config, setup.action_dim)
    shapes: Agent = jax.eval_shape(create, abstract_model(setup.config.model), jax.random.key(0))
    if setup.mesh.size == 1:
        return shapes
    rule = ParameterSharding(setup.mesh)

    def laid_out(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rule(name, leaf))

    return jax.tree_util.tree_map_with_path(laid_out, shapes)


def agent_sharding(setup: Setup) -> Any:
    """The sharding of each array of the learner."""
    return jax.tree.map(lambda leaf: leaf.sharding, agent_shapes(setup))


def _load(config: RLTrainConfig, sharding: ParameterSharding) -> Pi0:
    """The policy to begin with, in float32: what learns has to be."""
    assert config.checkpoint is not None
    path = find_policy(expand_home(config.checkpoint))
    fresh = jax.random.key(config.seed)
    return load_policy(path, config.model, param_dtype="float32", sharding=sharding, fresh_lora=fresh, to_learn=True)


def _statistics(
    config: RLTrainConfig,
    robot: Robot,
    resumed: RunFiles | None,
    dataset: Dataset | None,
    samples: Mapping[str, np.ndarray],
) -> tuple[str, dict[str, NormStats]]:
    """The normalization statistics, and the name to export them under."""
    data = config.data
    asset_id = data.asset_id or _only_asset_id(config, resumed) or robot.name
    if data.norm_stats == "dataset":
        assert dataset is not None
        return asset_id, dict(dataset_norm_stats(dataset, robot, config.model.action_horizon, **samples))
    if data.norm_stats != "checkpoint" and not (resumed is not None and newest_whole(resumed)):
        file = expand_home(data.norm_stats)
        stats = read_norm_stats(file / "norm_stats.json" if file.is_dir() else file)
        if missing := sorted({"state", "actions"} - set(stats)):
            raise ConfigError(f"data.norm_stats: {file} has no statistics of {' and '.join(missing)}.")
        return asset_id, dict(stats)
    source = _beginning(config, resumed)
    if source is None:
        raise ConfigError("data.norm_stats = checkpoint needs a --checkpoint to take them from.")
    checkpoint = open_checkpoint(source)
    check_same_actions(checkpoint, robot)
    otherwise = "take the dataset's (--data.norm-stats dataset)"
    return choose_statistics(checkpoint, data.asset_id, robot.name, flag="--data.asset-id", otherwise=otherwise)


def _beginning(config: RLTrainConfig, resumed: RunFiles | None) -> Path | None:
    """The newest checkpoint of the resumed run, else the one to start from."""
    if resumed is not None and (newest := newest_whole(resumed)):
        return newest
    return None if config.checkpoint is None else find_policy(expand_home(config.checkpoint))


def _only_asset_id(config: RLTrainConfig, resumed: RunFiles | None) -> str | None:
    """The name of the checkpoint's statistics, if it has only one set."""
    with contextlib.suppress(CheckpointError):  # it may be gone, and no longer needed
        policy = _beginning(config, resumed)
        names = [] if policy is None else list(open_checkpoint(policy).norm_stats())
        return names[0] if len(names) == 1 else None
    return None


def compile_updates(setup: Setup) -> tuple[Any, Any, Any]:
    """One update; a scan of several; and a validation. Updates take over the learner's memory."""

    def update(agent: Agent, batch: Any, rng: jax.Array) -> tuple[Agent, Metrics]:
        return agent.update(batch, rng)

    careful = guarded(update, setup.config.health.loss_limit)

    def updates(agent: Agent, batches: Any, rngs: jax.Array) -> tuple[Agent, Metrics]:
        return jax.lax.scan(lambda agent, each: careful(agent, *each), agent, (batches, rngs))

    def validate(agent: Agent, batch: ChunkBatch, rng: jax.Array) -> Metrics:
        return agent.validate(batch, rng)

    # The learner keeps its sharding, or the next update would be compiled again; metrics are on every host.
    shardings: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    if setup.mesh.size > 1:
        measured = {"out_shardings": NamedSharding(setup.mesh, PartitionSpec())}
        shardings = {"out_shardings": (agent_sharding(setup), measured["out_shardings"])}
    compile_update = partial(jax.jit, donate_argnums=0, **shardings)
    return compile_update(careful), compile_update(updates), jax.jit(validate, **measured)


def update_keys(seed: int, rollbacks: int, step: int, count: int) -> jax.Array:
    """The randomness of an update follows from the seed and its number; of several, one key each."""
    key = jax.random.key(seed)
    if rollbacks:
        key = jax.random.fold_in(key, rollbacks)
    if count == 1:
        return jax.random.fold_in(key, step)
    return jax.vmap(partial(jax.random.fold_in, key))(np.arange(step, step + count))
