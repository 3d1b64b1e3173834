"""Which beginnings are worth attempting next: mostly those that the policy sometimes masters and sometimes does not."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from jaxtyping import Float64

from pirl.envs.base import EnvDescription
from pirl.envs.groups import Context
from pirl.envs.seeds import FIRST_SEED, SEEDS, SEEDS_APART, TASKS_APART
from pirl.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class CurriculumConfig:
    """How contexts are chosen. The defaults suit about eight attempts at each."""

    initial_states: int | None = None
    """Number of initial states per task to learn from, each with its own success rate. By default every group of
    attempts has a new initial state, and success rates are kept per task."""
    success_rate_target: float = 0.5
    """Contexts whose success rate is near this value are drawn most often."""
    sharpness: float = 16.0
    """How quickly the probability falls with the distance from the target; 0 draws all contexts equally often."""
    floor: float = 0.05
    """Relative probability of contexts far from the target (1 at the target)."""
    memory: float = 0.5
    """Decay of the running success rates: the weight of the old value when a new one is recorded."""

    def __post_init__(self) -> None:
        if self.initial_states is not None and not 1 <= self.initial_states <= TASKS_APART:
            raise ConfigError(
                f"curriculum.initial_states = {self.initial_states} should be between 1 and {TASKS_APART}, or left out."
            )
        if not 0 < self.success_rate_target < 1:
            raise ConfigError(
                f"curriculum.success_rate_target = {self.success_rate_target} should be between 0 and 1: where all "
                "attempts end alike there is nothing to learn."
            )
        if not 0 <= self.sharpness < math.inf:
            raise ConfigError(f"curriculum.sharpness = {self.sharpness} should be 0 or more.")
        if not 0 < self.floor <= 1:
            raise ConfigError(
                f"curriculum.floor = {self.floor} should be more than 0, so that nothing is given up for ever, and at "
                "most 1."
            )
        if not 0 <= self.memory < 1:
            raise ConfigError(f"curriculum.memory = {self.memory} should be at least 0 and less than 1.")


class Curriculum:
    """Draws contexts by how well the policy did in them; what was never tried counts as being at the target."""

    def __init__(self, config: CurriculumConfig, description: EnvDescription, seed: int) -> None:
        if seed < 0:
            raise ConfigError(f"the seed of a curriculum is {seed}; it should be 0 or more.")
        self._config, self._tasks, self._seed = config, description.tasks, seed
        # Running success rates by task, and in them by the number of the initial state; it is 0 if all are new.
        self._rates: dict[str, dict[int, float]] = {task: {} for task in self._tasks}

    def contexts(self, iteration: int) -> Iterator[Context]:
        """Contexts without end, none twice before all have been drawn.

        They depend on the seed, the iteration and what has been recorded by now; what is recorded later counts in the
        next iteration.
        """
        rng = np.random.default_rng([self._seed, iteration])
        return self._new_ones(rng, self._weights()) if self._are_new else self._known_ones(rng, self._weights())

    def record(self, context: Context, success_rate: float | None) -> None:
        """Remember how attempts from a context went; None, if none of them was finished, counts as failure."""
        number = 0 if self._are_new else self._number(context)
        if context.task not in self._rates or not 0 <= number < self._states:
            raise ValueError(f"{context} is no context of this curriculum.")
        if not 0.0 <= (new := success_rate or 0.0) <= 1.0:
            raise ValueError(f"a success rate of {success_rate} is not between 0 and 1.")
        rates, memory = self._rates[context.task], self._config.memory
        rates[number] = memory * rates.get(number, self._config.success_rate_target) + (1 - memory) * new

    def state(self) -> dict[str, Any]:
        """What has been recorded, for JSON; `restore` continues from it exactly."""
        return {task: {str(number): rate for number, rate in rates.items()} for task, rates in self._rates.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Initial states that are no longer asked for are forgotten."""
        try:
            read = {task: {int(number): float(rate) for number, rate in state[task].items()} for task in self._tasks}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the curriculum's state is damaged, or belongs to other tasks: {error!r}") from error
        if any(number < 0 or not 0 <= rate <= 1 for rates in read.values() for number, rate in rates.items()):
            raise CheckpointError("the curriculum's state is damaged: it holds rates that are not between 0 and 1.")
        self._rates = {
            task: {number: rate for number, rate in rates.items() if number < self._states}
            for task, rates in read.items()
        }

    def summary(self) -> dict[str, float]:
        """Shares of the contexts that were tried, that fail and that succeed; and the mean of the running rates."""
        rates = [rate for by_number in self._rates.values() for rate in by_number.values()]
        count = len(self._tasks) * self._states
        return {
            "tried": len(rates) / count,
            "success_rate": fmean(rates) if rates else self._config.success_rate_target,
            "hopeless": sum(rate < 0.1 for rate in rates) / count,
            "solved": sum(rate > 0.9 for rate in rates) / count,
        }

    @property
    def _are_new(self) -> bool:
        return self._config.initial_states is None

    @property
    def _states(self) -> int:
        return self._config.initial_states or 1

    def _weights(self) -> Float64[np.ndarray, "tasks states"]:
        """How often each context is drawn, relative to one at the target."""
        target, floor = self._config.success_rate_target, self._config.floor
        rates = np.full((len(self._tasks), self._states), target)
        for row, task in enumerate(self._tasks):
            for number, rate in self._rates[task].items():
                rates[row, number] = rate
        return floor + (1 - floor) * np.exp(-self._config.sharpness * np.square(rates - target))

    def _known_ones(self, rng: np.random.Generator, weights: Float64[np.ndarray, "tasks states"]) -> Iterator[Context]:
        while True:
            # The largest of log weights with Gumbel noise is a draw by weight; the others in order are the next draws
            # without putting back.
            keys = np.log(weights) + rng.gumbel(size=weights.shape)
            for place in np.argsort(-keys, axis=None).tolist():
                task, number = divmod(place, self._states)
                yield Context(self._tasks[task], self._seed_of(task, number))

    def _new_ones(self, rng: np.random.Generator, weights: Float64[np.ndarray, "tasks 1"]) -> Iterator[Context]:
        probabilities = weights[:, 0] / weights.sum()
        drawn: set[int] = set()
        while True:
            task, seed = rng.choice(len(self._tasks), p=probabilities), FIRST_SEED + int(rng.integers(SEEDS))
            if seed not in drawn:
                drawn.add(seed)
                yield Context(self._tasks[task], seed)

    def _seed_of(self, task: int, number: int) -> int:
        return FIRST_SEED + (self._seed * SEEDS_APART + task * TASKS_APART + number) % SEEDS

    def _number(self, context: Context) -> int:
        """Which initial state of its task it is."""
        if context.task not in self._tasks:
            return -1
        return context.seed - self._seed_of(self._tasks.index(context.task), 0)
