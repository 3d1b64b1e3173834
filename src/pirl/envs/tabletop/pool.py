"""A pool of tables in one process: what is queued for several of them is done for all at once."""

from collections.abc import Sequence
from types import TracebackType

import numpy as np
from gymnasium.utils.seeding import np_random
from jaxtyping import Float32, Int64

from pirl.envs.base import EnvDescription, EnvObservation, Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.pools import Lost, Segment, Started
from pirl.envs.tabletop.expert import TableExperts
from pirl.envs.tabletop.scene import Scene


class TabletopPool:
    """Tables numbered 0 … size - 1 (see `EnvPool`)."""

    def __init__(self, description: EnvDescription, scene: Scene) -> None:
        self.description, self._scene = description, scene
        self.size = len(scene.tables)
        self._experts = TableExperts(self.size)
        self._begun: dict[int, Started] = {}
        self._queued: dict[int, Float32[np.ndarray, "k 3"] | int] = {}

    def start(self, slot: int, start: Start, expert: ExpertConfig | None = None) -> None:
        """Begin an episode, with an expert at hand if it is to act."""
        self._queued.pop(slot, None)  # of an episode that was abandoned
        rng = np_random(start.seed)[0]
        if start.state is not None:
            self._scene.set_state(slot, start.state, rng)
        else:
            self._scene.lay(slot, rng, start.task)
        if expert is not None:
            self._experts.begin(slot, expert, start.seed)
        prompt = self._scene.prompt(slot)
        observation = {name: value[0] for name, value in self._scene.observe(np.array([slot])).items()}
        self._begun[slot] = Started(observation, prompt, prompt, self._scene.state(slot))

    def execute(self, slot: int, actions: Float32[np.ndarray, "k action_dim"] | int) -> None:
        """Take these actions, or so many steps of the expert."""
        self._queued[slot] = actions

    def wait(self, slots: Sequence[int]) -> dict[int, Started | Segment | Lost]:
        """Do what was queued for these slots."""
        answers: dict[int, Started | Segment | Lost] = {
            slot: self._begun.pop(slot) for slot in slots if slot in self._begun
        }
        queued = {slot: self._queued.pop(slot) for slot in slots if slot in self._queued}
        return answers | self._execute(queued)

    def _execute(self, queued: dict[int, Float32[np.ndarray, "k 3"] | int]) -> dict[int, Segment]:
        records = {slot: _Record() for slot in queued}
        lengths = {slot: actions if isinstance(actions, int) else len(actions) for slot, actions in queued.items()}
        for moment in range(max(lengths.values(), default=0)):
            going = [slot for slot in queued if moment < lengths[slot] and not records[slot].ended]
            if not going:
                break
            rows = np.array(going)
            actions = self._actions(rows, queued, moment)
            outcome = self._scene.step(rows, actions)
            observations = self._scene.observe(rows)
            for index, slot in enumerate(going):
                record = records[slot]
                record.observations.append({name: value[index] for name, value in observations.items()})
                record.actions.append(actions[index])
                record.success = bool(outcome.success[index])
                record.terminated = record.success or bool(outcome.failed[index])
                record.truncated = bool(outcome.truncated[index])
        return {slot: record.segment() for slot, record in records.items()}

    def _actions(
        self, rows: Int64[np.ndarray, " rows"], queued: dict[int, Float32[np.ndarray, "k 3"] | int], moment: int
    ) -> Float32[np.ndarray, "rows 3"]:
        # Experts that do not act now must not draw from their generators either, so they are asked one set at a time.
        chosen = np.zeros((len(rows), 3), np.float32)
        guided = np.array([isinstance(queued[row], int) for row in rows.tolist()])
        if guided.any():
            chosen[guided] = self._experts.act(self._scene.tables, rows[guided])
        for index in np.flatnonzero(~guided):
            chosen[index] = np.asarray(queued[int(rows[index])])[moment]
        return chosen

    def close(self) -> None:
        """Nothing is left running."""

    def __enter__(self) -> "TabletopPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Record:
    """What has come of the actions of one slot so far."""

    def __init__(self) -> None:
        self.observations: list[EnvObservation] = []
        self.actions: list[np.ndarray] = []
        self.success = self.terminated = self.truncated = False

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated

    def segment(self) -> Segment:
        names = self.observations[0]
        rewards = np.zeros(len(self.actions), np.float32)
        rewards[-1] = self.success
        return Segment(
            observations={name: np.stack([one[name] for one in self.observations]) for name in names},
            actions=np.stack(self.actions),
            rewards=rewards,
            terminated=self.terminated,
            truncated=self.truncated,
            success=self.success,
        )
