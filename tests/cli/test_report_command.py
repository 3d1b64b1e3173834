"""`pirl report`: where the page goes, and what it refuses."""

import subprocess
import sys

import pytest

from made_runs import evaluation, learning, make_run


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "runs" / "mine", [*learning(), evaluation(100, 150)])


def test_the_page_of_a_run_lies_in_its_directory(call, run):
    for _ in range(2):  # the second over the first
        code, out, err = call("report", run)
        assert (code, err) == (0, "")
        assert out.splitlines() == [
            "mine is done. 100 of 100 updates. Success 75.0 % [68.6, 80.5] of 200 episodes after 100 updates.",
            f"{run / 'report.html'}: open it in a browser",
        ]
        assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_the_page_of_several_lies_in_the_current_directory_or_where_it_is_told(call, run, tmp_path):
    other = make_run(tmp_path / "runs" / "other", learning(), end="failed")
    assert call("report", run, other)[0] == 0
    assert "2 runs: 1 done, 1 failed." in (tmp_path / "report.html").read_text()
    assert not (run / "report.html").exists()
    assert call("report", run, other, "--out", "pages/both.html")[0] == 0
    assert (tmp_path / "pages" / "both.html").exists()


def test_what_cannot_work_is_refused_in_one_line_before_the_page_is_made(call, run, monkeypatch):
    monkeypatch.setattr("pirl.report.sections.build_run_report", None)
    for arguments, said in (
        ((), "needs RUN"),
        (("runs/none",), "no run runs/none"),
        (("runs",), "runs is not a run"),
        (("runs/mine/log.txt",), "is not a run"),
        (("runs/mine", "runs/../runs/mine"), "twice"),
        (("runs/mine", "--out", "runs"), "runs is a directory"),
        (("runs/mine", "--out", "runs/mine/log.txt/page.html"), "no directory"),
        (("runs/mine", "--ouT", "x"), "--out"),
    ):
        code, out, err = call("report", *arguments)
        assert (code, out, said in err, err.count("\n")) == (2, "", True, 1), err


def test_a_report_needs_no_jax(run):
    """It may be asked for beside a run that needs all of the machine."""
    code = (
        "import sys; from pirl.cli.main import parse; parse(sys.argv[1:]).run(); "
        "print([name for name in ('jax', 'orbax') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, "report", str(run)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
