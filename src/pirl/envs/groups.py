"""RIPT's rollouts: several attempts at each context, and a curriculum of the contexts to try next."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64

from pirl.envs.base import FIRST_SEED, SEEDS, SEEDS_APART, TASKS_APART, EnvDescription, EnvObservation, Policy, Start
from pirl.envs.pool import EnvPool
from pirl.envs.registry import CurriculumConfig
from pirl.envs.rollout import Rollout, roll_out
from pirl.errors import CheckpointError, ConfigError, EnvError

# The attempt is added to the seed of the noise, above the bits of the seed (see rollout.py).
_MAX_ATTEMPTS = 1 << 15
# The same initial state on another machine may be rounded otherwise; another initial state is further away.
_SAME_STATE = 1e-4


@dataclass(frozen=True)
class Context:
    """An initial state: a task, and the seed of everything in it that is random but the policy."""

    task: str
    seed: int


@dataclass(frozen=True)
class Group:
    """The finished attempts at one context, in their order, and why the others were lost."""

    context: Context
    attempts: tuple[Rollout, ...]
    lost: tuple[str, ...] = ()

    @property
    def successes(self) -> int:
        return sum(rollout.success for rollout in self.attempts)

    @property
    def success_rate(self) -> float | None:
        return self.successes / len(self.attempts) if self.attempts else None

    @property
    def is_uniform(self) -> bool:
        """Whether all attempts ended alike, so that there is nothing to learn from their difference."""
        return self.successes in (0, len(self.attempts))


@dataclass(frozen=True)
class GroupedRollouts:
    """All contexts that were tried, in the order in which they were drawn.

    `kept` are the groups with successes and failures; `dropped` are the others, without images. The steps of lost
    attempts count too. `policy_seconds` is the time of `inferences` by the policy, while others were stepping.
    """

    kept: tuple[Group, ...]
    dropped: tuple[Group, ...]
    env_steps: int
    seconds: float
    policy_seconds: float
    inferences: int

    @property
    def tried(self) -> int:
        return len(self.kept) + len(self.dropped)

    @property
    def attempts(self) -> int:
        return sum(len(group.attempts) for group in self.kept + self.dropped)

    @property
    def successes(self) -> int:
        return sum(group.successes for group in self.kept + self.dropped)

    @property
    def lost(self) -> tuple[str, ...]:
        return tuple(reason for group in self.kept + self.dropped for reason in group.lost)


def roll_out_groups(
    pool: EnvPool,
    policy: Policy,
    contexts: Iterator[Context],
    *,
    attempts: int,
    groups: int,
    budget: int,
    execute_steps: int,
    on_rollout: Callable[[Rollout], None] | None = None,
) -> GroupedRollouts:
    """Try contexts, each so many times, until so many groups have both outcomes or `budget` contexts were tried.

    No more groups are kept or under way than wanted. So nothing is rolled out in vain, and whatever the size of the pool
    and the timing, the result is that of trying one context after the other. A lost attempt is counted, and its group
    goes on with the others. `on_rollout` gets every finished attempt with its images, also of groups that are dropped.
    An `EnvError` says when no step ever succeeds, or when attempts at one context begin in different states.
    """
    if not 2 <= attempts <= _MAX_ATTEMPTS:
        raise ConfigError(f"attempts = {attempts} should be at least 2, to be compared, and at most {_MAX_ATTEMPTS}.")
    if groups < 1 or budget < 1:
        raise ConfigError(f"groups = {groups} and budget = {budget} should be at least 1.")
    begun = time.monotonic()
    timed = _TimedPolicy(policy)
    grouping = _Grouping(contexts, attempts, groups, budget, pool.description.robot.state)
    # One bad context loses all its attempts, and something from outside may take all workers at once.
    patience = max(3 * attempts, 2 * pool.size)
    for rollout in roll_out(pool, timed, grouping, execute_steps=execute_steps, keep_images=True, patience=patience):
        if rollout.lost is None and on_rollout is not None:
            on_rollout(rollout)
        grouping.add(rollout)
    return GroupedRollouts(
        kept=grouping.closed(uniform=False),
        dropped=grouping.closed(uniform=True),
        env_steps=grouping.env_steps,
        seconds=time.monotonic() - begun,
        policy_seconds=timed.seconds,
        inferences=timed.inferences,
    )


class _Grouping:
    """The starts of `roll_out`, which depend on the rollouts that were added before."""

    def __init__(
        self, contexts: Iterator[Context], attempts: int, groups: int, budget: int, columns: Sequence[str]
    ) -> None:
        self._contexts, self._attempts, self._groups, self._budget = contexts, attempts, groups, budget
        self._columns = columns
        self.env_steps = 0
        # By the number of their context: rollouts under way and complete groups.
        self._open: dict[int, dict[int, Rollout]] = {}
        self._closed: dict[int, Group] = {}
        # Attempts that wait for a slot, and those that were started, by the index of their rollout.
        self._waiting: deque[tuple[int, Context, int]] = deque()
        self._started: list[tuple[int, Context, int]] = []

    def __iter__(self) -> Iterator[Start | None]:
        return self

    def __next__(self) -> Start | None:
        if not self._waiting:
            self._open_group()
        if not self._waiting:
            return None
        self._started.append(self._waiting.popleft())
        _, context, attempt = self._started[-1]
        return Start(context.task, context.seed, attempt)

    def _open_group(self) -> None:
        number, kept = len(self._open) + len(self._closed), len(self.closed(uniform=False))
        if number == self._budget or kept + len(self._open) == self._groups:
            return
        if (context := next(self._contexts, None)) is not None:
            self._open[number] = {}
            self._waiting.extend((number, context, attempt) for attempt in range(self._attempts))

    def add(self, rollout: Rollout) -> None:
        number, context, attempt = self._started[rollout.index]
        self.env_steps += len(rollout)
        rollouts = self._open[number]
        rollouts[attempt] = rollout
        finished = [each for _, each in sorted(rollouts.items()) if each.lost is None]
        if rollout.lost is None:
            _check_same_beginning(finished[0], rollout, self._columns)
        if len(rollouts) < self._attempts:
            return
        lost = tuple(each.lost for _, each in sorted(rollouts.items()) if each.lost is not None)
        group = Group(context, tuple(finished), lost)
        if group.is_uniform:
            group = replace(group, attempts=tuple(self._without_images(each) for each in finished))
        self._closed[number] = group
        del self._open[number]

    def closed(self, *, uniform: bool) -> tuple[Group, ...]:
        return tuple(group for _, group in sorted(self._closed.items()) if group.is_uniform == uniform)

    def _without_images(self, rollout: Rollout) -> Rollout:
        return replace(rollout, observations={name: rollout.observations[name] for name in self._columns})


def _check_same_beginning(one: Rollout, other: Rollout, columns: Sequence[str]) -> None:
    for column in columns:
        first, second = one.observations[column][0], other.observations[column][0]
        if not np.allclose(first, second, rtol=_SAME_STATE, atol=_SAME_STATE):
            raise EnvError(
                f"two attempts at {one.start.task!r} from seed {one.start.seed} began in different states "
                f"({column!r} was {first} and {second}): the environment does not begin alike for the same seed, "
                "so its attempts cannot be compared."
            )


class _TimedPolicy:
    def __init__(self, policy: Policy) -> None:
        self.horizon, self._policy = policy.horizon, policy
        self.seconds, self.inferences = 0.0, 0

    def infer(
        self, observations: EnvObservation, prompts: Sequence[str], seeds: Sequence[int], steps: Sequence[int]
    ) -> Float32[np.ndarray, "n horizon action_dim"]:
        begun = time.perf_counter()
        chunks = self._policy.infer(observations, prompts, seeds, steps)
        self.seconds += time.perf_counter() - begun
        self.inferences += 1
        return chunks


# --- the curriculum ---------------------------------------------------------------------------------------------------


class Curriculum:
    """Draws contexts by the policy's success rate in them; one that was never tried counts as being at the target."""

    def __init__(self, config: CurriculumConfig, description: EnvDescription, seed: int) -> None:
        self._config, self._tasks, self._seed = config, description.tasks, seed
        # Running success rates by task and initial state, NaN where nothing was tried. If every context is new, a task
        # has one.
        self._rates = np.full((len(self._tasks), config.initial_states or 1), np.nan)

    def contexts(self, iteration: int) -> Iterator[Context]:
        """Contexts without end, none twice before all have been drawn.

        They depend on the seed, the iteration and what has been recorded by now; what is recorded later counts in the
        next iteration.
        """
        rng, config = np.random.default_rng([self._seed, iteration]), self._config
        distances = np.where(np.isnan(self._rates), 0.0, self._rates - config.success_rate_target)
        weights = config.floor + (1 - config.floor) * np.exp(-config.sharpness * np.square(distances))
        return (self._new_contexts if config.initial_states is None else self._known_contexts)(rng, weights)

    def record(self, context: Context, success_rate: float | None) -> None:
        """Update the running rate of a context; None, if no attempt was finished, counts as failure."""
        task, memory = self._tasks.index(context.task), self._config.memory
        number = 0 if self._config.initial_states is None else context.seed - self._seed_of(task, 0)
        old = self._rates[task, number]
        old = self._config.success_rate_target if np.isnan(old) else old
        self._rates[task, number] = memory * old + (1 - memory) * (success_rate or 0.0)

    def state(self) -> dict[str, Any]:
        """The recorded rates, for JSON; `restore` continues from them exactly."""
        rows = zip(self._tasks, self._rates.tolist(), strict=True)
        return {task: [None if math.isnan(rate) else rate for rate in row] for task, row in rows}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; rates of initial states beyond the configured number are dropped."""
        states = self._rates.shape[1]
        try:
            read = np.array([state[task][:states] for task in self._tasks], float)  # None becomes NaN
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the curriculum's state is damaged, or belongs to other tasks: {error!r}") from error
        if np.any((read < 0) | (read > 1)):
            raise CheckpointError("the curriculum's state is damaged: it holds rates that are not between 0 and 1.")
        self._rates[:] = np.nan
        self._rates[:, : read.shape[1]] = read

    def summary(self) -> dict[str, float]:
        """Shares of the contexts that were tried, that fail and that succeed; and the mean of the running rates."""
        tried = self._rates[~np.isnan(self._rates)].tolist()
        return {
            "tried": len(tried) / self._rates.size,
            "success_rate": fmean(tried) if tried else self._config.success_rate_target,
            "hopeless": sum(rate < 0.1 for rate in tried) / self._rates.size,
            "solved": sum(rate > 0.9 for rate in tried) / self._rates.size,
        }

    def _known_contexts(
        self, rng: np.random.Generator, weights: Float64[np.ndarray, "tasks states"]
    ) -> Iterator[Context]:
        while True:
            # Log weights with Gumbel noise, in falling order, are draws by weight without replacement.
            keys = np.log(weights) + rng.gumbel(size=weights.shape)
            for index in np.argsort(-keys, axis=None).tolist():
                task, number = divmod(index, weights.shape[1])
                yield Context(self._tasks[task], self._seed_of(task, number))

    def _new_contexts(self, rng: np.random.Generator, weights: Float64[np.ndarray, "tasks 1"]) -> Iterator[Context]:
        probabilities = weights[:, 0] / weights.sum()
        drawn: set[int] = set()
        while True:
            task, seed = rng.choice(len(self._tasks), p=probabilities), FIRST_SEED + int(rng.integers(SEEDS))
            if seed not in drawn:
                drawn.add(seed)
                yield Context(self._tasks[task], seed)

    def _seed_of(self, task: int, number: int) -> int:
        return FIRST_SEED + (self._seed * SEEDS_APART + task * TASKS_APART + number) % SEEDS
