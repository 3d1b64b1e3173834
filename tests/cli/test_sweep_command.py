"""`pirl sweep`: what it refuses before anything starts, what it says it will do, and what it shows in the end."""

import functools
import importlib.util
import json
import shlex
import sys
from pathlib import Path

import pytest

from pirl.cli.main import _parse
from pirl.sweep import plan

ROOT = Path(__file__).parents[2]
FAKE = (sys.executable, str(ROOT / "tests/sweep/fake_trainer.py"))
needs_optuna = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="Optuna is not installed")
RATES = ("--knob", "agent.optimizer.peak-lr=1e-4,1e-3,1e-2")
BASE = ("sweep", "demo_state_bc", "--exp-name", "rate", "--data.repo-id", ".", "--evaluation.every", "500")


@pytest.fixture
def with_optuna(monkeypatch):
    """As if it were installed: nothing that is refused or only shown needs it."""
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: name == "optuna" or find(name, *rest))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*BASE,), "pass at least one, such as --knob agent.optimizer.peak-lr="),
        (("sweep", "demo_state_bc", *RATES), "needs a name: --exp-name"),
        ((*BASE, *RATES, "--exp-name", "../up"), "is not a directory name"),
        ((*BASE, "--knob", "agent.optimizer.peek-lr=1,2"), "Did you mean agent.optimizer.peak-lr?"),
        ((*BASE, "--knob", "agent.optimizer.peak-lr=1,fast"), "--agent.optimizer.peak-lr should be a number"),
        ((*BASE, *RATES, "--batch-size", "0"), "batch_size = 0 should be 1 or more"),
        ((*BASE, *RATES, "--batch-size", "few"), "pirl sweep: --batch-size should be a whole number; it is 'few'"),
        ((*BASE, *RATES, "--knob", "evaluation.every=1,2"), "this field is set twice"),
        ((*BASE, *RATES, "--metric", "eval/succes"), "Did you mean eval/success?"),
        ((*BASE, *RATES, "--trails", "3"), "Did you mean --trials?"),
        ((*BASE, *RATES, "--rungs", "5,3"), "each larger than the one before"),
        ((*BASE, *RATES, "--rungs", "5", "--iterations", "9"), "leave them out"),
        ((*BASE, *RATES, "--reduction", "1"), "should be 2 or more"),
        ((*BASE, *RATES, "--iterations", "9", "--min-iterations", "10"), "should be from 1 to 9"),
        ((*BASE, *RATES, "--resume", "--overwrite"), "choose one"),
        ((*BASE, *RATES, "--resume"), "nothing to resume"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(call, with_optuna, tmp_path, arguments, words):
    if words == "nothing to resume":
        pytest.importorskip("optuna")
    code, _, err = call(*arguments)
    assert code == 2
    assert words in err
    assert not (tmp_path / "runs").exists()


def test_without_optuna_it_says_how_to_get_it(call, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "optuna" else find(name, *rest))
    code, _, err = call(*BASE, *RATES)
    assert (code, err) == (2, "error: a sweep needs Optuna, which is not installed: pip install 'pirl[sweep]'.\n")


def test_a_dry_run_says_how_much_it_is(call, with_optuna, tmp_path):
    knobs = (*RATES, "--knob", "batch-size=8..64")
    code, out, _ = call(*BASE, *knobs, "--rungs", "5,15,45", "--trials", "9", "--dry-run")
    assert code == 0
    said = " ".join(out.split())
    assert "trials 9, half at random, then by TPE: 9 to 5, 3 to 15, 1 to 45 updates" in said
    assert "105 updates in total, instead of 405" in said
    assert "batch-size 8 to 64" in said
    assert not (tmp_path / "runs").exists()


def test_help_shows_what_can_be_a_knob(call):
    code, out, _ = call("sweep", "demo_state_bc", "--help")
    assert code == 0
    assert out.startswith("usage: pirl sweep [PRESET] --exp-name NAME --knob FIELD=VALUES [OPTIONS]\n")
    assert "--min-iterations" in out
    assert "--agent.optimizer.peak-lr" in out
    assert call("sweep", "--help")[0] == 0


@needs_optuna
def test_it_ends_with_a_table_and_the_command_for_the_best(call, monkeypatch, tmp_path):
    monkeypatch.setattr(plan, "SweepPlan", functools.partial(plan.SweepPlan, program=FAKE))
    code, out, err = call(*BASE, *RATES, "--rungs", "2,4", "--runs-dir", "here")
    assert code == 0
    rows = [
        line.split() for line in out.splitlines() if line.rstrip().endswith(("trial-000", "trial-001", "trial-002"))
    ]
    assert [row[:3] for row in rows] == [["1", "1e-3", "4"], ["2", "1e-4", "2"], ["3", "1e-2", "2"]]
    assert rows[0][-1] == "here/rate/trial-001"
    assert out.splitlines()[-1].strip() == (
        "pirl train demo_state_bc --exp-name rate-best --data.repo-id=. --evaluation.every=500 --runs-dir=here "
        "--agent.optimizer.peak-lr=1e-3 --steps=1500"
    )
    assert _parse(shlex.split(out.splitlines()[-1])[1:]).resolve().agent.optimizer.peak_lr == 1e-3
    assert (tmp_path / "here/rate/sweep.html").exists()
    code, _, err = call(*BASE, *RATES, "--rungs", "2,4", "--runs-dir", "here")
    assert (code, "--resume continues it" in err) == (2, True)


@needs_optuna
def test_if_all_fail_the_exit_code_is_1(call, monkeypatch):
    monkeypatch.setattr(plan, "SweepPlan", functools.partial(plan.SweepPlan, program=FAKE))
    knob = ("--knob", "agent.optimizer.peak-lr=1e-9,1e-8")
    code, _, err = call(*BASE, *knob, "--rungs", "2,4", "--runs-dir", "here")
    assert code == 1
    assert "error: the loss is not finite." in err


def test_the_commands_of_the_documentation_are_commands():
    text = (ROOT / "docs/sweep.md").read_text().split("```text\n")[1].split("```")[0]
    commands = [shlex.split(line) for line in text.splitlines()]
    assert len(commands) == 4
    for words in commands:
        command = _parse(words[1:])
        assert command.knob
        assert command.resolve().evaluation.every


@pytest.mark.slow
@needs_optuna
def test_a_sweep_of_real_runs(call, tmp_path):
    table = ("--env", "tabletop", "--env.observation", "state")
    assert call("collect", *table, "--policy", "expert", "--episodes", 8, "--out", "data")[0] == 0
    knob = ("--knob", "agent.policy-optimizer.peak-lr=1e-4,1e-3")
    options = ("--data.repo-id", "data", "--online.env-steps", 0, "--rungs", "2,4", *knob)
    code, out, err = call("sweep", "debug", "--exp-name", "real", *options)
    assert code == 0, err
    results = json.loads((tmp_path / "runs/real/sweep.json").read_text())
    best = results["best"]
    assert list(best["rungs"]) == ["2", "4"]
    assert best["rungs"]["4"]["low"] <= best["rungs"]["4"]["value"] <= best["rungs"]["4"]["high"]
    run = tmp_path / "runs/real" / best["name"]
    # Resumed, not begun again.
    assert json.loads((run / "metadata.json").read_text())["resumed"][0]["step"] == 2
    assert best["name"] in out
