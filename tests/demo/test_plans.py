"""Each demo's commands are ones that pirl understands, and its controls are fair."""

import json
import re
from dataclasses import asdict, replace

import pytest
from fake_runs import save

from pirl.demo.plans import ACRLPD_EXPERT, DEMOS, RIPT, RIPT_EXPERT
from pirl.demo.run import draw_curves
from pirl.errors import DataError


def parse(config):
    """The commands of a demo by the name of their step, as pirl reads them."""
    from pirl.cli.main import parse as parse_command

    return {step.name: parse_command(step.command) for step in config.steps()}


def rollouts_of(iterations, env_steps):
    """What is logged of iterations of RIPT, the last of them without updates."""
    for number in range(1, iterations + 1):
        step = 10 * min(number, iterations - 1)
        steps = {"rollout/env_steps": env_steps * number // iterations}
        yield {"step": step, "rollout/contexts": 9, "rollout/success": 0.5} | steps
        yield {"step": step, "rollout/drift": 0.1} | steps
        yield {"step": step, "loss": 0.1}


def is_measured_alike(config, steps):
    """Whether all evaluations are of the same starts, which are not those of anybody who rolls out or demonstrates."""
    evaluations = [step for name, step in steps.items() if name.startswith("eval_")]
    collections = [step for name, step in steps.items() if name.startswith("collect")]
    how = config.rl.evaluation
    assert {(each.seed, each.episodes, each.execute_steps, each.envs, each.env) for each in evaluations} == {
        (how.seed, 20, how.execute_steps, how.envs, "tabletop")
    }
    assert {each.denoising_steps for each in evaluations} == {10}, "what the published numbers were measured with"
    rolled_out = {each.seed for each in collections} | {config.rl.online.seed, config.rl.rollout.seed}
    return how.seed not in rolled_out


@pytest.mark.parametrize(("plan", "quick"), [("acrlpd", False), ("acrlpd_state", True)])
def test_acrlpd_and_its_controls_make_as_many_policy_updates(tmp_path, plan, quick):
    """The arguments are parsed, and what they configure is checked as far as it goes without the data."""
    config = DEMOS[plan].configure(out=tmp_path / "demo", episodes=20, demonstrations=30, quick=quick)
    steps = parse(config)
    assert steps["collect"].expert == ACRLPD_EXPERT
    assert (steps["collect"].out, steps["collect"].episodes) == (config.out / "data", 30)
    extra = steps["train_acrlpd"].resolve()
    online = int(extra.online.env_steps * extra.online.utd_ratio)
    total = extra.steps + online - online % extra.online.updates_per_scan
    warmup, every = extra.agent.critic_warmup_steps, extra.agent.actor_every
    turns = sum(step >= warmup and (step - warmup) % every == every - 1 for step in range(total))
    runs = {name: steps[f"train_{name}"].resolve() for name in ("bc_more", "bc_successes", "bc_successes_more")}
    for name, control in runs.items():
        # They end as BC does, and half as fast before.
        if not quick:
            pace = replace(config.bc.agent.optimizer, peak_lr=1e-3, decay_steps=control.steps)
            assert control.agent.optimizer == pace
        assert control.data.selection.success is (None if name == "bc_more" else True)
        assert control.batch_size == steps["train_bc"].resolve().batch_size == extra.batch_size
    # Each path begins with BC, and has as many updates in all.
    assert runs["bc_more"].checkpoint == runs["bc_successes"].checkpoint == str(config.out / "bc")
    assert runs["bc_successes_more"].checkpoint == extra.checkpoint == str(config.out / "bc_successes")
    assert runs["bc_successes_more"].steps == turns > 0
    assert runs["bc_more"].steps == runs["bc_successes"].steps + turns
    assert sum(name.startswith("eval_") for name in steps) == 6
    assert is_measured_alike(config, steps)
    assert extra.evaluation.episodes == 20


@pytest.mark.parametrize(
    ("options", "out", "presets", "observation"),
    [
        ((), "runs/demo", ("demo_bc", "demo"), "pixels"),
        (("--observation", "state"), "runs/demo_state", ("demo_state_bc", "demo_state"), "state"),
    ],
)
def test_policies_observe_what_was_asked_for(monkeypatch, options, out, presets, observation):
    """Demonstrations, training and evaluation agree; pixels unless the state is asked for."""
    from pirl.cli.main import main

    asked = []

    def stop(config, **_):
        asked.append(config)
        raise DataError("enough")

    monkeypatch.setattr("pirl.demo.run.run_demo", stop)
    with pytest.raises(SystemExit, match="2"):
        main(["demo", *options])
    (config,) = asked
    assert str(config.out) == out
    steps = parse(config)
    for name, step in steps.items():
        if name.startswith("train"):
            assert step.preset == presets[name == "train_acrlpd"]
            trained = step.resolve()
            assert (trained.data.robot, bool(trained.model.cameras)) == {
                "pixels": ("tabletop", True),
                "state": ("tabletop_state", False),
            }[observation]
        env = trained.env if name.startswith("train") else step.env_config()
        assert env.id == "tabletop"
        assert env.options.get("observation", "pixels") == observation


def test_ript_offers_no_choice_of_observation(capsys):
    from pirl.cli.main import main

    with pytest.raises(SystemExit, match="2"):
        main(["demo", "ript", "--observation", "state"])
    assert "pirl demo ript has no --observation" in capsys.readouterr().err


@pytest.mark.parametrize("quick", [False, True])
def test_the_controls_of_ript_get_what_ript_has_had(tmp_path, quick):
    """As many updates of as many chunks, as fast, or as many steps in the environment; known when RIPT is through."""
    config = RIPT.configure(out=tmp_path / "demo", episodes=20, quick=quick)
    save(config.out / "ript", 137, *rollouts_of(3, 4321))
    steps = parse(config)
    assert steps["collect"].expert == RIPT_EXPERT
    ript, start = steps["train_ript"].resolve(), steps["train_start"].resolve()
    assert ript.checkpoint == str(config.out / "start")
    assert ript.data.repo_id is None
    assert ript == replace(config.rl, checkpoint=ript.checkpoint, runs_dir=config.out)
    own = steps["collect_own"]
    assert (own.policy, own.env_steps, own.episodes) == (str(config.out / "start"), 4321, None)
    assert own.execute_steps == ript.evaluation.execute_steps
    for name, data in (("bc_more", config.out / "data"), ("filtered_bc", own.out)):
        control = steps[f"train_{name}"].resolve()
        assert control.steps == 137
        assert (control.checkpoint, control.from_scratch) == (ript.checkpoint, False)
        assert control.batch_size == ript.batch_size
        assert asdict(control.agent.optimizer) == asdict(ript.agent.optimizer)
        assert (control.data.repo_id, control.data.norm_stats) == (str(data), "checkpoint")
        assert control.data.robot == start.data.robot
    # Ten updates make nothing that succeeds.
    assert steps["train_filtered_bc"].resolve().data.selection.success is (None if quick else True)
    assert steps["train_bc_more"].resolve().data.selection.success is None
    assert {name for name in steps if name.startswith("eval_")} == {f"eval_{key}" for key in config.names}
    assert is_measured_alike(config, steps)


def test_a_run_is_whole_when_it_was_saved_and_not_stopped(tmp_path):
    """A trainer that a scheduler ends says 0, though it is not through."""
    config = RIPT.configure(out=tmp_path / "demo")
    step = next(step for step in config.steps() if step.name == "train_ript")
    assert not step.is_whole()
    save(config.out / "ript", 500)
    assert step.is_whole()
    (config.out / "ript/metadata.json").write_text('{"stopped": true}')
    assert not step.is_whole()


def test_controls_of_a_ript_that_learned_nothing_make_one_update(tmp_path):
    config = RIPT.configure(out=tmp_path / "demo", quick=True)
    save(config.out / "ript", 0, *rollouts_of(2, 640))
    assert parse(config)["train_bc_more"].resolve().steps == 1


def test_a_demo_speaks_only_of_policies_that_it_has_and_keeps_what_it_measures():
    for demo in DEMOS.values():
        keys = set(demo.names)
        assert {demo.baseline, demo.subject, demo.rival, *demo.runs} <= keys
        assert len(keys) == len(demo.policies) == len(set(demo.names.values()))
        # The policy at the end of the offline phase is evaluated after the online one.
        if demo.rl.online.env_steps:
            assert demo.rl.checkpoints.keep_period
            assert demo.rl.steps % demo.rl.checkpoints.keep_period == 0


def test_axes_say_what_they_count(tmp_path):
    config = RIPT.configure(out=tmp_path)
    records = [{"step": step, "loss": 1.0, "rollout/env_steps": 50 * step, "rollout/success": 0.5} for step in (10, 20)]
    for run in config.runs:
        (config.out / run).mkdir()
        (config.out / run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    rollouts, training = (section.body for section in draw_curves(config, {}))
    assert set(re.findall('data-unit="(.*?)"', rollouts)) == {"environment steps"}
    assert set(re.findall('data-unit="(.*?)"', training)) == {"updates"}
