"""The frame cache: decoded once, whatever interrupts it, and the same pixels afterwards."""

import dataclasses
import io
import json
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

from pirl.data import frame_cache as cache_module
from pirl.data.frame_cache import (
    FrameCacheConfig,
    StoreLayout,
    StoreWriter,
    delete_frame_cache,
    file_digests,
    list_frame_caches,
    locked,
    open_frames,
)
from pirl.data.images import resize_with_pad
from pirl.errors import ConfigError, DataError

GOLDEN_DATA = Path(__file__).resolve().parents[2].parent / "shared" / "golden_data"
LENGTHS = [3, 7, 1, 5, 4, 6]


@dataclasses.dataclass
class FakeSource:
    """Noise that depends on the bytes of one file for each camera. Every decoded episode is noted in a log."""

    root: Path
    log: Path
    lengths: np.ndarray
    size: tuple[int, int] = (24, 32)
    name: str = "me/fake"
    starts: tuple = ((0, 0),)

    @property
    def episode_ids(self):
        return 10 * np.arange(len(self.lengths))

    def source_files(self, camera):
        return [self.root / f"{'shared' if camera.startswith('shared') else camera.replace('/', '_')}.bin"]

    def places(self, camera):
        return self.starts

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


def run_elsewhere(root, statements, **options):
    """Start another process, with `source` and `config` as here."""
    program = f"""
import logging, os, sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_frame_cache import *
logging.basicConfig(level=logging.INFO, force=True)
root = Path({str(root)!r})
source = make_source(root, **{options!r})
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


@pytest.mark.parametrize("compression", ["none", "png"])
def test_every_frame_is_kept_as_it_was_and_decoded_once(tmp_path, compression):
    source = make_source(tmp_path)
    for _ in range(2):
        frames = open_frames(source, ["wrist", "top"], config(tmp_path, compression))
        assert list(frames) == ["wrist", "top"]
        for camera, opened in frames.items():
            assert opened.shape == (sum(LENGTHS), 24, 32, 3)
            np.testing.assert_array_equal(read_all(opened), source.everything(camera))
    assert source.decoded == Counter(f"{camera} {episode}" for camera in ("top", "wrist") for episode in range(6))


@pytest.mark.parametrize(("compression", "height", "width"), [("none", 16, 16), ("png", 48, 40)])
def test_frames_of_another_size_are_resized_without_distortion(tmp_path, compression, height, width):
    source = make_source(tmp_path)
    frames = open_frames(source, ["top"], FrameCacheConfig(height, width, compression, tmp_path / "cache"))["top"]
    np.testing.assert_array_equal(read_all(frames), source.everything("top", height, width))


def test_jpeg_loses_little_and_keeps_sharp_colours(tmp_path):
    """Averaging colours over 2 x 2 pixels, as JPEG usually does, would turn red beside blue into violet: off by 127."""
    ramp = np.linspace(0, 255, 32).astype(np.uint8)
    smooth = np.stack([np.tile(ramp, (24, 1)), np.tile(ramp[::-1], (24, 1)), np.full((24, 32), 90, np.uint8)], -1)
    stripes = np.zeros((24, 32, 3), np.uint8)
    stripes[:, ::2, 0], stripes[:, 1::2, 2] = 255, 255
    source = make_source(tmp_path)
    source.pixels = lambda camera, episode: np.stack([smooth, stripes] * 4)[: source.lengths[episode]]
    frames = open_frames(source, ["top"], config(tmp_path, "jpeg"))["top"]
    error = np.abs(read_all(frames).astype(int) - source.everything("top"))
    assert error.mean() < 3
    assert error.max() < 25


def test_cameras_that_share_their_files_are_kept_apart(tmp_path):
    source = make_source(tmp_path, cameras=("shared left", "shared right"))
    frames = open_frames(source, ["shared left", "shared right"], config(tmp_path))
    for camera, opened in frames.items():
        np.testing.assert_array_equal(read_all(opened), source.everything(camera))


@pytest.fixture(scope="module", params=["none", "png", "jpeg"])
def opened(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("opened")
    source = make_source(root)
    frames = open_frames(source, ["top"], config(root, request.param, workers=2))["top"]
    one_by_one = np.concatenate([frames.gather(np.array([row])) for row in range(frames.shape[0])])
    if request.param != "jpeg":
        np.testing.assert_array_equal(one_by_one, source.everything("top"))
    return frames, one_by_one


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.integers(0, sum(LENGTHS) - 1), max_size=40), dtype=st.sampled_from([np.int32, np.int64]))
def test_any_rows_in_any_order_are_gathered_as_from_an_array(opened, rows, dtype):
    frames, array = opened
    rows = np.asarray(rows, dtype)
    for _ in range(2):
        out = frames.gather(rows)
        np.testing.assert_array_equal(out, array[rows])
        assert not len(rows) or out.ctypes.data % 64 == 0
        frames.release()


@pytest.mark.parametrize("rows", [[-1], [sum(LENGTHS)], [0, 10**12]])
def test_rows_that_do_not_exist_are_refused(opened, rows):
    with pytest.raises(IndexError, match=f"there are {sum(LENGTHS)} frames"):
        opened[0].gather(np.asarray(rows))


def test_released_memory_is_given_back_and_the_frames_are_not_lost(tmp_path):
    source = make_source(tmp_path, size=(256, 256))
    source.lengths = np.full(8, 40)
    frames = open_frames(source, ["top"], FrameCacheConfig(256, 256, directory=tmp_path / "cache"))["top"]
    size = np.prod(frames.shape)
    frames.gather(np.array([0]))

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def touch(rows):
        for row in rows:
            frames.gather(np.array([row]))
        return resident()

    everything = touch(range(frames.shape[0]))
    frames.release()
    nothing = resident()
    assert everything - nothing > 0.8 * size
    assert touch([5]) - nothing < 0.1 * size
    np.testing.assert_array_equal(frames.gather(np.array([5]))[0], source.pixels("top", 0)[5])


@pytest.mark.skipif(not GOLDEN_DATA.is_dir(), reason="needs ../shared/golden_data")
@pytest.mark.parametrize("name", ["v21_image", "v30_video_multifile"])
def test_a_lerobot_dataset_is_a_source(tmp_path, name):
    from pirl.data.lerobot.reader import open_dataset

    dataset = open_dataset(GOLDEN_DATA / name)
    frames = open_frames(dataset, dataset.cameras, FrameCacheConfig(56, 56, directory=tmp_path))
    for camera, cached in frames.items():
        decoded = [frame for episode in range(len(dataset.lengths)) for frame in dataset.decode(camera, episode)]
        np.testing.assert_array_equal(read_all(cached), resize_with_pad(np.stack(decoded), 56, 56))


# --- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "png"])
def test_a_killed_build_goes_on_where_it_was(tmp_path, compression):
    dying = f"""
