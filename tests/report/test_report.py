"""A report shows what was measured, whatever was measured, and needs nothing but itself."""

import base64
import io
import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from pirl.errors import DataError
from pirl.report import (
    Curve,
    Episode,
    PolicyResult,
    Run,
    build_page,
    comparison_section,
    curves_section,
    describe_machine,
    differing_settings,
    episodes_section,
    headline,
    provenance_section,
    read_results,
    read_run,
)
from pirl.report.axes import Axis, number, thin
from pirl.report.comparison import Difference
from pirl.report.curves import PANELS, smooth
from pirl.report.film import FRAMES, encode_png, film_strip
from pirl.report.svg import POINTS, Mark, Series, bar, line_chart

HOSTILE = """<script>alert(1)</script>"'&<img src=http://evil.example onerror=alert(2)>"""
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Every element and text of a page; elements must be closed in the order in which they were opened."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.open = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def array(*values):
    return np.array(values, np.float64)


def points(svg, kind="polyline"):
    """The places of each line (or polygon), left to right and top to bottom from 0 to 1000."""
    return [
        [tuple(map(float, point.split(","))) for point in element.get("points").split()]
        for element in ET.fromstring(svg).iter(kind)
    ]


def dots(svg):
    return [
        tuple(map(float, dot))
        for path in ET.fromstring(svg).iter("path")
        for dot in re.findall(r"M([\d.-]+),([\d.-]+)h0", path.get("d"))
    ]


def result(successes, n=200, name="BC", **more):
    from pirl.envs import wilson

    low, high = wilson(successes, n)
    return PolicyResult(name, successes / n, low, high, n, **more)


def full_page(name="ACRLPD", rows=50):
    """A page with everything on it, all of whose texts are `name`."""
    steps = np.arange(1.0, rows + 1)
    curve = Curve(steps, 1 + np.sin(steps) / 2)
    metrics = {metric for panel in PANELS for metric in (panel.metric, panel.low, panel.high) if metric}
    run = Run(name, dict.fromkeys([*metrics, "val/loss"], curve))
    policy = result(163, name=name, description=name, paired=Difference(0.38, 0.303, 0.449, 1e-9))
    frames = np.zeros((20, 8, 8, 3), np.uint8)
    episode = Episode(name, frames, np.arange(20), np.random.default_rng(0).random((2, 20)), success=True)
    return build_page(
        name,
        headline(policy, policy),
        [
            comparison_section([policy, result(87)], baseline=name, title=name, introduction=name),
            curves_section([run, Run("other", {"loss": curve})], title=name),
            episodes_section([episode], title=name, introduction=name),
            provenance_section(
                commands=[name], facts={name: name}, configs={name: {name: name}, "b": {name: 1}}, introduction=name
            ),
        ],
        subtitle=name,
    )


# Charts


def test_a_line_goes_through_its_points():
    series = Series("loss", array(0, 5, 10), array(0, 0.5, 2))
    svg = line_chart([series], label="loss", x_range=(0.0, 10.0), y_range=(0.0, 2.0))
    assert points(svg) == [[(0, 1000), (500, 750), (1000, 0)]]


def test_a_fitted_axis_starts_at_the_first_step_and_leaves_five_percent_above_and_below():
    (line,) = points(line_chart([Series("loss", array(100, 200), array(3, 4))], label="loss"))
    assert line == [(0, pytest.approx(1000 * 1.05 / 1.1, abs=0.06)), (1000, pytest.approx(1000 * 0.05 / 1.1, abs=0.06))]


def test_equal_ratios_are_equally_far_apart_on_a_log_scale():
    series = Series("loss", array(0, 1, 2, 3), array(1, 10, 100, 1000))
    (line,) = points(line_chart([series], label="loss", log_y=True, y_range=(1.0, 1000.0)))
    assert np.allclose([y for _, y in line], [1000, 2000 / 3, 1000 / 3, 0], atol=0.06)


