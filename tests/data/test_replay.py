"""The replay buffer: the same batches as a dataset of the same episodes, wherever they lie and whatever interrupts it."""

import dataclasses
import shutil
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trajectories
from pirl.data import (
    ChunkShape,
    Episode,
    PolicyIO,
    ReplayBuffer,
    Robot,
    gather_chunks,
)
from pirl.errors import ConfigError, DataError
from pirl.models import Tokenizer, get_model_config

SIZE = (14, 14)
_TINY = get_model_config("tiny")
MODEL = dataclasses.replace(_TINY, image_resolution=SIZE, vision=dataclasses.replace(_TINY.vision, patch_size=SIZE))
ROBOT = Robot(
    "arm",
    cameras={"base_0_rgb": "front", "left_wrist_0_rgb": "wrist"},
    state=("state",),
    actions=("action",),
    state_dim=3,
    action_dim=2,
)
SEEING = PolicyIO(ROBOT, MODEL, None, Tokenizer.for_model(MODEL))
SHAPE = ChunkShape(3, 4)
KINDS = ("memory", "disk", "disk only")
ON_DISK = KINDS[1:]


def open_buffer(kind, directory, capacity=1000, io=SEEING, **options):
    directory = None if kind == "memory" else directory
    return ReplayBuffer(capacity, io, directory=directory, in_memory=kind != "disk only", **options)


def make_episode(number, length=4, *, size=SIZE, **changes):
    """An episode whose states, actions and pictures all say which it is, and which frame."""
    rng = np.random.default_rng(number)
    frames = np.arange(length)
    states = np.stack([np.full(length, number), frames, rng.random(length)], axis=1).astype(np.float32)
    pictures = np.zeros((length, *size, 3), np.uint8)
    pictures[..., 0], pictures[..., 1] = number, frames[:, None, None]
    return Episode(
        **{
            "images": {"base_0_rgb": pictures, "left_wrist_0_rgb": pictures ^ 255},
            "states": states,
            "actions": -states[:, :2],
            "rewards": rng.random(length).astype(np.float32),
            "terminal": number % 2 == 0,
            "success": [True, False, None][number % 3],
            "prompt": ["open it", "close it"][number % 2],
            **changes,
        }
    )


def gather(buffer, step, count=6):
    return buffer.gather(step * count, count, SHAPE)


