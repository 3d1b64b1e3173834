"""Pools of workers: with workers that answer by a script and a clock that only they move, and with real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium
import numpy as np
import pytest

from fakes import CREWED, MISHAPS, POINT, UNMAKEABLE, LocalPool, Point, StraightPolicy
from pirl.envs import EnvConfig, ExpertConfig, Start, workers
from pirl.envs.pool import ChunkResult, EnvPool, EpisodeFailed, Refused, ResetResult, default_size, open_pool
from pirl.envs.rollout import make_starts, roll_out
from pirl.envs.workers import Answer, ProcessPool, Ready, Worker, WorkerPool
from pirl.errors import ConfigError, EnvError

READY = Ready(Point().describe())
BEGUN, OTHER = (ResetResult({}, f"go {task}", task) for task in ("left", "right"))
MOVED = ChunkResult({}, np.zeros((1, 2), np.float32), np.zeros(1, np.float32), False, False, False)
# Seconds until an answer, and the answer; the first of a worker is to being spawned.
Script = list[tuple[float, Answer]]
NEVER = (1e9, READY)


class Clock:
    """Time that passes only while somebody waits."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Scripted(Worker):
    def __init__(self, clock: Clock, script: Script) -> None:
        super().__init__()
        self.clock, self.script = clock, iter(script)
        self.asked: list[str] = []
        self.due: list[tuple[float, Answer]] = []
        self.left = self.ended = self.is_gone = False
        self._think()

    def _think(self) -> None:
        delay, answer = next(self.script)
        self.due.append((max([self.clock.now, *(due for due, _ in self.due)]) + delay, answer))

    @property
    def handle(self) -> "Scripted":
        return self

    def send(self, method: str, *arguments: Any) -> None:
        self.asked.append(method)
        self._think()

    def recv(self) -> Answer | None:
        return self.due.pop(0)[1] if self.due and self.clock.now >= self.due[0][0] else None

    def is_alive(self) -> bool:
        return not self.is_gone

    def leave(self) -> None:
        self.left = True

    def join(self, seconds: float) -> None:
        pass

    def kill(self) -> None:
        assert not self.ended
        self.ended, self.ended_at = True, self.clock.now


class ScriptedPool(WorkerPool):
    def __init__(self, clock: Clock, *scripts: Script, size: int = 1) -> None:
        self.clock, self.scripts = clock, iter(scripts)
        self.spawned: list[Scripted] = []
        super().__init__(EnvConfig("scripted"), size, timeout=10.0)

    def _spawn(self, slot: int) -> Scripted:
        self.spawned.append(Scripted(self.clock, next(self.scripts)))
        return self.spawned[-1]

    def _select(self, handles: Sequence[Scripted], seconds: float) -> None:
        self.clock.now = min([self.clock.now + seconds, *(worker.due[0][0] for worker in handles if worker.due)])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(workers, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ((5, Refused("no such table")), ConfigError, "^no such table$"),
        ((5, EpisodeFailed("it fell")), EnvError, "'scripted' could not be made: it fell"),
        (NEVER, EnvError, "'scripted' could not be made: the environment hangs: not made within 600 s"),
    ],
)
def test_what_cannot_be_made_says_why_and_ends_the_others(
    clock: Clock, answer: tuple[float, Answer], error: type[Exception], message: str
) -> None:
    spawned: list[Scripted] = []

    class Pool(ScriptedPool):
        def _spawn(self, slot: int) -> Scripted:
            spawned.append(super()._spawn(slot))
            return spawned[-1]

    with pytest.raises(error, match=message):
        Pool(clock, [(1, READY)], [answer], size=2)
    assert [worker.left for worker in spawned] == [True, False], "one was idle, the other was not"
    assert all(worker.ended for worker in spawned)


def test_a_late_worker_is_killed_and_replaced_at_the_next_start_alone(clock: Clock) -> None:
    scripted = ScriptedPool(clock, [(1, READY), (1, BEGUN), NEVER], [(60, READY), (9, OTHER)])
    scripted.spawned[0].place = " on the moon"
    scripted.start(0, Start("left", 1))
    scripted.wait([0])
    began = clock.now
    scripted.execute(0, 1)
    assert scripted.wait([0]) == {0: EpisodeFailed("the environment on the moon hangs: no answer within 10 s")}
    assert clock.now == began + 10
    assert scripted.spawned[0].ended
    assert len(scripted.spawned) == 1
    # The time for a request begins when the new one has made its environment.
    scripted.start(0, Start("right", 2))
    assert scripted.wait([0]) == {0: OTHER}
    assert clock.now == began + 10 + 60 + 9


