"""A demo goes on as it was begun, compares what it claims to, and runs from nothing to a report."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_runs import save, write_dataset

from pirl.cli.main import parse
from pirl.config import list_configs
from pirl.demo.plans import ACRLPD, DEMOS, RIPT
from pirl.demo.run import describe_episodes, make_results, next_commands, run_demo, summarize
from pirl.envs.evaluation import EpisodeResult, Evaluation
from pirl.errors import DataError
from pirl.jobs import lock_directory

# --- the directory -----------------------------------------------------------------------------------------------


@pytest.fixture
def begin(monkeypatch):
    """Runs a demo that has no steps and no results."""
    monkeypatch.setattr("pirl.demo.run.run_steps", lambda *_, **__: {})
    monkeypatch.setattr("pirl.demo.run.make_results", lambda *_: {})
    return run_demo


def test_a_demo_continues_only_as_it_was_begun(tmp_path, begin):
    demo = ACRLPD.configure(out=tmp_path / "demo", episodes=20)
    begin(demo)
    begin(demo)
    other = replace(demo, demonstrations=7)
    with pytest.raises(DataError, match="demonstrations: 500 before, 7 now"):
        begin(other)
    (demo.out / "data").mkdir()
    (demo.out / "mine.txt").touch()
    begin(other, overwrite=True)
    assert not (demo.out / "data").exists()
    assert (demo.out / "mine.txt").exists()
    with pytest.raises(DataError, match="pirl demo before, pirl demo ript now"):
        begin(RIPT.configure(out=demo.out, episodes=20))


def test_nobody_elses_directory_is_touched(tmp_path, begin):
    (tmp_path / "mine.txt").touch()
    for overwrite in (False, True):
        with pytest.raises(DataError, match="contains no demo"):
            begin(ACRLPD.configure(out=tmp_path), overwrite=overwrite)
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]


def test_two_demos_do_not_share_a_directory(tmp_path, begin):
    demo = ACRLPD.configure(out=tmp_path / "demo")
    demo.out.mkdir()
    with (
        lock_directory(demo.out, "pirl demo"),
        pytest.raises(DataError, match=f"another `pirl demo` .process {os.getpid()}. works in"),
    ):
        begin(replace(demo, out=demo.out))


# --- results -----------------------------------------------------------------------------------------------------


def evaluation(successes, policy="", episodes=20, **settings):
    results = tuple(
        EpisodeResult(index, "task", "prompt", 100 + index, index in successes, 1.0, 30, True, False, None)
        for index in range(episodes)
    )
    return Evaluation(results, {"policy": policy, "seed": 0, "envs": 16, **settings}, 1.0)


def write_evaluation(config, key, successes, step):
    file = config.evaluation(key)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(evaluation(successes, f"/x/checkpoints/{step}").to_json()))


@pytest.fixture
def measured(tmp_path):
    """A demo whose policies were measured: the baseline succeeds from the first 4 of 20 starts."""
    config = ACRLPD.configure(out=tmp_path / "demo", episodes=20)
    steps = {"bc": 4000, "bc_more": 3000, "bc_successes": 1000, "bc_successes_more": 2000}
    for run, step in steps.items():
        save(config.out / run, step)
    save(config.out / "acrlpd", 6100, {"step": 1, "online/env_steps": 70}, {"step": 3, "online/env_steps": 1234})
    successes = {"bc": 4, "bc_more": 4, "bc_successes": 6, "bc_successes_more": 7, "acrlpd_offline": 12, "acrlpd": 18}
    for key, count in successes.items():
        write_evaluation(config, key, range(count), {**steps, "acrlpd": 6100}.get(key, 6000))
    during = config.out / "acrlpd" / "evaluations"
    during.mkdir()
    for step, found in ((500, range(3)), (6050, range(1, 20))):
        (during / f"{step}.json").write_text(json.dumps(evaluation(found, step=step).to_json()))
    write_dataset(config.out / "data", successes=3, failures=2)
    return config


@pytest.fixture
def rolled_out(tmp_path):
    """RIPT's demo, measured: the start policy succeeds from the first 8 of 20 starts, RIPT from the last 16."""
    config = RIPT.configure(out=tmp_path / "demo", episodes=20)
    for run, step in (("start", 1500), ("bc_more", 400), ("filtered_bc", 400)):
        save(config.out / run, step)
        write_evaluation(config, run, range(8), step)
    save(config.out / "ript", 400, {"step": 0, "rollout/env_steps": 60}, {"step": 400, "loss": 0.1})
    write_evaluation(config, "ript", range(4, 20), 400)
    write_dataset(config.out / "data", successes=3, failures=2)
    write_dataset(config.out / "own", successes=2, failures=5)
    return config


