"""The frame cache: decoded once, whatever interrupts it, and the same pixels afterwards."""

import dataclasses
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pirl.data import frame_store
from pirl.data.frame_cache import delete_frame_cache, list_frame_caches, open_frames
from pirl.data.frame_store import FrameCacheConfig, locked
from pirl.data.lerobot.reader import Dataset
from pirl.data.transforms import resize_with_pad
from pirl.errors import DataError

LENGTHS = [3, 7, 1, 5, 4, 6]


@dataclasses.dataclass
class FakeSource(Dataset):
    """Noise that depends on the bytes of one file for each camera. Every decoded episode is noted in a log."""

    root: Path
    log: Path
    lengths: np.ndarray = None
    size: tuple[int, int] = (24, 32)
    name: str = "me/fake"
    starts: tuple = ((0, 0),)

    @property
    def episode_ids(self):
        return 10 * np.arange(len(self.lengths))

    def source_files(self, camera):
        return [self.root / f"{'shared' if camera.startswith('shared') else camera.replace('/', '_')}.bin"]

    def offsets(self, camera):
        return list(self.starts)

    def pixels(self, camera, episode):
        seed = [*self.source_files(camera)[0].read_bytes(), *camera.encode(), episode]
        return np.random.default_rng(seed).integers(0, 256, (self.lengths[episode], *self.size, 3), np.uint8)

    def decode(self, camera, episode):
        with self.log.open("a") as log:
            log.write(f"{camera} {episode}\n")
        yield from self.pixels(camera, episode)

    def everything(self, camera, height=24, width=32):
        frames = np.concatenate([self.pixels(camera, episode) for episode in range(len(self.lengths))])
        return resize_with_pad(frames, height, width)

    @property
    def decoded(self):
        return Counter(self.log.read_text().splitlines() if self.log.exists() else [])


def make_source(root, cameras=("top", "wrist"), **options):
    (root / "dataset").mkdir(parents=True, exist_ok=True)
    source = FakeSource(root / "dataset", root / "decoded.log", np.asarray(LENGTHS), **options)
    for camera in cameras:
        file = source.source_files(camera)[0]
        if not file.exists():
            file.write_bytes(f"contents of {camera}".encode())
    return source


def config(root, compression="none", **options):
    return FrameCacheConfig(24, 32, compression, root / "cache", **options)


def read_all(frames):
    return frames.gather(np.arange(frames.shape[0]))


def entry_directories(root):
    return sorted(path for path in (root / "cache").iterdir() if path.is_dir())


def run_elsewhere(root, statements):
    """Start another process, with `source` and `config` as here."""
    program = f"""
import logging, os, sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_frame_cache import *
root = Path({str(root)!r})
source = make_source(root)
decode = source.decode
{statements}
"""
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until_stopped(frame, ran_out):
    """Frames without end, for whoever should stop asking; one that does not is noted rather than waited for for ever."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        yield frame
    ran_out.append(True)


def wait_until(condition, seconds=300.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


# --- the same pixels, decoded once ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compression", "height", "width"), [("none", 24, 32), ("none", 16, 16), ("png", 48, 40)])
def test_every_frame_is_kept_as_it_was_and_decoded_once(tmp_path, compression, height, width):
    source = make_source(tmp_path)
    for _ in range(2):
        frames = open_frames(source, ["wrist", "top"], FrameCacheConfig(height, width, compression, tmp_path / "cache"))
        assert list(frames) == ["wrist", "top"]
        for camera, opened in frames.items():
            assert opened.shape == (sum(LENGTHS), height, width, 3)
            np.testing.assert_array_equal(read_all(opened), source.everything(camera, height, width))
    assert source.decoded == Counter(f"{camera} {episode}" for camera in ("top", "wrist") for episode in range(6))


@pytest.fixture(scope="module", params=["none", "png", "jpeg"])
def opened(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("opened")
    frames = open_frames(make_source(root), ["top"], config(root, request.param, workers=2))["top"]
    return frames, np.concatenate([frames.gather(np.array([row])) for row in range(frames.shape[0])])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.integers(0, sum(LENGTHS) - 1), max_size=40), dtype=st.sampled_from([np.int32, np.int64]))
def test_any_rows_in_any_order_are_gathered_as_from_an_array(opened, rows, dtype):
    frames, array = opened
    for _ in range(2):
        out = frames.gather(np.asarray(rows, dtype))
        np.testing.assert_array_equal(out, array[np.asarray(rows, dtype)])
        assert not len(rows) or out.ctypes.data % 64 == 0
        frames.release()
    with pytest.raises(IndexError, match=f"there are {sum(LENGTHS)} frames"):
        frames.gather(np.asarray([*rows, sum(LENGTHS)], dtype))


# --- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "png"])
def test_a_killed_build_goes_on_where_it_was(tmp_path, compression):
    dying = f"""