@pytest.mark.parametrize(("log", "hole"), [(False, math.nan), (False, math.inf), (True, 0.0), (True, -1.0)])
def test_what_cannot_be_drawn_is_a_gap_and_a_point_between_gaps_a_dot(log, hole):
    series = Series("loss", np.arange(6.0), array(1, 2, hole, 3, hole, 4))
    svg = line_chart([series], label="loss", log_y=log, x_range=(0.0, 5.0))
    assert [[x for x, _ in line] for line in points(svg)] == [[0, 200]]
    assert [x for x, _ in dots(svg)] == [0, 200, 600, 1000]


def test_only_points_that_stand_alone_are_dots_in_a_long_series():
    y = np.ones(101)
    y[[49, 51]] = math.nan
    svg = line_chart([Series("loss", np.arange(101.0), y)], label="loss")
    assert [len(line) for line in points(svg)] == [49, 49]
    assert [x for x, _ in dots(svg)] == [500]


def test_a_band_lies_between_its_edges():
    series = Series("Q", array(0, 1), array(5, 5), low=array(4, 2), high=array(6, 8))
    (band,) = points(line_chart([series], label="Q", y_range=(0.0, 10.0)), "polygon")
    assert band == [(0, 600), (1000, 800), (1000, 200), (0, 400)]


def test_tick_labels_stand_where_their_values_are():
    svg = line_chart([Series("loss", array(0, 4000), array(0, 1))], label="loss", y_range=(0.0, 1.0))
    labels = {(text.get("class"), text.text): text for text in ET.fromstring(svg).iter("text")}
    for value in (0, 1000, 4000):
        assert float(labels["x", f"{value:,}"].get("x").rstrip("%")) == pytest.approx(value / 40)
    for value in (0, 0.2, 1):
        assert float(labels["y", f"{value}"].get("y").rstrip("%")) == pytest.approx(100 - 100 * value)
    percent = line_chart([], label="success", percent=True, y_range=(0.0, 1.0))
    assert {"0 %", "60 %", "100 %"} <= {text.text for text in ET.fromstring(percent).iter("text")}


def test_a_bar_is_as_long_as_its_rate_and_its_interval_where_it_should_be():
    svg = ET.fromstring(bar(0.815, 0.755, 0.863, colour=1, label="ACRLPD"))
    (rectangle,) = svg.iter("rect")
    assert (rectangle.get("x"), rectangle.get("width")) == ("0", "81.50%")
    across, low, high = svg.find("g").iter("line")
    assert (across.get("x1"), across.get("x2")) == ("75.50%", "86.30%")
    assert {(low.get("x1"), low.get("x2")), (high.get("x1"), high.get("x2"))} == {("75.50%",) * 2, ("86.30%",) * 2}


NAN = math.nan
DEGENERATE = {
    "empty": [],
    "one point": [3.0],
    "one zero": [0.0],
    "all missing": [NAN, NAN],
    "missing at the ends": [NAN, 1.0, NAN],
    "constant": [5.0] * 10,
    "nearly constant": [1e16, 1e16 + 2, 1e16],
    "all zero": [0.0] * 5,
    "negative": [-1.0, -2.0],
    "as large as it gets": [-1.7e308, 1.7e308, 1.0],
    "as small as it gets": [5e-324, 1e-310, 1e-300],
    "all magnitudes": [1e-300, 1.0, 1e300],
    "infinite": [math.inf, 1.0, -math.inf, 2.0],
}


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", DEGENERATE.values(), ids=DEGENERATE)
def test_whatever_was_logged_is_a_chart_with_everything_inside_it(values, log):
    y = np.array(values, np.float64)
    series = [Series("a", np.arange(len(y), dtype=float), y, low=y, high=y), Series("b", array(), array())]
    svg = line_chart(series, label="any", log_y=log)
    places = [point for kind in ("polyline", "polygon") for line in points(svg, kind) for point in line] + dots(svg)
    assert all(0 <= coordinate <= 1000 for point in places for coordinate in point)
    drawable = np.isfinite(y) & ((y > 1e-301) if log else (np.abs(y) < 1e301))
    assert bool(places) == drawable.any()
    assert ("no data" in svg) == (not places)
    assert not re.search(r"\b(nan|inf)\b", svg)


