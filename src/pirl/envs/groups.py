"""Several attempts from each of many beginnings: the groups whose outcomes differ, found within a budget."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float32

from pirl.envs.base import EnvObservation, Start
from pirl.envs.planner import Planner
from pirl.envs.pools import EnvPool
from pirl.envs.rollouts import Rollout, roll_out
from pirl.errors import ConfigError, EnvError

# What an attempt adds to the seed of the noise has to fit beside the seed (see `Start.acting_seed`).
_MOST_ATTEMPTS = 1 << 15
# The same beginning on another machine may be rounded otherwise; another beginning is further away.
_SAME_STATE = 1e-4


@dataclass(frozen=True)
class Context:
    """A beginning: a task, and the seed of everything in it that is random but the policy."""

    task: str
    seed: int


@dataclass(frozen=True)
class Group:
    """The attempts from one context that were finished, in their order, and why the others were lost."""

    context: Context
    attempts: tuple[Rollout, ...]
    lost: tuple[str, ...] = ()

    @property
    def successes(self) -> int:
        """How many attempts succeeded."""
        return sum(rollout.success for rollout in self.attempts)

    @property
    def success_rate(self) -> float | None:
        """The share of attempts that succeeded; None if none was finished."""
        return self.successes / len(self.attempts) if self.attempts else None

    @property
    def is_uniform(self) -> bool:
        """Whether all ended alike, so that nothing can be learned from how they differ."""
        return self.successes in (0, len(self.attempts))


@dataclass(frozen=True)
class GroupedRollouts:
    """What became of all contexts that were tried, in the order in which they were drawn.

    `kept` are the groups with successes and failures. `dropped` are the others; their pictures are not kept. Steps of
    lost attempts count too. `policy_seconds` is the time that `plans` inferences took, while others were stepping.
    """

    wanted: int
    kept: tuple[Group, ...]
    dropped: tuple[Group, ...]
    env_steps: int
    seconds: float
    policy_seconds: float
    plans: int

    @property
    def tried(self) -> int:
        """How many contexts were tried."""
        return len(self.kept) + len(self.dropped)

    @property
    def is_short(self) -> bool:
        """Whether the budget was spent before there were as many groups as wanted."""
        return len(self.kept) < self.wanted

    @property
    def attempts(self) -> int:
        """Attempts that were finished, in all groups."""
        return sum(len(group.attempts) for group in self.kept + self.dropped)

    @property
    def successes(self) -> int:
        """Attempts that succeeded, in all groups."""
        return sum(group.successes for group in self.kept + self.dropped)

    @property
    def lost(self) -> tuple[str, ...]:
        """Why attempts were lost, one reason for each of them."""
        return tuple(reason for group in self.kept + self.dropped for reason in group.lost)


def roll_out_groups(
    pool: EnvPool,
    planner: Planner,
    contexts: Iterator[Context],
    *,
    attempts: int,
    groups: int,
    budget: int,
    execute_steps: int,
    keep_images: bool = True,
    on_rollout: Callable[[Rollout], None] | None = None,
) -> GroupedRollouts:
    """Roll out contexts, each so many times, until so many groups have both outcomes or `budget` contexts were tried.

    Never are more groups kept or under way than wanted. So nothing is rolled out in vain, and whatever the size of the
    pool and the timing, the result is that of trying one context after the other. An attempt that is lost is counted,
    and its group goes on with the others. `on_rollout` gets every finished attempt with its pictures, also of groups
    that are dropped. Where not a single step succeeds, and where attempts from one context begin in different states,
    an `EnvError` says so.
    """
    if not 2 <= attempts <= _MOST_ATTEMPTS:
        raise ConfigError(f"attempts = {attempts} should be at least 2, to be compared, and at most {_MOST_ATTEMPTS}.")
    if groups < 1 or budget < 1:
        raise ConfigError(f"groups = {groups} and budget = {budget} should be at least 1.")
    begun = time.monotonic()
    timed = _TimedPlanner(planner)
    grouping = _Grouping(contexts, attempts, groups, budget)
    # One bad context loses all its attempts, and something from outside may take all workers at once.
    patience = max(3 * attempts, 2 * pool.size)
    for rollout in roll_out(
        pool, timed, grouping, execute_steps=execute_steps, keep_images=keep_images, patience=patience
    ):
        if rollout.lost is None and on_rollout is not None:
            on_rollout(rollout)
        grouping.take(rollout, pool.description.robot.state)
    return GroupedRollouts(
        wanted=groups,
        kept=tuple(group for _, group in sorted(grouping.kept.items())),
        dropped=tuple(group for _, group in sorted(grouping.dropped.items())),
        env_steps=grouping.env_steps,
        seconds=time.monotonic() - begun,
        policy_seconds=timed.seconds,
        plans=timed.plans,
    )


@dataclass
class _Growing:
    """A group under way: what has come of its attempts so far, by their number."""

    number: int
    context: Context
    finished: dict[int, Rollout] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)

    def group(self) -> Group:
        return Group(
            self.context,
            tuple(rollout for _, rollout in sorted(self.finished.items())),
            tuple(reason for _, reason in sorted(self.lost.items())),
        )


class _Grouping:
    """The starts of `roll_out`, and where its rollouts go; what is started next depends on what came of the last."""

    def __init__(self, contexts: Iterator[Context], attempts: int, groups: int, budget: int) -> None:
        self._contexts, self._attempts, self._groups, self._budget = contexts, attempts, groups, budget
        self._drawn = 0
        # Attempts that wait for a slot, and by the index of their rollout those that have, or had, one.
        self._waiting: deque[tuple[_Growing, int]] = deque()
        self._started: list[tuple[_Growing, int]] = []
        self._growing = 0
        self.kept: dict[int, Group] = {}
        self.dropped: dict[int, Group] = {}
        self.env_steps = 0

    def __iter__(self) -> Iterator[Start | None]:
        return self

    def __next__(self) -> Start | None:
        if not self._waiting:
            self._open_group()
        if not self._waiting:
            return None
        growing, attempt = self._waiting.popleft()
        self._started.append((growing, attempt))
        return Start(growing.context.task, growing.context.seed, attempt=attempt)

    def _open_group(self) -> None:
        if self._drawn == self._budget or len(self.kept) + self._growing == self._groups:
            return
        if (context := next(self._contexts, None)) is None:
            return
        growing = _Growing(self._drawn, context)
        self._waiting.extend((growing, attempt) for attempt in range(self._attempts))
        self._drawn += 1
        self._growing += 1

    def take(self, rollout: Rollout, columns: Sequence[str]) -> None:
        """Put a rollout into its group, which may be complete with it."""
        growing, attempt = self._started[rollout.index]
        self.env_steps += len(rollout)
        if rollout.lost is not None:
            growing.lost[attempt] = rollout.lost
        else:
            _check_beginning(next(iter(growing.finished.values()), rollout), rollout, columns)
            growing.finished[attempt] = rollout
        if len(growing.finished) + len(growing.lost) < self._attempts:
            return
        self._growing -= 1
        group = growing.group()
        if group.is_uniform:
            bare = tuple(_without_pictures(rollout, columns) for rollout in group.attempts)
            self.dropped[growing.number] = replace(group, attempts=bare)
            growing.finished.clear()
        else:
            self.kept[growing.number] = group


def _check_beginning(one: Rollout, other: Rollout, columns: Sequence[str]) -> None:
    for column in columns:
        first, second = one.observations[column][0], other.observations[column][0]
        if not np.allclose(first, second, rtol=_SAME_STATE, atol=_SAME_STATE):
            raise EnvError(
                f"two attempts at {one.start.task!r} from seed {one.start.seed} began in different states "
                f"({column!r} was {first} and {second}): the environment does not begin alike for the same seed, "
                "so its attempts cannot be compared."
            )


def _without_pictures(rollout: Rollout, columns: Sequence[str]) -> Rollout:
    return replace(rollout, observations={column: rollout.observations[column] for column in columns})


class _TimedPlanner:
    """A planner, and how long it took."""

    def __init__(self, planner: Planner) -> None:
        self.horizon = planner.horizon
        self.seconds, self.plans = 0.0, 0
        self._planner = planner

    def plan(
        self, observations: EnvObservation, prompts: Sequence[str], seeds: Sequence[int], steps: Sequence[int]
    ) -> Float32[np.ndarray, "n horizon action_dim"]:
        begun = time.perf_counter()
        chunks = self._planner.plan(observations, prompts, seeds, steps)
        self.seconds += time.perf_counter() - begun
        self.plans += 1
        return chunks
