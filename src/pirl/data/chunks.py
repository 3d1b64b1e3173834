"""The chunk batch: what passes from data to learners, and how it is cut out of episodes.

A sample is an anchor frame t of one episode: its observation, the actions from t on, the rewards of the next H steps,
and the observation H steps later. No chunk reaches into another episode.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Int8, Int64, UInt8

from pirl.data.indicators import indicate
from pirl.data.policy_io import PolicyIO, Tokens
from pirl.errors import DataError
from pirl.models.observation import Observation
from pirl.models.types import Array


@runtime_checkable
class FrameReader(Protocol):
    """The pictures of one camera, by row."""

    def gather(self, rows: Int64[np.ndarray, " n"]) -> UInt8[np.ndarray, "n h w 3"]:
        """Some of them."""
        ...


@dataclass(frozen=True)
class Trajectories:
    """Episodes laid end to end, in the robot's own units. Episode e is the rows starts[e] … ends[e] - 1.

    The last row of an episode is a terminal if the task truly ended there, and no terminal if time ran out.
    """

    states: Float[np.ndarray, "rows state_dim"]
    actions: Float[np.ndarray, "rows action_dim"]
    rewards: Float32[np.ndarray, " rows"]
    terminals: Bool[np.ndarray, " rows"]
    starts: Int64[np.ndarray, " episodes"]
    ends: Int64[np.ndarray, " episodes"]
    success: Int8[np.ndarray, " episodes"]
    prompts: Sequence[str]
    prompt_of_row: Int64[np.ndarray, " rows"]
    frames: Mapping[str, FrameReader] = field(default_factory=dict)
    human: Bool[np.ndarray, " rows"] | None = None  # whether a human chose the action; None: nobody tells

    def __post_init__(self) -> None:
        if np.any(self.ends <= self.starts) or np.any(self.starts[1:] < self.ends[:-1]):
            raise DataError("episodes must have frames, and must not overlap.")
        last = np.zeros(len(self.terminals), bool)
        last[self.ends - 1] = True
        inside = np.zeros(len(self.terminals) + 1, np.int8)
        np.add.at(inside, self.starts, 1)
        np.add.at(inside, self.ends, -1)
        if np.any(self.terminals & ~last & (np.cumsum(inside)[:-1] > 0)):
            raise DataError("an episode goes on after a terminal: cut it there.")

    def episode_of(self, rows: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Which episode each row belongs to."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def prompts_of(self, rows: Int64[np.ndarray, " n"]) -> list[str]:
        """The prompt of each row."""
        return [self.prompts[prompt] for prompt in self.prompt_of_row[rows].tolist()]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChunkBatch:
    """Samples for the learners. H is the horizon of the critic's chunk, L ≥ H that of the policy's.

    actions             a_t, a_{t+1}, …, normalised and padded to the model's width; the last real one repeated
    valid               whether the step exists (before the end of the episode)
    rewards             of the H steps; 0 past the end
    terminals           whether the step truly ended the task; never at a time-out
    masks               whether no terminal has been reached up to and including the step
    next_observations   H steps later, or the last frame of the episode; none for learners that look no further
    next_terminal       whether the chunk contains a terminal
    sequence_mask       whether the critic may use the sample: it ends in an observation or in a terminal
    success             whether the episode is known to have succeeded
    human               whether a human chose all the actions of the chunk, as in a correction
    indicated           the prompts that say of the actions that they are bad, and good; if the shape asks for them
    """

    observations: Observation
    actions: Float[Array, "b chunk action_dim"]
    valid: Bool[Array, "b chunk"]
    rewards: Float[Array, "b horizon"]
    terminals: Bool[Array, "b horizon"]
    masks: Bool[Array, "b horizon"]
    next_observations: Observation | None
    next_terminal: Bool[Array, " b"]
    sequence_mask: Bool[Array, " b"]
    success: Bool[Array, " b"]
    human: Bool[Array, " b"] | None = None
    indicated: tuple[Int[Array, "b 2 tokens"], Bool[Array, "b 2 tokens"]] | None = None


@dataclass(frozen=True)
class ChunkShape:
    """How far a sample reaches: `horizon` steps of reward, and `actions` steps of action (as many, if not given).

    `sees_next`: whether it has the observation after those steps, which costs as much to read as the present one.
    `indicated`: whether it has the prompts with the advantage indicator.
    """

    horizon: int
    actions: int | None = None
    sees_next: bool = True
    indicated: bool = False

    def __post_init__(self) -> None:
        if self.horizon < 1 or self.chunk < self.horizon:
            raise DataError(
                f"a chunk needs at least one step, and at least as many actions as rewards; got a horizon of "
                f"{self.horizon} and {self.actions} actions."
            )

    @property
    def chunk(self) -> int:
        """Number of actions."""
        return self.horizon if self.actions is None else self.actions


def cut_chunks(
    trajectories: Trajectories, anchors: Int64[np.ndarray, " b"], shape: ChunkShape, policy_io: PolicyIO
) -> ChunkBatch:
    """The batch of the given anchor rows, in the model's units."""
    horizon = shape.horizon
    episodes = trajectories.episode_of(anchors)
    ends = trajectories.ends[episodes]
    steps = anchors[:, None] + np.arange(shape.chunk)
    valid = steps < ends[:, None]
    rows = np.minimum(steps, ends[:, None] - 1)
    rewards = np.where(valid[:, :horizon], trajectories.rewards[rows[:, :horizon]], np.float32(0))
    terminals = trajectories.terminals[rows[:, :horizon]] & valid[:, :horizon]
    masks = ~np.logical_or.accumulate(terminals, axis=1)
    next_terminal = terminals.any(axis=1)
    next_rows = np.minimum(anchors + horizon, ends - 1)
    # Both in one go, where there are two.
    seen = _observe(trajectories, np.concatenate([anchors, next_rows]) if shape.sees_next else anchors, policy_io)
    count = len(anchors)
    arrays: dict[str, Any] = dict(
        observations=jax.tree.map(lambda x: x[:count], seen),
        actions=policy_io.actions(trajectories.actions[rows], trajectories.states[anchors]),
        valid=valid,
        rewards=rewards,
        terminals=terminals,
        masks=masks,
        next_observations=jax.tree.map(lambda x: x[count:], seen) if shape.sees_next else None,
        next_terminal=next_terminal,
        sequence_mask=next_terminal | (anchors + horizon < ends),
        success=trajectories.success[episodes] == 1,
        # Past the end the last action is repeated, so what is human up to there is human.
        human=np.zeros(count, bool) if trajectories.human is None else trajectories.human[rows].all(axis=1),
        indicated=_indicated(trajectories, anchors, policy_io) if shape.indicated else None,
    )
    return ChunkBatch(**arrays)


def _observe(trajectories: Trajectories, rows: Int64[np.ndarray, " b"], policy_io: PolicyIO) -> Observation:
    """The observations of some rows, prepared for the model."""
    images = {slot: frames.gather(rows) for slot, frames in trajectories.frames.items()}
    return policy_io.observation(images, trajectories.states[rows], trajectories.prompts_of(rows))


def _indicated(trajectories: Trajectories, rows: Int64[np.ndarray, " b"], policy_io: PolicyIO) -> Tokens:
    """The prompts of some rows under both indicators: negative, positive."""
    both = [
        policy_io.prompt_tokens([indicate(p, good) for p in trajectories.prompts_of(rows)], trajectories.states[rows])
        for good in (False, True)
    ]
    return tuple(np.stack(arrays, axis=1) for arrays in zip(*both, strict=True))  # type: ignore[return-value]