def dies_in_episode_3(camera, episode):
    for frame in decode(camera, episode):
        yield frame
        if episode == 3:
            os._exit(9)
source.decode = dies_in_episode_3
open_frames(source, ["top"], config(root, {compression!r}, workers=1))
"""
    source = make_source(tmp_path)
    assert run_elsewhere(tmp_path, dying).wait(300) == 9
    assert source.decoded == Counter(f"top {episode}" for episode in range(4))
    frames = open_frames(source, ["top"], config(tmp_path, compression))["top"]
    assert source.decoded == Counter({f"top {episode}": 1 + (episode == 3) for episode in range(6)})
    np.testing.assert_array_equal(read_all(frames), source.everything("top"))


def test_control_c_stops_at_once_and_loses_nothing_finished(tmp_path, request):
    # A shell that starts tests in the background has them ignore it.
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    source = make_source(tmp_path)
    decode, ran_out = source.decode, []

    def interrupting(camera, episode):
        yield from decode(camera, episode)
        if episode == 2:
            os.kill(os.getpid(), signal.SIGINT)
            yield from until_stopped(np.zeros((24, 32, 3), np.uint8), ran_out)

    source.decode = interrupting
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            open_frames(source, ["top"], config(tmp_path, workers=1))
    assert not ran_out
    for thread in threading.enumerate():
        if thread.name.startswith("frame-cache"):
            thread.join(timeout=5)  # hit while it was started, it is joined by nobody; it ends at its next frame
            assert not thread.is_alive()
    assert source.decoded == {"top 0": 1, "top 1": 1, "top 2": 2}


def test_two_processes_decode_each_episode_once_between_them(tmp_path):
    use = """
(root / f"ready-{{os.getpid()}}").touch()
wait_until(lambda: len(list(root.glob("ready-*"))) == 2)
frames = open_frames(source, {cameras}, config(root))
print(all((read_all(frames[camera]) == source.everything(camera)).all() for camera in frames))
"""
    source = make_source(tmp_path)
    processes = [
        run_elsewhere(tmp_path, use.format(cameras=cameras)) for cameras in (["top", "wrist"], ["wrist", "top"])
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [output for output, _ in outputs] == ["True\n", "True\n"], outputs
    assert source.decoded == Counter(f"{camera} {episode}" for camera in ("top", "wrist") for episode in range(6))


def test_whoever_waits_for_a_build_takes_over_when_it_is_killed(tmp_path, caplog):
    build = """
def stuck_in_episode_2(camera, episode):
    yield from decode(camera, episode)
    if episode == 2:
        threading.Event().wait()
