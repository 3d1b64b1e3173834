"""Charts show what was measured, whatever was measured."""

import base64
import io
import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from pirl.envs.video import Video, write_videos
from pirl.errors import DataError
from pirl.report.plots import Axis, Series, image_strip, line_chart, smooth, thin, video_strip

NAN = math.nan


def points(svg, kind="polyline"):
    """The points of each line or band, left to right and top to bottom from 0 to 1000."""
    elements = ET.fromstring(svg).iter(kind)
    return [[tuple(map(float, point.split(","))) for point in element.get("points").split()] for element in elements]


def dots(svg):
    return [tuple(map(float, dot)) for dot in re.findall(r"M([\d.-]+),([\d.-]+)h0", svg)]


def value_of(label):
    """The number that a person reads."""
    text = label.replace("−", "-").replace(",", "").replace("·10", "e")
    text = text.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    if "e" not in text and re.search("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]", label):
        text = re.sub("^(-?)10", r"\g<1>1e", text)
    return float(text.rstrip("kM")) * {"k": 1e3, "M": 1e6}.get(text[-1], 1.0)


def test_values_are_drawn_where_the_axis_says():
    linear = Series("loss", np.array([0.0, 5.0, 10.0]), np.array([0.0, 0.5, 2.0]))
    assert points(line_chart([linear], label="", x_axis=Axis(0.0, 10.0), y_range=(0.0, 2.0))) == [
        [(0, 1000), (500, 750), (1000, 0)]
    ]
    ratios = Series("loss", np.arange(4.0), 10.0 ** np.arange(4))
    (line,) = points(line_chart([ratios], label="", log_y=True, y_range=(1.0, 1000.0)))
    assert np.allclose([y for _, y in line], [1000, 2000 / 3, 1000 / 3, 0], atol=0.06)
    band = Series("Q", np.array([0.0, 1.0]), np.full(2, 5.0), np.array([4.0, 2.0]), np.array([6.0, 8.0]))
    assert points(line_chart([band], label="", y_range=(0.0, 10.0)), "polygon") == [
        [(0, 600), (1000, 800), (1000, 200), (0, 400)]
    ]


def test_what_cannot_be_drawn_is_a_gap_and_a_point_between_gaps_a_dot():
    for log, hole in ((False, NAN), (False, math.inf), (True, 0.0), (True, -1.0)):
        y = np.ones(101)
        y[[49, 51]] = hole
        svg = line_chart([Series("loss", np.arange(101.0), y)], label="", log_y=log)
        assert [len(line) for line in points(svg)] == [49, 49]
        assert [x for x, _ in dots(svg)] == [500]


@example(values=[0.0] * 3, log=True)
@example(values=[1e16, 1e16 + 2, 1e16], log=False)
@example(values=[-1.7e308, 1.7e308, 1e300, -1e300], log=False)
@example(values=[5e-324, 1e-300, 1e300, math.inf], log=True)
@given(st.lists(st.floats(), max_size=6), st.booleans())
def test_whatever_was_logged_is_a_chart_with_everything_inside_it(values, log):
    y = np.array(values, np.float64)
    svg = line_chart([Series("a", np.arange(len(y), dtype=float), y, low=y, high=y)], label="any", log_y=log)
    drawn = [point for kind in ("polyline", "polygon") for line in points(svg, kind) for point in line] + dots(svg)
    assert all(0 <= coordinate <= 1000 for point in drawn for coordinate in point)
    drawable = (np.abs(y) <= 1e300) & (not log or y >= 1e-300)
    assert (bool(drawn), "no data" in svg) == (drawable.any(), not drawable.any())
    assert not re.search(r"\b(nan|inf)\b", svg)


numbers = st.floats(-1e12, 1e12, allow_subnormal=False) | st.floats(-2, 2, allow_subnormal=False)


@example(values=[0.0], offset=1e-300, scale=1.0, log=False)
@given(st.lists(numbers, min_size=1, max_size=5), numbers, st.sampled_from([1.0, 1e-3, 1e-6]), st.booleans())
def test_ticks_are_few_inside_the_range_and_say_what_they_are(values, offset, scale, log):
    axis = Axis.fit([offset + scale * np.array(values)], log, margin=0.05)
    ticks = axis.ticks()
    positions = axis.fraction([value for value, _ in ticks])
    assert 2 <= len(ticks) <= 12
    assert (np.diff(positions) > 0).all()
    assert ((positions > -1e-6) & (positions < 1 + 1e-6)).all()
    # The label is off by less than anybody can see.
    assert np.allclose(axis.fraction([value_of(label) for _, label in ticks]), positions, atol=1e-3)


@given(st.lists(st.floats(-5, 5) | st.just(NAN), min_size=1, max_size=400), st.integers(4, 60))
def test_a_thinned_series_keeps_its_ends_its_peaks_and_its_long_gaps(values, limit):
    y = np.array(values)
    kept = thin(y, y, limit)
    assert len(kept) <= limit + 2
    assert (np.diff(kept) > 0).all()
    assert {0, len(y) - 1} <= set(kept.tolist())
    if np.isfinite(y).any():
        assert (np.nanmin(y[kept]), np.nanmax(y[kept])) == (np.nanmin(y), np.nanmax(y))
    gap = 2 * math.ceil(len(y) / (limit // 2))
    wide = np.concatenate([y, np.full(gap, NAN), y])
    middle = thin(wide, wide, limit * 2 + gap)
    assert np.isnan(wide[middle][(middle >= len(y)) & (middle < len(y) + gap)]).any()


def test_a_moving_average_keeps_lines_straight_and_gaps_open():
    line = np.arange(200.0)
    assert np.allclose(smooth(line)[5:-5], line[5:-5])
    broken = np.ones(200)
    broken[50:60] = NAN
    assert np.array_equal(smooth(broken), broken, equal_nan=True)
    powers = 10 ** (line / 10)
    powers[100] = 0.0
    assert np.allclose(smooth(powers, log=True)[5:90], powers[5:90])
    assert np.isnan(smooth(powers, log=True)[100])


def test_a_strip_divides_the_time_evenly_with_small_images():
    for length, shown in {1: 1, 5: 3, 80: 12}.items():
        frames = np.arange(length, dtype=np.uint8)[:, None, None, None] * np.ones((1, 480, 640, 3), np.uint8)
        images = re.findall(r'alt="step (\d+)" src="data:image/png;base64,([^"]+)"', image_strip(frames))
        assert len(images) == shown
        for index, (step, content) in enumerate(images):
            image = Image.open(io.BytesIO(base64.b64decode(content)))
            assert (image.size, image.getpixel((0, 0))[0]) == ((160, 120), int(step))
            # The moment is in the image's own stretch of the axis, at most one step from the middle.
            assert abs((int(step) + 0.5) / length - (index + 0.5) / shown) <= 1 / length


def test_a_video_is_a_strip_and_a_damaged_one_is_refused(tmp_path):
    file = tmp_path / "100.mp4"
    write_videos(file, [Video(np.zeros((30, 32, 32, 3), np.uint8), True)], fps=10)
    assert video_strip(file).count("<img ") == 12
    for content in (b"nothing", file.read_bytes()[:200]):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"100\.mp4"):
            video_strip(file)
