"""What the critics know, as charts and as one sentence that says whether to trust them."""

import math
import re
import xml.etree.ElementTree as ET
from datetime import datetime
from html import unescape

import numpy as np
import pytest

from made_runs import learning, make_run
from pirl.report.knowledge import CONFUSES, REMEMBERS, SEES, TELLS_APART, judge_critics
from pirl.report.run_report import build_run_report, read_runs
from pirl.report.runs import Curve, Run

NONE = math.nan
BLIND, BEST_OF_N, CONFUSED = (
    "Trust the critics only as far as",
    "Do not trust best-of-N",
    "Do not trust the critics: they",
)
REMEMBERING, BLIND = "Do not trust the critics beyond the training episodes", "Trust the critics only as far as"
TRUSTED = "Trust the critics: they tell"


def measured(pair: float, shuffled: float = NONE, outcome: float = NONE, gap: float = NONE) -> dict[str, float]:
    names = ("val/critic/pair_auc", "val/critic/pair_auc_shuffled", "val/critic/outcome_auc", "gap/critic/pair_auc")
    return dict(zip(names, (pair, shuffled, outcome, gap), strict=True))


def judge(*validations: dict[str, float]) -> str:
    steps = 10.0 * np.arange(1, len(validations) + 1)
    curves = {name: Curve(steps, np.array([one[name] for one in validations])) for name in validations[0]}
    return judge_critics(Run("mine", curves))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (measured(TELLS_APART - 0.01), BEST_OF_N),
        (measured(TELLS_APART - 0.01, 0.3, 0.2, 0.4), BEST_OF_N),
        (measured(TELLS_APART + 0.01), TRUSTED),
        (measured(0.9, outcome=CONFUSES - 0.01), CONFUSED),
        (measured(0.9, outcome=CONFUSES + 0.01), TRUSTED),
        (measured(0.8, gap=REMEMBERS + 0.01), REMEMBERING),
        (measured(0.8, gap=REMEMBERS - 0.01), TRUSTED),
        (measured(0.8, gap=-0.3), TRUSTED),
        (measured(0.8, shuffled=0.8 - SEES + 0.01), BLIND),
        (measured(0.8, shuffled=0.9), BLIND),
        (measured(0.8, shuffled=0.8 - SEES - 0.01), TRUSTED),
    ],
)
def test_one_sentence_says_whether_to_trust_the_critics(values, said):
    assert judge(values).startswith(said)
    assert judge(values).count(". ") == 0, "one sentence"


def test_the_sentence_comes_with_its_numbers():
    assert "(pair_auc 0.53; chance is 0.5)" in judge(measured(0.53))
    assert "(outcome_auc 0.31)" in judge(measured(0.9, outcome=0.31))
    assert "(pair_auc 0.95, and 0.70 on held-out ones)" in judge(measured(0.7, gap=0.25))
    assert "(pair_auc 0.80, and 0.79 with the images shuffled)" in judge(measured(0.8, 0.79))
    assert "(pair_auc 0.93, 0.66 with the images shuffled)" in judge(measured(0.93, 0.66))
    assert "(pair_auc 0.93)" in judge(measured(0.93)), "no cameras"


def test_the_last_validation_that_could_compare_chunks_decides():
    assert judge(measured(0.5), measured(0.9)).startswith(TRUSTED)
    assert judge(measured(0.9), measured(0.5)).startswith(BEST_OF_N)
    # What was measured at another time does not count.
    assert judge(measured(0.9, outcome=0.1), measured(0.9)).startswith(TRUSTED)
    assert judge(measured(0.9), measured(NONE, outcome=0.1)).startswith(TRUSTED)


def test_what_was_not_measured_is_not_judged():
    for curves in ({}, {"val/critic/pair_auc": Curve(np.array([1.0]), np.array([NONE]))}):
        said = judge_critics(Run("mine", curves))
        assert "was not measured" in said
        assert "--data.validation-fraction, --validation-every" in said


def section(*runs):
    text = build_run_report(read_runs(runs), datetime(2026, 1, 2, 12))
    found = re.search(r"<section><h2>What the critics know</h2>.*?</section>", text, re.DOTALL)
    return unescape(found.group()) if found else ""


def validation(step, **values):
    spreads = {"critic/sample_spread": 0.1, "critic/state_spread": 0.3}
    return {"step": step, **measured(0.8, 0.6, 0.7, 0.02), **spreads, "gap/critic/td_error": -0.1} | values


def test_the_section_shows_every_measurement_and_the_sentence(tmp_path):
    text = section(make_run(tmp_path / "mine", [*learning(), validation(50), validation(100)]))
    assert f"on held-out episodes. {TRUSTED}" in text
    drawn = [ET.fromstring(chart) for chart in re.findall(r'<svg class="chart".*?</svg>.*?</svg>', text)]
    titles = [chart.get("aria-label") for chart in drawn]
    assert titles[:4] == ["Chunks told apart", "Outcomes told apart", "Spread over samples", "Spread over states"]
    assert titles[4:] == ["Gap: chunks told apart", "Gap: TD error"]
    lines = {line.get("data-name"): line.get("points") for line in drawn[0].iter("polyline")}
    assert lines.keys() == {"mine, held out", "mine, images shuffled"}
    heights = {name: float(points.split(",")[-1]) for name, points in lines.items()}
    assert heights == {"mine, held out": 200, "mine, images shuffled": 400}, "80 and 60 of 100 percent, from above"


def test_several_runs_are_judged_one_by_one(tmp_path):
    good = make_run(tmp_path / "good", [*learning(), validation(100)])
    bad = make_run(tmp_path / "bad", [*learning(), validation(100, **{"val/critic/pair_auc": 0.5})])
    other = make_run(tmp_path / "other", learning())
    rows = ET.fromstring(re.search("<table>.*?</table>", section(good, bad, other)).group()).iter("tr")
    cells = [["".join(cell.itertext()) for cell in row] for row in rows]
    assert [row[0] for row in cells] == ["Run", "good", "bad"]
    assert cells[1][1].startswith(TRUSTED)
    assert cells[2][1].startswith(BEST_OF_N)


def test_a_run_without_critics_has_no_such_section(tmp_path):
    assert not section(make_run(tmp_path / "mine", [*learning(), {"step": 100, "gap/bc/loss": -0.1}]))