def value_of(label):
    """What a person reads."""
    text = (
        label.replace("−", "-")
        .replace(",", "")
        .replace("·10", "e")
        .translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    )
    if "e" not in text and any(sign in label for sign in "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"):
        text = re.sub("^(-?)10", r"\g<1>1e", text)
    scale = {"k": 1e3, "M": 1e6}.get(text[-1], 1.0)
    return float(text.rstrip("kM")) * scale


numbers = st.floats(-1e12, 1e12, allow_subnormal=False) | st.floats(-2, 2, allow_subnormal=False)


@example(values=[0.0], offset=1e-300, scale=1.0, log=False)
@given(st.lists(numbers, min_size=1, max_size=5), numbers, st.sampled_from([1.0, 1e-3, 1e-6]), st.booleans())
def test_ticks_are_few_inside_the_range_and_say_what_they_are(values, offset, scale, log):
    axis = Axis.fit([offset + scale * np.array(values)], log, margin=0.05)
    ticks = axis.ticks()
    places = axis.place(np.array([value for value, _ in ticks]))
    assert 2 <= len(ticks) <= 10
    assert (np.diff(places) > 0).all()
    assert ((places > -1e-6) & (places < 1 + 1e-6)).all()
    # The label is off by less than anybody could see.
    assert np.allclose(axis.place(np.array([value_of(label) for _, label in ticks])), places, atol=1e-3)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.05, "0.05"), (-0.1, "−0.1"), (2e3, "2,000"), (2e4, "20k"), (1.5e6, "1.5M"), (3e-5, "3·10⁻⁵")],
)
def test_numbers_are_written_as_people_write_them(value, text):
    assert number(value) == text


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


def test_one_spike_in_a_million_points_is_drawn():
    y = np.ones(1_000_000)
    y[123_456] = 9.0
    (line,) = points(line_chart([Series("loss", np.arange(1e6), y)], label="loss", y_range=(0.0, 10.0)))
    assert len(line) <= POINTS + 2
    assert (pytest.approx(123.5, abs=0.1), 100) in line


def test_a_mark_stands_at_its_time():
    svg = line_chart([], label="Q", x_range=(0.0, 80.0), marks=[Mark(60.0, "success", "good")])
    mark = ET.fromstring(svg).find("g")
    assert [mark.get("class"), mark.find("line").get("x1"), mark.find("text").text] == [
        "mark good",
        "75.00%",
        "success",
    ]


def test_the_interval_of_a_single_point_is_seen():
    svg = line_chart([Series("success", array(5), array(0.5), array(0.4), array(0.6))], label="a", y_range=(0.0, 1.0))
    (whisker,) = ET.fromstring(svg).iter("polygon")
    assert whisker.get("class").startswith("whisker")
    assert [y for _, y in points(svg, "polygon")[0]] == [600, 400]


# Runs


def write_run(directory, records, end=""):
    directory.mkdir(exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + end)
    return directory


def test_a_run_is_read_metric_by_metric(tmp_path):
    records = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2, "eval/success": 0.5, "note": "text"}]
    run = read_run(write_run(tmp_path / "mine", records))
    assert (run.name, set(run.curves)) == ("mine", {"loss", "eval/success"})
    assert run.curves["loss"].steps.tolist() == [1, 2]
    assert run.curves["loss"].values.tolist() == [3, 2]
    assert run.curves["eval/success"].steps.tolist() == [2]


