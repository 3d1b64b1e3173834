"""How often a policy succeeds, with what can be believed of it; and whether one is better than another."""

import functools
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from statistics import fmean
from typing import Any

from pirl.envs.base import Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.intervals import SIGNIFICANT, Pairs, mcnemar, paired_difference, probability, wilson
from pirl.envs.planner import Planner
from pirl.envs.pools import EnvPool
from pirl.envs.rollouts import Rollout, roll_out
from pirl.envs.video import Film
from pirl.errors import DataError

# What may change the outcome of an episode or of training, where it is installed.
_PACKAGES = (
    *("pirl", "jax", "numpy", "flax", "optax", "orbax-checkpoint"),
    *("gymnasium", "mujoco", "gym-aloha", "hf-libero", "metaworld"),
)


@dataclass(frozen=True)
class EpisodeResult:
    """How one episode went. `lost`: why it could not be finished (a crash, a hang, NaN)."""

    index: int
    task: str
    prompt: str
    seed: int
    success: bool
    episode_return: float
    length: int
    terminated: bool
    truncated: bool
    lost: str | None

    @classmethod
    def of(cls, rollout: Rollout, index: int | None = None) -> "EpisodeResult":
        """The result of a rollout, under its own index or another."""
        return cls(
            index=rollout.index if index is None else index,
            task=rollout.task,
            prompt=rollout.prompt,
            seed=rollout.start.seed,
            success=rollout.success and rollout.lost is None,
            episode_return=float(rollout.rewards.sum(dtype="float64")),
            length=len(rollout.rewards),
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            lost=rollout.lost,
        )


@dataclass(frozen=True)
class Summary:
    """What the episodes of one task, or all of them, come to.

    Lost ones are in no mean, and in one rate only: the policy may have had its part in losing them.
    """

    episodes: int
    finished: int
    lost: int
    successes: int
    rate: float | None
    rate_if_lost_failed: float
    interval: tuple[float, float]
    mean_return: float | None
    mean_length: float | None
    mean_length_of_successes: float | None

    @classmethod
    def of(cls, results: Sequence[EpisodeResult]) -> "Summary":
        """Sum up results."""
        finished = [result for result in results if result.lost is None]
        successes = [result for result in finished if result.success]
        return cls(
            episodes=len(results),
            finished=len(finished),
            lost=len(results) - len(finished),
            successes=len(successes),
            rate=len(successes) / len(finished) if finished else None,
            rate_if_lost_failed=len(successes) / max(1, len(results)),
            interval=wilson(len(successes), len(finished)),
            mean_return=_mean(result.episode_return for result in finished),
            mean_length=_mean(result.length for result in finished),
            mean_length_of_successes=_mean(result.length for result in successes),
        )

    def __str__(self) -> str:
        if self.rate is None:
            return f"no episode was finished, {self.lost} lost"
        lost = f", {self.lost} lost ({100 * self.rate_if_lost_failed:.1f} % if these failed)" if self.lost else ""
        low, high = self.interval
        return (
            f"success {100 * self.rate:.1f} % [{100 * low:.1f}, {100 * high:.1f}], "
            f"{self.successes} of {self.finished}{lost}"
        )