@pytest.mark.parametrize("end", [(5.0, MOVED), (1.0, EpisodeFailed("it fell")), NEVER])
def test_an_answer_of_an_abandoned_episode_is_not_taken_for_another(clock: Clock, end: tuple[float, Answer]) -> None:
    scripted = ScriptedPool(clock, [(1, READY), (1, BEGUN), end], [(1, READY), (1, OTHER)])
    scripted.start(0, Start("left", 1))
    scripted.wait([0])
    scripted.execute(0, 1)
    scripted.start(0, Start("right", 2))
    assert scripted.wait([0]) == {0: OTHER}
    assert [worker.ended for worker in scripted.spawned] == [True, False]


def test_a_replacement_that_cannot_be_made_costs_the_episode_and_another_is_tried(clock: Clock) -> None:
    broken: Script = [(1, READY), (1, EpisodeFailed("it fell"))]
    unmakeable: list[Script] = [[(1, EpisodeFailed("no room")), NEVER], [NEVER, NEVER]]
    refusing: Script = [(1, Refused("no such table")), NEVER]
    scripted = ScriptedPool(clock, broken, *unmakeable, refusing, [(1, READY), (1, BEGUN)])
    results: list[Any] = []
    for _ in range(3):
        scripted.start(0, Start("left", 1))
        results.append(scripted.wait([0])[0].reason)
    assert results == ["it fell", "no room", "the environment hangs: not made within 600 s"]
    scripted.start(0, Start("left", 1))
    with pytest.raises(ConfigError, match="^no such table$"):
        scripted.wait([0])
    scripted.start(0, Start("left", 1))
    assert scripted.wait([0]) == {0: BEGUN}


def test_each_has_its_own_time_and_answers_come_in_the_order_asked_for(clock: Clock) -> None:
    scripted = ScriptedPool(clock, [(1, READY), (8, BEGUN)], [(1, READY), NEVER], size=2)
    began = clock.now
    scripted.start(1, Start("left", 1))
    clock.now += 5
    scripted.start(0, Start("left", 1))
    hang = EpisodeFailed("the environment hangs: no answer within 10 s")
    assert list(scripted.wait([0, 1]).items()) == [(0, BEGUN), (1, hang)]
    assert (scripted.spawned[1].ended_at, clock.now) == (began + 10, began + 13)


def test_closing_kills_the_busy_at_once_and_lets_the_others_leave(clock: Clock) -> None:
    scripted = ScriptedPool(clock, [(1, READY), (1, BEGUN)], [(1, READY)], size=2)
    scripted.start(0, Start("left", 1))
    for _ in range(2):  # the second time does no harm
        scripted.close()
        assert [(worker.left, worker.ended) for worker in scripted.spawned] == [(False, True), (True, True)]


class Native(Point):
    """A point that makes its own pool."""

    def __init__(self, *, limit: int | None = None) -> None:
        super().__init__(limit=limit)

    @classmethod
    def make_pool(cls, size: int, **options: Any) -> LocalPool:
        return LocalPool(size, **options)


if "fakes/Native-v0" not in gymnasium.registry:
    gymnasium.register("fakes/Native-v0", Native)