@pytest.mark.parametrize("end", ['{"step": 3, "lo', "\x00\x00", '{"step": 3'])
def test_a_last_line_that_was_cut_off_is_left_out(tmp_path, end):
    run = read_run(write_run(tmp_path, [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}], end))
    assert run.curves["loss"].steps.tolist() == [1, 2]


def test_a_step_logged_again_after_a_resume_counts_once(tmp_path):
    records = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"step": 1, "q": 0.0}]
    curve = read_run(write_run(tmp_path, records)).curves["loss"]
    assert (curve.steps.tolist(), curve.values.tolist()) == ([1, 2], [3, 1])


def test_a_hole_in_a_metric_is_a_gap_but_its_rhythm_is_not(tmp_path):
    steady = [*range(10, 101, 10), *range(150, 201, 10)]
    rarer = [*range(10, 101, 10), *range(200, 501, 100)]
    records = [{"step": step} for step in range(1, 501)]
    for name, steps in {"hole": steady, "slower": rarer, "rare": [100, 300, 500]}.items():
        for step in steps:
            records[step - 1][name] = 1.0
    records[69]["hole"] = math.nan
    records[19]["slower"] = None
    curves = read_run(write_run(tmp_path, records)).curves
    assert curves["hole"].steps[np.isnan(curves["hole"].values)].tolist() == [70, 125]
    assert curves["slower"].steps[np.isnan(curves["slower"].values)].tolist() == [20]
    assert np.isfinite(curves["rare"].values).all()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"step": 1}\n{"st\n{"step": 3}\n', "line 2 is not JSON"),
        ('{"loss": 1}\n', "line 1 is no record of a step"),
        ("[1]\n", "line 1 is no record of a step"),
        ('{"step": "one"}\n', "line 1 is no record of a step"),
        ('{"step": NaN}\n', "line 1 is no record of a step"),
    ],
)
def test_a_damaged_file_is_refused_with_the_line(tmp_path, text, said):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(DataError, match=said) as refused:
        read_run(tmp_path)
    assert str(tmp_path / "metrics.jsonl") in str(refused.value)


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no metrics.jsonl"):
        read_run(tmp_path)


def test_a_run_has_one_colour_in_all_charts_and_in_the_legend():
    curve = Curve(array(1, 2), array(1, 2))
    runs = [Run("a", {"loss": curve}), Run("b", {"loss": curve, "critic/q_mean": curve, "val/loss": curve})]
    body = curves_section(runs, colours={"b": 4}).body
    drawn = {(e.get("data-name"), e.get("class").split()[1]) for e in ET.fromstring(f"<p>{body}</p>").iter("polyline")}
    assert drawn == {("a", "c0"), ("b", "c4"), ("b, held out", "c4")}
    assert '<i class="c4"></i>b' in body


def test_success_is_drawn_with_its_interval_on_a_scale_from_0_to_100_percent():
    curves = {"eval/success": 0.5, "eval/success_low": 0.4, "eval/success_high": 0.6}
    run = Run("a", {name: Curve(array(0, 10), array(value, value)) for name, value in curves.items()})
    body = f"<p>{curves_section([run]).body}</p>"
    assert points(body) == [[(0, 500), (1000, 500)]]
    assert points(body, "polygon") == [[(0, 600), (1000, 600), (1000, 400), (0, 400)]]


def test_nothing_logged_is_said():
    assert curves_section([Run("a", {})]).introduction == "Nothing was logged."


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


# Success

PAIRED = {"difference": 0.38, "interval": [0.303, 0.449], "p_value": 1e-12}


def test_results_are_read_with_what_is_known_of_them():
    raw = {
        "bc": {"success": 0.435, "low": 0.368, "high": 0.504, "episodes": 200},
        "acrlpd": {"success": 0.815, "low": 0.755, "high": 0.863, "episodes": 200, "name": "ACRLPD", "paired": PAIRED},
    }
    first, second = read_results(raw)
    assert first == PolicyResult("bc", 0.435, 0.368, 0.504, 200)
    assert second == PolicyResult("ACRLPD", 0.815, 0.755, 0.863, 200, paired=Difference(0.38, 0.303, 0.449, 1e-12))


