"""Practice with several hosts: the first one acts, the others wait, and then all have the same to learn from."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pirl.agents.common import Agent
from pirl.data import PolicyIO, ReplayBuffer
from pirl.data.replay import episode_files
from pirl.errors import DataError
from pirl.training.acting import acting_copy
from pirl.training.exchange import Exchange
from pirl.training.practice import Practice, Told

# File systems on a network may show new files a little later.
_PATIENCE = 20.0


class SharedPractice:
    """The practice of the first host, and on the others what follows from it: they read its episodes from the run."""

    def __init__(self, practice: Practice) -> None:
        self._practice, self._line = practice, Exchange("practice")

    @property
    def owes_updates(self) -> bool:
        """Whether there are batches for the next updates."""
        return self._practice.owes_updates

    @property
    def is_over(self) -> bool:
        """Whether all has been tried, and all updates are made."""
        return self._practice.is_over

    @property
    def updates(self) -> int:
        """Updates made so far, or at least given their batches."""
        return self._practice.updates

    @property
    def rounds(self) -> int:
        """Rounds that have come to their end, with their updates."""
        return self._practice.rounds

    def collect(self, agent: Agent, is_stopped: Callable[[], bool] = lambda: False) -> Told:
        """Let the first host act, to the end of the round: all hosts stop at the same step."""
        return self._lead(agent, self._practice.collect)

    def batches(self) -> list[Any]:
        """This host's share of the next batches."""
        return self._practice.batches()

    def conclude(self, agent: Agent, loss: float | None) -> Told:
        """Let the first host look back."""
        return self._lead(agent, lambda here: self._practice.conclude(here, loss))

    def close(self) -> None:
        """Finish what was written."""
        self._practice.close()

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self._practice.state()

    def shown(self) -> dict[str, Any]:
        """What the other hosts were shown."""
        return self._practice.shown()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: the first host before the others, who read what it keeps."""
        if self._line.is_first:
            self._practice.restore(state)
        self._line.meet()
        if not self._line.is_first:
            self._practice.restore(state)

    def _lead(self, agent: Agent, act: Callable[[Agent], Told]) -> Told:
        here = acting_copy(agent)

        def lead() -> dict[str, Any]:
            return {"told": dataclasses.asdict(act(here)), "state": self._practice.shown()}

        answer = self._line.share(lead)
        if not self._line.is_first:
            self._practice.restore(answer["state"])
        self._line.meet()  # the first one may delete episodes when all have read them
        return Told(**answer["told"])


class FollowedReplay(ReplayBuffer):
    """What the replay buffer of another process holds, read from its directory, which is left as it is."""

    def __init__(self, capacity: int, policy_io: PolicyIO, seed: int, directory: Path, in_memory: bool) -> None:
        super().__init__(capacity, policy_io, seed=seed)
        self._followed, self._in_memory = directory, in_memory

    def state(self) -> dict[str, int]:
        """The same as held: there is nothing to be kept."""
        return self.held()

    def clear(self) -> None:
        """Let go of all episodes."""
        self._episodes, self._trajectories = [], None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Hold what the other one said that it holds."""
        give_up = time.monotonic() + _PATIENCE
        while True:
            files = episode_files(self._followed) if self._followed.is_dir() else {}
            wanted = [file for serial, file in sorted(files.items()) if state["oldest"] <= serial < state["next"]]
            if len(wanted) == state["episodes"]:
                break
            if time.monotonic() > give_up:
                raise DataError(
                    f"{self._followed} shows {len(wanted)} of the {state['episodes']} episodes that the first host "
                    "has written there: is it on a file system that all hosts share?"
                )
            time.sleep(0.1)
        self._hold(wanted)
        self._next_serial = state["next"]
