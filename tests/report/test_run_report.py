"""`pirl report`'s page says of any run what is on the disk, whatever has become of it, and leaves the run alone."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ET
from datetime import datetime
from html import unescape

import numpy as np
import pytest

from made_runs import HOST, NOBODY, RIPT, ROLLBACKS, evaluation, learning, make_run, practice
from pirl.errors import DataError
from pirl.report.curves import average_stretches
from pirl.report.run_facts import name_runs, read_facts
from pirl.report.run_report import build_run_report, read_runs
from pirl.report.runs import Curve
from pirl.report.time_split import REST, split_time

WHEN = datetime(2026, 1, 2, 12)


def page(*paths, **options):
    return build_run_report(read_runs(paths), WHEN, **options)


def charts(text):
    """The charts of a page by their titles."""
    found = re.findall(r'<svg class="chart".*?</svg>.*?</svg>', text)
    return {chart.get("aria-label"): chart for chart in map(ET.fromstring, found)}


def rows(text, title):
    """The cells of the table in a section."""
    section = re.search(rf"<section><h2>{title}</h2>(.*?)</section>", text, re.DOTALL).group(1)
    table = re.search("<table>.*?</table>", section).group().replace(" data-empty", "")
    return [["".join(cell.itertext()) for cell in row] for row in ET.fromstring(table).iter("tr")]


def lead(text):
    return unescape(re.sub("<.*?>", "", re.search('<p class="lead">(.*?)</p>', text).group(1)))


# What has become of it


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("done", "mine is done. 100 of 100 updates."),
        ("stopped", "mine was stopped at step 60; continue with --resume."),
        ("failed", "mine failed: the disk is <full>."),
        ("ended", "mine ended without a message"),
    ],
)
def test_the_page_says_how_a_run_ended(tmp_path, end, said):
    assert lead(page(make_run(tmp_path / "mine", learning(), end=end))).startswith(said)


def test_a_run_at_work_is_known_by_its_lock_which_stays_its_own(tmp_path, monkeypatch):
    run = make_run(tmp_path / "mine", learning(), end="ended")
    with (run / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", lambda *_: pytest.fail("a lock was taken"))
        assert lead(page(run)).startswith(f"mine is under way (process {NOBODY} on {HOST}). 100 of 100 updates.")
    assert read_facts(run).state.kind == "ended"


def test_what_was_said_before_a_resume_does_not_count(tmp_path):
    run = make_run(tmp_path / "mine", learning(), end="done")
    with (run / "log.txt").open("a") as log:
        log.write("2026-01-03 10:00:00,000 INFO demo in runs/mine\n")
    assert read_facts(run).state.kind == "ended"


def test_a_run_on_another_machine_counts_as_under_way_while_its_files_change(tmp_path):
    run = make_run(tmp_path / "mine", learning(), end="ended", host="elsewhere")
    assert read_facts(run).state.kind == "under way"
    for file in ("log.txt", "metrics.jsonl"):
        os.utime(run / file, (1e9, 1e9))
    assert read_facts(run).state.kind == "ended"


def test_a_report_changes_nothing_in_the_directory(tmp_path):
    run = make_run(tmp_path / "mine", [*learning(), evaluation(100, 50)], timing=[{"step": 10, "seconds": 1.0}])

    def listing():
        return {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in run.rglob("*") if file.is_file()}

    before = listing()
    page(run)
    assert listing() == before


def test_a_line_that_is_being_written_is_left_out_and_said(tmp_path):
    text = page(make_run(tmp_path / "mine", learning(3), torn='{"step": 40, "lo'))
    assert "metrics.jsonl is incomplete" in lead(text)
    assert charts(text)["Loss"].get("data-x") == "0.0 30.0"


@pytest.mark.parametrize("records", [None, []])
def test_a_run_that_has_logged_nothing_gives_a_page_that_says_so(tmp_path, records):
    text = page(make_run(tmp_path / "mine", records, end="failed"))
    assert "Nothing was logged. It was not evaluated." in lead(text)
    assert not charts(text)


def test_a_run_without_evaluations_says_how_to_have_them(tmp_path):
    text = page(make_run(tmp_path / "mine", learning()))
    assert "It was not evaluated." in lead(text)
    assert "--evaluation.every" in text
    assert "Success during training" not in charts(text)


# What is shown


def test_success_comes_with_wilson_intervals_from_the_counts(tmp_path):
    """Eight of ten: 49.0 to 94.3, as in any table of Wilson's interval."""
    text = page(make_run(tmp_path / "mine", [*learning(), evaluation(50, 8, 10), evaluation(100, 10, 10)]))
    assert rows(text, "Success")[1:] == [
        ["After 50 updates", "80.0 %", "49.0 – 94.3", "10"],
        ["After 100 updates", "100.0 %", "72.2 – 100.0", "10"],
    ]
    assert "Success 100.0 % [72.2, 100.0] of 10 episodes after 100 updates." in lead(text)
    (band,) = charts(text)["Success during training"].iter("polygon")
    edges = [float(point.split(",")[1]) for point in band.get("points").split()]
    assert edges == pytest.approx([509.8, 277.5, 0, 56.7], abs=0.1)