def assert_same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for (path, one), other in zip(jax.tree.leaves_with_path(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=jax.tree_util.keystr(path))
        assert one.dtype == other.dtype


def numbers(buffer):
    """Which episodes are held: those that come up."""
    if not len(buffer):
        return []
    batch = gather(buffer, 0, 15 * len(buffer))
    return sorted({int(state[0]) for state in batch.observations.state})


def files(directory):
    return sorted(path.name for path in directory.iterdir())


def as_episodes(source, images=None):
    """The episodes of trajectories, one by one."""
    for e, (start, end) in enumerate(zip(source.starts, source.ends, strict=True)):
        rows = slice(start, end)
        success = int(source.success[e])
        yield Episode(
            images={} if images is None else {slot: pictures[rows] for slot, pictures in images.items()},
            states=source.states[rows],
            actions=source.actions[rows],
            rewards=source.rewards[rows],
            terminal=bool(source.terminals[end - 1]),
            success=None if success < 0 else bool(success),
            prompt=source.prompts[source.prompt_of_row[start]],
        )


# --- the same batches as a dataset ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(source=trajectories.episodes(), horizon=st.integers(1, 9), extra=st.integers(0, 3), step=st.integers(0, 10**6))
def test_a_buffer_gives_the_chunks_of_a_dataset(source, horizon, extra, step):
    buffer = ReplayBuffer(1000, trajectories.IO, seed=7)
    for episode in as_episodes(source):
        buffer.add(episode)
    shape = ChunkShape(horizon, horizon + extra, discount=0.9)
    batch = buffer.gather(step, 20, shape)
    # Random states name their rows.
    rows = [int(np.flatnonzero((source.states == state[:3]).all(axis=1))[0]) for state in batch.observations.state]
    assert_same(batch, gather_chunks(source, np.array(rows), shape, trajectories.IO))


@pytest.mark.parametrize("kind", ["memory", "disk only"])
def test_pictures_and_prompts_are_those_of_the_frames(tmp_path, kind):
    """Pictures that have to be resized, too."""
    big, rng = (20, 28), np.random.default_rng(0)
    source = trajectories.build([4, 6, 3], terminal=[True, False, True])
    source = dataclasses.replace(source, prompts=["open it", "close it"], prompt_of_row=np.repeat([1, 0, 1], [4, 6, 3]))
    images = {slot: rng.integers(0, 256, (13, *big, 3), dtype=np.uint8) for slot in ROBOT.cameras}
    buffer = open_buffer(kind, tmp_path)
    for episode in as_episodes(source, images):
        buffer.add(episode)
    batch = gather(buffer, 0, 150)

    class Whole:
        def __init__(self, pictures):
            self.gather = lambda rows: pictures[rows]

    source = dataclasses.replace(source, frames={slot: Whole(pictures) for slot, pictures in images.items()})
    rows = [int(np.flatnonzero((source.states == state[:3]).all(axis=1))[0]) for state in batch.observations.state]
    assert set(rows) == set(range(13))
    assert_same(batch, gather_chunks(source, np.array(rows), SHAPE, SEEING))


def test_all_frames_are_drawn_alike(tmp_path):
    buffer = ReplayBuffer(1000, trajectories.IO)
    for episode in as_episodes(trajectories.build([1, 9, 40])):
        buffer.add(episode)
    draws = np.concatenate([buffer.gather(500 * step, 500, SHAPE).observations.state for step in range(20)])
    counts = np.unique(draws, axis=0, return_counts=True)[1]
    assert len(counts) == 50
    # Each is binomial(10000, 1/50), with a standard deviation of 14.
    assert np.all(np.abs(counts - 200) < 5 * 14)


def test_a_step_always_gives_the_same_samples_and_shares_make_up_the_batch(tmp_path):
    one, same, other = (ReplayBuffer(100, SEEING, seed=seed) for seed in (1, 1, 2))
    for buffer in (one, same, other):
        for number in range(4):
            buffer.add(make_episode(number))
    for step in range(3):
        assert_same(gather(one, step), gather(same, step))
        whole = gather(one, step, 8)
        shares = [one.gather(8 * step, 3, SHAPE), one.gather(8 * step + 3, 5, SHAPE)]
        assert_same(whole, jax.tree.map(lambda *parts: np.concatenate(parts), *shares))
    states = [gather(buffer, step).observations.state.tolist() for buffer, step in ((one, 0), (one, 1), (other, 0))]
    assert states[0] != states[1]
    assert states[0] != states[2]


# --- room -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "disk only"])
@settings(deadline=None, max_examples=8)
@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=12), capacity=st.integers(10, 25))
def test_the_oldest_make_room(tmp_path_factory, kind, lengths, capacity):
    directory = tmp_path_factory.mktemp("buffer")
    buffer = open_buffer(kind, directory, capacity)
    held: deque = deque()
    for number, length in enumerate(lengths):
        buffer.add(make_episode(number, length))
        held.append((number, length))
        while sum(length for _, length in held) > capacity:
            held.popleft()
        assert len(buffer) == sum(length for _, length in held) <= capacity
        assert buffer.num_episodes == len(held)
        assert numbers(buffer) == [number for number, _ in held]
        if kind != "memory":
            assert len(files(directory)) == 3 * len(held)


# --- restarts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "later"), [ON_DISK, ON_DISK[::-1]])
def test_memory_and_disk_hold_the_same_and_a_restart_changes_nothing(tmp_path, first, later):
    buffers = [open_buffer("memory", None, 20), open_buffer(first, tmp_path / "a" / "b", 20)]
    for number in range(9):
        for buffer in buffers:
            buffer.add(make_episode(number, 1 + number % 5, prompt=["", "öffne 打开", "do it"][number % 3]))
    buffers.append(open_buffer(later, tmp_path / "a" / "b", 20))
    for number in range(9, 13):
        for step in range(3):
            batches = [gather(buffer, step) for buffer in buffers]
            assert_same(batches[0], batches[1])
            assert_same(batches[0], batches[2])
        # The restarted buffer goes on where the other stopped.
        for buffer in (buffers[0], buffers[2]):
            buffer.add(make_episode(number))
        buffers[1] = open_buffer(first, tmp_path / "a" / "b", 20)