def test_an_environment_with_a_pool_of_its_own_gets_it_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_pool(EnvConfig("fakes/Native-v0", options={"limit": "5"}), 3) as native:
        assert isinstance(native, LocalPool)
        assert (native.size, native.description.max_steps) == (3, 5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert default_size(EnvConfig(POINT)) == 2
    assert default_size(EnvConfig("fakes/Native-v0")) == 16, "which need no process each"
    with pytest.raises(ConfigError, match="a pool of 0 environments"):
        open_pool(EnvConfig("fakes/Native-v0"), 0)


# --- processes ---------------------------------------------------------------------------------------------------------


HANG = 600.0  # seconds that a step takes in which an environment hangs (see `fakes`)


def running() -> Iterator[tuple[int, int, int, bytes]]:
    """Number, parent, session and command of every process that runs, from /proc."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status, command = (entry / "stat").read_text(), (entry / "cmdline").read_bytes()
            except OSError:
                continue
            state, parent, _, session = status.rsplit(")", 1)[1].split()[:4]
            if state != "Z":
                yield int(entry.name), int(parent), int(session), command


def children(parent: int) -> set[int]:
    """Worker processes of a process."""
    return {each for each, its_parent, _, command in running() if its_parent == parent and b"spawn_main" in command}


def crews(workers: set[int]) -> set[int]:
    """What workers have started."""
    return {each for each, _, session, _ in running() if session in workers} - workers


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def are_gone(processes: set[int]) -> bool:
    deadline = time.monotonic() + 120  # far more than it takes, and far less than the processes would live
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, processes))


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPool]:
    with open_pool(EnvConfig(POINT), 2) as processes:
        assert isinstance(processes, ProcessPool)
        yield processes


def test_every_mishap_costs_one_episode_and_says_what_it_was(processes: ProcessPool) -> None:
    expected = {
        9001: "exit code 3",
        9002: "ended by SIGKILL",
        9003: "ended by SIGSEGV",
        9005: "ZeroDivisionError: the plane is torn",
        9007: "'state' holds nan",
        9012: "ConnectionResetError: the plane hung up",
    }
    seeds = [1, 2, *expected, 3, 4]
    starts = [Start("left", seed) for seed in seeds]
    rollouts = {r.start.seed: r for r in roll_out(processes, StraightPolicy(), starts, execute_steps=1)}
    assert set(rollouts) == set(seeds)
    for seed, rollout in rollouts.items():
        if seed in expected:
            assert rollout.lost is not None
            assert expected[seed] in rollout.lost
            # What happened before is kept.
            assert len(rollout) == MISHAPS[seed][1] - 1
            assert len(rollout.observations["state"]) == len(rollout)
            assert not rollout.success
        else:
            assert rollout.lost is None
            assert rollout.success


def test_a_hang_costs_its_episode_and_no_other(processes: ProcessPool, monkeypatch: pytest.MonkeyPatch) -> None:
    processes.start(0, Start("left", 9004))
    processes.wait([0])
    with monkeypatch.context() as impatient:  # only here: elsewhere a busy machine should lose no episode
        impatient.setattr(processes, "_timeout", 1.0)
        processes.execute(0, np.zeros((3, 2), np.float32))
        assert processes.wait([0])[0] == EpisodeFailed("the environment hangs: no answer within 1 s")
    starts = [Start("left", seed) for seed in (1, 2, 3)]
    assert all(rollout.success for rollout in roll_out(processes, StraightPolicy(), starts, execute_steps=1))


@pytest.mark.parametrize("actor", [StraightPolicy(), ExpertConfig(noise=0.3)])
def test_processes_change_neither_the_episodes_nor_their_order(processes: ProcessPool, actor: Any) -> None:
    """Whoever answers first: slots at rest, slots in a group of their own, and fewer slots than episodes."""
    starts = make_starts(processes.description, 7, 4)
    with LocalPool(processes.size) as local:
        one, other = (
            list(roll_out(each, actor, starts, execute_steps=4, keep_images=True, groups=2))
            for each in (processes, local)
        )
    assert [rollout.index for rollout in one] == [rollout.index for rollout in other]
    for ours, theirs in zip(one, other, strict=True):
        assert (ours.success, ours.truncated, ours.prompt) == (theirs.success, theirs.truncated, theirs.prompt)
        np.testing.assert_array_equal(ours.actions, theirs.actions)
        for name in ("image", "state"):
            np.testing.assert_array_equal(ours.observations[name], theirs.observations[name])


def test_a_worker_that_dies_at_rest_costs_no_episode(processes: ProcessPool) -> None:
    processes.start(0, Start("left", 1))
    processes.start(1, Start("left", 1))
    processes.wait([0, 1])
    for worker in children(os.getpid()):
        os.kill(worker, signal.SIGKILL)
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    processes.start(0, Start("left", 1))
    assert isinstance(processes.wait([0])[0], ResetResult)


def test_what_is_asked_wrongly_is_no_lost_episode(processes: ProcessPool) -> None:
    processes.start(0, Start("up", 1))
    with pytest.raises(ConfigError, match="point has no task 'up'"):
        processes.wait([0])
    with pytest.raises(ConfigError, match="the point was misconfigured"):
        list(roll_out(processes, StraightPolicy(), [Start("left", 9010)], execute_steps=3))


def test_an_environment_that_cannot_be_made_tells_the_parent_why() -> None:
    with pytest.raises(ConfigError, match=r"^the point is shy: pip install 'pirl\[courage\]'\.$"):
        open_pool(EnvConfig(POINT, options={"shy": "yes"}), 1)
    with pytest.raises(EnvError, match="could not be made: the environment's process is gone: exit code 9"):
        open_pool(EnvConfig(UNMAKEABLE), 1)


def test_nothing_runs_after_close_not_even_a_hung_step() -> None:
    before = children(os.getpid())
    pool = open_pool(EnvConfig(POINT), 2)
    pool.start(0, Start("left", 9004))
    pool.wait([0])
    pool.execute(0, np.zeros((3, 2), np.float32))
    assert len(children(os.getpid()) - before) == 2
    began = time.monotonic()
    pool.close()
    assert children(os.getpid()) == before
    assert time.monotonic() - began < HANG / 2, "the step was not waited for"
    pool.close()  # a second time does no harm


def test_an_interrupt_while_environments_are_made_leaves_nothing_running() -> None:
    before = children(os.getpid())

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            open_pool(EnvConfig(POINT, options={"slow": 600.0}), 2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert children(os.getpid()) == before


@pytest.fixture
def crewed() -> Iterator[tuple[EnvPool, set[int]]]:
    """A pool of one environment that has started a process, and that process."""
    before = children(os.getpid())
    with open_pool(EnvConfig(CREWED), 1) as pool:
        crew = crews(children(os.getpid()) - before)
        assert crew
        yield pool, crew


@pytest.mark.parametrize(("seed", "reason"), [(9002, "ended by SIGKILL"), (9004, "no answer within")])
def test_what_a_lost_environment_has_started_ends_too(
    crewed: tuple[EnvPool, set[int]], seed: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, crew = crewed
    pool.start(0, Start("left", seed))
    pool.wait([0])
    if seed == 9004:
        monkeypatch.setattr(pool, "_timeout", 1.0)
    pool.execute(0, np.zeros((3, 2), np.float32))
    lost = pool.wait([0])[0]
    assert isinstance(lost, EpisodeFailed)
    assert reason in lost.reason
    assert are_gone(crew)


_PARENT = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from pirl.envs import EnvConfig, Start
from pirl.envs.pool import open_pool

if __name__ == "__main__":
    pool = open_pool(EnvConfig("fakes:fakes/Crewed-v0"), 2)
    for slot, seed in ((0, 9011), (1, 9004)):
        pool.start(slot, Start("left", seed))
    pool.wait([0, 1])
    for slot in (0, 1):
        pool.execute(slot, np.zeros((3, 2), np.float32))
    pool.wait([0])
    print("stepping", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["by force", "without closing the pool"])
def test_workers_and_what_they_started_end_with_the_program_and_never_write_to_its_output(
    tmp_path: Path, end: str
) -> None:
    """One worker is at rest after it has talked, the other hangs in a step."""
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    command = [sys.executable, str(script), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stderr is not None
        said = parent.stdout.readline()
        workers = children(parent.pid)
        left = workers | crews(workers)
        assert len(workers) == 2
        assert len(left) >= 4
        # Ctrl-C in a terminal reaches every process of the group; that alone ends no worker.
        for worker in workers:
            os.kill(worker, signal.SIGINT)
        time.sleep(0.2)
        assert all(map(is_running, workers))
        if end == "by force":
            parent.kill()
        else:
            parent.stdin.close()
            assert parent.wait(60) == 0
        assert are_gone(left)
        assert said + parent.stdout.read() == b"stepping\n"
        chatter = parent.stderr.read()
    assert b"SIMULATOR CHATTER" in chatter
    assert b"NATIVE CHATTER" in chatter
