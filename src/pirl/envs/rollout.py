"""Episodes of a policy or an expert in a pool: infer a chunk for all who need one, execute its first steps, repeat."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float32

from pirl.data.replay import Episode
from pirl.data.robots import Robot
from pirl.envs.base import SEEDS_APART, TASKS_APART, EnvDescription, EnvObservation, Policy, Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.pool import Chunk, ChunkResult, EnvPool, EpisodeFailed, ResetResult
from pirl.errors import ConfigError, EnvError, did_you_mean


@dataclass(frozen=True)
class Rollout:
    """One episode: the observation before each action, the actions, and how it ended.

    A lost episode says why, and holds what happened before. Images are there only if they were asked for.
    """

    index: int
    start: Start
    prompt: str
    task: str
    observations: EnvObservation
    actions: Float32[np.ndarray, "steps action_dim"]
    rewards: Float32[np.ndarray, " steps"]
    success: bool
    terminated: bool
    truncated: bool
    lost: str | None

    def __len__(self) -> int:
        return len(self.rewards)

    def episode(self, robot: Robot) -> Episode:
        """The episode for the replay buffer; the images must have been kept."""
        return Episode(
            images={slot: self.observations[feature] for slot, feature in robot.cameras.items()},
            states=np.concatenate([self.observations[column] for column in robot.state], axis=-1),
            actions=self.actions,
            rewards=self.rewards,
            terminal=self.terminated,
            success=self.success,
            prompt=self.prompt,
        )


def make_starts(description: EnvDescription, episodes: int, seed: int, task: str | None = None) -> list[Start]:
    """Starts that depend on the seed alone: the tasks in turn, or one of them, from the same seeds either way."""
    tasks = description.tasks
    if task is not None and task not in tasks:
        raise ConfigError(
            f"{description.name} has no task {task!r}. {did_you_mean(task, tasks)}It has {', '.join(map(repr, tasks))}."
        )
    if episodes < 1 or seed < 0:
        raise ConfigError(f"{episodes} episodes from seed {seed}: it takes at least one, and a seed of 0 or more.")
    numbers = range(len(tasks)) if task is None else [tasks.index(task)]
    starts = []
    for index in range(episodes):
        count, turn = divmod(index, len(numbers))
        number = numbers[turn]
        starts.append(Start(tasks[number], seed * SEEDS_APART + number * TASKS_APART + count))
    return starts


def collect(
    pool: EnvPool,
    actor: Policy | ExpertConfig,
    starts: Iterable[Start],
    *,
    execute_steps: int,
    keep_images: bool = True,
    patience: int = 3,
) -> list[Rollout]:
    """The episodes from all starts, lost ones too, in the order of the starts (see `roll_out`)."""
    rollouts = roll_out(pool, actor, starts, execute_steps=execute_steps, keep_images=keep_images, patience=patience)
    return sorted(rollouts, key=lambda rollout: rollout.index)


def roll_out(
    pool: EnvPool,
    actor: Policy | ExpertConfig,
    starts: Iterable[Start | None],
    *,
    execute_steps: int,
    keep_images: bool | Collection[int] = False,
    groups: int | None = None,
    patience: int = 3,
) -> Iterator[Rollout]:
    """Run an episode from each start, as many at a time as the pool has slots; yields them as they finish.

    The order depends on nothing but the arguments. Images are kept of all episodes, of none, or of those with certain
    indices; in the others only the images for the policy are taken. With two groups of slots the policy infers for one
    while the other steps.

    Starts may depend on the episodes that were yielded: None says that there is nothing to begin just now, and free
    slots ask again when more has been yielded. It ends with the starts, or at None when nothing is under way.
    When `patience` episodes are lost before any has made a step, an `EnvError` says so.
    """
    description = pool.description
    if execute_steps < 1:
        raise ConfigError(f"execute_steps = {execute_steps} should be at least 1.")
    if isinstance(actor, ExpertConfig):
        if not description.has_expert:
            raise ConfigError(f"{description.name} has no scripted expert.")
    elif execute_steps > actor.horizon:
        raise ConfigError(
            f"execute_steps = {execute_steps}, but the policy infers {actor.horizon} steps: execute at most these."
        )
    parts = np.array_split(np.arange(pool.size), min(groups or pool.groups, pool.size))
    rollouts = _Rollouts(pool, actor, iter(starts), execute_steps, keep_images, patience)
    return rollouts.run([part.tolist() for part in parts])


@dataclass
class _Running:
    index: int
    start: Start
    keeps_images: bool
    reset: ResetResult | None = None
    # The last observation, for the policy.
    latest: EnvObservation = field(default_factory=dict)
    # What is kept of all observations, the first one included, so one more than actions.
    observations: list[EnvObservation] = field(default_factory=list)
    chunks: list[ChunkResult] = field(default_factory=list)
    steps: int = 0

    def add(self, result: ResetResult | ChunkResult, columns: Sequence[str]) -> None:
        if isinstance(result, ResetResult):
            self.reset, self.latest = result, result.observation
            observations = {name: value[None] for name, value in result.observation.items()}
        else:
            self.chunks.append(result)
            self.steps += len(result.rewards)
            self.latest = {name: values[-1] for name, values in result.observations.items()}
            observations = result.observations
        kept = {name: values for name, values in observations.items() if self.keeps_images or name in columns}
        self.observations.append(kept)

    def finish(self, result: ChunkResult | EpisodeFailed, description: EnvDescription) -> Rollout:
        robot, end = description.robot, result if isinstance(result, ChunkResult) else None
        # Empty arrays of the right shape come first, for an episode that never began.
        actions = [np.empty((0, robot.action_dim or 0), np.float32), *(chunk.actions for chunk in self.chunks)]
        rewards = [np.empty(0, np.float32), *(chunk.rewards for chunk in self.chunks)]
        observations = {}
        for name, shape in description.shapes.items():
            if self.keeps_images or name in robot.state:
                empty = np.empty((0, *shape), np.float32 if name in robot.state else np.uint8)
                parts = [empty, *(part[name] for part in self.observations)]
                observations[name] = np.concatenate(parts)[: self.steps]  # without the one after the last action
        return Rollout(
            index=self.index,
            start=self.start,
            prompt=self.reset.prompt if self.reset else "",
            task=self.reset.task if self.reset else self.start.task,
            observations=observations,
            actions=np.concatenate(actions),
            rewards=np.concatenate(rewards),
            success=end is not None and end.success,
            terminated=end is not None and end.terminated,
            truncated=end is not None and end.truncated,
            lost=result.reason if isinstance(result, EpisodeFailed) else None,
        )


@dataclass
class _Rollouts:
    """The state of `roll_out`: the episode in each slot."""

    pool: EnvPool
    actor: Policy | ExpertConfig
    starts: Iterator[Start | None]
    execute_steps: int
    keep_images: bool | Collection[int]
    patience: int
    running: dict[int, _Running] = field(default_factory=dict)
    begun: int = 0
    lost: int = 0
    has_stepped: bool = False

    def run(self, parts: Sequence[Sequence[int]]) -> Iterator[Rollout]:
        slots = [slot for part in parts for slot in part]
        self._start(slots)
        while self.running:
            for part in parts:
                if busy := [slot for slot in part if slot in self.running]:
                    # Every slot is busy again before the consumer gets to work.
                    yield from self._turn(busy)
                    self._start([slot for slot in slots if slot not in self.running])

    def _start(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if (start := next(self.starts, None)) is None:
                return
            keeps_images = self.keep_images if isinstance(self.keep_images, bool) else self.begun in self.keep_images
            self.running[slot] = _Running(self.begun, start, keeps_images)
            self.begun += 1
            self.pool.start(slot, start, self.actor if isinstance(self.actor, ExpertConfig) else None)

    def _turn(self, slots: Sequence[int]) -> list[Rollout]:
        finished, ready = [], []
        for slot, result in self.pool.wait(slots).items():
            if not isinstance(result, EpisodeFailed):
                self.running[slot].add(result, self.pool.description.robot.state)
            self.has_stepped = self.has_stepped or isinstance(result, ChunkResult)
            if isinstance(result, ResetResult) or (
                isinstance(result, ChunkResult) and not (result.terminated or result.truncated)
            ):
                ready.append(slot)
                continue
            finished.append(self.running.pop(slot).finish(result, self.pool.description))
            self._start([slot])
        self._check_hopeless(finished)
        if ready:
            self._act(ready)
        return finished

    def _check_hopeless(self, finished: Sequence[Rollout]) -> None:
        """Where no episode ever begins, losing every start one by one would only take longer to say so."""
        reasons = [rollout.lost for rollout in finished if rollout.lost is not None]
        self.lost += len(reasons)
        # Something may still come of an episode that has begun, however many of its neighbors were lost.
        is_hopeless = not self.has_stepped and all(running.reset is None for running in self.running.values())
        if reasons and is_hopeless and self.lost >= self.patience:
            raise EnvError(f"the first {self.lost} episodes were lost before anything came of them: {reasons[-1]}")

    def _act(self, slots: Sequence[int]) -> None:
        chunks: list[Chunk] = [self.execute_steps] * len(slots)
        if not isinstance(self.actor, ExpertConfig):
            chunks = list(self._infer(self.actor, [self.running[slot] for slot in slots]))
        for slot, chunk in zip(slots, chunks, strict=True):
            self.pool.execute(slot, chunk, images="all" if self.running[slot].keeps_images else "last")

    def _infer(
        self, policy: Policy, episodes: Sequence[_Running]
    ) -> Float32[np.ndarray, "episodes execute_steps action_dim"]:
        chunks = policy.infer(
            {name: np.stack([each.latest[name] for each in episodes]) for name in episodes[0].latest},
            [each.reset.prompt for each in episodes if each.reset is not None],
            [each.start.seed + (each.start.attempt << 48) for each in episodes],
            [each.steps for each in episodes],
        )
        name, width = self.pool.description.name, self.pool.description.robot.action_dim
        if width not in (None, chunks.shape[2]):
            raise ConfigError(
                f"the policy infers actions of {chunks.shape[2]} numbers; {name} takes {width}: it was trained for "
                "another robot."
            )
        if not np.all(np.isfinite(chunks)):
            raise ConfigError(
                "the policy infers actions that are not finite (NaN or infinity): its weights are damaged."
            )
        # A copy, because simulators may write into actions.
        return np.array(chunks[:, : self.execute_steps], np.float32)