def test_every_metric_that_says_anything_has_a_chart_and_an_axis_that_says_what_it_counts(tmp_path):
    own = {"step": 100, "my/own": 3.0, "critic/q_mean": 1.0, "critic/q_min": 0.0, "critic/q_max": 2.0, "empty": 0}
    drawn = charts(page(make_run(tmp_path / "mine", [*learning(), own, {"step": 100, "val/alone": 2.0}])))
    named = {"Loss", "Imitation loss", "Gradient norm of the policy", "Q-values"}
    assert drawn.keys() == named | {"lr/policy", "param_norm/policy", "memory/device", "my/own", "alone"}
    assert {chart.get("data-unit") for chart in drawn.values()} == {"updates"}


def test_ript_is_seen_iteration_by_iteration(tmp_path):
    timing = [{"step": 0, "env_steps_per_second": 1234.5, "policy_ms": 20.0}]
    text = page(make_run(tmp_path / "mine", practice(), timing=timing, config=RIPT))
    assert lead(text).startswith("mine is done. 4 of 6 iterations, 60 updates.")
    head, first, barren, *_, last = rows(text, "Iterations of mine")
    assert head[:7] == ["Iteration", "Updates before", "States tried", "Groups kept", "Success", "After", "Drift"]
    assert first[1:] == ["0", "10", "8", "30 %", "50 %", "0.01", "1,050", "1,234", "20.0"]
    assert barren[1:] == ["20", "11", "0", "40 %", "–", "–", "2,050", "–", "–"]
    assert last[:3] == ["4", "40", "13"]
    tried = charts(text)["Initial states tried"]
    assert (tried.get("data-unit"), tried.get("data-x")) == ("iterations", "0.0 4.0")


def test_success_is_also_seen_over_the_environment_steps_it_took(tmp_path):
    records = [*practice(), evaluation(20, 100), evaluation(60, 150)]
    over = charts(page(make_run(tmp_path / "mine", records, config=RIPT)))["Success over environment steps"]
    assert over.get("data-unit") == "environment steps"
    dots = re.findall(r"M([\d.]+),([\d.]+)h0", ET.tostring(over).decode())
    # Update 20 has learned from the first 1,000; update 60 from 4,000, when 100 more had been taken to look back.
    end = float(over.get("data-x").split()[1])
    assert [float(x) / 1000 * end for x, _ in dots] == pytest.approx([1000.0, 4100.0], abs=3)
    assert [float(y) for _, y in dots] == [500, 250]


def test_online_practice_is_seen_over_environment_steps(tmp_path):
    records = [{"step": 10 * n, "online/env_steps": 500 * n, "online/success": 0.5} for n in (1, 2, 3)]
    drawn = charts(page(make_run(tmp_path / "mine", records, config={"online": {"env_steps": 2000}})))
    assert {chart.get("data-unit") for chart in drawn.values()} == {"environment steps"}


