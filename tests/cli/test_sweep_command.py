"""`pirl sweep`: what it refuses before anything starts, what it says it will do, and what it shows in the end."""

import importlib.util
import json
import shlex
import sys
from pathlib import Path

import pytest

from pirl.cli.main import parse
from pirl.sweep import plan

ROOT = Path(__file__).parents[2]
FAKE = (sys.executable, str(ROOT / "tests/sweep/fake_trainer.py"))
RATES = ("--param", "agent.optimizer.peak-lr=1e-4,1e-3,1e-2")
BASE = ("sweep", "demo_state_bc", "--exp-name", "rate", "--data.repo-id", ".", "--evaluation.every", "500")


def test_without_optuna_it_says_how_to_get_it(call, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "optuna" else find(name, *rest))
    code, _, err = call(*BASE, *RATES)
    assert (code, err) == (2, "error: a sweep needs Optuna, which is not installed: pip install 'pirl[sweep]'.\n")


def test_a_dry_run_says_how_much_it_is(call, tmp_path):
    space = (*RATES, "--param", "batch-size=8..64")
    code, out, _ = call(*BASE, *space, "--rungs", "5,15,45", "--trials", "9", "--dry-run")
    assert code == 0
    said = " ".join(out.split())
    assert "trials 9, half at random, then by TPE: 9 to 5, 3 to 15, 1 to 45 updates" in said
    assert "105 updates in total, instead of 405" in said
    assert "batch-size 8 to 64" in said
    assert not (tmp_path / "runs").exists()


def test_help_shows_what_can_be_searched(call):
    code, out, _ = call("sweep", "demo_state_bc", "--help")
    assert code == 0
    assert "--min-iterations" in out
    assert "--agent.optimizer.peak-lr" in out
    assert call("sweep", "--help")[0] == 0


def test_it_ends_with_a_table_and_the_command_for_the_best(call, monkeypatch, tmp_path):
    monkeypatch.setattr(plan, "pirl_command", lambda: FAKE)
    code, out, err = call(*BASE, *RATES, "--rungs", "2,4", "--runs-dir", "here")
    assert code == 0
    rows = [line.split()[:4] for line in out.splitlines() if line.startswith("trial-") and " is " not in line]
    assert rows == [["trial-001", "1", "1e-3", "4"], ["trial-000", "2", "1e-4", "2"], ["trial-002", "3", "1e-2", "2"]]
    assert out.splitlines()[-1].strip() == (
        "pirl train demo_state_bc --exp-name rate-best --data.repo-id=. --evaluation.every=500 --runs-dir=here "
        "--agent.optimizer.peak-lr=1e-3 --steps=1500"
    )
    assert parse(shlex.split(out.splitlines()[-1])[1:]).resolve().agent.optimizer.peak_lr == 1e-3
    assert (tmp_path / "here/rate/sweep.html").exists()
    code, _, err = call(*BASE, *RATES, "--rungs", "2,4", "--runs-dir", "here")
    assert (code, "--resume continues it" in err) == (2, True)


def test_if_all_fail_the_exit_code_is_1(call, monkeypatch):
    monkeypatch.setattr(plan, "pirl_command", lambda: FAKE)
    param = ("--param", "agent.optimizer.peak-lr=1e-9,1e-8")
    code, _, err = call(*BASE, *param, "--rungs", "2,4", "--runs-dir", "here")
    assert code == 1
    assert "error: the loss is not finite." in err


@pytest.mark.slow
def test_a_sweep_of_real_runs(call, tmp_path):
    table = ("--env", "tabletop", "--env.observation", "state")
    assert call("collect", *table, "--policy", "expert", "--episodes", 8, "--out", "data")[0] == 0
    param = ("--param", "agent.policy-optimizer.peak-lr=1e-4,1e-3")
    options = ("--data.repo-id", "data", "--online.env-steps", 0, "--rungs", "2,4", *param)
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