@pytest.mark.parametrize(
    "damage", [{"success": None}, {"low": "x"}, {"episodes": []}, {"paired": {"interval": [1]}}, {"success": 43.5}]
)
def test_a_result_that_is_none_is_refused_by_name(damage):
    with pytest.raises(DataError, match="the result of bc"):
        read_results({"bc": {"success": 0.4, "low": 0.3, "high": 0.5, "episodes": 10} | damage})


def test_the_headline_states_the_numbers():
    bc, rl = result(87), result(163, name="ACRLPD", paired=Difference(0.38, 0.303, 0.449, 1e-12))
    assert headline(rl, bc).startswith(
        "ACRLPD 81.5 % [75.5, 86.3] against BC 43.5 % [36.8, 50.4], 200 episodes each on the same initial states:"
    )
    assert "same initial states" not in headline(result(163), bc)
    assert "200 and 50 episodes" in headline(rl, result(20, 50))


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (result(163, name="RL"), "RL is better, and the 95 % intervals do not overlap"),
        (result(20, name="RL"), "RL is worse, and the 95 % intervals do not overlap"),
        (result(95, name="RL"), "intervals overlap: these episodes do not tell"),
        (
            result(95, name="RL", paired=Difference(0.04, -0.02, 0.1, 0.21)),
            "the pairwise difference is not significant (+4.0 [−2.0, +10.0] points, p = 0.210)",
        ),
        (result(95, name="RL", paired=Difference(0.04, 0.01, 0.07, 0.004)), "but compared pairwise RL is better"),
        (result(80, name="RL", paired=Difference(-0.04, -0.07, -0.01, 0.004)), "but compared pairwise RL is worse"),
    ],
)
def test_the_headline_claims_what_the_intervals_allow(policy, said):
    assert said in headline(policy, result(87))


def test_the_table_holds_every_number():
    rl = result(
        163, name="RL", description="offline", updates=6000, minutes=7.25, paired=Difference(0.38, 0.303, 0.449, 0.0)
    )
    body = comparison_section([result(87), rl], baseline="BC").body
    rows = [list(row) for row in ET.fromstring(f"<p>{body.replace(' data-empty', '')}</p>").iter("tr")]
    assert [cell.text for cell in rows[1]] == ["BC", "–", "43.5 %", "36.8 – 50.4", "200", "–", "–", "–", "–"]
    expected = ["RL", "offline", "81.5 %", "75.5 – 86.3", "200", "6,000", "7.2", "+38.0 [+30.3, +44.9]", "< 0.0001"]
    assert [cell.text for cell in rows[2]] == expected


def test_the_table_leaves_out_what_nobody_knows():
    body = comparison_section([result(87), result(163)], baseline="BC").body
    (head, *_) = ET.fromstring(f"<p>{body.replace(' data-empty', '')}</p>").iter("tr")
    assert [cell.text for cell in head] == ["Policy", "Success", "95 % interval", "Episodes"]
    assert "McNemar" not in body


# Films


def pictures(html):
    for image in ET.fromstring(html.replace('">', '"/>').replace('"/><', '"><', 1)).iter("img"):
        content = base64.b64decode(image.get("src").removeprefix("data:image/png;base64,"))
        yield image.get("alt"), np.asarray(Image.open(io.BytesIO(content)))


@pytest.mark.parametrize("length", [1, 2, 5, 12, 26, 80])
def test_a_strip_divides_the_time_evenly(length):
    frames = np.arange(length, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 6, 3), np.uint8)
    shown = list(pictures(film_strip(frames)))
    assert len(shown) == {1: 1, 2: 2, 5: 3}.get(length, FRAMES)
    for index, (text, picture) in enumerate(shown):
        step = picture[0, 0, 0]
        assert np.array_equal(picture, frames[step])
        assert text == f"step {step}"
        # The moment lies in the picture's own stretch of the axis, at most one step from the middle.
        assert abs((step + 0.5) / length - (index + 0.5) / len(shown)) <= 1 / length