@dataclass(frozen=True)
class Evaluation:
    """The result of every episode, in the order of their starts, and all it takes to get them again."""

    results: tuple[EpisodeResult, ...]
    settings: Mapping[str, Any]
    seconds: float = 0.0
    films: Mapping[int, Film] = field(default_factory=dict, repr=False, compare=False)  # by index

    def summary(self) -> Summary:
        """All episodes together."""
        return Summary.of(self.results)

    def by_task(self) -> dict[str, Summary]:
        """The episodes of each task, in the order in which the tasks first appear."""
        tasks = dict.fromkeys(result.task for result in self.results)
        return {task: Summary.of([result for result in self.results if result.task == task]) for task in tasks}

    def to_json(self) -> dict[str, Any]:
        """Everything; the same settings give the same again, but for `seconds`."""
        return {
            "settings": dict(self.settings),
            "versions": versions(),
            "summary": asdict(self.summary()),
            "tasks": {task: asdict(summary) for task, summary in self.by_task().items()},
            "episodes": [asdict(result) for result in self.results],
            "seconds": round(self.seconds, 3),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Evaluation":
        """What `to_json` gave; a KeyError or a TypeError if it is something else."""
        results = tuple(EpisodeResult(**episode) for episode in content["episodes"])
        return cls(results, content["settings"], content["seconds"])


def evaluate(
    pool: EnvPool,
    actor: Planner | ExpertConfig,
    starts: Sequence[Start],
    *,
    execute_steps: int,
    settings: Mapping[str, Any] | None = None,
    films: int = 0,
    on_episode: Callable[[EpisodeResult], None] | None = None,
) -> Evaluation:
    """Let a policy, or the scripted expert, act from every start; keep the pictures of the first `films` episodes."""
    camera = next(iter(pool.description.robot.cameras.values()), None)
    begun = time.monotonic()
    results: dict[int, EpisodeResult] = {}
    kept: dict[int, Film] = {}
    for rollout in roll_out(pool, actor, starts, execute_steps=execute_steps, keep_images=range(films)):
        result = results[rollout.index] = EpisodeResult.of(rollout)
        if camera is not None and camera in rollout.observations and result.length:
            kept[rollout.index] = Film(rollout.observations[camera], result.success if result.lost is None else None)
        if on_episode is not None:
            on_episode(result)
    return Evaluation(
        results=tuple(results[index] for index in sorted(results)),
        settings=settings or {},
        seconds=time.monotonic() - begun,
        films={index: kept[index] for index in sorted(kept)},
    )


@dataclass(frozen=True)
class Comparison:
    """Two policies on the same starts. Starts that either of them did not finish are left out, and counted."""

    pairs: Pairs
    left_out: int
    difference: float
    interval: tuple[float, float]
    p_value: float

    def in_words(self, first: str, second: str) -> str:
        """What follows from it, for a person."""
        if not self.pairs.n:
            return f"{first} and {second} finished no episode from the same start: there is nothing to compare."
        low, high = self.interval
        facts = (
            f"{100 * self.difference:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}] on {self.pairs.n} paired "
            f"episodes, p {probability(self.p_value)} (exact McNemar test)"
        )
        if self.p_value >= SIGNIFICANT:
            return f"No difference between {first} and {second} can be told: {facts}."
        return f"{second} is {'better' if self.difference > 0 else 'worse'} than {first}: {facts}."

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


def compare(first: Evaluation, second: Evaluation) -> Comparison:
    """Pair the episodes of two evaluations by task and seed; the difference is the second's rate less the first's."""
    one, other = _by_start(first), _by_start(second)
    shared = [(one[key], other[key]) for key in one if key in other]
    finished = [(a.success, b.success) for a, b in shared if a.lost is None and b.lost is None]
    pairs = Pairs(
        both=finished.count((True, True)),
        only_first=finished.count((True, False)),
        only_second=finished.count((False, True)),
        neither=finished.count((False, False)),
    )
    return Comparison(
        pairs=pairs,
        left_out=len(one.keys() | other.keys()) - pairs.n,
        difference=pairs.difference,
        interval=paired_difference(pairs),
        p_value=mcnemar(pairs),
    )


@functools.cache
def versions() -> dict[str, str]:
    """Of what decides how an episode or a training run goes, where it is installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _by_start(evaluation: Evaluation) -> dict[tuple[str, int], EpisodeResult]:
    results = {(result.task, result.seed): result for result in evaluation.results}
    if len(results) < len(evaluation.results):
        raise DataError(
            "an evaluation has two episodes of the same task and seed: they cannot be paired with another's."
        )
    return results


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return fmean(listed) if listed else None