decode = source.decode
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
    # A kill can also tear the last record.
    with (entry_directories(tmp_path)[0] / "finished.txt").open("ab") as journal:
        journal.write(b"5 3")
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
    with pytest.raises(KeyboardInterrupt):
        open_frames(source, ["top"], config(tmp_path, workers=1))
    assert not ran_out
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("frame-cache")]
    with pytest.raises(KeyboardInterrupt):
        open_frames(source, ["top"], config(tmp_path, workers=1))
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
decode = source.decode
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
    assert builder.returncode == -signal.SIGKILL
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


def test_episodes_found_elsewhere_in_the_same_files_make_another_entry(tmp_path):
    source = make_source(tmp_path)
    open_frames(source, ["top"], config(tmp_path))
    source.starts = ((0, 1),)
    open_frames(source, ["top"], config(tmp_path))
    assert len(entry_directories(tmp_path)) == 2


def test_size_compression_and_lengths_make_other_entries(tmp_path):
    source = make_source(tmp_path)
    for height, width, compression in [(24, 32, "none"), (24, 16, "none"), (12, 32, "none"), (24, 32, "png")]:
        open_frames(source, ["top"], FrameCacheConfig(height, width, compression, tmp_path / "cache"))
    source.lengths = source.lengths[::-1].copy()
    open_frames(source, ["top"], config(tmp_path))
    assert len(entry_directories(tmp_path)) == 5


