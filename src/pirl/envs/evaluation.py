"""Success rates of policies with their confidence intervals, and paired comparisons of two policies."""

import contextlib
import functools
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from pirl.envs.base import Policy, RobotEnv, Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.pool import EnvPool, EnvRunner, LocalPool
from pirl.envs.rollout import Rollout, roll_out
from pirl.envs.video import Video
from pirl.errors import ConfigError, DataError, EnvError
from pirl.text import SIGNIFICANT, format_p_value

# Packages that may change the outcome of an episode or of training.
_PACKAGES = (
    *("pirl", "jax", "numpy", "flax", "optax", "orbax-checkpoint"),
    *("gymnasium", "mujoco", "gym-aloha", "hf-libero", "metaworld"),
)


@dataclass(frozen=True)
class EpisodeResult:
    """One episode. `lost`: why it could not be finished (a crash, a hang, NaN)."""

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
        return cls(
            index=rollout.index if index is None else index,
            task=rollout.task,
            prompt=rollout.prompt,
            seed=rollout.start.seed,
            success=rollout.success,
            episode_return=float(rollout.rewards.sum(dtype="float64")),
            length=len(rollout.rewards),
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            lost=rollout.lost,
        )


@dataclass(frozen=True)
class Summary:
    """Lost episodes are in no mean, and in one rate only: the policy may have had its part in losing them."""

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
            mean_return=fmean(result.episode_return for result in finished) if finished else None,
            mean_length=fmean(result.length for result in finished) if finished else None,
            mean_length_of_successes=fmean(result.length for result in successes) if successes else None,
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
    results: tuple[EpisodeResult, ...]
    settings: Mapping[str, Any]
    seconds: float = 0.0
    videos: Mapping[int, Video] = field(default_factory=dict, repr=False, compare=False)  # by index

    def summary(self) -> Summary:
        return Summary.of(self.results)

    def by_task(self) -> dict[str, Summary]:
        tasks = dict.fromkeys(result.task for result in self.results)
        return {task: Summary.of([result for result in self.results if result.task == task]) for task in tasks}

    def to_json(self) -> dict[str, Any]:
        """Everything but the videos; the same settings give the same again, but for `seconds`."""
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
        """The inverse of `to_json`; a KeyError or a TypeError for anything else."""
        results = tuple(EpisodeResult(**episode) for episode in content["episodes"])
        return cls(results, content["settings"], content["seconds"])


def evaluate(
    pool: EnvPool,
    actor: Policy | ExpertConfig,
    starts: Sequence[Start],
    *,
    execute_steps: int,
    settings: Mapping[str, Any] | None = None,
    videos: int = 0,
    on_episode: Callable[[EpisodeResult], None] | None = None,
) -> Evaluation:
    """Run a policy, or the scripted expert, from every start; keep videos of the first `videos` episodes."""
    camera = next(iter(pool.description.robot.cameras.values()), None)
    begun = time.monotonic()
    results: dict[int, EpisodeResult] = {}
    kept: dict[int, Video] = {}
    for rollout in roll_out(pool, actor, starts, execute_steps=execute_steps, keep_images=range(videos)):
        result = results[rollout.index] = EpisodeResult.of(rollout)
        if camera is not None and camera in rollout.observations and result.length:
            kept[rollout.index] = Video(rollout.observations[camera], result.success if result.lost is None else None)
        if on_episode is not None:
            on_episode(result)
    return Evaluation(
        results=tuple(results[index] for index in sorted(results)),
        settings=settings or {},
        seconds=time.monotonic() - begun,
        videos={index: kept[index] for index in sorted(kept)},
    )