def test_rollbacks_and_skipped_updates_are_marked_where_they_were(tmp_path):
    records = learning()
    for record in records[4:]:
        record["skipped"] = 3
    run = make_run(tmp_path / "mine", records, rollbacks=ROLLBACKS)
    (run / "bad_batches").mkdir()
    (run / "bad_batches" / "00000044.json").write_text(json.dumps({"step": 44, "reason": "loss is nan"}))
    (run / "bad_batches" / "00000045.json").write_text('{"step"')
    text = page(run)
    marks = [
        (mark.get("class"), mark.find("line").get("x1"), mark.find("title").text)
        for mark in charts(text)["Loss"].findall("g")
    ]
    assert marks == [
        ("mark rollback c0", "20.00%", "mine: rolled back from 60 to 20: success has collapsed"),
        ("mark skipped c0", "45.00%", "mine: update 45 skipped: loss is nan"),
        ("mark skipped c0", "50.00%", "mine: 2 skipped between 40 and 50"),
    ]
    assert [row[1] for row in rows(text, "What went wrong")[1:]] == [
        "Rolled back from 60 to 20: success has collapsed",
        "Update 45 skipped: loss is nan",
        "2 skipped between 40 and 50",
    ]


def test_the_time_of_a_run_is_that_of_its_parts_and_the_rest(tmp_path):
    timing = [
        {"step": 10, "seconds": 10.0, "seconds/data": 1.0, "seconds/update": 4.0},
        {"step": 20, "seconds": 30.0, "seconds/data": 3.0, "seconds/evaluation": 20.0},
    ]
    run = make_run(tmp_path / "mine", learning(), timing=timing)
    split = split_time(read_facts(run).timing)
    assert split == {"data": 4.0, "update": 4.0, "evaluation": 20.0, REST: 12.0}
    assert rows(page(run), "Time") == [
        ["Run", "Data", "Update", "Evaluation", "The rest", "Total"],
        ["mine", "4 s (10 %)", "4 s (10 %)", "20 s (50 %)", "12 s (30 %)", "40 s"],
    ]


def test_several_runs_lie_over_each_other_and_their_settings_beside_each_other(tmp_path):
    a = make_run(tmp_path / "a", [*learning(), evaluation(100, 150)])
    b = make_run(tmp_path / "b", learning(5), config={"agent": {"learner": "bc", "lr": 0.2}}, end="failed")
    text = page(a, b)
    assert lead(text) == (
        "2 runs: 1 done, 1 failed. The highest success in a last evaluation is that of a: 75.0 % [68.6, 80.5]."
    )
    assert {line.get("data-name") for line in charts(text)["Loss"].iter("polyline")} == {"a", "b"}
    assert [row[2] for row in rows(text, "Runs")[1:]] == ["done", "failed"]
    assert "Failed: the disk is <full>. 50 of 100 updates." in rows(text, "Runs")[2][3]
    assert rows(text, "How to reproduce this") == [["Setting", "a", "b"], ["agent.lr", "0.1", "0.2"]]
    assert "pirl train demo --exp-name b" in text


def test_learners_that_differ_are_compared_in_what_they_share(tmp_path):
    a = make_run(tmp_path / "a", learning())
    b = make_run(tmp_path / "b", learning(), config={"agent": {"learner": "ript", "beta": 2.0, "lr": 0.1}})
    settings = rows(page(a, b), "How to reproduce this")
    assert [row[0] for row in settings[1:]] == ["agent.learner"]


def test_runs_of_the_same_name_are_told_apart_by_where_they_are(tmp_path):
    paths = [tmp_path / "x" / "run", tmp_path / "y" / "run"]
    assert name_runs(paths) == ["x/run", "y/run"]
    assert name_runs(paths[:1]) == ["run"]


def test_a_film_becomes_a_strip_and_a_damaged_one_a_word(tmp_path):
    from pirl.envs.video import Film, write_films

    run = make_run(tmp_path / "mine", learning())
    (run / "videos").mkdir()
    frames = np.arange(30, dtype=np.uint8)[:, None, None, None] * np.full((1, 32, 32, 3), 8, np.uint8)
    write_films(run / "videos" / "100.mp4", [Film(frames, True)], fps=10)
    assert page(run).count("<img ") == 12
    (run / "videos" / "100.mp4").write_bytes(b"nothing")
    assert "is no film that can be read" in page(run)


