"""A pool of tables in one process: what is queued for several of them is done for all at once."""

from collections.abc import Sequence
from types import TracebackType

import numpy as np
from gymnasium.utils.seeding import np_random
from jaxtyping import Float32, Int64

from pirl.envs.base import EnvDescription, EnvObservation, Start
from pirl.envs.experts import ExpertConfig
from pirl.envs.pools import Lost, Pictures, Segment, Started, stack_observations
from pirl.envs.tabletop.expert import TableExperts
from pirl.envs.tabletop.scene import Scene

# What a slot was told to execute: actions, or so many steps of its expert.
_Actions = Float32[np.ndarray, "k 3"] | int


class TabletopPool:
    """Tables numbered 0 … size - 1 (see `EnvPool`)."""

    groups = 1

    def __init__(self, description: EnvDescription, scene: Scene) -> None:
        self.description, self._scene = description, scene
        self.size = len(scene.tables)
        self._experts = TableExperts(self.size)
        self._begun: dict[int, Started] = {}
        self._queued: dict[int, tuple[_Actions, Pictures]] = {}
        # Slots whose episode goes on, and whether an expert may act in it.
        self._going: dict[int, bool] = {}

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
        self._going[slot] = expert is not None
        prompt = self._scene.prompt(slot)
        observation = {name: value[0] for name, value in self._scene.observe(np.array([slot])).items()}
        self._begun[slot] = Started(observation, prompt, prompt, self._scene.state(slot))

    def execute(
        self, slot: int, actions: Float32[np.ndarray, "k action_dim"] | int, *, pictures: Pictures = "all"
    ) -> None:
        """Take these actions, or so many steps of the expert."""
        if slot not in self._going:
            raise ValueError(f"no episode goes on in slot {slot}: start one first.")
        if isinstance(actions, int) and not self._going[slot]:
            raise ValueError(f"the episode in slot {slot} was started without an expert.")
        self._queued[slot] = actions, pictures

    def wait(self, slots: Sequence[int]) -> dict[int, Started | Segment | Lost]:
        """Do what was queued for these slots."""
        if idle := [slot for slot in slots if slot not in self._begun and slot not in self._queued]:
            raise ValueError(f"nothing was queued for the slots {idle}.")
        answers: dict[int, Started | Segment | Lost] = {
            slot: self._begun.pop(slot) for slot in slots if slot in self._begun
        }
        queued = {slot: self._queued.pop(slot) for slot in slots if slot in self._queued}
        return answers | self._execute(queued)

    def _execute(self, queued: dict[int, tuple[_Actions, Pictures]]) -> dict[int, Segment]:
        records = {slot: _Record() for slot in queued}
        chosen = {slot: actions for slot, (actions, _) in queued.items()}
        lengths = {slot: actions if isinstance(actions, int) else len(actions) for slot, actions in chosen.items()}
        for moment in range(max(lengths.values(), default=0)):
            going = [slot for slot in queued if moment < lengths[slot] and not records[slot].ended]
            if not going:
                break
            rows = np.array(going)
            actions = self._actions(rows, chosen, moment)
            outcome = self._scene.step(rows, actions)
            looking = [slot for slot in going if queued[slot][1] == "all" or moment == lengths[slot] - 1]
            seen = _by_slot(looking, self._scene.look(np.array(looking, np.int64)))
            felt = _by_slot(going, self._scene.feel(rows))
            for index, slot in enumerate(going):
                record = records[slot]
                record.observations.append(seen.get(slot, {}) | felt[slot])
                record.actions.append(actions[index])
                record.success = bool(outcome.success[index])
                record.terminated = record.success or bool(outcome.failed[index])
                record.truncated = bool(outcome.truncated[index])
        for slot, record in records.items():
            if record.ended:
                del self._going[slot]
        return {slot: record.segment() for slot, record in records.items()}

    def _actions(
        self, rows: Int64[np.ndarray, " rows"], chosen: dict[int, _Actions], moment: int
    ) -> Float32[np.ndarray, "rows 3"]:
        # Experts that do not act now must not draw from their generators either, so they are asked one set at a time.
        actions = np.zeros((len(rows), 3), np.float32)
        guided = np.array([isinstance(chosen[row], int) for row in rows.tolist()])
        if guided.any():
            actions[guided] = self._experts.act(self._scene.tables, rows[guided])
        for index in np.flatnonzero(~guided):
            actions[index] = np.asarray(chosen[int(rows[index])])[moment]
        return actions

    def close(self) -> None:
        """Nothing is left running."""

    def __enter__(self) -> "TabletopPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _by_slot(slots: Sequence[int], observations: EnvObservation) -> dict[int, EnvObservation]:
    return {slot: {name: value[row] for name, value in observations.items()} for row, slot in enumerate(slots)}


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
        rewards = np.zeros(len(self.actions), np.float32)
        rewards[-1] = self.success
        return Segment(
            observations=stack_observations(self.observations),
            actions=np.stack(self.actions),
            rewards=rewards,
            terminated=self.terminated,
            truncated=self.truncated,
            success=self.success,
        )
