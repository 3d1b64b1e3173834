"""What all pools of workers have in common, with workers that answer by a script and a clock that only they move."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from fakes import Point
from pirl.envs import EnvConfig, EnvPool, Lost, Segment, Start, Started, watched_pool
from pirl.envs.watched_pool import Answer, Ready, Refused, WatchedPool, Worker
from pirl.errors import ConfigError, EnvError

READY = Ready(Point().describe())
BEGUN, OTHER = (Started({}, f"go {task}", task, {}) for task in ("left", "right"))
MOVED = Segment({}, np.zeros((1, 2), np.float32), np.zeros(1, np.float32), False, False, False)
# Seconds until an answer, and the answer; the first of a worker is to being hired.
Script = list[tuple[float, Answer]]
NEVER = (1e9, READY)


class Clock:
    """Time that passes only while somebody listens."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Scripted(Worker):
    def __init__(self, clock: Clock, script: Script) -> None:
        super().__init__()
        self.clock, self.script = clock, iter(script)
        self.asked: list[tuple[str, Any]] = []
        self.left = self.ended = self.is_gone = False
        self._think()

    def _think(self) -> None:
        delay, self._answer = next(self.script)
        self.due: float = self.clock.now + delay

    def ask(self, method: str, *arguments: Any) -> None:
        assert self.due == np.inf, "one thing at a time"
        self.asked.append((method, arguments[0]))
        self._think()

    def hear(self) -> Answer | None:
        if self.clock.now < self.due:
            return None
        self.due = np.inf
        return self._answer

    def is_there(self) -> bool:
        return not self.is_gone

    def end(self) -> None:
        assert not self.ended
        self.ended, self.ended_at = True, self.clock.now


class ScriptedPool(WatchedPool[Scripted]):
    def __init__(self, clock: Clock, *scripts: Script, size: int = 1) -> None:
        self.clock, self.scripts = clock, iter(scripts)
        self.hired: list[Scripted] = []
        super().__init__(EnvConfig("scripted"), size, timeout=10.0)

    def _hire(self, slot: int) -> Scripted:
        self.hired.append(Scripted(self.clock, next(self.scripts)))
        return self.hired[-1]

    def _listen(self, workers: Sequence[Scripted], seconds: float) -> None:
        self.clock.now = min([self.clock.now + seconds, *(worker.due for worker in workers)])

    def _let_leave(self, workers: Sequence[Scripted], seconds: float) -> None:
        for worker in workers:
            worker.left = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(watched_pool, "time", clock)
    return clock


def test_it_is_a_pool_of_the_environment_that_its_workers_made(clock: Clock) -> None:
    with ScriptedPool(clock, [(50, READY)], [(70, READY)], size=2) as pool:
        assert isinstance(pool, EnvPool)
        assert pool.description == READY.description
        assert clock.now == 1070, "they made them at the same time"


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ((5, Refused("no such table")), ConfigError, "^no such table$"),
        ((5, Lost("it fell")), EnvError, "'scripted' could not be made: it fell"),
        (NEVER, EnvError, "'scripted' could not be made: the environment hangs: not made within 600 s"),
    ],
)
def test_what_cannot_be_made_says_why_and_ends_the_others(
    clock: Clock, answer: tuple[float, Answer], error: type[Exception], message: str
) -> None:
    hired: list[Scripted] = []

    class Pool(ScriptedPool):
        def _hire(self, slot: int) -> Scripted:
            hired.append(super()._hire(slot))
            return hired[-1]

    with pytest.raises(error, match=message):
        Pool(clock, [(1, READY)], [answer], size=2)
    assert [worker.left for worker in hired] == [True, False], "one was at rest, the other was not"
    assert all(worker.ended for worker in hired)


def test_who_is_late_is_ended_and_replaced_at_the_next_start_alone(clock: Clock) -> None:
    pool = ScriptedPool(clock, [(1, READY), (1, BEGUN), NEVER], [(60, READY), (9, OTHER)])
    pool.hired[0].place = " on the moon"
    pool.start(0, Start("left", 1))
    pool.wait([0])
    began = clock.now
    pool.execute(0, 1)
    assert pool.wait([0]) == {0: Lost("the environment on the moon hangs: no answer within 10 s")}
    assert clock.now == began + 10
    assert pool.hired[0].ended
    assert len(pool.hired) == 1
    with pytest.raises(ValueError, match="slot 0 has no episode"):
        pool.execute(0, 1)
    # The time for a request begins when the new one has made its environment.
    pool.start(0, Start("right", 2))
    assert pool.wait([0]) == {0: OTHER}
    assert clock.now == began + 10 + 60 + 9