source.decode = stuck_in_episode_2
open_frames(source, ["top"], config(root, workers=1))
"""
    source = make_source(tmp_path)
    builder = run_elsewhere(tmp_path, build)
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(1) as pool:
        try:
            wait_until(lambda: "top 2" in source.decoded)
            waiting = pool.submit(open_frames, source, ["top"], config(tmp_path))
            wait_until(lambda: "another process is building" in caplog.text)
        finally:
            builder.kill()
            builder.communicate()
    np.testing.assert_array_equal(read_all(waiting.result()["top"]), source.everything("top"))
    # All once, and again the one that was under way.
    assert source.decoded == Counter({f"top {episode}": 1 + (episode == 2) for episode in range(6)})


def test_a_lock_on_a_deleted_entry_is_worth_nothing_and_is_taken_anew(tmp_path, caplog):
    got_it, let_go = threading.Event(), threading.Event()

    def wait_for_it():
        with locked(tmp_path / "entry"):
            got_it.set()
            let_go.wait()

    waiting = threading.Thread(target=wait_for_it)
    with caplog.at_level(logging.INFO), locked(tmp_path / "entry"):
        waiting.start()
        wait_until(lambda: "waiting for it" in caplog.text)
        shutil.rmtree(tmp_path / "entry")
    got_it.wait()
    try:
        with pytest.raises(DataError, match="is being built"), locked(tmp_path / "entry", wait=False):
            pass
    finally:
        let_go.set()
        waiting.join()


# --- content ----------------------------------------------------------------------------------------------------------


def test_a_changed_byte_makes_another_entry_even_under_an_old_time(tmp_path):
    source = make_source(tmp_path)
    open_frames(source, ["top"], config(tmp_path))
    file = source.source_files("top")[0]
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    frames = open_frames(source, ["top"], config(tmp_path))["top"]
    assert len(entry_directories(tmp_path)) == 2
    np.testing.assert_array_equal(read_all(frames), source.everything("top"))


def test_whatever_changes_the_frames_makes_another_entry(tmp_path):
    source = make_source(tmp_path, cameras=("shared left", "shared right"))
    for camera, height, width, compression in [
        ("shared left", 24, 32, "none"),
        ("shared right", 24, 32, "none"),
        ("shared left", 24, 16, "none"),
        ("shared left", 12, 32, "none"),
        ("shared left", 24, 32, "png"),
    ]:
        frames = open_frames(source, [camera], FrameCacheConfig(height, width, compression, tmp_path / "cache"))
        np.testing.assert_array_equal(read_all(frames[camera]), source.everything(camera, height, width))
    source.lengths = source.lengths[::-1].copy()
    open_frames(source, ["shared left"], config(tmp_path))
    source.starts = ((0, 1),)
    open_frames(source, ["shared left"], config(tmp_path))
    assert len(entry_directories(tmp_path)) == 7


def test_a_moved_or_copied_dataset_is_recognized(tmp_path):
    source = make_source(tmp_path)
    open_frames(source, ["top"], config(tmp_path))
    before = source.decoded
    moved = dataclasses.replace(source, root=tmp_path / "elsewhere", name="other/name")
    shutil.copytree(source.root, moved.root)
    shutil.rmtree(source.root)
    frames = open_frames(moved, ["top"], config(tmp_path))["top"]
    np.testing.assert_array_equal(read_all(frames), moved.everything("top"))
    assert moved.decoded == before


def test_a_dataset_that_changes_under_the_build_is_not_kept(tmp_path):
    source = make_source(tmp_path)
    decode = source.decode

    def changing(camera, episode):
        yield from decode(camera, episode)
        if episode == 5:
            source.source_files(camera)[0].write_bytes(b"other content")

    source.decode = changing
    with pytest.raises(DataError, match="me/fake changed while camera 'top' was decoded"):
        open_frames(source, ["top"], config(tmp_path, workers=1))
    assert entry_directories(tmp_path) == []


# --- damage and deletion ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compression", "file", "change"),
    [
        ("none", "frames.bin", -1),
        ("none", "index.bin", -1),
        ("none", "about.json", -1),
        ("png", "frames.bin", -1),
        ("png", "index.bin", -1),
    ],
)
def test_a_file_of_the_wrong_size_is_replaced(tmp_path, compression, file, change):
    source = make_source(tmp_path)
    open_frames(source, ["top"], config(tmp_path, compression))
    damaged = entry_directories(tmp_path)[0] / file
    with damaged.open("rb") as held:
        os.truncate(damaged, damaged.stat().st_size + change)
        frames = open_frames(source, ["top"], config(tmp_path, compression))["top"]
        np.testing.assert_array_equal(read_all(frames), source.everything("top"))
        # Written over, it would change under those who read it.
        assert not os.path.samestat(os.fstat(held.fileno()), damaged.stat())


def test_a_damaged_image_is_named(tmp_path):
    frames = open_frames(make_source(tmp_path), ["top"], config(tmp_path, "png"))["top"]
    with (entry_directories(tmp_path)[0] / "frames.bin").open("r+b") as file:
        file.write(b"not an image")
    row = next(row for row, (offset, _) in enumerate(frames._index.tolist()) if offset == 0)
    with pytest.raises(DataError, match=f"frame {row} in the frame cache is damaged.*Delete"):
        read_all(frames)


@pytest.mark.parametrize("compression", ["none", "png"])
def test_deleting_the_cache_leaves_readers_alone_and_it_is_built_again(tmp_path, compression):
    source = make_source(tmp_path)
    reading = open_frames(source, ["top"], config(tmp_path, compression))["top"]
    shutil.rmtree(tmp_path / "cache")
    again = open_frames(source, ["top"], config(tmp_path, compression))["top"]
    assert source.decoded["top 0"] == 2
    for frames in (reading, again):
        np.testing.assert_array_equal(read_all(frames), source.everything("top"))


def test_a_cache_deleted_while_it_is_built_is_not_taken_for_complete(tmp_path):
    """Above all not if another process has begun to build it anew: its frames have the right size, but are still zero."""
    source = make_source(tmp_path)
    decode = source.decode

    def deleting(camera, episode):
        yield from decode(camera, episode)
        if episode == 4:
            (directory,) = entry_directories(tmp_path)
            shutil.rmtree(tmp_path / "cache")
            directory.mkdir(parents=True)
            with frame_store.CacheEntry(source, "top", config(tmp_path)).writing():
                pass

    source.decode = deleting
    with pytest.raises(DataError, match="deleted while it was built"):
        open_frames(source, ["top"], config(tmp_path, workers=1))
    source.decode = decode
    frames = open_frames(source, ["top"], config(tmp_path))["top"]
    np.testing.assert_array_equal(read_all(frames), source.everything("top"))


def test_entries_are_listed_by_last_use_and_deleted(tmp_path):
    source = make_source(tmp_path)
    reading = open_frames(source, ["top", "wrist"], config(tmp_path))
    (tmp_path / "cache" / "something else").mkdir()
    (tmp_path / "cache" / ("link-" + "0" * 32)).symlink_to(tmp_path / "dataset")
    for directory in entry_directories(tmp_path)[-2:]:
        os.utime(directory / "about.json", (1e9, 1e9))
    open_frames(source, ["top"], config(tmp_path))  # using an entry is noted
    entries = list_frame_caches(tmp_path / "cache")
    assert [(entry.dataset, entry.camera, entry.frames, entry.complete) for entry in entries] == [
        ("me/fake", "wrist", sum(LENGTHS), True),
        ("me/fake", "top", sum(LENGTHS), True),
    ]
    assert entries[0].last_used.year == 2001
    plain = sum(LENGTHS) * 24 * 32 * 3
    assert all(plain <= entry.bytes_on_disk < plain + 5 * 4096 for entry in entries)
    with locked(entries[0].directory), pytest.raises(DataError, match="is being built"):
        delete_frame_cache(entries[0])
    delete_frame_cache(entries[0])
    delete_frame_cache(entries[0])
    assert [entry.camera for entry in list_frame_caches(tmp_path / "cache")] == ["top"]
    np.testing.assert_array_equal(read_all(reading["wrist"]), source.everything("wrist"))
    assert list_frame_caches(tmp_path / "nothing here") == []


# --- what is refused, and what is said --------------------------------------------------------------------------------


@pytest.mark.parametrize("got", [4, 6, 0])
def test_a_wrong_number_of_frames_is_named_and_never_kept(tmp_path, got):
    source = make_source(tmp_path)
    pixels = source.pixels
    source.pixels = lambda camera, episode: np.resize(pixels(camera, episode), (got, 24, 32, 3)) if episode == 3 else []
    source.lengths = np.asarray([0, 0, 0, 5, 0])
    for _ in range(2):
        with pytest.raises(DataError, match=f"episode 30, column top: expected 5 frames, got {got}"):
            open_frames(source, ["top"], config(tmp_path))


@pytest.mark.parametrize("find_all", [False, True])
def test_an_error_of_the_source_ends_the_build_at_once_or_after_the_others(tmp_path, find_all):
    source = make_source(tmp_path)
    decode, ran_out = source.decode, []

    def failing(camera, episode):
        if episode in (1, 3):
            raise DataError(f"video {episode} is broken")
        yield from decode(camera, episode)
        if episode > 3 and not find_all:
            yield from until_stopped(np.zeros((24, 32, 3), np.uint8), ran_out)

    source.decode = failing
    with pytest.raises(DataError, match="video 1 is broken") as caught:
        open_frames(source, ["top"], config(tmp_path, workers=1), find_all_damage=find_all)
    assert ("video 3 is broken" in str(caught.value)) == find_all
    assert not ran_out
    (entry,) = list_frame_caches(tmp_path / "cache")
    assert not entry.complete


def test_a_full_disk_is_noticed_before_anything_is_decoded(tmp_path, monkeypatch):
    source = make_source(tmp_path)
    free = sum(LENGTHS) * 24 * 32 * 3 - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 10**12 - free, free))
    with pytest.raises(DataError, match='too small.*compression="jpeg".*smaller size.*PIRL_CACHE'):
        open_frames(source, ["top"], config(tmp_path))
    assert not source.decoded
    # Encoded, it fits.
    open_frames(source, ["top"], config(tmp_path, "jpeg"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    source = make_source(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(DataError, match="cannot be written in .*cache.*: No space left on device.*PIRL_CACHE"):
            open_frames(source, ["top"], config(tmp_path))
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(DataError, match="frame cache cannot be written in .*cache"):
        open_frames(source, ["top"], config(tmp_path))


def test_names_in_the_dataset_cannot_lead_out_of_the_cache(tmp_path, monkeypatch):
    cameras = ["../../out", "..", "a/b", "a_b", "", "ü" * 300, ".hidden\n"]
    source = make_source(tmp_path, cameras=())
    source.source_files = lambda camera: [tmp_path / "dataset" / "file"]
    (tmp_path / "dataset" / "file").write_bytes(b"content")
    monkeypatch.setenv("PIRL_CACHE", str(tmp_path / "cache"))
    frames = open_frames(source, cameras, FrameCacheConfig(24, 32))
    for camera in cameras:
        np.testing.assert_array_equal(read_all(frames[camera]), source.everything(camera))
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "dataset", "decoded.log"}
    assert {entry.directory.parent for entry in list_frame_caches()} == {tmp_path / "cache" / "frames"}
    assert len(list_frame_caches()) == len(cameras)
