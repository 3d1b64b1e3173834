"""Episodes of an actor in a pool: plan a chunk for all who need one, execute the first steps of it, plan again."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float32

from pirl.data.replay import Episode
from pirl.data.robots import Robot
from pirl.envs.base import EnvDescription, EnvObservation, EnvState, Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.planner import Planner
from pirl.envs.pools import EnvPool, Lost, Segment, Started
from pirl.envs.seeds import SEEDS_APART, TASKS_APART
from pirl.errors import ConfigError, EnvError, did_you_mean

# So many episodes may be lost while nothing has come of any.
PATIENCE = 3


@dataclass(frozen=True)
class Rollout:
    """One episode: what was seen before each action, what was done, and how it ended.

    A lost episode says why, and holds what happened before. Pictures are there only if they were asked for. From the
    same state with another seed, `Start(task, seed, initial_state)`, the episode begins alike and goes its own way.
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
    initial_state: EnvState

    def __len__(self) -> int:
        return len(self.rewards)

    def episode(self, robot: Robot) -> Episode:
        """As the replay buffer takes it; the pictures must have been kept."""
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
    if task is not None and task not in description.tasks:
        raise ConfigError(
            f"{description.name} has no task {task!r}. {did_you_mean(task, description.tasks)}"
            f"It has {', '.join(map(repr, description.tasks))}."
        )
    if episodes < 1 or seed < 0:
        raise ConfigError(f"{episodes} episodes from seed {seed}: it takes at least one, and a seed of 0 or more.")
    tasks = description.tasks
    numbers = range(len(tasks)) if task is None else [tasks.index(task)]
    starts = []
    for index in range(episodes):
        number = numbers[index % len(numbers)]
        count = index // len(numbers)
        starts.append(Start(tasks[number], seed * SEEDS_APART + number * TASKS_APART + count))
    return starts


def roll_out(
    pool: EnvPool,
    actor: Planner | ExpertConfig,
    starts: Iterable[Start | None],
    *,
    execute_steps: int,
    keep_images: bool | Collection[int] = False,
    groups: int | None = None,
    patience: int = PATIENCE,
) -> Iterator[Rollout]:
    """Act an episode from each start, as many at a time as the pool has slots; yields them as they finish.

    The order depends on nothing but the arguments. Pictures are kept of all episodes, of none, or of those with certain
    indices; in the others only those are taken that a plan needs. With two groups of slots one is planned for while the
    other steps; the pool knows how many suit it.

    Starts may depend on the episodes that were yielded: None says that there is nothing to begin just now, and those
    who are free ask again when more has been yielded. It ends with the starts, or at None when nothing is under way.
    When `patience` episodes are lost and nothing has come of any, an `EnvError` says so.
    """
    _check(pool.description, actor, execute_steps)
    groups = pool.groups if groups is None else groups
    if groups < 1:
        raise ConfigError(f"groups = {groups} should be at least 1.")
    parts = [[int(slot) for slot in part] for part in np.array_split(np.arange(pool.size), min(groups, pool.size))]
    return _Rollouts(pool, actor, iter(starts), execute_steps, keep_images, patience).run(parts)


@dataclass
class _Running:
    """An episode on its way."""

    index: int
    start: Start
    keeps_images: bool
    started: Started | None = None
    # The last observation, for the next plan.
    latest: EnvObservation = field(default_factory=dict)
    # What is kept of all observations, the first one included, so one more than actions.
    observations: list[EnvObservation] = field(default_factory=list)
    # Without their observations.
    segments: list[Segment] = field(default_factory=list)
    steps: int = 0