def test_a_moved_or_copied_dataset_is_recognised(tmp_path):
    source = make_source(tmp_path)
    open_frames(source, ["top"], config(tmp_path))
    before = source.decoded
    moved = dataclasses.replace(source, root=tmp_path / "elsewhere", name="other/name")
    shutil.copytree(source.root, moved.root)
    shutil.rmtree(source.root)
    np.testing.assert_array_equal(
        read_all(open_frames(moved, ["top"], config(tmp_path))["top"]), moved.everything("top")
    )
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


def test_digests_are_remembered_until_the_file_is_touched(tmp_path, monkeypatch):
    read = []
    digest = cache_module._digest
    monkeypatch.setattr(cache_module, "_digest", lambda file: (read.append(file.name), digest(file))[1])
    monkeypatch.setattr(cache_module, "_SETTLED_NANOSECONDS", -(10**12))
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(file.name.encode())
    expected = [
        "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb",
        "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d",
    ]
    memory = tmp_path / "memory.json"
    assert file_digests(files, memory) == file_digests(files, memory) == expected
    assert read == ["a", "b"]
    files[1].rename(tmp_path / "kept")
    (tmp_path / "kept").rename(files[1])
    assert file_digests(files, memory) == expected
    assert read == ["a", "b", "b"]
    for damage in [
        '{"a": [[], "x"]}',
        "[1, 2]",
        '{"truncat',
        "\x00" * 20,
        json.dumps({str(files[0]): [[1, 2, 3, "x"], 1]}),
    ]:
        memory.write_text(damage)
        assert file_digests(files, memory) == expected


def test_a_file_written_just_now_is_read_again(tmp_path, monkeypatch):
    """Its next change may fall into the same tick of the clock, and would not show."""
    (tmp_path / "a").write_bytes(b"a")
    a_second_later = (tmp_path / "a").stat().st_mtime_ns + 10**9
    monkeypatch.setattr(time, "time_ns", lambda: a_second_later)
    file_digests([tmp_path / "a"], tmp_path / "memory.json")
    assert str(tmp_path / "a") not in (tmp_path / "memory.json").read_text()


# --- damage and deletion ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compression", "file", "change"),
    [
        ("none", "frames.bin", -1),
        ("none", "frames.bin", 16),
        ("png", "frames.bin", -1),
        ("png", "index.bin", -1),
        ("png", "index.bin", 16),
    ],
)
def test_a_data_file_of_the_wrong_size_is_replaced(tmp_path, compression, file, change):
    source = make_source(tmp_path)
    open_frames(source, ["top"], config(tmp_path, compression))
    damaged = entry_directories(tmp_path)[0] / file
    with damaged.open("rb") as held:
        os.truncate(damaged, damaged.stat().st_size + change)
        frames = open_frames(source, ["top"], config(tmp_path, compression))["top"]
        np.testing.assert_array_equal(read_all(frames), source.everything("top"))
        # Written over, it would change under those who read it.
        assert not os.path.samestat(os.fstat(held.fileno()), damaged.stat())


@pytest.mark.parametrize("content", ["", "{", "[]", '{"complete": true}'])
def test_a_damaged_description_costs_no_decoding(tmp_path, content):
    source = make_source(tmp_path)
    open_frames(source, ["top"], config(tmp_path))
    (entry_directories(tmp_path)[0] / "about.json").write_text(content)
    before = source.decoded
    frames = open_frames(source, ["top"], config(tmp_path))["top"]
    assert source.decoded == before
    np.testing.assert_array_equal(read_all(frames), source.everything("top"))


