"""The pictures of healthy and sick runs: small, whole, on the page, and made by what the page says."""

import importlib.util
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from pirl.report.runs import Curve, Run

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/guides/not_learning.md").read_text()
spec = importlib.util.spec_from_file_location("learning_pictures", ROOT / "scripts" / "learning_pictures.py")
learning_pictures = sys.modules["learning_pictures"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(learning_pictures)

SVG = "{http://www.w3.org/2000/svg}"


def test_pictures_are_small_whole_and_shown_with_the_commands_of_their_runs():
    assert set(re.findall(r"images/learning/(\w+)\.svg", PAGE)) == set(learning_pictures.PICTURES)
    for name, picture in learning_pictures.PICTURES.items():
        file = ROOT / f"docs/images/learning/{name}.svg"
        assert file.stat().st_size < 60_000
        shown = {line.get("data-name") for line in ElementTree.parse(file).iter(f"{SVG}polyline")}
        assert shown == set(picture.runs)
        for path in picture.runs.values():
            made = "pirl demo ript" if path.startswith("runs/demo_ript/") else f"--exp-name {Path(path).name} "
            assert made in PAGE, path


def test_a_value_is_drawn_where_the_axis_says():
    chart = learning_pictures.Chart("a", "m", range=(0.0, 4.0))
    run = Run("r", {"m": Curve(np.array([0.0, 5.0, 10.0]), np.array([0.0, 1.0, 4.0]))})
    drawn = ElementTree.fromstring(learning_pictures.draw(learning_pictures.Picture({}, [chart]), [run]))
    (line,) = drawn.iter(f"{SVG}polyline")
    assert line.get("points") == "0.0,1000.0 500.0,750.0 1000.0,0.0"