@functools.cache
def versions() -> dict[str, str]:
    """The versions of Python and of the installed packages that decide how an episode or a training run goes."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def play(
    env: RobotEnv, actor: Policy | ExpertConfig, start: Start, *, execute_steps: int, render: bool, index: int = 0
) -> tuple[EpisodeResult, Video | None]:
    """Run one episode; with `render`, record `env.render()` at the beginning and after each step."""
    frames: list[np.ndarray] = []

    def record() -> None:
        image = env.render()
        if not isinstance(image, np.ndarray):
            raise ConfigError(f"{env.name} renders no images (render() gave {type(image).__name__}, not an array).")
        frames.append(image)

    pool = LocalPool([EnvRunner(env, record)] if render else [EnvRunner(env)])
    (rollout,) = roll_out(pool, actor, [start], execute_steps=execute_steps, keep_images=render)
    if rollout.lost is not None:
        raise EnvError(f"{env.name} failed after {len(rollout)} steps from seed {start.seed}: {rollout.lost}")
    return EpisodeResult.of(rollout, index), Video(np.stack(frames), rollout.success) if render else None


# --- statistics -------------------------------------------------------------------------------------------------------


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a success rate; (0, 1) without episodes."""
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.975)
    rate = successes / n
    center = rate + z**2 / (2 * n)
    spread = z * math.sqrt(rate * (1 - rate) / n + z**2 / (4 * n**2))
    # Rounding must not move the ends that are known exactly.
    low = 0.0 if successes == 0 else (center - spread) / (1 + z**2 / n)
    high = 1.0 if successes == n else (center + spread) / (1 + z**2 / n)
    return low, high


@dataclass(frozen=True)
class Pairs:
    """How often two policies succeeded from the same starts."""

    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def n(self) -> int:
        return self.both + self.only_first + self.only_second + self.neither

    @property
    def difference(self) -> float:
        return (self.only_second - self.only_first) / self.n if self.n else 0.0


def mcnemar(pairs: Pairs) -> float:
    """The exact two-sided p value of McNemar's test: that the policies do not differ."""
    differing = pairs.only_first + pairs.only_second
    tail = sum(math.comb(differing, k) for k in range(min(pairs.only_first, pairs.only_second) + 1))
    return min(1.0, 2 * tail / 2**differing)


def paired_difference(pairs: Pairs) -> tuple[float, float]:
    """Newcombe's 95 % interval (1998, method 10) of `Pairs.difference`.

    Of the intervals that hold with few pairs and rates near 0 or 1 it is the one in closed form: two Wilson intervals,
    combined by the correlation of the outcomes, which is corrected for continuity where it is positive.
    """
    n = pairs.n
    if n == 0:
        return -1.0, 1.0
    first, second = pairs.both + pairs.only_first, pairs.both + pairs.only_second
    low_1, high_1 = (abs(first / n - end) for end in wilson(first, n))
    low_2, high_2 = (abs(second / n - end) for end in wilson(second, n))
    excess: float = pairs.both * pairs.neither - pairs.only_first * pairs.only_second
    if excess > 0:
        excess = max(0.0, excess - n / 2)
    product = first * (n - first) * second * (n - second)
    phi = excess / math.sqrt(product) if product else 0.0
    below = math.sqrt(max(0.0, low_2**2 - 2 * phi * low_2 * high_1 + high_1**2))
    above = math.sqrt(max(0.0, high_2**2 - 2 * phi * high_2 * low_1 + low_1**2))
    return max(-1.0, pairs.difference - below), min(1.0, pairs.difference + above)


@dataclass(frozen=True)
class Comparison:
    """Two policies on the same starts. Starts that either of them did not finish are left out, and counted."""

    pairs: Pairs
    left_out: int
    difference: float
    interval: tuple[float, float]
    p_value: float

    def format(self, first: str, second: str) -> str:
        if not self.pairs.n:
            return f"{first} and {second} finished no episode from the same start: there is nothing to compare."
        low, high = self.interval
        facts = (
            f"{100 * self.difference:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}] on {self.pairs.n} paired "
            f"episodes, p {format_p_value(self.p_value)} (exact McNemar test)"
        )
        if self.p_value >= SIGNIFICANT:
            return f"No significant difference between {first} and {second}: {facts}."
        return f"{second} is {'better' if self.difference > 0 else 'worse'} than {first}: {facts}."


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


def _by_start(evaluation: Evaluation) -> dict[tuple[str, int], EpisodeResult]:
    results = {(result.task, result.seed): result for result in evaluation.results}
    if len(results) < len(evaluation.results):
        raise DataError("an evaluation has two episodes of the same task and seed: they cannot be paired.")
    return results