def test_a_wide_picture_is_made_smaller_in_proportion():
    frame = np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8)
    content = base64.b64decode(encode_png(frame, widest=160).split(",")[1])
    assert Image.open(io.BytesIO(content)).size == (160, 120)


def test_q_values_of_all_episodes_share_a_scale_and_end_with_their_outcome():
    frames = np.zeros((10, 4, 4, 3), np.uint8)
    q = np.array([[0.0, 0.5], [0.2, 1.0]])
    episodes = [Episode("a", frames, np.array([0, 5]), q, True), Episode("b", frames[:8], array(0, 4), q / 2, False)]
    body = episodes_section(episodes).body
    charts = re.findall(r'<svg class="chart".*?</svg>.*?</svg>', body)
    ranges = {ET.fromstring(chart).get("data-y") for chart in charts}
    assert ranges == {"-0.08 1.08"}
    first = [[(x, 1.08 - y / 1000 * 1.16) for x, y in line] for line in points(charts[0])]
    assert np.allclose(first, [[(0, 0.1), (500, 0.75)]], atol=1e-3)
    assert [ET.fromstring(chart).find("g/text").text for chart in charts] == [
        "success after 10 steps",
        "no success in 8 steps",
    ]


def test_an_episode_without_pictures_is_refused():
    nothing = Episode("mine", np.zeros((0, 4, 4, 3), np.uint8), array(), np.zeros((2, 0)), True)
    with pytest.raises(DataError, match="'mine' has no pictures"):
        episodes_section([nothing])


# The page


def test_a_page_is_well_formed_and_asks_nothing_of_the_network():
    text = full_page()
    page = Page(text)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch\(|XMLHttpRequest", text)
    for tag, attributes in page.elements:
        for name in {"src", "href", "action", "data", "poster", "srcset"} & attributes.keys():
            assert attributes[name].startswith(("data:", "#")), (tag, name)
    assert {"viewport"} <= {attributes.get("name") for _, attributes in page.elements}
    assert "prefers-color-scheme" in text
    for svg in re.findall(r"<svg class=\"bar\".*?</svg>", text):
        ET.fromstring(svg)


def test_no_name_can_become_part_of_the_page():
    harmless, hostile = Page(full_page("ACRLPD")), Page(full_page(HOSTILE))
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in harmless.elements]
    assert [set(attributes) for _, attributes in hostile.elements] == [set(a) for _, a in harmless.elements]
    # And it is still there to be read, as often as the harmless one.
    assert "".join(hostile.text).count(HOSTILE) == "".join(harmless.text).count("ACRLPD")


def test_a_page_of_long_runs_stays_small():
    assert len(full_page(rows=50_000).encode()) < 500_000


def test_only_settings_that_differ_are_listed():
    configs = {
        "a": {"steps": 1, "agent": {"lr": 0.1, "n": 4}, "data": {}, "same": [1]},
        "b": {"steps": 1, "agent": {"lr": 0.2}, "data": {}, "same": [1], "env": None},
    }
    assert differing_settings(configs) == {"agent.lr": ["0.1", "0.2"], "agent.n": ["4", ""], "env": ["", "none"]}


def test_commands_are_kept_to_the_letter():
    commands = ["pirl train demo --exp-name 'a b' \\", "  --agent.clip '<1>' && echo \"done\""]
    code = re.search("<code>.*</code>", provenance_section(commands=commands, facts={}).body, re.DOTALL)
    assert ET.fromstring(code.group()).text == "\n".join(commands)


def test_the_machine_says_how_many_cores_may_be_used():
    assert int(describe_machine()["Cores"]) >= 1
