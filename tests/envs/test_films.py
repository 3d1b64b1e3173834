"""Films are what they should be when they are decoded again."""

from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image, ImageSequence

from pirl.envs.video import Film, film_format, mosaic, strips, write_films, write_gif, write_mp4, write_png
from pirl.errors import UserError

GREEN, RED, GREY = (46, 160, 67), (218, 54, 51), (90, 96, 105)


def film(length, success, height=8, width=8, colour=None):
    """Frames of one grey each, brighter with time, or of one colour."""
    if colour is not None:
        return Film(np.full((length, height, width, 3), colour, np.uint8), success)
    shade = (np.arange(length) * 7 % 256).astype(np.uint8)
    return Film(np.broadcast_to(shade[:, None, None, None], (length, height, width, 3)).copy(), success)


def gif_at(path, hundredths):
    """The picture that a viewer shows at a time."""
    with Image.open(path) as image:
        end = 0
        for picture in ImageSequence.Iterator(image):
            end += picture.info["duration"] // 10
            if hundredths < end:
                return np.asarray(picture.convert("RGB"))
    raise AssertionError("the film is over")


def decode(path):
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = list(container.decode(stream))
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
    return [frame.pts * frame.time_base for frame in frames], np.stack([f.to_ndarray(format="rgb24") for f in frames])


def test_tiles_lie_in_a_grid_and_shorter_episodes_hold_their_last_picture():
    frames = mosaic([film(3, True), film(9, False), film(5, None)], 2, side=16, border=2)
    assert frames.shape == (10, 2 * 20, 2 * 20, 3)
    inside = frames[:, 2:18, 2:18]
    assert (inside == film(3, True).frames[[0, 1, 2] + [2] * 7, :1, :1]).all()
    assert (frames[:, 2:18, 22:38] == film(9, False).frames[[*range(9), 8], :1, :1]).all()
    assert (frames[:, 20:, 20:] == GREY).all(), "no episode, no picture"


def test_the_border_tells_the_outcome_once_the_episode_is_over():
    frames = mosaic([film(3, True), film(5, False), film(2, None)], 3, side=8, border=1)
    for tile, (length, colour) in enumerate([(3, GREEN), (5, RED), (2, GREY)]):
        left = frames[:, :, 10 * tile]
        assert (left[:length] == GREY).all()
        assert (left[length:] == colour).all()
        assert len(left[length:])


def test_small_pictures_are_enlarged_by_whole_pixels():
    rng = np.random.default_rng(0)
    small = Film(rng.integers(0, 256, (1, 5, 7, 3)).astype(np.uint8), None)
    (frame, _) = mosaic([small], side=16, border=0)
    assert frame.shape == (15, 21, 3)
    np.testing.assert_array_equal(frame[1::3, 1::3], small.frames[0])
    np.testing.assert_array_equal(frame[::3, 2::3], small.frames[0])
    assert mosaic([small], side=4, border=0).shape[1:3] == (5, 7), "larger ones stay as they are"


@pytest.mark.parametrize(("fps", "every"), [(10, 1), (25, 1), (30, 2), (50, 2), (60, 3)])
def test_a_gif_runs_at_the_right_speed_and_rests_at_the_end(tmp_path, fps, every):
    frames = film(61, True).frames
    write_gif(tmp_path / "a.gif", frames, fps)
    with Image.open(tmp_path / "a.gif") as image:
        assert image.info["loop"] == 0
        durations = [picture.info["duration"] for picture in ImageSequence.Iterator(image)]
    assert sum(durations) == pytest.approx(1000 * 61 / fps + 1000, abs=10)
    assert min(durations) >= 30
    for index in range(0, 61, every):
        shown = gif_at(tmp_path / "a.gif", round(100 * index / fps))
        np.testing.assert_array_equal(shown, frames[index])


def test_a_gif_of_many_colours_keeps_the_thin_lines_that_tell_outcomes(tmp_path):
    rng = np.random.default_rng(0)
    noise = Film(rng.integers(0, 256, (4, 40, 40, 3)).astype(np.uint8), True)
    frames = mosaic([noise, Film(noise.frames[:2], False)], 2, side=8, border=1)
    write_gif(tmp_path / "a.gif", frames, 10)
    last = gif_at(tmp_path / "a.gif", 100)
    assert (last[:, 0] == GREEN).all()
    assert (last[:, -1] == RED).all()
    assert np.abs(last.astype(int) - frames[-1]).mean() < 30, "256 colours for random ones"


def test_an_mp4_has_every_frame_at_its_time_and_an_even_size(tmp_path):
    frames = film(9, True, height=33, width=47).frames
    write_mp4(tmp_path / "a.mp4", frames, 10)
    times, decoded = decode(tmp_path / "a.mp4")
    assert times == [Fraction(index, 10) for index in range(9)]
    assert decoded.shape == (9, 34, 48, 3)
    assert np.abs(decoded[:, :33, :47].astype(int) - frames).max() < 8


def test_strips_show_an_episode_from_its_first_to_its_last_picture(tmp_path):
    picture = strips([film(15, True), film(1, False)], pictures=8, side=8, border=1)
    assert picture.shape == (2 * 10, 8 * 10, 3)
    np.testing.assert_array_equal(picture[5, 5::10, 0], [7 * step for step in range(0, 15, 2)])
    assert (picture[:10, 0] == GREEN).all()
    assert (picture[10:, 0] == RED).all()
    write_png(tmp_path / "a.png", picture)
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "a.png")), picture)


@pytest.mark.parametrize("name", ["a.gif", "b/c.mp4", "d.PNG"])
def test_the_name_of_a_file_decides_its_format(tmp_path, name):
    write_films(tmp_path / name, [film(4, True), film(2, False)], 10, side=32)
    path = tmp_path / name
    kind = path.suffix.lower()
    if kind == ".mp4":
        assert decode(path)[1].shape[0] == 5
    else:
        assert f".{Image.open(path).format.lower()}" == kind
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing half written is left"


@pytest.mark.parametrize("name", ["film", "film.avi", "gif"])
def test_another_format_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"should end in \.gif, \.mp4 or \.png"):
        film_format(tmp_path / name)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="the film cannot be written"):
        write_png(tmp_path / "file" / "a.png", np.zeros((4, 4, 3), np.uint8))
