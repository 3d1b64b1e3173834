"""What a run learns from next: batches of the dataset, of its own episodes mixed with it, or of one after the other."""

import abc
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pirl.agents.common import Agent, Metrics
from pirl.data import ChunkBatch, ChunkSampler, Loader, PolicyIO, ReplayBuffer
from pirl.data.outcomes import OutcomeConfig, shaped_rewards
from pirl.data.replay import Episode, episode_files
from pirl.data.robots import Robot
from pirl.envs.pool import EnvPool
from pirl.envs.rollout import Rollout, collect, make_starts
from pirl.errors import DataError, EnvError
from pirl.training.display import Number
from pirl.training.distributed import FILE_SYSTEM_PATIENCE, barrier, broadcast, is_main_process, main_process_first
from pirl.training.evaluation import StoppablePolicy, acting_copy, rollout_policy
from pirl.training.health import StopSignal
from pirl.training.logging import RunLog
from pirl.training.setup import Setup

_PATIENCE = 3  # rounds in a row that may be lost as a whole


@dataclass
class TrainState:
    """The learner; the updates that it has made; and its progress, in the unit of its stream, as of the last of them."""

    agent: Any
    step: int = 0
    progress: int = 0


@dataclass(frozen=True)
class Batch:
    """A batch on the devices, or several stacked for as many updates compiled into one."""

    data: Any
    num_updates: int = 1


@dataclass(frozen=True)
class CollectResult:
    """What rollouts came to: metrics, values that depend on the clock, lines for the display."""

    metrics: Mapping[str, Number] = field(default_factory=dict)
    timing: Mapping[str, Number] = field(default_factory=dict)
    lines: Sequence[str] = ()


