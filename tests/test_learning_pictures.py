"""The pictures of healthy and sick runs: small, whole, on the page, and made by what the page says."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from pirl.report.runs import Curve, Run

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/guides/not_learning.md").read_text()
spec = importlib.util.spec_from_file_location("learning_pictures", ROOT / "scripts" / "learning_pictures.py")
learning_pictures = sys.modules["learning_pictures"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(learning_pictures)

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", learning_pictures.PICTURES)
def test_a_picture_is_small_whole_and_shown_with_the_commands_of_its_runs(name):
    picture = learning_pictures.PICTURES[name]
    file = ROOT / f"docs/images/learning/{name}.svg"
    assert file.stat().st_size < 60_000
    drawn = ElementTree.parse(file)
    shown = {line.get("data-name") for line in drawn.iter(f"{SVG}polyline")}
    assert shown == set(picture.runs)
    assert f"](../images/learning/{name}.svg)" in PAGE
    for path in picture.runs.values():
        demo = re.match(r"runs/(demo\w*)/", path)
        made = "pirl demo ript" if demo and demo[1] == "demo_ript" else f"--exp-name {Path(path).name} "
        assert made in PAGE, path


def test_every_picture_of_the_page_is_drawn_by_the_script():
    assert set(re.findall(r"images/learning/(\w+)\.svg", PAGE)) == set(learning_pictures.PICTURES)


def test_a_value_is_drawn_where_the_axis_says():
    chart = learning_pictures.Chart("a", "m", range=(0.0, 4.0))
    run = Run("r", {"m": Curve(np.array([0.0, 5.0, 10.0]), np.array([0.0, 1.0, 4.0]))})
    drawn = ElementTree.fromstring(learning_pictures.draw(learning_pictures.Picture({}, [chart]), [run]))
    (line,) = drawn.iter(f"{SVG}polyline")
    assert line.get("points") == "0.0,1000.0 500.0,750.0 1000.0,0.0"


def test_iterations_after_a_rollback_are_drawn_after_those_before_it(tmp_path):
    rollouts = [(0, 0.4), (72, 0.5), (144, 0.1), (72, 0.6)]
    records = [{"step": step, "rollout/success": success, "rollout/contexts": 9} for step, success in rollouts]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    curve = learning_pictures.by_iteration(tmp_path, "r").curves["rollout/success"]
    assert curve.steps.tolist() == [1, 2, 3, 4]
    assert curve.values.tolist() == [0.4, 0.5, 0.1, 0.6]