def test_a_damaged_picture_is_named(tmp_path):
    frames = open_frames(make_source(tmp_path), ["top"], config(tmp_path, "png"))["top"]
    with (entry_directories(tmp_path)[0] / "frames.bin").open("r+b") as file:
        file.write(b"not a picture")
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
        frames.close()


def test_a_cache_deleted_while_it_is_built_is_not_taken_for_complete(tmp_path):
    """Above all not if another process has begun to build it anew: its frames have the right size, but are still zero."""
    source = make_source(tmp_path)
    decode, begun = source.decode, []

    def deleting(camera, episode):
        yield from decode(camera, episode)
        if episode == 4:
            (directory,) = entry_directories(tmp_path)
            shutil.rmtree(tmp_path / "cache")
            begun.append(StoreWriter(directory, StoreLayout(source.lengths, 24, 32, "none"), {"dataset": "anew"}))

    source.decode = deleting
    with pytest.raises(DataError, match="deleted while it was built"):
        open_frames(source, ["top"], config(tmp_path, workers=1))
    assert [(entry.dataset, entry.complete) for entry in list_frame_caches(tmp_path / "cache")] == [("anew", False)]
    begun[0].close()
    source.decode = decode
    frames = open_frames(source, ["top"], config(tmp_path))["top"]
    np.testing.assert_array_equal(read_all(frames), source.everything("top"))


def test_entries_are_listed_and_deleted(tmp_path):
    source = make_source(tmp_path)
    reading = open_frames(source, ["top", "wrist"], config(tmp_path))
    (tmp_path / "cache" / "something else").mkdir()
    (tmp_path / "cache" / ("link-" + "0" * 32)).symlink_to(tmp_path / "dataset")
    os.utime(next((tmp_path / "cache").glob("wrist-*")) / "about.json", (1e9, 1e9))
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


def test_using_an_entry_is_noted(tmp_path):
    source = make_source(tmp_path)
    open_frames(source, ["top"], config(tmp_path))
    os.utime(entry_directories(tmp_path)[0] / "about.json", (1e9, 1e9))
    open_frames(source, ["top"], config(tmp_path))
    assert list_frame_caches(tmp_path / "cache")[0].last_used.year > 2001


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


def test_an_error_of_the_source_ends_the_build(tmp_path):
    source = make_source(tmp_path)
    decode, ran_out = source.decode, []

    def failing(camera, episode):
        if episode == 3:
            raise DataError("video 3 is broken")
        yield from decode(camera, episode)
        if episode > 3:
            yield from until_stopped(np.zeros((24, 32, 3), np.uint8), ran_out)

    source.decode = failing
    with pytest.raises(DataError, match="video 3 is broken"):
        open_frames(source, ["top"], config(tmp_path, workers=2))
    assert not ran_out
    assert not list_frame_caches(tmp_path / "cache")[0].complete


@pytest.mark.parametrize("progress", [True, False])
def test_what_will_be_written_is_announced(tmp_path, caplog, capsys, progress):
    """For people on the screen, without any setting of logging; for programs in the log."""
    with caplog.at_level(logging.INFO):
        open_frames(make_source(tmp_path), ["top", "wrist"], config(tmp_path), progress=progress)
    screen = capsys.readouterr().err
    told, other = (screen, caplog.text) if progress else (caplog.text, screen)
    size = 2 * sum(LENGTHS) * 24 * 32 * 3 / 2**10
    said = f"frame cache for me/fake: 2 cameras x 26 frames at 24x32 = {size:.1f} KiB in {tmp_path / 'cache'} ("
    assert said in told
    assert "GiB free" in told
    assert said not in other


