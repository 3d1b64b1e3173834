"""What chooses the actions: a policy infers a chunk for every environment that needs one, in one batch."""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Float32, Key, UInt32

from pirl.data.policy_io import PolicyIO
from pirl.data.robots import Robot, load_robot
from pirl.data.transforms import indicate, make_mask
from pirl.envs.base import EnvDescription, EnvObservation
from pirl.errors import CheckpointError, ConfigError, did_you_mean
from pirl.interop.checkpoint import Checkpoint, load_policy, open_checkpoint, resolve_config
from pirl.interop.norm_stats import NormStats
from pirl.models import GuidedObservation, Observation, Pi0, Pi0Config, Tokenizer, sample_actions
from pirl.models.types import Array
from pirl.run_files import RunFiles, saved_steps

NO_STATISTICS = "none"
# From observations (guided ones, where it acts under guidance), and a key for each of them, to chunks.
SampleActions = Callable[[Any, Key[Array, " b"]], Float[Array, "b horizon action_dim"]]


class ChunkPolicy:
    """A policy from a function of observations and one random key each to chunks, all in the model's units.

    The key of a chunk comes from the episode's seed and step, so episodes repeat exactly. Batches are filled up to
    `batch_size`, so that one compiled program serves any number of environments. If `guided`, the function is given
    every observation under two prompts: as it is, and with the indicator of good actions.
    """

    def __init__(
        self, sample_actions: SampleActions, policy_io: PolicyIO, *, batch_size: int, guided: bool = False
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size = {batch_size} should be at least 1.")
        if guided and not policy_io.config.max_token_len:
            raise ConfigError("guidance needs a prompt, but the model has max_token_len = 0.")
        self.horizon = policy_io.config.action_horizon
        self.policy_io = policy_io
        self._sample_actions, self._batch_size, self._guided = sample_actions, batch_size, guided

    def infer(
        self, observations: EnvObservation, prompts: Sequence[str], seeds: Sequence[int], steps: Sequence[int]
    ) -> Float32[np.ndarray, "n horizon action_dim"]:
        robot, size = self.policy_io.robot, self._batch_size
        images = {slot: observations[feature] for slot, feature in robot.cameras.items()}
        state = np.concatenate([observations[column] for column in robot.state], axis=-1)
        observation: Any = self.policy_io.observation(images, state, list(prompts))
        if self._guided:
            tokens = self.policy_io.prompt_tokens([indicate(prompt, True) for prompt in prompts], state)
            observation = GuidedObservation(observation, observation.with_prompt(*tokens))
        folds = [[seed & 0xFFFFFFFF, seed >> 32, step] for seed, step in zip(seeds, steps, strict=True)]
        numbers = np.array(folds).astype(np.uint32)
        chunks: list[Any] = []
        for first in range(0, len(state), size):
            # The last row, repeated, fills the batch.
            rows = np.minimum(np.arange(first, first + size), len(state) - 1)
            part = jax.tree.map(lambda values, rows=rows: values[rows], observation)
            chunks.append(np.asarray(self._sample_actions(part, _keys(numbers[rows]))))
        inferred: Any = np.concatenate(chunks)
        return self.policy_io.robot_actions(inferred[: len(state)], state)


class Pi0Policy(ChunkPolicy):
    """A π₀ policy under the plain prompt, or guided towards what the indicator of good actions asks for.

    `guidance` 0 is the plain prompt alone, 1 the one with the indicator alone; others need both, and twice the time.
    """

    def __init__(
        self, policy: Pi0, policy_io: PolicyIO, *, batch_size: int, num_steps: int = 10, guidance: float = 0.0
    ) -> None:
        if num_steps < 1:
            raise ConfigError(f"num_steps = {num_steps} should be at least 1.")
        if not 0 <= guidance < math.inf:
            raise ConfigError(f"guidance = {guidance} should be a number of at least 0.")
        sample = partial(_sample, policy, num_steps=num_steps, guidance=guidance)
        super().__init__(sample, policy_io, batch_size=batch_size, guided=guidance != 0)
        self.guidance = guidance


@jax.jit
def _keys(numbers: UInt32[Array, "b 3"]) -> Key[Array, " b"]:
    def key(row: UInt32[Array, " 3"]) -> Key[Array, ""]:
        folded = jax.random.key(0)
        for number in row:
            folded = jax.random.fold_in(folded, number)
        return folded

    return jax.vmap(key)(numbers)


@partial(jax.jit, static_argnames=("num_steps", "guidance"))
def _sample(
    policy: Pi0,
    observation: Observation | GuidedObservation,
    keys: Key[Array, " b"],
    num_steps: int,
    guidance: float,
) -> Float[Array, "b horizon action_dim"]:
    shape = (policy.config.action_horizon, policy.config.action_dim)
    noise = jax.vmap(lambda key: jax.random.normal(key, shape))(keys)
    return sample_actions(policy, observation, noise, num_steps, guidance)


def load_trained_policy(
    checkpoint: Path,
    description: EnvDescription,
    *,
    batch_size: int,
    model: str | None = None,
    robot: str | None = None,
    asset_id: str | None = None,
    num_steps: int = 10,
    guidance: float | None = None,
) -> Pi0Policy:
    """The policy of a checkpoint or a run, for an environment; that they fit is checked before anything is loaded.

    `robot` is another description of the environment's robot (a preset or a JSON file), such as one with delta actions;
    a policy that was trained here brings its own.
    `asset_id` chooses among several statistics; "none" does without. `guidance` is the checkpoint's own unless given.
    """
    opened = open_checkpoint(find_policy(checkpoint))
    config = resolve_config(opened, model)
    if robot is not None:
        used = load_robot(robot)
    else:
        used = _own_robot(opened) or description.robot
        cameras = {slot: feature for slot, feature in used.cameras.items() if slot in config.cameras}
        used = dataclasses.replace(used, cameras=cameras)
    statistics = None
    if asset_id != NO_STATISTICS:
        without = f"say --asset-id {NO_STATISTICS} if it was trained without"
        _, statistics = choose_statistics(opened, asset_id, flag="--asset-id", otherwise=without)
    check_policy(used, config, statistics, description)
    if guidance is None:
        guidance = opened.description.get("guidance", 0.0)
        if type(guidance) not in (int, float):
            raise CheckpointError(
                f"{opened.directory}: guidance in pirl.json should be a number; it is {guidance!r:.60}."
            )
    tokenizer = Tokenizer.for_model(config) if config.max_token_len else None
    policy_io = PolicyIO(used, config, statistics, tokenizer)
    policy = load_policy(opened.directory, config)
    return Pi0Policy(policy, policy_io, batch_size=batch_size, num_steps=num_steps, guidance=float(guidance))


def find_policy(path: Path) -> Path:
    """The checkpoint directory at a path, or the newest policy of the training run there."""
    path = Path(os.path.expanduser(path))  # which leaves the home of nobody as it is
    run = RunFiles(path)
    if steps := saved_steps(run.checkpoints):
        return run.checkpoints / str(steps[-1])
    if run.is_run:
        raise CheckpointError(f"the run {path} has not written a policy yet.")
    return path


def choose_statistics(
    checkpoint: Checkpoint, asset_id: str | None, default: str | None = None, *, flag: str, otherwise: str
) -> tuple[str, dict[str, NormStats]]:
    """The statistics of a checkpoint and their name: those of `asset_id`, else the only ones, else those of `default`.

    `flag` and `otherwise` complete the error message: how to choose, and what to do where there are none.
    """
    found = checkpoint.norm_stats()
    if asset_id is None and len(found) == 1:
        return next(iter(found.items()))
    name = asset_id or default
    if name in found:
        return name, found[name]
    if not found:
        raise ConfigError(
            f"{checkpoint.directory} has no statistics (assets/<id>/norm_stats.json), without which its actions mean "
            f"nothing to the robot: copy the ones it was trained with, or {otherwise}."
        )
    lacks = "several statistics" if name is None else f"no statistics {name!r}"
    question = "" if name is None else did_you_mean(name, found)
    raise ConfigError(f"{checkpoint.directory} has {lacks}. {question}It has {', '.join(found)}: choose with {flag}.")


def check_policy(
    robot: Robot, config: Pi0Config, statistics: Mapping[str, NormStats] | None, description: EnvDescription
) -> None:
    name, shapes = description.name, description.shapes
    for feature in (*robot.cameras.values(), *robot.state):
        if feature not in shapes:
            raise ConfigError(
                f"the robot {robot.name!r} observes {feature!r}, which {name} does not have. "
                f"{did_you_mean(feature, shapes)}It has {', '.join(shapes)}."
            )
    if config.cameras and not robot.cameras and description.robot.cameras:
        raise ConfigError(
            f"the policy sees through {', '.join(config.cameras)}, but {name} has only "
            f"{', '.join(description.robot.cameras)}: describe the robot with the policy's cameras (--robot)."
        )
    given = {
        "state": sum(shapes[column][0] for column in robot.state),
        "actions": description.robot.action_dim or robot.action_dim or 0,
    }
    for key, claimed in (("state", robot.state_dim), ("actions", robot.action_dim)):
        if given[key] > config.action_dim:
            raise ConfigError(
                f"the policy takes {config.action_dim} numbers of {key} at most; {name} has {given[key]}. It needs a "
                f"policy with action_dim >= {given[key]}."
            )
        claims = {f"the robot {robot.name!r}": claimed}
        if statistics is not None:
            if key not in statistics:
                raise ConfigError(f"the policy has no statistics of {key!r}, only of {', '.join(statistics)}.")
            stats = statistics[key]
            claims["the policy's statistics"] = min(max(given[key], stats.unpadded_width), len(stats.mean))
        for who, width in claims.items():
            if width not in (None, given[key]):
                raise ConfigError(
                    f"{key} has {width} dimensions according to {who}; in {name} there are {given[key]}: the policy was "
                    "trained for another robot."
                )


def check_same_actions(checkpoint: Checkpoint, robot: Robot) -> None:
    """Raise if a checkpoint's statistics are of its own robot, whose numbers mean something else than this robot's."""
    own = _own_robot(checkpoint)
    if own is None:
        return
    same_delta = np.flatnonzero(make_mask(*own.delta)).tolist() == np.flatnonzero(make_mask(*robot.delta)).tolist()
    for name, is_same in (("adapt", own.adapt == robot.adapt), ("delta", same_delta)):
        if not is_same:
            raise ConfigError(
                f"the statistics of {checkpoint.directory} are of the robot {own.name!r}, with {name} = "
                f"{getattr(own, name)!r}; {robot.name!r} has {name} = {getattr(robot, name)!r}, so its numbers mean "
                "something else: describe the robot alike, or take the dataset's statistics (--data.norm-stats dataset)."
            )


def _own_robot(checkpoint: Checkpoint) -> Robot | None:
    described = checkpoint.description.get("robot")
    return None if described is None else Robot.from_dict(described)
