"""The pool of Ray actors, on a real cluster: episodes are those of any pool, and what each mishap costs."""

import importlib.util
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from fakes import POINT, UNMAKEABLE, LocalPool, Point, StraightPolicy
from pirl.envs import EnvConfig, Start, ray_pool
from pirl.envs.pool import ChunkResult, EnvPool, EpisodeFailed, ResetResult, open_pool
from pirl.envs.ray_pool import RayPool
from pirl.envs.rollout import make_starts, roll_out
from pirl.errors import ConfigError, EnvError

# Long enough for Ray on a machine that is busy with other tests; whoever means to wait for it makes it shorter.
TIMEOUT = 60.0
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pirl[ray]")
WRITING = "test_ray_pool:test_ray_pool/Writing-v0"
# Starting a cluster takes its time, so whatever needs one is slow.
on_a_cluster = [needs_ray, pytest.mark.slow]


class Writing(Point):
    """A point that writes into what it is given, as simulators do."""

    def step(self, action: np.ndarray) -> Any:
        np.clip(action, -0.5, 0.5, out=action)
        return super().step(action)


if "test_ray_pool/Writing-v0" not in gymnasium.registry:
    gymnasium.register("test_ray_pool/Writing-v0", "test_ray_pool:Writing")


def parents_and_titles() -> dict[int, tuple[int, bytes]]:
    """Of every process that runs."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status, title = (entry / "stat").read_text(), (entry / "cmdline").read_bytes()
            except OSError:
                continue
            state, parent = status.rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                found[int(entry.name)] = int(parent), title
    return found


def descendants(process: int) -> set[int]:
    parents = {child: parent for child, (parent, _) in parents_and_titles().items()}
    found, new = set[int](), {process}
    while new := {child for child, parent in parents.items() if parent in new}:
        found |= new
    return found


def actors(driver: int | None = None) -> set[int]:
    """Processes of the cluster of a process, this one unless told, that host an environment."""
    titles = parents_and_titles()
    return {
        each for each in descendants(driver or os.getpid()) if titles.get(each, (0, b""))[1].startswith(b"ray::_Host")
    }


def soon(condition: Callable[[], Any], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Four CPUs, whatever this machine has, and a token for them that is not written to the user's home."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_raylet_start_wait_time_s", "120")  # the machine may be busy with other tests
        patch.delenv("RAY_ADDRESS", raising=False)
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield ray
        ray.shutdown()


@pytest.fixture(scope="module")
def pool(cluster: Any) -> Iterator[EnvPool]:
    with open_pool(EnvConfig(POINT), 2, timeout=TIMEOUT, backend="ray") as pool:
        assert isinstance(pool, RayPool)
        assert isinstance(pool, EnvPool)
        yield pool


def test_without_ray_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"ray is not installed.*pip install 'pirl\[ray\]'"):
        open_pool(EnvConfig(POINT), 1, backend="ray")


def test_an_address_without_ray_is_refused_rather_than_ignored() -> None:
    with pytest.raises(ConfigError, match="10.0.0.1:6379 .* is for backend = ray; it is local"):
        open_pool(EnvConfig(POINT), 1, ray_address="10.0.0.1:6379")


@needs_ray
@pytest.mark.parametrize("address", ["nowhere", "host:", ":6379", "host:port"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=f"is host:port, .*got '{address}'"):
        open_pool(EnvConfig(POINT), 1, backend="ray", ray_address=address)


@needs_ray
@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_where_nobody_answers_is_told_soon(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"{prefix}127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"nobody answers at {address}"):
        open_pool(EnvConfig(POINT), 1, backend="ray")


class TestOnACluster:
    pytestmark = on_a_cluster

    def test_episodes_are_bit_for_bit_those_of_one_process(self, pool: RayPool) -> None:
        starts = make_starts(pool.description, 7, 4)
        with LocalPool(2) as local:
            assert pool.description == local.description
            runs = [
                list(roll_out(each, StraightPolicy(), starts, execute_steps=4, keep_images=True, groups=2))
                for each in (pool, local)
            ]
        for one, other in zip(*runs, strict=True):
            assert (one.index, one.prompt, one.success, one.lost) == (
                *(other.index, other.prompt, other.success, other.lost),
            )
            np.testing.assert_array_equal(one.actions, other.actions)
            for name in ("image", "state"):
                assert one.observations[name].dtype == other.observations[name].dtype
                np.testing.assert_array_equal(one.observations[name], other.observations[name])

    def test_arrays_may_be_written_to_on_both_sides(self, pool: RayPool) -> None:
        """Ray's own are read-only; and pictures that are kept must not stay in its shared memory."""
        pool.start(0, Start("left", 3))
        started = pool.wait([0])[0]
        pool.execute(0, np.zeros((2, 2), np.float32))
        segment = pool.wait([0])[0]
        assert isinstance(started, ResetResult)
        assert isinstance(segment, ChunkResult)
        received = [*started.observation.values(), *segment.observations.values()]
        for array in [*received, segment.actions, segment.rewards]:
            assert array.flags.writeable
            assert array.flags.owndata
        with open_pool(EnvConfig(WRITING), 1, backend="ray") as writing:
            writing.start(0, Start("left", 3))
            writing.wait([0])
            writing.execute(0, np.ones((1, 2), np.float32))
            segment = writing.wait([0])[0]
        assert isinstance(segment, ChunkResult)
        np.testing.assert_array_equal(segment.actions, [[0.5, 0.5]])

    def test_a_crash_and_an_exception_cost_one_episode_each_and_say_what_it_was(self, pool: RayPool) -> None:
        expected = {
            9002: "the environment's actor on .+ ended: its worker process has died",
            9005: "^ZeroDivisionError: the plane is torn$",
        }
        starts = [Start("left", seed) for seed in (1, *expected, 2)]
        for rollout in roll_out(pool, StraightPolicy(), starts, execute_steps=1):
            if rollout.start.seed in expected:
                assert rollout.lost is not None
                assert re.search(expected[rollout.start.seed], rollout.lost)
                assert len(rollout) == 1, "what happened before is kept"
            else:
                assert rollout.success

    def test_a_hang_costs_its_episode_alone_and_no_more_than_the_timeout(
        self, pool: RayPool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for slot, seed in ((0, 9004), (1, 1)):
            pool.start(slot, Start("left", seed))
        pool.wait([0, 1])
        pool.execute(1, np.zeros((3, 2), np.float32))
        monkeypatch.setattr(pool, "_timeout", 3.0)
        began = time.monotonic()
        pool.execute(0, np.zeros((3, 2), np.float32))
        answers = pool.wait([0, 1])
        assert 3.0 <= time.monotonic() - began < TIMEOUT
        assert isinstance(answers[0], EpisodeFailed)
        assert re.search("^the environment on .+ hangs: no answer within 3 s$", answers[0].reason)
        assert isinstance(answers[1], ChunkResult)
        monkeypatch.undo()
        pool.start(0, Start("left", 1))
        assert isinstance(pool.wait([0])[0], ResetResult)

    def test_an_actor_that_dies_at_rest_costs_no_episode(self, pool: RayPool) -> None:
        pool.start(0, Start("left", 1))
        pool.start(1, Start("left", 1))
        pool.wait([0, 1])
        killed = actors()
        assert len(killed) == 2
        for process in killed:
            os.kill(process, signal.SIGKILL)
        assert soon(lambda: not killed & parents_and_titles().keys())
        pool.start(0, Start("left", 1))
        assert isinstance(pool.wait([0])[0], ResetResult)

    def test_an_environment_that_cannot_be_made_says_why(self, cluster: Any) -> None:
        before = actors()
        with pytest.raises(ConfigError, match=r"^the point is shy: pip install 'pirl\[courage\]'\.$"):
            open_pool(EnvConfig(POINT, options={"shy": "yes"}), 1, backend="ray")
        with pytest.raises(EnvError, match="could not be made: the environment's actor ended: its worker process"):
            open_pool(EnvConfig(UNMAKEABLE), 1, backend="ray")
        assert soon(lambda: actors() <= before)

    def test_a_cluster_too_small_says_how_many_fit(self, pool: RayPool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ray_pool, "_PLACING_TIMEOUT", 1.0)
        with pytest.raises(ConfigError, match="9 environments need a CPU each; of the 4 of the Ray cluster 2 are free"):
            open_pool(EnvConfig(POINT), 9, backend="ray")
        # What was asked for in vain is not in the way of what fits.
        open_pool(EnvConfig(POINT), 2, backend="ray").close()

    def test_nothing_runs_after_close_not_even_a_hung_step(self, cluster: Any) -> None:
        before = actors()
        pool = open_pool(EnvConfig(POINT), 2, backend="ray")
        pool.start(0, Start("left", 9004))
        pool.wait([0])
        pool.execute(0, np.zeros((3, 2), np.float32))
        assert len(actors() - before) == 2
        pool.close()
        assert soon(lambda: actors() <= before)
        pool.close()  # a second time does no harm
        assert cluster.is_initialized()  # whoever has started it may go on


_PARENT = """
import signal, sys, time
sys.path.insert(0, sys.argv[1])
from pirl.envs import EnvConfig, Start
from pirl.envs.pool import open_pool
import numpy as np

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, when a shell runs the tests in the background
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open_pool(EnvConfig("fakes:fakes/Point-v0"), 3, backend="ray") as pool:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        for slot, seed in enumerate((9011, 9004, 9002)):
            pool.start(slot, Start("left", seed))
        pool.wait([0, 1, 2])
        for slot in (0, 1, 2):
            pool.execute(slot, np.zeros((3, 2), np.float32))
        pool.wait([0, 2])
        print("stepping", flush=True)
        time.sleep(600)
"""


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_cluster_of_our_own_is_quiet_and_ends_with_us(end: signal.Signals, tmp_path: Path) -> None:
    """However we end: Ctrl-C, which reaches the whole group of processes, or by force."""
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    environment = os.environ | {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_raylet_start_wait_time_s": "120"}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, str(script), str(Path(__file__).parent)]
    # Files, not pipes: Ray's helpers hold these open for as long as they live.
    output, complaints = tmp_path / "stdout", tmp_path / "stderr"
    with (
        output.open("wb") as stdout,
        complaints.open("wb") as stderr,
        subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment, start_new_session=True) as parent,
    ):
        try:
            assert soon(lambda: b"stepping\n" in output.read_bytes(), 180), complaints.read_text()
            started = descendants(parent.pid)
            hosts = actors(parent.pid)
            assert len(hosts) == 2
            time.sleep(1)  # for what Ray has to say of the one that crashed
            (os.killpg if end == signal.SIGINT else os.kill)(parent.pid, end)
            # When nobody could tell them, Ray's own helpers take a minute to notice.
            ending = started if end == signal.SIGINT else hosts
            assert soon(lambda: not ending & parents_and_titles().keys(), 20)
        finally:
            parent.kill()
    assert b"CHATTER" not in output.read_bytes()
    last = (complaints.read_text().strip().splitlines() or [""])[-1]
    assert last == ("KeyboardInterrupt" if end == signal.SIGINT else "")