def test_progress_is_logged_where_there_is_no_terminal(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(cache_module, "_SECONDS_BETWEEN_LOG_LINES", 0.0)
    with caplog.at_level(logging.INFO):
        open_frames(make_source(tmp_path), ["top", "wrist"], config(tmp_path))
    assert "me/fake: 52 of 52 frames" in caplog.text


def test_what_only_linux_has_is_not_needed(tmp_path, monkeypatch):
    for name in ("sched_getaffinity", "posix_fadvise", "posix_fallocate"):
        monkeypatch.delattr(os, name, raising=False)
    source = make_source(tmp_path)
    frames = open_frames(source, ["top"], config(tmp_path))["top"]
    np.testing.assert_array_equal(read_all(frames), source.everything("top"))


def test_a_terminal_shows_a_bar(tmp_path, monkeypatch):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    open_frames(make_source(tmp_path), ["top"], config(tmp_path))
    for part in ("decoding me/fake", "26/26", "frames/s"):
        assert part in screen.getvalue()
    size = len(screen.getvalue())
    open_frames(make_source(tmp_path), ["wrist"], config(tmp_path), progress=False)
    assert len(screen.getvalue()) == size


def test_a_full_disk_is_noticed_before_anything_is_decoded(tmp_path, monkeypatch):
    source = make_source(tmp_path)
    free = sum(LENGTHS) * 24 * 32 * 3 - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 10**12 - free, free))
    with pytest.raises(DataError, match='too small.*compression="jpeg".*smaller size.*PIRL_CACHE'):
        open_frames(source, ["top"], config(tmp_path))
    assert not source.decoded
    # Encoded, it fits.
    open_frames(source, ["top"], config(tmp_path, "jpeg"))


def test_a_disk_that_fills_up_on_the_way_is_named(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DataError, match="cannot be written in .*cache.*: No space left on device.*PIRL_CACHE"):
        open_frames(make_source(tmp_path), ["top"], config(tmp_path))


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    source = make_source(tmp_path)
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(DataError, match="frame cache cannot be written in .*cache"):
        open_frames(source, ["top"], config(tmp_path))


def test_a_source_file_that_is_gone_is_named(tmp_path):
    source = make_source(tmp_path)
    source.source_files("top")[0].unlink()
    with pytest.raises(DataError, match=r"top\.bin cannot be read: No such file"):
        open_frames(source, ["top"], config(tmp_path))


def test_names_in_the_dataset_cannot_lead_out_of_the_cache(tmp_path):
    cameras = ["../../out", "..", "a/b", "a_b", "", "ü" * 300, ".hidden\n"]
    source = make_source(tmp_path, cameras=())
    source.source_files = lambda camera: [tmp_path / "dataset" / "file"]
    (tmp_path / "dataset" / "file").write_bytes(b"content")
    frames = open_frames(source, cameras, config(tmp_path))
    for camera in cameras:
        np.testing.assert_array_equal(read_all(frames[camera]), source.everything(camera))
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "dataset", "decoded.log"}
    assert len(entry_directories(tmp_path)) == len(cameras) == len(list_frame_caches(tmp_path / "cache"))


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PIRL_CACHE", str(tmp_path / "disk"))
    open_frames(make_source(tmp_path), ["top"], FrameCacheConfig(8, 8))
    assert [entry.directory.parent for entry in list_frame_caches()] == [tmp_path / "disk" / "frames"]


def test_a_dataset_without_frames_is_refused(tmp_path):
    source = make_source(tmp_path)
    source.lengths = np.zeros(3, np.int64)
    with pytest.raises(DataError, match="me/fake has no frames"):
        open_frames(source, ["top"], config(tmp_path))


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize("options", [{"height": 0}, {"width": -1}, {"compression": "webp"}, {"workers": 0}])
def test_settings_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError):
        FrameCacheConfig(**({"height": 8, "width": 8} | options))
