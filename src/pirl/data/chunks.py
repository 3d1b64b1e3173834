"""The chunk batch: what passes from data to learners, and how it is gathered from episodes.

A sample starts at a frame t of one episode: its observation, the actions from t on, the rewards of the next H steps, and
the observation H steps later. No chunk reaches into another episode.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Int8, Int64, UInt8

from pirl.data.policy_io import PolicyIO
from pirl.data.transforms import indicate
from pirl.errors import DataError
from pirl.models.observation import Observation
from pirl.models.types import Array


@runtime_checkable
class FrameReader(Protocol):
    """The images of one camera, by row."""

    def gather(self, rows: Int64[np.ndarray, " n"]) -> UInt8[np.ndarray, "n h w 3"]: ...


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
    success: Int8[np.ndarray, " episodes"]  # 1, 0, or -1 where it is not known
    prompts: Sequence[str]
    prompt_of_row: Int64[np.ndarray, " rows"]
    frames: Mapping[str, FrameReader] = field(default_factory=dict)
    human: Bool[np.ndarray, " rows"] | None = None  # whether a human chose the action; None: not recorded
    _returns: dict[float, Float32[np.ndarray, " rows"]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if np.any(self.ends <= self.starts) or np.any(self.starts[1:] < self.ends[:-1]):
            raise DataError("episodes must have frames, and must not overlap.")
        last = np.zeros(len(self.terminals), bool)
        last[self.ends - 1] = True
        rows = np.flatnonzero(self.terminals & ~last)
        if np.any(rows < self.ends[self.episode_of(rows)]):
            raise DataError("an episode goes on after a terminal: end it there.")

    def episode_of(self, rows: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        return np.searchsorted(self.starts, rows, side="right") - 1

    def returns(self, discount: float) -> Float32[np.ndarray, " rows"]:
        """The discounted sum of rewards from each row to the end of its episode: a lower bound on the optimal value.

        -inf where there is no such bound: time ran out, or it is not known how the episode ended. Computed once.
        """
        if discount not in self._returns:
            returns = np.full(len(self.rewards), -np.inf, np.float32)
            ends = self.ends[self.terminals[self.ends - 1] & (self.success >= 0)]
            starts = self.starts[self.episode_of(ends - 1)]
            later = np.zeros(len(ends))
            # Back from the ends, through all episodes at once.
            for step in range(1, int(np.max(ends - starts, initial=0)) + 1):
                kept = ends - step >= starts
                starts, ends, later = starts[kept], ends[kept], later[kept]
                later = self.rewards[ends - step] + discount * later
                returns[ends - step] = later
            self._returns[discount] = returns
        return self._returns[discount]

    def prompts_of(self, rows: Int64[np.ndarray, " n"]) -> list[str]:
        return [self.prompts[prompt] for prompt in self.prompt_of_row[rows].tolist()]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChunkBatch:
    """Samples for the learners. H is the horizon of the critic's chunk, L ≥ H that of the policy's.

    actions             a_t, a_{t+1}, …, normalized and padded to the model's width; the last real one repeated
    valid               whether the step exists (before the end of the episode)
    rewards             of the H steps; 0 past the end
    terminals           whether the step truly ended the task; never at a time-out
    masks               whether no terminal has been reached up to and including the step
    next_observations   H steps later, or the last frame of the episode; None for learners without a critic
    next_terminal       whether the chunk contains a terminal
    sequence_mask       whether the critic may use the sample: it ends in an observation or in a terminal
    success             whether the episode is known to have succeeded
    human               whether a human chose all the actions of the chunk, as in a correction
    indicated           tokens of the prompt with a negative and with a positive indicator, if the shape asks for them
    returns             discounted rewards from t to the end of the episode, if the shape asks for them; -inf where the
                        episode did not truly end, or its success is not known
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
    returns: Float[Array, " b"] | None = None


@dataclass(frozen=True)
class ChunkShape:
    """What a sample holds: `horizon` steps of reward, and `actions` steps of action (as many, if not given).

    `sees_next`: also the observation after the horizon, which costs as much to read as the present one.
    `indicated`: also the prompts with the advantage indicator.
    `discount`: also the discounted return to the end of the episode.
    """

    horizon: int
    actions: int | None = None
    sees_next: bool = True
    indicated: bool = False
    discount: float | None = None

    def __post_init__(self) -> None:
        if self.horizon < 1 or self.chunk < self.horizon:
            raise DataError(
                f"a chunk needs at least one step, and at least as many actions as rewards; got a horizon of "
                f"{self.horizon} and {self.actions} actions."
            )

    @property
    def chunk(self) -> int:
        return self.horizon if self.actions is None else self.actions


def gather_chunks(
    data: Trajectories, starts: Int64[np.ndarray, " b"], shape: ChunkShape, policy_io: PolicyIO
) -> ChunkBatch:
    """The batch of the chunks that start at these rows, in the model's units."""
    horizon, count = shape.horizon, len(starts)
    episodes = data.episode_of(starts)
    ends = data.ends[episodes]
    steps = starts[:, None] + np.arange(shape.chunk)
    valid = steps < ends[:, None]
    rows = np.minimum(steps, ends[:, None] - 1)
    terminals = data.terminals[rows[:, :horizon]] & valid[:, :horizon]
    next_terminal = terminals.any(axis=1)
    next_rows = np.minimum(starts + horizon, ends - 1)
    observed = np.concatenate([starts, next_rows]) if shape.sees_next else starts
    images = {slot: frames.gather(observed) for slot, frames in data.frames.items()}
    observations = policy_io.observation(images, data.states[observed], data.prompts_of(observed))
    indicated = None
    if shape.indicated:
        prompts = data.prompts_of(starts)
        both = [
            policy_io.prompt_tokens([indicate(prompt, positive) for prompt in prompts], data.states[starts])
            for positive in (False, True)
        ]
        indicated = tuple(np.stack(arrays, axis=1) for arrays in zip(*both, strict=True))
    arrays: dict[str, Any] = dict(
        observations=jax.tree.map(lambda x: x[:count], observations),
        actions=policy_io.actions(data.actions[rows], data.states[starts]),
        valid=valid,
        rewards=np.where(valid[:, :horizon], data.rewards[rows[:, :horizon]], np.float32(0)),
        terminals=terminals,
        masks=~np.logical_or.accumulate(terminals, axis=1),
        next_observations=jax.tree.map(lambda x: x[count:], observations) if shape.sees_next else None,
        next_terminal=next_terminal,
        sequence_mask=next_terminal | (starts + horizon < ends),
        success=data.success[episodes] == 1,
        # Past the end the last action is repeated, so a chunk is human if it is so up to there.
        human=np.zeros(count, bool) if data.human is None else data.human[rows].all(axis=1),
        indicated=indicated,
        returns=None if shape.discount is None else data.returns(shape.discount)[starts],
    )
    return ChunkBatch(**arrays)
