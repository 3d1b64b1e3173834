"""The page says of runs what was measured, needs nothing but itself, and shows text as text."""

import json
import math
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ET
from datetime import datetime
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from made_runs import RIPT, ROLLBACKS, evaluation, learning, make_run, rollouts
from pirl.envs.evaluation import Evaluation, wilson
from pirl.errors import DataError
from pirl.report import replay
from pirl.report.plots import PANELS
from pirl.report.runs import Curve, PolicyResult, Run, read_runs
from pirl.report.sections import (
    CONFUSES,
    REMEMBERS,
    TELLS_APART,
    USES_IMAGES,
    build_page,
    build_run_report,
    comparison_section,
    curves_section,
    differing_settings,
    judge_critics,
    provenance_section,
    read_results,
    summarize,
)

HOSTILE = """<script>alert(1)</script>"'&<img src=http://evil.example onerror=alert(2)>"""
VOID = {"meta", "link", "img", "br", "hr", "input"}
ACRLPD = {"agent": {"learner": "acrlpd", "lr": 0.1}}
ALL_PAIRED = {"difference": 0.38, "interval": [0.303, 0.449], "p_value": 1e-12}


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


def page(*paths, **options):
    return build_run_report(read_runs(paths), datetime(2026, 1, 2, 12), **options)


def section(text, title):
    found = re.search(rf"<section><h2>{re.escape(title)}</h2>(.*?)</section>", text, re.DOTALL)
    return found.group(1) if found else ""


def rows(html):
    """The cells of the first table."""
    table = ET.fromstring(re.search("<table>.*?</table>", html, re.DOTALL).group())
    return [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]


def charts(text):
    """The charts by their titles."""
    found = re.findall(r'<svg class="chart".*?</svg>.*?</svg>', text, re.DOTALL)
    return {chart.get("aria-label"): chart for chart in map(ET.fromstring, found)}


def result(successes, n=200, name="BC", **more):
    low, high = wilson(successes, n)
    return PolicyResult(name, successes / n, low, high, n, **more)


def full_page(name="ACRLPD", count=50):
    """A page with everything on it, all of whose texts are `name`."""
    steps = np.arange(1.0, count + 1)
    curve = Curve(steps, 1 + np.sin(steps) / 2)
    metrics = {metric for panel in PANELS for metric in (panel.metric, panel.low, panel.high) if metric}
    run = Run(name, dict.fromkeys([*metrics, "val/loss"], curve))
    policy = result(163, name=name, description=name, paired=ALL_PAIRED)
    q_values = np.random.default_rng(0).random((2, 20))
    episode = replay.Episode(name, np.zeros((20, 8, 8, 3), np.uint8), np.arange(20), q_values, success=True)
    configs = {name: {name: name, "agent": {}}, "b": {name: 1, "agent": {}}}
    sections = [
        comparison_section([policy, result(87)], baseline=name, title=name, introduction=name),
        curves_section([run, Run("other", {"loss": curve})], title=name),
        replay.episodes_section([episode], title=name, introduction=name),
        provenance_section(commands=[name], facts={name: name}, configs=configs, introduction=name),
    ]
    return build_page(name, f"{name} {policy.rate}", sections, subtitle=name)


# The page