KILLED = """
import os, resource, signal, sys
from pathlib import Path
import numpy as np
sys.path[:0] = {paths!r}
import test_replay as t

root = Path({root!r})

def die(*_, **__):
    os._exit(0)

def before(owner, name, count):
    original, calls = getattr(owner, name), []
    def patched(*args, **options):
        calls.append(args)
        return die() if len(calls) == count else original(*args, **options)
    setattr(owner, name, patched)

def after(owner, name):
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: (original(*args, **options), die()))

def too_large():
    # The system kills whoever writes beyond the limit, in the middle of writing.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

POINTS = dict(
    images=too_large,
    columns=lambda: before(Path, "write_bytes", 1),
    naming=lambda: before(os, "replace", 1),
    named=lambda: after(os, "replace"),
    first_deletion=lambda: before(Path, "unlink", 2),
    amid_deletion=lambda: before(Path, "unlink", 3),
    last_deletion=lambda: before(Path, "unlink", 4),
)
for name, prepare in POINTS.items():
    buffer = t.open_buffer("disk only", root / name, 12)
    for number in range(3):
        buffer.add(t.make_episode(number))
    if not (child := os.fork()):
        prepare()
        buffer.add(t.make_episode(3))
        os._exit(3)  # it should not have come this far
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, (name, status)
    print(name)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Buffers of three episodes, full, each of whose processes was killed at another point of adding a fourth."""
    root = tmp_path_factory.mktemp("killed")
    program = KILLED.format(root=str(root), paths=[str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return root, done.stdout.split()


POINTS = ("images", "columns", "naming", "named", "first_deletion", "amid_deletion", "last_deletion")


def test_a_kill_while_an_episode_is_added_loses_at_most_that_episode(killed, tmp_path):
    root, survived = killed
    assert survived == list(POINTS)
    for point in POINTS:
        complete = point not in ("images", "columns", "naming")
        reference = open_buffer("disk only", tmp_path / point, 12)
        for number in range(4 if complete else 3):
            reference.add(make_episode(number))
        buffer = open_buffer("disk only", root / point, 12)
        for step in range(3):
            assert_same(gather(buffer, step), gather(reference, step))
        # Later episodes come as if nothing had been, and in the end nothing is left of it.
        for number in range(4 if complete else 3, 8):
            for each in (buffer, reference):
                each.add(make_episode(number))
            assert_same(gather(buffer, number), gather(reference, number))
        open_buffer("disk only", root / point, 12)
        assert files(root / point) == files(tmp_path / point)


# --- going back -----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=12)
@given(
    actions=st.lists(st.integers(1, 5) | st.just("state") | st.just("restart"), min_size=3, max_size=14),
    which=st.integers(1, 2),
    restarted=st.booleans(),
)
def test_either_of_the_two_last_states_can_always_be_gone_back_to(tmp_path_factory, actions, which, restarted):
    directory = tmp_path_factory.mktemp("buffer")
    buffer = open_buffer("disk only", directory, 9)
    states: list = []
    for number, action in enumerate(actions):
        if action == "state":
            states = [*states[-1:], (buffer.state(), numbers(buffer), len(buffer) and gather(buffer, 0))]
        elif action == "restart" and states:
            buffer = open_buffer("disk only", directory, 9)
            buffer.restore(states[-1][0])
        elif isinstance(action, int):
            buffer.add(make_episode(number, action))
    if len(states) < which:
        return
    buffer = open_buffer("disk only", directory, 9) if restarted else buffer
    state, held, batch = states[-which]
    buffer.restore(state)
    assert numbers(buffer) == held
    if held:
        assert_same(gather(buffer, 0), batch)
    buffer.state()
    buffer.state()
    assert len(files(directory)) == 3 * len(held), "what older states needed is gone when there are two newer ones"


# --- several threads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "disk only"])
def test_episodes_may_come_while_batches_are_gathered(tmp_path, kind):
    buffer = open_buffer(kind, tmp_path, 20)
    buffer.add(make_episode(0))
    errors, stop = [], threading.Event()

    def collect():
        try:
            for number in range(1, 60):
                buffer.add(make_episode(number, 1 + number % 7))
                if number % 10 == 0:
                    buffer.state()
        except BaseException as error:
            errors.append(error)
        finally:
            stop.set()

    thread = threading.Thread(target=collect)
    thread.start()
    batches = 0
    while not stop.is_set() or batches < 5:
        assert 0 < len(buffer) <= 20
        batch = gather(buffer, batches)
        for observation in (batch.observations, batch.next_observations):
            pictures = observation.images["base_0_rgb"][:, 0, 0, :2]
            np.testing.assert_array_equal(pictures, observation.state[:, :2])
        np.testing.assert_array_equal(batch.actions[:, 0, :2], -batch.observations.state[:, :2])
        batches += 1
    thread.join()
    assert errors == []
    assert numbers(buffer)[-1] == 59


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_buffer_that_cannot_work_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least one frame"):
        ReplayBuffer(0, SEEING)
    with pytest.raises(ConfigError, match="needs a directory"):
        ReplayBuffer(10, SEEING, in_memory=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=str(tmp_path / "file")):
        ReplayBuffer(10, SEEING, directory=tmp_path / "file")
    with pytest.raises(DataError, match="empty"):
        gather(ReplayBuffer(10, SEEING), 0)
    buffer = ReplayBuffer(10, SEEING)
    with pytest.raises(DataError, match="directory"):
        buffer.restore(buffer.state())


NAN = np.full((4, 3), np.nan, np.float32)


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.usefixtures("unchecked_signatures")
def test_an_episode_that_does_not_fit_is_refused_and_leaves_no_trace(tmp_path, kind):
    buffer = open_buffer(kind, tmp_path, 10)
    buffer.add(make_episode(0))
    before, there = gather(buffer, 0), files(tmp_path)
    for length, changes, message in (
        (11, {}, "11 frames does not fit a replay buffer of 10"),
        (0, {}, "no frames"),
        (4, {"images": {"base_0_rgb": np.zeros((4, 14, 14, 3), np.uint8)}}, "left_wrist_0_rgb"),
        (4, {"rewards": np.zeros(3, np.float32)}, "equally many"),
        (4, {"states": NAN}, "states .*finite"),
        (4, {"rewards": NAN[:, 0]}, "rewards .*finite"),
        (4, {"states": np.zeros((4, 5), np.float32)}, "states .*5.*3"),
        (4, {"actions": np.zeros((4, 1), np.float32)}, "actions .*1.*2"),
    ):
        with pytest.raises(DataError, match=message):
            buffer.add(make_episode(1, length, **changes))
    assert_same(gather(buffer, 0), before)
    assert files(tmp_path) == there


def test_a_disk_that_cannot_be_written_is_named_and_the_buffer_lives_on(tmp_path):
    buffer = open_buffer("disk", tmp_path / "buffer", 100)
    buffer.add(make_episode(0))
    before = gather(buffer, 0)
    shutil.rmtree(tmp_path / "buffer")
    with pytest.raises(DataError, match=str(tmp_path / "buffer")):
        buffer.add(make_episode(1))
    assert_same(gather(buffer, 0), before)


def damage_columns(directory):
    file = directory / "episode-000000001.npz"
    file.write_bytes(file.read_bytes()[:-40])


def no_columns(directory):
    (directory / "episode-000000001.npz").write_bytes(b"")


def cut_pictures(directory):
    file = directory / "episode-000000001.left_wrist_0_rgb.frames"
    file.write_bytes(file.read_bytes()[:-1])


def no_pictures(directory):
    (directory / "episode-000000001.base_0_rgb.frames").unlink()


def test_a_damaged_episode_is_named(tmp_path):
    for damage in (damage_columns, no_columns, cut_pictures, no_pictures):
        buffer = open_buffer("disk", tmp_path / damage.__name__)
        for number in range(3):
            buffer.add(make_episode(number))
        damage(tmp_path / damage.__name__)
        for kind in ON_DISK:
            with pytest.raises(DataError, match="episode-000000001"):
                open_buffer(kind, tmp_path / damage.__name__)


def test_pictures_that_vanish_while_in_use_are_named(tmp_path):
    buffer = open_buffer("disk only", tmp_path)
    for number in range(3):
        buffer.add(make_episode(number))
    cut_pictures(tmp_path)
    with pytest.raises(DataError, match="episode-000000001"):
        gather(buffer, 0, 200)


def test_a_buffer_of_another_robot_or_model_is_refused(tmp_path):
    """Images of another size would be read at the wrong offsets, and come out as others."""
    open_buffer("disk only", tmp_path).add(make_episode(0))
    for model, robot, message in (
        ({"image_resolution": (28, 28)}, {}, "28×28"),
        ({}, {"state_dim": 4}, "states .*3.*4"),
        ({}, {"action_dim": 1}, "actions .*2.*1"),
    ):
        config = dataclasses.replace(MODEL, **model)
        io = PolicyIO(dataclasses.replace(ROBOT, **robot), config, None, Tokenizer.for_model(config))
        with pytest.raises(DataError, match=message) as caught:
            open_buffer("disk only", tmp_path, io=io)
        assert str(tmp_path) in str(caught.value)


def test_files_of_others_are_left_alone(tmp_path):
    for name in ("notes.txt", "episode-best.npz", "episode-list.frames"):
        (tmp_path / name).write_text("mine")
    buffer = open_buffer("disk", tmp_path, 8)
    for number in range(5):
        buffer.add(make_episode(number))
    buffer.restore(buffer.state())
    assert numbers(open_buffer("disk", tmp_path, 8)) == [3, 4]
    assert {"notes.txt", "episode-best.npz", "episode-list.frames"} <= set(files(tmp_path))