def test_critics_that_are_not_there_are_a_word_on_the_page(tmp_path):
    from pirl.config import format_config, get_config

    run = make_run(tmp_path / "mine", learning())
    (run / "config.yaml").write_text(format_config(get_config("demo_bc")))
    assert "Not available: bc has no critics." in page(run, critics=True)


def test_names_and_reasons_stay_text(tmp_path):
    run = make_run(
        tmp_path / "<b>mine", learning(), rollbacks=[{**ROLLBACKS[0], "reason": "<script>alert(1)</script>"}]
    )
    text = page(run)
    assert "<b>mine" not in text
    assert text.count("<script>") == 1


def test_what_critics_chose_is_not_passed_off_as_the_policy(tmp_path):
    records = [*learning(), evaluation(100, 150)]
    acrlpd = {"agent": {"learner": "acrlpd"}, "evaluation": {"best_of_n": True}}
    said = "Measured with its critics choosing among samples: chosen."
    assert said in page(make_run(tmp_path / "chosen", records, config=acrlpd))
    alone = acrlpd | {"evaluation": {"best_of_n": False}}
    assert "Measured with its critics" not in page(make_run(tmp_path / "alone", records, config=alone))


def test_more_runs_than_colours_can_be_told_apart(tmp_path):
    paths = [make_run(tmp_path / f"run-{number}", learning()) for number in range(8)]
    lines = charts(page(*paths))["Loss"].iter("polyline")
    assert len({line.get("class") for line in lines}) == 8


# What is refused


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run: (run / "metadata.json").write_text("{"), "metadata.json of .* cannot be read"),
        (lambda run: (run / "config.yaml").write_text("a: [1"), "config.yaml or .* cannot be read"),
        (lambda run: (run / "config.yaml").write_text("- 1"), "should hold names"),
        (lambda run: (run / "metrics.jsonl").write_text("oh\n"), "line 1 is not JSON"),
        (lambda run: (run / "metadata.json").unlink(), "is not a run"),
        (lambda run: shutil.rmtree(run), "there is no run"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, damage, said):
    run = make_run(tmp_path / "mine", learning())
    damage(run)
    with pytest.raises(DataError, match=said) as refused:
        read_runs([run])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "metadata", "said"),
    [
        ({"online": {"env_steps": "lots"}}, {}, "0 of ? environment steps."),
        ({"online": {"env_steps": float("inf")}}, {}, "0 of ? environment steps."),
        ({"steps": float("nan")}, {}, "100 of ? updates."),
        ({"agent": ["bc"]}, {}, "100 of 100 updates."),
        ({}, {"parameters": ["x"], "versions": "all"}, "100 of 100 updates."),
        ({}, {"parameters": {"policy": "a"}, "versions": {"jax": None}}, "100 of 100 updates."),
    ],
)
def test_what_makes_no_sense_in_a_run_is_left_open(tmp_path, config, metadata, said):
    run = make_run(tmp_path / "mine", learning(), config=config, **metadata)
    assert said in lead(page(run))
    page(run, make_run(tmp_path / "other", learning()))


@pytest.mark.parametrize(
    "damage", [{"eval/success": 1.5}, {"eval/success": -1.0}, {"eval/success": 0.5, "eval/episodes": -3}]
)
def test_an_evaluation_that_cannot_be_is_no_reason_to_show_nothing(tmp_path, damage):
    run = make_run(tmp_path / "mine", [*learning(), evaluation(50, 150), {"step": 100, **damage}])
    assert "Success" in lead(page(run))


def test_steps_that_were_not_counted_are_no_steps(tmp_path):
    run = make_run(tmp_path / "mine", [*learning(), {"step": 100, "online/env_steps": None}])
    assert read_facts(run).env_steps is None


def test_a_directory_of_runs_names_them(tmp_path):
    make_run(tmp_path / "sweep" / "trial-000", learning())
    with pytest.raises(DataError, match="There are runs in it: .*trial-000"):
        read_runs([tmp_path / "sweep"])


def test_the_same_run_twice_is_refused(tmp_path):
    run = make_run(tmp_path / "mine", learning())
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(DataError, match="link is named twice"):
        read_runs([run, tmp_path / "link"])


# How large, how fast


