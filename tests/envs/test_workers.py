"""The pool of processes: what each mishap costs, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from fakes import CREWED, MISHAPS, POINT, UNMAKEABLE, LocalPool, StraightPlanner
from pirl.envs import (
    EnvConfig,
    EnvPool,
    ExpertConfig,
    Lost,
    Segment,
    Start,
    Started,
    make_env,
    make_starts,
    open_pool,
    roll_out,
)
from pirl.envs.workers import ProcessPool
from pirl.errors import ConfigError, EnvError

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
def pool() -> Iterator[ProcessPool]:
    with open_pool(EnvConfig(POINT), 2) as pool:
        assert isinstance(pool, ProcessPool)
        yield pool


def test_answers_are_those_of_the_environment_itself(pool: ProcessPool) -> None:
    env = make_env(EnvConfig(POINT))
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 2)).astype(np.float32)
    pool.start(1, Start("left", 3))
    started = pool.wait([1])[1]
    assert isinstance(started, Started)
    observation, info = env.reset(seed=3, options={"task": "left"})
    assert (started.prompt, started.task) == (info["prompt"], "left")
    np.testing.assert_array_equal(started.observation["image"], observation["image"])
    pool.execute(1, actions)
    segment = pool.wait([1])[1]
    assert isinstance(segment, Segment)
    for index, action in enumerate(actions[: len(segment.rewards)]):
        observation, reward, terminated, _, _ = env.step(action)
        np.testing.assert_array_equal(segment.observations["state"][index], observation["state"])
        np.testing.assert_array_equal(segment.observations["image"][index], observation["image"])
        assert segment.rewards[index] == reward
    assert segment.terminated == terminated
    np.testing.assert_array_equal(segment.actions, actions[: len(segment.rewards)])


def test_an_episode_goes_on_from_a_state_of_another_process(pool: ProcessPool) -> None:
    state = {"position": np.array([0.4, -0.3]), "steps": np.array(5)}
    pool.start(0, Start("right", 3, state))
    started = pool.wait([0])[0]
    assert isinstance(started, Started)
    np.testing.assert_array_equal(started.observation["state"], np.array([0.4, -0.3], np.float32))
    assert started.state["steps"] == 5


def test_the_expert_lives_in_the_worker_and_stops_with_the_episode(pool: ProcessPool) -> None:
    pool.start(0, Start("left", 5), ExpertConfig())
    pool.wait([0])
    pool.execute(0, 100)
    segment = pool.wait([0])[0]
    assert isinstance(segment, Segment)
    assert segment.success
    assert segment.terminated
    assert 2 <= len(segment.actions) < 12


def test_every_mishap_costs_one_episode_and_says_what_it_was(pool: ProcessPool) -> None:
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
    rollouts = {r.start.seed: r for r in roll_out(pool, StraightPlanner(), starts, execute_steps=1)}
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


def test_a_hang_costs_its_episode_and_no_other(pool: ProcessPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.start(0, Start("left", 9004))
    pool.wait([0])
    with monkeypatch.context() as impatient:  # only here: elsewhere a busy machine should lose no episode
        impatient.setattr(pool, "_timeout", 1.0)
        pool.execute(0, np.zeros((3, 2), np.float32))
        assert pool.wait([0])[0] == Lost("the environment hangs: no answer within 1 s")
    starts = [Start("left", seed) for seed in (1, 2, 3)]
    assert all(rollout.success for rollout in roll_out(pool, StraightPlanner(), starts, execute_steps=1))


def test_processes_change_neither_the_episodes_nor_their_order(pool: ProcessPool) -> None:
    """Whoever answers first: slots at rest, slots in a group of their own, and fewer slots than episodes."""
    starts = make_starts(pool.description, 7, 4)
    with LocalPool(pool.size) as local:
        one, other = (
            list(roll_out(each, StraightPlanner(), starts, execute_steps=4, keep_images=True, groups=2))
            for each in (pool, local)
        )
    assert [rollout.index for rollout in one] == [rollout.index for rollout in other]
    for ours, theirs in zip(one, other, strict=True):
        assert (ours.success, ours.truncated, ours.prompt) == (theirs.success, theirs.truncated, theirs.prompt)
        np.testing.assert_array_equal(ours.actions, theirs.actions)
        for name in ("image", "state"):
            np.testing.assert_array_equal(ours.observations[name], theirs.observations[name])


def test_a_worker_that_dies_at_rest_costs_no_episode(pool: ProcessPool) -> None:
    pool.start(0, Start("left", 1))
    pool.start(1, Start("left", 1))
    pool.wait([0, 1])
    for worker in children(os.getpid()):
        os.kill(worker, signal.SIGKILL)
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    pool.start(0, Start("left", 1))
    assert isinstance(pool.wait([0])[0], Started)


def test_a_start_forgets_what_was_queued_before(pool: ProcessPool) -> None:
    pool.start(0, Start("left", 1))
    pool.wait([0])
    pool.execute(0, np.zeros((3, 2), np.float32))
    pool.start(0, Start("right", 2))
    started = pool.wait([0])[0]
    assert isinstance(started, Started)
    assert started.task == "right"
    # Also where what was queued takes the worker with it.
    pool.start(0, Start("left", 9001))
    pool.wait([0])
    pool.execute(0, np.zeros((3, 2), np.float32))
    pool.start(0, Start("right", 2))
    assert isinstance(pool.wait([0])[0], Started)


def test_what_is_asked_wrongly_is_no_lost_episode(pool: ProcessPool) -> None:
    pool.start(0, Start("up", 1))
    with pytest.raises(ConfigError, match="point has no task 'up'"):
        pool.wait([0])
    with pytest.raises(ConfigError, match="the point was misconfigured"):
        list(roll_out(pool, StraightPlanner(), [Start("left", 9010)], execute_steps=3))
    with pytest.raises(ValueError, match="slot 0 has no episode"):
        pool.execute(0, 1)


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


def test_an_environment_may_start_processes_which_end_with_it(crewed: tuple[EnvPool, set[int]]) -> None:
    pool, crew = crewed
    pool.start(0, Start("left", 1))
    assert isinstance(pool.wait([0])[0], Started)
    pool.close()
    assert are_gone(crew)


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
    assert isinstance(lost, Lost)
    assert reason in lost.reason
    assert are_gone(crew)


_CREWED_PARENT = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from pirl.envs import EnvConfig, Start, open_pool

if __name__ == "__main__":
    pool = open_pool(EnvConfig("fakes:fakes/Crewed-v0"), 1)
    pool.start(0, Start("left", 9004))
    pool.wait([0])
    pool.execute(0, np.zeros((3, 2), np.float32))
    print("hanging", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["by force", "without closing the pool"])
def test_what_environments_have_started_ends_with_the_program(tmp_path: Path, end: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_CREWED_PARENT)
    command = [sys.executable, str(script), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"hanging\n"
        workers = children(parent.pid)
        left = workers | crews(workers)
        assert len(left) >= 2
        if end == "by force":
            parent.kill()
        else:
            parent.stdin.close()
            assert parent.wait(60) == 0
        assert are_gone(left)


_PARENT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pirl.envs import EnvConfig, Start, open_pool
import numpy as np

if __name__ == "__main__":
    pool = open_pool(EnvConfig("fakes:fakes/Point-v0"), 2)
    for slot, seed in ((0, 9011), (1, 9004)):
        pool.start(slot, Start("left", seed))
    pool.wait([0, 1])
    for slot in (0, 1):
        pool.execute(slot, np.zeros((3, 2), np.float32))
    pool.wait([0])
    print("stepping", flush=True)
    time.sleep(600)
"""


def test_workers_end_with_a_killed_parent_and_never_write_to_its_output(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    command = [sys.executable, str(script), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        # One worker is at rest after it has talked, the other hangs in a step.
        said = parent.stdout.readline()
        workers = children(parent.pid)
        assert len(workers) == 2
        # Ctrl-C in a terminal reaches every process of the group; that alone ends no worker.
        for worker in workers:
            os.kill(worker, signal.SIGINT)
        time.sleep(0.2)
        assert all(map(is_running, workers))
        parent.kill()
        assert are_gone(workers)
        assert said + parent.stdout.read() == b"stepping\n"
        chatter = parent.stderr.read()
    assert b"SIMULATOR CHATTER" in chatter
    assert b"NATIVE CHATTER" in chatter