@dataclass
class _Rollouts:
    """The state of `roll_out`: what runs in which slot."""

    pool: EnvPool
    actor: Planner | ExpertConfig
    starts: Iterator[Start | None]
    execute_steps: int
    keep_images: bool | Collection[int]
    patience: int
    running: dict[int, _Running] = field(default_factory=dict)
    begun: int = 0
    lost: int = 0
    has_stepped: bool = False

    def run(self, parts: Sequence[Sequence[int]]) -> Iterator[Rollout]:
        """Turn by turn: whatever is done with one group, the others are busy meanwhile."""
        slots = [slot for part in parts for slot in part]
        self._start(slots)
        while self.running:
            for part in parts:
                # Everything is queued again before the consumer gets to work.
                yield from self._turn([slot for slot in part if slot in self.running])
                self._start([slot for slot in slots if slot not in self.running])

    def _turn(self, slots: Sequence[int]) -> list[Rollout]:
        if not slots:
            return []
        finished, ready = [], []
        for slot, answer in self.pool.wait(slots).items():
            running = self.running[slot]
            self._take(running, answer)
            if isinstance(answer, Lost) or (isinstance(answer, Segment) and (answer.terminated or answer.truncated)):
                finished.append(self._finish(self.running.pop(slot), answer))
                self._start([slot])
            else:
                ready.append(slot)
        self._check_hope(finished)
        self._act(ready)
        return finished

    def _start(self, slots: Sequence[int]) -> None:
        """Give the free slots something to do, as far as there is something."""
        for slot in slots:
            if (start := next(self.starts, None)) is None:
                return
            index, self.begun = self.begun, self.begun + 1
            keeps_images = self.keep_images if isinstance(self.keep_images, bool) else index in self.keep_images
            self.running[slot] = _Running(index, start, keeps_images)
            self.pool.start(slot, start, self.actor if isinstance(self.actor, ExpertConfig) else None)

    def _take(self, running: _Running, answer: Started | Segment | Lost) -> None:
        if isinstance(answer, Lost):
            return
        if isinstance(answer, Started):
            running.started, running.latest = answer, answer.observation
            running.observations.append(
                self._kept(running, {name: value[None] for name, value in running.latest.items()})
            )
            return
        self.has_stepped = True
        running.latest = {name: values[-1] for name, values in answer.observations.items()}
        running.observations.append(self._kept(running, answer.observations))
        running.segments.append(replace(answer, observations={}))
        running.steps += len(answer.rewards)

    def _check_hope(self, finished: Sequence[Rollout]) -> None:
        """Where nothing has ever worked, losing every start one by one would only take longer to say so."""
        reasons = [rollout.lost for rollout in finished if rollout.lost is not None]
        self.lost += len(reasons)
        # Something may still come of an episode that has begun, however many of its neighbours were lost.
        is_hopeless = not self.has_stepped and all(running.started is None for running in self.running.values())
        if reasons and is_hopeless and self.lost >= self.patience:
            raise EnvError(f"the first {self.lost} episodes were lost before anything came of them: {reasons[-1]}")

    def _kept(self, running: _Running, observations: EnvObservation) -> EnvObservation:
        columns = self.pool.description.robot.state
        return {name: values for name, values in observations.items() if running.keeps_images or name in columns}

    def _act(self, slots: Sequence[int]) -> None:
        """Let the expert go on, or plan for all of them at once; a plan is never longer than what is asked of it."""
        if not slots:
            return
        if isinstance(self.actor, ExpertConfig):
            for slot in slots:
                self._execute(slot, self.execute_steps)
            return
        episodes = [self.running[slot] for slot in slots]
        chunks = self.actor.plan(
            {name: np.stack([each.latest[name] for each in episodes]) for name in episodes[0].latest},
            [each.started.prompt for each in episodes if each.started is not None],
            [each.start.acting_seed for each in episodes],
            [each.steps for each in episodes],
        )
        _check_plan(chunks, len(slots), self.pool.description, self.execute_steps)
        for slot, chunk in zip(slots, chunks, strict=True):
            self._execute(slot, np.array(chunk[: self.execute_steps], np.float32))

    def _execute(self, slot: int, actions: Float32[np.ndarray, "k action_dim"] | int) -> None:
        self.pool.execute(slot, actions, pictures="all" if self.running[slot].keeps_images else "last")

    def _finish(self, running: _Running, answer: Started | Segment | Lost) -> Rollout:
        description, segments = self.pool.description, running.segments
        last = segments[-1] if segments else None
        lost = answer.reason if isinstance(answer, Lost) else None
        return Rollout(
            index=running.index,
            start=running.start,
            prompt=running.started.prompt if running.started else "",
            task=running.started.task if running.started else running.start.task,
            observations={
                name: np.concatenate([np.empty((0, *shape), dtype), *(part[name] for part in running.observations)])[
                    : running.steps
                ]
                for name, (shape, dtype) in self._columns(running).items()
            },
            actions=np.concatenate(
                [np.empty((0, description.robot.action_dim or 0), np.float32)] * (not segments)
                + [segment.actions for segment in segments]
            ),
            rewards=np.concatenate([np.empty(0, np.float32), *(segment.rewards for segment in segments)]),
            success=last is not None and lost is None and last.success,
            terminated=last is not None and lost is None and last.terminated,
            truncated=last is not None and lost is None and last.truncated,
            lost=lost,
            initial_state=running.started.state if running.started else {},
        )

    def _columns(self, running: _Running) -> dict[str, tuple[tuple[int, ...], type]]:
        """Shape and dtype of what is kept of observations."""
        description = self.pool.description
        return {
            name: (shape, np.float32 if name in description.robot.state else np.uint8)
            for name, shape in description.shapes.items()
            if running.keeps_images or name in description.robot.state
        }


def _check(description: EnvDescription, actor: Planner | ExpertConfig, execute_steps: int) -> None:
    if execute_steps < 1:
        raise ConfigError(f"execute_steps = {execute_steps} should be at least 1.")
    if isinstance(actor, ExpertConfig):
        if not description.has_expert:
            raise ConfigError(f"{description.name} has no scripted expert.")
    elif execute_steps > actor.horizon:
        raise ConfigError(
            f"execute_steps = {execute_steps}, but the policy plans {actor.horizon} steps ahead: execute at most these."
        )


def _check_plan(chunks: np.ndarray, count: int, description: EnvDescription, execute_steps: int) -> None:
    wanted = description.robot.action_dim
    if chunks.ndim != 3 or len(chunks) != count or chunks.shape[1] < execute_steps:
        raise ConfigError(f"the policy planned actions of shape {chunks.shape} for {count} environments.")
    if wanted is not None and chunks.shape[2] != wanted:
        raise ConfigError(
            f"the policy plans actions of {chunks.shape[2]} numbers; {description.name} takes {wanted}: it was trained "
            "for another robot."
        )
    if not np.all(np.isfinite(chunks)):
        raise ConfigError("the policy plans actions that are not finite (NaN or infinity): its weights are damaged.")