def test_many_steps_make_a_small_page_soon_and_lose_no_peak(tmp_path):
    run = make_run(tmp_path / "mine", [])
    values = 1 + np.sin(np.arange(300_000) / 3e3) / 2
    values[123_456] = 777.0
    lines = [f'{{"step": {step}, "loss": {value:.4f}, "my/own": {value:.4f}}}\n' for step, value in enumerate(values)]
    (run / "metrics.jsonl").write_text("".join(lines))
    begun = time.process_time()
    for line in lines:
        json.loads(line)
    parsed = time.process_time()
    text = page(run)
    assert time.process_time() - parsed < 10 * (parsed - begun), "most of what it takes is to read the lines"
    assert len(text.encode()) < 200_000
    faint = next(line for line in charts(text)["my/own"].iter("polyline") if "faint" in line.get("class"))
    low, high = map(float, charts(text)["my/own"].get("data-y").split())
    top = min(float(point.split(",")[1]) for point in faint.get("points").split())
    assert high - top / 1000 * (high - low) == pytest.approx(777, abs=0.1)


def test_many_runs_with_many_metrics_stay_below_five_megabytes(tmp_path):
    values = np.random.default_rng(0).random((500, 60))
    records = [{"step": step, **{f"m/{n}": float(v) for n, v in enumerate(row)}} for step, row in enumerate(values)]
    first = make_run(tmp_path / "run-0", records)
    paths = [first, *(shutil.copytree(first, tmp_path / f"run-{number}") for number in range(1, 12))]
    assert len(page(*paths).encode()) < 5e6


def test_averages_of_stretches_are_those_of_their_points():
    values = np.arange(40_000.0)
    values[:10] = np.nan
    short = average_stretches(Curve(np.arange(40_000.0), values))
    assert np.isnan(short.values[0])
    assert np.allclose(short.values[1:], short.steps[1:])
    powers = average_stretches(Curve(np.arange(40_000.0), np.exp(values / 1e4)), log=True)
    assert np.allclose(powers.values[1:], np.exp(powers.steps[1:] / 1e4))


# In a browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# The page in a frame of a given width; what it comes to is written where it can be read from outside.
FRAME = """<iframe id="f" src="page.html" style="width:%dpx;height:900px;border:0"></iframe><pre id="seen"></pre><script>
const frame = document.getElementById('f');
frame.onload = () => {
  const page = frame.contentDocument, chart = page.querySelector('svg.chart'), box = chart.getBoundingClientRect();
  chart.dispatchEvent(new frame.contentWindow.PointerEvent('pointermove',
    {clientX: box.left + box.width / 2, clientY: box.top + 20}));
  const wide = [...page.querySelectorAll('main *')].filter(one => !one.closest('pre, svg')
    && one.getBoundingClientRect().right > %d + 1);
  document.getElementById('seen').textContent = JSON.stringify({width: page.documentElement.scrollWidth,
    tip: page.getElementById('tip').textContent, wide: wide.map(one => one.outerHTML.slice(0, 80)),
    charts: page.querySelectorAll('svg.chart').length});
};</script>"""


@pytest.mark.skipif(BROWSER is None, reason="there is no browser")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_the_screen_and_answers_the_pointer(tmp_path, width):
    a = make_run(tmp_path / "with-a-rather-long-name-0001", [*learning(), evaluation(50, 90), evaluation(100, 120)])
    b = make_run(tmp_path / "ript", [*practice(), evaluation(40, 100)], config=RIPT, end="failed", rollbacks=ROLLBACKS)
    text = page(a, b)
    (tmp_path / "page.html").write_text(text)
    (tmp_path / "frame.html").write_text(FRAME % (width, width))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [
        "--allow-file-access-from-files",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=3000",
        "--window-size=1400,1000",
    ]
    run = subprocess.run(
        [*command, "--dump-dom", f"file://{tmp_path / 'frame.html'}"], capture_output=True, timeout=120
    )
    seen = json.loads(unescape(re.search('<pre id="seen">(.*?)</pre>', run.stdout.decode()).group(1)))
    assert seen["width"] == width
    assert seen["wide"] == []
    assert seen["charts"] == len(charts(text))
    assert seen["tip"].startswith("updates ")
    assert "with-a-rather-long-name-0001: " in seen["tip"]