class Stream(abc.ABC):
    """Gives the loop its batches; an online one rolls out first. Its state goes into checkpoints."""

    is_within_iteration = False
    """Whether updates remain of rollouts that belong to the present policy."""

    @property
    @abc.abstractmethod
    def done(self) -> bool:
        """Whether there is nothing more to learn from."""

    @property
    @abc.abstractmethod
    def progress(self) -> int:
        """Updates so far, or iterations that have ended: what intervals are counted in."""

    @abc.abstractmethod
    def next(self, state: TrainState) -> Batch | None:
        """The next batch; None if rollouts gave nothing to learn from. Raises `Interrupted` if stopped meanwhile."""

    def after_update(self, state: TrainState, info: Metrics) -> None:  # noqa: B027
        """Called after each update."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """For a checkpoint."""

    @abc.abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""

    def close(self) -> None:  # noqa: B027
        """Release threads and files."""


class OfflineStream(Stream):
    """Batches of the dataset, prepared in the background: `steps` of them."""

    def __init__(self, setup: Setup, log: RunLog) -> None:
        self._setup, self._log = setup, log
        self._loader: Loader | None = None
        self._sampler: dict[str, Any] | None = None
        self._drawn = 0

    @property
    def done(self) -> bool:
        return self._drawn >= self._setup.config.steps

    @property
    def progress(self) -> int:
        return self._drawn

    def next(self, state: TrainState) -> Batch:
        with self._log.activity("data"):
            if self._loader is None:
                self._loader = self._setup.open_loader(self._sampler)
            self._drawn += 1
            return Batch(next(self._loader))

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "sampler": self._sampler if self._loader is None else self._loader.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.close()
        self._drawn, self._sampler = state["drawn"], state["sampler"]

    def close(self) -> None:
        if self._loader is not None:
            self._sampler = self._loader.state()
            self._loader.close()
            self._loader = None


class CollectingStream(Stream):
    """A stream that rolls out in the main process; the others read its episodes from the run directory."""

    _replay: ReplayBuffer

    @abc.abstractmethod
    def shared_state(self) -> dict[str, Any]:
        """The state for the other processes, which is not kept for later."""

    def state(self) -> dict[str, Any]:
        return {**self.shared_state(), "replay": self._replay.state()}

    @abc.abstractmethod
    def take_over(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, in this process alone."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        main_process_first(lambda: self.take_over(state))

    def on_main_process(self, agent: Agent, act: Callable[[Agent], CollectResult]) -> CollectResult:
        """Act in the main process; the others take over the result and the state."""
        if jax.process_count() == 1:
            return act(agent)
        here = acting_copy(agent)
        answer = broadcast(lambda: {"result": dataclasses.asdict(act(here)), "state": self.shared_state()})
        if not is_main_process():
            self.take_over(answer["state"])
        barrier()  # the main process may delete episodes once all have read them
        return CollectResult(**answer["result"])


class OnlineStream(CollectingStream):
    """Rounds of whole episodes go into a replay buffer; batches mix it with prior data.

    Every environment step makes `utd_ratio` updates due, made `updates_per_scan` at a time. Between rounds no episode is
    under way, so that it can be saved.
    """

    def __init__(
        self,
        setup: Setup,
        log: RunLog,
        pool: EnvPool | None,
        replay: ReplayBuffer,
        sampler: ChunkSampler,
        stop: StopSignal,
    ) -> None:
        """`sampler` mixes prior data with what is in `replay`. Only the main process has environments."""
        self._setup, self._log, self._stop = setup, log, stop
        self._config, self._pool, self._replay, self._sampler = setup.config.online, pool, replay, sampler
        self._counts = {"rounds": 0, "barren": 0, "env_steps": 0, "episodes": 0, "lost": 0, "updates": 0}

    @property
    def updates_due(self) -> bool:
        """Whether there are enough environment steps for the next updates."""
        due = self._counts["env_steps"] * self._config.utd_ratio - self._counts["updates"]
        return self._replay.num_episodes > 0 and due >= self._config.updates_per_scan

    @property
    def done(self) -> bool:
        return self._counts["env_steps"] >= self._config.env_steps and not self.updates_due

    @property
    def progress(self) -> int:
        return self._counts["updates"]

    def next(self, state: TrainState) -> Batch | None:
        if not self.updates_due:
            with self._log.activity("rollout", "collecting", compiles="acting"):
                result = self.on_main_process(state.agent, self.collect)
            self._log.record(state.step, state.progress, result)
            if not self.updates_due:
                return None
        with self._log.activity("data"):
            batches = self.draw()
            return Batch(self._setup.place(batches), len(batches))

    def draw(self) -> list[ChunkBatch]:
        """The batches of the next updates."""
        first, count = self._counts["updates"], self._config.updates_per_scan
        self._counts["updates"] += count
        return [self._sampler.batch(step) for step in range(first, first + count)]

    def collect(self, agent: Agent) -> CollectResult:
        """One round of episodes."""
        assert self._pool is not None
        policy_io, counts, config = self._setup.policy_io, self._counts, self._setup.config
        policy = StoppablePolicy(rollout_policy(agent, policy_io, self._pool), self._stop)
        count, first = self._config.episodes_per_round, counts["rounds"] * self._config.episodes_per_round
        starts = make_starts(self._pool.description, first + count, self._config.seed)[first:]
        rollouts = collect(self._pool, policy, starts, execute_steps=config.evaluation.execute_steps)
        finished = [rollout for rollout in rollouts if rollout.lost is None and len(rollout)]
        for rollout in finished:
            self._replay.add(shaped_episode(rollout, policy_io.robot, config.data.outcomes))
        counts["rounds"] += 1
        counts["barren"] = 0 if finished else counts["barren"] + 1
        if counts["barren"] >= _PATIENCE:
            raise EnvError(
                f"all episodes of {_PATIENCE} rounds were lost, so there is nothing to learn from. The last one: "
                f"{rollouts[-1].lost}"
            )
        counts["env_steps"] += sum(map(len, finished))
        counts["episodes"] += len(finished)
        counts["lost"] += len(rollouts) - len(finished)
        metrics: dict[str, Number] = {f"online/{name}": counts[name] for name in ("env_steps", "episodes", "lost")}
        if finished:
            metrics["online/success"] = float(np.mean([rollout.success for rollout in finished]))
            metrics["online/length"] = float(np.mean([len(rollout) for rollout in finished]))
        return CollectResult(metrics)

    def shared_state(self) -> dict[str, Any]:
        return {"counts": dict(self._counts), "replay": self._replay.held()}

    def take_over(self, state: Mapping[str, Any]) -> None:
        self._counts = dict(state["counts"])
        self._replay.restore(state["replay"])


class Chain(Stream):
    """One stream after the other: offline, then online."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams

    @property
    def done(self) -> bool:
        return all(stream.done for stream in self._streams)

    @property
    def progress(self) -> int:
        return sum(stream.progress for stream in self._streams)

    def next(self, state: TrainState) -> Batch | None:
        for stream in self._streams:
            if not stream.done:
                return stream.next(state)
            stream.close()
        raise StopIteration

    def state(self) -> dict[str, Any]:
        return {type(stream).__name__: stream.state() for stream in self._streams}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, also where there are more streams or fewer now."""
        for stream in self._streams:
            if (saved := state.get(type(stream).__name__)) is not None:
                stream.load_state(saved)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


def make_chain(setup: Setup, log: RunLog, pool: EnvPool | None, replay: ReplayBuffer | None, stop: StopSignal) -> Chain:
    """The dataset, then the learner's own episodes if there is a replay buffer for them."""
    config, prior = setup.config, setup.config.online.prior_ratio
    streams: list[Stream] = [OfflineStream(setup, log)]
    if replay is not None:
        # In another order than offline, so that it does not begin with the same chunks again.
        sources: list[Any] = [setup.source(config.seed + 1)] if prior > 0 else []
        ratios = [prior] if prior > 0 else []
        if prior < 1:
            sources, ratios = [*sources, replay], [*ratios, 1 - prior]
        streams.append(OnlineStream(setup, log, pool, replay, setup.sampler(sources, ratios), stop))
    return Chain(streams)