def test_an_answer_that_nobody_wants_any_more_is_not_taken_for_another(clock: Clock) -> None:
    pool = ScriptedPool(clock, [(1, READY), (1, BEGUN), (5, MOVED), (1, OTHER)])
    pool.start(0, Start("left", 1))
    pool.wait([0])
    pool.execute(0, 1)
    with pytest.raises(ValueError, match="slot 0 has not been waited for"):
        pool.execute(0, 1)
    for task in ("left", "right"):
        pool.start(0, Start(task, 2))
    assert pool.wait([0]) == {0: OTHER}
    assert [asked for asked, _ in pool.hired[0].asked] == ["start", "execute", "start"]
    with pytest.raises(ValueError, match="nothing is queued for slot 0"):
        pool.wait([0])


@pytest.mark.parametrize("end", [(1.0, Lost("it fell")), NEVER])
def test_a_mishap_in_an_episode_that_was_given_up_costs_no_other(clock: Clock, end: tuple[float, Answer]) -> None:
    pool = ScriptedPool(clock, [(1, READY), (1, BEGUN), end], [(1, READY), (1, OTHER)])
    pool.start(0, Start("left", 1))
    pool.wait([0])
    pool.execute(0, 1)
    pool.start(0, Start("right", 2))
    assert pool.wait([0]) == {0: OTHER}
    assert [worker.ended for worker in pool.hired] == [True, False]


def test_a_replacement_that_cannot_be_made_costs_the_episode_and_another_is_tried(clock: Clock) -> None:
    broken: Script = [(1, READY), (1, Lost("it fell"))]
    refusing: Script = [(1, Refused("no such table"))]
    pool = ScriptedPool(clock, broken, [(1, Lost("no room"))], [NEVER], refusing, [(1, READY), (1, BEGUN)])
    said: list[Any] = []
    for _ in range(3):
        pool.start(0, Start("left", 1))
        said.append(pool.wait([0])[0])
    hang = Lost("the environment hangs: not made within 600 s")
    assert said == [Lost("it fell"), Lost("no room"), hang]
    pool.start(0, Start("left", 1))
    with pytest.raises(ConfigError, match="^no such table$"):
        pool.wait([0])
    pool.start(0, Start("left", 1))
    assert pool.wait([0]) == {0: BEGUN}


def test_each_has_its_own_time_and_answers_come_in_the_order_asked_for(clock: Clock) -> None:
    pool = ScriptedPool(clock, [(1, READY), (8, BEGUN)], [(1, READY), NEVER], size=2)
    began = clock.now
    pool.start(1, Start("left", 1))
    clock.now += 5
    pool.start(0, Start("left", 1))
    hang = Lost("the environment hangs: no answer within 10 s")
    assert list(pool.wait([0, 1]).items()) == [(0, BEGUN), (1, hang)]
    assert (pool.hired[1].ended_at, clock.now) == (began + 10, began + 13)


def test_one_that_is_gone_when_an_episode_is_to_begin_is_replaced(clock: Clock) -> None:
    pool = ScriptedPool(clock, [(1, READY), (1, BEGUN)], [(1, READY), (1, OTHER)])
    pool.start(0, Start("left", 1))
    pool.wait([0])
    pool.hired[0].is_gone = True
    pool.start(0, Start("right", 1))
    assert pool.wait([0]) == {0: OTHER}
    assert pool.hired[0].ended


def test_closing_ends_the_busy_at_once_and_lets_the_others_leave(clock: Clock) -> None:
    pool = ScriptedPool(clock, [(1, READY), (1, BEGUN)], [(1, READY)], size=2)
    pool.start(0, Start("left", 1))
    for _ in range(2):  # the second time does no harm
        pool.close()
        assert [(worker.left, worker.ended) for worker in pool.hired] == [(False, True), (True, True)]
