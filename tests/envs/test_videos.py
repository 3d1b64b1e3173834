"""Videos are what they should be when they are decoded again."""

from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image, ImageSequence

from pirl.envs.video import Video, encode_gif, mosaic, strips, video_format, write_videos
from pirl.errors import UserError

GREEN, RED, GRAY = (46, 160, 67), (218, 54, 51), (90, 96, 105)


def video(length, success, height=8, width=8, color=None):
    """Frames of one gray each, brighter with time, or of one color."""
    if color is not None:
        return Video(np.full((length, height, width, 3), color, np.uint8), success)
    shade = (np.arange(length) * 7 % 256).astype(np.uint8)
    return Video(np.broadcast_to(shade[:, None, None, None], (length, height, width, 3)).copy(), success)


def gif_at(path, hundredths):
    """The image that a viewer shows at a time."""
    with Image.open(path) as image:
        end = 0
        for frame in ImageSequence.Iterator(image):
            end += frame.info["duration"] // 10
            if hundredths < end:
                return np.asarray(frame.convert("RGB"))
    raise AssertionError("the video is over")


def decode(path):
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = list(container.decode(stream))
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
    return [frame.pts * frame.time_base for frame in frames], np.stack([f.to_ndarray(format="rgb24") for f in frames])


def test_tiles_lie_in_a_grid_and_shorter_episodes_hold_their_last_image():
    frames = mosaic([video(3, True), video(9, False), video(5, None)], 2, side=16)
    assert frames.shape == (10, 2 * 20, 2 * 20, 3)
    inside = frames[:, 2:18, 2:18]
    assert (inside == video(3, True).frames[[0, 1, 2] + [2] * 7, :1, :1]).all()
    assert (frames[:, 2:18, 22:38] == video(9, False).frames[[*range(9), 8], :1, :1]).all()
    assert (frames[:, 20:, 20:] == GRAY).all(), "no episode, no image"
    for tile, (length, color) in enumerate([(3, GREEN), (9, RED)]):
        border = frames[:, :20, 20 * tile]
        assert (border[:length] == GRAY).all()
        assert (border[length:] == color).all()


@pytest.mark.parametrize(("fps", "every"), [(10, 1), (25, 1), (60, 3)])
def test_a_gif_runs_at_the_right_speed_and_rests_at_the_end(tmp_path, fps, every):
    frames = video(61, True).frames
    (tmp_path / "a.gif").write_bytes(encode_gif(frames, fps))
    with Image.open(tmp_path / "a.gif") as image:
        assert image.info["loop"] == 0
        durations = [frame.info["duration"] for frame in ImageSequence.Iterator(image)]
    assert sum(durations) == pytest.approx(1000 * 61 / fps + 1000, abs=10)
    assert min(durations) >= 30
    for index in range(0, 61, every):
        shown = gif_at(tmp_path / "a.gif", round(100 * index / fps))
        np.testing.assert_array_equal(shown, frames[index])


def test_a_gif_of_many_colors_keeps_the_thin_lines_that_tell_outcomes(tmp_path):
    rng = np.random.default_rng(0)
    noise = Video(rng.integers(0, 256, (4, 40, 40, 3)).astype(np.uint8), True)
    frames = mosaic([noise, Video(noise.frames[:2], False)], 2, side=8)
    (tmp_path / "a.gif").write_bytes(encode_gif(frames, 10))
    last = gif_at(tmp_path / "a.gif", 100)
    assert (last[:, 0] == GREEN).all()
    assert (last[:, -1] == RED).all()
    assert np.abs(last.astype(int) - frames[-1]).mean() < 30, "256 colors for random ones"


def test_an_mp4_has_every_frame_at_its_time_and_an_even_size(tmp_path):
    shown = video(9, None, height=33, width=47)
    write_videos(tmp_path / "a.mp4", [shown], 10, side=8)
    times, decoded = decode(tmp_path / "a.mp4")
    assert times == [Fraction(index, 10) for index in range(10)]
    assert decoded.shape == (10, 38, 52, 3)
    assert np.abs(decoded[:9, 8:30, 8:40].astype(int) - shown.frames[:, 6:28, 6:38]).max() < 8


def test_strips_show_an_episode_from_its_first_to_its_last_image():
    strip = strips([video(15, True), video(1, False)], images=8, side=8)
    assert strip.shape == (2 * 12, 8 * 12, 3)
    np.testing.assert_array_equal(strip[5, 5::12, 0], [7 * step for step in range(0, 15, 2)])
    assert (strip[:12, 0] == GREEN).all()
    assert (strip[12:, 0] == RED).all()


@pytest.mark.parametrize("name", ["a.gif", "b/c.mp4", "d.PNG"])
def test_the_name_of_a_file_decides_its_format(tmp_path, name):
    write_videos(tmp_path / name, [video(4, True), video(2, False)], 10, side=32)
    path = tmp_path / name
    kind = path.suffix.lower()
    if kind == ".mp4":
        assert decode(path)[1].shape[0] == 5
    else:
        assert f".{Image.open(path).format.lower()}" == kind
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing half written is left"


@pytest.mark.parametrize("name", ["video.avi", "gif"])
def test_another_format_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"should end in \.gif, \.mp4 or \.png"):
        video_format(tmp_path / name)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="the video cannot be written"):
        write_videos(tmp_path / "file" / "a.png", [video(4, True)], 10)