def shaped_episode(rollout: Rollout, robot: Robot, outcomes: OutcomeConfig) -> Episode:
    """An episode with the rewards that the dataset's have."""
    episode = rollout.episode(robot)
    if outcomes.reward == "raw":
        return episode
    return dataclasses.replace(episode, rewards=shaped_rewards(outcomes, rollout.success, len(rollout)))


def open_replay(setup: Setup, directory: Path, *, has_environments: bool, is_new: bool) -> ReplayBuffer:
    """The replay buffer of a run; without environments, a view of the main process's."""
    config = setup.config
    capacity = config.rollout.capacity if config.on_policy else config.online.capacity
    in_memory = config.on_policy or config.online.in_memory
    if not has_environments:
        return ReplayView(capacity, setup.policy_io, config.seed, directory, in_memory)
    replay = ReplayBuffer(capacity, setup.policy_io, seed=config.seed, directory=directory, in_memory=in_memory)
    if is_new and replay.num_episodes:
        # Killed before its first checkpoint: it begins anew.
        replay.restore({"oldest": 0, "next": 0, "episodes": 0})
    return replay


class ReplayView(ReplayBuffer):
    """What the replay buffer of the main process holds, read from its directory."""

    def __init__(self, capacity: int, policy_io: PolicyIO, seed: int, directory: Path, in_memory: bool) -> None:
        super().__init__(capacity, policy_io, seed=seed)
        self._source, self._in_memory = directory, in_memory

    def state(self) -> dict[str, int]:
        return self.held()

    def clear(self) -> None:
        self._episodes, self._trajectories = [], None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Hold what the main process said that it holds."""
        give_up = time.monotonic() + FILE_SYSTEM_PATIENCE
        while True:
            files = episode_files(self._source) if self._source.is_dir() else {}
            wanted = [file for serial, file in sorted(files.items()) if state["oldest"] <= serial < state["next"]]
            if len(wanted) == state["episodes"]:
                break
            if time.monotonic() > give_up:
                raise DataError(
                    f"{self._source} shows {len(wanted)} of the {state['episodes']} episodes that the first host "
                    "has written there: is it on a file system that all hosts share?"
                )
            time.sleep(0.1)
        self._hold(wanted)
        self._next_serial = state["next"]