def test_results_hold_rates_intervals_and_a_paired_comparison_with_the_baseline(measured):
    seconds = {"train_bc": 60.0, "train_acrlpd": 120.0}
    results = make_results(measured, seconds)
    assert list(results) == [*ACRLPD.names, "about"]
    assert [results[key]["success"] for key in ACRLPD.names] == [0.2, 0.2, 0.3, 0.35, 0.6, 0.9, 0.95]
    # Wilson's interval of 18 of 20, by its closed form.
    assert [results["acrlpd"][edge] for edge in ("low", "high")] == pytest.approx([0.69896, 0.97214], abs=5e-5)
    assert results["acrlpd"]["episodes"] == 20
    assert results["acrlpd"]["successes"] == 18
    warmup, every = measured.rl.agent.critic_warmup_steps, measured.rl.agent.actor_every
    learned = [5000 + (step - warmup) // every for step in (6000, 6100, 6050)]
    assert [results[key]["updates"] for key in ACRLPD.names] == [4000, 7000, 5000, 7000, *learned]
    assert results["acrlpd"]["minutes"] == 3.0
    assert results["acrlpd"]["env_steps"] == 1234
    assert results["bc"]["env_steps"] == 0
    # Nobody has measured when the offline part ended.
    assert "minutes" not in results["acrlpd_offline"]
    assert "paired" not in results["bc"]
    assert results["bc_more"]["paired"]["p_value"] == 1.0
    # 14 starts are won and none lost: McNemar's exact p is 2 · 2⁻¹⁴.
    assert results["acrlpd"]["paired"]["p_value"] == pytest.approx(2 * 0.5**14)
    assert results["acrlpd"]["paired"]["difference"] == pytest.approx(0.7)
    # Of the learner with its critics start 0 is lost, which the baseline has.
    pairs = {"both": 3, "only_first": 1, "only_second": 16, "neither": 0}
    assert results["acrlpd_best_of_n"]["paired"]["pairs"] == pairs
    assert results["about"]["demonstrations"] == describe_episodes(measured.out / "data")
    assert results["about"]["demonstrations"] == {"episodes": 5, "successes": 3, "success": 0.6, "frames": 50}


def test_results_of_ript_say_who_has_acted_how_much(rolled_out):
    results = make_results(rolled_out, {"train_start": 60.0, "train_ript": 240.0})
    assert results.keys() == {"start", "ript", "bc_more", "filtered_bc", "about"}
    assert list(RIPT.names) == ["start", "bc_more", "filtered_bc", "ript"]
    assert [results[key]["success"] for key in RIPT.names] == [0.4, 0.4, 0.4, 0.8]
    assert [results[key]["env_steps"] for key in RIPT.names] == [0, 0, 70, 60]
    assert [results[key]["updates"] for key in RIPT.names] == [1500, 1900, 1900, 1900]
    assert results["ript"]["minutes"] == 5.0
    assert results["ript"]["paired"]["pairs"] == {"both": 4, "only_first": 4, "only_second": 12, "neither": 0}
    assert summarize(rolled_out, results).startswith("RIPT 80.0 % [")
    assert " against Start policy 40.0 % [" in summarize(rolled_out, results)
    assert "No significant difference between Start policy and RIPT: +40.0 points [" in summarize(rolled_out, results)


def test_what_to_run_next_can_be_pasted_whatever_the_directory_is_called(rolled_out):
    named = replace(rolled_out, out=Path("my demos; really"))
    watch, compare, check, train = (shlex.split(line) for line in next_commands(named, {"ript": {"step": 400}}))
    ript = str(named.out / "ript")
    assert watch[-3:] == [ript, "--out", f"{named.out}/film.gif"]
    assert compare == ["pirl", "eval", str(named.out / "filtered_bc"), ript, "--denoising-steps", "10"]
    assert check == ["pirl", "convert", f"{ript}/checkpoints/400", "--check"]
    assert parse(train[1:]).preset in list_configs()
    assert [parse(words[1:]) for words in (watch, compare, check)]


def test_a_damaged_evaluation_is_named(measured):
    measured.evaluation("bc_more").write_text("{")
    with pytest.raises(DataError, match="bc_more.json is no evaluation"):
        make_results(measured, {})


# --- the whole of it ---------------------------------------------------------------------------------------------


SHOWN = {
    "acrlpd": ("two cameras", "pirl collect --env tabletop --policy", "What the critics see", "data:image/png"),
    "acrlpd_state": ("ACRLPD offline", "tabletop --env.observation state", "What the critics see", "data:image/png"),
    "ript": ("BC, own successes", "--env-steps", "Before and after", "Success in rollouts", "data:image/png"),
}


@pytest.mark.slow
@pytest.mark.parametrize("learner", DEMOS)
def test_the_quick_demo_runs_from_nothing_to_a_report(tmp_path, learner):
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "PIRL_CACHE": str(tmp_path / "cache"),
        "COLUMNS": "200",
    }
    plan = DEMOS[learner]
    pirl = [str(Path(sys.executable).with_name("pirl")), *plan.command.split()[1:], "--quick"]
    done = subprocess.run(pirl, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / plan.out / "results.json").read_text())
    assert {*plan.names, "about"} - {"acrlpd_best_of_n"} <= results.keys()
    page = (tmp_path / plan.out / "report.html").read_text()
    for part in SHOWN[learner]:
        assert part in page
    assert f"{plan.out}/report.html" in done.stdout
    checked = next(line.split("next")[-1].strip() for line in done.stdout.splitlines() if "convert" in line).split()
    subprocess.run([pirl[0], *checked[1:]], cwd=tmp_path, env=environment, check=True, capture_output=True)
    again = subprocess.run(pirl, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert again.stderr.count("there already") == len(plan.configure(quick=True).steps())