def test_a_page_is_well_formed_small_and_asks_nothing_of_the_network():
    text = full_page(count=50_000)
    assert len(text.encode()) < 500_000
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch\(|XMLHttpRequest", text)
    for tag, attributes in Page(text).elements:
        for name in {"src", "href", "action", "data", "poster", "srcset"} & attributes.keys():
            assert attributes[name].startswith(("data:", "#")), (tag, name)


def test_no_name_can_become_part_of_the_page(tmp_path):
    harmless, hostile = Page(full_page("ACRLPD")), Page(full_page(HOSTILE))
    assert [(tag, set(a)) for tag, a in hostile.elements] == [(tag, set(a)) for tag, a in harmless.elements]
    assert "".join(hostile.text).count(HOSTILE) == "".join(harmless.text).count("ACRLPD")
    text = page(
        make_run(tmp_path / "<b>mine", learning(), end="failed", rollbacks=[{**ROLLBACKS[0], "reason": HOSTILE}])
    )
    assert (text.count("<script>"), "<b>mine" in text, "<full>" in text) == (1, False, False)


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# The page in frames of two widths; what they come to is written where it can be read from outside.
FRAMES = """<iframe src="page.html" style="width:390px"></iframe>
<iframe src="page.html" style="width:1280px"></iframe><pre id="seen"></pre><script>onload = () => {
  const seen = [...document.querySelectorAll('iframe')].map(frame => {
    const page = frame.contentDocument, chart = page.querySelector('svg.chart'), box = chart.getBoundingClientRect();
    chart.dispatchEvent(new frame.contentWindow.PointerEvent('pointermove',
      {clientX: box.left + box.width / 2, clientY: box.top + 20}));
    const wide = [...page.querySelectorAll('main *')].filter(one => !one.closest('pre, svg')
      && one.getBoundingClientRect().right > frame.clientWidth + 1);
    return {wide: wide.map(one => one.outerHTML.slice(0, 80)), tip: page.getElementById('tip').textContent};
  });
  document.getElementById('seen').textContent = JSON.stringify(seen);
};</script>"""


@pytest.mark.skipif(BROWSER is None, reason="there is no browser")
def test_the_page_fits_phones_and_screens_and_answers_the_pointer(tmp_path):
    a = make_run(tmp_path / "with-a-rather-long-name-0001", [*learning(), evaluation(50, 90), evaluation(100, 120)])
    b = make_run(tmp_path / "ript", [*rollouts(), evaluation(40, 100)], config=RIPT, end="failed", rollbacks=ROLLBACKS)
    (tmp_path / "page.html").write_text(page(a, b))
    (tmp_path / "frames.html").write_text(FRAMES)
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"]
    command += ["--allow-file-access-from-files", "--virtual-time-budget=3000", "--window-size=1400,1000"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'frames.html'}"]
    dom = subprocess.run(command, capture_output=True, timeout=120).stdout.decode()
    for seen in json.loads(unescape(re.search('<pre id="seen">(.*?)</pre>', dom).group(1))):
        assert seen["wide"] == []
        assert seen["tip"].startswith("updates ")
        assert "with-a-rather-long-name-0001: " in seen["tip"]


# Success


def test_the_table_of_results_holds_every_number_and_no_empty_column():
    raw = {"success": 0.815, "low": 0.755, "high": 0.863, "episodes": 200, "lost": 0}
    bc, rl = read_results(
        {"BC": raw, "rl": {**raw, "name": "RL", "updates": 6000, "minutes": 7.25, "paired": ALL_PAIRED}}
    )
    table = rows(comparison_section([bc, rl], baseline="BC").body)
    assert table[1] == ["BC", "81.5 %", "75.5 – 86.3", "200", "–", "–", "–", "–"]
    assert table[2] == ["RL", "81.5 %", "75.5 – 86.3", "200", "6,000", "7.2", "+38.0 [+30.3, +44.9]", "< 0.0001"]
    assert rows(comparison_section([bc], baseline="BC").body)[0] == ["Policy", "Success", "95 % interval", "Episodes"]


# Runs


def test_every_metric_that_says_anything_has_a_chart_and_an_axis_that_says_what_it_counts(tmp_path):
    own = {"my/own": 3.0, "critic/q_mean": 1.0, "critic/q_min": 0.0, "critic/q_max": 2.0, "empty": 0, "val/alone": 2.0}
    online = [{"step": 10 * n, "online/env_steps": 500 * n, "online/success": 0.0} for n in (1, 2, 3)]
    timing = [{"step": 10, "memory/update/host": 2.0}]
    text = page(make_run(tmp_path / "mine", [*learning(), {"step": 100, **own}, *online], timing=timing))
    assert {title: chart.get("data-unit") for title, chart in charts(text).items()} == dict.fromkeys(
        ("Loss", "Imitation loss", "Gradient norm of the policy", "Q-values", "lr/policy", "param_norm/policy"),
        "updates",
    ) | dict.fromkeys(("memory/device", "memory/update/host", "my/own", "alone"), "updates") | {
        "Success while collecting": "environment steps"
    }
    assert "Nothing was evaluated" in text


def test_a_run_that_has_logged_nothing_gives_a_page_that_says_so(tmp_path):
    text = page(make_run(tmp_path / "mine", None, end="failed"))
    assert "Nothing was logged. It was not evaluated." in text
    assert not charts(text)


def test_rollbacks_and_skipped_updates_are_listed_and_marked_in_the_curves(tmp_path):
    records = [{**record, "skipped": record["step"] // 50} for record in learning()]
    text = page(make_run(tmp_path / "mine", [*records, evaluation(100, 50)], rollbacks=ROLLBACKS))
    marks = [(mark.get("class"), mark.find("title").text) for mark in charts(text)["Loss"].findall("g")]
    assert marks[0] == ("mark rollback c0", "mine: rolled back from 60 to 20: success has collapsed")
    assert [row[1] for row in rows(section(text, "What went wrong"))[1:]] == [
        "Rolled back from 60 to 20: success has collapsed",
        "1 skipped between 40 and 50",
        "1 skipped between 90 and 100",
    ]


def test_ript_is_seen_iteration_by_iteration(tmp_path):
    timing = [{"step": 0, "env_steps_per_second": 1234.5, "policy_ms": 20.0}]
    records = [*rollouts(), evaluation(20, 100), evaluation(60, 150)]
    run = make_run(tmp_path / "mine", records, timing=timing, config=RIPT)
    text = page(run)
    assert summarize(read_runs([run])).startswith("mine is done. 4 of 6 iterations, 60 updates. Success 75.0 %")
    head, first, barren, *_, last = rows(section(text, "Iterations of mine"))
    assert head[:7] == ["Iteration", "Updates before", "States tried", "Groups kept", "Success", "After", "Drift"]
    assert first[1:] == ["0", "10", "8", "30 %", "50 %", "0.01", "1,050", "1,234", "20.0"]
    assert barren[1:] == ["20", "11", "0", "40 %", "–", "–", "2,050", "–", "–"]
    assert last[:3] == ["4", "40", "13"]
    tried = charts(text)["Initial states tried"]
    assert (tried.get("data-unit"), tried.get("data-x")) == ("iterations", "0.0 4.0")
    assert charts(text)["Success over environment steps"].get("data-unit") == "environment steps"


def test_the_time_of_a_run_is_that_of_its_parts_and_the_rest(tmp_path):
    timing = [
        {"step": 10, "seconds": 10.0, "seconds/data": 1.0, "seconds/update": 4.0},
        {"step": 20, "seconds": 30.0, "seconds/data": 3.0, "seconds/evaluation": 20.0},
    ]
    assert rows(section(page(make_run(tmp_path / "mine", learning(), timing=timing)), "Time")) == [
        ["Run", "Data", "Update", "Evaluation", "The rest", "Total"],
        ["mine", "4 s (10 %)", "4 s (10 %)", "20 s (50 %)", "12 s (30 %)", "40 s"],
    ]


def test_several_runs_are_drawn_over_each_other_and_compared_in_what_they_share(tmp_path):
    paths = [make_run(tmp_path / "a", [*learning(), evaluation(100, 150)], config=ACRLPD)]
    paths += [make_run(tmp_path / f"b{number}", [*learning(5), evaluation(50, 9)], end="failed") for number in range(7)]
    text = page(*paths)
    assert "8 runs: 1 done, 7 failed." in text
    assert len({line.get("class") for line in charts(text)["Loss"].iter("polyline")}) == 8
    assert rows(section(text, "Runs"))[2][2:] == [
        "failed",
        "Failed: the disk is <full>. 50 of 100 updates. Success 4.5 % [2.4, 8.3] of 200 episodes after 50 updates.",
    ]
    assert "critics choosing among samples: a." in section(text, "Success")
    settings = [row[0] for row in rows(section(text, "How to reproduce this"))[1:]]
    assert settings == ["agent.learner"]
    assert "pirl train demo --exp-name b3" in text


def test_only_settings_that_differ_are_listed():
    a = {"steps": 1, "agent": {"lr": 0.1, "n": 4}, "data": {}, "same": [1]}
    b = {"steps": 1, "agent": {"lr": 0.2}, "data": {}, "same": [1], "env": None}
    differences = {"agent.lr": ["0.1", "0.2"], "agent.n": ["4", ""], "env": ["", "none"]}
    assert differing_settings({"a": a, "b": b}) == differences


def test_one_sentence_says_whether_to_trust_the_critics(tmp_path):
    names = ("val/critic/pair_auc", "val/critic/pair_auc_shuffled", "val/critic/outcome_auc", "gap/critic/pair_auc")

    def judge(*validations):
        steps = np.arange(1.0, len(validations) + 1)
        curves = {name: Curve(steps, np.array([one[index] for one in validations])) for index, name in enumerate(names)}
        return judge_critics(Run("mine", curves))

    none, edge = math.nan, 0.01
    confused, trusted, blind = "they value failures", "Trust the critics: they tell", "do not use the images"
    for values, said in (
        ((TELLS_APART - edge, 0.3, 0.2, 0.4), "do not tell chunks apart (pair_auc 0.59"),
        ((TELLS_APART + edge, none, none, none), trusted),
        ((0.9, none, CONFUSES - edge, none), confused),
        ((0.9, none, CONFUSES + edge, none), trusted),
        ((0.7, none, none, REMEMBERS + 0.15), "remember these (pair_auc 0.95, and 0.70 on held-out ones)"),
        ((0.8, none, none, REMEMBERS - edge), trusted),
        ((0.8, 0.8 - USES_IMAGES + edge, none, none), blind),
        ((0.8, 0.8 - USES_IMAGES - edge, none, none), trusted),
    ):
        assert said in judge(values)
    assert trusted in judge((0.5, none, 0.1, none), (0.9, none, none, none)), "the last validation decides"
    assert trusted in judge((0.9, none, none, none), (none, none, 0.1, none)), "of those that could compare chunks"
    assert "was not measured" in judge_critics(Run("mine", {}))
    validation = {"step": 100, **dict(zip(names, (0.8, 0.6, 0.7, 0.02), strict=True)), "critic/sample_spread": 0.1}
    text = section(page(make_run(tmp_path / "mine", [*learning(), validation])), "What the critics know")
    assert trusted in text
    assert list(charts(text)) == [
        "Chunks told apart",
        "Outcomes told apart",
        "Spread over samples",
        "Gap: chunks told apart",
    ]


def test_long_runs_and_many_runs_make_small_pages_soon(tmp_path):
    run, steps = make_run(tmp_path / "long", []), range(100_000)
    lines = [
        f'{{"step": {step}, "loss": {1 + math.sin(step / 3e3) / 2:.4f}, "my/own": {step % 7}}}\n' for step in steps
    ]
    (run / "metrics.jsonl").write_text("".join(lines))
    begun = time.process_time()
    for line in lines:
        json.loads(line)
    parsed = time.process_time()
    assert len(page(run).encode()) < 200_000
    assert time.process_time() - parsed < 10 * (parsed - begun), "most of what it takes is to read the lines"
    values = np.random.default_rng(0).random((500, 60))
    records = [{"step": step, **{f"m/{n}": float(v) for n, v in enumerate(row)}} for step, row in enumerate(values)]
    first = make_run(tmp_path / "run-0", records)
    paths = [first, *(shutil.copytree(first, tmp_path / f"run-{number}") for number in range(1, 12))]
    assert len(page(*paths).encode()) < 5e6


# Episodes


def test_critics_that_are_not_there_are_said(tmp_path):
    from pirl.config import format_config, get_config

    run = make_run(tmp_path / "mine", learning())
    (run / "config.yaml").write_text(format_config(get_config("demo_bc")))
    assert "bc has no critics" in page(run, critics=True)


def test_q_values_of_all_episodes_share_a_scale_and_end_with_their_outcome():
    frames, q = np.zeros((10, 4, 4, 3), np.uint8), np.array([[0.0, 0.5], [0.2, 1.0]])
    episodes = [replay.Episode("a", frames, np.array([0, 5]), q, True)]
    body = replay.episodes_section([*episodes, replay.Episode("b", frames[:8], np.array([0, 4]), q / 2, False)]).body
    assert {chart.get("data-y") for chart in charts(body).values()} == {"-0.08 1.08"}
    assert [chart.find("g/text").text for chart in charts(body).values()] == [
        "success after 10 steps",
        "no success in 8 steps",
    ]
    assert "no failure to show" in replay.episodes_section(episodes).introduction
    with pytest.raises(DataError, match="has no images"):
        replay.episodes_section([replay.Episode("a", frames[:0], np.zeros(0), np.zeros((2, 0)), True)])


@pytest.mark.usefixtures("unchecked_signatures")
def test_a_policy_acts_again_as_when_it_was_evaluated(monkeypatch):
    asked = []
    monkeypatch.setattr(replay, "load_trained_policy", lambda policy, description, **how: asked.append(how))
    measured = Evaluation([], {"envs": 4, "denoising_steps": 3})
    replay.evaluated_policy(Path("policy"), measured, SimpleNamespace(describe=lambda: None))
    assert asked == [{"batch_size": 4, "num_steps": 3}]
